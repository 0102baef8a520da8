"""What the answers of a model's tasks look like, for /openapi.json only (see app.answers)."""

from typing import Literal

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
