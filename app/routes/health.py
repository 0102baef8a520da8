"""Whether the process lives, whether its model answers, and its figures; all public."""

import asyncio

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import PlainTextResponse, Response

from app.answers import Alive, Ready
from app.openapi import LOADED, documented
from app.routes.common import engine_of, figures_of, json_answer

router = APIRouter()


@router.get("/livez", **documented(Alive))
async def livez() -> Response:
    """The process answers."""
    return json_answer({"status": "ok"})


@router.get("/readyz", **documented(Ready, LOADED))
async def readyz(request: Request) -> Response:
    """A model is loaded, and its last forward pass (or a new probe) succeeded; else 503 with the reason."""
    description = await engine_of(request).ready()
    return json_answer({"status": "ok", "artifact": description.artifact, "version": description.version})


@router.get("/metrics", response_class=PlainTextResponse, **documented(None))
async def metrics(request: Request) -> Response:
    """Figures in Prometheus' text format."""
    # Beside the event loop: live figures are computed when they are read.
    text = await asyncio.to_thread(generate_latest, figures_of(request).registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
