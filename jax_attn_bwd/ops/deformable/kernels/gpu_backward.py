"""Backward of deformable attention on NVIDIA GPUs (Pallas Mosaic GPU); the equations are `backward.py`'s.

XLA finds where the samples lie, sorts them, and has (5) to (7) and (9). Kernels read the rows of channels:
the gradient of the value (8), sums over the samples of a cell, and the four products of a sample (4).

They take plain loads at scalar indices, no TMA, no wgmma: they run on Ampere as on Blackwell. There are no
atomics: the same bits in every run, `deterministic` or not. Sums are float32 whatever the value's dtype.

The forward has no kernel. One with plain loads is not expected to be faster than XLA's gathers, which read
whole rows of channels as well; the portable forward runs on every device.

**Rows in registers.** A patch is 2 x 2 pixels of `channels` channels: one warp for each pixel, one lane for
channels / 32 neighbouring channels. A row is what each of the four warps holds a copy of.

**The gradient of the value.** A cell is what lies between four pixels: a level of H x W pixels has
(H + 1) x (W + 1), those at the border with pixels outside. XLA sorts all samples by cell; a block of four
warps sums those of a cell in registers, one after the other, one pixel a warp:

    patch[cell] = sum over samples in cell of (weight * fractions) x dout

and a pixel's gradient is the sum of a quarter of each of the four patches around it, XLA's again. Every sum
has one order: the same bits in every run. A cell that more than `_LENGTH` samples fall into must not keep one
block busy while others idle. It is cut where the sorted samples reach a multiple of that; the parts behind
cuts are summed beforehand, each by a block of its own, and the cell's block adds these sums.

**The products.** A block of four warps takes a query and head: it holds dout, and for each sample loads the
2 x 2 pixels around it, one a warp, and sums over the lanes. A patch begins on the level: where a corner is
outside, so that the patch is not the sample's own, its products are swapped afterwards.
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
from jax_attn_bwd.ops.deformable import point_gradients, sampling
from jax_attn_bwd.ops.deformable.kernels import unsupported
from jax_attn_bwd.ops.deformable.plan import Plan
from jax_attn_bwd.ops.deformable.sampling import Location, Pixels
from jax_attn_bwd.ops.deformable.spec import (
    Level,
    MultiScaleDeformableAttentionGrads,
    Operands,
    Options,
    Residuals,
)

_DTYPES = ("float32", "bfloat16", "float16")
_INDICES = 1 << 30  # of int32, with room for the indices beyond the last
_LANES = 32
_LENGTH = 256  # of samples that one block sums, at most
_AT_ONCE = 4  # samples whose pixels are loaded before the first is summed


def supports(options: Options, operands: Operands) -> str | None:
    """Tells why the kernels cannot run this call; None if they can."""
    if refused := mosaic_gpu.too_old() or unsupported(operands, _DTYPES):
        return refused
    # indices are int32: of the products, of the patches of cells, of the rows of dout
    (B, Q, M, K), D = operands.attention_weights.shape, operands.value.shape[3]
    cells = sum((height + 1) * (width + 1) for height, width in options.spatial_shapes)
    if (largest := max(B * Q * M * K * 4, B * max(cells, Q) * M * 4 * _padded(D))) >= _INDICES:
        return f"its arrays may have fewer than 2**30 elements, the largest would have {largest}"
    return None


def backward(plan: Plan, residuals: Residuals, dout: jax.Array) -> MultiScaleDeformableAttentionGrads:
    """Returns the gradients in `residuals.wanted`."""
    run = partial(_local_gradients, plan.options, pallas.is_interpreted(mosaic_gpu.NAME))

    def out_specs(residuals, _):
        specs = residuals.operands._asdict()
        return MultiScaleDeformableAttentionGrads(**{n: specs[n] for n in residuals.wanted.in_order})

    return pallas.on_local_shards(run, out_specs, (residuals, dout))


@partial(jax.jit, static_argnums=(0, 1))
def _local_gradients(options, interpret, residuals, dout):
    """Returns the gradients on one device."""
    # where all samples lie, [B, Q, M, K]; the rows of dout, [B * Q * M, padded D]
    operands, wanted = residuals.operands, residuals.wanted.names
    (B, Q, M, _), D = operands.attention_weights.shape, operands.value.shape[3]
    rows, more = dout.reshape(B * Q * M, D), _padded(D) - D
    rows = jnp.pad(rows, ((0, 0), (0, more))) if more else rows
    level = Level(*(n.reshape(1, 1, 1, -1) for n in options.levels()))
    x, y, weight = sampling.points(options, operands)
    at, around = sampling.locate(options, level, x, y), sampling.pixels_around(options, level, x, y)

    # (8), and (4) with what follows from it
    grads = {}
    if "value" in wanted:
        grads["value"] = _value_gradient(options, interpret, at, weight, rows, D)
    if wanted & {"sampling_locations", "attention_weights"}:
        d = _products(options, interpret, level, at, around, operands.value, rows)
        points = point_gradients.gradients(wanted, around, weight, d)
        grads |= point_gradients.by_name(options, operands, *points)
    return residuals.gradients(grads)


# Rows in registers -----------------------------------------------------------------------------------------


def _padded(channels: int) -> int:
    """Returns the number of channels that kernels have: 32 lanes of 1, 2, 4 or 8."""
    return max(_LANES, 1 << (channels - 1).bit_length())


def _patch_layout(channels: int) -> Any:
    """Returns the layout of a patch `[2, 2, channels]`; `.reduce((0, 1))` is that of a row."""
    tiling = plgpu.Tiling(((2, 2, channels), (channels // _LANES,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4, -3), lane_dims=(-2,), vector_dim=-1)


def _load(ref: Any, layout: Any) -> jax.Array:
    """Loads float32 from any part of global memory."""
    return mosaic_gpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def _store(ref: Any, x: jax.Array) -> None:
    """Stores to any part of global memory."""
    getattr(plgpu, "store")(ref, x, optimized=False)  # noqa: B009 (absent before JAX 0.12)


def _load_row(ref: Any) -> jax.Array:
    """Loads a row for each pixel of a patch: `[2, 2, channels]`."""
    (channels,) = ref.shape
    row = _load(ref, _patch_layout(channels).reduce((0, 1)))
    return lax.broadcast_in_dim(row, (2, 2, channels), (2,))


# The gradient of the value ---------------------------------------------------------------------------------


def _value_gradient(
    options: Options, interpret: bool, at: Location, weight: jax.Array, rows: jax.Array, channels: int
) -> jax.Array:
    """Returns `dvalue [B, S, M, channels]`, float32.

    Args:
      at, weight: of the samples, `[B, Q, M, K]`.
      rows: those of dout, `[B * Q * M, padded channels]`.
    """
    # the cell of each sample: those of a level lie row by row, heads innermost, B * n * M in all
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

    # sorted, with the samples of cell i from low[i] to high[i]
    cell, order, low, high = _sorted(jnp.where(at.counts, cell, cells).reshape(-1), cells)
    samples = pallas.vary_alike((low, high, order, _scales(at, weight).reshape(-1, 2, 2), rows))

    def sums(body, name, blocks, *more):
        out_type = pallas.out_type((blocks, 2, 2, D), jnp.float32, samples)
        body, grid = partial(body, K), {"block": blocks}
        launch = mosaic_gpu.launch(body, name, interpret=interpret, out_type=out_type, scratch=(), grid=grid)
        return launch(*samples, *more)

    # what lies behind cuts first, then the patches of cells, [B * n * M, 2, 2, D]
    behind = sums(_add_behind_cut, "deformable_value_gradient_cuts", ceil_div(cell.size, _LENGTH), cell)
    patches = sums(_add_cell, "deformable_value_gradient", cells, behind)
    return _of_pixels(options, patches.reshape(B, n, M, 2, 2, D))[..., :channels]


def _scales(at: Location, weight: jax.Array) -> jax.Array:
    """Returns each corner's fraction of the weight, on a last axis; any number where no sample counts."""
    right, below, weight = (x[..., None] for x in (at.right, at.below, weight))
    is_right, is_below = (np.array(x).reshape(1, 1, 1, 1, 4) for x in ([0, 1, 0, 1], [0, 0, 1, 1]))
    across, down = (jnp.where(far == 1, x, 1 - x) for far, x in ((is_right, right), (is_below, below)))
    return across * down * weight


def _sorted(cell: jax.Array, cells: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns (`cell` sorted, the order of its samples, where those of each of the `cells` begin, and end).

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
    """Sums the sorted samples from `low` to `high` to a patch `[2, 2, D]`."""
    shape = (2, 2, rows.shape[1])
    layout = _patch_layout(shape[2])

    def add(i, patch):
        sample = order[low + i]
        scale = _load(scales.at[sample], layout.reduce(2))
        row = _load_row(rows.at[lax.div(sample, jnp.int32(K))])
        return patch + lax.broadcast_in_dim(scale, shape, (0, 1)) * row

    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
    return lax.fori_loop(jnp.int32(0), high - low, add, zeros)  # a bound from memory varies over mesh axes


def _add_behind_cut(
    K: int, low: Any, high: Any, order: Any, scales: Any, rows: Any, cell: Any, out: Any
) -> None:
    """Sums the part of a cell behind sample i * `_LENGTH`, if the cell is cut there."""
    # the cell around that sample; what is in no cell has a number beyond the last
    i, last = lax.axis_index("block"), jnp.int32(low.shape[0] - 1)
    cut = i * _LENGTH
    this = cell[cut]
    known = jnp.minimum(this, last)
    begin, end = low[known], high[known]

    # it is cut there if it begins before, and is longer than one block sums
    @pl.when((this <= last) & (begin < cut) & (end - begin > _LENGTH))
    def _():
        total = _sum(K, order, scales, rows, cut, jnp.minimum(end, cut + _LENGTH))
        _store(out.at[i], total)


def _add_cell(K: int, low: Any, high: Any, order: Any, scales: Any, rows: Any, behind: Any, out: Any) -> None:
    """Sums the samples of cell i: its own to the first cut, then the parts behind cuts."""
    i, length = lax.axis_index("block"), jnp.int32(_LENGTH)
    begin, end = low[i], high[i]
    is_cut, cut = end - begin > length, lax.div(begin, length) + 1
    patch = _sum(K, order, scales, rows, begin, jnp.where(is_cut, cut * length, end))
    last = jnp.where(is_cut, lax.div(end - 1, length) + 1, cut)
    add = lambda j, patch: patch + _load(behind.at[j], _patch_layout(patch.shape[2]))
    _store(out.at[i], lax.fori_loop(cut, last, add, patch))


def _of_pixels(options: Options, patches: jax.Array) -> jax.Array:
    """Sums a corner of each of the four cells around a pixel: `[B, cells, M, 2, 2, D]` -> `[B, S, M, D]`."""
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


# The products ----------------------------------------------------------------------------------------------


def _products(
    options: Options,
    interpret: bool,
    level: Level,
    at: Location,
    around: Pixels,
    value: jax.Array,
    rows: jax.Array,
) -> tuple[jax.Array, ...]:
    """Returns <dout, value> at each pixel of `around [B, Q, M, K]`, 0 outside the level.

    `value` is `[B, S, M, D]`, `rows [B * Q * M, padded D]` those of dout.
    """
    # the upper left pixel of each patch, moved onto the level
    (B, Q, M, K), S = at.row.shape, value.shape[1]
    first_row = jnp.clip(at.row, 0, jnp.maximum(level.height - 2, 0))
    first_column = jnp.clip(at.column, 0, jnp.maximum(level.width - 2, 0))
    starts = (first_row * level.width + first_column).reshape(B * Q * M, K)

    # the products of the four pixels of each patch, [B, Q, M, K, 2, 2]
    arrays = pallas.vary_alike((_levels(options, value), starts, rows))
    call = mosaic_gpu.launch(
        partial(_multiply, options, Q, M),
        "deformable_products",
        interpret=interpret,
        out_type=pallas.out_type((B * Q * M, K, 2, 2), jnp.float32, arrays),
        scratch=(),
        grid={"row": B * Q * M},
    )
    d = call(*arrays[0], *arrays[1:]).reshape(B, Q, M, K, 2, 2)

    # those of the sample's own pixels
    above, below = _own(d[..., 0, :], d[..., 1, :], (at.row - first_row)[..., None])
    corners = [*_own(above[..., 0], above[..., 1], at.column - first_column)]
    corners += _own(below[..., 0], below[..., 1], at.column - first_column)
    return tuple(jnp.where(p < S, c, 0) for p, c in zip(around.pixels, corners, strict=False))


def _levels(options: Options, value: jax.Array) -> list[jax.Array]:
    """Returns the levels that have points, `[B, H, W, M, padded D]`, made up to 2 x 2 pixels."""
    B, _, M, D = value.shape
    found, start = [], 0
    for (H, W), P in zip(options.spatial_shapes, options.num_points, strict=True):
        x = value[:, start : start + H * W].reshape(B, H, W, M, D)
        start += H * W
        more = ((0, 0), (0, max(2 - H, 0)), (0, max(2 - W, 0)), (0, 0), (0, _padded(D) - D))
        if P:
            found.append(jnp.pad(x, more) if any(end for _, end in more) else x)
    return found


def _multiply(options: Options, Q: int, M: int, *refs: Any) -> None:
    """Multiplies a row of dout with the patches of all samples of its query and head."""
    # the query, head and row of this block
    *levels, starts, rows, out = refs
    r = lax.axis_index("row")
    b, m = lax.div(r, jnp.int32(Q * M)), lax.rem(r, jnp.int32(M))
    row = _load_row(rows.at[r])
    layout = _patch_layout(row.shape[2])

    # `count` samples from `first` on: all patches are loaded before the first is summed over its lanes
    def multiply(value, width, first, count):
        corners = [starts[r, first + i] for i in range(count)]
        places = [(pl.ds(lax.div(n, width), 2), pl.ds(lax.rem(n, width), 2)) for n in corners]
        patches = [_load(value.at[(b, *place, m)], layout) for place in places]
        for i, patch in enumerate(patches):
            _store(out.at[r, first + i], jnp.sum(patch * row, axis=2))

    # level by level, `_AT_ONCE` samples a step
    first = 0
    for (_, width), P in zip(options.spatial_shapes, options.num_points, strict=True):
        if P == 0:
            continue
        some = partial(multiply, levels.pop(0), jnp.int32(width))
        whole, rest = divmod(P, _AT_ONCE)
        if whole:
            step = lambda i, _, some=some, first=first: some(first + i * _AT_ONCE, _AT_ONCE)
            lax.fori_loop(jnp.int32(0), jnp.int32(whole), step, None)
        if rest:
            some(first + whole * _AT_ONCE, rest)
        first += P


def _own(near: jax.Array, far: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a sample's own two pixels along an axis, of its patch's, which begins `offset` before it."""
    here, next_ = offset == 0, offset == 1
    return jnp.where(here, near, jnp.where(next_, far, 0)), jnp.where(here, far, jnp.where(next_, 0, near))
