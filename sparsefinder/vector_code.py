"""Vector code inside numba kernels: what LLVM does not find by itself in loops over arrays."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sparsefinder.numba_kernels import inline_kernel

LANES = 8  # one AVX register of float32; for float64, and on other processors, LLVM splits or joins them
FUSED = ("contract",)  # a product and its sum may become one instruction
LEAST = np.float32(-88)  # the bits of 2ⁿ are zero from here on, and so is exp
LOG2_E, LN_2, HALF = np.float32(math.log2(math.e)), np.float32(math.log(2)), np.float32(0.5)
INVERSE = tuple(np.float32(1 / math.factorial(k)) for k in range(8))

vector_code: Callable[[Callable[..., Any]], Any] = intrinsic  # untyped in numba


@vector_code
def float_of_bits(typing: Any, bits: Any) -> Any:
    """The float32 that these 32 bits are."""
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.FloatType()
    )


@vector_code
def trailing_zeros(typing: Any, word: Any) -> Any:
    """How many bits of a word, which is not zero, lie below its lowest one."""
    return types.uint64(types.uint64), lambda context, builder, signature, args: builder.cttz(args[0], ir.IntType(1)(1))


@vector_code
def ones(typing: Any, word: Any) -> Any:
    """How many bits of a word are set."""
    return types.uint64(types.uint64), lambda context, builder, signature, args: builder.ctpop(args[0])


@inline_kernel
def exp_float32(x):  # type: ignore[no-untyped-def]
    """exp of a float32 that is not far above 0: 2ⁿ by its bits times a Taylor sum of what is left, below ln 2 / 2.

    Spelled out, because a call to the C library keeps a loop from being vectorised.
    """
    x = max(x, LEAST)
    n = np.floor(x * LOG2_E + HALF)
    x -= n * LN_2
    p = INVERSE[7]
    p = p * x + INVERSE[6]
    p = p * x + INVERSE[5]
    p = p * x + INVERSE[4]
    p = p * x + INVERSE[3]
    p = p * x + INVERSE[2]
    p = p * x + INVERSE[1]
    p = p * x + INVERSE[0]
    return p * float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


class Block:
    """Addresses and vectors of one block, while its code is written. Arrays are two-dimensional, rows contiguous."""

    def __init__(self, context: Any, builder: Any, dtype: Any):
        self.builder, self._context = builder, context
        self.item = context.get_value_type(dtype)
        self.vector = ir.VectorType(self.item, LANES)
        self.word, self._bits = ir.IntType(64), dtype.bitwidth
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

    def line(self, kind: Any, value: Any) -> Any:
        """Where a one-dimensional array begins."""
        return self.builder.ptrtoint(self._context.make_array(kind)(self._context, self.builder, value).data, self.word)

    def length(self, kind: Any, value: Any) -> Any:
        """Of a one-dimensional array."""
        return self.builder.extract_value(self._context.make_array(kind)(self._context, self.builder, value).shape, 0)

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

    def fold(
        self, low: Any, high: Any, start: Sequence[Any], update: Callable[[Any, list[Any]], list[Any]]
    ) -> list[Any]:
        """`totals = update(i, totals)` from `start` on, for i from low to high − 1, at least one; all in registers."""
        builder, before = self.builder, self.builder.block
        loop, done = builder.append_basic_block("fold"), builder.append_basic_block("folded")
        builder.branch(loop)
        builder.position_at_end(loop)
        i, totals = builder.phi(self.word), [builder.phi(self.vector) for _ in start]
        i.add_incoming(low, before)
        for total, first in zip(totals, start, strict=True):
            total.add_incoming(first, before)
        found = update(i, totals)
        after = builder.add(i, self.word(1))
        i.add_incoming(after, loop)
        for total, value in zip(totals, found, strict=True):
            total.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", after, high), loop, done)
        builder.position_at_end(done)
        return found

    def plus_product(self, total: Any, a: Any, b: Any) -> Any:
        """`total + a b`, rounded once where the processor can."""
        return self.builder.fadd(self.builder.fmul(a, b, flags=FUSED), total, flags=FUSED)

    def greater(self, a: Any, b: Any) -> Any:
        """The greater of two vectors, lane by lane; b where one is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def root(self, value: Any) -> Any:
        """Square roots."""
        name = f"llvm.sqrt.v{LANES}f{self._bits}"
        kind = ir.FunctionType(self.vector, [self.vector])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), [value])  # type: ignore[no-untyped-call]

    def any_lane(self, mask: Any) -> Any:
        """1 where some lane of a comparison is true, else 0."""
        byte = self.builder.bitcast(mask, ir.IntType(LANES))
        return self.builder.zext(self.builder.icmp_unsigned("!=", byte, byte.type(0)), self.word)

    def constant(self, value: float) -> Any:
        """A vector that holds this number in every lane."""
        return ir.Constant(self.vector, [value] * LANES)


@vector_code
def reaching(typing: Any, row: Any, at: Any, shift: Any, least: Any) -> Any:
    """Bit i of a byte: `row[at + i] − shift >= least`, for eight neighbours of a one-dimensional array."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = Block(context, builder, row.dtype)
        found = block.load(builder.add(block.line(row, args[0]), builder.mul(args[1], block.size)), block.vector)
        moved = builder.fsub(found, block.spread(args[2]))
        return builder.bitcast(builder.fcmp_ordered(">=", moved, block.spread(args[3])), ir.IntType(8))

    return types.uint8(row, types.intp, row.dtype, row.dtype), write
