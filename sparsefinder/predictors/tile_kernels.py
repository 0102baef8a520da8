"""Tile scores on the CPU: project, score and normalise one item and head at a time, in cache.

Every loop runs over one item's real span, in the same order and with the same trip counts whatever the item is batched
with, so a batch and an item alone give equal bits. A matrix product does not promise that: BLAS picks another kernel
for another shape. In a causal layer no loop of a tile reaches past its first row.
"""

import numpy as np
from numba import prange

from sparsefinder.numba_kernels import inline_kernel, parallel_kernel

LOWEST = np.float32(-80.0)  # exp of less is nothing in float32, and 2**-126 is the least normal number
LOG2_E = np.float32(1.4426950408889634)
LN_2_HIGH = np.float32(0.693359375)
LN_2_LOW = np.float32(-2.1219444e-4)
TAYLOR = tuple(np.float32(1 / f) for f in (5040, 720, 120, 24, 6, 2, 1, 1))


@inline_kernel
def log_sum_exp(row, bits, powers):  # type: ignore[no-untyped-def]
    """Of one row of float32; `bits` and `powers` are one buffer seen as int32 and as float32.

    The exponential is spelled out because a call to the C library keeps the loop from being vectorised.
    """
    top = np.float32(-np.inf)
    for j in range(row.shape[0]):
        top = max(top, row[j])
    if top == np.float32(-np.inf):
        return top
    for j in range(row.shape[0]):
        n = np.floor(max(row[j] - top, LOWEST) * LOG2_E + np.float32(0.5))
        bits[j] = (np.int32(n) + np.int32(127)) << np.int32(23)  # 2**n, written as the bits of a float32
    total = np.float32(0)
    for j in range(row.shape[0]):
        x = max(row[j] - top, LOWEST)
        n = np.floor(x * LOG2_E + np.float32(0.5))
        f = (x - n * LN_2_HIGH) - n * LN_2_LOW
        p = TAYLOR[0]
        p = p * f + TAYLOR[1]
        p = p * f + TAYLOR[2]
        p = p * f + TAYLOR[3]
        p = p * f + TAYLOR[4]
        p = p * f + TAYLOR[5]
        p = p * f + TAYLOR[6]
        p = p * f + TAYLOR[7]
        total += p * powers[j]
    return top + np.log(total)


@inline_kernel
def project_vector(x, weight, bias, unit, out):  # type: ignore[no-untyped-def]
    """`out = weight x + bias` with `weight [r, D]`, of length one where `unit`."""
    for c in range(out.shape[0]):
        total = np.float32(0)
        for d in range(x.shape[0]):
            total += x[d] * weight[c, d]
        out[c] = total + bias[c]
    if unit:
        square = np.float32(0)
        for c in range(out.shape[0]):
            square += out[c] * out[c]
        length = max(np.sqrt(square), np.float32(1e-12))
        for c in range(out.shape[0]):
            out[c] /= length


@inline_kernel
def project_keys(k, real, weight, bias, linear, metric, unit, low, column):  # type: ignore[no-untyped-def]
    """k' of every real key into `low [r, m]`, and what the score adds to every key into `column`."""
    rank = low.shape[0]
    point = np.empty(rank, np.float32)
    for j in range(k.shape[0]):
        column[j] = np.float32(-np.inf)
        for c in range(rank):
            low[c, j] = np.float32(0)
        if real[j]:
            project_vector(k[j], weight, bias, unit, point)
            extra = np.float32(0)
            for c in range(rank):
                low[c, j] = point[c]
                extra -= point[c] * point[c] if metric else np.float32(0)
            for d in range(linear.shape[0]):
                extra += linear[d] * k[j, d]
            column[j] = extra


@inline_kernel
def summarize_tile(q, real, low, high, mean):  # type: ignore[no-untyped-def]
    """Mean of the real queries among rows `low … high − 1`; False where there is none."""
    count = 0
    mean[:] = np.float32(0)
    for i in range(low, high):
        if real[i]:
            count += 1
            for d in range(mean.shape[0]):
                mean[d] += q[i, d]
    if count > 0:
        for d in range(mean.shape[0]):
            mean[d] /= np.float32(count)
    return count > 0


@inline_kernel
def score_row(summary, low, column, t, size, weight, logs, bits, powers, row):  # type: ignore[no-untyped-def]
    """`row[j] = summary · low[:, j] + column[j] + weight * log(1 + distance)`, minus the logsumexp of the row."""
    seen = row.shape[0]
    for j in range(seen):
        row[j] = column[j]
    whole = summary.shape[0] - summary.shape[0] % 4
    for c in range(0, whole, 4):  # four at a time: the row is loaded and stored less often
        s0, s1, s2, s3 = summary[c], summary[c + 1], summary[c + 2], summary[c + 3]
        k0, k1, k2, k3 = low[c], low[c + 1], low[c + 2], low[c + 3]
        for j in range(seen):
            row[j] += (s0 * k0[j] + s1 * k1[j]) + (s2 * k2[j] + s3 * k3[j])
    for c in range(whole, summary.shape[0]):
        for j in range(seen):
            row[j] += summary[c] * low[c, j]
    if weight != np.float32(0):
        for j in range(min(seen, t * size)):
            row[j] += weight * logs[t * size - j]
        for j in range(t * size + size, seen):
            row[j] += weight * logs[j - t * size - size + 1]
    shift = log_sum_exp(row, bits[:seen], powers[:seen])
    if shift > np.float32(-np.inf):
        for j in range(seen):
            row[j] -= shift


@parallel_kernel
def score_tiles(  # type: ignore[no-untyped-def]
    sequences, real, span, sizes, maps, linear, weight, logs, before, place, causal, metric, unit, out
):
    """`out [B, H, T, M]`, −inf everywhere before: normalised scores of every tile and visible key.

    sequences: q and k. real: which tokens are, of both. span: first and last real key of each item. maps: `q_map`,
    `k_map`, `q_bias`, `k_bias`. linear: `[H, D]` or `[H, 0]`. logs: `log(1 + distance)`. before: queries
    before a causal tile's first one that its summary includes. place: at which key the first query sits, and the tile
    of each item and head that `out` begins with; none is scored where that is negative.
    """
    offset, first_tile = place
    (q, k), (q_real, k_real), (first, last), (q_map, k_map, q_bias, k_bias) = sequences, real, span, maps
    heads, tokens, dim, rank = q.shape[1], q.shape[2], q.shape[3], q_map.shape[1]
    group = heads // k.shape[1]
    for task in prange(q.shape[0] * heads):
        b, h = task // heads, task % heads
        begin, size = first[b], sizes[h]
        m = max(last[b] + 1 - begin, 0)
        low, column = np.empty((rank, m), np.float32), np.empty(m, np.float32)
        keys, key_real = k[b, h // group, begin : begin + m], k_real[b, begin : begin + m]
        project_keys(keys, key_real, k_map[h], k_bias[h], linear[h], metric, unit, low, column)
        mean, summary = np.empty(dim, np.float32), np.empty(rank, np.float32)
        bits = np.empty(m, np.int32)
        powers = bits.view(np.float32)
        for at in range(out.shape[2] if first_tile[b, h] >= 0 else 0):
            t = first_tile[b, h] + at
            start = begin + t * size
            low_row = max(0, (max(begin, start - before) if causal else start) - offset)
            high_row = min(tokens, (start + 1 if causal else start + size) - offset)
            if summarize_tile(q[b, h], q_real[b], low_row, high_row, mean):
                project_vector(mean, q_map[h], q_bias[h], unit, summary)
                if metric:  # −‖s − k‖² = 2 s·k − ‖k‖² + what is the same for the whole row
                    summary += summary
                seen = min(m, t * size + 1) if causal else m
                row = out[b, h, at, begin : begin + seen]
                score_row(summary, low, column, t, size, weight[h], logs, bits, powers, row)
