"""The gradient of the value, equation (8) of `backward.py`, added up in the way that suits the device.

`point_by_point` is the portable loop, `at_corners` the same sum at once, for a CPU and few samples, and
`in_any_order` for a GPU; there `level_by_level` takes many samples.

**In pairs**, on a CPU: each step adds to two pixels, one head after the other. The two pixels of a row of a
cell lie one behind the other, so one addition reaches both. Where one of them is outside the level it falls
on padding: each row of pixels has one more at its end, and the first row has one before it.

**In runs**, on a GPU: summed in an order that never changes, in a few kernels. The samples of a head are
sorted by cell: what lies between four pixels, those at the border outside the level. The samples of a cell
are then a run, and each corner of a pixel has one. Every sum has `BLOCK` terms, so that XLA takes what it
gathers into its loop and writes no row of a sample:

    run of a cell = its rows to the end of a block + blocks to the end of a block of blocks + rest

`following` holds, for each block of sorted rows, the sum of those of its first run; `rest`, for each block of
blocks, all that is left of its first run from there on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import fusion
from jax_attn_bwd._core.remat import checkpoint
from jax_attn_bwd._core.sharding import full_like_operands
from jax_attn_bwd.ops.deformable import sampling
from jax_attn_bwd.ops.deformable.sampling import BLOCK, Corners, Location, Pixels, Samples
from jax_attn_bwd.ops.deformable.spec import Level, Operands, Options

_GROUP_BYTES = 1 << 24  # of `following`, up to which it may be larger than `dout`


def point_by_point(options: Options, operands: Operands, dout: jax.Array) -> jax.Array:
    """Returns `dvalue [B, S, M, D]` from `dout [B, Q, M, D]`: a loop over the points."""

    def add_point(dvalue, point):
        level, (x, y, weight) = point
        at = sampling.pixels_around(options, level, x, y)
        at, scales = fusion.barrier((at, sampling.scales(at, weight)))
        return _add(dvalue, at, scales, dout), None

    value = operands.value
    zeros = full_like_operands(value, value.shape, 0, dout.dtype, (operands, dout))
    points = (options.levels(), sampling.samples(options, operands))
    return lax.scan(checkpoint(add_point, prevent_cse=False), zeros, points)[0]


def in_any_order(options: Options, operands: Operands, dout: jax.Array) -> jax.Array:
    """Returns `dvalue [B, S, M, D]` from `dout [B, Q, M, D]`, added up in the order of the moment."""
    at, weight = sampling.all_pixels(options, operands)
    value = operands.value
    zeros = full_like_operands(value, value.shape, 0, dout.dtype, (operands, dout))
    return _add(zeros, at, sampling.scales(at, weight), dout[:, :, :, None])


def level_by_level(options: Options, merged: bool, operands: Operands, dout: jax.Array) -> jax.Array:
    """Returns `dvalue [B, S, M, D]` from `dout [B, Q, M, D]`, added up in the order of the moment.

    A scatter of a level and corner adds to one head's pixels after the other's: these lie side by side.
    """
    points, parts = sampling.points(options, operands), []
    rows = sampling.heads_in_front(dout, merged)[..., None, :]
    for level in sampling.one_by_one(options, merged):
        some = Samples(*map(level.of_points, points))
        at, planes = level.pixels_around(some), level.of_pixels(operands.value)
        sums = full_like_operands(planes, planes.shape, 0, dout.dtype, (operands, dout))
        parts.append(_add(sums, at, sampling.scales(at, some.weight), rows, tuple(range(planes.ndim - 2))))
    return sampling.heads_behind(jnp.concatenate(parts, -2), len(dout), merged)


def at_corners(corners: Corners, operands: Operands, dout: jax.Array, by_pixel: bool) -> jax.Array:
    """Returns `dvalue [B, S, M, D]` from `dout [B, Q, M, D]`: one sum of a row for each corner.

    One number finds a row sooner than three do (`by_pixel`), but under `vmap` XLA:CPU copies what is reshaped
    to an axis of one entry.
    """
    value, (B, Q, M, D) = operands.value, dout.shape
    scales = fusion.barrier(jnp.stack(sampling.scales(corners.at, corners.weight)))
    rows = (scales[..., None] * dout.reshape(1, 1, -1, D)).reshape(-1, D)
    zeros = full_like_operands(value.reshape(-1), (value.size,), 0, dout.dtype, (operands, dout))
    if by_pixel:
        n = np.arange(B * Q * M, dtype=np.int32)
        at = jnp.stack(jnp.broadcast_arrays(n // (Q * M), jnp.stack(corners.at.pixels), n % M), -1)
        zeros = fusion.barrier(zeros).reshape(value.shape)  # filled in one loop
        return _add_rows(zeros, at.reshape(-1, 3), rows, (0, 1, 2))
    sums = _add_rows(zeros, corners.rows.reshape(-1, 1) * D, rows)
    # XLA:CPU takes four times as long to transpose, for a product behind, what it knows as one long row
    return fusion.barrier(sums.reshape(value.shape))


def _add(
    dvalue: jax.Array,
    at: Pixels,
    scales: Sequence[jax.Array],
    dout: jax.Array,
    batch_axes: tuple[int, ...] = (0, 2),
) -> jax.Array:
    """Adds `scale * dout [B, Q, M, D]` to `dvalue [B, S, M, D]` at each corner; what lies outside is dropped.

    For all points, `dout` is `[B, Q, M, 1, D]`. With other `batch_axes`, all have batch and heads there. The
    compiler orders the additions; on a GPU the order differs from run to run.
    """
    (axis,) = set(range(dvalue.ndim - 1)).difference(batch_axes)
    for pixel, scale in zip(at.pixels, scales, strict=True):
        dvalue = _add_rows(dvalue, pixel[..., None], scale[..., None] * dout, (axis,), batch_axes)
    return dvalue


def _add_rows(
    x: jax.Array,
    at: jax.Array,
    rows: jax.Array,
    axes: tuple[int, ...] = (0,),
    batch_axes: tuple[int, ...] = (),
) -> jax.Array:
    """Adds each of `rows [..., D]` where `at` says on the `axes` of `x`; those outside are dropped.

    In `x` of one axis rows lie one behind the other. Each index of the `batch_axes` has an `x` of its own.
    """
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(rows.ndim - 1,),
        inserted_window_dims=axes if x.ndim > 1 else (),
        scatter_dims_to_operand_dims=axes,
        operand_batching_dims=batch_axes,
        scatter_indices_batching_dims=batch_axes,
    )
    return lax.scatter_add(x, at, rows, numbers, mode="drop")


# In pairs ------------------------------------------------------------------------------------------------


class Pairs(NamedTuple):
    """The upper and the lower pair of pixels of K sampling points of n queries, all [K, n]."""

    upper: jax.Array  # int32: left pixel, padding counted; past the end = outside
    lower: jax.Array
    weight: jax.Array
    right: jax.Array  # the right pixel's fraction
    below: jax.Array  # the lower pair's fraction


def in_pairs(options: Options, size: int, operands: Operands, dout: jax.Array) -> jax.Array:
    """Returns `dvalue [B, S, M, D]` from `dout [B, Q, M, D]`, `size` queries of a head at a time."""
    # every head begins with zeros for its padded pixels, [pixels * D]
    B, Q, M, D = dout.shape
    samples = sampling.samples(options, operands, heads_first=True)
    pixels = 1 + sum(height * (width + 1) for height, width in options.spatial_shapes)
    zeros = full_like_operands(dout.reshape(-1), (pixels * D,), 0, dout.dtype, (operands, dout))
    blocks, rest = divmod(Q, size)

    # a head after the other, in each a block of queries after the other: [B * M, pixels * D]
    def add_head(_, i):
        b, m = i // M, i % M
        points = [_at_head(x, {1: b, 2: m}) for x in samples]  # [K, Q]
        rows = _at_head(dout, {0: b, 2: m})  # [Q, D]

        def add_block(dvalue, start, size):
            x, y, weight = (lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in points)
            pairs = _pairs(options, pixels, x, y, weight)
            return _add_pairs(dvalue, pairs, lax.dynamic_slice_in_dim(rows, start, size))

        starts = size * np.arange(blocks, dtype=np.int32)
        dvalue = lax.scan(lambda sums, i: (add_block(sums, i, size), None), zeros, starts)[0]
        return None, add_block(dvalue, Q - rest, rest) if rest else dvalue

    heads = np.arange(B * M, dtype=np.int32)
    dvalue = lax.scan(add_head, None, heads)[1].reshape(B, M, pixels, D)
    return _without_padding(options, dvalue).transpose(0, 2, 1, 3)


def _at_head(x: jax.Array, at: dict[int, jax.Array]) -> jax.Array:
    """Takes `x` at one index of each axis in `at`; these axes are dropped."""
    starts = [at.get(axis, np.int32(0)) for axis in range(x.ndim)]
    sizes = [1 if axis in at else n for axis, n in enumerate(x.shape)]
    return lax.squeeze(lax.dynamic_slice(x, starts, sizes), tuple(at))


def _pairs(options: Options, pixels: int, x: jax.Array, y: jax.Array, weight: jax.Array) -> Pairs:
    """Finds the pairs of points [K, n]; `pixels` is the number of pixels with padding."""
    # where each level begins, with the padding of its rows
    height, width = np.array(options.spatial_shapes, np.int32).T
    start = 1 + np.cumsum(height * (width + 1), dtype=np.int32) - height * (width + 1)
    level = Level(*(np.repeat(n, options.num_points)[:, None] for n in (height, width, start)))
    at = sampling.locate(options, level, x, y)
    column, right = _in_cell(at.column, at.right, at.x_between)
    upper = level.start + at.row * (level.width + 1) + column

    # a pair whose row of pixels is outside is dropped
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


def _add_pairs(dvalue: jax.Array, pairs: Pairs, rows: jax.Array) -> jax.Array:
    """Adds the shares of `rows [n, D]` to `dvalue [pixels * D]`."""
    # a row twice, for the left and the right pixel: [n, 2 * D]
    D = rows.shape[1]
    twice = jnp.broadcast_to(rows[:, None], (len(rows), 2, D)).reshape(-1, 2 * D)
    is_left = np.arange(2 * D)[None] < D

    # point by point, to the upper and to the lower pair
    def add_point(dvalue, point):
        for start, fraction in (
            (point.upper, (1 - point.below) * point.weight),
            (point.lower, point.below * point.weight),
        ):
            left, right = ((1 - point.right) * fraction)[:, None], (point.right * fraction)[:, None]
            pair = jnp.where(is_left, left, right) * twice
            dvalue = _add_rows(dvalue, start[:, None], pair)
        return dvalue, None

    starts = pairs._replace(upper=pairs.upper * D, lower=pairs.lower * D)
    return lax.scan(checkpoint(add_point, prevent_cse=False), dvalue, starts)[0]


def _without_padding(options: Options, dvalue: jax.Array) -> jax.Array:
    """Drops the padding: `[B, M, pixels, D]` -> `[B, M, S, D]`."""
    B, M, _, D = dvalue.shape
    levels, start = [], 1
    for height, width in options.spatial_shapes:
        end = start + height * (width + 1)
        rows = dvalue[:, :, start:end].reshape(B, M, height, width + 1, D)
        levels.append(rows[:, :, :, :width].reshape(B, M, height * width, D))
        start = end
    return jnp.concatenate(levels, axis=2)


# In runs -------------------------------------------------------------------------------------------------


class Runs(NamedTuple):
    """The samples of each head sorted by cell, all [B, M, n, BLOCK]."""

    cell: jax.Array  # int32; the number of cells where the sample does not count
    query: jax.Array
    right: jax.Array
    below: jax.Array
    weight: jax.Array


class RunSums(NamedTuple):
    """Sums of the runs that lead blocks of `Runs`, and blocks of such blocks. C corners."""

    cell: jax.Array  # int32 [B, M, n / BLOCK, BLOCK]
    following: jax.Array  # [B, M, n / BLOCK, BLOCK, C, D]
    rest_cell: jax.Array  # int32 [B, M, n / BLOCK]
    rest: jax.Array  # [B, M, n / BLOCK, C, D]


def in_runs(options: Options, operands: Operands, dout: jax.Array) -> jax.Array:
    """Returns `dvalue [B, S, M, D]` from `dout [B, Q, M, D]`."""
    samples = sampling.points(options, operands)
    parts: list[jax.Array] = []
    B, Q, M, D = dout.shape
    if not isinstance(Q, int):
        raise NotImplementedError(
            "multi_scale_deformable_attention: for a GPU, export the gradient of the value with a known "
            "number of queries, or without deterministic_sums=True"
        )

    # one group of levels after the other, in the same memory: the pixels of each are a part of dvalue
    for levels in _groups(options, dout):
        samples, parts = fusion.barrier((samples, parts))
        first, shapes = sum(options.num_points[: levels.start]), options.spatial_shapes[levels]
        of_group = replace(options, spatial_shapes=shapes, num_points=options.num_points[levels])
        taken = Samples(*(x[..., first : first + sum(of_group.num_points)] for x in samples))
        if D == 0 or any(n == 0 for n in taken.x.shape):
            shape = (B, sum(height * width for height, width in shapes), M, D)
            parts.append(full_like_operands(operands.value, shape, 0, dout.dtype, (samples, dout)))
        else:
            parts.append(checkpoint(partial(_of_levels, of_group))(taken, dout))
    return jnp.concatenate(parts, axis=1)


def _groups(options: Options, dout: jax.Array) -> Iterator[slice]:
    """Yields levels to take together: few launches, while `following` is not much larger than `dout`."""
    is_known, first, points = all(isinstance(n, int) for n in dout.shape), 0, 0
    for level, more in enumerate(options.num_points):
        points += more
        growth = points * _corners(options) / BLOCK  # of the size of dout
        is_small = is_known and growth * dout.size * dout.dtype.itemsize <= _GROUP_BYTES
        if level > first and growth > 2 and not is_small:
            yield slice(first, level)
            first, points = level, more
    yield slice(first, len(options.num_points))


def _of_levels(options: Options, samples: Samples, dout: jax.Array) -> jax.Array:
    """Returns the gradient of the pixels of levels whose points `samples` are."""
    runs, starts = fusion.barrier(_sorted(options, samples))

    # of each block of BLOCK sorted rows, then of each block of blocks, what its first run has in it
    rows = sampling.rows_at(dout, runs.query, heads_first=True)  # [B, M, n, BLOCK, D]
    following = _sum_of_first_run(_at_corners(options, runs, rows), runs.cell)  # [B, M, n, C, D]
    cell, following = _blocks(runs.cell[..., 0]), _blocks(following)
    rest = _all_that_follow(_sum_of_first_run(following, cell), cell[..., 0])
    sums = RunSums(cell, following, cell[..., 0], rest)

    # one corner of all pixels after the other, in the same memory
    runs, starts, sums = fusion.barrier((runs, starts, sums))
    dvalue = _run_of_corner(options, 0, runs, starts, sums, dout)
    for corner in range(1, _corners(options)):
        runs, starts, sums, dvalue = fusion.barrier((runs, starts, sums, dvalue))
        dvalue += _run_of_corner(options, corner, runs, starts, sums, dout)
    return dvalue


def _corners(options: Options) -> int:
    return 4 if options.method == "bilinear" else 1


def _sorted(options: Options, samples: Samples) -> tuple[Runs, jax.Array]:
    """Returns the runs, and where in the n * BLOCK sorted samples each cell's begins: [B, M, cells]."""
    # the samples of each head, [B, M, Q * K]; one that does not count is in the cell behind the last
    B, Q, M, K = samples.x.shape
    cells, at, cell = _cells(options, samples)
    cell, *parts = (
        x.transpose(0, 2, 1, 3).reshape(B, M, Q * K)
        for x in (
            jnp.where(at.counts, cell, cells),
            at.right,
            at.below,
            jnp.where(at.counts, samples.weight, 0),
        )
    )

    # sorted by cell, equal ones as they were, and made up to whole blocks of blocks
    keys = jnp.pad(cell, ((0, 0), (0, 0), (0, -(Q * K) % BLOCK**2)), constant_values=cells)
    places = jnp.zeros_like(keys) + lax.iota(np.int32, keys.shape[2])[None, None]
    keys, order = lax.sort((keys, places), num_keys=1, is_stable=True)

    # a run begins where the cell is another than that of the sample before
    leads = jnp.concatenate([jnp.ones_like(keys[..., :1], bool), keys[..., 1:] != keys[..., :-1]], axis=2)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=(2,),
        scatter_dims_to_operand_dims=(2,),
        operand_batching_dims=(0, 1),
        scatter_indices_batching_dims=(0, 1),
    )
    zeros = full_like_operands(keys, (B, M, cells), 0, np.int32, keys)
    starts = lax.scatter(
        zeros, jnp.where(leads, keys, cells)[..., None], places, numbers, mode="drop", unique_indices=True
    )

    # the rest of a sample goes with it
    order = _blocks(order)
    return Runs(_blocks(keys), order // K, *(_gather(x, order, heads=1) for x in parts)), starts


def _cells(options: Options, samples: Samples) -> tuple[int, Location, jax.Array]:
    """Returns how many cells there are, where samples lie in them, and in which: int32 [B, Q, M, K].

    With `method="discrete"` a cell is a pixel.
    """
    # the first cell of each level; a level of H x W pixels has (H + 1) x (W + 1)
    level = options.levels()
    is_cell = options.method == "bilinear"
    sizes = [(height + is_cell) * (width + is_cell) for height, width in options.spatial_shapes]
    first = np.repeat(np.cumsum(sizes) - sizes, options.num_points).astype(np.int32)
    level = Level(*(x.reshape(1, 1, 1, -1) for x in (level.height, level.width, first)))
    at = sampling.locate(options, level, samples.x, samples.y)
    if not is_cell:
        return sum(sizes), at, at.row * level.width + at.column + level.start

    # a cell at the border has pixels outside: rows and columns begin at -1
    column, right = _in_cell(at.column, at.right, at.x_between)
    row, below = _in_cell(at.row, at.below, at.y_between)
    cell = (row + 1) * (level.width + 1) + column + 1 + level.start
    return sum(sizes), at._replace(right=right, below=below), cell


def _in_cell(index: jax.Array, fraction: jax.Array, between: Any) -> tuple[jax.Array, jax.Array]:
    """Places a point on an axis of cells: one clamped onto the first pixel ends the cell before.

    It has no part in the next pixel.
    """
    alone = ~jnp.asarray(between) & (index == 0)
    return jnp.where(alone, -1, index), jnp.where(alone, 1, fraction)


def _at_corners(options: Options, runs: Runs, rows: jax.Array) -> jax.Array:
    """Multiplies `rows [..., D]` by their weights at each corner: [..., C, D]."""
    rows = (runs.weight[..., None] * rows)[..., None, :]
    if _corners(options) == 1:
        return rows
    shape = (*rows.shape[:-2], 4, rows.shape[-1])
    right, below = (jnp.broadcast_to(x[..., None, None], shape) for x in (runs.right, runs.below))
    is_right, is_below = (
        np.array(flags).reshape((1,) * (rows.ndim - 2) + (4, 1))
        for flags in ([False, True, False, True], [False, False, True, True])
    )
    # the number of factors for each channel costs a GPU less than an array of factors for each corner
    return jnp.where(is_below, below, 1 - below) * (jnp.where(is_right, right, 1 - right) * rows)


def _sum_of_first_run(rows: jax.Array, cell: jax.Array) -> jax.Array:
    """Sums the first run of each block: `rows [B, M, n, BLOCK, C, D]`, `cell [B, M, n, BLOCK]`."""
    leads = cell == cell[..., :1]
    return jnp.where(leads[..., None, None], rows, 0).sum(3)


def _all_that_follow(rows: jax.Array, cell: jax.Array) -> jax.Array:
    """Sums from each of `rows [B, M, n, C, D]` on those of the same `cell [B, M, n]`."""
    # within blocks, [B, M, n / BLOCK, BLOCK, C, D]; what fills up the last is in no cell
    n, missing = cell.shape[2], -cell.shape[2] % BLOCK
    rows = _blocks(jnp.pad(rows, ((0, 0), (0, 0), (0, missing), (0, 0), (0, 0))))
    cell = _blocks(jnp.pad(cell, ((0, 0), (0, 0), (0, missing)), constant_values=-1))
    from_there = np.triu(np.ones((BLOCK, BLOCK), bool))[None, None, None]
    same = (cell[..., :, None] == cell[..., None, :]) & from_there
    sums = jnp.where(same[..., None, None], rows[:, :, :, None], 0).sum(4)

    # and what the first run of the next block has from there on, where a block ends with the same cell
    if sums.shape[2] != 1:
        first = cell[..., 0]
        rest = _all_that_follow(_sum_of_first_run(rows, cell), first)
        first, rest = (jnp.roll(x, -1, axis=2) for x in (first, rest))  # the last block's rows end none
        last = lax.broadcasted_iota(np.int32, cell.shape, 2) == cell.shape[2] - 1
        goes_on = (cell == first[..., None]) & ~last
        sums += jnp.where(goes_on[..., None, None], rest[:, :, :, None], 0)
    return sums.reshape(*sums.shape[:2], -1, *sums.shape[4:])[:, :, :n]


def _run_of_corner(
    options: Options, corner: int, runs: Runs, starts: jax.Array, sums: RunSums, dout: jax.Array
) -> jax.Array:
    """Sums, for each pixel, the samples of the cell that has the pixel for this corner: [B, S, M, D]."""
    # that cell, and where its run begins, [B, S, M]
    offset = divmod(corner, 2)
    start = _at_pixels(options, starts, offset).transpose(0, 2, 1)
    cells = np.arange(starts.shape[2], dtype=np.int32)[None, None]
    cell = _at_pixels(options, cells, offset).transpose(0, 2, 1)

    # its samples in the block in which it begins, [B, S, M, BLOCK, D]
    block, places = start // BLOCK, np.arange(BLOCK, dtype=np.int32).reshape(1, 1, 1, -1)
    mine = _gather(runs.cell, block) == cell[..., None]
    scale = _gather(runs.weight, block)
    if _corners(options) == 4:
        below, right = _gather(runs.below, block), _gather(runs.right, block)
        scale *= (below if offset[0] else 1 - below) * (right if offset[1] else 1 - right)
    rows = scale[..., None] * sampling.rows_at(dout, _gather(runs.query, block))

    # the blocks after it that the run leads, to the end of a block of blocks, [B, S, M, BLOCK, D]
    of_blocks = jnp.minimum((block + 1) // BLOCK, sums.cell.shape[2] - 1)
    follows = (_gather(sums.cell, of_blocks) == cell[..., None]) & (
        of_blocks[..., None] * BLOCK + places > block[..., None]
    )
    following = _gather(sums.following[:, :, :, :, corner], of_blocks)
    total = (jnp.where(mine[..., None], rows, 0) + jnp.where(follows[..., None], following, 0)).sum(3)

    # all that is left of it, [B, S, M, D]
    rest = of_blocks + 1
    goes_on = (_gather(sums.rest_cell, rest) == cell) & (rest < sums.rest_cell.shape[2])
    return total + jnp.where(goes_on[..., None], _gather(sums.rest[:, :, :, corner], rest), 0)


def _at_pixels(options: Options, x: Any, offset: tuple[int, int]) -> Any:
    """Reads `x [B, M, cells]` at the cell that has a pixel for its corner `offset`: [B, M, S].

    `offset` is (below, right).
    """
    if options.method != "bilinear":
        return x
    down, across = offset
    levels, start = [], 0
    for height, width in options.spatial_shapes:
        end = start + (height + 1) * (width + 1)
        cells = x[:, :, start:end].reshape(*x.shape[:2], height + 1, width + 1)
        cells = cells[:, :, 1 - down : height + 1 - down, 1 - across : width + 1 - across]
        levels.append(cells.reshape(*x.shape[:2], height * width))
        start = end
    return (np if isinstance(x, np.ndarray) else jnp).concatenate(levels, axis=2)


def _blocks(x: jax.Array) -> jax.Array:
    """Cuts `[B, M, n, ...]` into blocks, `[B, M, n / BLOCK, BLOCK, ...]`."""
    B, M, n, *rest = x.shape
    return x.reshape(B, M, n // BLOCK, BLOCK, *rest)


def _gather(x: jax.Array, index: jax.Array, heads: int = 2) -> jax.Array:
    """Reads `x [B, M, n, ...]` at `index [B, S, M]`, or at the end that is nearer: [B, S, M, ...].

    `heads` is the axis M of `index`, whose other axes are free.
    """
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(index.ndim, index.ndim + x.ndim - 3)),
        collapsed_slice_dims=(2,),
        start_index_map=(2,),
        operand_batching_dims=(0, 1),
        start_indices_batching_dims=(0, heads),
    )
    return lax.gather(x, index[..., None], numbers, (1, 1, 1, *x.shape[3:]), mode="clip")
