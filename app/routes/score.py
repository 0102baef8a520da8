"""POST /v1/score: how likely a causal language model finds texts, token by token."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from app.errors import ApiError
from app.inputs import param_of
from app.openapi import ATTENTION, BODY, KEYED, RUNS, documented
from app.outputs import MOST_FIGURES, Score, Scored
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
from app.schemas import InputRequest, parse, read_json
from app.servable import Answer, Asked, Check, Ids, Servable
from app.task_answers import ScoreAnswer
from app.vocabulary import Vocabulary

EXAMPLE = {"input": "The letter is on my table again."}

router = APIRouter()


class ScoreRequest(InputRequest):
    """Texts of at least two tokens: the first one has nothing before it that could make it likely."""

    top_k: int = Field(0, ge=0, le=20, description="How many words to give beside each token, best first.")


@router.post("/v1/score", **documented(ScoreAnswer, (*KEYED, *BODY, *RUNS), ScoreRequest, ATTENTION, EXAMPLE))
async def score(request: Request) -> Response:
    """Log-probability of every token after those before it, and the perplexity of each text."""
    asked, settings = parse(ScoreRequest, await read_json(request)), settings_of(request)
    model = engine_of(request).model
    lane = lane_of(asked, model.description, "score", settings, Score(asked.top_k))
    check_items(asked, settings)
    answer = await run(request, Asked(model, asked.items, lane, asked.truncate, asked.single, _check(asked)))
    return await asyncio.to_thread(_respond, asked, answer, model.words, settings.name())


def _respond(asked: ScoreRequest, answer: Answer, words: Vocabulary, name: str) -> Response:
    """Beside the event loop: a long list takes a while to become JSON, and every other client would wait."""
    rows = zip(answer.ids, answer.outputs, strict=True)
    content = {
        "object": "list",
        "data": [_entry(index, *row, words, asked.top_k) for index, row in enumerate(rows)],
        "model": name,
        "usage": usage_part(answer),
        "sparsefinder": attention_part(answer, asked.attention),
    }
    return json_answer(content, headers_of(answer, asked.attention))


def _check(asked: ScoreRequest) -> Check:
    def check(_: Servable, ids: Sequence[Ids]) -> None:
        """On the reader: is there a token to score in every item, and not too much to tell?"""
        for index, item in enumerate(ids):
            if len(item) < 2:
                param = param_of(asked.single, index)
                message = f"{param}: expected at least 2 tokens, for the first has no probability, got {len(item)}"
                raise ApiError(422, "too_short", message, param)
        tokens = sum(map(len, ids))
        if tokens * asked.top_k > MOST_FIGURES:
            message = f"top_k: expected at most {MOST_FIGURES} words in an answer, got {tokens} tokens of {asked.top_k}"
            raise ApiError(422, "batch_too_large", message, "top_k")

    return check


def _entry(index: int, ids: Ids, output: Scored, words: Vocabulary, top_k: int) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "object": "score",
        "index": index,
        "ids": ids,
        "pieces": words.pieces(ids),
        "logprobs": [None, *output.logprobs.tolist()],
        "sum": output.sum,
        "mean": output.mean,
        "perplexity": math.exp(-output.mean),
        "scored_tokens": len(output.logprobs),
    }
    if top_k:
        entry["top"] = [None, *(_best(*row, words) for row in zip(output.words, output.word_logprobs, strict=True))]
    return entry


def _best(ids: Any, logprobs: Any, words: Vocabulary) -> list[dict[str, Any]]:
    rows = zip(ids, words.pieces(ids), logprobs, strict=True)
    return [{"id": int(word), "piece": piece, "logprob": float(logprob)} for word, piece, logprob in rows]
