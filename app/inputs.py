"""From what a request sends to checked token ids."""

from collections.abc import Sequence

from app.errors import ApiError
from app.servable import Asked, Ids, Servable


def param_of(single: bool, index: int) -> str:
    """How an error names this item."""
    return "input" if single else f"input.{index}"


def prepare(asked: Asked) -> tuple[list[Ids], tuple[bool, ...]]:
    """On the reader: token ids of a request, cut where that was asked for, and which items were cut.

    Raises:
        ApiError: 422 for an input that is blank, too long or no token of this model, or that the task refuses.
    """
    model = asked.model
    texts = [item for item in asked.inputs if isinstance(item, str)]
    ids = model.tokenize(texts) if texts else [list(item) for item in asked.inputs if not isinstance(item, str)]
    limit, truncated = model.description.max_tokens, []
    for index, item in enumerate(ids):
        param = param_of(asked.single, index)
        _check_ids(model, item, param, from_text=bool(texts))
        truncated.append(len(item) > limit)
        if truncated[-1] and not asked.truncate:
            message = f"{param}: expected at most {limit} tokens, got {len(item)}; set truncate to true to cut it"
            raise ApiError(422, "input_too_long", message, param)
    kept: Sequence[Ids] = [model.cut(item) if cut else item for item, cut in zip(ids, truncated, strict=True)]
    if asked.check is not None:
        asked.check(model, kept)
    return list(kept), tuple(truncated)


def _check_ids(model: Servable, ids: Ids, param: str, from_text: bool) -> None:
    if from_text:
        if model.blank(ids):
            # One vector for every text that says nothing would look like an answer; OpenAI refuses those as well.
            raise ApiError(422, "empty_input", f"{param}: expected a text with at least one token, got none", param)
        return
    vocabulary = model.description.vocabulary
    bad = next((token for token in ids if not 0 <= token < vocabulary), None)
    if bad is not None:
        shown = bad if abs(bad) < 10**12 else "a larger number"
        message = f"{param}: expected token ids from 0 to {vocabulary - 1}, got {shown}"
        raise ApiError(422, "invalid_token", message, param)
