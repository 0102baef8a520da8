"""Artifacts: a folder with `card.json` and safetensors, written at once or not at all, checked before it is believed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from sparsefinder.predictors import Predictor, Projections

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Card:
    """What an artifact says of itself. `hash` and `version` are filled in by `save`.

    The content hash covers what decides an answer: teacher, sizes, α, head scale, served predictors and tensors; not
    `libraries`, `training` and `calibration`, so the same seed gives the same hash on another day.
    """

    teacher: str  # packaged name, folder or hub id
    teacher_fingerprint: str  # sha256 of architecture and weights
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    alpha: float
    head_scale: tuple[tuple[float, ...], ...]  # [layers][heads], factor on D**-0.5
    objective: str
    served: str  # for people, for example "listwise-r8"
    window_size: int  # odd; 0 = no window
    global_tokens: int
    tile_size: int
    calibration: Mapping[str, Any] = field(default_factory=dict)  # JSON
    training: Mapping[str, Any] = field(default_factory=dict)  # JSON: command, seed, data, figures
    libraries: Mapping[str, str] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION
    hash: str = ""

    @property
    def version(self) -> str:
        """First 12 hexadecimal digits of the content hash."""
        return self.hash[:12]


@dataclass(frozen=True, eq=False)
class Artifact:
    """Everything a service or a benchmark needs: served predictors, and the named alternatives beside them."""

    card: Card
    layers: tuple[Predictor, ...]  # the served predictor of each layer
    projections: Mapping[str, tuple[Projections, ...]] = field(default_factory=dict)  # "hinge-r4" -> one per layer
    centroids: Mapping[str, tuple[Float[Tensor, "H B r"], ...]] = field(default_factory=dict)
    thresholds: Mapping[str, tuple[Float[Tensor, " H"], ...]] = field(default_factory=dict)
    delta: Mapping[str, Tensor] = field(default_factory=dict)  # teacher delta, {} = the teacher as it is


def save(path: str | Path, artifact: Artifact) -> Card:
    """Write `artifact` to the folder `path`; returns the card with its hash."""
    raise NotImplementedError


def load(path: str | Path) -> Artifact:
    """Read and check the artifact at `path`."""
    raise NotImplementedError
