"""Which pages of other origins may read answers: none, unless the operator names their origins."""

import re
from collections.abc import Sequence

from app.telemetry import Scope

ANY = "*"
ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:]+\](:[0-9]{1,5})?")
READABLE = (
    "retry-after, x-request-id, x-sparsefinder-artifact, x-sparsefinder-attention, x-sparsefinder-computed-density,"
    " x-sparsefinder-inference-ms, x-sparsefinder-queue-ms, x-sparsefinder-ran,"
    " x-sparsefinder-requested-density, x-sparsefinder-tokens"
)
PREFLIGHT = [
    (b"access-control-allow-methods", b"GET, HEAD, POST"),
    (b"access-control-allow-headers", b"authorization, content-type, traceparent, x-request-id"),
    (b"access-control-max-age", b"600"),
]
Headers = list[tuple[bytes, bytes]]


def granted(scope: Scope, origins: Sequence[str]) -> Headers:
    """The headers that let the page which sent this request read the answer; for others only that answers differ."""
    if not origins:
        return []
    origin = _header(scope, b"origin")
    varies = [(b"vary", b"origin")]
    if origin is None or not (ANY in origins or origin.decode("latin-1") in origins):
        return varies
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", READABLE.encode()),
        *varies,
    ]


def preflight(scope: Scope, origins: Sequence[str]) -> bool:
    """Whether a browser asks here, for a page that may, if it may send the request itself."""
    asks = scope["method"] == "OPTIONS" and _header(scope, b"access-control-request-method") is not None
    return asks and len(granted(scope, origins)) > 1


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)
