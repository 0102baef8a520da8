"""POST /v1/attention: which keys every query of a text reads, per layer and head, and which it would have needed."""

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field, WithJsonSchema, field_validator
from starlette.responses import Response

from app.errors import ApiError
from app.graph_answers import GraphAnswer
from app.graph_values import BucketSets, GoldRows, Graph, GraphOptions, HeadGraph, Rows, legal_pairs
from app.openapi import ATTENTION, BODY, KEYED, RUNS, documented
from app.routes.common import attention_part, engine_of, headers_of, lane_of, run, settings_of, usage_part
from app.schemas import ONE_INPUT, Attended, one_input, parse, read_json
from app.servable import Answer, Asked, Check, Description, Ids
from app.vocabulary import Encoded

SUPPORT = "support of the entmax over all legal keys, of this pass's own queries and keys"
DIGITS = 6  # significant ones of a weight

EXAMPLE = {"input": "The letter is on my table again.", "layers": [0], "heads": [0], "gold": True}

router = APIRouter()

# The document also says what `_require_known` refuses.
Numbers = Annotated[
    list[int],
    Field(
        min_length=1,
        max_length=1024,
        json_schema_extra={"uniqueItems": True, "items": {"type": "integer", "minimum": 0}},
    ),
]


class AttentionRequest(Attended):
    """Which graphs of one text to give. Without `layers` or `heads`, all of them."""

    input: Annotated[str | list[int], WithJsonSchema(ONE_INPUT)] = Field(
        description="One text, or its token ids with the special tokens included."
    )
    layers: Numbers | None = Field(None, description="Which layers, from 0 on.")
    heads: Numbers | None = Field(None, description="Which heads of each, from 0 on.")
    gold: bool = Field(False, description="Also the pairs that attention needs, their weights, and those missed.")
    pattern: bool = Field(False, description="Also what was predicted, before windows and global tokens.")
    clusters: bool = Field(False, description="Also the buckets of every token, where the artifact has any.")

    @field_validator("input", mode="before")
    @classmethod
    def _one(cls, value: Any) -> Any:
        return one_input(value)

    @property
    def options(self) -> GraphOptions:
        """What the model is told."""
        layers, heads = (None if part is None else tuple(part) for part in (self.layers, self.heads))
        return GraphOptions(layers, heads, self.gold, self.pattern, self.clusters)


@router.post("/v1/attention", **documented(GraphAnswer, (*KEYED, *BODY, *RUNS), AttentionRequest, ATTENTION, EXAMPLE))
async def attention(request: Request) -> Response:
    """The pairs that each layer and head computes for a text, on request with those that it misses."""
    asked, settings, engine = (
        parse(AttentionRequest, await read_json(request)),
        settings_of(request),
        engine_of(request),
    )
    model = engine.model
    lane = lane_of(asked, model.description, "graph", settings, asked.options)
    if asked.attention == "original":
        message = "attention: expected a mode of the served transform (dense, sparse, exact, auto), got original"
        raise ApiError(422, "attention_not_supported", message, "attention")
    check = _check(asked.options, settings.max_graph_pairs)
    items: Any = [asked.input]
    answer = await run(request, Asked(model, items, lane, asked.truncate, True, check))
    text = asked.input if isinstance(asked.input, str) else None
    encoded = None if text is None else (await engine.read(0, partial(model.words.encode, [text])))[0]
    content = {
        "object": "attention",
        "model": settings.name(),
        "alpha": answer.description.alpha,
        "tokens": _tokens(answer.ids[0], model.words.pieces(answer.ids[0]), encoded),
        "usage": usage_part(answer),
        "sparsefinder": attention_part(answer, asked.attention),
    }
    return await asyncio.to_thread(_respond, content, answer, asked)


def _check(options: GraphOptions, most: int) -> Check:
    def check(model: Any, ids: Any) -> None:
        """On the reader: do these layers and heads exist, and is the answer of a size that can be given?"""
        about: Description = model.description
        counts = []
        for name, asked, count in (("layer", options.layers, about.layers), ("head", options.heads, about.heads)):
            _require_known(name, asked or (), count)
            counts.append(count if asked is None else len(asked))
        pairs = counts[0] * counts[1] * legal_pairs(len(ids[0]), about.causal)
        if pairs > most:
            came = f"{counts[0]} × {counts[1]} × {len(ids[0])} tokens make {pairs}"
            message = (
                f"expected at most {most} pairs (layers × heads × legal pairs), got {pairs}: {came}; ask for fewer"
            )
            raise ApiError(422, "graph_too_large", message, "input")

    return check


def _require_known(name: str, asked: tuple[int, ...], count: int) -> None:
    for place, number in enumerate(asked):
        param = f"{name}s.{place}"
        if not 0 <= number < count:
            shown = number if abs(number) < 10**12 else "a larger number"
            message = f"{param}: expected a {name} from 0 to {count - 1}, got {shown}"
            raise ApiError(422, f"invalid_{name}", message, param)
        if number in asked[:place]:
            raise ApiError(422, f"invalid_{name}", f"{param}: expected every {name} once, got {number} again", param)


def _tokens(ids: Ids, pieces: Any, encoded: Encoded | None) -> dict[str, Any]:
    """ids, pieces, and the characters of the text that each stands for; None where there is no text or place in it."""
    offsets: list[Any] = [None] * len(ids)
    if encoded is not None:
        offsets = list(encoded.offsets[: len(ids)])
        if encoded.ids[: len(ids)] != ids:  # cut, and the special token at the end kept
            offsets[-1] = encoded.offsets[-1]
    return {"ids": ids, "pieces": pieces, "offsets": offsets}


def _respond(content: Mapping[str, Any], answer: Answer, asked: AttentionRequest) -> Response:
    """Beside the event loop, and encoded head by head: in one piece it could hold up every other client."""
    graph: Graph = answer.outputs[0]
    gold = None if not asked.gold else SUPPORT if graph.gold_mass is None else _softmax_gold(graph.gold_mass)
    parts = [json.dumps({**content, "gold": gold}, allow_nan=False)[:-1], ', "layers": [']
    for place, layer in enumerate(graph.layers):
        about = {"layer": layer.layer, "ran": layer.ran, "window": layer.window, "legal_pairs": layer.legal_pairs}
        parts += [", " if place else "", json.dumps(about)[:-1], ', "heads": [']
        parts.append(", ".join(json.dumps(_head(head), allow_nan=False) for head in layer.heads))
        parts.append("]}")
    body = "".join([*parts, "]}"]).encode()
    return Response(body, headers=headers_of(answer, asked.attention), media_type="application/json")


def _softmax_gold(mass: float) -> str:
    return f"fewest keys of each row that hold {mass:g} of its softmax, of this pass's own queries and keys"


def _head(head: HeadGraph) -> dict[str, Any]:
    shown: dict[str, Any] = {"head": head.head, "measures": head.measures, "plan": _rows(head.plan)}
    for name in ("pattern", "gold", "missed"):
        rows: Rows | None = getattr(head, name)
        if rows is not None:
            shown[name] = _rows(rows)
    return shown | ({} if head.clusters is None else {"clusters": _buckets(head.clusters)})


def _rows(rows: Rows) -> dict[str, Any]:
    shown: dict[str, Any] = {"offsets": rows.offsets.tolist(), "keys": rows.keys.tolist()}
    if isinstance(rows, GoldRows):
        # All 17 digits of a float64 would make three times the answer, of which the last nine are not known.
        weights = rows.weights.astype(np.float64)
        scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(weights)))
        shown["weights"] = (np.round(weights * scale) / scale).tolist()
    return shown


def _buckets(sets: BucketSets) -> dict[str, Any]:
    return {
        "of": sets.of,
        "served": sets.served,
        "buckets": sets.buckets,
        "queries": sets.queries,
        "keys": sets.keys,
    }
