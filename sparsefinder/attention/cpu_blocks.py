"""Two products of small blocks whose sums stay in registers, as they do not in loops over arrays.

Both read the rows that a key list names where they lie: nothing is gathered first.
"""

from typing import Any

import llvmlite.ir as ir
from numba import types

from sparsefinder.vector_code import LANES, Block, vector_code

MIX_ROWS, MIX_VECTORS = 4, 2  # eight sums, as many as a score block has

# Three rounds of exchanges between vectors i and i + step turn an 8 × 8 block over, up to this order of its rows.
ROUNDS = (
    ((0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15), 1),
    ((0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15), 2),
    ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15), 4),
)
TURNED = (0, 2, 1, 3, 4, 6, 5, 7)


@vector_code
def score_block(typing: Any, queries: Any, row: Any, k: Any, keys: Any, at: Any, scores: Any) -> Any:
    """`scores[row : row + 8, at : at + 8] = (k[keys[at : at + 8]] @ queries[:, row : row + 8]).T`.

    queries: `[dims, rows]`, transposed, so that rows are lanes; all of `k`'s dims are summed over.
    """

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = Block(context, builder, queries.dtype)
        q_start, q_step, _ = block.array(queries, args[0])
        k_start, k_step, dims = block.array(k, args[2])
        s_start, s_step, _ = block.array(scores, args[5])
        listed = [_listed(context, builder, keys, args[3], builder.add(args[4], block.word(j))) for j in range(LANES)]
        starts = [block.address(k_start, key, k_step, block.word(0)) for key in listed]

        def products(d: Any) -> list[tuple[Any, Any]]:
            query = block.load(block.address(q_start, d, q_step, args[1]), block.vector)
            shift = builder.mul(d, block.size)
            return [(block.spread(block.load(builder.add(start, shift), block.item)), query) for start in starts]

        zero = ir.Constant(block.vector, [0.0] * LANES)
        found = block.sums(block.word(0), dims, [zero] * LANES, products)
        for low, high, step in ROUNDS:
            for i in (i for i in range(LANES) if not i & step):
                pair = found[i], found[i + step]
                found[i], found[i + step] = block.shuffled(*pair, low), block.shuffled(*pair, high)
        for i, place in enumerate(TURNED):
            block.store(found[place], block.address(s_start, builder.add(args[1], block.word(i)), s_step, args[4]))
        return context.get_dummy_value()

    return types.void(queries, types.intp, k, keys, types.intp, scores), write


@vector_code
def mix_block(typing: Any, weights: Any, row: Any, v: Any, keys: Any, low: Any, high: Any, out: Any, col: Any) -> Any:
    """`out[row : row + 4, col : col + 16] += weights[row : row + 4, low : high] @ v[keys[low : high], col : col + 16]`.

    Key after key, so that a key with weight zero changes no bit of the sum; low < high.
    """

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = Block(context, builder, weights.dtype)
        w_start, w_step, _ = block.array(weights, args[0])
        v_start, v_step, _ = block.array(v, args[2])
        o_start, o_step, _ = block.array(out, args[6])
        rows = [builder.add(args[1], block.word(i)) for i in range(MIX_ROWS)]
        columns = [builder.add(args[7], block.word(LANES * j)) for j in range(MIX_VECTORS)]
        places = [block.address(o_start, r, o_step, c) for r in rows for c in columns]
        starts = [block.address(w_start, r, w_step, block.word(0)) for r in rows]

        def products(c: Any) -> list[tuple[Any, Any]]:
            key = _listed(context, builder, keys, args[3], c)
            values = [block.load(block.address(v_start, key, v_step, column), block.vector) for column in columns]
            shift = builder.mul(c, block.size)
            shares = [block.spread(block.load(builder.add(start, shift), block.item)) for start in starts]
            return [(share, value) for share in shares for value in values]

        before = [block.load(place, block.vector) for place in places]
        for value, place in zip(block.sums(args[4], args[5], before, products), places, strict=True):
            block.store(value, place)
        return context.get_dummy_value()

    return types.void(weights, types.intp, v, keys, types.intp, types.intp, out, types.intp), write


def _listed(context: Any, builder: Any, keys: Any, value: Any, at: Any) -> Any:
    """`keys[at]` as a machine word."""
    data = context.make_array(keys)(context, builder, value).data
    return builder.sext(builder.load(builder.gep(data, [at])), ir.IntType(64))
