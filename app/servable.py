"""What the service needs of a loaded model, and the values that pass between routes, engine and model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from app.audit import AuditedLayer, Sample
from app.layers import RanLayer
from app.schemas import Mode
from sparsefinder.certificate import Repair

Vectors = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]
Ids = list[int]


@dataclass(frozen=True)
class Description:
    """What answers and /info say about a loaded artifact."""

    artifact: str
    version: str
    folder: str
    teacher: str
    teacher_fingerprint: str
    predictor: str
    alpha: float
    layers: int
    heads: int
    dimensions: int
    max_tokens: int
    vocabulary: int
    device: str
    threads: int
    modes: tuple[Mode, ...]


@dataclass(frozen=True)
class Forward:
    """One batch: vectors `[B, d]`, pairs computed per layer and head `[L, H]`, legal pairs, what an audit looks at.

    ran: which path computed each layer. repairs: of mode `exact`, per layer; None where no plan was repaired.
    """

    vectors: Vectors
    computed: Counts
    legal: int
    ran: tuple[str, ...]
    audit: tuple[AuditedLayer, ...] = ()
    repairs: tuple[Repair | None, ...] = ()


@runtime_checkable
class Servable(Protocol):
    """A loaded artifact with its model. Only the worker thread calls its methods."""

    @property
    def description(self) -> Description:
        """Names, sizes and versions."""
        ...

    @property
    def calibration(self) -> dict[str, Any] | None:
        """Figures per layer and head from the artifact's card, as /v1/sparsity shows them."""
        ...

    def tokenize(self, texts: Sequence[str]) -> list[Ids]:
        """Token ids of each text, special tokens included, never cut."""
        ...

    def blank(self, ids: Ids) -> bool:
        """Whether there is nothing but special tokens."""
        ...

    def cut(self, ids: Ids) -> Ids:
        """The first `max_tokens` tokens; a special token at the end stays there."""
        ...

    def forward(self, ids: Sequence[Ids], mode: Mode, sample: Sample | None) -> Forward:
        """The embeddings of one batch."""
        ...


@runtime_checkable
class Loader(Protocol):
    """How artifacts are loaded; `read` runs beside the worker (files and hashes), `build` on it (it runs the model)."""

    def read(self, folder: Path) -> Any:
        """The checked content of an artifact folder."""
        ...

    def build(self, content: Any) -> Servable:
        """A model that can serve it."""
        ...


@dataclass(frozen=True)
class Job:
    """What one request asks for: texts or token ids."""

    inputs: Sequence[str] | Sequence[Ids]
    mode: Mode
    truncate: bool
    single: bool = False


@dataclass(frozen=True)
class Answer:
    """What one request gets; everything came from one artifact."""

    vectors: Vectors
    tokens: tuple[int, ...]
    truncated: tuple[bool, ...]
    description: Description
    density: float
    layers: tuple[RanLayer, ...]
    inference_ms: float
