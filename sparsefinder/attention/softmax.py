"""Softmax over all legal keys by torch's fused attention: the dense path of a model whose transform stays softmax."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparsefinder.attention.call import Call, asks_gradient, stretch, without_padding


def can_be_fused(call: Call) -> bool:
    """Softmax without gradient, bias or sliding window, which the fused kernels would need an N × M matrix for."""
    return call.alpha == 1 and call.bias is None and call.legal.radius is None and not asks_gradient(call)


def attend_softmax(call: Call) -> Tensor:
    """`[B, H, N, Dv]`; rows without keys are zeros. For calls that `can_be_fused`.

    Each item is computed alone over the stretch of its real tokens, so that padding costs nothing and changes no bit.
    """
    q, k, v = without_padding(call)
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    for b in range(call.dims.batch):
        rows, columns = stretch(call.legal.query_real[b]), stretch(call.legal.key_real[b])
        if rows.start < rows.stop and columns.start < columns.stop:
            part = q[b, :, rows] * call.scales[:, None, None], k[b, :, columns], v[b, :, columns]
            out[b, :, rows] = _item(call, b, rows, columns, *part)
    return out


def _item(call: Call, b: int, rows: slice, columns: slice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    queries = q.view(call.dims.kv_heads, call.dims.group, *q.shape[1:])
    # The heads of a group see one kv head without copies of it.
    keys, values = (x[:, None].expand(-1, call.dims.group, -1, -1) for x in (k, v))
    mask = _mask(call, b, rows, columns)
    causal = mask is None and call.legal.causal
    out = scaled_dot_product_attention(queries, keys, values, mask, is_causal=causal, scale=1.0).flatten(0, 1)
    # What a fused kernel makes of a row without keys differs between kernels.
    return out if mask is None else out.masked_fill(~mask.any(-1)[:, None], 0.0)


def _mask(call: Call, b: int, rows: slice, columns: slice) -> Tensor | None:
    """Legal pairs of the stretch; None where all are, or where being causal says it all: no matrix is made then."""
    legal = call.legal
    real = bool(legal.query_real[b, rows].all() and legal.key_real[b, columns].all())
    square = rows.start + legal.query_offset == columns.start and rows.stop - rows.start == columns.stop - columns.start
    if real and (square or not legal.causal):
        return None
    i, j = (torch.arange(s.start, s.stop, device=call.q.device) for s in (rows, columns))
    return legal.allows(b, i[:, None], j[None, :])
