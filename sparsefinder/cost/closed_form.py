"""The number of pairs of a positional pattern on n real tokens attending to themselves, without looking at any pair."""

from collections.abc import Callable

import numpy as np
import torch

from sparsefinder.errors import PatternError
from sparsefinder.patterns.algebra import Complement, Context, Intersection, Pattern, Union
from sparsefinder.patterns.positional import (
    BlockDiagonal,
    Dilated,
    Fixed,
    GlobalTokens,
    Nothing,
    Past,
    Strided,
    Window,
)
from sparsefinder.patterns.random_keys import RandomBlocks, RandomKeys


def closed_form_pairs(pattern: Pattern, tokens: int, causal: bool = False) -> int | None:
    """Pairs (i, j) that the pattern allows, those with j ≤ i where causal; None where no formula is known here.

    Known: everything composed of parts that see the distance only (window, dilated, strided, the past); global tokens,
    alone or in a union with that; blocks, fixed and random patterns alone; complements of all these. Exact integers at
    any length, with at most O(n) work.

    Raises PatternError for fewer than one token.
    """
    if tokens < 1:
        raise PatternError(f"tokens: expected at least 1, got {tokens}")
    if _sees_distance_only(pattern):
        return _by_distance(pattern, tokens, causal)
    if isinstance(pattern, Complement):
        inner = closed_form_pairs(pattern.inner, tokens, causal)
        return None if inner is None else all_pairs(tokens, causal) - inner
    if isinstance(pattern, Union):
        return _union(pattern, tokens, causal)
    formula = _LEAVES.get(type(pattern))
    return None if formula is None else formula(pattern, tokens, causal)


def all_pairs(tokens: int, causal: bool = False) -> int:
    """Legal pairs of full attention."""
    return tokens * (tokens + 1) // 2 if causal else tokens * tokens


def _sees_distance_only(pattern: Pattern) -> bool:
    if isinstance(pattern, Union | Intersection):
        return _sees_distance_only(pattern.left) and _sees_distance_only(pattern.right)
    if isinstance(pattern, Complement):
        return _sees_distance_only(pattern.inner)
    return isinstance(pattern, Nothing | Past | Window | Dilated | Strided)


def _by_distance(pattern: Pattern, tokens: int, causal: bool) -> int:
    """There are n − d pairs with i − j = d: the last row shows every d ≥ 0, the first row every d ≤ 0."""
    ctx, place = Context(tokens, tokens), torch.arange(tokens)
    past = pattern.allows(ctx, 0, 0, place[-1:], place)  # entry j: distance n − 1 − j, of which there are j + 1 pairs
    total = int((past * (place + 1)).sum())
    if causal:
        return total
    future = pattern.allows(ctx, 0, 0, place[:1], place[1:])
    return total + int((future * (tokens - place[1:])).sum())


def _union(pattern: Union, tokens: int, causal: bool) -> int | None:
    """Global tokens take whole rows and columns; what is left is the other pattern on the remaining tokens."""
    for one, other in ((pattern.left, pattern.right), (pattern.right, pattern.left)):
        if isinstance(one, Nothing):
            return closed_form_pairs(other, tokens, causal)
        if isinstance(one, GlobalTokens) and _sees_distance_only(other):
            rest = tokens - min(_count(one), tokens)
            return _global(one, tokens, causal) + (_by_distance(other, rest, causal) if rest else 0)
    return None


def _global(pattern: GlobalTokens, tokens: int, causal: bool) -> int:
    count = min(_count(pattern), tokens)
    return count * tokens - count * (count - 1) // 2 if causal else 2 * count * tokens - count * count


def _count(pattern: GlobalTokens) -> int:
    """The number of global tokens of the first item."""
    return pattern.count[0] if isinstance(pattern.count, tuple) else pattern.count


def _blocks(pattern: BlockDiagonal, tokens: int, causal: bool) -> int:
    sizes = np.full(-(-tokens // pattern.block), pattern.block, np.int64)
    sizes[-1] = tokens - pattern.block * (len(sizes) - 1)
    total = np.append(0, sizes.cumsum())
    at = np.arange(len(sizes))
    low = np.maximum(at - pattern.radius, 0)
    if causal:
        return int((sizes * (total[at] - total[low]) + sizes * (sizes + 1) // 2).sum())
    return int((sizes * (total[np.minimum(at + pattern.radius + 1, len(sizes))] - total[low])).sum())


def _fixed(pattern: Fixed, tokens: int, causal: bool) -> int:
    places = np.arange(tokens)
    summary = places[places % pattern.stride >= pattern.stride - pattern.summary]
    readers = int((tokens - summary).sum()) if causal else tokens * len(summary)
    return readers + tokens - len(summary)  # the others read themselves


def _random_keys(pattern: RandomKeys, tokens: int, causal: bool) -> int | None:
    if pattern.causal:
        few = min(pattern.count, tokens)
        return few * (few + 1) // 2 + pattern.count * (tokens - few)
    return None if causal else tokens * min(pattern.count, tokens)


def _random_blocks(pattern: RandomBlocks, tokens: int, causal: bool) -> int | None:
    """Blocks of equal size only: else it matters who drew the short one."""
    if pattern.causal or causal or tokens % pattern.block:
        return None
    return tokens * pattern.block * min(pattern.count, tokens // pattern.block)


_LEAVES: dict[type[Pattern], Callable[..., int | None]] = {
    GlobalTokens: _global,
    BlockDiagonal: _blocks,
    Fixed: _fixed,
    RandomKeys: _random_keys,
    RandomBlocks: _random_blocks,
}
