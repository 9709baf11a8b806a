"""Hat matrices of deformable attention on TPUs, and the planes of pixels that they multiply, for its kernels.

Bilinear sampling is linear in the value. The samples k of a query on a level give each pixel (y, x) a number,

    S[(y, x), q] = sum over k of weight_k down_k(y) across_k(x)

with fractions down_k and across_k that are 0 but at two rows and two columns (one, where a coordinate is
clamped or rounded). The output is value^T S, and the gradient of the value S dout^T: products for the matrix
unit, where XLA's gather takes 9 to 18 bundles of instructions for each pixel it reads, its scatter 8 to 14.

Queries lie along lanes: the fraction of a row of pixels is then a row of a register for all its columns, and
an entry of S takes one multiplication and one addition for each sample. Pixels come in strips of whole rows;
those strips that no sample of a tile of queries lies in are passed over.

A number of float32 is the sum of three of bfloat16, which the matrix unit multiplies exactly. Products of
zeros with what is NaN or infinite are NaN: such factors are left out, and what they touch is set to NaN.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jax_attn_bwd._core import mosaic_tpu
from jax_attn_bwd._core.mosaic_tpu import LANES, ZERO
from jax_attn_bwd._core.numerics import ceil_div, round_up
from jax_attn_bwd.ops.deformable import sampling
from jax_attn_bwd.ops.deformable.kernels import unsupported
from jax_attn_bwd.ops.deformable.spec import Level, Operands, Options

TILE = 128  # queries of a step
_SUBLANES = 16  # of a register of bfloat16
_DEPTH = 256  # pixels of a strip, at least: what the widest matrix unit sums at once
_PARTS = {"bfloat16": 1, "float16": 2, "float32": 3}  # of bfloat16, that add up to a number of the dtype
_NOWHERE = -2.0  # row and column of a sample that does not count: beyond the reach of pixel 0
_MOST_PIXELS = 20_480  # of a level; beyond, bundles are predicted to be no fewer than XLA's
_MOST_NUMBERS = 1 << 21  # pixels times channels, likewise
_MOST_POINTS = 32  # of a query and head on a level: their sums are written out


class LevelCut(NamedTuple):
    """A level as so many strips of `rows` rows, each of `width` pixels; zeros behind its own."""

    strips: int
    rows: int
    width: int

    @property
    def pixels(self) -> int:
        """The number of pixels in a strip: a multiple of 128."""
        return self.rows * self.width


class LevelSamples(NamedTuple):
    """The samples of a level, `[B, M, P, Q]`, float32, Q a multiple of `TILE`."""

    row: jax.Array  # a whole number, of the upper left corner; `_NOWHERE` where a sample does not count
    column: jax.Array
    below: jax.Array  # the fraction of the next row
    right: jax.Array
    weight: jax.Array  # 0 where it does not count


class OnLevel(NamedTuple):
    """A level and its sampling points, `[B, M, P, Q]`."""

    level: Level
    cut: LevelCut
    x: jax.Array
    y: jax.Array
    weight: jax.Array


def supports(options: Options, operands: Operands) -> str | None:
    """Tells why the kernels cannot run this call; None if they can."""
    if refused := unsupported(operands, tuple(_PARTS)):
        return refused
    if (most := max(options.num_points)) > _MOST_POINTS:
        return f"a query and head may have at most {_MOST_POINTS} points on a level, got {most}"

    # and levels whose pixels fit the vector memory, where the matrix unit is faster than XLA's gathers
    D = operands.value.shape[3]
    for (H, W), P in zip(options.spatial_shapes, options.num_points, strict=True):
        cut = cut_of(H, W)
        pixels, most = cut.strips * cut.pixels, min(_MOST_PIXELS, _MOST_NUMBERS // round_up(D, _SUBLANES))
        if P and (pixels > most or _most_bytes(cut, P, operands.value) > mosaic_tpu.VMEM):
            return (
                f"its hat matrix pays for levels to about {most} pixels of {D} channels, {W} of them in a "
                f"row, got {H} x {W}"
            )
    return None


def _most_bytes(cut: LevelCut, P: int, value: jax.Array) -> int:
    """Returns the bytes of vector memory that the backward takes; the forward takes fewer."""
    width = round_up(value.shape[3], _SUBLANES)
    row, parts = round_up(width, LANES) * 4, parts_of(value.dtype)
    planes = round_up(parts * width, LANES) * 2
    strip = 2 * max(2, parts) * TILE + 4 * TILE + 4 * round_up(parts * width, LANES)
    whole = 2 * cut.strips * cut.pixels * (row + planes) + 2 * cut.pixels * strip
    return whole + 3 * P * cut.width * TILE * 4


def cut_of(height: int, width: int) -> LevelCut:
    """Returns the strips into which a level is cut."""
    width = round_up(width, _SUBLANES)
    rows = LANES // math.gcd(width, LANES)
    while rows * width < _DEPTH and rows < height:
        rows *= 2
    return LevelCut(ceil_div(height, rows), rows, width)


def parts_of(dtype: Any) -> int:
    """Returns how many numbers of bfloat16 add up to one of `dtype`."""
    return _PARTS[jnp.dtype(dtype).name]


def parts_of_hat(dtype: Any) -> int:
    """Returns how many of bfloat16 add up to an entry of S: two have more bits than a narrow result."""
    return max(2, parts_of(dtype))


def split(x: jax.Array, parts: int) -> list[jax.Array]:
    """Splits `x`, float32, into arrays of bfloat16 that add up to it: 8 bits each, the largest first."""
    found = []
    for i in range(parts):
        # cut off, not rounded, by its bits: a conversion there and back XLA may take for nothing
        bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << 16))
        high = lax.bitcast_convert_type(bits, jnp.float32)
        found.append(high.astype(jnp.bfloat16))
        x = x - high if i + 1 < parts else x
    return found


def is_finite(x: jax.Array) -> jax.Array:
    """Computes `jnp.isfinite` in a way that a kernel can, too."""
    return jnp.abs(x) < jnp.inf


def ones(where: jax.Array) -> jax.Array:
    """Returns, in a kernel, bfloat16: 1 there and 0 elsewhere."""
    return jnp.where(where, jnp.float32(1), jnp.float32(0)).astype(jnp.bfloat16)


def levels(options: Options, operands: Operands) -> Iterator[OnLevel]:
    """Yields the levels that have points."""
    x, y, weight = (a.transpose(0, 2, 3, 1) for a in sampling.points(options, operands))  # [B, M, K, Q]
    start = first = 0
    for (H, W), P in zip(options.spatial_shapes, options.num_points, strict=True):
        if P:
            level = Level(*np.array((H, W, start), np.int32))
            yield OnLevel(level, cut_of(H, W), *(a[:, :, first : first + P] for a in (x, y, weight)))
        start, first = start + H * W, first + P


def samples(options: Options, on: OnLevel) -> LevelSamples:
    """Returns the samples of a level in the form that a kernel reads."""
    at = sampling.locate(options, on.level, on.x, on.y)
    row, column = (jnp.where(at.counts, n.astype(jnp.float32), _NOWHERE) for n in (at.row, at.column))
    return LevelSamples(
        whole_tiles(row, _NOWHERE),
        whole_tiles(column, _NOWHERE),
        whole_tiles(at.below),
        whole_tiles(at.right),
        whole_tiles(jnp.where(at.counts, on.weight, 0)),
    )


def whole_tiles(x: jax.Array, fill: float = 0.0) -> jax.Array:
    """Makes up the queries of `x`, its last axis, to whole tiles."""
    more = -x.shape[-1] % TILE
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)], constant_values=fill)


def planes(on: OnLevel, value: jax.Array) -> jax.Array:
    """Returns the level's `[B, M, strips, channels, pixels of a strip]`, float32, of `value [B, S, M, D]`."""
    (H, W, start), cut, (B, _, M, D) = map(int, on.level), on.cut, value.shape
    x = value[:, start : start + H * W].astype(jnp.float32).transpose(0, 2, 3, 1).reshape(B, M, D, H, W)
    more = (round_up(D, _SUBLANES) - D, cut.strips * cut.rows - H, cut.width - W)
    x = jnp.pad(x, [(0, 0), (0, 0), *((0, n) for n in more)])
    return x.reshape(*x.shape[:3], cut.strips, cut.pixels).transpose(0, 1, 3, 2, 4)


def product(x: jax.Array, y: jax.Array, transposed: bool = False) -> jax.Array:
    """Returns, in a kernel, `x y`, or `x y^T`, float32."""
    axes = (((1,), (int(transposed),)), ((), ()))
    return lax.dot_general(x, y, axes, preferred_element_type=jnp.float32)


def some_not_finite(x: jax.Array) -> jax.Array:
    """Tells whether some of `x [B, M, ...]` is not finite: `[B, M]`, int32, a flag for a kernel."""
    return 1 - is_finite(x).all(tuple(range(2, x.ndim))).astype(jnp.int32)


def tiles_of(x: Any) -> pl.BlockSpec:
    """Returns the block of an operand `[B, M, n, Q]` that holds all n of a tile of queries."""
    return pl.BlockSpec((None, None, x.shape[2], TILE), lambda b, m, q: (b, m, ZERO, q))


def all_of(x: Any) -> pl.BlockSpec:
    """Returns the block of an operand `[B, M, ...]` that holds all of a head."""
    rest = x.shape[2:]
    return pl.BlockSpec((None, None, *rest), lambda b, m, q: (b, m, *(ZERO,) * len(rest)))


def touched(cut: LevelCut, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns, in a kernel, (the first strip, one more than the last) that samples with these rows read."""

    def strip(y):
        y = jnp.clip(y, 0.0, cut.strips * cut.rows - 1.0).astype(jnp.int32)
        return lax.div(y, jnp.int32(cut.rows))

    last = jnp.max(row)
    first = jnp.min(jnp.where(row == _NOWHERE, jnp.inf, row))
    end = jnp.where(last == _NOWHERE, jnp.int32(0), strip(last + 1) + 1)
    return strip(first), end


def fraction(first: jax.Array, of_next: jax.Array, count: int) -> jax.Array:
    """Returns, in a kernel, the hats of rows or columns, `[count, TILE]`; its arguments are `[1, TILE]`."""
    n = lax.broadcasted_iota(jnp.int32, (count, TILE), 0).astype(jnp.float32)
    return jnp.where(n == first, 1 - of_next, jnp.where(n == first + 1, of_next, 0.0))


def store_hat(
    cut: LevelCut, strip: jax.Array, of: LevelSamples, across: Any, down: Any, parts: int, hat: Any
) -> None:
    """Writes, in a kernel, a strip of S to `hat [parts, pixels, TILE]`.

    Args:
      of: refs `[P, TILE]`.
      across: ref `[P, width, TILE]`, what `fraction` gives of the columns.
      down: scratch `[P, rows, TILE]`.
    """
    # the fractions of the strip's rows, times the weights
    P, above = of.row.shape[0], (strip * cut.rows).astype(jnp.float32)
    for p in range(P):
        one = slice(p, p + 1)
        down[p] = fraction(of.row[one] - above, of.below[one], cut.rows) * of.weight[one]

    # row by row, the entries of all its columns: a sum over the samples
    for y in range(cut.rows):
        entries = down[0, y : y + 1] * across[0]
        for p in range(1, P):
            entries += down[p, y : y + 1] * across[p]
        for i, part in enumerate(split(entries, parts)):
            hat[i, y * cut.width : (y + 1) * cut.width] = part
