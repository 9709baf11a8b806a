"""Mosaic TPU kernels of the softmax: a block holds whole rows in vector memory.

The forward reads x once and writes y once, the backward reads y and dy once and writes dx. Logits
are kept there between three passes over the columns: their maximum, the sum of exponentials, and the
quotient.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_attn_bwd._core import masks, mosaic_tpu, pallas
from jax_attn_bwd._core.mosaic_tpu import LANES, ZERO
from jax_attn_bwd._core.numerics import finite
from jax_attn_bwd.ops.softmax.kernels import rules as kernel_rules
from jax_attn_bwd.ops.softmax.spec import Options

_DTYPES = ("float32", "bfloat16")
_ELEMENTS = 2**19  # of a block: 2 MiB of float32, or one group of 8 rows if these are longer
_GROUP = 32  # rows that are computed at once
_REGISTERS = 32  # of float32 that a step of a loop over columns holds


def block_rows(rows: int, width: int) -> int:
    """Picks the rows of a block: all, a multiple of 32, which tiles of any dtype divide, or 8 long ones."""
    if rows * width <= _ELEMENTS:
        return rows
    fitting = _ELEMENTS // width
    return min(rows, fitting // 32 * 32 if fitting >= 32 else 8)


def run(
    body: Callable[..., None], name: str, arrays: Sequence[jax.Array], *, scratch: bool, interpret: bool
) -> jax.Array:
    """Calls `body(first row, *array refs, out ref, *scratch ref)` for each group of rows, `[rows, width]`.

    The first array gives the result's shape and dtype; axes of the others may be 1, but for the last.
    """
    # a block of whole rows in each step of the grid, over all other axes
    x = arrays[0]
    *lead, rows, width = x.shape
    size = block_rows(rows, width)

    def spec(array):
        shape = (*(None,) * len(lead), 1 if array.shape[-2] == 1 else size, width)
        whole = [n == 1 for n in array.shape[:-1]]

        def index(*where):
            return (*(ZERO if one else i for one, i in zip(whole, where, strict=True)), ZERO)

        return pl.BlockSpec(shape, index)

    # and within it groups of rows, in a loop, or the program would grow
    def kernel(*refs):
        first = pl.program_id(len(lead)) * size

        def group(start, count, _):
            views = (x if x.shape[0] == 1 else x.at[pl.ds(start, count)] for x in refs)
            body(first + start, *views)

        in_turn(size, _GROUP, group, None)

    # with float32 scratch for a block, if it is asked for
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
    """Merges all axes but the last: `[rows, width]`."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def in_turn(n: int, size: int, step: Callable[[Any, int, Any], Any], carry: Any) -> Any:
    """Runs `carry = step(start, count, carry)` over `size` of n at a time, in a loop, and what is left."""
    whole, rest = divmod(n, size)
    if whole > 1:
        part = lambda i, carry: step(pl.multiple_of(i * size, min(size, LANES)), size, carry)
        carry = lax.fori_loop(jnp.int32(0), jnp.int32(whole), part, carry)
    elif whole:
        carry = step(0, size, carry)
    return step(whole * size, rest, carry) if rest else carry


def over_columns(shape: tuple[int, int], step: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Runs `carry = step(columns, carry)` over slices of columns that cover a block of `shape`."""
    # of as many lanes as registers hold
    rows, width = shape
    size = LANES * max(1, _REGISTERS // -(-rows // 8))
    return in_turn(width, size, lambda start, count, carry: step(pl.ds(start, count), carry), carry)


def _softmax(options: Options, interpret: bool, x: jax.Array, planes: dict) -> jax.Array:
    """Computes y of one shard; without planes and a band all rows are one axis."""
    shape, banded = x.shape, options.is_causal or options.window is not None
    arrays = kernel_rules.read_arrays(x, planes)
    if x.ndim == 1 or not (planes or banded):
        arrays = [as_rows(array) for array in arrays]
    body = partial(_kernel, options, tuple(planes))
    y = run(body, "softmax_forward", arrays, scratch=True, interpret=interpret)
    return y.reshape(shape)


def _kernel(options: Options, planes: tuple[str, ...], first_row, x_ref, *refs) -> None:
    """Computes y of a group of rows; z and then its exponentials stay in scratch."""
    inputs, (y_ref, z_ref) = dict(zip(planes, refs, strict=False)), refs[len(planes) :]
    factor, slope, weight = kernel_rules.exponent(options, "bias" in inputs)

    def logits(columns):
        """Returns z `[rows, columns]`, -inf where nothing is seen."""
        z = x_ref[:, columns].astype(jnp.float32)
        z, terms = z if factor == 1 else z * factor, []
        # the bias, and what hides: a bias of -inf, the mask, the band
        if "bias" in inputs:
            bias = inputs["bias"][:, columns].astype(jnp.float32)
            z = z + (bias if weight == 1 else bias * weight)
            terms.append(jnp.broadcast_to(bias, z.shape) != -jnp.inf)
        if "mask" in inputs:
            terms.append(jnp.broadcast_to(inputs["mask"][:, columns].astype(jnp.int32), z.shape) != 0)
        if options.is_causal or options.window:
            row, column = (lax.broadcasted_iota(jnp.int32, z.shape, axis) for axis in (0, 1))
            row, column = row + first_row, column + columns.start
            terms.append(masks.in_band(row, column, options.is_causal, options.window))
        visible = masks.conjunction(*terms)
        return z if visible is None else jnp.where(visible, z, -jnp.inf)

    # three passes over the columns: the maximum, the sum of exponentials, the quotient
    def greatest(columns, top):
        z_ref[:, columns] = z = logits(columns)
        return jnp.maximum(top, z.max(axis=1, keepdims=True))

    def add(columns, total):
        e = jnp.exp2((z_ref[:, columns] - top) * slope)
        z_ref[:, columns] = e
        return total + e.sum(axis=1, keepdims=True)

    def write(columns, _):
        y_ref[:, columns] = (z_ref[:, columns] * inverse).astype(y_ref.dtype)

    over, zero = (partial(over_columns, x_ref.shape), jnp.zeros((x_ref.shape[0], 1), jnp.float32))
    # a row that sees nothing has top 0 and total 0, and its y is 0
    top = finite(over(greatest, zero - jnp.inf))
    total = over(add, zero)
    inverse = jnp.where(total == 0.0, 0.0, 1.0 / total)
    over(write, None)


# ---- backward: (4), (5) and (7) of `backward.py`; the gradient of a bias is XLA's, see `rules.by_kernels`


def _dx(scale: float, interpret: bool, y: jax.Array, dy: jax.Array) -> jax.Array:
    """Computes dx of one shard, whose rows are one axis."""
    arrays = [as_rows(x) for x in (y, dy)]
    body = partial(_dx_kernel, scale)
    dx = run(body, "softmax_backward", arrays, scratch=False, interpret=interpret)
    return dx.reshape(y.shape)


def _dx_kernel(scale: float, _, y_ref, dy_ref, dx_ref) -> None:
    """Computes dx of a group of rows."""

    def load(columns):
        y = y_ref[:, columns].astype(jnp.float32)
        dy = dy_ref[:, columns].astype(jnp.float32)
        return y, jnp.where(y == 0.0, 0.0, dy)  # what dy holds where y is 0 (masked) is not read

    # two passes over the columns: the dot product of each row, and dx
    def add(columns, dot):
        y, dy = load(columns)
        return dot + (y * dy).sum(axis=1, keepdims=True)

    def write(columns, _):
        y, dy = load(columns)
        dx_ref[:, columns] = (scale * (y * (dy - dot))).astype(dx_ref.dtype)

    over = partial(over_columns, y_ref.shape)
    dot = over(add, jnp.zeros((y_ref.shape[0], 1), jnp.float32))  # (4)
    over(write, None)  # (5), (7)


supports = partial(kernel_rules.unsupported, dtypes=_DTYPES)
forward, backward = kernel_rules.by_kernels(mosaic_tpu.NAME, _softmax, _dx, mosaic_tpu.entry_by_entry)
