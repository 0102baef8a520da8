"""POST /v1/fill-mask: which words a masked language model puts in the place of each mask."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from app.errors import ApiError
from app.inputs import param_of
from app.openapi import ATTENTION, BODY, KEYED, RUNS, documented
from app.outputs import MOST_FIGURES, Filled, FillMask
from app.routes.common import (
    attention_part,
    check_items,
    engine_of,
    headers_of,
    json_answer,
    lane_of,
    run,
    settings_of,
    usage_part,
)
from app.schemas import InputRequest, Text, parse, read_json
from app.servable import Answer, Asked, Check, Ids, Servable
from app.task_answers import FillMaskAnswer
from app.vocabulary import Vocabulary

EXAMPLE = {"input": "The letter is on my [MASK] again."}

router = APIRouter()


class FillMaskRequest(InputRequest):
    """Texts that hold the model's mask token, such as `[MASK]`, at least once."""

    top_k: int = Field(5, ge=1, le=100, description="How many words each mask gets, best first.")
    targets: list[Text] | None = Field(
        None,
        min_length=1,
        max_length=100,
        description="The figures of these words instead, in this order. Each must be one piece of the vocabulary; where"
        " that writes the space before a word into its piece, so does a target.",
    )


@router.post("/v1/fill-mask", **documented(FillMaskAnswer, (*KEYED, *BODY, *RUNS), FillMaskRequest, ATTENTION, EXAMPLE))
async def fill_mask(request: Request) -> Response:
    """For every mask of every text: words with their probabilities."""
    asked, settings, engine = parse(FillMaskRequest, await read_json(request)), settings_of(request), engine_of(request)
    model = engine.model
    lane = lane_of(asked, model.description, "fill_mask", settings, FillMask(asked.top_k))
    check_items(asked, settings)
    if asked.targets is not None:
        targets = await engine.read(1, partial(_target_ids, model.words, asked.targets))
        lane = replace(lane, options=FillMask(0, targets))
    answer = await run(request, Asked(model, asked.items, lane, asked.truncate, asked.single, _check(asked)))
    return await asyncio.to_thread(_respond, asked, answer, model.words, settings.name())


def _respond(asked: FillMaskRequest, answer: Answer, words: Vocabulary, name: str) -> Response:
    """Beside the event loop: a long list takes a while to become JSON, and every other client would wait."""
    content = {
        "object": "list",
        "data": [
            {"object": "fill_mask", "index": index, "masks": _masks(output, words, asked.targets)}
            for index, output in enumerate(answer.outputs)
        ],
        "model": name,
        "usage": usage_part(answer),
        "sparsefinder": attention_part(answer, asked.attention),
    }
    return json_answer(content, headers_of(answer, asked.attention))


def _target_ids(words: Vocabulary, targets: Sequence[str]) -> tuple[int, ...]:
    """On the reader: the id of each target."""
    ids = []
    for index, target in enumerate(targets):
        pieces = words.split(target)
        if len(pieces) != 1:
            param, came = f"targets.{index}", f"{len(pieces)} pieces" if pieces else "an unknown one"
            message = f"{param}: expected a word that is one piece of the vocabulary, got {came}"
            raise ApiError(422, "invalid_target", message, param)
        ids += pieces
    return tuple(ids)


def _check(asked: FillMaskRequest) -> Check:
    def check(model: Servable, ids: Sequence[Ids]) -> None:
        """On the reader: does the head fit the mode, and has every item a mask?"""
        modes, mask = model.description.fill_mask_modes, model.words.mask
        if asked.attention not in modes:
            reason = f"expected one of {', '.join(modes)} (the fill-mask head was trained on the weights of these)"
            message = f"attention: {reason}, got {asked.attention}"
            raise ApiError(422, "attention_not_supported", message, "attention")
        for index, item in enumerate(ids):
            if mask not in item:
                param = param_of(asked.single, index)
                message = (
                    f"{param}: expected {model.words.mask_piece} in the {len(item)} tokens that are read, got none"
                )
                raise ApiError(422, "no_mask_token", message, param)
        masks, each = sum(item.count(mask) for item in ids if mask is not None), len(asked.targets or ()) or asked.top_k
        if masks * each > MOST_FIGURES:
            message = f"input: expected at most {MOST_FIGURES} words in an answer, got {masks} masks of {each} words"
            raise ApiError(422, "batch_too_large", message, "input")

    return check


def _masks(output: Filled, words: Vocabulary, targets: Sequence[str] | None) -> list[dict[str, Any]]:
    masks = []
    for position, ids, logprobs in zip(output.positions, output.words, output.logprobs, strict=True):
        found: list[dict[str, Any]] = [
            {"id": int(word), "piece": piece, "probability": math.exp(logprob), "logprob": float(logprob)}
            for word, piece, logprob in zip(ids, words.pieces(ids), logprobs, strict=True)
        ]
        if targets is not None:
            found = [{"target": target} | entry for target, entry in zip(targets, found, strict=True)]
        masks.append({"position": int(position), "words": found})
    return masks
