"""One error shape for every status: {"error": {"message", "type", "code", "param", "request_id"}}."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from app import telemetry
from sparsefinder.errors import NonFiniteError

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error"}
CODES = {
    400: "bad_request",
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
    422: "invalid_request",
    503: "not_ready",
}
LONGEST_ECHO = 80


class ApiError(Exception):
    """An answer other than 200: `code` is for programs, `message` says what was expected and what came."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ):
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})


def printable(text: str) -> str:
    """`text` of a stranger, short and without lone surrogates, so that it can stand in an answer."""
    clean = text.encode("utf-8", "replace").decode("utf-8")
    return clean if len(clean) <= LONGEST_ECHO else clean[:LONGEST_ECHO] + "…"


def type_of(status: int) -> str:
    """The family of an error, as OpenAI's clients know them."""
    return TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def body_of(error: ApiError, request_id: str) -> bytes:
    """The one shape, as bytes; keys are always there."""
    content = {
        "message": error.message,
        "type": type_of(error.status),
        "code": error.code,
        "param": error.param,
        "request_id": request_id,
    }
    return json.dumps({"error": content}, allow_nan=False).encode()


def response_of(error: ApiError, request_id: str) -> Response:
    """The answer for an error."""
    return Response(body_of(error, request_id), error.status, error.headers, media_type="application/json")


def non_finite() -> ApiError:
    """The answer where a vector would hold NaN or infinity."""
    message = "the model gave NaN or infinity for this request; nothing was returned"
    return ApiError(500, "non_finite_output", message)


def from_exception(error: Exception) -> ApiError:
    """What a client hears of an unexpected exception: nothing of its text, which may hold the client's own."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NonFiniteError):
        return non_finite()
    return ApiError(500, "internal_error", f"the request failed inside the service ({type(error).__name__})")


def from_http(error: HTTPException) -> ApiError:
    """Starlette's own 404 and 405, with their headers."""
    code = CODES.get(error.status_code, "http_error")
    return ApiError(error.status_code, code, str(error.detail), headers=error.headers)


def install(app: FastAPI) -> None:
    """Answer every exception of a route in the one shape."""

    async def answer(request: Request, error: Any) -> Response:
        known = from_http(error) if isinstance(error, HTTPException) else error
        if known.status == 405:  # Starlette names the methods of the first route only that has the path
            known.headers = {"allow": ", ".join(_methods(request))}
        telemetry.facts_of(request.scope).code = known.code
        return response_of(known, telemetry.request_id(request.scope))

    app.add_exception_handler(ApiError, answer)
    app.add_exception_handler(HTTPException, answer)


def _methods(request: Request) -> list[str]:
    """What the path of a request answers to."""
    there = [route for route in request.app.state.routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in there for method in getattr(route, "methods", None) or ()})
