"""How well H heads of relative bias can imitate a memory kernel at all, without a network and without luck.

A head without dot product reads `Σ_s w_h(s) x_{t−s}`, with `w_h(s) = exp(p_h φ(s))`, and a linear readout sums heads
up. For inputs of white noise the error of the sum is `‖ρ − Σ_h a_h w_h‖²`: the best `a` is a projection, and only the H
rates `p_h` are left to search (variable projection), from many starts at once, in float64.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from training.tasks.memory_model import Bias


def head_kernels(log_rates: Float[Tensor, "*rest H"], bias: Bias, length: int) -> Float[Tensor, "*rest length H"]:
    """`w_h(s)` for s = 1 … length, each of norm 1 (a factor that the readout takes up)."""
    s = torch.arange(1, length + 1, dtype=log_rates.dtype)
    phi = -s.log() if bias == "log" else 1.0 - s  # the constant goes into the norm
    kernels = (log_rates.exp()[..., None, :] * phi[:, None]).exp()
    unit: Tensor = kernels / torch.linalg.vector_norm(kernels, dim=-2, keepdim=True)
    return unit


def projection_error(
    kernel: Float[Tensor, "*rest length"], heads: Float[Tensor, "*rest length H"]
) -> Float[Tensor, "*rest"]:
    """`min_a ‖ρ − Σ_h a_h w_h‖² / ‖ρ‖²`."""
    q, _ = torch.linalg.qr(heads)
    kept = torch.matmul(q.transpose(-1, -2), kernel[..., None]).square().sum((-1, -2))
    return torch.ones_like(kept) - kept / kernel.square().sum(-1)


def best_error(
    kernels: Float[Tensor, "K length"], bias: Bias, heads: int, starts: int = 8, steps: int = 300, seed: int = 0
) -> Float[Tensor, " K"]:
    """The least error found for every kernel: 0 is perfect, 1 is reading nothing."""
    count, length = kernels.shape
    draw = torch.Generator().manual_seed(seed)
    rates = torch.rand(count, starts, heads, generator=draw, dtype=torch.float64) * 6 - 4
    rates = rates.sort(-1).values.requires_grad_()
    goal = kernels.double()[:, None].expand(count, starts, length)
    optimizer = torch.optim.Adam([rates], lr=0.05)
    best = torch.full((count, starts), torch.inf, dtype=torch.float64)
    for _ in range(steps):
        error = projection_error(goal, head_kernels(rates, bias, length))
        best = torch.minimum(best, error.detach().nan_to_num(torch.inf))
        optimizer.zero_grad()
        error.sum().backward()  # type: ignore[no-untyped-call]
        if rates.grad is not None:
            rates.grad.nan_to_num_(0.0)
        optimizer.step()
    return best.amin(1).clamp(min=0.0)


def heads_needed(errors: Sequence[float], counts: Sequence[int], most: float) -> int | None:
    """The least number of heads whose error is at most `most`; None where none of them is enough."""
    return next((count for count, error in zip(counts, errors, strict=True) if error <= most), None)


def point_kernel(lag: int, length: int) -> Float[Tensor, " length"]:
    """`I{s = lag}`, the kernel of a fixed memory (Wang & E, 2024, section 4)."""
    kernel = torch.zeros(length)
    kernel[lag - 1] = 1.0
    return kernel
