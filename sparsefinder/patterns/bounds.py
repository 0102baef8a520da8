"""Which tiles of an attention matrix hold an allowed pair, and which hold nothing else, without the matrix.

Bounds are sound, not always exact: "some" may say yes too often and "every" no too often, never the other way round.
They close under the algebra: union (or, or), intersection (and, and), complement (not every, not some).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sparsefinder.errors import ShapeError
from sparsefinder.patterns.algebra import Complement, Context, Intersection, Pattern, Union, context_for
from sparsefinder.patterns.heads import Multihead, Sequential
from sparsefinder.patterns.legal import Legal
from sparsefinder.patterns.positional import (
    BlockDiagonal,
    Dilated,
    Fixed,
    GlobalPositions,
    GlobalTokens,
    Nothing,
    Past,
    Strided,
    Window,
)
from sparsefinder.patterns.random_keys import RandomBlocks, RandomKeys, draws

Bounds = tuple[Tensor, Tensor]

FAR = 2**62  # a distance that nobody reaches


@dataclass(frozen=True, eq=False)
class Grid:
    """Tiles of one item and head: `tile_q` × `tile_k` consecutive indices from index 0 on; the last may be shorter."""

    ctx: Context
    b: int
    h: int
    tile_q: int
    tile_k: int
    query: Int[Tensor, " N"]
    key: Int[Tensor, " M"]

    @property
    def query_ends(self) -> tuple[Int[Tensor, "Tq 1"], Int[Tensor, "Tq 1"]]:
        """The lowest and the highest position of every tile's queries."""
        low, high = _ends(self.ctx.query_position(self.b, self.query), self.tile_q)
        return low[:, None], high[:, None]

    @property
    def key_ends(self) -> tuple[Int[Tensor, "1 Tk"], Int[Tensor, "1 Tk"]]:
        """The lowest and the highest position of every tile's keys."""
        low, high = _ends(self.ctx.key_position(self.b, self.key), self.tile_k)
        return low[None, :], high[None, :]


def bounds(
    pattern: Pattern, legal: Legal, tile_q: int, tile_k: int, b: int, h: int, ctx: Context | None = None
) -> tuple[Bool[Tensor, "Tq Tk"], Bool[Tensor, "Tq Tk"]]:
    """For every tile: may some pair be allowed and legal? Are all its pairs certainly allowed and legal?

    Positional patterns are answered from the ends of the tiles: exactly, but for `every` of `Fixed` and of random
    patterns, and for compositions. Those that know the tokens are evaluated, a strip of `tile_q` rows at a time (time
    N · M, memory `tile_q` · M).

    Raises:
        ShapeError: a tile without rows or columns.
        PatternError: the context's sizes are not those of `legal`, or the pattern cannot be used here.
    """
    if min(tile_q, tile_k) < 1:
        raise ShapeError(f"tiles: expected at least one row and one column, got {tile_q} and {tile_k}")
    ctx, device = context_for(legal, ctx), legal.key_real.device
    index = torch.arange(ctx.queries, device=device), torch.arange(ctx.keys, device=device)
    grid = Grid(ctx, b, h, tile_q, tile_k, *index)
    some, every = pattern_bounds(pattern, grid)
    some_legal, every_legal = _legal_bounds(legal, grid)
    return some & some_legal, every & every_legal


@singledispatch
def pattern_bounds(pattern: Pattern, grid: Grid) -> Bounds:
    """The bounds over all pairs, legal or not, `[Tq, Tk]` or what broadcasts to it. By default all are evaluated."""
    strips = []
    for rows in torch.split(grid.query, grid.tile_q):
        allowed = pattern.allows(grid.ctx, grid.b, grid.h, rows[:, None], grid.key[None, :])
        allowed = allowed.expand(rows.shape[0], grid.key.shape[0])
        strips.append((_any(allowed.any(0), grid.tile_k), _all(allowed.all(0), grid.tile_k)))
    some, every = zip(*strips, strict=True)
    return torch.stack(some), torch.stack(every)


@pattern_bounds.register
def _(pattern: Union, grid: Grid) -> Bounds:
    left, right = pattern_bounds(pattern.left, grid), pattern_bounds(pattern.right, grid)
    return left[0] | right[0], left[1] | right[1]


@pattern_bounds.register
def _(pattern: Intersection, grid: Grid) -> Bounds:
    left, right = pattern_bounds(pattern.left, grid), pattern_bounds(pattern.right, grid)
    return left[0] & right[0], left[1] & right[1]


@pattern_bounds.register
def _(pattern: Complement, grid: Grid) -> Bounds:
    some, every = pattern_bounds(pattern.inner, grid)
    return ~every, ~some


@pattern_bounds.register
def _(pattern: Sequential, grid: Grid) -> Bounds:
    return pattern_bounds(pattern.of_layer(grid.ctx.layer), grid)


@pattern_bounds.register
def _(pattern: Multihead, grid: Grid) -> Bounds:
    return pattern_bounds(pattern.of_head(grid.h), grid)


@pattern_bounds.register
def _(pattern: Nothing, grid: Grid) -> Bounds:
    none = torch.zeros(1, 1, dtype=torch.bool, device=grid.key.device)
    return none, none


@pattern_bounds.register
def _(pattern: Past, grid: Grid) -> Bounds:
    low, high = _distances(grid)
    return high >= 0, low >= 0


@pattern_bounds.register
def _(pattern: Window, grid: Grid) -> Bounds:
    return _steps(*_distances(grid), pattern.radius, 1)


@pattern_bounds.register
def _(pattern: Dilated, grid: Grid) -> Bounds:
    return _steps(*_distances(grid), pattern.radius * pattern.step, pattern.step)


@pattern_bounds.register
def _(pattern: Strided, grid: Grid) -> Bounds:
    return _steps(*_distances(grid), FAR, pattern.stride)


@pattern_bounds.register
def _(pattern: BlockDiagonal, grid: Grid) -> Bounds:
    return _steps(*_distances(grid, pattern.block), pattern.radius, 1)


@pattern_bounds.register
def _(pattern: Fixed, grid: Grid) -> Bounds:
    key = grid.ctx.key_position(grid.b, grid.key) % pattern.stride >= pattern.stride - pattern.summary
    itself = _steps(*_distances(grid), 0, 1)
    return itself[0] | _any(key, grid.tile_k), itself[1] | _all(key, grid.tile_k)


@pattern_bounds.register
def _(pattern: GlobalTokens, grid: Grid) -> Bounds:
    count = pattern.of_item(grid.b, grid.key)
    return _seen_by_all(grid, lambda position: (position >= 0) & (position < count))


@pattern_bounds.register
def _(pattern: GlobalPositions, grid: Grid) -> Bounds:
    at = [position if position >= 0 else int(grid.ctx.tokens(grid.b)) + position for position in pattern.positions]
    return _seen_by_all(grid, lambda position: torch.isin(position, position.new_tensor(at)))


@pattern_bounds.register(RandomKeys)
@pattern_bounds.register(RandomBlocks)
def _(pattern: RandomKeys | RandomBlocks, grid: Grid) -> Bounds:
    """Some: mark the tiles that each query's draws fall into. Every: the tile's rows draw alike, and all its blocks."""
    block = pattern.block if isinstance(pattern, RandomBlocks) else 1
    key_low, key_high = (end // block for end in grid.key_ends)
    query_low, query_high = (end // block for end in grid.query_ends)
    inside = torch.zeros_like(query_low + key_low)
    for drawn in draws(pattern, grid.ctx, grid.b, grid.h, query_low):
        inside += (drawn >= key_low) & (drawn <= key_high)
    every = (query_low == query_high) & (inside == key_high - key_low + 1)
    some = torch.zeros_like(every)
    start = grid.query[0] - grid.ctx.key_position(grid.b, grid.query[0])  # index of the item's first real key
    row = grid.ctx.query_position(grid.b, grid.query) // block
    for drawn in draws(pattern, grid.ctx, grid.b, grid.h, row):
        first, last = drawn * block + start, ((drawn + 1) * block - 1 + start).clamp(max=grid.key.shape[0] - 1)
        real = (drawn >= 0) & (first <= last)
        for step in range(block // grid.tile_k + 2):
            tile = torch.minimum(first // grid.tile_k + step, last // grid.tile_k)
            some[grid.query[real] // grid.tile_q, tile[real]] = True
    return some, every


def _distances(grid: Grid, block: int = 1) -> tuple[Tensor, Tensor]:
    """The least and the greatest `i // block − j // block` of every tile; all whole numbers between them occur."""
    (query_low, query_high), (key_low, key_high) = grid.query_ends, grid.key_ends
    return query_low // block - key_high // block, query_high // block - key_low // block


def _steps(low: Tensor, high: Tensor, reach: int, step: int) -> Bounds:
    """Is some number, is every number of `low … high` a multiple of `step` whose size is at most `reach`?"""
    least, most = low.clamp(min=-reach), high.clamp(max=reach)
    multiples = (low == high) & (low % step == 0) if step > 1 else torch.ones_like(low, dtype=torch.bool)
    return most // step * step >= least, multiples & (low >= -reach) & (high <= reach)


def _seen_by_all(grid: Grid, is_global: Callable[[Tensor], Tensor]) -> Bounds:
    query = is_global(grid.ctx.query_position(grid.b, grid.query))
    key = is_global(grid.ctx.key_position(grid.b, grid.key))
    some = _any(query, grid.tile_q)[:, None] | _any(key, grid.tile_k)[None, :]
    return some, _all(query, grid.tile_q)[:, None] | _all(key, grid.tile_k)[None, :]


def _legal_bounds(legal: Legal, grid: Grid) -> Bounds:
    """Exact: a tile holds a legal pair if its last real query comes at or after its first real key."""
    query, key = legal.query_real[grid.b], legal.key_real[grid.b]
    some = _any(query, grid.tile_q)[:, None] & _any(key, grid.tile_k)[None, :]
    every = _all(query, grid.tile_q)[:, None] & _all(key, grid.tile_k)[None, :]
    if not legal.causal:
        return some, every
    row = grid.query + grid.ctx.query_offset
    last = _ends(torch.where(query, row, -1), grid.tile_q)[1][:, None]
    first = _ends(torch.where(key, grid.key, FAR), grid.tile_k)[0][None, :]
    return some & (first <= last), every & (_ends(grid.key, grid.tile_k)[1] <= _ends(row, grid.tile_q)[0][:, None])


def _ends(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return _tiled(values, size, FAR).amin(-1), _tiled(values, size, -FAR).amax(-1)


def _any(values: Tensor, size: int) -> Tensor:
    return _tiled(values, size, False).any(-1)


def _all(values: Tensor, size: int) -> Tensor:
    return _tiled(values, size, True).all(-1)


def _tiled(values: Tensor, size: int, fill: int) -> Tensor:
    """One row per tile; a shorter last one is filled up."""
    return torch.nn.functional.pad(values, (0, -values.shape[0] % size), value=fill).view(-1, size)
