"""Plain ASGI around the app: request ids, a limit on bodies, one error shape for whatever else goes wrong."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from app import telemetry
from app.cors import PREFLIGHT, granted, preflight
from app.errors import ApiError, from_exception, response_of
from app.telemetry import Scope, Telemetry
from app.tracing import Tracer

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]

CLIENT_LEFT = 499
# A client that is still sending may never read an answer: what it sends is thrown away, up to these limits.
DRAIN_BYTES = 64 * 1024 * 1024
DRAIN_SECONDS = 5.0


class Envelope:
    """The outermost layer: every answer gets an id, a count and a log line; every exception gets the one shape."""

    def __init__(self, app: App, figures: Telemetry, tracer: Tracer | None = None, origins: Sequence[str] = ()):
        self.app = app
        self.figures = figures
        self.tracer = tracer
        self.origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        facts, started, status = telemetry.begin(scope), time.perf_counter(), 0
        added = [(b"x-request-id", facts.request_id.encode()), *granted(scope, self.origins)]
        if self.tracer is not None:
            self.tracer.begin(scope)

        async def marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        self.figures.running.inc()
        try:
            if preflight(scope, self.origins):
                await marked({"type": "http.response.start", "status": 204, "headers": PREFLIGHT})
                await send({"type": "http.response.body"})
            else:
                await self.app(scope, receive, marked)
        except Exception as error:
            known = from_exception(error)
            facts.code = known.code
            if not isinstance(error, ApiError):
                telemetry.log("exception", logging.ERROR, error, request_id=facts.request_id)
            if status:  # half an answer is out already: only breaking the connection tells the client
                raise
            await response_of(known, facts.request_id)(scope, receive, marked)
        finally:
            self.figures.running.dec()
            self.figures.finish(scope, status or CLIENT_LEFT, started)
            if self.tracer is not None:
                self.tracer.finish(scope, status or CLIENT_LEFT, facts)


class BodyLimit:
    """Read the whole body, at most `limit` bytes of it, before anything else sees the request."""

    def __init__(self, app: App, limit: int):
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its body in hand.

        Raises:
            ApiError: 413 where the body is, or says it is, longer than the limit; 400 for a length that is no number.
        """
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit():
            raise ApiError(400, "bad_request", "content-length: expected a number")
        if int(declared) > self.limit:
            if headers.get(b"expect", b"").lower() != b"100-continue":
                await _drain(receive)
            raise self._too_large()
        body = await self._read(receive)
        if body is None:
            return
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if sent:
                message: Message = await receive()
                return message
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.limit:
                parts.clear()
                if message.get("more_body", False):
                    await _drain(receive)
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> ApiError:
        message = f"body: expected at most {self.limit} bytes, got more"
        return ApiError(413, "body_too_large", message, headers={"connection": "close"})


async def _drain(receive: Receive) -> None:
    size = 0
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            while size < DRAIN_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return
