"""Loads and stores at an index of each lane, which Pallas has no operation for.

Where a thread's numbers go is said by arrays of indices, laid out as the numbers are, so that layouts are the
compiler's matter and what remains here is one addition for each register. Interpreted, the same indices pick
from the whole array: what lies outside it is NaN, and is not written.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

_GLOBAL = 1  # the address space
_WIDEST = 16  # bytes of a load


def iota(shape: tuple[int, ...], axis: int, layout: Any, interpret: bool) -> jax.Array:
    """The index along `axis`, int32. That of Pallas leaves its layout to be guessed."""
    if interpret:
        return lax.broadcasted_iota(jnp.int32, shape, axis)

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=layout))
    def count(_):
        i32 = ir.IntegerType.get_signless(32)
        return fragmented_array.FragmentedArray.broadcasted_iota(
            i32, shape, axis, layout.to_mgpu(), is_signed=True
        )

    return count()


def gather(ref: Any, row: jax.Array, column: jax.Array | None, layout: Any, interpret: bool) -> jax.Array:
    """The numbers of `ref` at `[row, column]`, as `layout` says.

    `column` counts along all axes but the first, and is consecutive in a thread's numbers; `row` is one for
    all of those. Without it `ref` has one axis.
    """
    if interpret:
        fill = jnp.nan if jnp.issubdtype(ref.dtype, jnp.floating) else jnp.iinfo(ref.dtype).max
        at = ref[...].reshape(ref.shape[0], -1).at[row, 0 if column is None else column]
        return at.get(mode="fill", fill_value=fill, wrap_negative_indices=False)
    kind = plgpu.ShapeDtypeStruct(row.shape, ref.dtype, layout=layout)
    index = (row,) if column is None else (row, column)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(layout for _ in index)), return_type=kind)
    def load(_, ref, row, column=None):
        loaded = np.empty(row.registers.shape, dtype=object)
        element = ir.MemRefType(ref.type).element_type
        for index, address in _addresses(ref, row, column):
            type_ = ir.VectorType.get((row.layout.vector_length,), element)
            loaded[index] = llvm.load(type_, address, alignment=_alignment(type_))
        signed = utils.is_signed(kind.dtype)
        return fragmented_array.FragmentedArray(_registers=loaded, _layout=row.layout, _is_signed=signed)

    return load(ref, *index)


def scatter(
    ref: Any, row: jax.Array, column: jax.Array, x: jax.Array, layout: Any, where: jax.Array, interpret: bool
) -> None:
    """Writes `x` to `ref` at `[row, column]`, where `where` is not 0: int32, one for a thread's numbers."""
    if interpret:
        _one_by_one(ref, row, column, x, where)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout, layout, layout))
    def store(_, ref, row, column, x, where):
        zero = arith.constant(ir.IntegerType.get_signless(32), 0)
        for index, address in _addresses(ref, row, column):
            wanted = arith.cmpi(arith.CmpIPredicate.ne, _first(where.registers[index]), zero)
            with utils.when(wanted):
                value = x.registers[index]
                llvm.store(value, address, alignment=_alignment(ir.VectorType(value.type)))

    store(ref, row, column, x.astype(ref.dtype), where)


def _addresses(ref, row, column):
    """(index of a register, the address of its first number) of all registers."""
    i64, memory = ir.IntegerType.get_signless(64), ir.MemRefType(ref.type)
    base = llvm.addrspacecast(llvm.PointerType.get(address_space=_GLOBAL), utils.memref_ptr(ref))
    width = arith.constant(i64, int(np.prod(memory.shape[1:])))
    for index in np.ndindex(row.registers.shape):
        offset = arith.muli(arith.extsi(i64, _first(row.registers[index])), width)
        if column is not None:
            offset = arith.addi(offset, arith.extsi(i64, _first(column.registers[index])))
        yield index, utils.getelementptr(base, [offset], memory.element_type)


def _first(register):
    """The first number of a register."""
    return vector.extract(register, [], [0])


def _alignment(type_):
    return min(utils.bitwidth(type_.element_type) // 8 * type_.shape[0], _WIDEST)


def _one_by_one(ref, row, column, x, where):
    """Row by row, as the interpreter can store, so that it sees what is written."""
    elements, first = int(np.prod(ref.shape[2:])), (0,) * (x.ndim - 1)

    def write(i, _):
        @pl.when(where[(i, *first)] != 0)
        def _there():
            heads = pl.ds(column[(i, *first)] // elements, x.shape[1])
            ref[row[(i, *first)], heads] = x[i].astype(ref.dtype)

    lax.fori_loop(0, x.shape[0], write, None)
