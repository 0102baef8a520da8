"""Attention over a plan on the CPU: a tile's scores stay in cache, only pairs of the plan exist, nothing is gathered.

A tile's list is read in the order of the first row that may read a key, so that every row of a causal tile reads some
first part of it, and what later rows read moves no bit of an earlier one.
"""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from sparsefinder.attention.call import Call
from sparsefinder.attention.cpu_blocks import MIX_ROWS, MIX_VECTORS, mix_block, score_block
from sparsefinder.numba_kernels import inline_kernel, kernel_array, parallel_kernel
from sparsefinder.plan import Plan
from sparsefinder.rows import climb, highest
from sparsefinder.threads import threads_for
from sparsefinder.vector_code import LANES, exp_float32, reaching

COLUMNS = LANES * MIX_VECTORS
MIX_KEYS = 128  # so many keys' values are mixed into all rows of a tile while the first cache holds them
BRACKET_STEPS = 60


def attend_cpu(call: Call, plan: Plan) -> Tensor:
    """`[B, H, N, Dv]`; rows without keys are zeros."""
    q, k, v, out = laid_out(call)
    lengths = plan.offsets.diff()
    if not lengths.shape[0] or not int(lengths.max()):
        return out.transpose(1, 2)
    if call.alpha == 1 and v.shape[3] % COLUMNS:
        v = np.pad(v, [(0, 0)] * 3 + [(0, -v.shape[3] % COLUMNS)])
    tiles = [x.numpy() for x in (plan.tile_batch, plan.tile_head, plan.tile_start, plan.tile_rows)]
    lists = [x.numpy() for x in (plan.offsets, plan.keys, plan.first_row)]
    width, height = int(lengths.max()), int(plan.tile_rows.max())
    scales, (bias, floor) = kernel_array(call.scales), bias_and_floor(call)
    with threads_for(int(plan.keys.shape[0]) * height * call.dims.dim // 8) as parts:
        attend_tiles(q, k, v, out.numpy(), scales, bias, *tiles, *lists, width, height, float(call.alpha), floor, parts)
    return out.transpose(1, 2)


def laid_out(call: Call) -> tuple[np.ndarray, np.ndarray, np.ndarray, Tensor]:
    """q `[B, N, H, D]`, as the layers of transformers lay it out, so that mostly nothing is copied; k and v by heads
    `[B, Hkv, M, D]`, so that the keys of one are neighbours; and zeros for the output `[B, N, H, Dv]`."""
    q, k, v = (kernel_array(x) for x in (call.q.transpose(1, 2), call.k, call.v))
    return q, k, v, torch.zeros(*q.shape[:3], v.shape[-1], dtype=call.q.dtype)


def bias_and_floor(call: Call) -> tuple[np.ndarray, np.floating]:
    """The bias, of one number where there is none; and the least step that the climb to a threshold still takes."""
    bias = call.q.new_zeros(1, 1, 1, 1) if call.bias is None else call.bias
    array = kernel_array(bias)
    return array, array.dtype.type(torch.finfo(call.q.dtype).eps / 2)


@inline_kernel
def order_keys(keys, first_row, rows, listed, ends):  # type: ignore[no-untyped-def]
    """The keys by the first row that may read them: row `r` may read `listed[: ends[r]]`. Then some that fill up."""
    ends[:rows] = 0
    for c in range(keys.shape[0]):
        ends[first_row[c]] += 1
    total = 0
    for r in range(rows):
        count = ends[r]
        ends[r] = total
        total += count
    for c in range(keys.shape[0]):
        listed[ends[first_row[c]]] = keys[c]
        ends[first_row[c]] += 1
    listed[total : total + LANES] = listed[total - 1]


@inline_kernel
def load_queries(q, start, rows, h, scale, scaled):  # type: ignore[no-untyped-def]
    """Some rows of `q [N, H, D]` times the scale, transposed; lanes that only fill up are zero."""
    scaled[:] = 0
    for r in range(rows):
        for d in range(q.shape[2]):
            scaled[d, r] = q[start + r, h, d] * scale


@inline_kernel
def score_tile(scaled, k, listed, ends, rows, scores):  # type: ignore[no-untyped-def]
    """Scores of the tile's rows in blocks; a block that none of its rows may read is left out."""
    for at in range(0, ends[rows - 1], LANES):
        for r in range(0, rows, LANES):
            if at < ends[min(r + LANES, rows) - 1]:
                score_block(scaled, r, k, listed, at, scores)


@inline_kernel
def add_bias(bias, keys, scores):  # type: ignore[no-untyped-def]
    """The bias `[rows, all keys]` of the listed keys on top of their scores."""
    for r in range(bias.shape[0]):
        for c in range(keys.shape[0]):
            scores[r, c] += bias[r, keys[c]]


@inline_kernel
def entmax15_weights(scores, top, step_floor, index, weight):  # type: ignore[no-untyped-def]
    """Weights and their places; scores two or more below the best can have none, so the climb sees only the others.

    scores: the beginning of a row whose memory goes on to a multiple of eight.
    """
    half, reach = scores.dtype.type(0.5), scores.dtype.type(-2)
    n = 0
    for at in range(0, scores.shape[0], LANES):
        if reaching(scores, at, top, reach):  # in a long row hardly any eight neighbours hold one
            for c in range(at, min(at + LANES, scores.shape[0])):
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
def entmax_weights(row, top, alpha, step_floor, index, weight):  # type: ignore[no-untyped-def]
    """Weights of one row and the places they belong to, without the zeros; how many there are."""
    if alpha == 1.5:
        n = entmax15_weights(row, top, step_floor, index, weight)
    else:
        n = general_weights(row, top, alpha - 1, index, weight)
    kept = 0
    for c in range(n):
        index[kept] = index[c]
        weight[kept] = weight[c]
        kept += weight[c] > row.dtype.type(0)
    return kept


@inline_kernel
def entmax_tile(scores, ends, rows, v, keys, alpha, step_floor, index, weight, out, start, h):  # type: ignore[no-untyped-def]
    """From scores to outputs `[N, H, Dv]`, row by row: few weights are not zero, and only their values are read."""
    for r in range(rows):
        row = scores[r, : ends[r]]
        top, bad = highest(row)
        if bad:
            out[start + r, h, :] = np.nan
        elif ends[r]:
            kept = entmax_weights(row, top, alpha, step_floor, index, weight)
            mix_values(v, keys, index[:kept], weight[:kept], out[start + r, h])


@inline_kernel
def exponentials(row, top):  # type: ignore[no-untyped-def]
    """`exp(row − top)` in its place; the sum."""
    total = row.dtype.type(0)
    for c in range(row.shape[0]):
        row[c] = exp_float32(row[c] - top) if row.itemsize == 4 else np.exp(row[c] - top)
        total += row[c]
    return total


@inline_kernel
def softmax_tile(scores, ends, rows, v, keys, mixed, totals, out, start, h):  # type: ignore[no-untyped-def]
    """From scores to outputs `[N, H, Dv]`: no weight is zero, so all values are mixed, in blocks."""
    width = ends[rows - 1]
    for r in range((rows + MIX_ROWS - 1) // MIX_ROWS * MIX_ROWS):
        end = ends[r] if r < rows else 0
        if end:
            top, bad = highest(scores[r, :end])
            totals[r] = np.nan if bad else exponentials(scores[r, :end], top)
            end = 0 if bad else end
        scores[r, end:width] = 0
    mixed[:] = 0
    for low in range(0, width, MIX_KEYS):
        for column in range(0, v.shape[1], COLUMNS):
            for r in range(0, rows, MIX_ROWS):
                high = min(low + MIX_KEYS, ends[min(r + MIX_ROWS, rows) - 1])
                if low < high:
                    mix_block(scores, r, v, keys, low, high, mixed, column)
    for r in range(rows):
        if ends[r]:
            share = 1 / totals[r]
            place = out[start + r, h]
            for d in range(place.shape[0]):
                place[d] = mixed[r, d] * share


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
    group = q.shape[2] // k.shape[1]
    high, wide = (height + LANES - 1) // LANES * LANES, (width + LANES - 1) // LANES * LANES
    for p in prange(parts):
        scaled = np.zeros((q.shape[3], high), q.dtype)
        scores = np.empty((high, wide), q.dtype)
        mixed, totals = np.empty((high, v.shape[3]), q.dtype), np.empty(high, q.dtype)
        listed, ends = np.empty(width + LANES, np.int32), np.empty(height, np.int64)
        index, weight = np.empty(width + 1, np.int32), np.empty(width + 1, q.dtype)
        for t in range(p, batch.shape[0], parts):
            b, h, s, n = batch[t], head[t], start[t], rows[t]
            part = slice(offsets[t], offsets[t + 1])
            if part.start == part.stop:
                continue
            order_keys(keys[part], first_row[part], n, listed, ends)
            load_queries(q[b], s, n, h, scales[h], scaled)
            score_tile(scaled, k[b, h // group], listed, ends, n, scores)
            if biased:
                add_bias(bias[b if bias.shape[0] > 1 else 0, h, s : s + n], listed[: ends[n - 1]], scores)
            values = v[b, h // group]
            if alpha == 1.0:
                softmax_tile(scores, ends, n, values, listed, mixed, totals, out[b], s, h)
            else:
                entmax_tile(scores, ends, n, values, listed, alpha, step_floor, index, weight, out[b], s, h)
