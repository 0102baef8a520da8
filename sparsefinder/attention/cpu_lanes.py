"""Eight rows of a tile at once, one in each lane: from `[keys, 8]` scores to weights, key after key.

What a key adds to a row that does not read it is an exact zero, so no row's sum depends on its neighbours.
"""

from typing import Any

import numpy as np
from numba import types

from sparsefinder.attention.cpu_rows import general_row
from sparsefinder.numba_kernels import inline_kernel
from sparsefinder.rows import MAX_STEPS
from sparsefinder.vector_code import LANES, Block, exp_float32, vector_code


@vector_code
def highest(typing: Any, x: Any, n: Any, top: Any) -> Any:
    """`top [8]` = the greatest of `x[:n]` by lane, NaN where one is not finite; n > 0."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = Block(context, builder, x.dtype)
        start, step, _ = block.array(x, args[0])
        infinite = block.constant(float("inf"))

        def add(c: Any, totals: list[Any]) -> list[Any]:
            value = block.load(block.address(start, c, step, block.word(0)), block.vector)
            # Asked, not summed up: LLVM may take the factor out of a sum of products with zero, and what is hopelessly
            # low adds up to infinity.
            below = builder.fcmp_ordered("<", value, infinite)
            finite = builder.and_(below, builder.fcmp_ordered(">", value, block.constant(float("-inf"))))
            return [block.greater(value, totals[0]), builder.select(finite, totals[1], block.constant(float("nan")))]

        found = block.fold(block.word(0), args[1], [block.constant(float("-inf")), block.constant(0.0)], add)
        block.store(builder.fadd(*found), block.line(top, args[2]))
        return context.get_dummy_value()

    return types.void(x, types.intp, top), write


@vector_code
def shift(typing: Any, x: Any, n: Any, by: Any, factor: Any) -> Any:
    """`x[:n] = (x[:n] − by) · factor` in its place, `by` `[8]`; n > 0."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = Block(context, builder, x.dtype)
        start, step, _ = block.array(x, args[0])
        less, times = block.load(block.line(by, args[2]), block.vector), block.spread(args[3])

        def move(c: Any, totals: list[Any]) -> list[Any]:
            place = block.address(start, c, step, block.word(0))
            block.store(builder.fmul(builder.fsub(block.load(place, block.vector), less), times), place)
            return totals

        block.fold(block.word(0), args[1], [], move)
        return context.get_dummy_value()

    return types.void(x, types.intp, by, x.dtype), write


@vector_code
def rise(typing: Any, x: Any, n: Any, tau: Any, least: Any) -> Any:
    """A Newton step of `tau [8]` towards `(Σ max(x − tau, 0)²)^½ = 1` over `x[:n]`, and whether some lane rose by more
    than `least`: 1 or 0; n > 0. That root is convex and nearly a line, so steps from below stay below, and few are
    needed (one where a single key is left)."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = Block(context, builder, x.dtype)
        start, step, _ = block.array(x, args[0])
        place, zero, one = block.line(tau, args[2]), block.constant(0.0), block.constant(1.0)
        before = block.load(place, block.vector)

        def add(c: Any, totals: list[Any]) -> list[Any]:
            value = block.load(block.address(start, c, step, block.word(0)), block.vector)
            d = block.greater(builder.fsub(value, before), zero)
            return [builder.fadd(totals[0], d), block.plus_product(totals[1], d, d)]

        first, second = block.fold(block.word(0), args[1], [zero, zero], add)
        up = builder.fdiv(builder.fsub(second, block.root(second)), first)
        above = builder.and_(
            builder.fcmp_ordered(">", second, one), builder.fcmp_ordered(">", up, block.spread(args[3]))
        )
        block.store(builder.fadd(before, builder.select(above, up, zero)), place)
        return block.any_lane(above)

    return types.intp(x, types.intp, tau, x.dtype), write


@vector_code
def add_up(typing: Any, x: Any, n: Any, total: Any) -> Any:
    """`total [8]` = the sums of `x[:n]` by lane; n > 0."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = Block(context, builder, x.dtype)
        start, step, _ = block.array(x, args[0])

        def add(c: Any, totals: list[Any]) -> list[Any]:
            return [builder.fadd(totals[0], block.load(block.address(start, c, step, block.word(0)), block.vector))]

        block.store(block.fold(block.word(0), args[1], [block.constant(0.0)], add)[0], block.line(total, args[2]))
        return context.get_dummy_value()

    return types.void(x, types.intp, total), write


@vector_code
def keep(typing: Any, x: Any, c: Any, to: Any, least: Any) -> Any:
    """`x[to] = x[c]`, and whether some lane of it is above `least [8]`: 1 or 0."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = Block(context, builder, x.dtype)
        start, step, _ = block.array(x, args[0])
        value = block.load(block.address(start, args[1], step, block.word(0)), block.vector)
        block.store(value, block.address(start, args[2], step, block.word(0)))
        above = builder.fcmp_ordered(">", value, block.load(block.line(least, args[3]), block.vector))
        return block.any_lane(above)

    return types.intp(x, types.intp, types.intp, least), write


@inline_kernel
def from_best(x, n, ends, factor, top):  # type: ignore[no-untyped-def]
    """Scores `x[:n]` less the greatest of their row, `top [8]`, times a factor: hopelessly low where row `r` does not
    read the key, which it does for the first `ends[r]`. NaN in a row of which some score is not finite."""
    least = x.dtype.type(-1e38)
    for r in range(LANES):
        for c in range(ends[r], n):
            x[c, r] = least
    highest(x, n, top)
    for r in range(LANES):
        if ends[r] == 0:
            top[r] = 0
    shift(x, n, top, factor)


@inline_kernel
def kept_columns(x, n, tau, index):  # type: ignore[no-untyped-def]
    """The keys of which some lane is above `tau`, moved up in `x` and `index`; how many."""
    m = 0
    for c in range(n):
        index[m] = index[c]
        m += keep(x, c, m, tau)
    return m


@inline_kernel
def entmax15(x, n, step_floor, index, tau):  # type: ignore[no-untyped-def]
    """Weights in place of `x[:m]`, of the keys `index[:m]`: those to which some row gives one, and perhaps more; m.

    x: scores less the greatest of their row, halved. The first step sees all keys, the climb goes on over those above.
    """
    tau[:] = -1
    rising = rise(x, n, tau, step_floor)
    n = kept_columns(x, n, tau, index)
    for _ in range(MAX_STEPS):
        if not rising or n == 0:
            break
        rising = rise(x, n, tau, step_floor)
    if n:
        n = kept_columns(x, n, tau, index)
        shift(x, n, tau, x.dtype.type(1))
    flat, zero = x.reshape(-1), x.dtype.type(0)
    for i in range(n * LANES):
        d = max(flat[i], zero)
        flat[i] = d * d
    return n


@inline_kernel
def general_entmax(x, n, order, index, none):  # type: ignore[no-untyped-def]
    """The same for any α > 1, `order` = α − 1 and x scaled by it."""
    for r in range(LANES):
        general_row(x[:n, r], order)
    none[:] = 0
    return kept_columns(x, n, none, index)


@inline_kernel
def exponentials(x, n, total):  # type: ignore[no-untyped-def]
    """`exp(x[:n])` in its place, and `total [8]` of it by lane."""
    flat = x.reshape(-1)
    for i in range(n * LANES):
        flat[i] = exp_float32(flat[i]) if x.itemsize == 4 else np.exp(flat[i])
    add_up(x, n, total)
