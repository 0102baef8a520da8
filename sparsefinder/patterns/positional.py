"""Patterns that know positions only. Positions count from each item's first real token.

Causality is not theirs: in a causal layer the pairs of the future are cut off afterwards (`Legal`), which turns the
bidirectional strided and fixed patterns of Yun et al. (2020) into those of Child et al. (2019).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsefinder.errors import PatternError
from sparsefinder.patterns.algebra import Context, Pattern, by_block

LARGEST = 2**31 - 1


def is_whole(value: object, least: int) -> bool:
    """Is `value` a whole number from `least` to 2³¹ − 1?"""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


def require_whole(name: str, value: object, least: int) -> None:
    """PatternError unless `is_whole`."""
    if not is_whole(value, least):
        raise PatternError(f"{name}: expected a whole number of at least {least}, got {value!r}")


@dataclass(frozen=True)
class Nothing(Pattern):
    """No pair at all (`~Nothing()` is every pair)."""

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.zeros_like(i + j, dtype=torch.bool)


@dataclass(frozen=True)
class Past(Pattern):
    """`j ≤ i`: the causal half, for use inside a bidirectional layer."""

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ctx.query_position(b, i) >= ctx.key_position(b, j)


@dataclass(frozen=True)
class Window(Pattern):
    """`|i − j| ≤ radius`, symmetric (Beltagy et al., 2020, section 3.1). Radius 0 is the token itself."""

    radius: int

    def __post_init__(self) -> None:
        require_whole("window radius", self.radius, 0)

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (ctx.query_position(b, i) - ctx.key_position(b, j)).abs() <= self.radius


def window(window_size: int) -> Pattern:
    """What users type: an odd `window_size = 2 radius + 1`, or 0 for no window. PatternError for other sizes."""
    if not is_whole(window_size, 0) or (window_size % 2 == 0 and window_size != 0):
        raise PatternError(f"window_size: expected 0 or an odd number (it is symmetric), got {window_size!r}")
    if window_size == 0:
        return Nothing()
    return Window((window_size - 1) // 2)


@dataclass(frozen=True)
class Dilated(Pattern):
    """`|i − j| ≤ radius · step` and `i − j` a multiple of `step` (Beltagy et al., 2020, section 3.1, dilated)."""

    radius: int
    step: int

    def __post_init__(self) -> None:
        require_whole("dilated radius", self.radius, 0)
        require_whole("dilated step", self.step, 1)

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = ctx.query_position(b, i) - ctx.key_position(b, j)
        return (distance.abs() <= self.radius * self.step) & (distance % self.step == 0)


@dataclass(frozen=True)
class GlobalTokens(Pattern):
    """The first `count` real tokens of every item see all and are seen by all (Beltagy et al., 2020, section 3.1).

    count: one number, or one per item of the batch.
    """

    count: int | tuple[int, ...]

    def __post_init__(self) -> None:
        counts = self.count if isinstance(self.count, tuple) else (self.count,)
        if not all(is_whole(count, 0) for count in counts):
            raise PatternError(f"global tokens: expected counts of at least 0, got {self.count!r}")

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        if ctx.first_real is not None:
            self._require_items(ctx.first_real.shape[0])
        count = self.of_item(b, i)
        query, key = ctx.query_position(b, i), ctx.key_position(b, j)
        return ((query >= 0) & (query < count)) | ((key >= 0) & (key < count))

    def of_item(self, b: int | Tensor, like: Tensor) -> int | Tensor:
        """The number of global tokens of item `b`. PatternError where the batch has more items than counts."""
        if isinstance(self.count, int):
            return self.count
        if isinstance(b, int):
            self._require_items(b + 1)
        return torch.tensor(self.count, device=like.device)[b]

    def _require_items(self, items: int) -> None:
        if isinstance(self.count, tuple) and items > len(self.count):
            raise PatternError(f"global tokens: expected a count for every item, got {len(self.count)} counts")


@dataclass(frozen=True)
class GlobalPositions(Pattern):
    """Tokens at these positions see all and are seen by all (Beltagy et al., 2020, section 3.1).

    positions: from 0 at the item's first real token; negative ones from −1 at its last, so they depend on its length
        (and a causal layer refuses them with a PatternError). A position outside the item is nobody.
    """

    positions: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.positions, tuple):
            raise PatternError(f"positions: expected a tuple of whole numbers, got {self.positions!r}")
        for position in self.positions:
            require_whole("positions", position, -LARGEST)

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        query, key = ctx.query_position(b, i), ctx.key_position(b, j)
        seen = torch.zeros_like(query + key, dtype=torch.bool)
        for position in self.positions:
            at = position if position >= 0 else ctx.tokens(b) + position
            seen = seen | (query == at) | (key == at)
        return seen


@dataclass(frozen=True)
class Strided(Pattern):
    """`i − j` a multiple of `stride`: A² of the strided pattern (Child et al., 2019, section 4.3; Yun et al., 2020).

    A¹ is `Window(stride)`; `sparse_transformer("strided", …)` puts both together.
    """

    stride: int

    def __post_init__(self) -> None:
        require_whole("stride", self.stride, 1)

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (ctx.query_position(b, i) - ctx.key_position(b, j)) % self.stride == 0


@dataclass(frozen=True)
class Fixed(Pattern):
    """`j = i`, or `j` one of the last `summary` tokens of its segment: A² of the fixed pattern (Child et al., 2019,
    section 4.3, their c; Yun et al., 2020, with `summary` 1).

    Segments have `stride` tokens. A¹ is `BlockDiagonal(stride)`; `sparse_transformer("fixed", …)` puts both together.
    """

    stride: int
    summary: int = 1

    def __post_init__(self) -> None:
        require_whole("stride", self.stride, 1)
        require_whole("summary", self.summary, 1)
        if self.summary > self.stride:
            raise PatternError(f"summary: expected at most the stride {self.stride}, got {self.summary}")

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        query, key = ctx.query_position(b, i), ctx.key_position(b, j)
        return (query == key) | (key % self.stride >= self.stride - self.summary)


@dataclass(frozen=True)
class BlockDiagonal(Pattern):
    """Runs of `block` tokens: the query's and the key's are at most `radius` runs apart.

    Radius 0: blockwise attention (Qiu et al., 2020), and A¹ of `Fixed`. Radius 1: BigBird's window of three blocks.
    """

    block: int
    radius: int = 0

    def __post_init__(self) -> None:
        require_whole("block", self.block, 1)
        require_whole("block radius", self.radius, 0)

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        def near(query: Tensor, key: Tensor) -> Tensor:
            return (query - key).abs() <= self.radius

        return by_block(near, self.block, ctx.query_position(b, i), ctx.key_position(b, j))
