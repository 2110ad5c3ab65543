"""What numba's loops need of the machine: types of numbers, addresses, what threads share."""

from __future__ import annotations

import os

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from ...compiled import loop


@intrinsic
def array_at(context, address, shape, like):
    """Return an array of this shape, of int64s, at an address, of the type of array `like`."""
    kind = types.Array(like.dtype, len(shape), "C")

    def generate(context, builder, signature, args):
        place, sizes, _ = args
        itemsize = context.get_constant(types.intp, like.dtype.bitwidth // 8)
        lengths = cgutils.unpack_tuple(builder, sizes)
        strides = [itemsize]
        for length in lengths[:0:-1]:
            strides.insert(0, builder.mul(length, strides[0]))
        view = context.make_array(kind)(context, builder)
        pointer = builder.inttoptr(place, view.data.type)
        populate_array(view, pointer, lengths, strides, itemsize, meminfo=None)
        return view._getvalue()

    return kind(address, shape, like), generate


@intrinsic
def wide(context, number):
    """float32 of a weight: of the bits of a float16 (uint16) or bfloat16 (int16), or of itself."""

    def generate(context, builder, signature, args):
        (bits,) = args
        if number == types.uint16:
            return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())
        if number == types.int16:
            word = builder.zext(bits, ir.IntType(32))
            return builder.bitcast(builder.shl(word, word.type(16)), ir.FloatType())
        return bits

    return types.float32(number), generate


@intrinsic
def prefetch(context, address):
    """Begin to read a cache line; any address is allowed."""

    def generate(context, builder, signature, args):
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        place = builder.inttoptr(args[0], cgutils.voidptr_t)
        builder.call(function, [place, word(0), word(2), word(1)])
        return context.get_dummy_value()

    return types.void(address), generate


@intrinsic
def add_to(context, array, index, number):
    """Add to an element of an int64 array atomically; return its value before."""

    def generate(context, builder, signature, args):
        kind = signature.args[0]
        view = context.make_array(kind)(context, builder, args[0])
        place = cgutils.get_item_pointer(context, builder, kind, view, [args[1]], wraparound=False)
        return builder.atomic_rmw("add", place, args[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), generate


if os.name == "posix":
    rest = types.ExternalFunction("sched_yield", types.int32())
else:

    @loop
    def rest():
        """Let other threads run: untried on Windows, where threads only spin."""
