"""Mosaic TPU kernel of the softmax's backward: one read of y and dy, one write of dx.

The equations are those of `backward.py`. The kernel computes dx, (4), (5) and (7); the gradient of a bias is
a reduction of dz over what the bias broadcasts, which XLA fuses with (4) and (5) from y and dy.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import mosaic_tpu, pallas
from jax_attn_bwd._core.sharding import match_type, reshard_like
from jax_attn_bwd.ops.softmax.kernels import rules as kernel_rules
from jax_attn_bwd.ops.softmax.kernels import tpu_forward as rows
from jax_attn_bwd.ops.softmax.spec import Options, Residuals


def backward(options: Options, residuals: Residuals, dy: jax.Array) -> dict[str, jax.Array]:
    """Gradients of the operands in `residuals.wanted`, by name."""
    return _backward(options, pallas.is_interpreted(mosaic_tpu.NAME), residuals, dy)


@partial(jax.jit, static_argnums=(0, 1))
def _backward(options, interpret, residuals, dy):
    y, types = residuals.y, dict(residuals.wanted.types)
    dy = reshard_like(dy, y, tuple(range(y.ndim)))
    grads = {}
    if "x" in types:
        kernel = partial(_dx, options.scale, interpret)
        call = mosaic_tpu.in_turn(lambda *given: pallas.on_local_shards(kernel, lambda y, _: y, given))
        grads["x"] = call(y, dy)
    if "bias" in types:
        grads["bias"] = kernel_rules.bias_gradient(y, dy, types["bias"].shape)
    return {name: match_type(grad, types[name]) for name, grad in grads.items()}


def _dx(scale: float, interpret: bool, y: jax.Array, dy: jax.Array) -> jax.Array:
    arrays = [rows.as_rows(x) for x in (y, dy)]
    body = partial(_kernel, scale)
    dx = rows.run(body, "softmax_backward", arrays, scratch=False, interpret=interpret)
    return dx.reshape(y.shape)


def _kernel(scale: float, _, y_ref, dy_ref, dx_ref) -> None:
    def load(columns):
        y = y_ref[:, columns].astype(jnp.float32)
        dy = dy_ref[:, columns].astype(jnp.float32)
        return y, jnp.where(y == 0.0, 0.0, dy)  # what dy holds where y is 0 (masked) is not read

    def add(columns, dot):
        y, dy = load(columns)
        return dot + (y * dy).sum(axis=1, keepdims=True)

    def write(columns, _):
        y, dy = load(columns)
        dx_ref[:, columns] = (scale * (y * (dy - dot))).astype(dx_ref.dtype)

    over = partial(rows.over_columns, y_ref.shape)
    dot = over(add, jnp.zeros((y_ref.shape[0], 1), jnp.float32))  # (4)
    over(write, None)  # (5), (7)
