"""A pattern as sorted edges and as FlexAttention's `BlockMask`: the same pairs as its matrix and its plan."""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from sparsefinder.edges import Edges
from sparsefinder.patterns.algebra import Context, Pattern, context_for
from sparsefinder.patterns.bounds import bounds
from sparsefinder.patterns.legal import Legal

STRIP = 256  # rows that are looked at together


def pattern_edges(pattern: Pattern, legal: Legal, heads: int, ctx: Context | None = None) -> Edges:
    """All allowed and legal pairs of every item and head, a strip of rows at a time.

    Raises PatternError where the context's sizes are not those of `legal`.
    """
    ctx, device = context_for(legal, ctx), legal.key_real.device
    batch, j = legal.key_real.shape[0], torch.arange(ctx.keys, device=device)[None, :]
    strips = torch.split(torch.arange(ctx.queries, device=device)[:, None], STRIP)
    found = []
    for b in range(batch):
        for h in range(heads):
            allowed = [pattern.allows(ctx, b, h, i, j) & legal.allows(b, i, j) for i in strips]
            found.append(torch.cat(allowed).flatten().nonzero().flatten())
    counts = torch.tensor([0] + [edges.shape[0] for edges in found], device=device)
    return Edges(counts.cumsum(0), torch.cat(found), (batch, heads, ctx.queries, ctx.keys))


def block_mask(
    pattern: Pattern, legal: Legal, heads: int, block: int | tuple[int, int] = 128, ctx: Context | None = None
) -> BlockMask:
    """The block mask of a pattern: blocks without a pair are skipped, full ones are not checked, others pair by pair.

    It is made from `bounds`, so nothing of size B × H × N × M exists. Blocks at a ragged end are always checked.

    Args:
        heads: query heads; with grouped keys pass `enable_gqa=True` to `flex_attention`.
        block: queries and keys of a block; the compiled kernels want multiples of 16, mostly 128.

    Raises:
        PatternError: the context's sizes are not those of `legal`, or the pattern cannot be used here.
        ShapeError: a block without rows or columns.
    """
    ctx = context_for(legal, ctx)
    sizes = (block, block) if isinstance(block, int) else block
    partial, full = [], []
    for b in range(legal.key_real.shape[0]):
        for h in range(heads):
            some, every = bounds(pattern, legal, *sizes, b, h, ctx)
            every[ctx.queries // sizes[0] :] = False
            every[:, ctx.keys // sizes[1] :] = False
            partial.append(some & ~every)
            full.append(every)
    shape = (legal.key_real.shape[0], heads, *full[0].shape)

    def may_attend(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return pattern.allows(ctx, b, h, i, j) & legal.allows(b, i, j)

    checked, unchecked = (_listed(torch.stack(blocks).view(shape)) for blocks in (partial, full))
    lengths = (ctx.queries, ctx.keys)
    return BlockMask.from_kv_blocks(*checked, *unchecked, BLOCK_SIZE=sizes, mask_mod=may_attend, seq_lengths=lengths)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of every row are there, and their columns: those first, in order."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.int()
