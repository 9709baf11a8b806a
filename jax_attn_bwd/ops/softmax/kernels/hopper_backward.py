"""Mosaic GPU kernel of the softmax's backward: one read of y and dy, one write of dx.

It computes (4), (5) and (7) of `backward.py`; the gradient of a bias is XLA's, see `rules.gradients`.
"""

import functools
from functools import partial

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import mosaic_gpu, pallas
from jax_attn_bwd.ops.softmax.kernels import rules as kernel_rules
from jax_attn_bwd.ops.softmax.kernels.hopper_forward import (
    RowBlock,
    Tiling,
    collapse,
    padded_width,
    run,
    view,
)
from jax_attn_bwd.ops.softmax.plan import Plan
from jax_attn_bwd.ops.softmax.spec import Residuals

_ELEMENTS = 4096  # of a tile: y and dy take 64 registers of a thread


def backward(plan: Plan, residuals: Residuals, dy: jax.Array) -> dict[str, jax.Array]:
    """Computes the gradients of the operands in `residuals.wanted`, by name."""
    return _backward(plan.options, pallas.is_interpreted(mosaic_gpu.NAME), residuals, dy)


@partial(jax.jit, static_argnums=(0, 1))
def _backward(options, interpret, residuals, dy):
    return kernel_rules.gradients(partial(_dx, options.scale, interpret), residuals, dy)


def _dx(scale: float, interpret: bool, y: jax.Array, dy: jax.Array) -> jax.Array:
    """Computes dx of one shard: the rows of all axes are one axis, of padded width."""
    count = y.size // y.shape[-1]
    width = padded_width(y.shape[-1], y.dtype, count)
    merged = collapse(y.shape[:-1], [])
    tiling = Tiling.default_for(count, width, y.dtype, 2 * y.dtype.itemsize, _ELEMENTS)
    arrays = [view(x, merged) for x in (y, dy)]
    body = partial(_kernel, scale)
    dx = run(body, "softmax_backward", arrays, tiling=tiling, interpret=interpret)
    return dx.reshape(*y.shape[:-1], width)[..., : y.shape[-1]]


def _kernel(scale: float, block: RowBlock) -> None:
    """Computes dx of the rows of a block."""
    tiling = block.tiling

    def fragments(k):
        """Yields y and dy `[rows, columns]` of each fragment of the k-th tile."""
        for i in range(tiling.fragments):
            y = block.fragment(0, k, i).astype(jnp.float32)
            dy = block.fragment(1, k, i).astype(jnp.float32)
            yield y, jnp.where(y == 0, 0.0, dy)  # what dy holds where y is 0 (masked) is not read

    def add(k, last, dot):
        return functools.reduce(jnp.add, (y * dy for y, dy in fragments(k)), dot)

    # forwards over the tiles of a row the dot product, backwards dx, from what is still there
    dot = block.row_value("sum", block.forwards(add, block.full(0.0)))  # (4)
    block.backwards(lambda k, last: (scale * (y * (dy - dot)) for y, dy in fragments(k)))  # (5), (7)
