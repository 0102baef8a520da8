"""POST /admin/reload: another artifact takes over, while requests go on."""

import time
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from app import telemetry
from app.errors import ApiError
from app.routes.common import body_schema, engine_of, figures_of, json_answer, settings_of
from app.schemas import ReloadRequest, parse, read_json

router = APIRouter()


@router.post("/admin/reload", openapi_extra=body_schema(ReloadRequest))
async def reload(request: Request) -> Response:
    """Load another artifact (or the same folder again) and swap it in; whatever fails, the old one serves on."""
    asked = parse(ReloadRequest, await read_json(request))
    figures, started = figures_of(request), time.perf_counter()
    folder = None if asked.artifact is None else _confined(asked.artifact, settings_of(request).root())
    try:
        old, new = await engine_of(request).reload(folder)
    except ApiError as error:
        figures.reloads.labels(error.code).inc()
        raise
    figures.reloads.labels("ok").inc()
    figures.serving(new.artifact, new.version)
    telemetry.log("reloaded", old=old.version, new=new.version)
    named = [{"artifact": one.artifact, "version": one.version, "predictor": one.predictor} for one in (old, new)]
    return json_answer({"old": named[0], "new": named[1], "seconds": round(time.perf_counter() - started, 3)})


def _confined(path: str, root: Path) -> Path:
    """`path` below `root`, links followed; whether anything exists outside is not told."""
    try:
        target = (root / path).resolve()
    except (ValueError, OSError, RuntimeError):
        raise ApiError(422, "invalid_path", "artifact: expected a path", "artifact") from None
    if target == root or not target.is_relative_to(root):
        raise ApiError(422, "artifact_outside_root", "artifact: expected a folder below the artifacts root", "artifact")
    if not target.is_dir():
        raise ApiError(
            404, "artifact_not_found", "artifact: expected a folder below the artifacts root, found none", "artifact"
        )
    return target
