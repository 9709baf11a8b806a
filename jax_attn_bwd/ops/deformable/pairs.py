"""The gradient of the value on a CPU: each step adds to two pixels, one head after the other.

The two pixels of a row of a cell lie one behind the other, so one addition reaches both. Where one of them
is outside the level it falls on padding: each row of pixels has one more at its end, and the first row has
one before it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core.sharding import full_like_operands
from jax_attn_bwd.ops.deformable import sampling
from jax_attn_bwd.ops.deformable.spec import Level, Operands, Options


class Pairs(NamedTuple):
    """The upper and the lower pair of pixels of K sampling points of n queries, all [K, n]."""

    upper: jax.Array  # int32: left pixel, padding counted; past the end = outside
    lower: jax.Array
    weight: jax.Array
    right: jax.Array  # the right pixel's share
    below: jax.Array  # the lower pair's share


def value_gradient(options: Options, size: int, operands: Operands, dout: jax.Array) -> jax.Array:
    """`dvalue [B, S, M, D]` by equation (8) of `backward`, from `dout [B, Q, M, D]`, `size` queries each."""
    B, Q, M, D = dout.shape
    samples = sampling.samples(options, operands, heads_first=True)
    pixels = 1 + sum(height * (width + 1) for height, width in options.spatial_shapes)
    zeros = full_like_operands(dout.reshape(-1), (pixels * D,), 0, dout.dtype, (operands, dout))
    blocks, rest = divmod(Q, size)

    def add_head(_, i):
        b, m = i // M, i % M
        points = [_take(x, {1: b, 2: m}) for x in samples]  # [K, Q]
        rows = _take(dout, {0: b, 2: m})  # [Q, D]

        def add_block(dvalue, start, size):
            x, y, weight = (lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in points)
            pairs = _pairs(options, pixels, x, y, weight)
            return _add(dvalue, pairs, lax.dynamic_slice_in_dim(rows, start, size))

        starts = size * np.arange(blocks, dtype=np.int32)
        dvalue = lax.scan(lambda sums, i: (add_block(sums, i, size), None), zeros, starts)[0]
        return None, add_block(dvalue, Q - rest, rest) if rest else dvalue

    heads = np.arange(B * M, dtype=np.int32)
    dvalue = lax.scan(add_head, None, heads)[1].reshape(B, M, pixels, D)
    return _without_padding(options, dvalue).transpose(0, 2, 1, 3)


def _take(x: jax.Array, at: dict[int, jax.Array]) -> jax.Array:
    """`x` at one index of each axis in `at`; these axes are dropped."""
    starts = [at.get(axis, np.int32(0)) for axis in range(x.ndim)]
    sizes = [1 if axis in at else n for axis, n in enumerate(x.shape)]
    return lax.squeeze(lax.dynamic_slice(x, starts, sizes), tuple(at))


def _pairs(options: Options, pixels: int, x: jax.Array, y: jax.Array, weight: jax.Array) -> Pairs:
    height, width = np.array(options.spatial_shapes, np.int32).T
    start = 1 + np.cumsum(height * (width + 1), dtype=np.int32) - height * (width + 1)
    level = Level(*(np.repeat(n, options.num_points)[:, None] for n in (height, width, start)))
    at = sampling.locate(options, level, x, y)
    # a point clamped onto the first column has no part in the next: that column is the right one of its pair
    alone = ~jnp.asarray(at.x_between) & (at.column == 0)
    column, right = jnp.where(alone, -1, at.column), jnp.where(alone, 1, at.right)
    upper = level.start + at.row * (level.width + 1) + column
    is_above = at.counts & (at.row >= 0)
    is_below = at.counts & at.y_between & (at.row + 1 < level.height)
    outside = jnp.int32(pixels)
    return Pairs(
        jnp.where(is_above, upper, outside),
        jnp.where(is_below, upper + level.width + 1, outside),
        jnp.where(at.counts, weight, 0),
        right,
        at.below,
    )


def _add(dvalue: jax.Array, pairs: Pairs, rows: jax.Array) -> jax.Array:
    """`dvalue [pixels * D]` plus the shares of `rows [n, D]`."""
    D = rows.shape[1]
    twice = jnp.broadcast_to(rows[:, None], (len(rows), 2, D)).reshape(-1, 2 * D)
    is_left = np.arange(2 * D)[None] < D
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
    )

    def add_point(dvalue, point):
        for start, share in (
            (point.upper, (1 - point.below) * point.weight),
            (point.lower, point.below * point.weight),
        ):
            left, right = ((1 - point.right) * share)[:, None], (point.right * share)[:, None]
            pair = jnp.where(is_left, left, right) * twice
            dvalue = lax.scatter_add(dvalue, start[:, None], pair, numbers, mode="drop")
        return dvalue, None

    starts = pairs._replace(upper=pairs.upper * D, lower=pairs.lower * D)
    return lax.scan(jax.checkpoint(add_point, prevent_cse=False), dvalue, starts)[0]


def _without_padding(options: Options, dvalue: jax.Array) -> jax.Array:
    """`[B, M, pixels, D]` -> `[B, M, S, D]`."""
    B, M, _, D = dvalue.shape
    levels, start = [], 1
    for height, width in options.spatial_shapes:
        end = start + height * (width + 1)
        rows = dvalue[:, :, start:end].reshape(B, M, height, width + 1, D)
        levels.append(rows[:, :, :, :width].reshape(B, M, height * width, D))
        start = end
    return jnp.concatenate(levels, axis=2)
