"""Adding the gradients of sampling points to the pixels around them."""

from collections.abc import Sequence

import jax
from jax import lax

from jax_attn_bwd.ops.deformable.sampling import Place


def add(dvalue: jax.Array, at: Place, scales: Sequence[jax.Array], dout: jax.Array) -> jax.Array:
    """`dvalue [B, S, M, D]` plus `scale * dout [B, Q, M, D]` at each corner; what lies outside is dropped.

    For all points, `dout` is `[B, Q, M, 1, D]`. The compiler orders the additions; on a GPU the order
    differs from run to run.
    """
    for pixel, scale in zip(at.pixels, scales, strict=True):
        dvalue = _add_rows(dvalue, pixel, scale[..., None] * dout)
    return dvalue


def _add_rows(dvalue: jax.Array, pixel: jax.Array, rows: jax.Array) -> jax.Array:
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(pixel.ndim,),
        inserted_window_dims=(1,),
        scatter_dims_to_operand_dims=(1,),
        operand_batching_dims=(0, 2),
        scatter_indices_batching_dims=(0, 2),
    )
    return lax.scatter_add(dvalue, pixel[..., None], rows, numbers, mode="drop")
