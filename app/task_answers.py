"""What the answers of a model's tasks look like, for /openapi.json only (see app.answers)."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from app.schemas import Mode


class Usage(BaseModel):
    """Tokens that were read."""

    prompt_tokens: int
    total_tokens: int


class RepairPart(BaseModel):
    """What `exact` did beside the plan, summed over heads and batches."""

    rows: int
    proven: int = Field(description="Rows whose bound proves that nothing is missing.")
    repaired: int = Field(description="Rows that got keys beside the plan.")
    survivors: int = Field(description="Pairs that the bound could not rule out.")
    most_survivors: int = Field(description="The most of one row.")
    added: int = Field(description="Pairs added to the plan.")


class LayerPart(BaseModel):
    """What one layer did for this request."""

    layer: int
    ran: dict[str, int] = Field(description="How many of its passes each path computed.")
    computed_density: float = Field(description="Computed / legal pairs.")
    sparsity: float
    repair: RepairPart | None = Field(None, description="Of `exact` only; absent elsewhere.")


class PointPart(BaseModel):
    """A working point, by its calibration."""

    density: float
    recall: float


class RequestedPart(BaseModel):
    """Which working point was asked for, in the request's own word, and which one that is."""

    density: float | None = None
    recall_target: float | None = None
    point: PointPart


class AttentionPart(BaseModel):
    """Which attention computed the answer."""

    attention: Mode
    artifact: str
    artifact_version: str
    set: str = Field(description="The pairs that densities are of.")
    computed_density: float = Field(description="Mean over layers and heads.")
    layers: list[LayerPart]
    tokens: list[int] = Field(description="Tokens of each input, special ones included.")
    truncated: list[bool] = Field(description="Which inputs were cut.")
    queue_ms: float = Field(description="From known tokens to the first batch.")
    inference_ms: float = Field(description="Of the batches that held these inputs.")
    requested: RequestedPart | None = Field(None, description="Where a working point was asked for; absent elsewhere.")


class Embedding(BaseModel):
    """The vector of one input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="Numbers, or base64 of little-endian float32.")


class EmbeddingAnswer(BaseModel):
    """OpenAI's list of embeddings, and our part `sparsefinder`."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage
    sparsefinder: AttentionPart


class FoundWord(BaseModel):
    """A word in the place of a mask."""

    target: str | None = Field(None, description="As it was asked for; absent where no targets were.")
    id: int
    piece: str | None
    probability: float
    logprob: float


class MaskPart(BaseModel):
    """One mask of a text."""

    position: int = Field(description="Which token of the text.")
    words: list[FoundWord]


class FilledText(BaseModel):
    """The masks of one text."""

    object: Literal["fill_mask"]
    index: int
    masks: list[MaskPart]


class FillMaskAnswer(BaseModel):
    """For every mask of every text: words with their probabilities."""

    object: Literal["list"]
    data: list[FilledText]
    model: str
    usage: Usage
    sparsefinder: AttentionPart


class LikelyWord(BaseModel):
    """A word that the model finds likely at some place."""

    id: int
    piece: str | None
    logprob: float


class ScoredText(BaseModel):
    """One text, token by token; the first has nothing before it, so its place holds null."""

    object: Literal["score"]
    index: int
    ids: list[int]
    pieces: list[str | None]
    logprobs: list[float | None]
    sum: float
    mean: float
    perplexity: float
    scored_tokens: int
    top: list[list[LikelyWord] | None] | None = Field(None, description="Where top_k was asked for; absent elsewhere.")


class ScoreAnswer(BaseModel):
    """How likely each text is."""

    object: Literal["list"]
    data: list[ScoredText]
    model: str
    usage: Usage
    sparsefinder: AttentionPart


Span = Annotated[list[int], Field(min_length=2, max_length=2, description="Characters of the text, from and to.")]


class TokenizedText(BaseModel):
    """One text in tokens."""

    object: Literal["tokens"]
    index: int
    ids: list[int]
    pieces: list[str | None]
    offsets: list[Span | None]
    tokens: int
    exceeds_max_tokens: bool


class VersionPart(BaseModel):
    """Whose tokens they are."""

    artifact: str
    artifact_version: str


class TokenizeAnswer(BaseModel):
    """The tokens of each text."""

    object: Literal["list"]
    data: list[TokenizedText]
    model: str
    max_tokens: int
    sparsefinder: VersionPart
