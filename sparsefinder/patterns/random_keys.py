"""Random patterns without a table: who is drawn is a hash of where one asks (seed, layer, head, row, draw).

So they are the same in every run and on every device, alone or in a batch, padded or not, and need no N × M matrix.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsefinder.errors import PatternError
from sparsefinder.patterns.algebra import Context, Pattern, by_block
from sparsefinder.patterns.positional import require_whole

WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class RandomKeys(Pattern):
    """Every query draws `count` different keys of its item, uniformly (Yun et al., 2020, section 5; fewer where the
    item is shorter).

    causal: it draws from the keys up to itself; without that a causal layer refuses the pattern with a PatternError,
        since the draws depend on the item's length.
    """

    count: int
    seed: int = 0
    causal: bool = False

    def __post_init__(self) -> None:
        _require_draw(self)

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        return _is_drawn(self, 1, ctx, b, h, i, j)


@dataclass(frozen=True)
class RandomBlocks(Pattern):
    """Every block of `block` queries draws `count` different blocks of keys (Zaheer et al., 2020, appendix D).

    BigBird leaves window and global blocks out of the draw; here they may be drawn too, as in any union.
    causal: as in `RandomKeys`.
    """

    block: int
    count: int
    seed: int = 0
    causal: bool = False

    def __post_init__(self) -> None:
        require_whole("block", self.block, 1)
        _require_draw(self)

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        return _is_drawn(self, self.block, ctx, b, h, i, j)


def _require_draw(pattern: RandomKeys | RandomBlocks) -> None:
    require_whole("random count", pattern.count, 0)
    require_whole("random seed", pattern.seed, 0)
    if not isinstance(pattern.causal, bool):
        raise PatternError(f"causal: expected True or False, got {pattern.causal!r}")


def _is_drawn(
    pattern: RandomKeys | RandomBlocks,
    block: int,
    ctx: Context,
    b: int | Tensor,
    h: int | Tensor,
    i: Tensor,
    j: Tensor,
) -> Tensor:
    def met(row: Tensor, key: Tensor) -> Tensor:
        found = torch.zeros_like(row + key, dtype=torch.bool)
        for drawn in draws(pattern, ctx, b, h, row):
            found = found | (drawn == key)
        return found

    return by_block(met, block, ctx.query_position(b, i), ctx.key_position(b, j))


def draws(
    pattern: RandomKeys | RandomBlocks, ctx: Context, b: int | Tensor, h: int | Tensor, row: Tensor
) -> Iterator[Tensor]:
    """The block drawn by each (block) row, one draw after the other, all different; −1 where nothing is left to draw.

    Floyd's sampling without replacement: draw t of n − count … n − 1 takes a uniform one of 0 … t, or t itself where
    that one was taken before.
    """
    block = pattern.block if isinstance(pattern, RandomBlocks) else 1
    row = row.long()
    choices = row + 1 if pattern.causal else torch.zeros_like(row) + (ctx.tokens(b) + block - 1) // block
    taken: list[Tensor] = []
    for c in range(pattern.count):
        top = choices - pattern.count + c
        one = _hash(row, pattern.seed, ctx.layer, h, c) % (top.clamp(min=0) + 1)
        again = torch.zeros_like(one, dtype=torch.bool)
        for earlier in taken:
            again = again | (one == earlier)
        taken.append(torch.where(top < 0, -1, torch.where(again, top, one)))
        yield taken[-1]


def _hash(row: Tensor, *place: int | Tensor) -> Tensor:
    """32 bits from whole numbers, each stirred in by the mixer "lowbias32" (C. Wellons, 2018)."""
    state = torch.zeros_like(row)
    for value in (*place, row):
        state = ((state ^ (value & WORD)) + 0x9E3779B9) & WORD
        state = ((state ^ (state >> 16)) * 0x7FEB352D) & WORD
        state = ((state ^ (state >> 15)) * 0x846CA68B) & WORD
        state = state ^ (state >> 16)
    return state
