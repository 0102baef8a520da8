"""A running service as `sparsefinder-train audit` sees it: one request after the other, with the standard library."""

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from email.message import Message
from typing import Any

from sparsefinder.errors import ConfigError

SECONDS = 150.0  # of one request; the service's own limit is shorter unless it was raised
PATIENCE = 60.0  # how long a service may say that it is busy or loading
LONGEST_WAIT = 5.0
LONGEST_ECHO = 300


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to wherever it points."""

    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass(frozen=True)
class Service:
    """Where it listens, and the key it wants. key_name: the environment variable that a message may name."""

    url: str
    key: str | None = field(default=None, repr=False)
    key_name: str = ""

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"url: expected http://host:port or https://host:port, got {self.url!r}")
        if self.key is not None and not (self.key.isascii() and self.key.isprintable()):
            raise ConfigError(f"{self.key_name}: expected a key of printable ASCII characters")

    def call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object that answers a GET, or a POST of `body`; where the service is busy, asked again.

        Raises:
            ConfigError: nothing answers there, what answers is no such service, or it refuses the request.
        """
        until = time.monotonic() + PATIENCE
        while True:
            status, headers, content = self._once(path, body)
            if status not in (429, 503) or time.monotonic() > until:
                break
            asked = headers.get("retry-after", "1")
            time.sleep(min(LONGEST_WAIT, float(asked) if asked.isdigit() else 1.0))
        if status == 401:
            if self.key:
                raise ConfigError(f"key: the service at {self.url} does not know the one in {self.key_name}")
            hint = f"put it into the environment variable {self.key_name}, or name another with --key-env"
            raise ConfigError(f"key: the service at {self.url} needs one; {hint}")
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
        if status != 200:
            raise ConfigError(f"url: {path} of {self.url} answered {status}{_said(answer)}")
        if not isinstance(answer, dict):
            raise ConfigError(f"url: expected a Sparsefinder service at {self.url}, got something else")
        return answer

    def _once(self, path: str, body: dict[str, Any] | None) -> tuple[int, Message, bytes]:
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if body is None else json.dumps(body).encode()
        opener = urllib.request.build_opener(_NoRedirect)
        try:
            request = urllib.request.Request(self.url.rstrip("/") + path, data, headers)  # noqa: S310  (see above)
            with opener.open(request, timeout=SECONDS) as response:
                return response.status, response.headers, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, error.read()
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            said = getattr(reason, "strerror", None) or str(reason) or type(error).__name__
            message = f"url: no service answers at {self.url} ({said}); start one with sparsefinder-serve"
            raise ConfigError(message) from None


def _said(answer: Any) -> str:
    """The service's own words."""
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return f": {str(message)[:LONGEST_ECHO]}" if message else ""
