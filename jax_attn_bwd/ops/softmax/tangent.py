"""Tangent rule of the scaled masked softmax: derivation, then the code. The letters are those of `backward`.

With tangents dx, dbias, dscale and dsink, of z_j = scale x_j + bias_j

    dz_j = scale dx_j + dscale x_j + dbias_j                                            (1)

and since dy_j / dz_k = y_j ([k = j] - y_k), with y_0 the probability of the sink,

    dot  = sum_k y_k dz_k + y_0 dsink                                                   (2)
    dy_j = y_j (dz_j - dot)                                          from (1), (2)      (3)

The Jacobian by z is symmetric: (3) is equation (5) of `backward` with dz for its dy. What is added to z and
to the sink alike changes no probability. So where a row shares its scale, an offset that all x_j share need
not meet the rounding of the sum: with c = sum_k y_k x_k

    dz_j = scale dx_j + dscale (x_j - c) + dbias_j,   dsink - dscale c for dsink        (4)

y = 0 marks what was masked: its dz is not read. A row that saw nothing is constant and has tangent 0.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.products import sum_of_products
from jax_attn_bwd.ops.softmax.plan import Plan
from jax_attn_bwd.ops.softmax.spec import Operands, Residuals


@partial(jax.jit, static_argnums=0)
def tangent(plan: Plan, residuals: Residuals, tangents: Operands) -> jax.Array:
    """Returns dy, of the shape and dtype of y; None in `tangents` is zero."""
    # what is seen, and tangents where it is
    dtype, axis = accumulator_dtype(residuals.y.dtype), plan.options.axis
    y, scale = residuals.y.astype(dtype), residuals.scale
    if residuals.live is not None:
        y = jnp.where(residuals.live, y, 0)
    seen = y != 0
    read = lambda x: jnp.where(seen, x.astype(dtype), 0)

    # dz of (1), or of (4) where a row shares its scale
    dz, dsink = jnp.zeros_like(y), None
    if tangents.sink is not None:
        dsink = tangents.sink.astype(dtype)
    if tangents.x is not None:
        factor: Any = plan.options.scale if scale is None else scale.astype(dtype)
        dz += factor * read(tangents.x)
    if tangents.bias is not None:
        dz += read(tangents.bias)
    if tangents.scale is not None:
        assert residuals.x is not None  # saved where the scale has a tangent
        x, dscale = read(residuals.x), tangents.scale.astype(dtype)
        if dscale.shape[axis] == 1:
            center = sum_of_products(y, x, axis, keepdims=True)
            x, shift = jnp.where(seen, x - center, 0), -dscale * center
            dsink = shift if dsink is None else dsink + shift  # (4)
        dz += dscale * x  # (1)

    # (2), (3)
    dot = sum_of_products(y, dz, axis, keepdims=True)
    if dsink is not None and residuals.sink_prob is not None:
        dot += residuals.sink_prob * dsink  # (2)
    return (y * (dz - dot)).astype(residuals.y.dtype)  # (3)
