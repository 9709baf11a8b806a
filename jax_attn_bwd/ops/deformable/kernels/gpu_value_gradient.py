"""GPU kernels of the gradient of the value, equation (8) of `backward.py`, without atomics.

A cell is what lies between four pixels: a level of H x W pixels has (H + 1) x (W + 1), those at the border
with pixels outside. XLA sorts all samples by cell; a block of four warps sums those of a cell in registers,
one after the other, one pixel a warp:

    patch[cell] = sum over samples in cell of (weight * shares) x dout

and a pixel's gradient is the sum of a quarter of each of the four patches around it, XLA's again. Every sum
has one order: the same bits in every run.

A cell that more than `_LENGTH` samples fall into must not keep one block busy while others idle. It is cut
where the sorted samples reach a multiple of that; the pieces behind cuts are summed beforehand, each by a
block of its own, and the cell's block adds these sums.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core import mosaic_gpu, pallas
from jax_attn_bwd._core.numerics import ceil_div
from jax_attn_bwd.ops.deformable.kernels import gpu_rows
from jax_attn_bwd.ops.deformable.sampling import Location
from jax_attn_bwd.ops.deformable.spec import Options

_LENGTH = 256  # of samples that one block sums, at most


def value_gradient(
    options: Options, interpret: bool, at: Location, weight: jax.Array, rows: jax.Array, channels: int
) -> jax.Array:
    """`dvalue [B, S, M, channels]`, float32.

    Args:
      at, weight: of the samples, `[B, Q, M, K]`.
      rows: those of dout, `[B * Q * M, padded channels]`.
    """
    (B, _, M, K), D = at.row.shape, rows.shape[1]
    of_levels = [(height + 1) * (width + 1) for height, width in options.spatial_shapes]
    n = sum(of_levels)
    cells = B * n * M
    start, width = (
        np.repeat(x, options.num_points).astype(np.int32).reshape(1, 1, 1, K)
        for x in (np.cumsum(of_levels) - of_levels, np.array(options.spatial_shapes)[:, 1] + 1)
    )
    b, m = (lax.broadcasted_iota(jnp.int32, at.row.shape, axis) for axis in (0, 2))
    cell = (b * n + start + (at.row + 1) * width + at.column + 1) * M + m
    cell, order, low, high = _sorted(jnp.where(at.counts, cell, cells).reshape(-1), cells)
    samples = pallas.vary_alike((low, high, order, _scales(at, weight).reshape(-1, 2, 2), rows))

    def sums(body, name, blocks, *more):
        out_type = pallas.out_type((blocks, 2, 2, D), jnp.float32, samples)
        body, grid = partial(body, K), {"block": blocks}
        launch = mosaic_gpu.launch(body, name, interpret=interpret, out_type=out_type, scratch=(), grid=grid)
        return launch(*samples, *more)

    behind = sums(_add_behind_cut, "deformable_value_gradient_cuts", ceil_div(cell.size, _LENGTH), cell)
    patches = sums(_add_cell, "deformable_value_gradient", cells, behind)
    return _of_pixels(options, patches.reshape(B, n, M, 2, 2, D))[..., :channels]


def _scales(at: Location, weight: jax.Array) -> jax.Array:
    """What dout is multiplied by at each corner, the last axis: its share of the weight; any number where
    a sample does not count.
    """
    right, below, weight = (x[..., None] for x in (at.right, at.below, weight))
    is_right, is_below = (np.array(x).reshape(1, 1, 1, 1, 4) for x in ([0, 1, 0, 1], [0, 0, 1, 1]))
    across, down = (jnp.where(far == 1, x, 1 - x) for far, x in ((is_right, right), (is_below, below)))
    return across * down * weight


def _sorted(cell: jax.Array, cells: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(`cell` sorted, the order of its samples, where in it those of each of the `cells` begin, and end).

    A sample that is in none of them has their number, or a larger one.
    """
    samples = lax.iota(jnp.int32, cell.size)
    # one key with one value: for these XLA has a radix sort
    cell, order = lax.sort((cell, samples), num_keys=1, is_stable=True)
    edge, one = cell[1:] != cell[:-1], jnp.ones_like(cell[:1], bool)
    is_first, is_last = jnp.concatenate([one, edge]), jnp.concatenate([edge, one])
    none = jnp.zeros((cells,), jnp.int32)
    low = none.at[jnp.where(is_first, cell, cells)].set(samples, mode="drop")
    high = none.at[jnp.where(is_last, cell, cells)].set(samples + 1, mode="drop")
    return cell, order, low, high


def _sum(K: int, order: Any, scales: Any, rows: Any, low: Any, high: Any) -> jax.Array:
    """The patch `[2, 2, D]` of the sorted samples from `low` to `high`."""
    shape = (2, 2, rows.shape[1])
    layout = gpu_rows.patch_layout(shape[2])

    def add(i, patch):
        sample = order[low + i]
        scale = gpu_rows.load(scales.at[sample], layout.reduce(2))
        row = gpu_rows.load_row(rows.at[lax.div(sample, jnp.int32(K))])
        return patch + lax.broadcast_in_dim(scale, shape, (0, 1)) * row

    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
    return lax.fori_loop(jnp.int32(0), high - low, add, zeros)  # a bound from memory varies over mesh axes


def _add_behind_cut(
    K: int, low: Any, high: Any, order: Any, scales: Any, rows: Any, cell: Any, out: Any
) -> None:
    """The piece of a cell behind place i * `_LENGTH`, if it is cut there."""
    i, last = lax.axis_index("block"), jnp.int32(low.shape[0] - 1)
    cut = i * _LENGTH
    this = cell[cut]
    known = jnp.minimum(this, last)
    begin, end = low[known], high[known]

    @pl.when((this <= last) & (begin < cut) & (end - begin > _LENGTH))
    def _():
        total = _sum(K, order, scales, rows, cut, jnp.minimum(end, cut + _LENGTH))
        gpu_rows.store(out.at[i], total)


def _add_cell(K: int, low: Any, high: Any, order: Any, scales: Any, rows: Any, behind: Any, out: Any) -> None:
    i, length = lax.axis_index("block"), jnp.int32(_LENGTH)
    begin, end = low[i], high[i]
    is_cut, cut = end - begin > length, lax.div(begin, length) + 1
    patch = _sum(K, order, scales, rows, begin, jnp.where(is_cut, cut * length, end))
    pieces = jnp.where(is_cut, lax.div(end - 1, length) + 1, cut)
    add = lambda j, patch: patch + gpu_rows.load(behind.at[j], gpu_rows.patch_layout(patch.shape[2]))
    gpu_rows.store(out.at[i], lax.fori_loop(cut, pieces, add, patch))


def _of_pixels(options: Options, patches: jax.Array) -> jax.Array:
    """`[B, S, M, D]` of `[B, cells, M, 2, 2, D]`: the corner of each of the four cells around a pixel."""
    (B, _, M), D = patches.shape[:3], patches.shape[-1]
    levels, start = [], 0
    for H, W in options.spatial_shapes:
        end = start + (H + 1) * (W + 1)
        x = patches[:, start:end].reshape(B, H + 1, W + 1, M, 2, 2, D)
        above = x[:, :-1, :-1, :, 1, 1] + x[:, :-1, 1:, :, 1, 0]
        below = x[:, 1:, :-1, :, 0, 1] + x[:, 1:, 1:, :, 0, 0]
        levels.append((above + below).reshape(B, H * W, M, D))
        start = end
    return jnp.concatenate(levels, axis=1)
