"""Mosaic TPU kernel of the softmax's forward: one read of x, one write of y.

A block holds whole rows in vector memory. Logits are kept there between three passes over the columns: their
maximum, the sum of exponentials, and the quotient.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import masks, mosaic_tpu, pallas
from jax_attn_bwd._core.numerics import finite
from jax_attn_bwd._core.sharding import tie
from jax_attn_bwd.ops.softmax.kernels import rules as kernel_rules
from jax_attn_bwd.ops.softmax.kernels import tpu_rows as rows
from jax_attn_bwd.ops.softmax.spec import Operands, Options, Result

DTYPES = ("float32", "bfloat16")


def supports(options: Options, operands: Operands) -> str | None:
    """Why the kernel cannot run this call; None if it can."""
    return kernel_rules.unsupported(options, operands, DTYPES)


def forward(options: Options, operands: Operands) -> Result:
    """The softmax; see `supports`."""
    return _forward(options, pallas.is_interpreted(mosaic_tpu.NAME), operands)


@partial(jax.jit, static_argnums=(0, 1))
def _forward(options, interpret, operands):
    x, _, mask, bias, _ = operands
    planes = {n: plane for n, plane in (("mask", mask), ("bias", bias)) if plane is not None}

    def kernel(x, planes):
        return _softmax(options, interpret, x, planes)

    call = mosaic_tpu.in_turn(lambda *given: pallas.on_local_shards(kernel, lambda x, _: x, given))
    y = call(x, planes)
    return tie(Result(y, None, None), operands)


def _softmax(options: Options, interpret: bool, x: jax.Array, planes: dict) -> jax.Array:
    shape, banded = x.shape, options.is_causal or options.window is not None
    arrays = [x]
    for name, plane in planes.items():
        plane = plane.astype(jnp.int8) if name == "mask" else plane
        arrays.append(jnp.broadcast_to(plane, (*plane.shape[:-1], shape[-1])))
    if x.ndim == 1 or not (planes or banded):
        arrays = [rows.as_rows(array) for array in arrays]
    body = partial(_kernel, options, tuple(planes))
    y = rows.run(body, "softmax_forward", arrays, scratch=True, interpret=interpret)
    return y.reshape(shape)


def _kernel(options: Options, planes: tuple[str, ...], first_row, x_ref, *refs) -> None:
    inputs, (y_ref, z_ref) = dict(zip(planes, refs, strict=False)), refs[len(planes) :]
    factor, slope, weight = kernel_rules.exponent(options, "bias" in inputs)

    def logits(columns):
        z = x_ref[:, columns].astype(jnp.float32)
        z, terms = z if factor == 1 else z * factor, []
        if "bias" in inputs:
            bias = inputs["bias"][:, columns].astype(jnp.float32)
            z, terms = (
                z + (bias if weight == 1 else bias * weight),
                [jnp.broadcast_to(bias, z.shape) != -jnp.inf],
            )
        if "mask" in inputs:
            terms.append(jnp.broadcast_to(inputs["mask"][:, columns].astype(jnp.int32), z.shape) != 0)
        if options.is_causal or options.window:
            row, column = (lax.broadcasted_iota(jnp.int32, z.shape, axis) for axis in (0, 1))
            row, column = row + first_row, column + columns.start
            terms.append(masks.in_band(row, column, options.is_causal, options.window))
        visible = masks.conjunction(*terms)
        return z if visible is None else jnp.where(visible, z, -jnp.inf)

    def greatest(columns, top):
        z_ref[:, columns] = z = logits(columns)
        return jnp.maximum(top, z.max(axis=1, keepdims=True))

    def add(columns, total):
        e = jnp.exp2((z_ref[:, columns] - top) * slope)
        z_ref[:, columns] = e
        return total + e.sum(axis=1, keepdims=True)

    def write(columns, _):
        y_ref[:, columns] = (z_ref[:, columns] * inverse).astype(y_ref.dtype)

    over, zero = (partial(rows.over_columns, x_ref.shape), jnp.zeros((x_ref.shape[0], 1), jnp.float32))
    top = finite(over(greatest, zero - jnp.inf))
    total = over(add, zero)
    inverse = jnp.where(total == 0.0, 0.0, 1.0 / total)
    over(write, None)
