"""The Triton kernel of the gpu backend: a tile's keys are gathered in blocks, twice for entmax and once for softmax.

Entmax needs its threshold before the first weight. The first pass over the list scores the keys and keeps, row by row,
only the candidates: scores that are not yet known to lie outside the support (at most `1 / (α − 1)` below the best so
far; Peters et al., 2019, proposition 1). They are few, so the steps towards the threshold read them from a scratch
buffer that stays in cache, and never a key. The second pass scores again, which is cheaper than writing all scores
down, and multiplies the weights with the values.

This module needs torch and triton, nothing else.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton import knobs

SOFTMAX = tl.constexpr(0)
ENTMAX15 = tl.constexpr(1)
ENTMAX = tl.constexpr(2)

MAX_STEPS = tl.constexpr(30)  # of Newton; it takes 5 to 13
BRACKET_STEPS = tl.constexpr(60)
BRACKET_ERROR = tl.constexpr(1e-8)  # of the sum of the weights, so of all weights together; scores are float32
NOBODY = tl.constexpr(1 << 30)  # the first row that may read a key behind the end of the list
INFINITY = tl.constexpr(float("inf"))
NAN = tl.constexpr(float("nan"))

INTERPRETED = bool(knobs.runtime.interpret)  # TRITON_INTERPRET=1: the kernel runs in numpy, on CPU tensors
WIDEN = tl.constexpr(INTERPRETED)  # numpy has no bfloat16: the interpreter would multiply its bits as whole numbers


def kernel(function: Callable[..., Any]) -> Any:
    """Triton reads sources: shape-checked tests wrap every function, and it must see the plain one."""
    return triton.jit(inspect.unwrap(function))


@kernel
def multiply(a, b, onto, PRECISION: tl.constexpr):
    """`a @ b + onto`: half precision is multiplied as it is and added up in float32."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, onto, input_precision=PRECISION)


@kernel
def score_block(
    query, k_head, listed, first_row, count, low, row, height, scale, ROWS: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores `[ROWS, BLOCK]` of the listed keys from `low` on, −inf where a row may not read one; which keys they are;
    which rows have a score that is no number (1) or not (0)."""
    column = low + tl.arange(0, BLOCK)
    inside = column < count
    key = tl.load(listed + column, mask=inside, other=0)
    first = tl.load(first_row + column, mask=inside, other=NOBODY)
    d = tl.arange(0, DIM_PAD)
    at = key[:, None] * DIM + d[None, :]
    block = tl.load(k_head + at, mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
    scores = multiply(query, tl.trans(block), tl.zeros([ROWS, BLOCK], tl.float32), PRECISION) * scale
    may = (first[None, :] <= row[:, None]) & (row < height)[:, None]
    wrong = may & ((scores != scores) | (scores == INFINITY))
    return tl.where(may & (wrong == 0), scores, -INFINITY), key, tl.max(wrong.to(tl.int32), 1)


@kernel
def load_values(v_head, key, inside, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Values `[BLOCK, DIM_PAD]` of the keys; zero behind the end of the list."""
    d = tl.arange(0, DIM_PAD)
    at = key[:, None] * DIM + d[None, :]
    return tl.load(v_head + at, mask=inside[:, None] & (d < DIM)[None, :], other=0.0)


@kernel
def load_candidates(slot, filled, count, low, top, order, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """`(α − 1)(z − max z)` of the candidates from `low` on, −inf where a row has no more of them."""
    column = low + tl.arange(0, BLOCK)
    at = tl.arange(0, ROWS)[:, None] * count + column[None, :]
    z = tl.load(slot + at, mask=column[None, :] < filled[:, None], other=-INFINITY)
    return (z - top[:, None]) * order


@kernel
def climb(slot, filled, count, top, step_floor, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """τ of every row for α = 1.5: Newton from −1 upwards over the candidates, as on the CPU."""
    tau = tl.full([ROWS], -1.0, tl.float32)
    most = tl.max(filled, 0)
    steps = 0
    while steps < MAX_STEPS:
        s1 = tl.zeros([ROWS], tl.float32)
        s2 = tl.zeros([ROWS], tl.float32)
        for low in range(0, most, BLOCK):
            gap = tl.maximum(load_candidates(slot, filled, count, low, top, 0.5, ROWS, BLOCK) - tau[:, None], 0.0)
            s1 += tl.sum(gap, 1)
            s2 += tl.sum(gap * gap, 1)
        step = (s2 - 1.0) / (2.0 * tl.where(s1 > 0.0, s1, 1.0))
        moving = (step > step_floor) & (s1 > 0.0)
        tau = tl.where(moving, tau + step, tau)
        steps = tl.where(tl.max(moving.to(tl.int32), 0) > 0, steps + 1, MAX_STEPS)
    return tau


@kernel
def positive_power(x, exponent):
    """`max(x, 0) ** exponent`."""
    return tl.where(x > 0, tl.exp2(tl.log2(tl.where(x > 0, x, 1.0)) * exponent), 0.0)


@kernel
def bracket(slot, filled, count, top, order, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """τ and the sum of the weights there for any α > 1, in float64: Newton and bisection in turn, because above α = 2
    Newton alone may creep. What the weights lack of one is spread over them by the caller."""
    exponent = 1.0 / order
    low = tl.full([ROWS], -1.0, tl.float64)
    high = -positive_power(1.0 / tl.maximum(filled, 1).to(tl.float64), order)  # all candidates equal: the greatest τ
    tau = low
    total = tl.full([ROWS], 1.0, tl.float64)
    most = tl.max(filled, 0)
    steps = 0
    while steps < BRACKET_STEPS:
        total = tl.zeros([ROWS], tl.float64)
        slope = tl.zeros([ROWS], tl.float64)
        for column in range(0, most, BLOCK):
            gap = load_candidates(slot, filled, count, column, top.to(tl.float64), order, ROWS, BLOCK) - tau[:, None]
            total += tl.sum(positive_power(gap, exponent), 1)
            slope += tl.sum(positive_power(gap, exponent - 1.0), 1)
        left = total > 1.0
        low = tl.where(left, tau, low)
        high = tl.where(left, high, tau)
        newton = tau + (total - 1.0) / (tl.where(slope > 0.0, slope, 1.0) * exponent)
        take = (steps % 2 == 0) & (newton > low) & (newton < high)
        moving = (tl.abs(total - 1.0) > BRACKET_ERROR) & (filled > 0)
        more = (tl.max(moving.to(tl.int32), 0) > 0) & (steps + 1 < BRACKET_STEPS)
        tau = tl.where(moving & more, tl.where(take, newton, (low + high) / 2), tau)
        steps = tl.where(more, steps + 1, BRACKET_STEPS)
    return tau, tl.where(total > 0.0, total, 1.0)


@kernel
def softmax_tile(
    query, k_head, v_head, listed, first_row, count, row, height, scale, ROWS: tl.constexpr, DIM: tl.constexpr,
    DIM_V: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V_PAD: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One pass: the sum and the output are rescaled whenever a greater score comes (Milakov and Gimelshein, 2018)."""
    top = tl.full([ROWS], -INFINITY, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    bad = tl.zeros([ROWS], tl.int32)
    out = tl.zeros([ROWS, DIM_V_PAD], tl.float32)
    for low in range(0, count, BLOCK):
        scores, key, wrong = score_block(
            query, k_head, listed, first_row, count, low, row, height, scale, ROWS, DIM, DIM_PAD, BLOCK, PRECISION
        )
        bad = tl.maximum(bad, wrong)
        higher = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(higher > -INFINITY, higher, 0.0)  # of a row without keys so far: −inf − −inf is no number
        shrink = tl.exp(top - safe)
        weight = tl.exp(scores - safe[:, None])
        total = total * shrink + tl.sum(weight, 1)
        values = load_values(v_head, key, low + tl.arange(0, BLOCK) < count, DIM_V, DIM_V_PAD)
        out = multiply(weight.to(values.dtype), values, out * shrink[:, None], PRECISION)
        top = higher
    return out / tl.where(total > 0.0, total, 1.0)[:, None], bad


@kernel
def entmax_tile(
    query, k_head, v_head, listed, first_row, count, row, height, scale, slot, alpha, step_floor, KIND: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V_PAD: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Two passes over the list, with the threshold between them; see above."""
    order = 0.5 if KIND == ENTMAX15 else alpha - 1
    top = tl.full([ROWS], -INFINITY, tl.float32)
    filled = tl.zeros([ROWS], tl.int32)
    bad = tl.zeros([ROWS], tl.int32)
    line = tl.arange(0, ROWS)[:, None] * count
    for low in range(0, count, BLOCK):
        scores, _, wrong = score_block(
            query, k_head, listed, first_row, count, low, row, height, scale, ROWS, DIM, DIM_PAD, BLOCK, PRECISION
        )
        bad = tl.maximum(bad, wrong)
        top = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(top > -INFINITY, top, 0.0)
        candidate = ((scores - safe[:, None]) * order > -1.0).to(tl.int32)
        at = line + filled[:, None] + tl.cumsum(candidate, 1) - 1
        tl.store(slot + at, scores, mask=candidate > 0)
        filled += tl.sum(candidate, 1)
    top = tl.where(top > -INFINITY, top, 0.0)
    total = tl.full([ROWS], 1.0, tl.float64)  # Newton leaves weights that sum to one
    tl.debug_barrier()  # what other threads of this program stored is read below
    if KIND == ENTMAX15:
        tau = climb(slot, filled, count, top, step_floor, ROWS, BLOCK)
    else:
        tau, total = bracket(slot, filled, count, top, order, ROWS, BLOCK)
    tl.debug_barrier()  # the next tile overwrites the slot
    out = tl.zeros([ROWS, DIM_V_PAD], tl.float32)
    for low in range(0, count, BLOCK):
        scores, key, _ = score_block(
            query, k_head, listed, first_row, count, low, row, height, scale, ROWS, DIM, DIM_PAD, BLOCK, PRECISION
        )
        if KIND == ENTMAX15:
            gap = tl.maximum((scores - top[:, None]) * 0.5 - tau[:, None], 0.0)
            weight = gap * gap
        else:
            gap = (scores.to(tl.float64) - top[:, None]) * order - tau[:, None]
            weight = (positive_power(gap, 1.0 / order) / total[:, None]).to(tl.float32)
        values = load_values(v_head, key, low + tl.arange(0, BLOCK) < count, DIM_V, DIM_V_PAD)
        out = multiply(weight.to(values.dtype), values, out, PRECISION)
    return out, bad


@kernel
def attend_tiles(
    q, k, v, out, scales, tile_batch, tile_head, tile_start, tile_rows, offsets, keys, first_row, scratch, slot_size,
    parts, work, heads, group, queries, key_count, alpha, step_floor, KIND: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, DIM_PAD: tl.constexpr, DIM_V_PAD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Every program takes every so-many-th tile, or part of one where tiles have more than `ROWS` rows.

    q, out `[B, H, N, ·]`, k, v `[B, Hkv, M, ·]`, contiguous. scratch: `slot_size` numbers for each program.
    """
    d = tl.arange(0, DIM_PAD)
    d_out = tl.arange(0, DIM_V_PAD)
    slot = scratch + tl.program_id(0).to(tl.int64) * slot_size
    for item in range(tl.program_id(0), work, tl.num_programs(0)):
        t = item // parts
        row = (item % parts) * ROWS + tl.arange(0, ROWS)
        height = tl.load(tile_rows + t)
        begin = tl.load(offsets + t)
        # A part that lies behind the end of its tile has no rows: it reads no list.
        count = tl.where((item % parts) * ROWS < height, (tl.load(offsets + t + 1) - begin).to(tl.int32), 0)
        b, h = tl.load(tile_batch + t).to(tl.int64), tl.load(tile_head + t)
        place = (b * heads + h) * queries + tl.load(tile_start + t) + row
        kv = (b * (heads // group) + h // group) * key_count
        real = (row < height)[:, None]
        query = tl.load(q + place[:, None] * DIM + d[None, :], mask=real & (d < DIM)[None, :], other=0.0)
        scale = tl.load(scales + h)
        if KIND == SOFTMAX:
            result, bad = softmax_tile(
                query, k + kv * DIM, v + kv * DIM_V, keys + begin, first_row + begin, count, row, height, scale, ROWS,
                DIM, DIM_V, DIM_PAD, DIM_V_PAD, BLOCK, PRECISION,
            )  # fmt: skip
        else:
            result, bad = entmax_tile(
                query, k + kv * DIM, v + kv * DIM_V, keys + begin, first_row + begin, count, row, height, scale, slot,
                alpha, step_floor, KIND, ROWS, DIM, DIM_V, DIM_PAD, DIM_V_PAD, BLOCK, PRECISION,
            )  # fmt: skip
        result = tl.where((bad > 0)[:, None], NAN, result)
        at = place[:, None] * DIM_V + d_out[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=real & (d_out < DIM_V)[None, :])


CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps, num_stages=stages)
    for block, warps, stages in ((64, 4, 2), (64, 8, 2), (32, 4, 2), (32, 4, 3))
]
tuned_attend_tiles = triton.autotune(CONFIGS, key=["KIND", "ROWS", "DIM_PAD", "DIM_V_PAD"])(attend_tiles)
