"""Mosaic TPU kernel of the softmax's backward: one read of y and dy, one write of dx.

It computes (4), (5) and (7) of `backward.py`; the gradient of a bias is XLA's, see `rules.gradients`.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import mosaic_tpu, pallas
from jax_attn_bwd.ops.softmax.kernels import rules as kernel_rules
from jax_attn_bwd.ops.softmax.kernels.tpu_forward import as_rows, over_columns, run
from jax_attn_bwd.ops.softmax.plan import Plan
from jax_attn_bwd.ops.softmax.spec import Residuals


def backward(plan: Plan, residuals: Residuals, dy: jax.Array) -> dict[str, jax.Array]:
    """Computes the gradients of the operands in `residuals.wanted`, by name."""
    return _backward(plan.options, pallas.is_interpreted(mosaic_tpu.NAME), residuals, dy)


@partial(jax.jit, static_argnums=(0, 1))
def _backward(options, interpret, residuals, dy):
    return kernel_rules.gradients(
        partial(_dx, options.scale, interpret), residuals, dy, mosaic_tpu.entry_by_entry
    )


def _dx(scale: float, interpret: bool, y: jax.Array, dy: jax.Array) -> jax.Array:
    """Computes dx of one shard, whose rows are one axis."""
    arrays = [as_rows(x) for x in (y, dy)]
    body = partial(_kernel, scale)
    dx = run(body, "softmax_backward", arrays, scratch=False, interpret=interpret)
    return dx.reshape(y.shape)


def _kernel(scale: float, _, y_ref, dy_ref, dx_ref) -> None:
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
