"""Teacher deltas: what finetuning added to a model's weights, small enough to ship.

A delta is a flat dict of float16 tensors: `<parameter>.a` `[rank, in]` and `<parameter>.b` `[out, rank]` for
`W += b @ a`, or `<parameter>.full` for a parameter that is added whole (biases, norms).
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sparsefinder.errors import ArtifactError


@torch.no_grad()
def apply_delta(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Add a delta to the model's parameters, in place; nothing is changed when any part of it does not fit.

    Raises:
        ArtifactError: a parameter is unknown, a factor is missing, or a shape does not fit.
    """
    parameters = dict(model.named_parameters())
    additions = {}
    for name in sorted({key.rsplit(".", 1)[0] for key in tensors}):
        if name not in parameters:
            raise ArtifactError(f"delta: the model has no parameter {name!r}")
        added = _addition(name, tensors)
        if added.shape != parameters[name].shape:
            expected = tuple(parameters[name].shape)
            raise ArtifactError(f"delta: {name}: expected shape {expected}, got {tuple(added.shape)}")
        additions[name] = added
    for name, added in additions.items():
        parameters[name] += added.to(parameters[name])


def _addition(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    if f"{name}.full" in tensors:
        return tensors[f"{name}.full"].float()
    try:
        return tensors[f"{name}.b"].float() @ tensors[f"{name}.a"].float()
    except (KeyError, RuntimeError):
        raise ArtifactError(f"delta: {name}: expected `.full`, or `.a` and `.b` of one rank") from None


def low_rank(change: Float[Tensor, "out in"], rank: int) -> tuple[Float[Tensor, "out r"], Float[Tensor, "r in"]]:
    """The factors `b, a` of the best rank-`rank` approximation (Eckart–Young), singular values shared evenly."""
    u, s, vh = torch.linalg.svd(change.double(), full_matrices=False)
    root = s[:rank].sqrt()
    return (u[:, :rank] * root).float(), (root[:, None] * vh[:rank]).float()


@torch.no_grad()
def make_delta(before: Mapping[str, Tensor], after: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The delta between two sets of parameters: matrices as factors of at most `rank`, everything else whole."""
    delta: dict[str, Tensor] = {}
    for name, weight in after.items():
        change = weight.detach().cpu().float() - before[name].detach().cpu().float()
        if not change.any():
            continue
        if change.ndim == 2 and rank * sum(change.shape) < change.numel():
            b, a = low_rank(change, rank)
            delta[f"{name}.b"], delta[f"{name}.a"] = b.half().contiguous(), a.half().contiguous()
        else:
            delta[f"{name}.full"] = change.half().contiguous()
    return delta
