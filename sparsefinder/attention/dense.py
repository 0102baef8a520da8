"""The transform over all legal keys (mode `dense`): no plan, but never more than a few heads' scores at once."""

import torch
from torch import Tensor

from sparsefinder.attention.call import Call, asks_gradient, stretch, without_padding
from sparsefinder.entmax import entmax
from sparsefinder.shapes import item_bias

ROWS = 128  # of a causal layer under gradients: later keys are not computed
CHUNK = 1 << 19  # scores at once: 2 MB, so that they are still in cache when the transform reads them


def attend_all(call: Call) -> Tensor:
    """`[B, H, N, Dv]`. Differentiable where a gradient is asked for; then all scores of the batch are kept."""
    if asks_gradient(call):
        return _with_gradient(call)
    out = call.q.new_zeros(*call.q.shape[:3], call.v.shape[-1])
    for b in range(call.dims.batch):
        _item(call, b, out)
    return out


def _with_gradient(call: Call) -> Tensor:
    q, k, v = without_padding(call)
    q = q * call.scales[:, None, None]
    rows = ROWS if call.legal.causal else call.dims.queries
    starts = range(0, call.dims.queries, rows)
    parts = [_rows_with_gradient(call, q, k, v, slice(i, min(i + rows, call.dims.queries))) for i in starts]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _rows_with_gradient(call: Call, q: Tensor, k: Tensor, v: Tensor, rows: slice) -> Tensor:
    """Some rows of all items and heads; of a causal layer only the keys that the last of them sees."""
    dims, last = call.dims, rows.stop + call.legal.query_offset
    keys = slice(0, min(last, call.dims.keys) if call.legal.causal else call.dims.keys)
    # Query heads of one kv head side by side: grouped-query attention without copies of k and v.
    grouped = q[:, :, rows].reshape(dims.batch, dims.kv_heads, -1, dims.dim)
    scores = grouped @ k[:, :, keys].transpose(-1, -2)
    scores = scores.view(dims.batch, dims.heads, rows.stop - rows.start, keys.stop)
    scores = scores if call.bias is None else scores + call.bias[:, :, rows, keys]
    if _all_legal(call):
        p = entmax(scores, call.alpha)
    else:
        i, j = (torch.arange(s.start, s.stop, device=q.device) for s in (rows, keys))
        mask = torch.stack([call.legal.allows(b, i[:, None], j[None, :]) for b in range(dims.batch)])
        p = entmax(scores, call.alpha, mask[:, None])
    p = p.view(dims.batch, dims.kv_heads, -1, keys.stop)
    return (p @ v[:, :, keys]).view(dims.batch, dims.heads, rows.stop - rows.start, -1)


def _all_legal(call: Call) -> bool:
    limited = call.legal.causal or call.legal.radius is not None
    return not limited and bool(call.legal.query_real.all() and call.legal.key_real.all())


def _item(call: Call, b: int, out: Tensor) -> None:
    """One item, cropped to the stretch of its real tokens, so that padding costs nothing and changes no bit."""
    rows, columns = stretch(call.legal.query_real[b]), stretch(call.legal.key_real[b])
    if rows.start == rows.stop or columns.start == columns.stop:
        return
    mask = _illegal(call, b, rows, columns)
    bias = None if call.bias is None else item_bias(call.bias, b)[:, rows, columns]
    q = call.q[b, :, rows] * call.scales[:, None, None]
    k, v = call.k[b, :, columns], call.v[b, :, columns]
    if mask is not None:  # padding inside the stretch
        k, v = (x.masked_fill(~call.legal.key_real[b, columns, None], 0.0) for x in (k, v))
        q = q.masked_fill(~call.legal.query_real[b, rows, None], 0.0)
    keys, group = k.shape[1], call.dims.group
    if call.legal.radius is not None:  # a chunk of rows reaches no farther
        keys = min(keys, 4 * (call.legal.radius + 1))
    high = max(1, min(q.shape[1], CHUNK // keys if call.legal.radius is None else 2 * (call.legal.radius + 1)))
    wide = max(1, CHUNK // (keys * high))
    if group > 1:  # all query heads of one kv head, or one: a chunk must not straddle two of them
        wide = group if wide >= group else 1
    for h in range(0, call.dims.heads, wide):
        heads = slice(h, min(h + wide, call.dims.heads))
        kv = slice(h // group, (heads.stop - 1) // group + 1)
        for i in range(0, q.shape[1], high):
            part = slice(i, min(i + high, q.shape[1]))
            near = _near(call, rows, columns, part)
            if near.start == near.stop:
                continue
            scores = q[heads, part] @ k[kv, near].transpose(-1, -2)
            if bias is not None:
                scores += bias[heads, part, near]
            p = _transform(scores, call.alpha, None if mask is None else mask[part, near])
            out[b, heads, rows.start + part.start : rows.start + part.stop] = p @ v[kv, near]


def _near(call: Call, rows: slice, columns: slice, part: slice) -> slice:
    """Keys of the stretch that some row of this part of it may see."""
    count, shift = columns.stop - columns.start, rows.start + call.legal.query_offset - columns.start
    reach = call.legal.radius
    low = 0 if reach is None else min(max(part.start + shift - reach, 0), count)
    last = part.stop - 1 + shift
    high = count if reach is None else last + reach + 1
    high = min(high, last + 1) if call.legal.causal else high
    return slice(low, max(min(high, count), low))


def _illegal(call: Call, b: int, rows: slice, columns: slice) -> Tensor | None:
    """True where a pair of the stretch is not legal; None where all are."""
    real_rows, real_columns = call.legal.query_real[b, rows], call.legal.key_real[b, columns]
    i = torch.arange(rows.start, rows.stop, device=real_rows.device)[:, None]
    visible = call.legal.visible(i, torch.arange(columns.start, columns.stop, device=real_rows.device)[None, :])
    if visible is None and bool(real_rows.all() and real_columns.all()):
        return None
    legal = real_rows[:, None] & real_columns[None, :]
    return ~legal if visible is None else (legal & visible).logical_not_()


def _transform(scores: Tensor, alpha: float, illegal: Tensor | None) -> Tensor:
    if illegal is not None:
        scores = scores.masked_fill_(illegal, -torch.inf)
    return entmax(scores, alpha)
