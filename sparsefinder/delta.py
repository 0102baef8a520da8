"""Teacher deltas: what finetuning added to a model's weights, small enough to ship.

A delta is a flat dict of float16 tensors: `<parameter>.a` `[rank, in]` and `<parameter>.b` `[out, rank]` for
`W += b @ a`, or `<parameter>.full` for a parameter that is added whole (biases, norms).
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sparsefinder.errors import ArtifactError

ALIGNED = 16  # numbers: a cache line of float32


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


def copy_for_delta(whole: nn.Module, base: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of `whole`, of which `base` is a part, that shares every tensor with it but those that a delta adds to.

    These lie in one block of memory, which goes back to the system when the copy is freed. Strewn over the heap, the
    weights of one replaced model after the other left holes there, and a server that reloads grew by 40 MiB a minute.
    """
    changed = {key.rsplit(".", 1)[0] for key in tensors}
    own = [parameter for name, parameter in base.named_parameters() if name in changed]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*whole.parameters(), *whole.buffers())}
    sizes = [-(-parameter.numel() // ALIGNED) * ALIGNED for parameter in own]
    block = torch.empty(sum(sizes), dtype=torch.float32)
    for parameter, place in zip(own, block.to(next(whole.parameters())).split(sizes), strict=True):  # type: ignore[no-untyped-call]
        room = place[: parameter.numel()].view(parameter.shape).copy_(parameter.detach())
        memo[id(parameter)] = nn.Parameter(room, requires_grad=parameter.requires_grad)
    return copy.deepcopy(whole, memo)


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
