"""The HTTP routes: each checks a request, asks the engine, and says what came out."""

import asyncio
import base64
import json
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from app import telemetry
from app.auth import require_admin_key, require_api_key
from app.engine import Engine
from app.errors import ApiError
from app.schemas import EmbeddingRequest, Mode, ReloadRequest, parse, read_json
from app.servable import Answer, Description, Job
from app.settings import Settings
from app.telemetry import Telemetry

ESTIMATOR = "sum of kept gold pairs / sum of gold pairs over audited rows; interval: 95 % bootstrap over requests"
SETS: dict[Mode, str] = {  # what computed densities of an answer are of
    "original": "all legal pairs",
    "dense": "all legal pairs",
    "sparse": "plan",
    "exact": "plan, and the pairs that its proof scored",
    "auto": "plan where sparse ran, all legal pairs where dense did",
}
LIBRARIES = ("sparsefinder", "torch", "transformers", "tokenizers", "numba", "numpy", "fastapi", "uvicorn")


def _json(content: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(content, allow_nan=False), headers=headers, media_type="application/json")


def _body(kind: type[EmbeddingRequest] | type[ReloadRequest]) -> dict[str, Any]:
    """The schema of a body that a route reads itself, for /openapi.json."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}}


def _engine(request: Request) -> Engine:
    return cast(Engine, request.app.state.engine)


def _settings(request: Request) -> Settings:
    return cast(Settings, request.app.state.settings)


def _figures(request: Request) -> Telemetry:
    return cast(Telemetry, request.app.state.telemetry)


async def _api_key(request: Request) -> None:
    require_api_key(request, _settings(request))


async def _admin_key(request: Request) -> None:
    require_admin_key(request, _settings(request))


health = APIRouter()
api = APIRouter(dependencies=[Depends(_api_key)])
admin = APIRouter(dependencies=[Depends(_admin_key)])


def install(app: FastAPI) -> None:
    """Add every route."""
    for router in (health, api, admin):
        app.include_router(router)


@health.head("/livez", include_in_schema=False)
@health.get("/livez")
async def livez() -> Response:
    """The process answers."""
    return _json({"status": "ok"})


@health.head("/readyz", include_in_schema=False)
@health.get("/readyz")
async def readyz(request: Request) -> Response:
    """A model is loaded, and its last forward pass (or a new probe) succeeded; else 503 with the reason."""
    figures = _figures(request)
    try:
        description = await _engine(request).ready()
    except ApiError:
        figures.ready.set(0)
        raise
    figures.ready.set(1)
    return _json({"status": "ok", "artifact": description.artifact, "version": description.version})


@health.get("/metrics")
async def metrics(request: Request) -> Response:
    """Figures in Prometheus' text format."""
    return Response(generate_latest(_figures(request).registry), media_type=CONTENT_TYPE_LATEST)


@api.post("/v1/embeddings", openapi_extra=_body(EmbeddingRequest))
async def embeddings(request: Request) -> Response:
    """OpenAI's embeddings, computed by the attention that the request names."""
    asked = parse(EmbeddingRequest, await read_json(request))
    engine, name = _engine(request), _settings(request).name()
    _check(asked, engine.model.description, name, _settings(request).max_items)
    single = isinstance(asked.input, str) or isinstance(asked.input[0], int)
    inputs: Any = [asked.input] if single else asked.input
    facts = telemetry.facts_of(request.scope)
    facts.attention, facts.items = asked.attention, len(inputs)
    answer = await engine.embed(Job(inputs, asked.attention, asked.truncate, single))
    facts.artifact, facts.tokens = answer.description.version, sum(answer.tokens)
    facts.inference_ms, facts.computed_density = round(answer.inference_ms, 3), round(answer.density, 6)
    _figures(request).embedded(facts, sum(answer.truncated))
    _figures(request).computed(asked.attention, answer.layers)
    headers = {
        "x-sparsefinder-attention": asked.attention,
        "x-sparsefinder-artifact": answer.description.version,
        "x-sparsefinder-computed-density": f"{answer.density:.6f}",
        "x-sparsefinder-tokens": str(facts.tokens),
        "x-sparsefinder-inference-ms": f"{answer.inference_ms:.3f}",
    }
    # A long list takes a while to become JSON: beside the event loop, or every other client would wait.
    return await asyncio.to_thread(lambda: _json(_embedding_answer(asked, answer, name), headers))


def _check(asked: EmbeddingRequest, description: Description, name: str, max_items: int) -> None:
    if asked.model is not None and asked.model != name:
        raise ApiError(404, "model_not_found", f"model: expected {name!r} (see /v1/models), got another", "model")
    if asked.dimensions is not None and asked.dimensions != description.dimensions:
        expected = f"{description.dimensions} (this model cannot shorten its vectors)"
        message = f"dimensions: expected {expected}, got {asked.dimensions}"
        raise ApiError(422, "dimensions_not_supported", message, "dimensions")
    if asked.attention not in description.modes:  # entmax with a zero is what a plan can be proved by
        reason = "expected entmax (alpha above 1) on a CPU for exact"
        message = f"attention: {reason}, got alpha {description.alpha:g} on {description.device}"
        raise ApiError(422, "attention_not_supported", message, "attention")
    many = isinstance(asked.input, list) and not isinstance(asked.input[0], int)
    if many and len(asked.input) > max_items:
        raise ApiError(
            422, "batch_too_large", f"input: expected at most {max_items} items, got {len(asked.input)}", "input"
        )


def _embedding_answer(asked: EmbeddingRequest, answer: Answer, name: str) -> dict[str, Any]:
    data = []
    for index, vector in enumerate(answer.vectors):
        coded: Any = vector.tolist()
        if asked.encoding_format == "base64":
            coded = base64.b64encode(np.ascontiguousarray(vector, dtype="<f4").tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": coded})
    tokens = sum(answer.tokens)
    layers = [
        {"layer": index, "ran": layer.ran, "computed_density": layer.density, "sparsity": 1 - layer.density}
        | ({} if layer.repair is None else {"repair": asdict(layer.repair)})
        for index, layer in enumerate(answer.layers)
    ]
    return {
        "object": "list",
        "data": data,
        "model": name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "sparsefinder": {
            "attention": asked.attention,
            "artifact": answer.description.artifact,
            "artifact_version": answer.description.version,
            "set": SETS[asked.attention],
            "computed_density": answer.density,
            "layers": layers,
            "tokens": answer.tokens,
            "truncated": answer.truncated,
            "inference_ms": answer.inference_ms,
        },
    }


@api.get("/v1/models")
async def models(request: Request) -> Response:
    """The one model that this process serves."""
    settings, engine = _settings(request), _engine(request)
    about = {"artifact": engine.model.description.version, "attention": engine.model.description.modes}
    created = request.app.state.created
    entry = {
        "id": settings.name(),
        "object": "model",
        "created": created,
        "owned_by": "sparsefinder",
        "sparsefinder": about,
    }
    return _json({"object": "list", "data": [entry]})


@api.get("/v1/sparsity")
async def sparsity(request: Request) -> Response:
    """Per layer and head: calibration on held-out text, and live figures from audited rows of real requests."""
    engine = _engine(request)
    model, auditor = engine.model, engine.auditor
    live = await asyncio.to_thread(auditor.live, model.description.version)
    content = {
        "object": "sparsity",
        "artifact": model.description.artifact,
        "artifact_version": model.description.version,
        "set": "plan",
        "calibration": model.calibration,
        "live": live
        | {
            "estimator": ESTIMATOR,
            "audit_rate": auditor.rate,
            "rows_per_request": auditor.rows,
            "window_requests": auditor.window,
        },
    }
    return _json(content)


@api.get("/info")
async def info(request: Request) -> Response:
    """Settings without keys, versions, the artifact, the device and its threads."""
    engine, settings = _engine(request), _settings(request)
    description = vars(engine.model.description)
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
    return _json(content)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@admin.post("/admin/reload", openapi_extra=_body(ReloadRequest))
async def reload(request: Request) -> Response:
    """Load another artifact (or the same folder again) and swap it in; whatever fails, the old one serves on."""
    asked = parse(ReloadRequest, await read_json(request))
    figures, started = _figures(request), time.perf_counter()
    folder = None if asked.artifact is None else _confined(asked.artifact, _settings(request).root())
    try:
        old, new = await _engine(request).reload(folder)
    except ApiError as error:
        figures.reloads.labels(error.code).inc()
        raise
    figures.reloads.labels("ok").inc()
    figures.serving(new.artifact, new.version)
    telemetry.log("reloaded", old=old.version, new=new.version)
    named = [{"artifact": one.artifact, "version": one.version, "predictor": one.predictor} for one in (old, new)]
    return _json({"old": named[0], "new": named[1], "seconds": round(time.perf_counter() - started, 3)})


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
