"""Put this project's attention into a transformers model, and refuse what one forward pass cannot verify.

transformers hands every attention call to a function looked up by name; ours finds out which model and layer called,
and which mode is on. Models that never look a function up (MPNet, DeBERTa, Longformer, BigBird, …) would give wrong
output in silence, so `attach` first makes our function compute plain softmax and requires the model's own output back.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from sparsefinder.attention.api import attend, attend_dense
from sparsefinder.errors import ConfigError, IncompatibleModelError, first_line
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.legal import Legal
from sparsefinder.plan import Plan
from sparsefinder.predictors import Predictor, layer_plan

NAME, PROBE = "sparsefinder", "sparsefinder-probe"
PROBE_LENGTHS = (16, 5)
PROBE_TOLERANCE = 1e-3

Mode = Literal["dense", "sparse"]
MODES: tuple[Mode, ...] = ("dense", "sparse")


@dataclass(frozen=True)
class LayerInput:
    """What one attention layer is about to compute: scores are `scale[h] * q_i · k_j` over the legal pairs."""

    layer: int
    q: Float[Tensor, "B H N D"]
    k: Float[Tensor, "B Hkv M D"]
    v: Float[Tensor, "B Hkv M Dv"]
    legal: Legal
    scale: Float[Tensor, " H"]
    alpha: float


@dataclass(frozen=True)
class LayerCall(LayerInput):
    """A layer that has been computed: its plan (None in mode `dense`) and output."""

    plan: Plan | None
    output: Float[Tensor, "B H N Dv"]


Observe = Callable[[LayerCall], None]
PlanFor = Callable[[LayerInput], Plan]


@dataclass(frozen=True)
class Run:
    """How the next forward passes of this thread attend."""

    mode: Mode
    observe: Observe | None = None
    plan_for: PlanFor | None = None


class _Thread(threading.local):
    """The runs that are on in this thread, and how many attention calls the current forward pass has made."""

    def __init__(self) -> None:
        self.runs: list[tuple[Attached, Run]] = []
        self.calls = 0
        self.recorded: list[torch.nn.Module] = []


_THREAD = _Thread()
_OWNER: weakref.WeakKeyDictionary[torch.nn.Module, "Attached"] = weakref.WeakKeyDictionary()


class Attached:
    """A model whose attention is ours. Made by `attach`; `using` chooses the mode for a block of code."""

    def __init__(
        self, model: Any, alpha: float, head_scale: Tensor, predictors: Sequence[Predictor], positional: Pattern
    ):
        self.model = model
        self.alpha = alpha
        self.head_scale = head_scale
        self.predictors = tuple(predictors)
        self.positional = positional
        self.tile_size = 32
        self.modules: list[torch.nn.Module] = []

    @contextlib.contextmanager
    def using(self, mode: Mode, *, observe: Observe | None = None, plan_for: PlanFor | None = None) -> Iterator[None]:
        """Run the forward passes inside in `mode`; `observe` sees every layer, `plan_for` replaces the predictors.

        Raises:
            ConfigError: an unknown mode, or `sparse` without predictors or `plan_for`.
        """
        if mode not in MODES:
            raise ConfigError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
        if mode == "sparse" and not self.predictors and plan_for is None:
            raise ConfigError("mode: sparse needs fitted predictors, this model was attached without any")
        _THREAD.runs.append((self, Run(mode, observe, plan_for)))
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
    predictors: Sequence[Predictor] = (),
    positional: Pattern | None = None,
    tile_size: int = 32,
) -> Attached:
    """Replace the attention of a transformers encoder, verified by a forward pass.

    Args:
        model: a `PreTrainedModel`; it is changed in place.
        alpha: α of the entmax that stands in for softmax (1 keeps softmax).
        head_scale: factor on the scores of each layer and head; ones where it is not given.
        predictors: one per attention layer, or none for a model that only runs `dense`.
        positional: pattern that is added to every prediction (window, global tokens).
        tile_size: query rows that share one key list.

    Raises:
        IncompatibleModelError: the model does not route its attention through the interface once per layer, its output
            changes when it should not, or the number of layers or heads does not fit.
    """
    from sparsefinder.patterns.positional import Nothing

    layers, heads = int(model.config.num_hidden_layers), int(model.config.num_attention_heads)
    scales = torch.ones(layers, heads) if head_scale is None else head_scale.float()
    if tuple(scales.shape) != (layers, heads):
        raise IncompatibleModelError(f"head_scale: expected shape {(layers, heads)}, got {tuple(scales.shape)}")
    if predictors and len(predictors) != layers:
        raise IncompatibleModelError(f"predictors: expected one for each of {layers} layers, got {len(predictors)}")
    probe = Attached(model, 1.0, torch.ones(layers, heads), (), Nothing())
    _verify(probe, layers)
    attached = Attached(model, alpha, scales.to(next(model.parameters()).device), predictors, positional or Nothing())
    attached.tile_size = tile_size
    _own(attached, probe.modules)
    return attached


def _verify(probe: Attached, layers: int) -> None:
    """The model must call our function once per layer, and give its own output back when we compute its softmax."""
    model, before = probe.model, probe.model.config._attn_implementation
    was_training = model.training
    tokens, mask = _probe_input(model)
    model.eval()
    try:
        with torch.no_grad():
            expected = model(input_ids=tokens, attention_mask=mask).last_hidden_state
            calls = _record_calls(probe, tokens, mask)
            _own(probe, calls)
            came = model(input_ids=tokens, attention_mask=mask).last_hidden_state
        if len(calls) != layers:
            raise IncompatibleModelError(f"{type(model).__name__}: expected {layers} attention calls, got {len(calls)}")
        worst = float(((came - expected).abs() * mask.unsqueeze(-1)).max())
        if not worst <= PROBE_TOLERANCE:
            raise IncompatibleModelError(
                f"{type(model).__name__}: replacing softmax by itself moved the output by {worst:.2g}"
            )
    except BaseException:
        model.set_attn_implementation(before)
        raise
    finally:
        model.train(was_training)


def _probe_input(model: Any) -> tuple[Tensor, Tensor]:
    device, vocabulary = next(model.parameters()).device, int(model.config.vocab_size)
    tokens = torch.randint(
        vocabulary, (len(PROBE_LENGTHS), max(PROBE_LENGTHS)), generator=torch.Generator().manual_seed(0)
    )
    mask = torch.arange(max(PROBE_LENGTHS))[None, :] < torch.tensor(PROBE_LENGTHS)[:, None]
    return tokens.to(device), mask.long().to(device)


def _record_calls(probe: Attached, tokens: Tensor, mask: Tensor) -> list[torch.nn.Module]:
    """The attention modules in the order in which a forward pass calls them; the model is ours afterwards."""
    _THREAD.recorded = []
    try:
        probe.model.set_attn_implementation(PROBE)
        probe.model(input_ids=tokens, attention_mask=mask)
        probe.model.set_attn_implementation(NAME)
    except (ValueError, KeyError, RuntimeError, AttributeError) as error:
        reason = first_line(error)
        raise IncompatibleModelError(
            f"{type(probe.model).__name__}: its attention cannot be replaced ({reason})"
        ) from None
    calls, _THREAD.recorded = _THREAD.recorded, []
    return calls


def _recording(module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Attention that only notes who called; under a name of its own, so that no other model ever meets it."""
    _THREAD.recorded.append(module)
    return torch.zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3], dtype=q.dtype, device=q.device), None


def _own(attached: Attached, modules: list[torch.nn.Module]) -> None:
    attached.modules = modules
    for module in set(modules):
        _OWNER[module] = attached
    if not getattr(attached.model, "_sparsefinder_counts", False):
        attached.model.register_forward_pre_hook(_start_counting)
        attached.model._sparsefinder_counts = True


def _start_counting(*_: Any) -> None:
    _THREAD.calls = 0


def _mask(batch_size: int, kv_length: int, *_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    """The 2-D mask of real keys; what is causal or windowed is known to the layer itself."""
    return None if attention_mask is None else attention_mask.bool()


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
    layer, _THREAD.calls = _THREAD.calls, _THREAD.calls + 1
    if layer >= len(attached.modules) or attached.modules[layer] is not module:
        raise IncompatibleModelError(
            f"{type(module).__name__}: attention layers ran in another order than when attached"
        )
    scale = attached.head_scale[layer] * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    call = LayerInput(layer, q, k, v, _legal(module, q, k, mask, rest), scale, attached.alpha)
    return _compute(attached, call).transpose(1, 2).contiguous(), None


def _legal(module: torch.nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, rest: dict[str, Any]) -> Legal:
    name = type(module).__name__
    if q.shape[2] != k.shape[2]:
        raise IncompatibleModelError(
            f"{name}: expected as many keys as queries, got {k.shape[2]} and {q.shape[2]} (no cache yet)"
        )
    if rest.get("sliding_window") or getattr(module, "sliding_window", None):
        raise IncompatibleModelError(f"{name}: sliding-window layers are not supported")
    if mask is not None and mask.ndim != 2:
        raise IncompatibleModelError(f"{name}: expected a 2-D attention mask, got {mask.ndim} dimensions")
    causal = rest.get("is_causal")
    real = torch.ones(q.shape[0], k.shape[2], dtype=torch.bool, device=q.device) if mask is None else mask.bool()
    return Legal(real, real, causal=bool(getattr(module, "is_causal", False) if causal is None else causal))


def _compute(attached: Attached, call: LayerInput) -> Tensor:
    run = attached.run()
    plan = None
    if run.mode == "sparse":
        plan = run.plan_for(call) if run.plan_for else _predicted(attached, call)
        output = attend(call.q, call.k, call.v, plan, legal=call.legal, alpha=call.alpha, scale=call.scale)
    else:
        output = attend_dense(call.q, call.k, call.v, call.legal, alpha=call.alpha, scale=call.scale)
    if run.observe is not None:
        fields = {name: getattr(call, name) for name in LayerInput.__dataclass_fields__}
        run.observe(LayerCall(**fields, plan=plan, output=output))
    return output


def _predicted(attached: Attached, call: LayerInput) -> Plan:
    predictor = attached.predictors[call.layer]
    return layer_plan(predictor, call.q, call.k, call.legal, attached.positional, attached.tile_size, call.layer)


AttentionInterface.register(NAME, _attention)
AttentionInterface.register(PROBE, _recording)
AttentionMaskInterface.register(NAME, _mask)
AttentionMaskInterface.register(PROBE, _mask)
