"""The named patterns of the literature, as compositions: no model needs a class of its own."""

from typing import Literal

from sparsefinder.errors import PatternError
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.heads import Multihead, Sequential
from sparsefinder.patterns.positional import (
    BlockDiagonal,
    Dilated,
    Fixed,
    GlobalPositions,
    GlobalTokens,
    Strided,
    Window,
    require_whole,
    window,
)
from sparsefinder.patterns.random_keys import RandomBlocks

Heads = Literal["sequential", "union", "multihead"]


def longformer(window_size: int, global_tokens: int = 1, dilation: int = 1, positions: tuple[int, ...] = ()) -> Pattern:
    """Window, perhaps dilated, and global tokens: the first ones and those at `positions` (Beltagy et al., 2020).

    Raises PatternError for an even window size or numbers below their range.
    """
    local = window(window_size)
    if isinstance(local, Window) and dilation != 1:
        local = Dilated(local.radius, dilation)
    pattern = local | GlobalTokens(global_tokens)
    return pattern | GlobalPositions(positions) if positions else pattern


def bigbird(
    block: int = 64,
    random_blocks: int = 3,
    window_blocks: int = 3,
    global_blocks: int = 1,
    seed: int = 0,
    causal: bool = False,
) -> Pattern:
    """Random, window and global blocks (Zaheer et al., 2020, section 2 and appendix D).

    The window moves by blocks: a query sees its own block and `(window_blocks − 1) / 2` blocks on either side. `block`
    1 is the element-wise form.

    Raises PatternError for an even number of window blocks or numbers below their range.
    """
    require_whole("global_blocks", global_blocks, 0)
    require_whole("block", block, 1)
    local = window(window_blocks)
    if isinstance(local, Window):
        local = BlockDiagonal(block, local.radius)
    return local | GlobalTokens(block * global_blocks) | RandomBlocks(block, random_blocks, seed, causal)


def sparse_transformer(
    kind: Literal["strided", "fixed"], stride: int, summary: int = 1, heads: Heads = "sequential"
) -> Pattern:
    """The two patterns of the Sparse Transformer in a head configuration (Child et al., 2019, section 4.3, in a causal
    layer; Yun et al., 2020, section 4, in a bidirectional one).

    strided: a window of radius `stride`, and every `stride`-th token. fixed: the own segment of `stride` tokens, and
    the last `summary` tokens of every segment.

    Raises PatternError for unknown words and numbers below their range.
    """
    if kind == "strided":
        pair: tuple[Pattern, Pattern] = (Window(stride), Strided(stride))
    elif kind == "fixed":
        pair = (BlockDiagonal(stride), Fixed(stride, summary))
    else:
        raise PatternError(f"sparse_transformer: expected strided or fixed, got {kind!r}")
    if heads == "union":
        return pair[0] | pair[1]
    if heads == "sequential":
        return Sequential(pair)
    if heads == "multihead":
        return Multihead(pair)
    raise PatternError(f"heads: expected sequential, union or multihead, got {heads!r}")


def star_transformer(radius: int = 1) -> Pattern:
    """A relay, the first token, that sees all and is seen by all, and a window (Guo et al., 2019; Yun et al., 2020).

    Guo et al. close the chain of tokens to a ring; here, as everywhere in this package, its two ends are no neighbours.
    """
    return Window(radius) | GlobalTokens(1)
