"""Proof and repair on the CPU: bounds of four rows and a block of keys at a time, true scores only where they survive.

A tile first computes its list as `attention/cpu.py` does, which gives every row its threshold. What a dropped key must
exceed to be in the support of the row over all its keys is known then, because thresholds only rise when keys come in.
"""

import numpy as np
from numba import prange

from sparsefinder.attention.cpu import add_bias, order_keys, score_tile
from sparsefinder.attention.cpu_rows import entmax_weights, mix_values
from sparsefinder.numba_kernels import inline_kernel, parallel_kernel
from sparsefinder.rows import highest
from sparsefinder.vector_code import LANES

WIDTH = 256  # keys whose bounds are computed at once: with rank 24 they take 26 KB, in and out
ROWS = 4  # rows that are bounded together
READ_BY_ALL = 1  # a mark: 0 = dropped by every row, otherwise 1 + the first row of the tile that reads the key
MARGIN = 8  # rounding units by which a limit is lowered, so that keys on the edge are added rather than missed


@inline_kernel
def bound_rows(query, rest, above, key, low, high, out):  # type: ignore[no-untyped-def]
    """`out [4, high − low]`: how far bounds of four rows lie above their limits, where `above` is start − limit."""
    rank, n = key.shape[0] - 2, high - low
    o0, o1, o2, o3 = out[0, :n], out[1, :n], out[2, :n], out[3, :n]
    t0, t1, t2, t3 = rest[0], rest[1], rest[2], rest[3]
    b0, b1, b2, b3 = above[0], above[1], above[2], above[3]
    key_rest, shift = key[rank, low:high], key[rank + 1, low:high]
    for c in range(n):
        x, y = key_rest[c], shift[c]
        o0[c] = t0 * x + y + b0
        o1[c] = t1 * x + y + b1
        o2[c] = t2 * x + y + b2
        o3[c] = t3 * x + y + b3
    q0, q1, q2, q3 = query[0], query[1], query[2], query[3]
    for d in range(0, rank, 4):
        k0, k1 = key[d, low:high], key[d + 1, low:high]  # sliced one by one: a slice of all would not be contiguous
        k2, k3 = key[d + 2, low:high], key[d + 3, low:high]
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
def surviving(bounds, marks, low, n, hits, index):  # type: ignore[no-untyped-def]
    """Places among `n` keys from `low` on whose bound is not at most zero in some row (NaN survives); how many.

    Keys that every row of the tile reads anyway are left out. No branches: which keys survive cannot be foreseen.
    """
    o0, o1, o2, o3, mark = bounds[0, :n], bounds[1, :n], bounds[2, :n], bounds[3, :n], marks[low : low + n]
    zero = bounds.dtype.type(0)
    for c in range(n):
        above = (not o0[c] <= zero) | (not o1[c] <= zero) | (not o2[c] <= zero) | (not o3[c] <= zero)
        hits[c] = above & (mark[c] != READ_BY_ALL)
    found = 0
    for c in range(n):
        index[found] = c
        found += hits[c]
    return found


@inline_kernel
def score_rows(query, key, out):  # type: ignore[no-untyped-def]
    """Scores of four rows and one key; two rows at a time, which the compiler keeps in registers."""
    zero = query.dtype.type(0)
    z0, z1, z2, z3 = zero, zero, zero, zero
    q0, q1, q2, q3 = query[0], query[1], query[2], query[3]
    for d in range(key.shape[0]):
        z0 += q0[d] * key[d]
        z1 += q1[d] * key[d]
    for d in range(key.shape[0]):
        z2 += q2[d] * key[d]
        z3 += q3[d] * key[d]
    out[0], out[1], out[2], out[3] = z0, z1, z2, z3


@inline_kernel
def weigh_row(line, keys, v, alpha, step_floor, work, out):  # type: ignore[no-untyped-def]
    """From the scores of a row to its output, and what the score of another key must exceed to matter.

    That limit is `τ / (α − 1)`, read off the greatest weight, less some rounding. Scores that are not finite give NaN
    and +inf, none at all zeros and −inf. Nothing is written where `out` has no columns.
    """
    index, weight, _, _ = work
    out[:] = 0
    if not line.shape[0]:
        return -line.dtype.type(np.inf)
    top, bad = highest(line)
    if bad:
        out[:] = np.nan
        return line.dtype.type(np.inf)
    n = entmax_weights(line, top, alpha, step_floor, index, weight)
    if out.shape[0] > 0:
        mix_values(v, keys, index[:n], weight[:n], out)
    best = weight[0]
    for c in range(1, n):
        best = max(best, weight[c])
    return line.dtype.type(top - best ** (alpha - 1) / (alpha - 1) - MARGIN * step_floor * (abs(top) + 1))


@inline_kernel
def list_scores(q, k, keys, first_row, bias, biased, scaled, listed, reads, scores):  # type: ignore[no-untyped-def]
    """Scores of a tile's rows as in `attention/cpu.py`, `[rows / 8, keys, 8]`: row `r` reads the first `reads[r]` of
    the `listed` keys."""
    order_keys(keys, first_row, q.shape[0], listed, reads)
    scaled[:] = 0
    scaled[:, : q.shape[0]] = q.T
    score_tile(scaled, k, listed, reads, q.shape[0], scores)
    if biased:
        add_bias(bias, listed[: keys.shape[0]], scores)


@inline_kernel
def line_of(scores, r, n, work):  # type: ignore[no-untyped-def]
    """The first scores of a row, as neighbours at the beginning of the line of `work`."""
    line = work[2]
    for c in range(n):
        line[c] = scores[r // LANES, c, r % LANES]
    return line[:n]


@inline_kernel
def join(keys, more_scores, more_keys, work):  # type: ignore[no-untyped-def]
    """Listed and added keys of a row in one line of `work`, where the scores of the listed ones are; how many."""
    _, _, line, names = work
    n = keys.shape[0]
    total = n + more_keys.shape[0]
    line[n:total] = more_scores
    names[:n], names[n:total] = keys, more_keys
    return total


@inline_kernel
def prove_rows(four, k, bound, marks, r, ends, limit, alpha, margin, bias, biased, repairs, group):  # type: ignore[no-untyped-def]
    """Four rows from `r` of the tile on, all keys: counts survivors in `alive`, puts keys to add into `more_*`.

    The limit of a row rises with what is added: no weight exceeds one, so τ is at least `(α − 1) z − 1` for every z.
    """
    (query, rest, start, key), (above, bounds, hits, places, z, alive, more, more_scores, more_keys) = bound, group
    infinity, reach = bounds.dtype.type(np.inf), bounds.dtype.type(1 / (alpha - 1))
    for low in range(0, ends.max(), WIDTH):
        n = min(WIDTH, ends.max() - low)
        for e in range(ROWS):
            above[e] = start[e] - limit[e] + margin * abs(limit[e]) if limit[e] < infinity else -infinity
        bound_rows(query, rest, above, key, low, low + n, bounds)
        if biased:
            for e in range(bias.shape[0]):
                for c in range(n):
                    bounds[e, c] += bias[e, low + c]
        for m in range(surviving(bounds, marks, low, n, hits, places)):
            c = places[m]
            j = low + c
            if repairs:
                score_rows(four, k[j], z)
            for e in range(ROWS):
                if j < ends[e] and not (bounds[e, c] <= 0 or 0 < marks[j] <= r + e + 1):
                    alive[e] += 1
                    score = z[e] + bias[e, j] if biased else z[e]
                    if repairs and not score <= limit[e]:
                        more_scores[e, more[e]], more_keys[e, more[e]] = score, j
                        more[e] += 1
                        limit[e] = max(limit[e], score - reach - margin * (abs(score) + 1))


@inline_kernel
def prove_tile(  # type: ignore[no-untyped-def]
    q, kv, bias, biased, out, bound, seen, keys, first_row, place, alpha, step_floor, found, work, group, tile
):
    """One tile: `q [rows, D]`, `kv` of its head, `bound` of its rows and head, `found` and `out` of its rows.

    place: the key of the first row where causal, else −1. seen: real keys before each key.
    """
    (k, v), (low_q, rest, start, low_k), (survivors, added) = kv, bound, found
    (scaled, listed, reads, scores, marks, ends, limit, four, low_rows, rests, starts), count = tile, k.shape[0]
    _, _, _, _, _, alive, more, more_scores, more_keys = group
    infinity, margin = q.dtype.type(np.inf), MARGIN * step_floor
    list_scores(q, k, keys, first_row, bias, biased, scaled, listed, reads, scores)
    for j in range(count):
        marks[j] = 0 if seen[j + 1] > seen[j] else READ_BY_ALL
    for c in range(keys.shape[0]):
        marks[keys[c]] = first_row[c] + 1
    for r in range(0, q.shape[0], ROWS):
        taken = min(ROWS, q.shape[0] - r)
        waiting = 0
        for e in range(ROWS):
            limit[e], ends[e], alive[e], more[e] = infinity, 0, 0, 0
        for e in range(taken):
            kept = reads[r + e]
            line = line_of(scores, r + e, kept, work)
            limit[e] = weigh_row(line, listed, v, alpha, step_floor, work, out[r + e, :0])
            ends[e] = max(0, min(count, place + r + e + 1)) if place >= 0 else count
            waiting = max(waiting, seen[ends[e]] - kept)
            four[e], low_rows[e], rests[e], starts[e] = q[r + e], low_q[r + e], rest[r + e], start[r + e]
        if waiting > 0:
            rows = (low_rows, rests, starts, low_k)
            more_bias = bias[r : r + taken] if biased else bias
            repairs = out.shape[1] > 0
            prove_rows(four, k, rows, marks, r, ends, limit, alpha, margin, more_bias, biased, repairs, group)
        for e in range(taken):
            survivors[r + e], added[r + e] = alive[e], more[e]
            if more[e] > 0:
                kept = reads[r + e]
                line_of(scores, r + e, kept, work)
                n = join(listed[:kept], more_scores[e, : more[e]], more_keys[e, : more[e]], work)
                weigh_row(work[2][:n], work[3][:n], v, alpha, step_floor, work, out[r + e])


@parallel_kernel
def prove_tiles(  # type: ignore[no-untyped-def]
    qkv, bias, out, bound, seen, tiles, lists, sizes, alpha, step_floor, found
):
    """All tiles: the rows' survivors; rows in which some of them matter are written anew, over listed keys and those.

    qkv: q (scaled), k, v. bias: `[batch or 1, heads, queries, keys]`, or of one number where there is none.
    out: what the listed keys give `[B, H, N, Dv]`, or `[B, H, N, 0]` where only survivors are asked for.
    bound: `query`, `rest`, `start`, `key` of `ScoreBound`. seen: real keys of every item before each key `[B, M + 1]`.
    tiles, lists: of the plan. sizes: longest list, highest tile, parts, query offset (−1 where not causal).
    found: survivors and added keys per row `[B, H, N]`.
    """
    (q, k, v), (low_q, rest, start, low_k), (batch, head, begin, rows) = qkv, bound, tiles
    (offsets, keys, first_row), (width, height, parts, offset), (survivors, added) = lists, sizes, found
    biased = bias.shape[2] > 1 or bias.shape[3] > 1
    heads, count, kind = q.shape[1] // k.shape[1], k.shape[2], q.dtype
    rank, high, wide = low_q.shape[3], (height + LANES - 1) // LANES * LANES, (width + LANES - 1) // LANES * LANES
    for p in prange(parts):
        work = (
            np.empty(width + count + 1, np.int32),
            np.empty(width + count + 1, kind),
            np.empty(width + count + LANES, kind),
            np.empty(width + count, np.int32),
        )
        group = (
            np.empty(ROWS, kind),
            np.empty((ROWS, WIDTH), kind),
            np.empty(WIDTH, np.int32),
            np.empty(WIDTH + 1, np.int32),
            np.empty(ROWS, kind),
            np.empty(ROWS, np.int64),
            np.empty(ROWS, np.int64),
            np.empty((ROWS, count), kind),
            np.empty((ROWS, count), np.int32),
        )
        tile = (
            np.zeros((q.shape[3], high), kind),
            np.empty(width + LANES, np.int32),
            np.empty(height, np.int64),
            np.empty((high // LANES, wide, LANES), kind),
            np.empty(count, np.uint8),
            np.empty(ROWS, np.int64),
            np.empty(ROWS, kind),
            np.zeros((ROWS, q.shape[3]), kind),
            np.zeros((ROWS, rank), kind),
            np.zeros(ROWS, kind),
            np.zeros(ROWS, kind),
        )
        for t in range(p, batch.shape[0], parts):
            b, h, s = batch[t], head[t], begin[t]
            e = s + rows[t]
            mine, first = keys[offsets[t] : offsets[t + 1]], first_row[offsets[t] : offsets[t + 1]]
            kv = (k[b, h // heads], v[b, h // heads])
            own = (low_q[b, h, s:e], rest[b, h, s:e], start[b, h, s:e], low_k[b, h])
            own_bias = bias[b if bias.shape[0] > 1 else 0, h, s:e] if biased else bias[0, 0]
            place = s + offset if offset >= 0 else -1
            counts = (survivors[b, h, s:e], added[b, h, s:e])
            lines = out[b, h, s:e]
            queries = q[b, h, s:e]
            prove_tile(
                queries, kv, own_bias, biased, lines, own, seen[b], mine, first, place, alpha, step_floor, counts,
                work, group, tile,
            )  # fmt: skip
