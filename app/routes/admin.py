"""POST /admin/reload and /admin/rollback: another artifact takes over, while requests go on."""

import time
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from app import telemetry
from app.answers import ReloadAnswer
from app.errors import ApiError
from app.openapi import ADMIN, BODY, LOADED, documented
from app.routes.common import engine_of, figures_of, json_answer, settings_of
from app.schemas import ReloadRequest, Strict, parse, read_json
from app.servable import Description

router = APIRouter()


class RollbackRequest(Strict):
    """An empty object: asked for so that no page of another origin can send it without a browser asking first."""


@router.post(
    "/admin/reload",
    **documented(ReloadAnswer, (*ADMIN, *BODY, *LOADED, 404, 409), ReloadRequest, example={"artifact": "my/artifact"}),
)
async def reload(request: Request) -> Response:
    """Load another artifact (or the same folder again) and swap it in; whatever fails, the old one serves on."""
    asked = parse(ReloadRequest, await read_json(request))
    folder = None if asked.artifact is None else _confined(asked.artifact, settings_of(request).root())
    return await _swap(request, "reloaded", folder)


@router.post("/admin/rollback", **documented(ReloadAnswer, (*ADMIN, *BODY, *LOADED, 409), RollbackRequest))
async def rollback(request: Request) -> Response:
    """Bring back what served before: its folder is read and tried again, and must hold the version that it held."""
    parse(RollbackRequest, await read_json(request))
    serving = engine_of(request).model.description
    before: Description | None = request.app.state.before
    if before is None:
        message = f"no other artifact has served before {serving.artifact} {serving.version}"
        raise ApiError(409, "nothing_to_roll_back", message)
    return await _swap(request, "rolled_back", Path(before.folder), before.version)


async def _swap(request: Request, event: str, folder: Path | None, version: str | None = None) -> Response:
    figures, started = figures_of(request), time.perf_counter()
    try:
        old, new = await engine_of(request).reload(folder, version)
    except ApiError as error:
        figures.reloads.labels(error.code).inc()
        raise
    if old.version != new.version:  # the same once more leaves what was before it
        request.app.state.before = old
    figures.reloads.labels("ok").inc()
    figures.serving(new.artifact, new.version)
    telemetry.log(event, old=old.version, new=new.version)
    named = [{"artifact": one.artifact, "version": one.version, "predictor": one.predictor} for one in (old, new)]
    return json_answer({"old": named[0], "new": named[1], "seconds": round(time.perf_counter() - started, 3)})


def _confined(path: str, root: Path) -> Path:
    """`path` below `root`, links followed; whether anything exists outside is not told."""
    try:
        target = (root / path).resolve()
        there = target.is_dir()  # a name that is too long for the file system raises here
    except (ValueError, OSError, RuntimeError):
        raise ApiError(422, "invalid_path", "artifact: expected a path", "artifact") from None
    if target == root or not target.is_relative_to(root):
        raise ApiError(422, "artifact_outside_root", "artifact: expected a folder below the artifacts root", "artifact")
    if not there:
        message = "artifact: expected a folder below artifacts_root (a setting), found none"
        raise ApiError(404, "artifact_not_found", message, "artifact")
    return target
