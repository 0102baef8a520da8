"""Attention over a plan in plain torch: tiles of similar length are padded and computed together. Runs on any device.

Nothing of size N × M exists: a group of tiles holds at most `GROUP` scores.
"""

import torch
from torch import Tensor

from sparsefinder.attention.call import Call, without_padding
from sparsefinder.entmax import entmax
from sparsefinder.plan import Plan

GROUP = 1 << 22


def attend_gather(call: Call, plan: Plan) -> Tensor:
    """`[B, H, N, Dv]`; rows without keys are zeros."""
    q, k, v = without_padding(call)
    dims = call.dims
    out = q.new_zeros(dims.batch * dims.heads * dims.queries, v.shape[-1])
    lengths, rows = plan.offsets.diff(), int(plan.tile_rows.max()) if plan.tile_rows.numel() else 0
    order = lengths.argsort(descending=True, stable=True)
    order = order[: int((lengths > 0).sum())]
    sizes, start = lengths[order].tolist(), 0
    parts, places = [], []
    while start < len(sizes):
        width = sizes[start]
        stop = start + max(1, min(GROUP // (width * rows), _until_shorter(sizes, start, width // 2)))
        values, place = _group(q, k, v, call, plan, order[start:stop], width, rows)
        parts.append(values)
        places.append(place)
        start = stop
    if parts:
        out = out.index_copy(0, torch.cat(places), torch.cat(parts))
    return out.view(*q.shape[:3], -1)


def _until_shorter(sizes: list[int], start: int, least: int) -> int:
    """How many tiles from `start` on have lists longer than `least`, so that little is padded."""
    low, high = start, len(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if sizes[middle] > least else (low, middle)
    return low - start


def _group(
    q: Tensor, k: Tensor, v: Tensor, call: Call, plan: Plan, tiles: Tensor, width: int, rows: int
) -> tuple[Tensor, Tensor]:
    """Outputs `[rows of these tiles, Dv]` and the places of those rows in the flattened output."""
    dims, device = call.dims, q.device
    b, h = plan.tile_batch[tiles].long(), plan.tile_head[tiles].long()
    r, c = torch.arange(rows, device=device), torch.arange(width, device=device)
    row_in = r[None, :] < plan.tile_rows[tiles, None]
    row = torch.where(row_in, plan.tile_start[tiles, None] + r, 0).long()
    listed = c[None, :] < plan.offsets.diff()[tiles, None]
    at = torch.where(listed, plan.offsets[tiles, None] + c, 0)
    key, kv = plan.keys[at].long(), (h // dims.group)[:, None]
    queries = q[b[:, None], h[:, None], row] * call.scales[h][:, None, None]
    scores = queries @ k[b[:, None], kv, key].transpose(1, 2)
    if call.bias is not None:
        item = b if call.bias.shape[0] > 1 else torch.zeros_like(b)
        scores = scores + call.bias[item[:, None, None], h[:, None, None], row[:, :, None], key[:, None, :]]
    may = listed[:, None, :] & (plan.first_row[at][:, None, :] <= r[None, :, None])
    p = entmax(scores, call.alpha, may)
    values = p @ v[b[:, None], kv, key]
    place = (b[:, None] * dims.heads + h[:, None]) * dims.queries + row
    return values[row_in], place[row_in]
