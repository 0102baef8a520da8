"""Encoder–decoder models (T5-, Marian-shaped) under this project's attention: cross-attention and position biases too.

A bias `b_ij` that is added to the scores is folded into q and k, `q' = [q_i, b_i· / scale]`, `k' = [k_j, e_j]`, so that
`scale q' · k' = scale q_i · k_j + b_ij`: gold graphs, plans, metrics and kernels need to know nothing of it.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from sparsefinder.attention.api import attend, attend_dense
from sparsefinder.errors import ConfigError, IncompatibleModelError, ShapeError
from sparsefinder.patterns.legal import Legal
from sparsefinder.plan import Plan

NAME = "sparsefinder-seq2seq"
Part = Literal["encoder", "decoder", "cross"]


@dataclass(frozen=True)
class Attention:
    """One attention call: scores are `scale q_i · k_j` over the legal pairs, any position bias folded in.

    layer: counted within its part, from 0. In `cross`, queries are target tokens and keys source tokens.
    """

    part: Part
    layer: int
    q: Float[Tensor, "B H N D"]
    k: Float[Tensor, "B H M D"]
    v: Float[Tensor, "B H M Dv"]
    legal: Legal
    scale: float


Observe = Callable[[Attention], None]
PlanFor = Callable[[Attention], Plan | None]


@dataclass(frozen=True, eq=False)
class _Run:
    places: dict[torch.nn.Module, tuple[Part, int]]
    source: Bool[Tensor, "B M"]
    target: Bool[Tensor, "B N"]
    alpha: float
    observe: Observe | None
    plan_for: PlanFor | None


class _Thread(threading.local):
    run: _Run | None = None


_THREAD = _Thread()


def fold_bias(
    q: Float[Tensor, "B H N D"], k: Float[Tensor, "B H M D"], bias: Float[Tensor, "_ H N M"], scale: float
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H M E"]]:
    """Queries and keys whose scaled product is the old one plus `bias` (E = D + M).

    Raises:
        ShapeError: sizes that do not fit, or a scale of 0.
    """
    wanted = (q.shape[1], q.shape[2], k.shape[2])
    if tuple(bias.shape[1:]) != wanted or bias.shape[0] not in (1, q.shape[0]) or scale == 0:
        raise ShapeError(f"bias: expected [1 or batch, {wanted}] and a scale other than 0, got {tuple(bias.shape)}")
    rows = (bias / scale).expand(q.shape[0], *wanted).to(q.dtype)
    one = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(*k.shape[:3], -1)
    return torch.cat([q, rows], -1), torch.cat([k, one], -1)


@contextlib.contextmanager
def attended(
    model: Any,
    source: Bool[Tensor, "B M"],
    target: Bool[Tensor, "B N"],
    *,
    alpha: float = 1.0,
    observe: Observe | None = None,
    plan_for: PlanFor | None = None,
) -> Iterator[None]:
    """Forward passes inside run on this project's attention: dense, or over `plan_for(call)` where that is not None.

    Args:
        model: a T5 or Marian model (with or without head), called without a cache.
        source, target: True = real token, of the batch that will be run.

    Raises:
        IncompatibleModelError: no attention modules of a known shape.
    """
    run = _Run(_places(model), source, target, alpha, observe, plan_for)
    before, outer = model.config._attn_implementation, _THREAD.run
    _THREAD.run = run
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        _THREAD.run = outer


def _places(model: torch.nn.Module) -> dict[torch.nn.Module, tuple[Part, int]]:
    """Where each attention module stands, by the end of its name (`encoder_attn`, `EncDecAttention` and so on)."""
    found: dict[torch.nn.Module, tuple[Part, int]] = {}
    counted = {"encoder": 0, "decoder": 0, "cross": 0}
    for name, module in model.named_modules():
        last = name.rsplit(".", 1)[-1]
        if last in ("encoder_attn", "EncDecAttention"):
            part: Part = "cross"
        elif last in ("self_attn", "SelfAttention"):
            part = "decoder" if "decoder." in name else "encoder"
        else:
            continue
        found[module] = (part, counted[part])
        counted[part] += 1
    if not counted["cross"]:
        raise IncompatibleModelError(f"{type(model).__name__}: expected cross-attention of a T5 or Marian model")
    return found


def _attention(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: `[B, H, L, D]` in, `[B, L, H, D]` out."""
    run = _THREAD.run
    if run is None or module not in run.places:
        raise ConfigError(f"{type(module).__name__}: expected a forward pass inside `attended`")
    part, layer = run.places[module]
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    real = {"encoder": (run.source, run.source), "decoder": (run.target, run.target), "cross": (run.target, run.source)}
    legal = Legal(*real[part], causal=part == "decoder")
    if position_bias is not None:
        q, k = fold_bias(q, k, position_bias, scale)
    call = Attention(part, layer, q, k, v, legal, scale)
    if run.observe is not None:
        run.observe(call)
    plan = None if run.plan_for is None else run.plan_for(call)
    if plan is None:
        output = attend_dense(q, k, v, legal, alpha=run.alpha, scale=scale)
    else:
        output = attend(q, k, v, plan, legal=legal, alpha=run.alpha, scale=scale)
    return output.transpose(1, 2).contiguous(), None


def _no_mask(*_: Any, **__: Any) -> None:
    """No mask: which pairs are legal is known from the run, and a T5 adds its mask to the bias otherwise."""


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _no_mask)
