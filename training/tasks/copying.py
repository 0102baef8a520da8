"""Copying `0 s 0 s` (Yun et al., 2020, section 5): the second `s` is masked, and every target reads one position.

Position `i` of the second half copies position `i − half`, and nothing else of the text says what stands there. So the
pairs `(i, i − half)` are gold by construction, and in a pattern that never lets `i − half` reach `i` through the layers
no model can know more than chance.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparsefinder.errors import ConfigError

SEPARATOR, MASK = 0, 1
FIRST_SYMBOL = 2


@dataclass(frozen=True)
class Copying:
    """`length`: symbols of s. `symbols`: size of the alphabet."""

    length: int = 62
    symbols: int = 32

    def __post_init__(self) -> None:
        if self.length < 1 or self.symbols < 2:
            raise ConfigError(f"copying: expected length ≥ 1 and symbols ≥ 2, got {self.length} and {self.symbols}")

    @property
    def half(self) -> int:
        """Distance from a target to what it copies."""
        return self.length + 1

    @property
    def tokens(self) -> int:
        """Length of the whole text."""
        return 2 * self.half

    @property
    def vocabulary(self) -> int:
        """Ids: separator, mask, symbols."""
        return FIRST_SYMBOL + self.symbols


def copy_batch(task: Copying, batch: int, generator: torch.Generator) -> tuple[Int[Tensor, "B n"], Int[Tensor, "B n"]]:
    """Ids that the model sees, and the target of every position (−1 where there is none)."""
    s = torch.randint(FIRST_SYMBOL, task.vocabulary, (batch, task.length), generator=generator)
    separator = torch.full((batch, 1), SEPARATOR)
    ids = torch.cat([separator, s, separator, torch.full_like(s, MASK)], 1)
    targets = torch.full_like(ids, -1)
    targets[:, task.half + 1 :] = s
    return ids, targets


def gold_positions(task: Copying) -> Int[Tensor, " n"]:
    """The position that each position must read, −1 where it predicts nothing."""
    at = torch.arange(task.tokens)
    return torch.where(at > task.half, at - task.half, -1)


def direct_recall(task: Copying, masks: Bool[Tensor, "L H n n"]) -> float:
    """Share of the gold pairs that some head of some layer may read."""
    rows = gold_positions(task)
    target = (rows >= 0).nonzero().flatten()
    return float(masks.flatten(0, 1).any(0)[target, rows[target]].float().mean())


def reached_share(task: Copying, masks: Bool[Tensor, "L H n n"]) -> float:
    """Share of the targets that their gold position reaches through the layers, one after the other.

    A layer passes on what any head reads, and the token itself (the residual connection).
    """
    itself = torch.eye(task.tokens, dtype=torch.bool)
    reached = itself
    for layer in masks:
        step = (layer.any(0) | itself).float()
        reached = step @ reached.float() > 0
    rows = gold_positions(task)
    target = (rows >= 0).nonzero().flatten()
    return float(reached[target, rows[target]].float().mean())


def copy_loss(logits: Float[Tensor, "G B n V"], targets: Int[Tensor, "B n"]) -> Float[Tensor, " G"]:
    """Mean cross-entropy of the targets, for every model."""
    kept = targets >= 0
    flat = logits[:, kept].transpose(1, 2)
    return torch.nn.functional.cross_entropy(flat, targets[kept].expand(logits.shape[0], -1), reduction="none").mean(1)


def copy_accuracy(logits: Float[Tensor, "G B n V"], targets: Int[Tensor, "B n"]) -> Float[Tensor, " G"]:
    """Share of the targets that are named right, for every model."""
    kept = targets >= 0
    return (logits[:, kept].argmax(-1) == targets[kept]).float().mean(1)
