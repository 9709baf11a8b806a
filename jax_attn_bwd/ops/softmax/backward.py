"""Backward of the scaled masked softmax: derivation, then the portable code.

The forward, for one row with entries j and an optional sink logit:

    z_j = scale x_j + bias_j                                                            (1)
    y_j = exp(z_j) / (sum_k exp(z_k) + exp(sink))   where visible, 0 elsewhere          (2)
    y_0 = exp(sink) / (sum_k exp(z_k) + exp(sink))                                      (3)

With a cotangent dy of y, and since dy_k / dz_j = y_k ([k = j] - y_j):

    dot    = sum_k dy_k y_k                                                             (4)
    dz_j   = y_j (dy_j - dot)                                        from (2)           (5)
    dsink  = - y_0 dot                                               from (2), (3)      (6)
    dx_j   = scale dz_j                                              from (1)           (7)
    dbias  = dz,   dscale = sum dz_j x_j,   over broadcast axes      from (1)           (8)

The sum of dz over a row is y_0 dot. In dscale, an offset that all x_j share must not meet the rounding of
that sum, so with c = sum y_j x_j, and a scale that the row shares,

    dscale = sum dz_j (x_j - c) + c y_0 dot                          from (5), (8)      (9)

y = 0 marks what was masked, so y alone is needed for (4) to (7). A row that saw nothing has a constant
y, whatever `fully_masked` filled in, and gradient 0.

References:
  Bridle, Probabilistic interpretation of feedforward classification network outputs, 1990: (5).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import fusion
from jax_attn_bwd._core.numerics import accumulator_dtype, reduce_to
from jax_attn_bwd._core.products import sum_of_products
from jax_attn_bwd._core.sharding import match_type
from jax_attn_bwd.ops.softmax.plan import Plan
from jax_attn_bwd.ops.softmax.spec import Residuals


@partial(jax.jit, static_argnums=0)
def backward(plan: Plan, residuals: Residuals, dy: jax.Array) -> dict[str, jax.Array]:
    """Returns the gradients of the operands in `residuals.wanted`, by name."""
    options = plan.options
    # dz, and dot of each row; a row that saw nothing counts as masked
    y, wanted, scale, x, sink_prob, live = residuals
    y = fusion.read_in_one_kernel(y, options.axis)
    types, dtype = dict(wanted.types), accumulator_dtype(y.dtype)
    factor: Any = options.scale if scale is None else scale.astype(dtype)
    if live is not None:
        y = jnp.where(live, y, 0)
    dz, dot = _dz(y, dy, options.axis, wanted.hidden)

    # of the operands, summed over what they broadcast
    grads = {}
    if "x" in types:
        grads["x"] = factor * dz  # (7)
    if "bias" in types:
        grads["bias"] = reduce_to(dz, types["bias"].shape)  # (8)
    if "scale" in types:
        assert x is not None  # saved where its gradient is wanted
        seen = jnp.where(y == 0, 0, x.astype(dtype))
        shape = types["scale"].shape
        if shape[options.axis] == 1:
            center = sum_of_products(y.astype(dtype), seen, options.axis, keepdims=True)
            grads["scale"] = reduce_to(dz * (seen - center), shape)  # (9)
            if sink_prob is not None:
                grads["scale"] += reduce_to(center * sink_prob * dot, shape)
        else:
            grads["scale"] = reduce_to(dz * seen, shape)  # (8)
    if "sink" in types:
        assert sink_prob is not None  # saved with a sink
        grads["sink"] = reduce_to(-sink_prob * dot, types["sink"].shape)  # (6)
    return {name: match_type(grad, types[name]) for name, grad in grads.items()}


def _dz(y: jax.Array, dy: jax.Array, axis: int, hidden: bool) -> tuple[jax.Array, jax.Array]:
    """Computes (dz, dot); where entries may be hidden, what dy holds at y = 0 is not read."""
    dtype = accumulator_dtype(y.dtype)
    if hidden:  # before the casts, which then need no array of their own
        dy = jnp.where(y == 0, 0, dy)
    y, dy = y.astype(dtype), dy.astype(dtype)
    dot = sum_of_products(y, dy, axis, keepdims=True)  # (4)
    return y * (dy - dot), dot  # (5)
