"""What a run is: frozen dataclasses, and functions that return a whole configuration."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from sparsefinder.edges import check_gold_mass
from sparsefinder.errors import ConfigError

Objective = Literal["hinge", "hinge-sum", "logistic", "bilinear", "listwise"]
Kind = Literal["distance", "score", "clusters", "budget", "tiles"]
Measure = Literal["recall", "mass", "density", "output"]
Form = Literal["all", "attention", "lora", "scales"]
FORMS: tuple[Form, ...] = get_args(Form)

# Steps of one size suit each form: whole weights diverge at what the factors of LoRA need (docs/decisions.md).
LEARNING_RATES: dict[Form, float] = {"all": 4e-4, "attention": 4e-4, "lora": 1.5e-3, "scales": 0.0}

CLUSTER_COUNTS = (8, 16, 32, 64)  # of the centroids that are kept for every metric set of maps, for comparisons

# What each objective's scores can be cut by; the first is served where nothing else is asked for.
KINDS: dict[str, tuple[Kind, ...]] = {
    "hinge": ("distance", "clusters", "budget"),
    "hinge-sum": ("distance", "clusters", "budget"),
    "logistic": ("distance", "clusters", "budget"),
    "bilinear": ("score", "budget"),
    "listwise": ("tiles",),
}


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name}: expected at least {least}, got {value}")


@dataclass(frozen=True)
class ExtractConfig:
    """Whose attention is extracted, on which text, and how much of it.

    teacher: packaged name, folder or hub id. artifact: folder whose teacher delta, α and head scale are used; empty =
    the teacher as it is, with α-entmax on its own scores. gold_mass: where α is 1, what the gold keys of a row hold.
    text: the user's files; none = the embedded default.
    """

    teacher: str = "minilm"
    artifact: str = ""
    text: tuple[str, ...] = ()
    tokens: int = 256
    instances: int = 96
    heldout_instances: int = 32
    shard_size: int = 8
    alpha: float = 1.5
    gold_mass: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "instances", "heldout_instances", "shard_size"):
            _at_least(name, getattr(self, name), 1)
        check_gold_mass(self.gold_mass)


@dataclass(frozen=True)
class FitConfig:
    """How projections are trained, and how the served predictor is cut.

    Exactly one of `recall` and `sparsity` is the target, a fraction, of the served set on held-out text.
    rows: query rows of each instance in a step; tiles: tiles of each, evenly spread (None = all). positive_power:
    weight of gold pairs, see `objectives.logistic`. also: further (objective, rank) pairs to train and to keep beside
    the served one.
    """

    objective: Objective = "listwise"
    kind: Kind | None = None
    rank: int = 4
    shared: bool = False
    recall: float | None = 0.9
    sparsity: float | None = None
    clusters: int = 16
    top: int | None = None
    steps: int = 200
    learning_rate: float = 2e-2
    instances: int = 2
    rows: int = 32
    tiles: int | None = None
    margin: float = 1.0
    positive_power: float = 0.5
    mass_power: float = 0.5
    log_distance: bool = True
    window_size: int = 9
    global_tokens: int = 1
    tile_size: int = 16
    seed: int = 0
    also: tuple[tuple[Objective, int], ...] = field(default=())

    def __post_init__(self) -> None:
        if self.objective not in KINDS:
            raise ConfigError(f"objective: expected one of {', '.join(KINDS)}, got {self.objective!r}")
        if self.kind is not None and self.kind not in KINDS[self.objective]:
            allowed = ", ".join(KINDS[self.objective])
            raise ConfigError(f"predictor: {self.objective} maps go with {allowed}, got {self.kind!r}")
        if (self.recall is None) == (self.sparsity is None):
            raise ConfigError("target: expected exactly one of recall and sparsity")
        for name in ("recall", "sparsity"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < 1.0:
                raise ConfigError(f"{name}: expected a fraction between 0 and 1, got {value}")
        for name in ("rank", "clusters", "steps", "instances", "rows"):
            _at_least(name, getattr(self, name), 1)
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ConfigError(f"learning_rate: expected a number above 0, got {self.learning_rate}")
        if self.tiles is not None:
            _at_least("tiles", self.tiles, 1)
        if self.top is not None and not 1 <= self.top <= self.clusters:
            raise ConfigError(f"top: expected 1 to {self.clusters} clusters, got {self.top}")

    @property
    def served_kind(self) -> Kind:
        """The kind of predictor that is served."""
        return self.kind or KINDS[self.objective][0]


@dataclass(frozen=True)
class Target:
    """What is asked for: at least this `recall` or `mass`, at most this `density`, or at most this error of the output.

    The error is the root mean square over layers of `‖Δ‖ / ‖O‖`, where `O` is what attention adds to the residual
    stream and the errors `Δ` of different heads are taken to be orthogonal.

    Raises:
        ConfigError: a value that is no fraction between 0 and 1.
    """

    measure: Measure
    value: float

    def __post_init__(self) -> None:
        if not 0.0 < self.value < 1.0:
            raise ConfigError(f"{self.measure}: expected a fraction between 0 and 1, got {self.value}")


@dataclass(frozen=True)
class RunConfig:
    """Extract, fit and evaluate in one go. target: allot budgets to heads for it, in place of the fit's own cut."""

    extract: ExtractConfig = ExtractConfig()
    fit: FitConfig = FitConfig()
    target: Target | None = None


@dataclass(frozen=True)
class FinetuneConfig:
    """How a student is trained.

    form: what is trained beside the heads' scales, all weights of the layers, those of their attention, low-rank paths
    beside them, or nothing (`scales`). rank: of LoRA and of the stored delta. learning_rate: None = the form's own.
    scale_rate: learning rate of each head's log scale, 0 = no scale learns. start_scale: of all heads; None = each
    head's own, fitted to the original's attention (`training.head_scale`). density: what the mean density over heads is
    held to, a fraction of legal pairs; None = what the loss comes to.
    local_steps: so many first steps compare each attention layer by itself (`distances.layers_distance`).
    embedding_weight, mlm_weight, mlm_share: of encoders. hidden_weight, positions: of causal models, what the angles
    of hidden states count beside the next words, and at how many places of a batch words are compared.
    """

    teacher: str = "minilm"
    form: Form = "lora"
    rank: int = 64
    steps: int = 600
    batch_size: int = 8
    tokens: int = 256
    learning_rate: float | None = None
    scale_rate: float = 0.01
    warmup: int = 20
    alpha: float = 1.5
    start_scale: float | None = 0.75
    density: float | None = 0.057
    local_steps: int = 0
    embedding_weight: float = 5.0
    mlm_weight: float = 0.1
    mlm_share: float = 0.15
    hidden_weight: float = 1.0
    positions: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rank", "steps", "batch_size", "tokens", "positions"):
            _at_least(name, getattr(self, name), 1)
        if self.form not in FORMS:
            raise ConfigError(f"form: expected one of {', '.join(FORMS)}, got {self.form!r}")
        for name in ("density", "start_scale"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name}: expected a number above 0, got {value}")


def smollm2_finetune() -> FinetuneConfig:
    """SmolLM2-135M: each head's own scale, then LoRA, layer by layer first; no density is asked for."""
    return FinetuneConfig(
        teacher="smollm2", rank=16, steps=110, batch_size=1, tokens=1024, learning_rate=1.2e-3, warmup=10,
        start_scale=None, density=None, local_steps=50, positions=512,
    )  # fmt: skip


FINETUNES: dict[str, Callable[[], FinetuneConfig]] = {"smollm2": smollm2_finetune}


def finetune_config(teacher: str) -> FinetuneConfig:
    """The configuration that a teacher's finetuning starts from: one of its own, or the default."""
    return FINETUNES[teacher]() if teacher in FINETUNES else FinetuneConfig(teacher=teacher)


@dataclass(frozen=True)
class MlmHeadConfig:
    """How a fill-mask head is trained on a frozen teacher.

    batches: of `batch_size` texts that the teacher reads, each masked once. epochs: passes of the head over their
    masked positions, `positions` of them in a step.
    """

    teacher: str = "minilm"
    artifact: str = ""
    tokens: int = 256
    batch_size: int = 8
    batches: int = 600
    epochs: int = 4
    positions: int = 512
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "batch_size", "batches", "epochs", "positions"):
            _at_least(name, getattr(self, name), 1)


def minilm() -> RunConfig:
    """The shipped artifact's predictors: every objective at rank 4 and 8, `listwise` at rank 8 served."""
    also: tuple[tuple[Objective, int], ...] = tuple(
        (objective, rank)
        for objective in get_args(Objective)
        for rank in (4, 8)
        if (objective, rank) != ("listwise", 8)
    )
    return RunConfig(ExtractConfig(artifact="artifacts/minilm-entmax"), FitConfig(rank=8, also=also))


def smollm2() -> RunConfig:
    """SmolLM2-135M as it is, softmax, at 2048 tokens: 30 layers of tile predictors, a quarter of the pairs allotted."""
    return RunConfig(
        ExtractConfig(
            teacher="smollm2", tokens=2048, instances=12, heldout_instances=6, shard_size=1, alpha=1.0
        ),
        FitConfig(rank=8, tile_size=32, tiles=16, window_size=33),
        Target("density", 0.25),
    )  # fmt: skip


RUNS: dict[str, Callable[[], RunConfig]] = {"smollm2": smollm2}


def run_config(teacher: str) -> RunConfig:
    """The configuration that a teacher starts from: one of its own, or the default."""
    return RUNS[teacher]() if teacher in RUNS else RunConfig()


@dataclass(frozen=True)
class SweepConfig:
    """What `sweep` runs: the grid of Treviso et al. (2022, section 5), and how much text it is measured on.

    thresholds: distances, lengths. densities: shares of pairs that per-head thresholds and per-row budgets aim at.
    buckets: numbers of clusters, bins and buckets. counts: random keys or blocks of a query, random global tokens.
    windows: sizes, odd or 0; those beyond the length are left out. train_instances: for centroids and gates.
    fit_steps: of the maps of chunks and blocks, which an artifact does not hold.
    quality_points: settings at which the attention is really replaced, over `quality_instances`.
    """

    tokens: int = 256
    instances: int = 200
    train_instances: int = 16
    thresholds: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0)
    densities: tuple[float, ...] = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6)
    buckets: tuple[int, ...] = (2, 4, 6, 8, 10, 12, 16, 20)
    counts: tuple[int, ...] = (2, 4, 6, 8, 10, 12, 16, 20)
    windows: tuple[int, ...] = (0, 1, 3, 5, 7, 9, 11, 15, 19, 23, 27, 31, 41, 51, 75, 101, 125, 151, 175, 201, 251)
    tile_sizes: tuple[int, ...] = (8, 16, 32)
    fit_steps: int = 200
    quality_points: int = 40
    quality_instances: int = 24
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "instances", "train_instances", "fit_steps", "quality_instances"):
            _at_least(name, getattr(self, name), 1)
        _at_least("quality_points", self.quality_points, 0)
        if 0 not in self.windows or any(size and size % 2 == 0 for size in self.windows):
            raise ConfigError(f"windows: expected 0 and odd sizes, got {self.windows}")


def paper_mlm() -> SweepConfig:
    """The paper's grid for encoders."""
    return SweepConfig()


def quick_form(config: SweepConfig) -> SweepConfig:
    """The same rows on little text and every few points of the grid."""
    return dataclasses.replace(
        config, instances=12, train_instances=8, buckets=(4, 16), counts=(4, 12),
        windows=(0, 1, 5, 11, 27, 75, 151), tile_sizes=(16,), fit_steps=40, quality_points=8, quality_instances=8,
    )  # fmt: skip


SWEEPS: dict[str, Callable[[], SweepConfig]] = {"paper-mlm": paper_mlm}


def as_dict(config: Any) -> dict[str, Any]:
    """A configuration as plain JSON, for manifests and cards."""
    return dataclasses.asdict(config)
