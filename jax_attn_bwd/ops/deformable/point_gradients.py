"""The gradients of sampling points: equations (4) to (7) and (9) of `backward.py`.

(4), the products <dout, value> at the corners, is taken point by point, on a CPU channel by channel or, of
few samples, at all corners at once, and on a GPU at all points at once, of many samples level by level;
kernels have their own. What follows from it is the same for all.
"""

from collections.abc import Collection, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import fusion
from jax_attn_bwd._core.numerics import ceil_div, total
from jax_attn_bwd._core.products import sum_of_products
from jax_attn_bwd._core.remat import checkpoint
from jax_attn_bwd._core.sharding import full_like_operands
from jax_attn_bwd.ops.deformable import sampling
from jax_attn_bwd.ops.deformable.sampling import Corners, Pixels, Samples
from jax_attn_bwd.ops.deformable.spec import Operands, Options

_CHANNELS = 8  # channels that share one read of an index; 4 and 16 are slower

PointGrads = tuple[jax.Array | None, jax.Array | None, jax.Array | None]  # dloc_x, dloc_y, da


def gradients(wanted: Collection[str], at: Pixels, weight: jax.Array, d: Sequence[jax.Array]) -> PointGrads:
    """Returns (dloc_x, dloc_y, da), of the shape of the sampling points; None where not asked.

    `d` holds <dout, value> at each pixel of `at`; where the point does not count it may be anything.
    """
    da = dx = dy = None
    weight = jnp.where(at.counts, weight, 0)
    if "attention_weights" in wanted:
        terms = (fraction * product for fraction, product in zip(sampling.fractions(at), d, strict=True))
        da = jnp.where(at.counts, total(*terms), 0)  # (5)
    if "sampling_locations" in wanted:
        dx = dy = jnp.zeros_like(weight)
        if len(d) == 4:
            r, b = at.right, at.below
            dx = at.dx * weight * ((1 - b) * (d[1] - d[0]) + b * (d[3] - d[2]))  # (6)
            dy = at.dy * weight * ((1 - r) * (d[2] - d[0]) + r * (d[3] - d[1]))  # (7)
            dx, dy = jnp.where(at.counts, dx, 0), jnp.where(at.counts, dy, 0)
    return dx, dy, da


def by_name(
    options: Options, operands: Operands, dx: jax.Array | None, dy: jax.Array | None, da: jax.Array | None
) -> dict[str, jax.Array]:
    """Returns the operands' gradients by name, from those of points `[B, Q, M, K]`; None has no entry."""
    grads = {}
    if dx is not None and dy is not None:
        grads["sampling_locations"] = jnp.stack((dx, dy), -1)
    if da is not None:
        if options.normalize == "softmax":
            a = sampling.probabilities(operands.attention_weights.astype(da.dtype))
            da = a * (da - sum_of_products(a, da, keepdims=True))  # (9)
        grads["attention_weights"] = da
    return grads


def at_all_points(
    options: Options, wanted: Collection[str], operands: Operands, dout: jax.Array
) -> PointGrads:
    """Returns the points' gradients, [B, Q, M, K] each: all points at once, as a GPU takes them."""
    at, weight = sampling.all_pixels(options, operands)
    read = lambda pixel: sampling.read(operands.value, pixel, dout.dtype)
    d = [(dout[:, :, :, None] * read(pixel)).sum(-1) for pixel in at.pixels]  # (4)
    return gradients(wanted, at, weight, d)  # (5) to (7)


def level_by_level(
    options: Options, wanted: Collection[str], merged: bool, operands: Operands, dout: jax.Array
) -> PointGrads:
    """Returns the points' gradients, [B, Q, M, K] each: all points of a level at once, heads in front."""
    points, found = sampling.points(options, operands), []
    rows = sampling.heads_in_front(dout, merged)[..., None, :]
    for level in sampling.one_by_one(options, merged):
        some = Samples(*map(level.of_points, points))
        at, planes = level.pixels_around(some), level.of_pixels(operands.value)
        d = [(rows * sampling.read_level(planes, pixel, dout.dtype)).sum(-1) for pixel in at.pixels]  # (4)
        found.append(gradients(wanted, at, some.weight, d))  # (5) to (7)
    joined = lambda *parts: sampling.heads_behind(jnp.concatenate(parts, -1), len(dout), merged)
    return jax.tree.map(joined, *found)


def at_corners(
    options: Options, wanted: Collection[str], corners: Corners, operands: Operands, dout: jax.Array
) -> PointGrads:
    """Returns the points' gradients, [B, Q, M, K] each, from a product row for each corner.

    XLA:CPU multiplies the rows in vectors, and a library sums them; a loop of its own over a row would add
    one number at a time.
    """
    (B, Q, M, D), (C, K, n) = dout.shape, corners.rows.shape
    rows, inside = sampling.read_corners(operands.value, corners, dout.dtype)
    products = fusion.barrier(dout.reshape(1, 1, n, D) * rows)
    sums = jnp.matmul(products.reshape(-1, D), jnp.ones(D, dout.dtype), precision=lax.Precision.HIGHEST)
    d = fusion.barrier(jnp.where(inside, sums.reshape(C, K, n), 0))  # (4)
    found = gradients(wanted, corners.at, corners.weight, [*d])  # (5) to (7)
    return jax.tree.map(lambda x: x.reshape(K, B, Q, M).transpose(1, 2, 3, 0), found)


def point_by_point(
    options: Options, wanted: Collection[str], by_channel: bool, operands: Operands, dout: jax.Array
) -> PointGrads:
    """Returns the points' gradients, [B, Q, M, K] each: a loop over the points."""
    value, rows = operands.value, dout
    if by_channel:
        value, rows = _by_channel(value), _by_channel(dout)

    def of_point(_, point):
        level, (x, y, weight) = point
        at = sampling.pixels_around(options, sampling.on_all_cores(level) if by_channel else level, x, y)
        if by_channel:
            zeros = full_like_operands(weight, weight.shape, 0, dout.dtype, (value, rows, weight))
            d = _products_by_channel(value, rows, at.pixels, zeros)  # (4)
        else:
            dot = partial(jnp.einsum, "bqmd,bqmd->bqm", precision=lax.Precision.HIGHEST)
            d = [dot(dout, sampling.read(value, pixel, dout.dtype)) for pixel in at.pixels]  # (4)
        return None, gradients(wanted, at, weight, d)  # (5) to (7)

    # the points come in front: [K, B, M, Q] or [K, B, Q, M]
    points = (options.levels(), sampling.samples(options, operands, heads_first=by_channel))
    _, found = lax.scan(checkpoint(of_point, prevent_cse=False), None, points)
    return jax.tree.map(lambda x: x.transpose((1, 3, 2, 0) if by_channel else (1, 2, 3, 0)), found)


def _by_channel(x: jax.Array) -> jax.Array:
    """Returns `[B, n, M, D]` as `[D / c, c, B, M, n]` for some c; zeros fill up the channels."""
    B, n, M, D = x.shape
    parts = max(1, ceil_div(D, _CHANNELS))
    channels = ceil_div(D, parts)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, parts * channels - D)))
    return x.transpose(3, 0, 2, 1).reshape(parts, channels, B, M, n)


def _products_by_channel(
    value: jax.Array, dout: jax.Array, pixels: Sequence[jax.Array], zeros: jax.Array
) -> list[jax.Array]:
    """Returns <dout, value> at each of the pixels [B, M, Q], 0 outside; value and dout lie `_by_channel`.

    The fastest cache holds the S numbers of a channel and head, and nothing is summed across lanes.
    """
    # where a pixel of a head lies in the numbers of a channel, B * M * S
    parts, channels, B, M, S = value.shape
    first = S * np.arange(B * M, dtype=np.int32).reshape(B, M, 1)
    entries = fusion.barrier([first + jnp.minimum(pixel, S - 1) for pixel in pixels])

    def add_channels(sums, part):
        tables, i = part
        rows = lax.dynamic_index_in_dim(dout, sampling.by_a_sort(i), keepdims=False)
        for table, row in zip(tables, rows, strict=True):
            read = [table.at[entry].get(mode="promise_in_bounds") for entry in entries]
            sums = [s + row * x.astype(row.dtype) for s, x in zip(sums, read, strict=True)]
        return sums, None

    xs = (value.reshape(parts, channels, -1), np.arange(parts, dtype=np.int32))
    sums, _ = lax.scan(add_channels, [zeros] * len(pixels), xs)
    return [jnp.where(pixel < S, s, 0) for pixel, s in zip(pixels, sums, strict=True)]
