"""The HTTP routes: each checks a request, asks the engine, and says what came out."""

from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import APIRoute

from app.routes import about, admin, described, embeddings, fill_mask, graphs, health, score, tokenize, ui
from app.routes.common import admin_key, api_key

OPEN = (health.router, described.router, ui.router)
FOR_API_KEYS = (embeddings.router, fill_mask.router, score.router, tokenize.router, graphs.router, about.router)
FOR_ADMIN_KEYS = (admin.router,)


def install(app: FastAPI) -> None:
    """Add every route. All of them are in `app.state.routes`, for whoever needs to know what a path answers to."""
    app.state.routes, app.state.document = [], None  # the document: see routes.described
    for routers, needs in ((OPEN, []), (FOR_API_KEYS, [Depends(api_key)]), (FOR_ADMIN_KEYS, [Depends(admin_key)])):
        for router in (one for known in routers for one in (known, _heads(known))):
            app.include_router(router, dependencies=needs)
            app.state.routes += router.routes


def _heads(router: APIRouter) -> APIRouter:
    """HEAD for every GET of a router; the server leaves the body out."""
    heads = APIRouter()
    for route in (one for one in router.routes if isinstance(one, APIRoute)):
        if "GET" in (route.methods or ()) and "HEAD" not in (route.methods or ()):
            heads.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)
    return heads
