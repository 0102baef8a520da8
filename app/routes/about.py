"""What is served: the model, its settings, and how sparse and how true its attention is."""

import asyncio
import platform
import time
from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.answers import InfoAnswer, ModelsAnswer, SparsityAnswer
from app.openapi import KEYED, LOADED, documented
from app.routes.common import engine_of, json_answer, settings_of

ESTIMATOR = "sum of kept gold pairs / sum of gold pairs over audited rows; interval: 95 % bootstrap over requests"
LIBRARIES = ("sparsefinder", "torch", "transformers", "tokenizers", "numba", "numpy", "fastapi", "uvicorn")

router = APIRouter()


@router.get("/v1/models", **documented(ModelsAnswer, (*KEYED, *LOADED)))
async def models(request: Request) -> Response:
    """The one model that this process serves."""
    settings, engine = settings_of(request), engine_of(request)
    about = {"artifact": engine.model.description.version, "attention": engine.model.description.modes}
    created = request.app.state.created
    entry = {
        "id": settings.name(),
        "object": "model",
        "created": created,
        "owned_by": "sparsefinder",
        "sparsefinder": about,
    }
    return json_answer({"object": "list", "data": [entry]})


@router.get("/v1/sparsity", **documented(SparsityAnswer, (*KEYED, *LOADED)))
async def sparsity(request: Request) -> Response:
    """Per layer and head: calibration on held-out text, and live figures from audited rows of real requests."""
    engine = engine_of(request)
    model, auditor = engine.model, engine.auditor
    live = await asyncio.to_thread(auditor.report, model.description.version)
    content = {
        "object": "sparsity",
        "artifact": model.description.artifact,
        "artifact_version": model.description.version,
        "set": "plan",
        "calibration": model.calibration,
        "points": [point.figures() for point in model.description.points],
        "live": live | {"estimator": ESTIMATOR},
    }
    return json_answer(content)


@router.get("/info", **documented(InfoAnswer, (*KEYED, *LOADED)))
async def info(request: Request) -> Response:
    """Settings without keys, versions, the artifact, the device and its threads."""
    engine, settings = engine_of(request), settings_of(request)
    description = {name: value for name, value in vars(engine.model.description).items() if name != "points"}
    content = {
        "model": settings.name(),
        "attention_modes": engine.model.description.modes,
        "artifact": description,
        "device": description["device"],
        "threads": description["threads"],
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in LIBRARIES},
        "settings": settings.public(),
        "uptime_seconds": round(time.time() - request.app.state.created, 1),
    }
    return json_answer(content)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
