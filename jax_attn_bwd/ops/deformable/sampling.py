"""Where a sampling point lies on its level, and the pixels around it.

Arrays are [B, Q, M] for one sampling point of all queries and heads, [B, M, Q] where the caller has them so,
or [B, Q, M, K] for all points. Of a level by itself, they are [B, M, Q, P], or [B * M, Q, P].
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import fusion
from jax_attn_bwd._core.numerics import accumulator_dtype, finite
from jax_attn_bwd.ops.deformable.spec import Level, Operands, Options

BLOCK = 16  # terms of a sum on a GPU: XLA:GPU writes what it sums over 32 rows or more


class Samples(NamedTuple):
    """One sampling point of every query and head, or all K of them with K in front or behind."""

    x: jax.Array  # [B, Q, M], 0 to 1
    y: jax.Array
    weight: jax.Array


class Location(NamedTuple):
    """A sampling point on its level: x = column + right, y = row + below, all of the shape of x."""

    counts: jax.Array  # bool: the point contributes
    column: jax.Array  # int32, from -1; 0 where the point does not count
    row: jax.Array
    right: jax.Array  # in [0, 1)
    below: jax.Array
    x_between: Any  # bool: the next column has a part in it
    y_between: Any
    dx: jax.Array  # derivatives of x and y by the location: W and H, 0 where the point is clamped
    dy: jax.Array


class Pixels(NamedTuple):
    """The pixels around a sampling point, all of the shape of x; fields as in `Location`."""

    counts: jax.Array
    pixels: tuple[jax.Array, ...]  # int32, indices of the corners on the axis S; S = outside
    right: jax.Array
    below: jax.Array
    dx: jax.Array
    dy: jax.Array


class Corners(NamedTuple):
    """The corners of all sampling points of all queries and heads; n = B * Q * M."""

    at: Pixels  # arrays [K, n]
    weight: jax.Array  # [K, n]
    rows: jax.Array  # int32 [C, K, n], of `value [B * S * M, D]`; B * S * M = outside


class OneLevel(NamedTuple):
    """A level by itself: batch and heads come in front, in one axis or in two."""

    options: Options  # those of a call with this level alone
    points: slice  # of the K points
    pixels: slice  # of the axis S
    merged: bool  # batch and heads in one axis

    def of_points(self, x: jax.Array) -> jax.Array:
        """Takes the level's part of `x [B, Q, M, K]`: [B, M, Q, P], or [B * M, Q, P]."""
        return heads_in_front(x[..., self.points], self.merged)

    def of_pixels(self, x: jax.Array) -> jax.Array:
        """Takes the level's part of `x [B, S, M, D]`: [B, M, H * W, D], or [B * M, H * W, D]."""
        return heads_in_front(x[:, self.pixels], self.merged)

    def pixels_around(self, samples: Samples) -> Pixels:
        """Finds the pixels around `samples` of the level, counted from its first."""
        ((height, width),) = self.options.spatial_shapes
        level = Level(*(np.array(n, np.int32) for n in (height, width, 0)))
        return pixels_around(self.options, level, samples.x, samples.y)


def one_by_one(options: Options, merged: bool) -> Iterator[OneLevel]:
    """Yields the levels."""
    first = start = 0
    for shape, points in zip(options.spatial_shapes, options.num_points, strict=True):
        (height, width), alone = shape, replace(options, spatial_shapes=(shape,), num_points=(points,))
        end = start + height * width
        yield OneLevel(alone, slice(first, first + points), slice(start, end), merged)
        first, start = first + points, end


def heads_in_front(x: jax.Array, merged: bool) -> jax.Array:
    """Transposes `[B, n, M, ...]` to [B, M, n, ...], or to [B * M, n, ...]."""
    B, n, M, *rest = x.shape
    x = x.swapaxes(1, 2)
    return x.reshape(B * M, n, *rest) if merged else x


def heads_behind(x: jax.Array, B: int, merged: bool) -> jax.Array:
    """Does what `heads_in_front` does, backwards."""
    x = x.reshape(B, x.shape[0] // B, *x.shape[1:]) if merged else x
    return x.swapaxes(1, 2)


def compute_dtype(operands: Operands) -> jnp.dtype:
    """Returns the dtype of coordinates, weights and sums: float32 or wider whatever that of the value.

    A location in [0, 1) stored with bfloat16's 8 bits is off by up to W / 512 pixels.
    """
    return max((accumulator_dtype(x.dtype) for x in operands), key=lambda dtype: dtype.itemsize)


def probabilities(logits: jax.Array) -> jax.Array:
    """Returns the softmax over the last axis; zeros where every logit is -inf."""
    top = lax.stop_gradient(logits.max(-1, keepdims=True, initial=-jnp.inf))
    terms = jnp.exp(logits - finite(top))
    total = terms.sum(-1, keepdims=True)
    return terms / jnp.where(total == 0, 1.0, total)


def points(options: Options, operands: Operands) -> Samples:
    """Returns all sampling points, [B, Q, M, K], with their final weights."""
    dtype = compute_dtype(operands)
    locations = operands.sampling_locations.astype(dtype)
    weights = operands.attention_weights.astype(dtype)
    if options.normalize == "softmax":  # a point whose logit is -inf is masked: it must not be read
        locations = jnp.where((weights == -jnp.inf)[..., None], jnp.nan, locations)
        weights = probabilities(weights)
    return Samples(locations[..., 0], locations[..., 1], weights)


def points_in_front(x: jax.Array, heads_first: bool = False) -> jax.Array:
    """Transposes `[B, Q, M, K]` to [K, B, Q, M] or [K, B, M, Q], for a loop over the points."""
    return x.transpose((3, 0, 2, 1) if heads_first else (3, 0, 1, 2))


def samples(options: Options, operands: Operands, heads_first: bool = False) -> Samples:
    """Returns `points` for a loop over them: K in front."""
    return Samples(*(points_in_front(x, heads_first) for x in points(options, operands)))


def all_pixels(options: Options, operands: Operands) -> tuple[Pixels, jax.Array]:
    """Returns where all points lie, and their weights, [B, Q, M, K]."""
    found = points(options, operands)
    level = Level(*(x.reshape(1, 1, 1, -1) for x in options.levels()))
    return pixels_around(options, level, found.x, found.y), found.weight


def corners(options: Options, operands: Operands) -> Corners:
    """Returns the rows of all corners in one array, whose last axis is long: it is computed in vectors."""
    (B, Q, M, K), S = operands.attention_weights.shape, operands.value.shape[1]
    found = fusion.barrier(Samples(*(x.reshape(K, -1) for x in samples(options, operands))))
    at = pixels_around(options, Level(*(x[:, None] for x in options.levels())), found.x, found.y)

    # pixels of each batch entry and head: B * S rows of M heads
    n = np.arange(B * Q * M, dtype=np.int32)
    pixels, first = jnp.stack(at.pixels), n // (Q * M) * (S * M) + n % M
    rows = jnp.where(pixels < S, pixels * M + first[None, None], jnp.int32(B * S * M))
    return Corners(at, found.weight, fusion.barrier(rows))


def read_corners(value: jax.Array, corners: Corners, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Reads the rows of all corners, `[C, K, n, D]`; also tells which are inside, `[C, K, n]`.

    A row outside is 0: what stands in the row that is read for it must not reach a derivative.
    """
    table = value.reshape(-1, value.shape[3])
    last = len(table) - 1
    inside = corners.rows <= last
    rows = table.at[jnp.minimum(corners.rows, last)].get(mode="promise_in_bounds")
    return jnp.where(inside[..., None], rows, 0.0).astype(dtype), inside


def on_all_cores(level: Level) -> Level:
    """Hides `level` behind a sort, for which XLA:CPU runs the loop around it on all cores.

    Without a sort, scatter or library call in it, a small loop becomes a function for one core, and JAX
    0.12 takes every such loop for a small one (XLA, `small_while_loop_hoisting_pass.cc`).
    """
    return level._replace(start=by_a_sort(jnp.asarray(level.start)))


def by_a_sort(index: jax.Array) -> jax.Array:
    """Returns `index`, which is not negative, unchanged by way of a sort."""
    return lax.sort(jnp.stack([index, np.int32(-1)]))[1]


def locate(options: Options, level: Level, x: jax.Array, y: jax.Array) -> Location:
    """Finds where the point (x, y), 0 to 1, lies on `level`. NaN fails each comparison and does not count."""
    x, dx, x_counts, x_between = _coordinate(options, x, level.width)
    y, dy, y_counts, y_between = _coordinate(options, y, level.height)
    counts = x_counts & y_counts
    x, y = jnp.where(counts, x, 0.0), jnp.where(counts, y, 0.0)
    column, row = _floor(x), _floor(y)
    return Location(
        counts, column, row, x - column.astype(x.dtype), y - row.astype(y.dtype), x_between, y_between, dx, dy
    )


def pixels_around(options: Options, level: Level, x: jax.Array, y: jax.Array) -> Pixels:
    """Finds the pixels around the point (x, y), 0 to 1, on `level`, and how it lies between them."""
    # which of the four corners are pixels of the level
    at = locate(options, level, x, y)
    counts, column, row = at.counts, at.column, at.row
    left, right = counts & (column >= 0), counts & at.x_between & (column + 1 < level.width)
    above, below = row >= 0, at.y_between & (row + 1 < level.height)

    # their indices on the axis S; where there is none, one past its end
    first = level.start + row * level.width + column
    outside = sum(height * width for height, width in options.spatial_shapes)
    corners = [(left & above, first)]
    if options.method == "bilinear":
        under = first + level.width
        corners += [(right & above, first + 1), (left & below, under), (right & below, under + 1)]
    pixels = tuple(jnp.where(seen, index, jnp.int32(outside)) for seen, index in corners)
    return Pixels(counts, pixels, at.right, at.below, at.dx, at.dy)


def _coordinate(options: Options, location: jax.Array, size: Any) -> tuple:
    """Returns the coordinate in pixels, its derivative, and two flags.

    The derivative is by the location. The flags tell whether the point can count, and whether the next pixel
    has a part in it: it has none where the coordinate is clamped onto a pixel.
    """
    size = jnp.asarray(size, location.dtype)
    finite = jnp.abs(location) < jnp.inf
    # No point counts below the bound -1. It stands between product and sum, since a compiler that contracts
    # the two to one operation rounds otherwise: (column + 0.5) / W would fall to the left of its column.
    scaled = jnp.maximum(location * size, -1)
    # rounded to a pixel
    if options.method == "discrete":
        nearest = jnp.clip(jnp.floor(scaled + 0.5), 0, size - 1)
        return nearest, jnp.zeros_like(size), finite, False
    # between two pixels, unless it is clamped onto the first or the last
    at = scaled - 0.5
    if options.padding_mode == "border":
        free = (at >= 0) & (at < size - 1)
        clamped = lax.stop_gradient(jnp.clip(at, 0, size - 1))
        return jnp.where(free, at, clamped), jnp.where(free, size, 0.0), finite, free
    return at, size, (at > -1) & (at < size), True


def _floor(x: jax.Array) -> jax.Array:
    """Returns the floor as int32, in vector instructions (XLA's own is a call on older CPUs)."""
    truncated = x.astype(jnp.int32)
    return truncated - (x < truncated.astype(x.dtype)).astype(jnp.int32)


def fractions(at: Pixels) -> tuple[jax.Array, ...]:
    """Returns the bilinear weight of each corner."""
    if len(at.pixels) == 1:
        return (jnp.ones_like(at.right),)
    left, above = 1 - at.right, 1 - at.below
    return above * left, above * at.right, at.below * left, at.below * at.right


def scales(at: Pixels, weight: jax.Array) -> tuple[jax.Array, ...]:
    """Returns each corner's fraction of the weight, 0 where the point is skipped."""
    weight = jnp.where(at.counts, weight, 0.0)
    return tuple(fraction * weight for fraction in fractions(at))


def read(value: jax.Array, pixel: jax.Array, dtype: Any, heads_first: bool = False) -> jax.Array:
    """Reads the pixels of `value [B, S, M, D]` at `[B, Q, M, ...]`, 0 outside: `[B, Q, M, ..., D]`.

    With `heads_first`, M is in front of Q. The select is in the loop that gathers; what a gather fills in,
    XLA:GPU looks up in a kernel of its own. What checks or exports a program takes an index that is outside
    for a mistake, whatever the mode of the gather.
    """
    last = value.shape[1] - 1
    return _inside(rows_at(value, jnp.minimum(pixel, last), heads_first), pixel <= last, dtype)


def rows_at(value: jax.Array, pixel: jax.Array, heads_first: bool = False) -> jax.Array:
    """Reads `value` as `read` does, but the last pixel outside."""
    numbers, sizes = _rows_of(value, pixel, 1, (0, 2), (0, 1 if heads_first else 2))
    return lax.gather(value, pixel[..., None], numbers, sizes, mode="clip")


def _rows_of(
    value: jax.Array, pixel: jax.Array, axis: int, lead: tuple[int, ...], of_pixel: tuple[int, ...]
) -> tuple[lax.GatherDimensionNumbers, tuple[int, ...]]:
    """Returns what a gather of `value [..., D]` at `pixel` of its `axis` takes, and what it reads at a time.

    Each index of its axes `lead` is read by what has that index on the axes `of_pixel` of `pixel`.
    """
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(pixel.ndim,),
        collapsed_slice_dims=(axis,),
        start_index_map=(axis,),
        operand_batching_dims=lead,
        start_indices_batching_dims=of_pixel,
    )
    return numbers, (1,) * (value.ndim - 1) + (value.shape[-1],)


def read_level(planes: jax.Array, pixel: jax.Array, dtype: Any) -> jax.Array:
    """Reads the pixels of a level's `planes [..., n, D]` at `[..., Q, P]`, 0 outside: `[..., Q, P, D]`."""
    lead, last = tuple(range(planes.ndim - 2)), planes.shape[-2] - 1
    numbers, sizes = _rows_of(planes, pixel, len(lead), lead, lead)
    rows = lax.gather(planes, jnp.minimum(pixel, last)[..., None], numbers, sizes, mode="clip")
    return _inside(rows, pixel <= last, dtype)


def _inside(rows: jax.Array, inside: jax.Array, dtype: Any) -> jax.Array:
    return jnp.where(inside[..., None], rows.astype(dtype), 0.0)
