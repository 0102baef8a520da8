"""What the service needs of a loaded model, and the values that pass between routes, engine and model."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from app.audit import AuditedLayer, Sample
from app.layers import RanLayer
from app.schemas import Mode
from app.vocabulary import Vocabulary
from sparsefinder.certificate import Repair
from sparsefinder.working_points import WorkingPoint

Vector = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]
Ids = list[int]
Task = Literal["embed", "fill_mask", "score", "graph"]


@dataclass(frozen=True)
class Lane:
    """What items must have in common to be computed in one forward pass.

    density: a working point of the artifact; None is the one it serves. options: whatever else a task depends on.
    requested: in which words the density was asked for, for the answer alone: lanes that differ in it are equal.
    """

    task: Task
    mode: Mode
    density: float | None = None
    options: Hashable = None
    requested: tuple[str, float] | None = field(default=None, compare=False)


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
    tasks: tuple[Task, ...] = ("embed",)
    causal: bool = False
    packs: bool = False  # embeds a batch without computing its padding
    fill_mask_modes: tuple[Mode, ...] = ()  # those whose weights its fill-mask head fits
    points: tuple[WorkingPoint, ...] = ()  # of the artifact, none where its card has none


def computes_no_padding(description: Description, task: Task) -> bool:
    """Whether batches of this task are packed."""
    return task == "embed" and description.packs


@dataclass(frozen=True)
class Forward:
    """One batch of B items. computed: pairs per item, layer and head. legal: pairs that exist, per item.

    outputs: one per item, an array or a value with a property `finite`.
    ran: which path computed each layer.
    audits: one per sample, what an audit looks at; copying_seconds: what making them took.
    repairs: of mode `exact`, per layer; None where no plan was repaired.
    """

    outputs: Sequence[Any]
    computed: Counts  # [B, L, H]
    legal: Counts  # [B]
    ran: tuple[str, ...]
    audits: tuple[tuple[AuditedLayer, ...], ...] = ()
    repairs: tuple[Repair | None, ...] = ()
    copying_seconds: float = 0.0


@runtime_checkable
class Servable(Protocol):
    """A loaded artifact with its model. `forward` belongs to the worker thread, the others to the reader's."""

    @property
    def description(self) -> Description:
        """Names, sizes and versions."""
        ...

    @property
    def calibration(self) -> dict[str, Any] | None:
        """Figures per layer and head from the artifact's card, as /v1/sparsity shows them."""
        ...

    @property
    def words(self) -> Vocabulary:
        """Its vocabulary. Only `pieces` of it may be asked for off the reader thread."""
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

    def forward(self, ids: Sequence[Ids], lane: Lane, samples: Sequence[Sample]) -> Forward:
        """One batch; each sample names an item of it by its place."""
        ...


@runtime_checkable
class Loader(Protocol):
    """How artifacts are loaded; `read` runs beside the worker (files and hashes), `build` on it (it runs the model)."""

    @property
    def device(self) -> str:
        """Where its models run, `cpu` or `cuda`."""
        ...

    def read(self, folder: Path) -> Any:
        """The checked content of an artifact folder."""
        ...

    def build(self, content: Any) -> Servable:
        """A model that can serve it."""
        ...


Check = Callable[[Servable, Sequence[Ids]], None]


@dataclass(frozen=True)
class Asked:
    """What one request asks for: texts or token ids, how they are computed, and by which model, come what may.

    check: raises ApiError for what only the task knows to be wrong with the ids, which were cut by then.
    """

    model: Servable
    inputs: Sequence[str] | Sequence[Ids]
    lane: Lane
    truncate: bool
    single: bool = False
    check: Check | None = None


@dataclass(frozen=True)
class Answer:
    """What one request gets, an output per item; everything came from one artifact.

    queue_ms: from the moment its tokens were known until its first batch began. inference_ms: of the batches that held
    items of it, which it may have shared with other requests.
    """

    outputs: tuple[Any, ...]
    ids: tuple[Ids, ...]
    truncated: tuple[bool, ...]
    description: Description
    density: float
    layers: tuple[RanLayer, ...]
    queue_ms: float
    inference_ms: float
    lane: Lane

    @property
    def tokens(self) -> tuple[int, ...]:
        """How many tokens of each item were read."""
        return tuple(len(item) for item in self.ids)
