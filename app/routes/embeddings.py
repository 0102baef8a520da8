"""POST /v1/embeddings: OpenAI's embeddings, computed by the attention that the request names."""

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from app.errors import ApiError
from app.openapi import ATTENTION, BODY, KEYED, RUNS, documented
from app.routes.common import (
    attention_part,
    check_items,
    engine_of,
    headers_of,
    json_answer_aside,
    lane_of,
    run,
    settings_of,
    usage_part,
)
from app.schemas import EmbeddingRequest, parse, read_json
from app.servable import Asked
from app.task_answers import EmbeddingAnswer

EXAMPLE = {"input": ["Where do I change my password?", "Settings, then Account."]}

router = APIRouter()


@router.post(
    "/v1/embeddings", **documented(EmbeddingAnswer, (*KEYED, *BODY, *RUNS), EmbeddingRequest, ATTENTION, EXAMPLE)
)
async def embeddings(request: Request) -> Response:
    """One vector per text."""
    asked, settings = parse(EmbeddingRequest, await read_json(request)), settings_of(request)
    model = engine_of(request).model
    description = model.description
    lane = lane_of(asked, description, "embed", settings)
    if asked.dimensions is not None and asked.dimensions != description.dimensions:
        expected = f"{description.dimensions} (this model cannot shorten its vectors)"
        message = f"dimensions: expected {expected}, got {asked.dimensions}"
        raise ApiError(422, "dimensions_not_supported", message, "dimensions")
    check_items(asked, settings)
    answer = await run(request, Asked(model, asked.items, lane, asked.truncate, asked.single))
    content = {
        "object": "list",
        "data": [_entry(index, vector, asked.encoding_format) for index, vector in enumerate(answer.outputs)],
        "model": settings.name(),
        "usage": usage_part(answer),
        "sparsefinder": attention_part(answer, asked.attention),
    }
    return await json_answer_aside(content, headers_of(answer, asked.attention))


def _entry(index: int, vector: Any, encoding: str) -> dict[str, Any]:
    coded: Any = vector.tolist()
    if encoding == "base64":
        coded = base64.b64encode(np.ascontiguousarray(vector, dtype="<f4").tobytes()).decode()
    return {"object": "embedding", "index": index, "embedding": coded}
