"""Proof and repair on the CPU: bounds of four rows and a block of keys at a time, true scores only where they survive.

A tile first computes its list as `attention/cpu.py` does, which gives every row its threshold. What a dropped key must
exceed to be in the support of the row over all its keys is known then, because thresholds only rise when keys come in.
"""

import numpy as np
from numba import prange

from sparsefinder.attention.cpu import BLOCK, add_bias, load_keys, load_queries, mix_values, row_weights, score_pair
from sparsefinder.numba_kernels import inline_kernel, parallel_kernel

WIDTH = 256  # keys whose bounds are computed at once: with rank 24 they take 26 KB, in and out
ROWS = 4  # rows that are bounded together
LISTED_ALWAYS = 1  # a mark: 0 = dropped by every row, otherwise 1 + the first row of the tile that reads the key


@inline_kernel
def bound_rows(query, rest, above, key, out):  # type: ignore[no-untyped-def]
    """`out [4, n]`: how far the bounds of four rows lie above their limits, where `above` is start − limit."""
    o0, o1, o2, o3 = out[0], out[1], out[2], out[3]
    rank, n = key.shape[0] - 2, key.shape[1]
    t0, t1, t2, t3 = rest[0], rest[1], rest[2], rest[3]
    b0, b1, b2, b3 = above[0], above[1], above[2], above[3]
    key_rest, shift = key[rank], key[rank + 1]
    for c in range(n):
        x, y = key_rest[c], shift[c]
        o0[c] = t0 * x + y + b0
        o1[c] = t1 * x + y + b1
        o2[c] = t2 * x + y + b2
        o3[c] = t3 * x + y + b3
    q0, q1, q2, q3 = query[0], query[1], query[2], query[3]
    for d in range(0, rank, 4):
        k0, k1, k2, k3 = key[d], key[d + 1], key[d + 2], key[d + 3]
        e0, e1, e2, e3 = q0[d], q0[d + 1], q0[d + 2], q0[d + 3]
        f0, f1, f2, f3 = q1[d], q1[d + 1], q1[d + 2], q1[d + 3]
        g0, g1, g2, g3 = q2[d], q2[d + 1], q2[d + 2], q2[d + 3]
        h0, h1, h2, h3 = q3[d], q3[d + 1], q3[d + 2], q3[d + 3]
        for c in range(n):
            x0, x1, x2, x3 = k0[c], k1[c], k2[c], k3[c]
            o0[c] += e0 * x0 + e1 * x1 + e2 * x2 + e3 * x3
            o1[c] += f0 * x0 + f1 * x1 + f2 * x2 + f3 * x3
            o2[c] += g0 * x0 + g1 * x1 + g2 * x2 + g3 * x3
            o3[c] += h0 * x0 + h1 * x1 + h2 * x2 + h3 * x3


@inline_kernel
def surviving(bounds, hits, index):  # type: ignore[no-untyped-def]
    """Places whose bound is not at most zero in some of the four rows (NaN survives); how many."""
    o0, o1, o2, o3 = bounds[0], bounds[1], bounds[2], bounds[3]
    zero = bounds.dtype.type(0)
    for c in range(hits.shape[0]):
        hits[c] = not (o0[c] <= zero and o1[c] <= zero and o2[c] <= zero and o3[c] <= zero)
    n = 0
    for c in range(hits.shape[0]):
        index[n] = c
        n += hits[c]
    return n


@inline_kernel
def score_four(query, key, out):  # type: ignore[no-untyped-def]
    """Scores of four rows and one key."""
    zero = query.dtype.type(0)
    z0, z1, z2, z3 = zero, zero, zero, zero
    q0, q1, q2, q3 = query[0], query[1], query[2], query[3]
    for d in range(key.shape[0]):
        x = key[d]
        z0 += q0[d] * x
        z1 += q1[d] * x
        z2 += q2[d] * x
        z3 += q3[d] * x
    out[0], out[1], out[2], out[3] = z0, z1, z2, z3


@inline_kernel
def list_limit(line, alpha, step_floor, index, weight):  # type: ignore[no-untyped-def]
    """(limit, weights): what a dropped key's score must exceed to matter, given the listed scores of a row.

    The limit is `τ / (α − 1)`, read off the greatest weight, less some rounding. Scores that are not finite give +inf.
    """
    infinity = line.dtype.type(np.inf)
    top = -infinity
    bad = 0
    for c in range(line.shape[0]):
        top = max(top, line[c])
        bad += line[c] != line[c]
    if bad > 0 or top == infinity:
        return infinity, -1
    if top == -infinity:
        return -infinity, 0
    n = row_weights(line, top, alpha, step_floor, index, weight)
    best = line.dtype.type(0)
    for c in range(n):
        best = max(best, weight[c])
    return line.dtype.type(top - best ** (alpha - 1) / (alpha - 1) - 8 * step_floor * (abs(top) + 1)), n


@inline_kernel
def write_row(line, names, v, alpha, step_floor, index, weight, out):  # type: ignore[no-untyped-def]
    """Output of a row over these scores and keys; NaN where they are not finite. The limit as in `list_limit`."""
    limit, n = list_limit(line, alpha, step_floor, index, weight)
    out[:] = np.nan if n < 0 else 0
    if n > 0:
        mix_values(v, names, index[:n], weight[:n], out)
    return limit


@parallel_kernel
def prove_tiles(  # type: ignore[no-untyped-def]
    qkv, bias, out, bound, seen, tiles, lists, sizes, alpha, step_floor, repairs, found
):
    """All tiles: the rows' survivors, and where `repairs` the output over listed keys and survivors that matter.

    qkv: q (scaled), k, v. bias: `[batch or 1, heads, queries, keys]`, or of one number where there is none.
    bound: `query`, `rest`, `start`, `key` of `ScoreBound`. seen: real keys of every item before each key `[B, M + 1]`.
    tiles, lists: of the plan. sizes: longest list, highest tile, parts, query offset, and 1 where causal.
    found: survivors and added keys per row `[B, H, N]`.
    """
    (q, k, v), (low_q, rest, start, low_k), (batch, head, begin, rows) = qkv, bound, tiles
    (offsets, keys, first_row), (width, height, parts, query_offset, causal), (survivors, added) = lists, sizes, found
    biased = bias.shape[2] > 1 or bias.shape[3] > 1
    group, count = q.shape[1] // k.shape[1], k.shape[2]
    dims = (q.shape[3] + 3) // 4 * 4
    infinity = q.dtype.type(np.inf)
    reach = q.dtype.type(1 / (alpha - 1))
    for p in prange(parts):
        scaled = np.zeros((height + ROWS, dims), q.dtype)
        block, scores = np.zeros((dims, BLOCK), q.dtype), np.empty((height + 1, width), q.dtype)
        index, weight = np.empty(width + count + 1, np.int32), np.empty(width + count + 1, q.dtype)
        line, names = np.empty(width + count, q.dtype), np.empty(width + count, np.int32)
        more_scores, more_keys = np.empty((ROWS, count), q.dtype), np.empty((ROWS, count), np.int32)
        low_rows, rests = np.zeros((ROWS, low_q.shape[3]), q.dtype), np.zeros(ROWS, q.dtype)
        above, limit, z = np.empty(ROWS, q.dtype), np.empty(ROWS, q.dtype), np.empty(ROWS, q.dtype)
        bounds, hits, places = np.empty((ROWS, WIDTH), q.dtype), np.empty(WIDTH, np.int32), np.empty(WIDTH + 1, np.int32)
        ends, more, alive = np.empty(ROWS, np.int64), np.empty(ROWS, np.int64), np.empty(ROWS, np.int64)
        marks = np.empty(count, np.uint8)
        for t in range(p, batch.shape[0], parts):
            b, h, s, n = batch[t], head[t], begin[t], rows[t]
            mine, first = keys[offsets[t] : offsets[t + 1]], first_row[offsets[t] : offsets[t + 1]]
            k_head, v_head, shift = k[b, h // group], v[b, h // group], low_k[b, h]
            item_bias = bias[b if bias.shape[0] > 1 else 0, h]
            load_queries(q[b, h, s : s + n], q.dtype.type(1), scaled)
            for low in range(0, mine.shape[0], BLOCK):
                high = min(low + BLOCK, mine.shape[0])
                load_keys(k_head, mine[low:high], block)
                for r in range(0, n, 2):
                    score_pair(scaled[r], scaled[r + 1], block, scores[r, low:high], scores[r + 1, low:high])
            if biased:
                add_bias(item_bias[s : s + n], mine, scores)
            for j in range(count):
                marks[j] = 0 if seen[b, j + 1] > seen[b, j] else LISTED_ALWAYS
            for c in range(mine.shape[0]):
                marks[mine[c]] = first[c] + 1
            for r in range(0, n, ROWS):
                taken = min(ROWS, n - r)
                waiting = 0
                for e in range(ROWS):
                    above[e], limit[e], ends[e], more[e], alive[e] = -infinity, infinity, 0, 0, 0
                for e in range(taken):
                    i = s + r + e
                    ends[e] = max(0, min(count, i + query_offset + 1)) if causal else count
                    kept = 0
                    for c in range(mine.shape[0]):
                        reads = first[c] <= r + e
                        kept += reads
                        scores[r + e, c] = scores[r + e, c] if reads else -infinity
                    row = scores[r + e, : mine.shape[0]]
                    if repairs:
                        limit[e] = write_row(row, mine, v_head, alpha, step_floor, index, weight, out[b, h, i])
                    else:
                        limit[e], _ = list_limit(row, alpha, step_floor, index, weight)
                    waiting = max(waiting, seen[b, ends[e]] - kept if limit[e] < infinity else 0)
                    low_rows[e], rests[e] = low_q[b, h, i], rest[b, h, i]
                for low in range(0, ends[taken - 1] if waiting > 0 else 0, WIDTH):
                    high = min(low + WIDTH, ends[taken - 1])
                    for e in range(taken):  # the sum's own rounding where the limit is large
                        above[e] = start[b, h, s + r + e] - limit[e] + 8 * step_floor * abs(limit[e])
                        above[e] = -infinity if limit[e] == infinity else above[e]
                    bound_rows(low_rows, rests, above, shift[:, low:high], bounds)
                    if biased:
                        for e in range(taken):
                            for c in range(high - low):
                                bounds[e, c] += item_bias[s + r + e, low + c]
                    for m in range(surviving(bounds, hits[: high - low], places)):
                        c = places[m]
                        j = low + c
                        open_rows = 0
                        for e in range(taken):
                            listed = marks[j] > 0 and marks[j] <= r + e + 1
                            hits[e] = j < ends[e] and not listed and not bounds[e, c] <= 0
                            open_rows += hits[e]
                            alive[e] += hits[e]
                        if repairs and open_rows > 0:
                            score_four(scaled[r : r + ROWS], k_head[j], z)
                            for e in range(taken):
                                if hits[e]:
                                    if biased:
                                        z[e] += item_bias[s + r + e, j]
                                    if not z[e] <= limit[e]:
                                        more_scores[e, more[e]] = z[e]
                                        more_keys[e, more[e]] = j
                                        more[e] += 1
                                        limit[e] = max(limit[e], z[e] - reach - 8 * step_floor * (abs(z[e]) + 1))
                for e in range(taken):
                    survivors[b, h, s + r + e], added[b, h, s + r + e] = alive[e], more[e]
                    if more[e] > 0:
                        total = mine.shape[0] + more[e]
                        line[: mine.shape[0]], names[: mine.shape[0]] = scores[r + e, : mine.shape[0]], mine
                        line[mine.shape[0] : total] = more_scores[e, : more[e]]
                        names[mine.shape[0] : total] = more_keys[e, : more[e]]
                        write_row(
                            line[:total], names[:total], v_head, alpha, step_floor, index, weight, out[b, h, s + r + e]
                        )
