"""What the TPU kernels of the softmax share: blocks of whole rows, and loops over their columns."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_attn_bwd._core import mosaic_tpu, pallas
from jax_attn_bwd._core.mosaic_tpu import LANES, ZERO

_ELEMENTS = 2**19  # of a block: 2 MiB of float32, or one group of 8 rows if these are longer
_GROUP = 32  # rows that are computed at once
_REGISTERS = 32  # of float32 that a step of a loop over columns holds


def block_rows(rows: int, width: int) -> int:
    """Rows of a block: all, or a multiple of 32, which every dtype's tile divides; 8 of long rows."""
    if rows * width <= _ELEMENTS:
        return rows
    fitting = _ELEMENTS // width
    return min(rows, fitting // 32 * 32 if fitting >= 32 else 8)


def run(
    body: Callable[..., None], name: str, arrays: Sequence[jax.Array], *, scratch: bool, interpret: bool
) -> jax.Array:
    """`body(first row, *array refs, out ref, *scratch ref)` for each group of rows; refs `[rows, width]`.

    The first array gives the result's shape and dtype; axes of the others may be 1, but for the last.
    """
    x = arrays[0]
    *lead, rows, width = x.shape
    size = block_rows(rows, width)

    def spec(array):
        shape = (*(None,) * len(lead), 1 if array.shape[-2] == 1 else size, width)
        whole = [n == 1 for n in array.shape[:-1]]

        def index(*where):
            return (*(ZERO if one else i for one, i in zip(whole, where, strict=True)), ZERO)

        return pl.BlockSpec(shape, index)

    def kernel(*refs):
        first = pl.program_id(len(lead)) * size

        def group(start, count):
            views = (x if x.shape[0] == 1 else x.at[pl.ds(start, count)] for x in refs)
            body(first + start, *views)

        whole, rest = divmod(size, _GROUP)
        if whole > 1:
            step = lambda i, _: group(pl.multiple_of(i * _GROUP, _GROUP), _GROUP)
            lax.fori_loop(jnp.int32(0), jnp.int32(whole), step, None)
        elif whole:
            group(0, _GROUP)
        if rest:
            group(whole * _GROUP, rest)

    arrays = pallas.vary_alike(tuple(arrays))
    (out,) = mosaic_tpu.launch(
        kernel,
        name,
        interpret=interpret,
        grid=(*lead, -(-rows // size)),
        parallel=len(lead) + 1,
        in_specs=[spec(array) for array in arrays],
        out_specs=[spec(x)],
        out_type=[pallas.out_type(x.shape, x.dtype, arrays)],
        scratch=[pltpu.VMEM((size, width), jnp.float32)] if scratch else [],
    )(*arrays)
    return out


def as_rows(x: jax.Array) -> jax.Array:
    """`[rows, width]`."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def over_columns(shape: tuple[int, int], step: Callable[[Any, Any], Any], carry: Any) -> Any:
    """`carry = step(columns, carry)` over slices of columns that cover a block of `shape`."""
    rows, width = shape
    size = LANES * max(1, _REGISTERS // -(-rows // 8))
    whole = width // size
    if whole > 1:
        carry = lax.fori_loop(
            jnp.int32(0),
            jnp.int32(whole),
            lambda i, carry: step(pl.ds(pl.multiple_of(i * size, LANES), size), carry),
            carry,
        )
    elif whole:
        carry = step(pl.ds(0, size), carry)
    if width % size:
        carry = step(pl.ds(whole * size, width % size), carry)
    return carry
