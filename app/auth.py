"""Who may call what: bearer keys, compared in constant time.

Health and /metrics are public. With `api_keys`, /v1 and /info need one of them (or an admin key). /admin needs an admin
key; without any configured it works only where nobody else can connect: bound to a loopback address, with no API keys.
"""

import hmac
from collections.abc import Iterable

from pydantic import SecretStr
from starlette.requests import Request

from app.errors import ApiError
from app.settings import Settings

_BEARER = {"www-authenticate": "Bearer"}


def _bearer(request: Request) -> bytes | None:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip().encode("latin-1") if scheme.lower() == "bearer" and key.strip() else None


def _missing(key: str) -> ApiError:
    message = f"expected the header `Authorization: Bearer {key}`, got none"
    return ApiError(401, "missing_api_key", message, headers=_BEARER)


def _known(key: bytes, keys: Iterable[SecretStr]) -> bool:
    # Every key is compared, whatever the earlier ones gave: the time must not say which one came near.
    return sum(hmac.compare_digest(key, known.get_secret_value().encode()) for known in keys) > 0


def require_api_key(request: Request, settings: Settings) -> None:
    """Raise 401 where API keys are configured and the request carries none of them."""
    if not settings.api_keys:
        return
    key = _bearer(request)
    if key is None:
        raise _missing("<key>")
    if not _known(key, [*settings.api_keys, *settings.admin_keys]):
        raise ApiError(401, "invalid_api_key", "the key is not known here", headers=_BEARER)


def require_admin_key(request: Request, settings: Settings) -> None:
    """Raise 401 without a valid admin key; 403 where none is configured and others than this machine can connect."""
    if settings.admin_open:
        return
    if not settings.admin_keys:
        rule = "set SPARSEFINDER_ADMIN_KEYS (without, /admin needs a loopback address and no API keys)"
        raise ApiError(403, "admin_disabled", f"no admin key is configured: {rule}")
    key = _bearer(request)
    if key is None:
        raise _missing("<admin key>")
    if not _known(key, settings.admin_keys):
        raise ApiError(401, "invalid_api_key", "the key is not an admin key", headers=_BEARER)
