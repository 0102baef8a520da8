"""Tile scores on the CPU: project, score and normalise one item and head at a time, in cache.

Every loop runs over one item's real span, in the same order and with the same trip counts whatever the item is batched
with, so a batch and an item alone give equal bits. A matrix product does not promise that: BLAS picks another kernel
for another shape. In a causal layer no loop of a tile reaches past its first row.
"""

from typing import Any

import numpy as np
from numba import prange, types

from sparsefinder.attention.cpu_blocks import score_block
from sparsefinder.numba_kernels import inline_kernel, parallel_kernel
from sparsefinder.rows import greatest
from sparsefinder.vector_code import LANES, Block, exp_float32, ones, reaching, trailing_zeros, vector_code

WIDE = 4 * LANES  # keys that are scored at once, so that four sums run beside each other


@inline_kernel
def log_sum_exp(row):  # type: ignore[no-untyped-def]
    """Of one row of float32."""
    top = greatest(row)
    if top == np.float32(-np.inf):
        return top
    total = np.float32(0)
    for j in range(row.shape[0]):
        total += exp_float32(row[j] - top)
    return top + np.log(total)


@inline_kernel
def shorten(vector):  # type: ignore[no-untyped-def]
    """A vector as long as one, in its place (a very short one stays as it is)."""
    square = np.float32(0)
    for c in range(vector.shape[0]):
        square += vector[c] * vector[c]
    length = max(np.sqrt(square), np.float32(1e-12))
    for c in range(vector.shape[0]):
        vector[c] /= length


@inline_kernel
def project_vector(x, weight, bias, unit, out):  # type: ignore[no-untyped-def]
    """`out = weight x + bias` with `weight [r, D]`, of length one where `unit`."""
    for c in range(out.shape[0]):
        total = np.float32(0)
        for d in range(x.shape[0]):
            total += x[d] * weight[c, d]
        out[c] = total + bias[c]
    if unit:
        shorten(out)


@inline_kernel
def project_keys(k, real, weight, bias, linear, metric, unit, low, column):  # type: ignore[no-untyped-def]
    """k' of every real key into `low [r, m]`, and what the score adds to it into `column`; eight keys at once."""
    rank, last = weight.shape[0], k.shape[0] - 1
    groups = (rank + LANES - 1) // LANES
    turned, points = np.zeros((k.shape[1], groups * LANES), np.float32), np.empty((groups, LANES, LANES), np.float32)
    turned[:, :rank] = weight.T
    names, point = np.empty(LANES, np.int32), np.empty(rank, np.float32)
    for at in range(0, last + 1, LANES):
        for j in range(LANES):
            names[j] = min(at + j, last)
        for g in range(groups):
            score_block(turned, g * LANES, k, names, 0, points[g])
        for j in range(at, min(at + LANES, last + 1)):
            for c in range(rank):
                point[c] = points[c // LANES, j - at, c % LANES] + bias[c]
            if unit:
                shorten(point)
            extra = np.float32(0)
            for c in range(rank):
                low[c, j] = point[c] if real[j] else np.float32(0)
                extra -= point[c] * point[c] if metric else np.float32(0)
            for d in range(linear.shape[0]):
                extra += linear[d] * k[j, d]
            column[j] = extra if real[j] else np.float32(-np.inf)


@inline_kernel
def summarize_tile(q, h, real, low, high, mean):  # type: ignore[no-untyped-def]
    """Mean of the real queries of a head among rows `low … high − 1` of `q [N, H, D]`; False where there is none."""
    count = 0
    mean[:] = np.float32(0)
    for i in range(low, high):
        if real[i]:
            count += 1
            for d in range(mean.shape[0]):
                mean[d] += q[i, h, d]
    if count > 0:
        for d in range(mean.shape[0]):
            mean[d] /= np.float32(count)
    return count > 0


@vector_code
def score_keys(
    typing: Any, summary: Any, low: Any, column: Any, weight: Any, logs: Any, place: Any, at: Any, row: Any
) -> Any:
    """`row[j] = column[j] + weight · logs[place + j] + summary · low[:, j]` for the 32 keys j from `at` on.

    All arrays go on for as many numbers.
    """

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = Block(context, builder, row.dtype)
        starts = [
            builder.add(block.line(kind, args[i]), builder.mul(shift, block.size))
            for kind, i, shift in (
                (column, 2, args[6]), (logs, 4, builder.add(args[5], args[6])), (row, 7, args[6]),
            )
        ]  # fmt: skip
        own, distances, out = (
            [builder.add(start, builder.mul(block.word(LANES * i), block.size)) for i in range(WIDE // LANES)]
            for start in starts
        )
        by, shares = block.spread(args[3]), block.line(summary, args[0])
        l_start, l_step, _ = block.array(low, args[1])
        before = [
            block.plus_product(block.load(a, block.vector), block.load(b, block.vector), by)
            for a, b in zip(own, distances, strict=True)
        ]

        def add(c: Any, totals: list[Any]) -> list[Any]:
            share = block.spread(block.load(builder.add(shares, builder.mul(c, block.size)), block.item))
            columns = [builder.add(args[6], block.word(LANES * i)) for i in range(len(totals))]
            keys = [block.load(block.address(l_start, c, l_step, column), block.vector) for column in columns]
            return [block.plus_product(total, key, share) for total, key in zip(totals, keys, strict=True)]

        rank = block.length(summary, args[0])
        for value, to in zip(block.fold(block.word(0), rank, before, add), out, strict=True):
            block.store(value, to)
        return context.get_dummy_value()

    word = types.intp
    return types.void(summary, low, column, types.float32, logs, word, word, row), write


@inline_kernel
def tile_row(  # type: ignore[no-untyped-def]
    q,
    h,
    real,
    t,
    begin,
    size,
    offset,
    before,
    causal,
    metric,
    unit,
    q_map,
    q_bias,
    low,
    column,
    m,
    weight,
    logs,
    mean,
    row,
):
    """Scores of tile `t` of one item and head into `row`, some more behind them: how many keys it sees, and their
    logsumexp (or NaN).

    low, column: of `m` keys and what follows them, at least `WIDE` numbers. logs: see `kernel_inputs`.
    """
    start = begin + t * size
    low_row = max(0, (max(begin, start - before) if causal else start) - offset)
    high_row = min(q.shape[0], (start + 1 if causal else start + size) - offset)
    if not summarize_tile(q, h, real, low_row, high_row, mean):
        return 0, np.float32(np.nan)
    summary = np.empty(low.shape[0], np.float32)
    project_vector(mean, q_map, q_bias, unit, summary)
    if metric:  # −‖s − k‖² = 2 s·k − ‖k‖² + what is the same for the whole row
        summary += summary
    seen = min(m, t * size + 1) if causal else m
    for at in range(0, seen, WIDE):
        score_keys(summary, low, column, weight, logs, logs.shape[0] // 2 - t * size, at, row)
    shift = log_sum_exp(row[:seen])
    for c in range(summary.shape[0]):
        if not abs(summary[c]) < np.float32(np.inf):
            shift = np.float32(np.nan)
    return seen, shift


@parallel_kernel
def project_all(k, key_real, span, k_map, k_bias, linear, metric, unit, low, column):  # type: ignore[no-untyped-def]
    """`low [B, H, r, M]` and `column [B, H, M]` of every head, counted from the item's first real key.

    Returns the heads of items where some number is not finite.
    """
    heads, infinity, bad = k_map.shape[0], np.float32(np.inf), np.zeros(k.shape[0] * k_map.shape[0], np.uint8)
    group = heads // k.shape[1]
    first, last = span
    for task in prange(k.shape[0] * heads):
        b, h = task // heads, task % heads
        part = slice(first[b], last[b] + 1)
        keys, real, m = k[b, h // group, part], key_real[b, part], max(last[b] + 1 - first[b], 0)
        project_keys(keys, real, k_map[h], k_bias[h], linear[h], metric, unit, low[b, h], column[b, h])
        wrong = 0
        for j in range(m):
            wrong += not column[b, h, j] < infinity  # −inf is padding
        for c in range(low.shape[2]):
            for j in range(m):
                wrong += not abs(low[b, h, c, j]) < infinity
        bad[task] = wrong > 0
    return bad


@parallel_kernel
def score_tiles(  # type: ignore[no-untyped-def]
    q, q_real, span, sizes, maps, weight, logs, before, place, causal, metric, unit, low, column, out
):
    """`out [B, H, T, M]`, −inf everywhere before: normalised scores of every tile and visible key.

    q: `[B, N, H, D]`. span: first and last real key of each item. maps: `q_map`, `q_bias`. before: queries before a
    causal tile's first one that its summary includes. place: at which key the first query sits, and the tile of each
    item and head that `out` begins with; none is scored where that is negative. low, column: see `project_all`.
    """
    (offset, first_tile), (first, last), (q_map, q_bias) = place, span, maps
    heads = q.shape[2]
    for task in prange(q.shape[0] * heads):
        b, h = task // heads, task % heads
        begin, m = first[b], max(last[b] + 1 - first[b], 0)
        mean, line = np.empty(q.shape[3], np.float32), np.empty(low.shape[3] + WIDE, np.float32)
        for at in range(out.shape[2] if first_tile[b, h] >= 0 else 0):
            t = first_tile[b, h] + at
            seen, shift = tile_row(
                q[b], h, q_real[b], t, begin, sizes[h], offset, before, causal, metric, unit, q_map[h], q_bias[h],
                low[b, h], column[b, h], m, weight[h], logs[h], mean, line,
            )  # fmt: skip
            if seen:
                for j in range(seen):
                    out[b, h, at, begin + j] = line[j] - shift if shift > np.float32(-np.inf) else line[j]


@parallel_kernel
def choose_keys(  # type: ignore[no-untyped-def]
    q, q_real, span, sizes, maps, weight, logs, before, offset, causal, metric, unit, low, column,
    tiles, least, bits, parts,
):  # fmt: skip
    """Bit `j` of `bits[i]` (bytes, eight keys each) says whether tile `i` chooses key `j`, counted from the item's
    first real one: its normalised score reaches `least[i]`. Returns which tiles saw NaN or infinity.

    Bit for bit the choice from the scores of `score_tiles`, which are not kept here. tiles: batch, head, start, index
    and `alone` of the plan's tiles; in a causal layer only keys before a tile's first row are candidates.
    """
    (first, last), (q_map, q_bias), (batch, head, start, index, alone) = span, maps, tiles
    bad = np.zeros(batch.shape[0], np.uint8)
    for p in prange(parts):
        row, mean = np.empty(low.shape[3] + WIDE, np.float32), np.empty(q.shape[3], np.float32)
        for i in range(p, batch.shape[0], parts):
            if not alone[i]:
                b, h = batch[i], head[i]
                begin, m = first[b], max(last[b] + 1 - first[b], 0)
                seen, shift = tile_row(
                    q[b], h, q_real[b], index[i], begin, sizes[h], offset, before, causal, metric, unit, q_map[h],
                    q_bias[h], low[b, h], column[b, h], m, weight[h], logs[h], mean, row,
                )  # fmt: skip
                end = min(seen, start[i] + offset - begin) if causal else seen
                if shift > np.float32(-np.inf):
                    mark_reached(row, end, shift, least[i], bits[i])
                bad[i] = seen > 0 and not shift < np.float32(np.inf)
    return bad


@inline_kernel
def mark_reached(row, end, shift, least, bits):  # type: ignore[no-untyped-def]
    """Eight keys a byte: does `row[j] − shift` reach `least`, for j below `end`?"""
    for at in range(0, end, LANES):
        reached = reaching(row, at, shift, least)
        if at + LANES > end:
            reached &= (1 << (end - at)) - 1
        bits[at // LANES] = reached


@inline_kernel
def set_bits(words, low, high):  # type: ignore[no-untyped-def]
    """Set the bits from `low` to `high − 1`."""
    for w in range(low // 64, (high + 63) // 64 if low < high else 0):
        mask = np.uint64(0xFFFFFFFFFFFFFFFF)
        if w * 64 < low:
            mask &= mask << np.uint64(low - w * 64)
        if w * 64 + 64 > high:
            mask &= np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(w * 64 + 64 - high)
        words[w] |= mask


@parallel_kernel
def add_positions(words, real, span, tiles, globals_, radius, offset, causal, counts):  # type: ignore[no-untyped-def]
    """Window (radius 0: every row's own key, −1: none), global keys, and all keys for tiles that are one global row, on
    top of the chosen keys; then without padding. counts: keys of every tile."""
    (first, last), (batch, start, rows, alone) = span, tiles
    for i in prange(batch.shape[0]):
        b = batch[i]
        m = max(last[b] + 1 - first[b], 0)
        low = start[i] + offset - first[b]
        high = low + rows[i]
        end = min(m, high) if causal else m
        set_bits(words[i], 0, end if alone[i] else min(end, globals_[b]))
        if radius >= 0:
            set_bits(words[i], max(0, low - radius), min(end, high + radius))
        total = np.uint64(0)
        for w in range(words.shape[1]):
            words[i, w] &= real[b, w]
            total += ones(words[i, w])
        counts[i] = total


@parallel_kernel
def list_bits(words, first, batch, start, offset, causal, offsets, keys, first_row):  # type: ignore[no-untyped-def]
    """The keys of every tile, ascending, and (causal) the first row of the tile that may read each."""
    for i in prange(batch.shape[0]):
        e, begin = offsets[i], first[batch[i]]
        for w in range(words.shape[1]):
            word = words[i, w]
            while word != np.uint64(0):
                j = begin + 64 * w + np.int64(trailing_zeros(word))
                keys[e] = j
                first_row[e] = max(0, j - start[i] - offset) if causal else 0
                word &= word - np.uint64(1)
                e += 1
