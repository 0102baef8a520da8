"""What the answer of /v1/attention looks like, for /openapi.json only (see app.answers)."""

from typing import Literal

from pydantic import BaseModel, Field

from app.task_answers import AttentionPart, Span, Usage


class PairRows(BaseModel):
    """Pairs row by row: query i has the keys from offsets[i] to offsets[i + 1]."""

    offsets: list[int]
    keys: list[int]


class GoldPairRows(PairRows):
    """The pairs that attention needs, and what it gives to each."""

    weights: list[float]


class BucketsPart(BaseModel):
    """The buckets of every token, as a query and as a key."""

    of: str
    served: bool = Field(description="Whether they are what predicts.")
    buckets: int
    queries: list[list[int]]
    keys: list[list[int]]


class HeadPart(BaseModel):
    """The graphs of one head; those that were not asked for are absent."""

    head: int
    measures: dict[str, dict[str, float | None]] = Field(description="Of each set; null without a denominator.")
    plan: PairRows = Field(description="What was computed.")
    pattern: PairRows | None = Field(None, description="What was predicted before windows, global tokens and tiles.")
    gold: GoldPairRows | None = None
    missed: PairRows | None = Field(None, description="Gold pairs that the plan lacks.")
    clusters: BucketsPart | None = None


class GraphLayerPart(BaseModel):
    """One layer."""

    layer: int
    ran: str = Field(description="Which path computed it.")
    window: int | None = Field(description="Radius of its own sliding window; null where it has none.")
    legal_pairs: int
    heads: list[HeadPart]


class TokensPart(BaseModel):
    """The tokens of the text; offsets are null where a token stands for no characters."""

    ids: list[int]
    pieces: list[str | None]
    offsets: list[Span | None]


class GraphAnswer(BaseModel):
    """Which keys every query reads, per layer and head."""

    object: Literal["attention"]
    model: str
    alpha: float
    tokens: TokensPart
    usage: Usage
    sparsefinder: AttentionPart
    gold: str | None = Field(description="What counts as needed; null where it was not asked for.")
    layers: list[GraphLayerPart]
