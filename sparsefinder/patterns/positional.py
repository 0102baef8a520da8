"""Patterns that know positions only: Longformer's and BigBird's window and global tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsefinder.errors import PatternError
from sparsefinder.patterns.algebra import Context, Pattern


@dataclass(frozen=True)
class Nothing(Pattern):
    """No pair at all (`~Nothing()` is every pair)."""

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.zeros_like(i + j, dtype=torch.bool)


@dataclass(frozen=True)
class Window(Pattern):
    """`|i − j| ≤ radius`, symmetric (Beltagy et al., 2020, section 3.1). Radius 0 is the token itself."""

    radius: int

    def __post_init__(self) -> None:
        if self.radius < 0:
            raise PatternError(f"window: expected a radius of at least 0, got {self.radius}")

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (ctx.query_position(b, i) - ctx.key_position(b, j)).abs() <= self.radius


def window(window_size: int) -> Pattern:
    """What users type: an odd `window_size = 2 radius + 1`, or 0 for no window. PatternError for other sizes."""
    if window_size == 0:
        return Nothing()
    if window_size < 0 or window_size % 2 == 0:
        raise PatternError(f"window_size: expected 0 or an odd number (it is symmetric), got {window_size}")
    return Window((window_size - 1) // 2)


@dataclass(frozen=True)
class GlobalTokens(Pattern):
    """The first `count` real tokens of every item see all and are seen by all (Beltagy et al., 2020, section 3.1).

    count: one number, or one per item of the batch.
    """

    count: int | tuple[int, ...]

    def __post_init__(self) -> None:
        counts = (self.count,) if isinstance(self.count, int) else self.count
        if any(count < 0 for count in counts):
            raise PatternError(f"global tokens: expected counts of at least 0, got {self.count}")

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        count = self.of_item(b, i)
        query, key = ctx.query_position(b, i), ctx.key_position(b, j)
        return ((query >= 0) & (query < count)) | ((key >= 0) & (key < count))

    def of_item(self, b: int | Tensor, like: Tensor) -> int | Tensor:
        """The number of global tokens of item `b`. PatternError where the batch has more items than counts."""
        if isinstance(self.count, int):
            return self.count
        if int(torch.as_tensor(b).max()) >= len(self.count):
            raise PatternError(f"global tokens: expected a count for every item, got {len(self.count)} counts")
        return torch.tensor(self.count, device=like.device)[b]
