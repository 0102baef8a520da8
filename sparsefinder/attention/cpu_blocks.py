"""Products of small blocks whose sums stay in registers, as they do not in loops over arrays.

Both read the rows that a key list names where they lie: nothing is gathered first. Scores and weights lie by key, then
by lane: `[keys, 8]` of eight rows of a tile.
"""

from typing import Any

import llvmlite.ir as ir
from numba import types

from sparsefinder.vector_code import LANES, Block, vector_code

MIX_ROWS, MIX_VECTORS = 4, 2  # eight sums, as many as a score block has


@vector_code
def score_block(typing: Any, queries: Any, row: Any, k: Any, keys: Any, at: Any, scores: Any) -> Any:
    """`scores[at : at + 8] = k[keys[at : at + 8]] @ queries[:, row : row + 8]`.

    queries: `[dims, rows]`, transposed, so that rows are lanes; all of `k`'s dims are summed over.
    """

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = Block(context, builder, queries.dtype)
        q_start, q_step, _ = block.array(queries, args[0])
        k_start, k_step, dims = block.array(k, args[2])
        s_start, s_step, _ = block.array(scores, args[5])
        places = [builder.add(args[4], block.word(j)) for j in range(LANES)]
        listed = [_listed(context, builder, keys, args[3], place) for place in places]
        starts = [block.address(k_start, key, k_step, block.word(0)) for key in listed]

        def add(d: Any, totals: list[Any]) -> list[Any]:
            query = block.load(block.address(q_start, d, q_step, args[1]), block.vector)
            shift = builder.mul(d, block.size)
            numbers = [block.spread(block.load(builder.add(start, shift), block.item)) for start in starts]
            return [block.plus_product(total, x, query) for total, x in zip(totals, numbers, strict=True)]

        found = block.fold(block.word(0), dims, [block.constant(0.0)] * LANES, add)
        for place, value in zip(places, found, strict=True):
            block.store(value, block.address(s_start, place, s_step, block.word(0)))
        return context.get_dummy_value()

    return types.void(queries, types.intp, k, keys, types.intp, scores), write


@vector_code
def mix_block(
    typing: Any, weights: Any, lane: Any, v: Any, keys: Any, low: Any, high: Any, out: Any, row: Any, col: Any
) -> Any:
    """`out[row : row + 4, col : col + 16] += weights[part, lane : lane + 4].T @ v[keys[part], col : col + 16]`.

    part: `low : high`, not empty. Key after key, so that a key with weight zero changes no bit of the sum.
    """

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = Block(context, builder, weights.dtype)
        w_start, w_step, _ = block.array(weights, args[0])
        v_start, v_step, _ = block.array(v, args[2])
        o_start, o_step, _ = block.array(out, args[6])
        lanes = [builder.add(args[1], block.word(i)) for i in range(MIX_ROWS)]
        rows = [builder.add(args[7], block.word(i)) for i in range(MIX_ROWS)]
        columns = [builder.add(args[8], block.word(LANES * j)) for j in range(MIX_VECTORS)]
        places = [block.address(o_start, r, o_step, c) for r in rows for c in columns]

        def add(c: Any, totals: list[Any]) -> list[Any]:
            key = _listed(context, builder, keys, args[3], c)
            values = [block.load(block.address(v_start, key, v_step, column), block.vector) for column in columns]
            shares = [block.spread(block.load(block.address(w_start, c, w_step, i), block.item)) for i in lanes]
            pairs = [(share, value) for share in shares for value in values]
            return [block.plus_product(total, *pair) for total, pair in zip(totals, pairs, strict=True)]

        before = [block.load(place, block.vector) for place in places]
        for value, place in zip(block.fold(args[4], args[5], before, add), places, strict=True):
            block.store(value, place)
        return context.get_dummy_value()

    word = types.intp
    return types.void(weights, word, v, keys, word, word, out, word, word), write


def _listed(context: Any, builder: Any, keys: Any, value: Any, at: Any) -> Any:
    """`keys[at]` as a machine word."""
    data = context.make_array(keys)(context, builder, value).data
    return builder.sext(builder.load(builder.gep(data, [at])), ir.IntType(64))
