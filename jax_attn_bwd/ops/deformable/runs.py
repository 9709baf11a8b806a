"""The gradient of the value on a GPU: summed in an order that never changes, in a few kernels.

The samples of a head are sorted by cell: what lies between four pixels, those at the border outside the
level. The samples of a cell are then a run, and each corner of a pixel has one. Every sum has `BLOCK` terms,
so that XLA takes what it gathers into its loop and writes no row of a sample:

    run of a cell = its rows to the end of a block + blocks to the end of a block of blocks + rest

`following` holds, for each block of sorted rows, the sum of those of its first run; `rest`, for each block of
blocks, all that is left of its first run from there on.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import fusion
from jax_attn_bwd._core.sharding import full_like_operands
from jax_attn_bwd.ops.deformable import sampling
from jax_attn_bwd.ops.deformable.sampling import Location, Samples
from jax_attn_bwd.ops.deformable.spec import Level, Operands, Options

BLOCK = 16  # XLA:GPU writes what it sums over 32 rows or more
_GROUP_BYTES = 1 << 24  # of `following`, up to which it may be larger than that

Shapes = tuple[tuple[int, int], ...]


class Runs(NamedTuple):
    """The samples of each head sorted by cell, all [B, M, n, BLOCK]."""

    cell: jax.Array  # int32; the number of cells where the sample does not count
    query: jax.Array
    right: jax.Array
    below: jax.Array
    weight: jax.Array


class Sums(NamedTuple):
    """What is known of the runs that lead blocks of `Runs`, and blocks of such blocks. C corners."""

    cell: jax.Array  # int32 [B, M, n / BLOCK, BLOCK]
    following: jax.Array  # [B, M, n / BLOCK, BLOCK, C, D]
    rest_cell: jax.Array  # int32 [B, M, n / BLOCK]
    rest: jax.Array  # [B, M, n / BLOCK, C, D]


def value_gradient(options: Options, operands: Operands, dout: jax.Array) -> jax.Array:
    """`dvalue [B, S, M, D]` by equation (8) of `backward`, from `dout [B, Q, M, D]`."""
    samples = sampling.points(options, operands)
    parts: list[jax.Array] = []
    B, Q, M, D = dout.shape
    if not isinstance(Q, int):
        raise NotImplementedError(
            "multi_scale_deformable_attention: for a GPU, export the gradient of the value with a known "
            "number of queries, or with deterministic_sums=False"
        )
    for levels in _groups(options, dout):
        samples, parts = fusion.barrier((samples, parts))  # one group after the other, in the same memory
        first, shapes = sum(options.num_points[: levels.start]), options.spatial_shapes[levels]
        of_group = replace(options, spatial_shapes=shapes, num_points=options.num_points[levels])
        taken = Samples(*(x[..., first : first + sum(of_group.num_points)] for x in samples))
        if D == 0 or any(n == 0 for n in taken.x.shape):
            shape = (B, sum(height * width for height, width in shapes), M, D)
            parts.append(full_like_operands(operands.value, shape, 0, dout.dtype, (samples, dout)))
        else:
            parts.append(jax.checkpoint(_of_levels, static_argnums=0)(of_group, taken, dout))
    return jnp.concatenate(parts, axis=1)


def _groups(options: Options, dout: jax.Array) -> Iterator[slice]:
    """Levels that are taken together: few launches, while `following` is not much larger than `dout`."""
    first = points = 0
    for level, more in enumerate(options.num_points):
        points += more
        share = points * _corners(options) / BLOCK  # of the size of dout
        if level > first and share > 2 and not _is_small(share, dout):
            yield slice(first, level)
            first, points = level, more
    yield slice(first, len(options.num_points))


def _is_small(share: float, dout: jax.Array) -> bool:
    known = all(isinstance(n, int) for n in dout.shape)
    return known and share * dout.size * dout.dtype.itemsize <= _GROUP_BYTES


def _of_levels(options: Options, samples: Samples, dout: jax.Array) -> jax.Array:
    """`value_gradient`, of the pixels of levels whose points `samples` are."""
    runs, starts = fusion.barrier(_sorted(options, samples))
    sums = _sums(options, runs, dout)
    runs, starts, sums = fusion.barrier((runs, starts, sums))
    dvalue = _of_corner(options, 0, runs, starts, sums, dout)
    for corner in range(1, _corners(options)):  # one after the other, likewise
        runs, starts, sums, dvalue = fusion.barrier((runs, starts, sums, dvalue))
        dvalue += _of_corner(options, corner, runs, starts, sums, dout)
    return dvalue


def _corners(options: Options) -> int:
    return 4 if options.method == "bilinear" else 1


def _sorted(options: Options, samples: Samples) -> tuple[Runs, jax.Array]:
    """The runs, and where in the n * BLOCK sorted samples each cell's begins: [B, M, cells]."""
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
    keys = jnp.pad(cell, ((0, 0), (0, 0), (0, -(Q * K) % BLOCK**2)), constant_values=cells)
    places = jnp.zeros_like(keys) + lax.iota(np.int32, keys.shape[2])[None, None]
    keys, order = lax.sort((keys, places), num_keys=1, is_stable=True)
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
    order = _blocks(order)
    return Runs(_blocks(keys), order // K, *(_taken(x, order, heads=1) for x in parts)), starts


def _cells(options: Options, samples: Samples) -> tuple[int, Location, jax.Array]:
    """How many cells there are, where samples lie in them, and in which: int32 [B, Q, M, K].

    With `method="discrete"` a cell is a pixel.
    """
    level = options.levels()
    is_cell = options.method == "bilinear"
    sizes = [(height + is_cell) * (width + is_cell) for height, width in options.spatial_shapes]
    first = np.repeat(np.cumsum(sizes) - sizes, options.num_points).astype(np.int32)
    level = Level(*(x.reshape(1, 1, 1, -1) for x in (level.height, level.width, first)))
    at = sampling.locate(options, level, samples.x, samples.y)
    if not is_cell:
        return sum(sizes), at, at.row * level.width + at.column + level.start
    column, right = _in_cell(at.column, at.right, at.x_between)
    row, below = _in_cell(at.row, at.below, at.y_between)
    cell = (row + 1) * (level.width + 1) + column + 1 + level.start
    return sum(sizes), at._replace(right=right, below=below), cell


def _in_cell(index: jax.Array, share: jax.Array, between: Any) -> tuple[jax.Array, jax.Array]:
    """A point clamped onto the first column or row has no part in the next: it ends the cell before."""
    alone = ~jnp.asarray(between) & (index == 0)
    return jnp.where(alone, -1, index), jnp.where(alone, 1, share)


def _sums(options: Options, runs: Runs, dout: jax.Array) -> Sums:
    rows = sampling.read(dout, runs.query, heads_first=True, mode="clip")
    following = _leading(_at_corners(options, runs, rows), runs.cell)
    cell, following = _blocks(runs.cell[..., 0]), _blocks(following)
    return Sums(cell, following, cell[..., 0], _all_that_follow(_leading(following, cell), cell[..., 0]))


def _at_corners(options: Options, runs: Runs, rows: jax.Array) -> jax.Array:
    """`rows [..., D]` times their weights at each corner, [..., C, D]."""
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


def _leading(rows: jax.Array, cell: jax.Array) -> jax.Array:
    """The sum of each block's first run: `rows [B, M, n, BLOCK, C, D]`, `cell [B, M, n, BLOCK]`."""
    leads = cell == cell[..., :1]
    return jnp.where(leads[..., None, None], rows, 0).sum(3)


def _all_that_follow(rows: jax.Array, cell: jax.Array) -> jax.Array:
    """From each of `rows [B, M, n, C, D]` on, the sum of those of the same `cell [B, M, n]`."""
    n, missing = cell.shape[2], -cell.shape[2] % BLOCK
    rows = _blocks(jnp.pad(rows, ((0, 0), (0, 0), (0, missing), (0, 0), (0, 0))))
    cell = _blocks(jnp.pad(cell, ((0, 0), (0, 0), (0, missing)), constant_values=-1))
    from_there = np.triu(np.ones((BLOCK, BLOCK), bool))[None, None, None]
    same = (cell[..., :, None] == cell[..., None, :]) & from_there
    sums = jnp.where(same[..., None, None], rows[:, :, :, None], 0).sum(4)
    if sums.shape[2] != 1:
        first = cell[..., 0]
        rest = _all_that_follow(_leading(rows, cell), first)
        first, rest = (jnp.roll(x, -1, axis=2) for x in (first, rest))  # the last block's rows end none
        last = lax.broadcasted_iota(np.int32, cell.shape, 2) == cell.shape[2] - 1
        goes_on = (cell == first[..., None]) & ~last
        sums += jnp.where(goes_on[..., None, None], rest[:, :, :, None], 0)
    return sums.reshape(*sums.shape[:2], -1, *sums.shape[4:])[:, :, :n]


def _of_corner(
    options: Options, corner: int, runs: Runs, starts: jax.Array, sums: Sums, dout: jax.Array
) -> jax.Array:
    """[B, S, M, D]: of each pixel, the run of the cell of which it is this corner."""
    offset = divmod(corner, 2)
    start = _of_pixels(options, starts, offset).transpose(0, 2, 1)  # [B, S, M]
    cells = np.arange(starts.shape[2], dtype=np.int32)[None, None]
    cell = _of_pixels(options, cells, offset).transpose(0, 2, 1)
    block, places = start // BLOCK, np.arange(BLOCK, dtype=np.int32).reshape(1, 1, 1, -1)
    mine = _taken(runs.cell, block) == cell[..., None]  # [B, S, M, BLOCK]
    scale = _taken(runs.weight, block)
    if _corners(options) == 4:
        below, right = _taken(runs.below, block), _taken(runs.right, block)
        scale *= (below if offset[0] else 1 - below) * (right if offset[1] else 1 - right)
    rows = scale[..., None] * sampling.read(dout, _taken(runs.query, block), mode="clip")
    of_blocks = jnp.minimum((block + 1) // BLOCK, sums.cell.shape[2] - 1)
    follows = (_taken(sums.cell, of_blocks) == cell[..., None]) & (
        of_blocks[..., None] * BLOCK + places > block[..., None]
    )
    following = _taken(sums.following[:, :, :, :, corner], of_blocks)
    total = (jnp.where(mine[..., None], rows, 0) + jnp.where(follows[..., None], following, 0)).sum(3)
    rest = of_blocks + 1
    goes_on = (_taken(sums.rest_cell, rest) == cell) & (rest < sums.rest_cell.shape[2])
    return total + jnp.where(goes_on[..., None], _taken(sums.rest[:, :, :, corner], rest), 0)


def _of_pixels(options: Options, x: Any, offset: tuple[int, int]) -> Any:
    """`x [B, M, cells]` at the cell whose corner `offset`, (below, right), a pixel is: [B, M, S]."""
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
    """`[B, M, n, ...]` as `[B, M, n / BLOCK, BLOCK, ...]`."""
    B, M, n, *rest = x.shape
    return x.reshape(B, M, n // BLOCK, BLOCK, *rest)


def _taken(x: jax.Array, index: jax.Array, heads: int = 2) -> jax.Array:
    """`x [B, M, n, ...]` at `index [B, S, M]`, or at the end that is nearer: [B, S, M, ...].

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
