"""Attention over a plan on the CPU: a tile's keys are gathered once, its scores stay in cache, only plan pairs exist.

The products are written as loops on purpose: numba's `np.dot` calls OpenBLAS, which starts threads of its own inside
the parallel loop, and even held to one thread it was slower than these loops on blocks of this size.
"""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from sparsefinder.attention.call import Call
from sparsefinder.numba_kernels import inline_kernel, parallel_kernel
from sparsefinder.plan import Plan
from sparsefinder.rows import climb
from sparsefinder.threads import threads_for

BLOCK = 64  # keys scored at once: with 64 dims a block is 16 KB, half of a common L1 cache
BRACKET_STEPS = 60


def attend_cpu(call: Call, plan: Plan) -> Tensor:
    """`[B, H, N, Dv]`; rows without keys are zeros."""
    q, k, v = (np.ascontiguousarray(x.detach().numpy()) for x in (call.q, call.k, call.v))
    out = torch.zeros(*call.q.shape[:3], call.v.shape[-1], dtype=call.q.dtype)
    lengths = plan.offsets.diff()
    if not lengths.shape[0] or not int(lengths.max()):
        return out
    tiles = [x.numpy() for x in (plan.tile_batch, plan.tile_head, plan.tile_start, plan.tile_rows)]
    lists = [x.numpy() for x in (plan.offsets, plan.keys, plan.first_row)]
    width, height = int(lengths.max()), int(plan.tile_rows.max())
    scales, floor = call.scales.detach().contiguous().numpy(), q.dtype.type(torch.finfo(call.q.dtype).eps / 2)
    if call.bias is None:
        bias = np.zeros((1, 1, 1, 1), q.dtype)
    else:
        bias = np.ascontiguousarray(call.bias.detach().numpy())
    with threads_for(int(plan.keys.shape[0]) * height * call.dims.dim // 8) as parts:
        attend_tiles(q, k, v, out.numpy(), scales, bias, *tiles, *lists, width, height, float(call.alpha), floor, parts)
    return out


@inline_kernel
def load_queries(q, scale, scaled):  # type: ignore[no-untyped-def]
    """The tile's queries times the scale; rows and dims that only fill up are zero."""
    scaled[:] = 0
    for r in range(q.shape[0]):
        for d in range(q.shape[1]):
            scaled[r, d] = q[r, d] * scale


@inline_kernel
def load_keys(k, keys, block):  # type: ignore[no-untyped-def]
    """The listed keys, transposed, so that the loops over keys below run over neighbours in memory."""
    for c in range(keys.shape[0]):
        row = k[keys[c]]
        for d in range(row.shape[0]):
            block[d, c] = row[d]


@inline_kernel
def score_pair(query, other, block, scores, others):  # type: ignore[no-untyped-def]
    """Scores of two rows against a block of keys, four dims at a time: eight products for every six loads."""
    n = scores.shape[0]
    for c in range(n):
        scores[c] = 0
        others[c] = 0
    for d in range(0, block.shape[0], 4):
        k0, k1, k2, k3 = block[d], block[d + 1], block[d + 2], block[d + 3]
        a0, a1, a2, a3 = query[d], query[d + 1], query[d + 2], query[d + 3]
        b0, b1, b2, b3 = other[d], other[d + 1], other[d + 2], other[d + 3]
        for c in range(n):
            x0, x1, x2, x3 = k0[c], k1[c], k2[c], k3[c]
            scores[c] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
            others[c] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3


@inline_kernel
def add_bias(bias, keys, scores):  # type: ignore[no-untyped-def]
    """The bias `[rows, all keys]` of the listed keys on top of their scores."""
    for r in range(bias.shape[0]):
        for c in range(keys.shape[0]):
            scores[r, c] += bias[r, keys[c]]


@inline_kernel
def entmax15_weights(scores, top, step_floor, index, weight):  # type: ignore[no-untyped-def]
    """Weights and their places; scores two or more below the best can have none, so the climb sees only the others."""
    half = scores.dtype.type(0.5)
    n = 0
    for c in range(scores.shape[0]):
        x = (scores[c] - top) * half
        index[n] = c
        weight[n] = x
        n += x > -1
    tau = climb(weight[:n], step_floor)
    for c in range(n):
        d = max(weight[c] - tau, scores.dtype.type(0))
        weight[c] = d * d
    return n


@inline_kernel
def general_weights(scores, top, order, index, weight):  # type: ignore[no-untyped-def]
    """Any α > 1: bisect on the largest probability in [1/n, 1], in float64 (the gaps to the best score are exact)."""
    n = 0
    for c in range(scores.shape[0]):
        x = (scores[c] - top) * order
        index[n] = c
        weight[n] = x
        n += x > -1
    low, high = 1.0 / n, 1.0
    for _ in range(BRACKET_STEPS):
        middle = (low + high) / 2
        base = middle**order
        total = 0.0
        for c in range(n):
            total += max(weight[c] + base, 0.0) ** (1 / order)
        if total > 1:
            high = middle
        else:
            low = middle
    base = low**order
    total = 0.0
    for c in range(n):
        total += max(weight[c] + base, 0.0) ** (1 / order)
    for c in range(n):
        weight[c] = max(weight[c] + base, 0.0) ** (1 / order) / total
    return n


@inline_kernel
def row_weights(scores, top, alpha, step_floor, index, weight):  # type: ignore[no-untyped-def]
    """Weights of one row and the places they belong to, without the zeros; how many there are."""
    zero = scores.dtype.type(0)
    if alpha == 1.5:
        n = entmax15_weights(scores, top, step_floor, index, weight)
    elif alpha == 1.0:
        n = 0
        for c in range(scores.shape[0]):  # a later row's key has −inf here: left out, so it moves no bit of the sum
            index[n] = c
            weight[n] = scores[c]
            n += scores[c] > -np.inf
        total = zero
        for c in range(n):
            weight[c] = np.exp(weight[c] - top)
            total += weight[c]
        for c in range(n):
            weight[c] /= total
    else:
        n = general_weights(scores, top, alpha - 1, index, weight)
    kept = 0
    for c in range(n):
        index[kept] = index[c]
        weight[kept] = weight[c]
        kept += weight[c] > zero
    return kept


@inline_kernel
def mix_values(v, keys, index, weight, out):  # type: ignore[no-untyped-def]
    """`out = Σ weight · v` over the non-zero weights, four values at a time."""
    n = index.shape[0]
    whole = n - n % 4
    for c in range(0, whole, 4):
        w0, w1, w2, w3 = weight[c], weight[c + 1], weight[c + 2], weight[c + 3]
        v0, v1 = v[keys[index[c]]], v[keys[index[c + 1]]]
        v2, v3 = v[keys[index[c + 2]]], v[keys[index[c + 3]]]
        for d in range(out.shape[0]):
            out[d] += w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]
    for c in range(whole, n):
        w0, v0 = weight[c], v[keys[index[c]]]
        for d in range(out.shape[0]):
            out[d] += w0 * v0[d]


@inline_kernel
def finish_row(scores, r, first_row, late, keys, v, alpha, step_floor, index, weight, out):  # type: ignore[no-untyped-def]
    """From the scores of one row to its output. Not finite scores (overflow) give NaN, never a silent wrong row."""
    infinity = scores.dtype.type(np.inf)
    if late:
        for c in range(scores.shape[0]):
            scores[c] = scores[c] if first_row[c] <= r else -infinity
    top = -infinity
    bad = 0
    for c in range(scores.shape[0]):
        top = max(top, scores[c])
        bad += scores[c] != scores[c]
    if bad > 0 or top == infinity:
        out[:] = np.nan
    elif top > -infinity:
        n = row_weights(scores, top, alpha, step_floor, index, weight)
        mix_values(v, keys, index[:n], weight[:n], out)


@parallel_kernel
def attend_tiles(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    out,
    scales,
    bias,
    batch,
    head,
    start,
    rows,
    offsets,
    keys,
    first_row,
    width,
    height,
    alpha,
    step_floor,
    parts,
):
    """All tiles; part `p` takes every `parts`-th one, so that long and short lists are shared evenly.

    bias: `[batch or 1, heads, queries, keys]`, or of one number where there is none.
    """
    biased = bias.shape[2] > 1 or bias.shape[3] > 1
    group = q.shape[1] // k.shape[1]
    dims = (q.shape[3] + 3) // 4 * 4
    for p in prange(parts):
        scaled = np.zeros((height + 1, dims), q.dtype)
        block = np.zeros((dims, BLOCK), q.dtype)
        scores = np.empty((height + 1, width), q.dtype)
        index = np.empty(width + 1, np.int32)
        weight = np.empty(width + 1, q.dtype)
        for t in range(p, batch.shape[0], parts):
            b, h, s, n = batch[t], head[t], start[t], rows[t]
            mine, first = keys[offsets[t] : offsets[t + 1]], first_row[offsets[t] : offsets[t + 1]]
            k_head, v_head = k[b, h // group], v[b, h // group]
            load_queries(q[b, h, s : s + n], scales[h], scaled)
            for low in range(0, mine.shape[0], BLOCK):
                high = min(low + BLOCK, mine.shape[0])
                load_keys(k_head, mine[low:high], block)
                for r in range(0, n, 2):
                    score_pair(scaled[r], scaled[r + 1], block, scores[r, low:high], scores[r + 1, low:high])
            if biased:
                add_bias(bias[b if bias.shape[0] > 1 else 0, h, s : s + n], mine, scores)
            late = first.shape[0] > 0 and first.max() > 0
            for r in range(n):
                line = scores[r, : mine.shape[0]]
                finish_row(line, r, first, late, mine, v_head, alpha, step_floor, index, weight, out[b, h, s + r])
