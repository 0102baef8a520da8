"""GET /openapi.json: what every route takes and gives; public."""

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.openapi import text_of

router = APIRouter(include_in_schema=False)


@router.get("/openapi.json")
async def described(request: Request) -> Response:
    """The document of the routes of this app."""
    state = request.app.state
    if state.document is None:  # it takes a fifth of a second, once
        state.document = await asyncio.to_thread(text_of, request.app)
    return Response(state.document, media_type="application/json")
