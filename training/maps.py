"""Trainable maps of one layer: how they start, and how they become `Projections`."""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparsefinder.predictors import Projections
from sparsefinder.predictors.svd import score_maps

Form = Literal["metric", "bilinear"]
Start = Literal["random", "svd"]

Maps = dict[str, Tensor]  # names as in Projections; `k_map` and `k_bias` are missing where the maps are shared


def start_maps(
    q: Float[Tensor, "H P D"],
    k: Float[Tensor, "H S D"],
    rank: int,
    scale: Float[Tensor, " H"],
    *,
    form: Form,
    shared: bool,
    start: Start,
    generator: torch.Generator,
) -> Maps:
    """Parameters before the first step, for samples of the layer's queries and keys (one key set per query head).

    random: one Gaussian map with entries N(0, 1/D) for both sides, like the control *random projection*.
    svd: the best maps of this rank for the true score on these samples (`score_svd`), on separate sides only.
    """
    heads, _, dim = q.shape
    if start == "svd" and not shared:
        q_map, k_map = score_svd(q, k, rank)
        q_map, k_map = q_map * scale.sqrt()[:, None, None], k_map * scale.sqrt()[:, None, None]
    else:
        q_map = torch.randn(heads, rank, dim, generator=generator) / math.sqrt(dim)
        k_map = q_map.clone()
    maps = {"q_map": q_map, "q_bias": torch.zeros(heads, rank), "offset": torch.zeros(heads)}
    if not shared:
        maps |= {"k_map": k_map, "k_bias": torch.zeros(heads, rank)}
    if form == "bilinear":
        maps |= {"q_linear": torch.zeros(heads, dim), "k_linear": torch.zeros(heads, dim)}
    return {name: tensor.contiguous().requires_grad_() for name, tensor in maps.items()}


def score_svd(
    q: Float[Tensor, "H P D"], k: Float[Tensor, "H S D"], rank: int
) -> tuple[Float[Tensor, "H r D"], Float[Tensor, "H r D"]]:
    """Maps `A, B` with the least mean squared error of `(A q)·(B k)` against `q·k`, k centred, over the samples.

    By the singular values of `C_q^{1/2} C_k^{1/2}` (second moments): keys are centred since a constant of the row
    changes no row's choice. A rank above D gives zero rows.
    """
    centred = k - k.mean(1, keepdim=True)
    q_map, k_map = score_maps(q.transpose(1, 2) @ q / q.shape[1], centred.transpose(1, 2) @ centred / k.shape[1], rank)
    return q_map.float(), k_map.float()


def as_projections(maps: Maps, form: Form, unit: bool = False) -> Projections:
    """The maps as a frozen predictor part; the same tensors, so it stays differentiable.

    The offset of a metric form only moves its threshold, so it stays behind.
    """
    k_map, k_bias = maps.get("k_map", maps["q_map"]), maps.get("k_bias", maps["q_bias"])
    if form == "metric":
        return Projections(maps["q_map"], k_map, maps["q_bias"], k_bias, form, unit)
    linear = [maps[name] for name in ("q_linear", "k_linear", "offset")]
    return Projections(maps["q_map"], k_map, maps["q_bias"], k_bias, form, unit, *linear)


def detached(projections: Projections) -> Projections:
    """A copy without gradients that owns its tensors."""
    tensors = {name: tensor.detach().clone() for name, tensor in projections.to_tensors().items()}
    return Projections.from_tensors(tensors, projections.settings())


def head_samples(
    x: Float[Tensor, "I H N D"], mask: Bool[Tensor, "I N"], count: int, generator: torch.Generator
) -> Float[Tensor, "H P D"]:
    """Vectors of at most `count` real tokens, the same for each head, drawn without replacement; padding dropped."""
    item, token = mask.nonzero(as_tuple=True)
    chosen = torch.randperm(item.shape[0], generator=generator)[:count].sort().values
    return x[item[chosen], :, token[chosen]].transpose(0, 1).contiguous()
