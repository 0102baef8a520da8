"""Put this project's attention into a transformers model.

transformers hands every attention call to a function looked up by name; ours finds out which model and layer called,
and which mode is on. `attach` first verifies the model with one forward pass (see `hf_verify`).
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from sparsefinder.attention.api import attend, attend_dense
from sparsefinder.errors import ConfigError, IncompatibleModelError
from sparsefinder.generation import Generation
from sparsefinder.hf_legal import legal_of_call, real_keys
from sparsefinder.hf_verify import Caller, attention_layers, verify
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.legal import Legal, first_real
from sparsefinder.patterns.positional import Nothing
from sparsefinder.plan import Plan
from sparsefinder.predictors import Predictor, layer_plan

NAME = "sparsefinder"

Mode = Literal["dense", "sparse"]
MODES: tuple[Mode, ...] = ("dense", "sparse")


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
    """A layer that has been computed: its plan (None where all legal pairs were computed) and output."""

    plan: Plan | None
    output: Float[Tensor, "B H N Dv"]


Observe = Callable[[LayerCall], None]
PlanFor = Callable[[LayerInput], Plan | None]


@dataclass(frozen=True)
class Run:
    """How the next forward passes of this thread attend."""

    mode: Mode
    observe: Observe | None = None
    plan_for: PlanFor | None = None
    generation: Generation | None = None


class _Thread(threading.local):
    """This thread's runs; how often its forward pass called each shared module, and how many tokens came before it."""

    def __init__(self) -> None:
        self.runs: list[tuple[Attached, Run]] = []
        self.turns: dict[torch.nn.Module, int] = {}
        self.cached = 0


_THREAD = _Thread()
_OWNER: weakref.WeakKeyDictionary[torch.nn.Module, "Attached"] = weakref.WeakKeyDictionary()


class Attached:
    """A model whose attention is ours, made by `attach`. `using` chooses the mode, `callers` run the layers."""

    def __init__(
        self, model: Any, alpha: float, head_scale: Tensor, predictors: Sequence[Predictor | None], positional: Pattern
    ):
        self.model = model
        self.alpha = alpha
        self.head_scale = head_scale
        self.predictors = tuple(predictors)
        self.positional = positional
        self.tile_size: int | Tensor = 32
        self.callers: tuple[Caller, ...] = ()
        self.places: dict[torch.nn.Module, list[int]] = {}

    @contextlib.contextmanager
    def using(self, mode: Mode, *, observe: Observe | None = None, plan_for: PlanFor | None = None) -> Iterator[None]:
        """Run the forward passes inside in `mode`; `observe` sees every layer.

        plan_for: takes the place of the predictors; a layer for which it gives None computes all its legal pairs.

        Raises:
            ConfigError: an unknown mode, or `sparse` without predictors or `plan_for`.
        """
        if mode not in MODES:
            raise ConfigError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
        if mode == "sparse" and not self.predictors and plan_for is None:
            raise ConfigError("mode: sparse needs fitted predictors, this model was attached without any")
        with self._on(Run(mode, observe, plan_for)):
            yield

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
    def _on(self, run: Run) -> Iterator[None]:
        _THREAD.runs.append((self, run))
        try:
            yield
        finally:
            _THREAD.runs.pop()

    def run(self) -> Run:
        """The run that is on: the innermost `using` of this model, else sparse where there are predictors."""
        for owner, run in reversed(_THREAD.runs):
            if owner is self:
                return run
        return Run("sparse" if self.predictors else "dense")


def attach(
    model: Any,
    *,
    alpha: float = 1.5,
    head_scale: Float[Tensor, "L H"] | None = None,
    predictors: Sequence[Predictor | None] = (),
    positional: Pattern | None = None,
    tile_size: int | Int[Tensor, " H"] = 32,
) -> Attached:
    """Replace the attention of a transformers model (encoder, causal, or both), verified by a forward pass.

    Layers are counted in the order in which they run: the encoder's, then for every decoder layer its self-attention
    and its cross-attention.

    Sliding-window layers stay what they are, in both modes: the transform over the keys of their window.

    Args:
        model: a `PreTrainedModel`, with or without a head; it is changed in place.
        alpha: α of the entmax that stands in for softmax (1 keeps softmax).
        head_scale: factor on the scores of each layer and head; ones where it is not given.
        predictors: one per attention layer, or none for a model that only runs `dense`. A layer whose predictor is None
            computes all its legal pairs; one of a sliding-window layer is not asked.
        positional: pattern that is added to every prediction (window, global tokens).
        tile_size: query rows that share one key list, one number or one per head.

    Raises:
        IncompatibleModelError: the model does not route its attention through the interface once per layer, its output
            changes when it should not, or the number of layers or heads does not fit.
    """
    base = getattr(model, "base_model", model)
    layers, heads = attention_layers(base.config), int(base.config.num_attention_heads)
    scales = torch.ones(layers, heads) if head_scale is None else head_scale.float()
    if tuple(scales.shape) != (layers, heads):
        raise IncompatibleModelError(f"head_scale: expected shape {(layers, heads)}, got {tuple(scales.shape)}")
    if predictors and len(predictors) != layers:
        raise IncompatibleModelError(f"predictors: expected one for each of {layers} layers, got {len(predictors)}")
    device = next(base.parameters()).device
    probe = Attached(base, 1.0, torch.ones(layers, heads, device=device), (), Nothing())
    verify(base, layers, NAME, lambda callers: _own(probe, callers))
    attached = Attached(base, alpha, scales.to(device), predictors, positional or Nothing())
    attached.tile_size, attached.callers, attached.places = tile_size, probe.callers, probe.places
    for module in attached.places:
        _OWNER[module] = attached
    return attached


def _own(attached: Attached, callers: list[Caller]) -> None:
    attached.callers = tuple(callers)
    for layer, caller in enumerate(callers):
        attached.places.setdefault(caller.module, []).append(layer)
        _OWNER[caller.module] = attached
    if not getattr(attached.model, "_sparsefinder_counts", False):
        attached.model.register_forward_pre_hook(_start_counting)
        attached.model._sparsefinder_counts = True


def _start_counting(*_: Any) -> None:
    _THREAD.turns.clear()


def _layer(attached: Attached, module: torch.nn.Module) -> int:
    """Which layer calls. A module that several layers share (ALBERT) is told apart by the order of its calls."""
    places = attached.places[module]
    if len(places) == 1:
        return places[0]
    turn = _THREAD.turns.get(module, 0)
    if turn >= len(places):
        raise IncompatibleModelError(
            f"{type(module).__name__}: expected {len(places)} calls in a forward pass as when attached, got more"
        )
    _THREAD.turns[module] = turn + 1
    return places[turn]


def _attention(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: `[B, H, L, D]` in, `[B, L, H, D]` out."""
    attached = _OWNER.get(module)
    if attached is None:
        raise IncompatibleModelError(
            f"{type(module).__name__}: attention was not attached, call sparsefinder.hf.attach first"
        )
    layer = _layer(attached, module)
    scale = attached.head_scale[layer] * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    bias, cross = rest.get("position_bias"), attached.callers[layer].cross
    bias = bias if bias is not None and bool(bias.any()) else None  # T5 hands zeros to its cross-attention
    # The queries of cross-attention sit where those of the self-attention before it sat.
    legal = legal_of_call(module, q, k, mask, rest, _THREAD.cached if cross else None)
    _THREAD.cached = legal.query_offset
    call = LayerInput(layer, q, k, v, legal, scale, bias, attached.alpha)
    return _compute(attached, call).transpose(1, 2).contiguous(), None


def _compute(attached: Attached, call: LayerInput) -> Tensor:
    run, plan = attached.run(), None
    if run.mode == "sparse" and call.legal.radius is None:
        if run.generation is not None and call.legal.causal and attached.predictors[call.layer] is not None:
            return _token_by_token(run, run.generation, call)
        plan = _predicted(attached, call) if run.plan_for is None else run.plan_for(call)
    if plan is not None:
        return _sparse(run, call, plan)
    output = attend_dense(call.q, call.k, call.v, call.legal, alpha=call.alpha, scale=call.scale, bias=call.bias)
    return _seen(run, call, None, output)


def _predicted(attached: Attached, call: LayerInput) -> Plan | None:
    predictor = attached.predictors[call.layer]
    if predictor is None:
        return None
    if call.legal.query_offset and not call.legal.cross:
        raise ConfigError("a pass over a key-value cache: expected `with attached.generation()` around it, got none")
    if call.legal.cross and bool(first_real(call.legal).any()):
        raise IncompatibleModelError("cross-attention: expected texts padded on the right, got some on the left")
    # A row of cross-attention stands alone: a tile's list would tell a token of the decoder about later ones.
    size = 1 if call.legal.cross else attached.tile_size
    return layer_plan(predictor, call.q, call.k, call.legal, attached.positional, size, call.layer)


def _token_by_token(run: Run, generation: Generation, call: LayerInput) -> Tensor:
    outputs = []
    for rows, legal, plan in generation.plans(call.layer, call.q, call.k, call.legal):
        q, keys = call.q[:, :, rows], legal.key_real.shape[1]
        bias = None if call.bias is None else call.bias[:, :, rows, :keys]
        part = replace(call, q=q, k=call.k[:, :, :keys], v=call.v[:, :, :keys], legal=legal, bias=bias)
        outputs.append(_sparse(run, part, plan))
    return torch.cat(outputs, 2)


def _sparse(run: Run, call: LayerInput, plan: Plan) -> Tensor:
    qkv = call.q, call.k, call.v
    output = attend(*qkv, plan, legal=call.legal, alpha=call.alpha, scale=call.scale, bias=call.bias)
    return _seen(run, call, plan, output)


def _seen(run: Run, call: LayerInput, plan: Plan | None, output: Tensor) -> Tensor:
    if run.observe is not None:
        fields = {name: getattr(call, name) for name in LayerInput.__dataclass_fields__}
        run.observe(LayerCall(**fields, plan=plan, output=output))
    return output


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, real_keys)
