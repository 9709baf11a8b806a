"""Adding the gradient of one sampling point of every query and head to the pixels around it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core.numerics import segment_sums
from jax_attn_bwd.ops.deformable.sampling import Place


def add(dvalue: jax.Array, at: Place, scales: Sequence[jax.Array], dout: jax.Array) -> jax.Array:
    """`dvalue [B, S, M, D]` plus `scale * dout [B, Q, M, D]` at each corner; what lies outside is dropped.

    The compiler orders the additions; on a GPU the order differs from run to run.
    """
    for pixel, scale in zip(at.pixels, scales, strict=True):
        dvalue = _add_rows(dvalue, pixel, scale[..., None] * dout)
    return dvalue


def add_sorted(dvalue: jax.Array, at: Place, scales: Sequence[jax.Array], dout: jax.Array) -> jax.Array:
    """Does what `add` does with the same bits in every run: rows that meet in a pixel are summed in order.

    Queries are sorted by the cell their point lies in; a segmented scan sums the rows of a cell, and its
    last row alone, being the sum, is written.
    """
    order = jnp.argsort(at.cell, axis=1, stable=True)

    def sort(x):
        return jnp.take_along_axis(x, order, axis=1)

    cell = sort(at.cell)
    edge = cell[:, 1:] != cell[:, :-1]
    first = jnp.concatenate([jnp.ones_like(cell[:, :1], bool), edge], axis=1)
    last = jnp.concatenate([edge, jnp.ones_like(cell[:, :1], bool)], axis=1)
    dout = jnp.take_along_axis(dout, order[..., None], axis=1)
    for pixel, scale in zip(at.pixels, scales, strict=True):
        sums = segment_sums(sort(scale)[..., None] * dout, first[..., None], axis=1)
        outside = jnp.int32(dvalue.shape[1])
        dvalue = _add_rows(dvalue, jnp.where(last, sort(pixel), outside), sums)
    return dvalue


def _add_rows(dvalue: jax.Array, pixel: jax.Array, rows: jax.Array) -> jax.Array:
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(3,),
        inserted_window_dims=(1,),
        scatter_dims_to_operand_dims=(1,),
        operand_batching_dims=(0, 2),
        scatter_indices_batching_dims=(0, 2),
    )
    return lax.scatter_add(dvalue, pixel[..., None], rows, numbers, mode="drop")
