"""LoRA (Hu et al., 2021) as a path beside a linear layer: `y = W x + b (a x)`, `b` zero at first.

The weight itself stays as it is, so the backward pass never forms a gradient of its full size.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

NAME = "low_rank"


class LowRank(torch.nn.Module):
    """The path beside one linear layer."""

    def __init__(self, linear: torch.nn.Linear, rank: int, generator: torch.Generator):
        super().__init__()
        rows, columns = linear.weight.shape
        self.a = torch.nn.Parameter(torch.randn(rank, columns, generator=generator) / math.sqrt(columns))
        self.b = torch.nn.Parameter(torch.zeros(rows, rank))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.a.T) @ self.b.T


def add_low_rank(linears: Iterable[torch.nn.Linear], rank: int, seed: int) -> None:
    """Give each linear layer such a path, on its own device; their weights are no longer trained."""
    generator = torch.Generator().manual_seed(seed)
    for linear in linears:
        for weight in linear.parameters():
            weight.requires_grad_(False)
        linear.register_module(NAME, LowRank(linear, rank, generator).to(linear.weight.device))
        linear.low_rank_handle = linear.register_forward_hook(_beside)  # type: ignore[assignment]


def _beside(linear: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    path = linear.get_submodule(NAME)(inputs[0])
    return torch.add(output, path)


@torch.no_grad()
def fold_low_rank(model: torch.nn.Module) -> None:
    """Add every path to the weight beside it, and take it away: a plain model that computes the same."""
    for linear in [m for m in model.modules() if isinstance(m, torch.nn.Linear) and hasattr(m, NAME)]:
        path = linear.get_submodule(NAME)
        linear.weight += path.b @ path.a  # type: ignore[operator]
        linear.low_rank_handle.remove()  # type: ignore[union-attr, operator]
        delattr(linear, NAME)
        del linear.low_rank_handle
