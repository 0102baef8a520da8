"""Requests as frozen, checked values; the checks are ours because FastAPI's own echo the input and let NaN through."""

import json
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SkipValidation,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from starlette.requests import Request

from app.errors import ApiError, printable

Mode = Literal["original", "dense", "sparse", "exact", "auto"]
MODES: tuple[Mode, ...] = ("original", "dense", "sparse", "exact", "auto")


def _encodable(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("expected text, got a lone surrogate") from None
    return value


Text = Annotated[str, AfterValidator(_encodable)]


class Strict(BaseModel):
    """Unknown fields, NaN and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


Parsed = TypeVar("Parsed", bound=Strict)


# What /openapi.json says of texts and ids: narrower than their types, as the validators and the engine are.
SAYS_SOMETHING = {"type": "string", "pattern": r"\S"}
IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
ONE_INPUT = {"anyOf": [SAYS_SOMETHING, IDS]}
INPUT = {
    "anyOf": [*ONE_INPUT["anyOf"], *({"type": "array", "minItems": 1, "items": one} for one in (SAYS_SOMETHING, IDS))]
}
TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"type": "string"}}]}


class Attended(Strict):
    """What every request that runs the model may say."""

    model_config = ConfigDict(
        json_schema_extra={
            "not": {
                "required": ["density", "recall_target"],
                "properties": {"density": {"type": "number"}, "recall_target": {"type": "number"}},
            }
        }
    )

    model: Text | None = Field(None, description="The served model's name (see /v1/models).")
    user: Text | None = Field(None, description="Accepted for compatibility, neither used nor logged.")
    attention: Mode = Field(
        "sparse",
        description="Which attention computes the answer: `original` the untouched softmax model, `dense` the served"
        " transform over all pairs, `sparse` the predicted pairs, `exact` those and what it takes to equal `dense`"
        " (entmax models on a CPU only), `auto` in every layer the faster one of `sparse` and `dense`.",
    )
    density: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Computed density of the plan: the artifact is served at this working point (see /v1/sparsity,"
        " whose densities are those of the texts of its calibration), in a mode that reads a plan.",
    )
    recall_target: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Instead of a density: the least one whose calibrated recall reaches this.",
    )
    truncate: bool = Field(False, description="Cut over-long inputs (and say so) instead of refusing them.")

    @model_validator(mode="after")
    def _one_of_both(self) -> "Attended":
        if self.density is not None and self.recall_target is not None:
            param = "recall_target"
            raise _InputError("invalid_request", f"{param}: expected density or recall_target, got both", param)
        return self

    @property
    def requested(self) -> tuple[str, float] | None:
        """The working point that is asked for, by the name of its field."""
        if self.density is not None:
            return "density", self.density
        return None if self.recall_target is None else ("recall_target", self.recall_target)


class InputRequest(Attended):
    """A request for one or many texts."""

    input: Annotated[str | list[str] | list[int] | list[list[int]], SkipValidation, WithJsonSchema(INPUT)] = Field(
        description="A text, texts, token ids, or lists of ids. Ids are read as they stand, special tokens included."
    )

    @field_validator("input", mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return checked_input(value)

    @property
    def single(self) -> bool:
        """Whether it is about one text, which is then no list of one."""
        return isinstance(self.input, str) or isinstance(self.input[0], int)

    @property
    def items(self) -> list[Any]:
        """The texts, or lists of ids."""
        return [self.input] if self.single else list(self.input)


class EmbeddingRequest(InputRequest):
    """OpenAI's request, and two fields of ours: `attention` and `truncate`."""

    encoding_format: Literal["float", "base64"] = Field("float", description="base64 is little-endian float32.")
    dimensions: int | None = Field(None, description="Only the model's own number of dimensions is supported.")


class ReloadRequest(Strict):
    """Which artifact to load; without a path, the one that serves now is read again."""

    artifact: Text | None = Field(None, description="Folder, relative to the artifacts root.", max_length=4096)


def checked_input(value: Any, *, token_ids: bool = True) -> Any:
    """For a field `input`, in place of pydantic, which would try a list of a million ids as texts and describe each.

    One sentence names the bad item.
    """
    if not isinstance(value, list) or not value:
        if isinstance(value, str):
            return _text(value, "input")
        code = "empty_input" if value == [] else "invalid_input"
        _fail(code, f"expected a text{', texts or token ids' if token_ids else ' or texts'}", value, "input")
    if not token_ids and not isinstance(value[0], str):
        _fail("invalid_input", "expected a text", value[0], "input.0")
    for index, item in enumerate(value):
        _same_kind(item, value[0], index)
    return value


def one_input(value: Any) -> Any:
    """For a field `input` that holds one text, or the token ids of one."""
    checked = checked_input(value)
    if isinstance(checked, list) and not _is_id(checked[0]):
        _fail("invalid_input", "expected one text, or token ids of one", checked, "input")
    return checked


class _InputError(ValueError):
    def __init__(self, code: str, message: str, param: str):
        super().__init__(message)
        self.code = code
        self.param = param


def _fail(code: str, expected: str, value: Any, param: str) -> NoReturn:
    came = f"{type(value).__name__}{' (empty)' if value in ('', [], {}) else ''}"
    raise _InputError(code, f"{param}: {expected}, got {came}", param)


def _text(value: str, param: str) -> str:
    try:
        return _encodable(value)
    except ValueError as error:
        raise _InputError("invalid_unicode", f"{param}: {error}", param) from None


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _same_kind(item: Any, first: Any, index: int) -> None:
    if _is_id(first) and _is_id(item):
        return
    param = f"input.{index}"
    if isinstance(first, str) and isinstance(item, str):
        _text(item, param)
    elif isinstance(first, list) and isinstance(item, list):
        if not item:
            _fail("empty_input", "expected at least one token id", item, param)
        if not all(map(_is_id, item)):
            _fail("invalid_input", "expected whole numbers", next(i for i in item if not _is_id(i)), param)
    else:
        _fail("invalid_input", "expected all texts, all token ids or all lists of token ids", item, param)


async def read_json(request: Request) -> dict[str, Any]:
    """The JSON object of a request.

    Raises:
        ApiError: 415 for another media type; 400 for what is not JSON (NaN and Infinity are not) or not an object.
    """
    media, _, rest = request.headers.get("content-type", "").partition(";")
    charset = rest.strip().lower().removeprefix("charset=").strip('"') or "utf-8"
    if media.strip().lower() != "application/json" or charset not in ("utf-8", "utf8"):
        came = printable(request.headers.get("content-type", "")) or "no content type"
        raise ApiError(415, "unsupported_media_type", f"expected application/json in UTF-8, got {came}")
    try:
        value = json.loads((await request.body()).decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else _reason(error)
        raise ApiError(400, "invalid_json", f"expected a JSON object, got a body that is not JSON: {reason}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "invalid_json", f"expected a JSON object, got {type(value).__name__}")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"no UTF-8 at byte {error.start}"
    return printable(str(error))


def parse(kind: type[Parsed], value: dict[str, Any]) -> Parsed:
    """A checked request.

    Raises:
        ApiError: 422 with the first field that is wrong in `param`; what was sent is not repeated.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as failed:
        error = failed.errors(include_input=False, include_url=False)[0]
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, _InputError):
        raise ApiError(422, cause.code, str(cause), cause.param)
    param = printable(".".join(str(part) for part in error["loc"])) or "body"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = f"unknown field, expected some of {', '.join(kind.model_fields)}"
    raise ApiError(422, "invalid_request", f"{param}: {message}", param)
