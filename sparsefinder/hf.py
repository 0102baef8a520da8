"""Put this project's attention into a transformers model.

transformers hands every attention call to a function looked up by name; ours finds out which model and layer called,
and which mode is on. `attach` first verifies the model with one forward pass (see `hf_verify`).
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from sparsefinder.errors import IncompatibleModelError
from sparsefinder.hf_attached import MODES, THREAD, Attached, LayerCall, LayerInput, Mode, Observe, PlanFor, Ran
from sparsefinder.hf_legal import legal_of_call, real_keys
from sparsefinder.hf_modes import compute
from sparsefinder.hf_verify import Caller, attention_layers, verify
from sparsefinder.packing import current_row
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.positional import Nothing
from sparsefinder.predictors import Predictor

__all__ = ["MODES", "Attached", "LayerCall", "LayerInput", "Mode", "Observe", "PlanFor", "Ran", "attach", "detach"]

NAME = "sparsefinder"

# Weak on both sides: an Attached holds its modules, so a strong value would keep its own key, and every model, alive.
# What keeps an Attached is its model.
_OWNER: weakref.WeakKeyDictionary[torch.nn.Module, "weakref.ref[Attached]"] = weakref.WeakKeyDictionary()


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

    Sliding-window layers stay what they are, in every mode: the transform over the keys of their window.

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
        _OWNER[module] = weakref.ref(attached)
    base._sparsefinder_attached = attached
    return attached


def detach(attached: Attached) -> None:
    """Let go of a model that is not used any more; in our attention it refuses to run then.

    Model and `Attached` hold each other, so without this their memory waits for the garbage collector.
    """
    if attached.model._sparsefinder_attached is attached:  # else it was attached anew
        attached.model._sparsefinder_attached = None
        for module in attached.places:
            _OWNER.pop(module, None)


def _own(attached: Attached, callers: list[Caller]) -> None:
    attached.callers = tuple(callers)
    for layer, caller in enumerate(callers):
        attached.places.setdefault(caller.module, []).append(layer)
        _OWNER[caller.module] = weakref.ref(attached)
    if not getattr(attached.model, "_sparsefinder_counts", False):
        attached.model.register_forward_pre_hook(_start_counting)
        attached.model._sparsefinder_counts = True


def _start_counting(*_: Any) -> None:
    THREAD.turns.clear()


def _layer(attached: Attached, module: torch.nn.Module) -> int:
    """Which layer calls. A module that several layers share (ALBERT) is told apart by the order of its calls."""
    places = attached.places[module]
    if len(places) == 1:
        return places[0]
    turn = THREAD.turns.get(module, 0)
    if turn >= len(places):
        raise IncompatibleModelError(
            f"{type(module).__name__}: expected {len(places)} calls in a forward pass as when attached, got more"
        )
    THREAD.turns[module] = turn + 1
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
    owner = _OWNER.get(module)
    attached = None if owner is None else owner()
    if attached is None:
        raise IncompatibleModelError(
            f"{type(module).__name__}: attention was not attached, call sparsefinder.hf.attach first"
        )
    layer, row = _layer(attached, module), current_row()
    if row is not None:
        q, k, v = (row.spread(x.transpose(1, 2)).transpose(1, 2) for x in (q, k, v))
        mask = row.mask
    scale = attached.head_scale[layer] * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    bias, cross = rest.get("position_bias"), attached.callers[layer].cross
    bias = bias if bias is not None and bool(bias.any()) else None  # T5 hands zeros to its cross-attention
    # The queries of cross-attention sit where those of the self-attention before it sat.
    legal = legal_of_call(module, q, k, mask, rest, THREAD.cached if cross else None)
    THREAD.cached = legal.query_offset
    call = LayerInput(layer, q, k, v, legal, scale, bias, attached.alpha)
    output = compute(attached, call).transpose(1, 2)
    return output.contiguous() if row is None else row.take(output), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, real_keys)
