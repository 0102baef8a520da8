"""The flex backend: PyTorch's FlexAttention over the blocks that a plan touches. Softmax only; a baseline.

FlexAttention skips whole blocks of queries and keys and checks the pairs of all others, so scattered keys, which a plan
has, cost it nearly what dense attention costs (Dong et al., 2024).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from sparsefinder.attention.call import Call, without_padding
from sparsefinder.errors import BackendError
from sparsefinder.plan import Plan

MOST_ROWS = 128  # of a tile (`shapes.head_tiles`)
NEVER = 255
BLOCK = 128  # queries and keys of a block: the smallest that the compiled kernels take on every GPU


def attend_flex(call: Call, plan: Plan) -> Tensor:
    """`[B, H, N, Dv]`; rows without keys are zeros. Compiled on CUDA, eager elsewhere (all scores at once, slow).

    Raises:
        BackendError: α other than 1, or a bias.
    """
    if call.alpha != 1:
        raise BackendError(f"backend flex: expected alpha 1 (softmax), got {call.alpha}")
    if call.bias is not None:
        raise BackendError("backend flex: expected no bias, got one")
    q, k, v = without_padding(call)
    compute: Any = _compiled() if q.is_cuda else flex_attention
    out: Tensor = compute(
        q * call.scales[:, None, None].to(q.dtype),
        k,
        v,
        block_mask=plan_block_mask(plan),
        scale=1.0,
        enable_gqa=call.dims.group > 1,
    )
    real = rows_with_keys(plan)[..., None]
    return out.masked_fill(~real, 0.0)


def plan_block_mask(plan: Plan, block: int = BLOCK) -> BlockMask:
    """The blocks that the lists of the plan touch, each pair of them checked again: exactly the pairs of the plan.

    A byte for every (tile, key) and numbers of every block are made, nothing of size N × M.
    """
    first, tile, row = _lookup(plan)

    def may_attend(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return first[tile[b, h, i], j] <= row[b, h, i]

    batch, heads, queries, keys = plan.shape
    high, wide = -(-queries // block), -(-keys // block)
    padded = torch.nn.functional.pad(first[:-1] < NEVER, (0, wide * block - keys))
    by_key = padded.view(-1, wide, block).any(-1).int()
    touched = torch.zeros(batch * heads * high, wide, dtype=torch.int32, device=first.device)
    owner = plan.tile_batch.long() * heads + plan.tile_head
    stop = plan.tile_start + plan.tile_rows
    for shift in range(-(-MOST_ROWS // block) + 1):  # a tile lies in so many blocks of queries at most
        at = plan.tile_start // block + shift
        touched.index_add_(0, owner * high + at.clamp(max=high - 1), by_key * (at * block < stop)[:, None])
    some = (touched > 0).view(batch, heads, high, wide)
    order = some.int().argsort(dim=-1, descending=True, stable=True).int()
    counts = some.sum(-1, dtype=torch.int32)
    return BlockMask.from_kv_blocks(counts, order, BLOCK_SIZE=block, mask_mod=may_attend, seq_lengths=(queries, keys))


def _lookup(plan: Plan) -> tuple[UInt8[Tensor, "T_and_1 M"], Int[Tensor, "B H N"], Int[Tensor, "B H N"]]:
    """The first row of every tile that may read a key (`NEVER`: none), and the tile and place in it of every query.
    Queries without a tile belong to a last one that reads nothing."""
    batch, heads, queries, keys = plan.shape
    tiles, device = plan.tile_start.shape[0], plan.keys.device
    end = int(plan.offsets[-1])
    first = torch.full((tiles + 1, keys), NEVER, dtype=torch.uint8, device=device)
    t = torch.arange(tiles, device=device)
    first[t.repeat_interleave(plan.offsets.diff()), plan.keys[:end].long()] = plan.first_row[:end].to(torch.uint8)
    of_row = t.repeat_interleave(plan.tile_rows)
    begin = plan.tile_rows.cumsum(0) - plan.tile_rows
    place = torch.arange(of_row.shape[0], device=device) - begin[of_row]
    at = (plan.tile_batch.long() * heads + plan.tile_head) * queries + plan.tile_start
    tile = torch.full((batch * heads * queries,), tiles, device=device)
    row = torch.zeros_like(tile)
    tile[at[of_row] + place], row[at[of_row] + place] = of_row, place
    return first, tile.view(batch, heads, queries), row.view(batch, heads, queries)


def rows_with_keys(plan: Plan) -> Bool[Tensor, "B H N"]:
    """Which queries have a key to read."""
    first, tile, row = _lookup(plan)
    return first.amin(-1)[tile] <= row


@cache
def _compiled() -> Callable[..., Tensor]:
    """Compiled once per process; torch compiles again for other dtypes and head dimensions."""
    return torch.compile(flex_attention)
