"""POST /tokenize: how the served model reads texts; it runs no attention."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, WithJsonSchema, field_validator
from starlette.responses import Response

from app.errors import ApiError
from app.openapi import ARTIFACT, BODY, KEYED, LOADED, documented
from app.outputs import MOST_TOKENS
from app.routes.common import check_items, check_model, engine_of, json_answer_aside, settings_of
from app.schemas import TEXTS, Strict, Text, checked_input, parse, read_json
from app.task_answers import TokenizeAnswer
from app.vocabulary import Encoded, Vocabulary

EXAMPLE = {"input": "The letter is on my table again."}

router = APIRouter()


class TokenizeRequest(Strict):
    """Texts, of any length and also without a word."""

    input: Annotated[str | list[str], WithJsonSchema(TEXTS)] = Field(description="A text, or texts.")
    model: Text | None = Field(None, description="The served model's name (see /v1/models).")
    user: Text | None = Field(None, description="Accepted for compatibility, neither used nor logged.")

    @field_validator("input", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        return checked_input(value, token_ids=False)

    @property
    def items(self) -> list[str]:
        """The texts."""
        return [self.input] if isinstance(self.input, str) else self.input


@router.post(
    "/tokenize", **documented(TokenizeAnswer, (*KEYED, *BODY, *LOADED, 404, 429), TokenizeRequest, ARTIFACT, EXAMPLE)
)
async def tokenize(request: Request) -> Response:
    """The tokens of each text: ids, pieces, and the characters that they stand for; nothing is cut."""
    asked, settings, engine = parse(TokenizeRequest, await read_json(request)), settings_of(request), engine_of(request)
    check_model(asked.model, settings)
    check_items(asked, settings)
    model = engine.model
    encoded = await engine.read(len(asked.items), partial(_encode, model.words, asked.items))
    limit = model.description.max_tokens
    content = {
        "object": "list",
        "data": [_entry(index, item, limit) for index, item in enumerate(encoded)],
        "model": settings.name(),
        "max_tokens": limit,
        "sparsefinder": {"artifact": model.description.artifact, "artifact_version": model.description.version},
    }
    return await json_answer_aside(content, {"x-sparsefinder-artifact": model.description.version})


def _encode(words: Vocabulary, texts: Sequence[str]) -> list[Encoded]:
    """Text by text, so that the first ones that are too much together end it."""
    encoded, tokens = [], 0
    for text in texts:
        encoded += words.encode([text])
        tokens += len(encoded[-1].ids)
        if tokens > MOST_TOKENS:
            message = f"input: expected at most {MOST_TOKENS} tokens in one request, got more"
            raise ApiError(422, "batch_too_large", message, "input")
    return encoded


def _entry(index: int, item: Encoded, limit: int) -> dict[str, Any]:
    return {
        "object": "tokens",
        "index": index,
        "ids": item.ids,
        "pieces": item.pieces,
        "offsets": item.offsets,
        "tokens": len(item.ids),
        "exceeds_max_tokens": len(item.ids) > limit,
    }
