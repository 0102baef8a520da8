"""What every route shares: who may call it, how a request reaches the engine, and what an answer says of itself."""

import asyncio
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, cast

from fastapi import Request
from starlette.responses import Response

from app import telemetry
from app.auth import require_admin_key, require_api_key
from app.engine import Engine
from app.errors import ApiError
from app.points import requested_headers, requested_part, resolved
from app.schemas import Attended, Mode
from app.servable import Answer, Asked, Description, Lane, Task
from app.settings import Settings
from app.telemetry import Telemetry

SETS: dict[Mode, str] = {  # what computed densities of an answer are of
    "original": "all legal pairs",
    "dense": "all legal pairs",
    "sparse": "plan",
    "exact": "plan, and the pairs that its proof scored",
    "auto": "plan where sparse ran, all legal pairs where dense did",
}


class HasItems(Protocol):
    """A request for one or many texts."""

    @property
    def items(self) -> Sequence[Any]:
        """The texts, or lists of ids."""
        ...


def json_answer(content: Any, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer; NaN in it is an error here, never `null` at a client."""
    return Response(json.dumps(content, allow_nan=False), headers=headers, media_type="application/json")


async def json_answer_aside(content: Any, headers: Mapping[str, str] | None = None) -> Response:
    """The same beside the event loop: a long list takes a while, and every other client would wait."""
    return await asyncio.to_thread(json_answer, content, headers)


def engine_of(request: Request) -> Engine:
    """The engine of this app."""
    return cast(Engine, request.app.state.engine)


def settings_of(request: Request) -> Settings:
    """The settings of this app."""
    return cast(Settings, request.app.state.settings)


def figures_of(request: Request) -> Telemetry:
    """The figures of this app."""
    return cast(Telemetry, request.app.state.telemetry)


async def api_key(request: Request) -> None:
    """Dependency of a route that needs an API key."""
    require_api_key(request, settings_of(request))


async def admin_key(request: Request) -> None:
    """Dependency of a route that needs an admin key."""
    require_admin_key(request, settings_of(request))


def check_model(asked: str | None, settings: Settings) -> None:
    """Raise 404 where a request names another model than the served one."""
    name = settings.name()
    if asked is not None and asked != name:
        raise ApiError(404, "model_not_found", f"model: expected {name!r} (see /v1/models), got another", "model")


def check_items(asked: HasItems, settings: Settings) -> None:
    """Raise 422 for more texts than one request may hold."""
    if len(asked.items) > settings.max_items:
        message = f"input: expected at most {settings.max_items} items, got {len(asked.items)}"
        raise ApiError(422, "batch_too_large", message, "input")


def lane_of(
    asked: Attended, description: Description, task: Task, settings: Settings, options: Hashable = None
) -> Lane:
    """How the served model will compute a request.

    Raises:
        ApiError: 404 for another model's name; 422 for a task or an attention mode that this model does not have, and
            for a working point that it cannot be served at.
    """
    check_model(asked.model, settings)
    if task not in description.tasks:
        can = ", ".join(description.tasks)
        raise ApiError(422, "task_not_supported", f"expected a model that can {task}, got one that can: {can}")
    if asked.attention not in description.modes:  # entmax with a zero is what a plan can be proved by
        reason = "expected entmax (alpha above 1) on a CPU for exact"
        message = f"attention: {reason}, got alpha {description.alpha:g} on {description.device}"
        raise ApiError(422, "attention_not_supported", message, "attention")
    return Lane(task, asked.attention, resolved(asked, description, settings), options, asked.requested)


async def run(request: Request, asked: Asked) -> Answer:
    """Compute a request, for as long as its client is there, and count what it took.

    Raises:
        ApiError: what `Engine.ask` raises; 499 where the client left, whose items are then dropped.
    """
    facts, lane = telemetry.facts_of(request.scope), asked.lane
    facts.task, facts.attention, facts.items = lane.task, lane.mode, len(asked.inputs)
    work = asyncio.ensure_future(engine_of(request).ask(asked))
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ApiError(499, "client_left", "the client closed the connection")
        answer = work.result()
    finally:
        for task in (work, leaving):
            task.cancel()
    facts.artifact, facts.tokens = answer.description.version, sum(answer.tokens)
    facts.queue_ms, facts.inference_ms = round(answer.queue_ms, 3), round(answer.inference_ms, 3)
    facts.computed_density = round(answer.density, 6)
    tracer = request.app.state.tracer
    if tracer is not None:
        tracer.computed(request.scope, answer.queue_ms, answer.inference_ms)
    figures_of(request).answered(facts, sum(answer.truncated))
    figures_of(request).computed(lane.mode, answer.layers)
    return answer


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def headers_of(answer: Answer, mode: Mode) -> dict[str, str]:
    """What an answer says of itself beside its body."""
    return {
        "x-sparsefinder-attention": mode,
        "x-sparsefinder-ran": ",".join(sorted({path for layer in answer.layers for path in layer.ran})),
        "x-sparsefinder-artifact": answer.description.version,
        "x-sparsefinder-computed-density": f"{answer.density:.6f}",
        "x-sparsefinder-tokens": str(sum(answer.tokens)),
        "x-sparsefinder-queue-ms": f"{answer.queue_ms:.3f}",
        "x-sparsefinder-inference-ms": f"{answer.inference_ms:.3f}",
    } | requested_headers(answer)


def attention_part(answer: Answer, mode: Mode) -> dict[str, Any]:
    """The part `sparsefinder` of a body: which attention computed it, per layer."""
    layers = [
        {"layer": index, "ran": layer.ran, "computed_density": layer.density, "sparsity": 1 - layer.density}
        | ({} if layer.repair is None else {"repair": asdict(layer.repair)})
        for index, layer in enumerate(answer.layers)
    ]
    return {
        "attention": mode,
        "artifact": answer.description.artifact,
        "artifact_version": answer.description.version,
        "set": SETS[mode],
        "computed_density": answer.density,
        "layers": layers,
        "tokens": answer.tokens,
        "truncated": answer.truncated,
        "queue_ms": answer.queue_ms,
        "inference_ms": answer.inference_ms,
    } | requested_part(answer)


def usage_part(answer: Answer) -> dict[str, int]:
    """The part `usage` of a body, as OpenAI's clients read it."""
    tokens = sum(answer.tokens)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
