"""Two products of small blocks, as vector code: LLVM keeps their sums in registers, as it does not with loops.

Both read the rows that a key list names where they lie: nothing is gathered first. Eight lanes are one AVX register of
float32; for float64, and on other processors, LLVM splits or joins them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

LANES = 8
MIX_ROWS, MIX_VECTORS = 4, 2  # eight sums, as many as a score block has
FUSED = ("contract",)  # a product and its sum may become one instruction

# Three rounds of exchanges between vectors i and i + step turn an 8 × 8 block over, up to this order of its rows.
ROUNDS = (
    ((0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15), 1),
    ((0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15), 2),
    ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15), 4),
)
TURNED = (0, 2, 1, 3, 4, 6, 5, 7)

vector_code: Callable[[Callable[..., Any]], Any] = intrinsic  # untyped in numba


class Block:
    """Addresses and vectors of one block, while its code is written. Arrays are two-dimensional, rows contiguous."""

    def __init__(self, context: Any, builder: Any, dtype: Any):
        self.builder, self._context = builder, context
        self.item = context.get_value_type(dtype)
        self.vector = ir.VectorType(self.item, LANES)
        self.word = ir.IntType(64)
        self.size = self.word(context.get_abi_sizeof(self.item))

    def array(self, kind: Any, value: Any) -> tuple[Any, Any, Any]:
        """Where an array begins, how many bytes one row of it is from the next, and the columns of it."""
        array = self._context.make_array(kind)(self._context, self.builder, value)
        step, columns = self.builder.extract_value(array.strides, 0), self.builder.extract_value(array.shape, 1)
        return self.builder.ptrtoint(array.data, self.word), step, columns

    def address(self, start: Any, row: Any, step: Any, column: Any) -> Any:
        """Of `array[row, column]`."""
        of_row = self.builder.add(start, self.builder.mul(row, step))
        return self.builder.add(of_row, self.builder.mul(column, self.size))

    def load(self, address: Any, kind: Any) -> Any:
        """One item, or a vector of neighbours, which need not be aligned."""
        found = self.builder.load(self.builder.inttoptr(address, kind.as_pointer()))
        found.align = self._context.get_abi_sizeof(self.item)
        return found

    def store(self, value: Any, address: Any) -> None:
        """A vector of neighbours."""
        stored = self.builder.store(value, self.builder.inttoptr(address, self.vector.as_pointer()))
        stored.align = self._context.get_abi_sizeof(self.item)

    def shuffled(self, a: Any, b: Any, places: Sequence[int]) -> Any:
        """A vector of these items of `a` and `b`, counted through."""
        mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), list(places))
        return self.builder.shuffle_vector(a, b, mask)

    def spread(self, value: Any) -> Any:
        """A vector that holds one item in every lane."""
        empty = ir.Constant(self.vector, ir.Undefined)
        return self.shuffled(self.builder.insert_element(empty, value, ir.IntType(32)(0)), empty, [0] * LANES)

    def sums(self, low: Any, high: Any, start: Sequence[Any], products: Callable[[Any], Sequence[Any]]) -> list[Any]:
        """`start + Σ products(i)` for i from low to high − 1, at least one; all sums stay in registers."""
        builder, before = self.builder, self.builder.block
        loop, done = builder.append_basic_block("sums"), builder.append_basic_block("summed")
        builder.branch(loop)
        builder.position_at_end(loop)
        i, totals = builder.phi(self.word), [builder.phi(self.vector) for _ in start]
        i.add_incoming(low, before)
        for total, first in zip(totals, start, strict=True):
            total.add_incoming(first, before)
        pairs = zip(totals, products(i), strict=True)
        added = [builder.fadd(builder.fmul(*pair, flags=FUSED), total, flags=FUSED) for total, pair in pairs]
        after = builder.add(i, self.word(1))
        i.add_incoming(after, loop)
        for total, value in zip(totals, added, strict=True):
            total.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", after, high), loop, done)
        builder.position_at_end(done)
        return added


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
