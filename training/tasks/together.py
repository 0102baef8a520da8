"""Many small models trained at once: every weight has a leading axis G of models, which share data but no gradient.

On a CPU a model of a few thousand weights spends its time on calling operators; G of them cost little more than one.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sparsefinder.errors import ConfigError

LEAST_RATE = 0.02  # of the learning rate, at the end of the cosine

OnStep = Callable[[int, int], None]  # (steps that are done, steps in all)


@dataclass(frozen=True)
class Schedule:
    """Adam with a linear warm-up and a cosine; gradients of each model are clipped to norm 1.

    Raises:
        ConfigError: no step, or no positive rate.
    """

    steps: int
    rate: float
    warmup: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or not (math.isfinite(self.rate) and self.rate > 0):
            raise ConfigError(f"schedule: expected steps and a rate above 0, got {self.steps} and {self.rate}")

    def rate_at(self, step: int) -> float:
        """The learning rate of one step."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.rate * min(1.0, (step + 1) / self.warmup) * (LEAST_RATE + (1 - LEAST_RATE) * cosine)


def weight(models: int, inputs: int, outputs: int, generator: torch.Generator, gain: float = 1.0) -> nn.Parameter:
    """`[G, inputs, outputs]`, entries N(0, gain² / inputs)."""
    return nn.Parameter(torch.randn(models, inputs, outputs, generator=generator) * gain / math.sqrt(inputs))


def linear(
    x: Float[Tensor, "G *rest D"], w: Float[Tensor, "G D E"], bias: Float[Tensor, "G E"] | None = None
) -> Float[Tensor, "G *rest E"]:
    """`x w + bias` of every model."""
    rows = x.reshape(x.shape[0], -1, x.shape[-1])
    out = rows @ w if bias is None else torch.baddbmm(bias[:, None], rows, w)
    return out.view(*x.shape[:-1], w.shape[-1])


def clip_each(parameters: Iterator[nn.Parameter], most: float = 1.0) -> None:
    """Scale each model's gradient (leading axis) to norm `most` at most, so that no model slows another down."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0).sqrt()
    factor = (most / norm.clamp(min=1e-12)).clamp(max=1.0)
    for g in grads:
        g.mul_(factor.view(-1, *[1] * (g.ndim - 1)))


def train_together(
    model: nn.Module,
    schedule: Schedule,
    loss_of: Callable[[torch.Generator], Float[Tensor, " G"]],
    on_step: OnStep = lambda done, total: None,
) -> Float[Tensor, "steps G"]:
    """Train all models; `loss_of(generator)` draws a batch and gives the loss of every model. Returns the losses.

    Every parameter must have the leading axis of models.
    """
    generator = torch.Generator().manual_seed(schedule.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=schedule.rate, betas=(0.9, 0.98))
    losses = []
    for step in range(schedule.steps):
        optimizer.param_groups[0]["lr"] = schedule.rate_at(step)
        loss = loss_of(generator)
        optimizer.zero_grad()
        loss.sum().backward()  # type: ignore[no-untyped-call]
        clip_each(model.parameters())
        optimizer.step()
        losses.append(loss.detach())
        on_step(step + 1, schedule.steps)
    return torch.stack(losses)
