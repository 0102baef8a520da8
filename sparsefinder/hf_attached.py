"""A model whose attention is ours: its layers, predictors and modes, and what a mode's caller sees of each layer."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from sparsefinder.attention.crossover import Crossover, ExpectedDensity, Setting, tile_rows
from sparsefinder.attention.measure_crossover import load_crossover, make_setting, shipped_crossover
from sparsefinder.certificate import Repair
from sparsefinder.errors import ConfigError
from sparsefinder.generation import Generation
from sparsefinder.hf_verify import Caller
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.legal import Legal
from sparsefinder.plan import Plan
from sparsefinder.predictors import Predictor, layer_plan
from sparsefinder.working_points import WorkingPoint, at_point, point_at

Mode = Literal["dense", "sparse", "exact", "auto"]
MODES: tuple[Mode, ...] = ("dense", "sparse", "exact", "auto")
Ran = Literal["dense", "sparse", "exact"]
CACHED_CUTS = 128  # densities of one model whose predictors are kept


@dataclass(frozen=True)
class LayerInput:
    """What one attention layer is about to compute: scores are `scale[h] * q_i · k_j + bias` over the legal pairs."""

    layer: int
    q: Float[Tensor, "B H N D"]
    k: Float[Tensor, "B Hkv M D"]
    v: Float[Tensor, "B Hkv M Dv"]
    legal: Legal
    scale: Float[Tensor, " H"]
    bias: Float[Tensor, "#B H N M"] | None  # of relative positions (T5), for each item or for all
    alpha: float


@dataclass(frozen=True)
class LayerCall(LayerInput):
    """A layer that has been computed: what ran, its plan (None where all legal pairs were computed) and output.

    repair: what mode `exact` had to add to the plan; None where no plan was repaired.
    """

    ran: Ran
    plan: Plan | None
    output: Float[Tensor, "B H N Dv"]
    repair: Repair | None = None


Observe = Callable[[LayerCall], None]
PlanFor = Callable[[LayerInput], Plan | None]


@dataclass(frozen=True)
class Cut:
    """What the layers are cut by: predictors, and the computed density that plans of each layer had in calibration."""

    predictors: tuple[Predictor | None, ...]
    expected: tuple[ExpectedDensity | None, ...]


@dataclass(frozen=True)
class Run:
    """How the next forward passes of this thread attend.

    crossover: what `auto` decides by. cut: another one than the served, for a density that was asked for.
    """

    mode: Mode
    observe: Observe | None = None
    plan_for: PlanFor | None = None
    generation: Generation | None = None
    crossover: Crossover | None = None
    cut: Cut | None = None


def require_exact(alpha: float) -> None:
    """ConfigError where no plan can be proved exact: under softmax every key has weight."""
    if alpha == 1:
        raise ConfigError("mode: exact needs entmax (alpha above 1), got softmax, where every dropped key has weight")


class _Thread(threading.local):
    """This thread's runs; how often its forward pass called each shared module, and how many tokens came before it."""

    def __init__(self) -> None:
        self.runs: list[tuple[Attached, Run]] = []
        self.turns: dict[torch.nn.Module, int] = {}
        self.cached = 0


THREAD = _Thread()


class Attached:
    """A model whose attention is ours, made by `attach`. `using` chooses the mode, `callers` run the layers.

    crossover: the table that `auto` decides by; the shipped one until another is put here (see `load_crossover`).
    expected: what plans of each layer had as computed density in calibration, None where that is not known.
    points: the working points of the artifact, where it has any; point_tokens: length of the texts of its calibration.
    """

    def __init__(
        self, model: Any, alpha: float, head_scale: Tensor, predictors: Sequence[Predictor | None], positional: Pattern
    ):
        self.model = model
        self.alpha = alpha
        self.head_scale = head_scale
        self.predictors = tuple(predictors)
        self.positional = positional
        self.tile_size: int | Tensor = 32
        self.crossover: Crossover | None = None
        self.expected: tuple[ExpectedDensity | None, ...] = ()
        self.points: tuple[WorkingPoint, ...] = ()
        self.point_tokens = 0
        self._cuts: dict[float, Cut] = {}  # a cache of functools here would keep the model alive with itself
        self.callers: tuple[Caller, ...] = ()
        self.places: dict[torch.nn.Module, list[int]] = {}

    @contextlib.contextmanager
    def using(
        self,
        mode: Mode,
        *,
        observe: Observe | None = None,
        plan_for: PlanFor | None = None,
        density: float | None = None,
    ) -> Iterator[None]:
        """Run the forward passes inside in `mode`; `observe` sees every layer, and which path ran.

        `dense`: the transform over all legal pairs. `sparse`: over the plan. `auto`: in every layer the one of the two
        that the crossover says is faster for this batch, so the same text may be answered by either beside other texts.
        Cross-attention and passes that continue a key-value cache are then dense: no plan pays for itself there.
        `exact`: over the plan, with every row proved to be that of `dense` or repaired until it is (see `certificate`).

        plan_for: takes the place of the predictors; a layer for which it gives None computes all its legal pairs.
        density: the artifact's working point at this computed density takes the place of the served one. Densities are
            those of the texts of the calibration; shorter texts need a greater share, longer ones a smaller one.

        Raises:
            ConfigError: an unknown mode; one other than `dense` without predictors or `plan_for`; `exact` with α = 1;
                `auto` on a device for which no crossover is shipped and none was measured; a density with the mode
                `dense`, with `plan_for`, or outside of the artifact's working points.
        """
        if mode not in MODES:
            raise ConfigError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
        if mode != "dense" and not self.predictors and plan_for is None:
            raise ConfigError(f"mode: {mode} needs fitted predictors, this model was attached without any")
        if mode == "exact":
            require_exact(self.alpha)
        if density is not None and (mode == "dense" or plan_for is not None):
            raise ConfigError("density: expected a mode with a plan of the predictors (sparse, exact or auto)")
        cut = None if density is None else self.cut_at(density)
        crossover = (self.crossover or self.ship_crossover()) if mode == "auto" else None
        with self._on(Run(mode, observe, plan_for, crossover=crossover, cut=cut)):
            yield

    def cut_at(self, density: float) -> Cut:
        """The predictors of a working point; they share their tensors with the served ones. Errors as in `point_at`."""
        cut = self._cuts.get(density)
        if cut is None:
            if len(self._cuts) >= CACHED_CUTS:
                self._cuts.clear()
            cut = self._cuts[density] = self._cut_at(density)
        return cut

    def _cut_at(self, density: float) -> Cut:
        point = point_at(self.points, density)
        predictors = tuple(at_point(predictor, point) for predictor in self.predictors)
        known = [share if self.point_tokens else None for share in point.layers]
        expected = (None if share is None else ExpectedDensity(share, self.point_tokens) for share in known)
        return Cut(predictors, tuple(expected))

    def ship_crossover(self) -> Crossover:
        """Let `auto` decide by the shipped times that are nearest to this model's, as it does before any are loaded.

        Raises:
            ConfigError: none are shipped for the device of this model.
        """
        self.crossover = shipped_crossover(self.setting(), self.head_scale.device)
        return self.crossover

    def setting(self) -> Setting:
        """What the times of this model's layers depend on beside their size."""
        config, predictor = self.model.config, next((p for p in self.predictors if p is not None), None)
        heads = self.head_scale.shape[1]
        rank = getattr(getattr(predictor, "projections", None), "rank", None)
        kind = "none" if predictor is None else predictor.kind if rank is None else f"{predictor.kind} of rank {rank}"
        return make_setting(
            device=self.head_scale.device,
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(
                getattr(config, "head_dim", None) or getattr(config, "d_kv", 0) or config.hidden_size // heads
            ),
            alpha=self.alpha,
            causal=any(bool(getattr(caller.module, "is_causal", False)) for caller in self.callers),
            predictor=kind,
            rows=tile_rows(self.tile_size),
        )

    def load_crossover(self) -> Crossover:
        """Let `auto` decide by times of this model's predictors on this machine: kept ones, or ones that are measured
        now (some seconds, best while nothing else runs) and kept in the user's cache folder.

        Raises:
            ConfigError: the model was attached without predictors.
        """
        predictor = next((p for p in self.predictors if p is not None), None)
        if predictor is None:
            raise ConfigError("crossover: expected a model with fitted predictors, got one attached without any")

        def predict(q: Tensor, k: Tensor, legal: Legal) -> Plan:
            return layer_plan(predictor, q, k, legal, self.positional, self.tile_size)

        self.crossover = load_crossover(self.setting(), predict, self.head_scale.device)
        return self.crossover

    @contextlib.contextmanager
    def generation(self, *, observe: Observe | None = None) -> Iterator[None]:
        """Run the forward passes inside `sparse` with a key-value cache, as `generate` does: see `Generation`.

        A pass without a cache is the prefill of a new text, every later one continues it. `observe` sees each token of
        those by itself. One text, or left-padded batch of texts, at a time.

        Raises:
            ConfigError: the model was attached without predictors.
            PatternError: a predictor ranks over the whole sequence, so it cannot be asked for the next token alone.
        """
        if not self.predictors:
            raise ConfigError("generation: expected a model with fitted predictors, got one attached without any")
        state = Generation(self.predictors, self.positional, self.tile_size)
        with self._on(Run("sparse", observe, generation=state)):
            yield

    @contextlib.contextmanager
    def watching(self, observe: Observe) -> Iterator[None]:
        """Let `observe` see the layers too, beside whoever observes the run that is on."""
        run = self.run()

        def both(call: LayerCall) -> None:
            if run.observe is not None:
                run.observe(call)
            observe(call)

        with self._on(replace(run, observe=both)):
            yield

    @contextlib.contextmanager
    def _on(self, run: Run) -> Iterator[None]:
        THREAD.runs.append((self, run))
        try:
            yield
        finally:
            THREAD.runs.pop()

    def run(self) -> Run:
        """The run that is on: the innermost `using` of this model, else sparse where there are predictors."""
        for owner, run in reversed(THREAD.runs):
            if owner is self:
                return run
        return Run("sparse" if self.predictors else "dense")
