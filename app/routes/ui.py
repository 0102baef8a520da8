"""The page at /ui: files of this package, read once, and nothing but these. It holds no data, so it needs no key."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from app.errors import ApiError

PAGE = "index.html"
SCRIPTS = ("api", "arcs", "charts", "clusters", "draw", "export", "graph", "heads", "live", "main", "matrix", "tokens")
TYPES = {PAGE: "text/html; charset=utf-8", "style.css": "text/css; charset=utf-8", "icon.svg": "image/svg+xml"} | {
    f"{name}.js": "text/javascript; charset=utf-8" for name in SCRIPTS
}
HEADERS = {
    "cache-control": "no-cache",  # asked for anew each time, answered by 304: never a page older than the service
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class File:
    """One file of the page. etag: of its content."""

    content: bytes
    media_type: str
    etag: str


def _read(name: str) -> File:
    content = (files("app") / "ui" / name).read_bytes()
    return File(content, TYPES[name], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


FILES: Mapping[str, File] = {name: _read(name) for name in TYPES}


@router.api_route("/ui", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    """The page itself."""
    return _answer(request, FILES[PAGE])


@router.api_route("/ui/{name}", methods=["GET", "HEAD"])
async def part(request: Request, name: str) -> Response:
    """What the page is made of."""
    if name not in FILES:
        raise ApiError(404, "not_found", "expected a file of the page, found none")
    return _answer(request, FILES[name])


@router.api_route("/", methods=["GET", "HEAD"])
@router.api_route("/ui/", methods=["GET", "HEAD"])
async def start() -> Response:
    """To the page, for people who type an address."""
    return RedirectResponse("/ui", 307, HEADERS)


def _answer(request: Request, file: File) -> Response:
    headers = HEADERS | {"etag": file.etag}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
