"""The HTTP routes: each checks a request, asks the engine, and says what came out."""

from fastapi import Depends, FastAPI

from app.routes import about, admin, embeddings, fill_mask, graphs, health, score, tokenize, ui
from app.routes.common import admin_key, api_key

OPEN = (health.router, ui.router)
FOR_API_KEYS = (embeddings.router, fill_mask.router, score.router, tokenize.router, graphs.router, about.router)
FOR_ADMIN_KEYS = (admin.router,)


def install(app: FastAPI) -> None:
    """Add every route."""
    for router in OPEN:
        app.include_router(router)
    for router in FOR_API_KEYS:
        app.include_router(router, dependencies=[Depends(api_key)])
    for router in FOR_ADMIN_KEYS:
        app.include_router(router, dependencies=[Depends(admin_key)])
