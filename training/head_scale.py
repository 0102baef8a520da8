"""Each head's own scale: how much its scores are multiplied by, so that entmax stands in for its softmax best.

A steep head needs a scale near 1. One that looks at n keys about alike needs one near `n^-1/2`: there the entmax
weight `(z/2 − τ)²` follows `exp(z)` to first order, while at scale 1 it would drop most keys.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from sparsefinder.attention.api import attend_dense
from sparsefinder.hf import LayerCall, attach
from sparsefinder.teacher import Teacher, batch
from training.values import output_weight, value_tensors

GRID = tuple(2.0 ** (step / 2) for step in range(-12, 2))  # factors on the model's own scale


def fit_head_scale(
    teacher: Teacher,
    items: Sequence[Sequence[int]],
    alpha: float,
    on_item: Callable[[int, int], None] = lambda done, total: None,
) -> Float[Tensor, "L H"]:
    """The scale of every head whose entmax output is nearest to that of its softmax, on the model's own q, k and v.

    Nearest by the squared error that reaches the residual stream, over all real tokens; one of `GRID`, whose steps of
    half an octave a training refines. The model is left attached as the softmax model that it was.
    """
    attached = attach(teacher.model, alpha=1.0)
    layers, heads = attached.head_scale.shape
    errors = torch.zeros(layers, heads, len(GRID), dtype=torch.float64)

    def observe(call: LayerCall) -> None:
        width = call.output.shape[1] * call.output.shape[3]
        weight = output_weight(teacher.model, attached.callers[call.layer].module, width)
        root = value_tensors(call, weight)[f"root.{call.layer}"].to(call.output)
        for at, factor in enumerate(GRID):
            came = attend_dense(call.q, call.k, call.v, call.legal, alpha=alpha, scale=factor * call.scale)
            wrong = (came - call.output) * call.legal.query_real[:, None, :, None]
            moved = wrong.transpose(0, 1).flatten(1, 2) @ root.transpose(-1, -2)
            errors[call.layer, :, at] += moved.double().square().sum((1, 2)).cpu()

    with torch.no_grad(), attached.using("dense", observe=observe):
        for done, item in enumerate(items):
            on_item(done, len(items))
            tokens, mask = batch(teacher, [item])
            teacher.model(input_ids=tokens, attention_mask=mask.long())
    return torch.tensor(GRID)[errors.argmin(-1)]
