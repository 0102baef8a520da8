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
from sparsefinder.attention.cpu_lanes import entmax15, exponentials, from_best, general_entmax
from sparsefinder.numba_kernels import inline_kernel, kernel_array, parallel_kernel
from sparsefinder.plan import Plan
from sparsefinder.threads import threads_for
from sparsefinder.vector_code import LANES

COLUMNS = LANES * MIX_VECTORS
MIX_KEYS = 128  # so many keys' values are mixed into all rows of a tile while the first cache holds them


def attend_cpu(call: Call, plan: Plan) -> Tensor:
    """`[B, H, N, Dv]`; rows without keys are zeros."""
    q, k, v, out = laid_out(call)
    lengths = plan.offsets.diff()
    if not lengths.shape[0] or not int(lengths.max()):
        return out.transpose(1, 2)
    tiles = [x.numpy() for x in (plan.tile_batch, plan.tile_head, plan.tile_start, plan.tile_rows)]
    lists = [x.numpy() for x in (plan.offsets, plan.keys, plan.first_row)]
    width, height = int(lengths.max()), int(plan.tile_rows.max())
    scales, (bias, floor) = kernel_array(call.scales), bias_and_floor(call)
    with threads_for(int(plan.keys.shape[0]) * height * call.dims.dim // 2) as parts:
        attend_tiles(q, k, v, out.numpy(), scales, bias, *tiles, *lists, width, height, float(call.alpha), floor, parts)
    return out.transpose(1, 2)


def laid_out(call: Call) -> tuple[np.ndarray, np.ndarray, np.ndarray, Tensor]:
    """q `[B, N, H, D]`, as the layers of transformers lay it out, so that mostly nothing is copied; k and v by heads
    `[B, Hkv, M, D]`, so that the keys of one are neighbours, v with zeros up to whole columns of blocks; and zeros for
    the output `[B, N, H, Dv]`."""
    q, k, v = (kernel_array(x) for x in (call.q.transpose(1, 2), call.k, call.v))
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=call.q.dtype)
    return q, k, np.pad(v, [(0, 0)] * 3 + [(0, -v.shape[3] % COLUMNS)]) if v.shape[3] % COLUMNS else v, out


def bias_and_floor(call: Call) -> tuple[np.ndarray, np.floating]:
    """The bias, of one number where there is none; and the least step that the climb to a threshold still takes."""
    bias = call.q.new_zeros(1, 1, 1, 1) if call.bias is None else call.bias
    array = kernel_array(bias)
    return array, array.dtype.type(torch.finfo(call.q.dtype).eps / 2)


@inline_kernel
def order_keys(keys, first_row, rows, listed, ends):  # type: ignore[no-untyped-def]
    """The keys by the first row that may read them: row `r` may read `listed[: ends[r]]`. Then some that fill up."""
    for_all = 0  # most lists begin with many keys that every row may read
    while for_all < keys.shape[0] and first_row[for_all] == 0:
        for_all += 1
    listed[:for_all] = keys[:for_all]
    ends[:rows] = 0
    for c in range(for_all, keys.shape[0]):
        ends[first_row[c]] += 1
    total = for_all
    for r in range(rows):
        count = ends[r]
        ends[r] = total
        total += count
    for c in range(for_all, keys.shape[0]):
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
    """Scores `[rows / 8, keys, 8]` in blocks; a block that none of its rows may read is left out."""
    for at in range(0, ends[rows - 1], LANES):
        for r in range(0, rows, LANES):
            if at < ends[min(r + LANES, rows) - 1]:
                score_block(scaled, r, k, listed, at, scores[r // LANES])


@inline_kernel
def add_bias(bias, keys, scores):  # type: ignore[no-untyped-def]
    """The bias `[rows, all keys]` of the listed keys on top of their scores."""
    for r in range(bias.shape[0]):
        for c in range(keys.shape[0]):
            scores[r // LANES, c, r % LANES] += bias[r, keys[c]]


@inline_kernel
def weigh_tile(scores, ends, rows, listed, alpha, step_floor, index, counts, sums, tau):  # type: ignore[no-untyped-def]
    """From scores to weights, eight rows at a time; those of group `g` are of the keys `index[g, : counts[g]]`, or of
    all listed keys where that is one list (softmax).

    sums: of each row of the tile the greatest score, NaN where one is not finite, and what its weights add up to.
    """
    top, total = sums
    order = scores.dtype.type(1.0 if alpha == 1.0 else alpha - 1)
    own = np.zeros(LANES, np.int64)
    for g in range((rows + LANES - 1) // LANES):
        low, high = g * LANES, min((g + 1) * LANES, rows)
        n, x = ends[high - 1], scores[g]
        counts[g] = n
        if n:
            own[: high - low], own[high - low :] = ends[low:high], 0
            from_best(x, n, own, order, top[low : low + LANES])
            if alpha == 1.0:
                exponentials(x, n, total[low : low + LANES])
                continue
            index[g, :n] = listed[:n]
            if alpha == 1.5:
                counts[g] = entmax15(x, n, step_floor, index[g], tau)
            else:
                counts[g] = general_entmax(x, n, order, index[g], tau)


@inline_kernel
def mix_tile(weights, v, index, counts, mixed):  # type: ignore[no-untyped-def]
    """`mixed [rows, Dv]`: values by their weights, a few keys at a time for all groups; lists as in `weigh_tile`."""
    mixed[:] = 0
    for low in range(0, counts.max(), MIX_KEYS):
        for column in range(0, v.shape[1], COLUMNS):
            for g in range(counts.shape[0]):
                keys, high = index[min(g, index.shape[0] - 1)], min(low + MIX_KEYS, counts[g])
                if low < high:
                    for lane in range(0, LANES, MIX_ROWS):
                        mix_block(weights[g], lane, v, keys, low, high, mixed, g * LANES + lane, column)


@inline_kernel
def write_rows(mixed, ends, rows, sums, alpha, out, start, h):  # type: ignore[no-untyped-def]
    """Rows that have keys to their places in `out [N, H, Dv]`."""
    top, total = sums
    for r in range(rows):
        if ends[r]:
            place, share = out[start + r, h], mixed.dtype.type(1)
            if alpha == 1.0:
                share = 1 / total[r]
            if np.isnan(top[r]):
                share = top[r]
            for d in range(place.shape[0]):
                place[d] = mixed[r, d] * share


@inline_kernel
def attend_tile(scores, ends, rows, v, listed, alpha, step_floor, work, out, start, h):  # type: ignore[no-untyped-def]
    """From the scores of a tile to its rows of `out [N, H, Dv]`."""
    index, counts, mixed, sums, tau = work
    groups = (rows + LANES - 1) // LANES
    weigh_tile(scores, ends, rows, listed, alpha, step_floor, index, counts, sums, tau)
    lists = listed.reshape(1, -1) if alpha == 1.0 else index[:groups]
    mix_tile(scores, v, lists, counts[:groups], mixed)
    write_rows(mixed, ends, rows, sums, alpha, out, start, h)


@inline_kernel
def working_arrays(height, width, columns, dtype_of):  # type: ignore[no-untyped-def]
    """What tiles of up to so many rows and keys need, of the type of an array's numbers: scores, and for
    `attend_tile` lists of the groups, their lengths, sums of values, sums of rows, and thresholds."""
    groups, wide, kind = (height + LANES - 1) // LANES, (width + LANES - 1) // LANES * LANES, dtype_of.dtype
    scores = np.empty((groups, wide, LANES), kind)
    sums = np.empty(groups * LANES, kind), np.empty(groups * LANES, kind)
    index, counts = np.empty((groups, wide + 1), np.int32), np.empty(groups, np.int64)
    return scores, (index, counts, np.empty((groups * LANES, columns), kind), sums, np.empty(LANES, kind))


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
    high = (height + LANES - 1) // LANES * LANES
    for p in prange(parts):
        scores, work = working_arrays(height, width, v.shape[3], q)
        scaled, ends = np.zeros((q.shape[3], high), q.dtype), np.empty(height, np.int64)
        listed = np.empty(width + LANES, np.int32)
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
            attend_tile(scores, ends, n, v[b, h // group], listed, alpha, step_floor, work, out[b], s, h)
