"""Mosaic GPU kernels of the softmax, and how they walk over rows.

The forward reads x once and writes y once, the backward reads y and dy once and writes dx.

Online, the forward has at each place of a fragment the maximum m of what came by there and
l = sum exp(z - m). At the end of the row both are combined over all places:

    top = max m,   total = sum l exp(m - top),   y = exp(z - top) / total

A row that fits one tile keeps its exponentials in registers; they only change factor, from m to top.

A *fragment* `[rows, columns]` is what a warpgroup holds in one register array; each warp owns whole rows of a
fragment, so that a reduction along columns is a few shuffles. A *tile* is some fragments that one warpgroup
loads at once, into shared memory. There are two ways to lay fragments over the array:

* narrow rows: the rows of a fragment are rows of the array and its fragments lie side by side; one tile holds
  whole rows, several of them;
* wide rows: the array is seen as `[..., width / 128, 128]` and the rows of a fragment are left or right
  halves of segments of one row of the array; a block of up to four warpgroups shares that row, each taking
  every so many-th tile, and row values are combined through shared memory. Rows that it cannot hold are
  read twice, the second time backwards, so that what was read last is not read again and the rest is likely
  still in the L2 cache.

What a copy reads beyond an axis is 0, what it would write there is dropped. That is TMA; a part of an array
that is contiguous would be written by a plain copy, which only stops at the end of the whole array. So no
fragment is as wide as the array, or as a segment.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core import masks, mosaic_gpu
from jax_attn_bwd._core.mosaic_gpu import SHARED_MEMORY, launch
from jax_attn_bwd._core.numerics import finite
from jax_attn_bwd._core.pallas import out_type, vary_alike
from jax_attn_bwd.ops.softmax.kernels import rules as kernel_rules
from jax_attn_bwd.ops.softmax.spec import Options

NARROW = 2048  # widest rows that one warp holds whole
_SEGMENT = 128  # elements of a segment of a wide row
_ELEMENTS = {True: 8192, False: 4096}  # of a tile; more if its exponentials stay in registers
_ELEMENTS_BACKWARD = 4096  # of a tile: y and dy take 64 registers of a thread
_DTYPES = ("float32", "bfloat16", "float16")
_RESERVED = 4096  # bytes of shared memory for barriers, row values and the compiler

Merged = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Tiling:
    """Never changes the answer. See the module for fragments and tiles."""

    rows: int  # of a fragment
    columns: int  # of a fragment
    vector: int  # neighbouring elements that one thread holds
    fragments: int  # of a tile
    tiles: int = 1  # of a row that a warpgroup walks over
    slots: int = 1  # tiles that a warpgroup has shared memory for
    warpgroups: int = 1  # that share a row
    wide: bool = False  # rows of a fragment are segments of one row of the array

    @staticmethod
    def default_for(rows: int, width: int, dtype: Any, element_bytes: int, elements: int) -> "Tiling":
        """Picks a tiling for `rows` rows, along the axis that a tile may hold several of, of padded `width`.

        An element of a tile takes `element_bytes` of shared memory, in all arrays that are read; a tile has
        at most `elements` where that is possible; `dtype` is that of x.
        """
        # wide rows: the halves of segments lie side by side in pairs of fragments, for up to 4 warpgroups
        vector = 16 // jnp.dtype(dtype).itemsize
        if width > NARROW:
            columns, segments = _SEGMENT // 2, width // _SEGMENT
            least = _fewest_rows(columns, vector)
            warpgroups = 1 if width <= 8192 else 2 if width <= 16384 else 4
            own = pl.cdiv(segments, warpgroups * least)  # pairs of fragments, for a warpgroup
            room = (SHARED_MEMORY - _RESERVED) // (warpgroups * element_bytes * least * _SEGMENT)
            tiles = -(-own * least * _SEGMENT // elements)
            pairs = -(-own // tiles)
            # No copy may be larger than the array, and tiles that come and go take turns in three slots.
            while least * pairs > segments or room // pairs < min(3, tiles):
                tiles += 1
                pairs = -(-own // tiles)
            tiles = -(-own // pairs)
            slots = min(tiles, room // pairs)
            return Tiling(least, columns, vector, 2 * pairs, tiles, slots, warpgroups, wide=True)
        # narrow rows: fragments side by side hold whole ones, as many as a tile may have elements for
        columns = min(1 << (width - 1).bit_length() - 1, 32 * vector)
        fragments, least = -(-width // columns), _fewest_rows(columns, vector)
        wanted = min(elements // (columns * fragments), -(-rows // least) * least, 256)
        return Tiling(max(1, wanted // least) * least, columns, vector, fragments)

    @property
    def layout(self) -> Any:
        """Lays a fragment in registers: 16 bytes a thread, lanes along columns first, warps along rows."""
        rows, columns, vector = _fewest_rows(self.columns, self.vector), self.columns, self.vector
        if rows == 4:
            tiling = plgpu.Tiling(((4, columns), (vector,)))
            return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
        tiling = plgpu.Tiling(((rows, columns), (rows // 4, columns), (vector,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)

    @property
    def segments(self) -> int:
        """Counts the segments of a wide row in a tile."""
        return self.fragments // 2 * self.rows


def _fewest_rows(columns: int, vector: int) -> int:
    """Returns the fewest rows of `columns` elements that fill four warps with 16 bytes a thread."""
    return 4 * (32 * vector // columns)


def padded_width(width: int, dtype: Any, count: int) -> int:
    """Returns the width that TMA needs, for `count` rows: they begin at multiples of 16 bytes.

    A part of a single row is contiguous, and other rows may follow under vmap: no fragment may overrun it.
    """
    if width > NARROW:
        return -(-width // _SEGMENT) * _SEGMENT
    vector = 16 // jnp.dtype(dtype).itemsize
    multiple = vector if count > 1 else 32 * vector
    return max(-(-width // multiple) * multiple, 32)  # 32: two fragments whose rows are two threads or more


def collapse(shape: tuple[int, ...], full: Sequence[tuple[bool, ...]]) -> Merged:
    """Groups neighbouring row axes, where every operand has all of a group or broadcasts all of it.

    `shape` is that of x without its last axis; `full` tells for each operand that broadcasts which of these
    axes it has. Axes of size 1 are in no group.
    """
    merged: list[list[int]] = []
    for axis, n in enumerate(shape):
        if merged and all(f[merged[-1][-1]] == f[axis] for f in full) and n > 1:
            merged[-1].append(axis)
        elif n > 1:
            merged.append([axis])
    return merged or [[]]


def view(x: jax.Array, merged: Merged) -> jax.Array:
    """Merges the row axes of `x` by `merged`, pads its width, and cuts it into segments if it is wide."""
    width = padded_width(x.shape[-1], x.dtype, math.prod(x.shape[:-1]))
    x = x.reshape(*(math.prod(x.shape[a] for a in axes) for axes in merged), x.shape[-1])
    if x.shape[-1] != width:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
    return x.reshape(*x.shape[:-1], -1, _SEGMENT) if width > NARROW else x


class RowBlock:
    """A block of the grid, inside a kernel: copies of its tiles, their fragments, reductions over a row."""

    def __init__(self, tiling: Tiling, rows: Sequence[int], inputs, output, buffers, shared):
        """Takes rows that are merged into axes of the sizes `rows`, and refs as `run` makes them."""
        self.tiling, self._inputs, self._output, self._buffers = tiling, inputs, output, buffers
        self._loaded, self._values, self._ready = shared
        self._reductions = 0
        self._box = min(tiling.rows, rows[-1])  # rows of a tile of narrow rows that exist
        self.wg = lax.axis_index("wg") if tiling.warpgroups > 1 else jnp.int32(0)
        rest, index = lax.axis_index("block"), []
        for n in reversed(_blocks(tiling, rows)):
            index.append(lax.rem(rest, jnp.int32(n)))
            rest = lax.div(rest, jnp.int32(n))
        self._index = index[::-1]

    def _slot(self, k: Any) -> Any:
        return lax.rem(k, jnp.int32(self.tiling.slots))

    def _each_part(self, array: Any, buffer: Any, k: Any, copy: Callable[[Any, Any], None]) -> None:
        """Calls `copy(part of the array in global memory, its target)` for all parts of the k-th tile."""
        # where the tile is: the block's rows, one for all where the array broadcasts
        tiling, n = self.tiling, self.tiling.segments
        at = [0 if n == 1 else i for n, i in zip(array.shape, self._index, strict=False)]
        target = buffer.at[self.wg, self._slot(k)]

        # left or right halves of segments; a row that all rows of the tile share; or those of several rows
        def part(i, _):
            columns = pl.ds(i * tiling.columns, tiling.columns)
            if tiling.wide:
                first = (self.wg + k * tiling.warpgroups) * n
                copy(array.at[(*at, pl.ds(first, n), columns)], target.at[pl.ds(i * n, n), whole])
            elif self._shared_by_rows(buffer):
                pitch = _pitch(tiling, array.dtype)
                copy(array.at[(*at, columns)], target.at[i * pitch, whole])
            else:
                rows = pl.ds(self._index[-1] * tiling.rows, self._box)
                there = target.at[pl.ds(i * tiling.rows, self._box), whole]
                copy(array.at[(*at[:-1], rows, columns)], there)

        # Were it plain that all columns of a target are taken, the compiler would lay out shared memory in
        # tiles that suit the registers, and TMA then asks that such tiles divide the array.
        whole = pl.ds(lax.shift_right_logical(lax.axis_index("block"), jnp.int32(31)), tiling.columns)
        parts = jnp.int32(2 if tiling.wide else tiling.fragments)
        lax.fori_loop(jnp.int32(0), parts, part, None)

    def _shared_by_rows(self, buffer: Any) -> bool:
        """Tells whether a buffer holds one row for all rows of a fragment."""
        return buffer.shape[2] < self.tiling.fragments * self.tiling.rows

    def _barrier(self, k: Any) -> Any:
        return self._loaded.at[self.wg * self.tiling.slots + self._slot(k)]

    def _load(self, k: Any) -> None:
        """Begins to load the k-th tile of every input."""
        for array, buffer in zip(self._inputs, self._buffers, strict=True):
            copy = lambda part, target: plgpu.copy_gmem_to_smem(part, target, self._barrier(k))
            self._each_part(array, buffer, k, copy)

    def _target(self, array: int, k: Any, i: int) -> Any:
        rows = self.tiling.rows
        return self._buffers[array].at[self.wg, self._slot(k), pl.ds(i * rows, rows)]

    def fragment(self, array: int, k: Any, i: int) -> jax.Array:
        """Returns fragment i of the k-th tile of an input, by number; it must be loaded."""
        tiling, buffer = self.tiling, self._buffers[array]
        if not self._shared_by_rows(buffer):
            return _read(self._target(array, k, i), tiling.layout)
        row = buffer.at[self.wg, self._slot(k), i * _pitch(tiling, buffer.dtype)]
        row = _read(row, tiling.layout.reduce(0))
        return lax.broadcast_in_dim(row, (tiling.rows, tiling.columns), [1])

    def forwards(self, step: Callable[[Any, bool, Any], Any], carry: Any) -> Any:
        """Loads all tiles; `carry = step(k, last, carry)` for each."""
        # as many tiles as there is shared memory for are on their way
        tiles, slots = self.tiling.tiles, self.tiling.slots
        lax.fori_loop(jnp.int32(0), jnp.int32(slots), lambda k, _: self._load(k), None)

        # all but the last, each of which makes room for the tile `slots` after it
        def one(k, carry):
            plgpu.barrier_wait(self._barrier(k))
            carry = step(k, False, carry)

            @pl.when(k + slots < tiles)
            def _():
                plgpu.commit_smem()  # all threads have read the tile that is overwritten
                self._load(k + slots)

            return carry

        if tiles > 1:
            carry = lax.fori_loop(jnp.int32(0), jnp.int32(tiles - 1), one, carry)
        plgpu.barrier_wait(self._barrier(jnp.int32(tiles - 1)))
        return step(jnp.int32(tiles - 1), True, carry)

    def backwards(self, function: Callable[[Any, bool], Iterable[jax.Array]]) -> None:
        """Writes `function(k, last)` for all tiles, the last first; loads what is gone once more."""
        # the last tile is still there
        tiles, slots = self.tiling.tiles, self.tiling.slots
        self._store(jnp.int32(tiles - 1), function(jnp.int32(tiles - 1), True))

        # so are the `slots` last ones; those before them are loaded again
        def one(i, _):
            k = tiles - 1 - i

            @pl.when(k < tiles - slots)
            def _():
                plgpu.barrier_wait(self._barrier(k))

            self._store(k, function(k, False))
            before = k + 1 - slots  # takes the place of tile k + 1, which was written a step ago

            @pl.when(before >= 0)
            def _():
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                self._load(before)

        if tiles > 1:
            lax.fori_loop(jnp.int32(1), jnp.int32(tiles), one, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _store(self, k: Any, fragments: Iterable[jax.Array]) -> None:
        """Begins to write a tile of the output; it takes the place of the tile of the first input."""
        for i, fragment in enumerate(fragments):
            target = self._target(0, k, i)
            target[...] = fragment.astype(target.dtype)
        plgpu.commit_smem()
        copy = lambda part, target: plgpu.copy_smem_to_gmem(target, part, commit_group=False)
        self._each_part(self._output, self._buffers[0], k, copy)
        plgpu.commit_smem_to_gmem_group()

    def full(self, value: float) -> jax.Array:
        """Fills a fragment of float32."""
        tiling = self.tiling
        fragment = jnp.full((tiling.rows, tiling.columns), value, jnp.float32)
        return plgpu.layout_cast(fragment, tiling.layout)

    def position(self, k: Any, i: int) -> tuple[Any, Any]:
        """Returns (row, column) of the elements of a fragment, along the last row axis and the columns."""
        tiling = self.tiling
        index = [
            plgpu.broadcasted_iota(jnp.int32, (tiling.rows, tiling.columns), axis, layout=tiling.layout)
            for axis in (0, 1)
        ]
        if not tiling.wide:
            return self._index[-1] * tiling.rows + index[0], i * tiling.columns + index[1]
        half, i = divmod(i, tiling.fragments // 2)
        first = (self.wg + k * tiling.warpgroups) * tiling.segments + i * tiling.rows
        return self._index[-1], (first + index[0]) * _SEGMENT + half * tiling.columns + index[1]

    def overruns(self, i: int, last: bool, width: int) -> bool:
        """Tells whether fragment i of a tile, maybe the last of its row, has columns beyond `width`."""
        if self.tiling.wide:
            own = self.tiling.tiles * self.tiling.segments * _SEGMENT
            return last and own * self.tiling.warpgroups > width
        return (i + 1) * self.tiling.columns > width

    def row_value(self, kind: str, fragment: jax.Array) -> jax.Array:
        """Computes the "max" or "sum" of a row from values `[rows, columns]` at the places of a fragment.

        The result broadcasts to a fragment.
        """
        # of narrow rows each has its own, within a warp
        value = fragment.max(axis=1) if kind == "max" else fragment.sum(axis=1)
        if not self.tiling.wide:
            return lax.broadcast_in_dim(value, fragment.shape, [0])
        # a wide row has one of all rows of the fragment and all warpgroups, through shared memory
        values = self._values.at[self._reductions]
        self._reductions += 1
        values[self.wg] = value
        plgpu.commit_smem()
        plgpu.barrier_arrive(self._ready)
        plgpu.barrier_wait(self._ready)
        combine = jnp.maximum if kind == "max" else jnp.add
        all_values = itertools.product(range(self.tiling.warpgroups), range(self.tiling.rows))
        return functools.reduce(combine, (values[at] for at in all_values))


def _read(ref: Any, layout: Any) -> jax.Array:
    return mosaic_gpu.load(ref, layout=layout, optimized=False)


def _pitch(tiling: Tiling, dtype: Any) -> int:
    """Counts the rows of shared memory that a row of a fragment takes: copies begin at 128 bytes."""
    return max(1, 128 // (tiling.columns * jnp.dtype(dtype).itemsize))


def _blocks(tiling: Tiling, rows: Sequence[int]) -> list[int]:
    """Returns how many blocks there are along each axis of rows."""
    return [*rows[:-1], rows[-1] if tiling.wide else -(-rows[-1] // tiling.rows)]


def run(
    body: Callable[[RowBlock], None],
    name: str,
    arrays: Sequence[jax.Array],
    *,
    tiling: Tiling,
    interpret: bool,
) -> jax.Array:
    """Calls `body` for every block; the result has the type of the first of the `arrays`, which are views."""
    # shared memory for the tiles of each array; of one that all rows share, a row for each fragment
    first, *_ = arrays = vary_alike(list(arrays))
    rows = first.shape[: -2 if tiling.wide else -1]

    def buffer(x):
        shared_by_rows = not tiling.wide and x.shape[len(rows) - 1] < rows[-1]
        height = tiling.fragments * (_pitch(tiling, x.dtype) if shared_by_rows else tiling.rows)
        return plgpu.SMEM((tiling.warpgroups, tiling.slots, height, tiling.columns), x.dtype)

    # a barrier for each slot of a warpgroup; the row values of two reductions, and their barrier
    copies = len(arrays) * (2 if tiling.wide else tiling.fragments)
    shared = [
        plgpu.Barrier(num_arrivals=copies, num_barriers=tiling.warpgroups * tiling.slots),
        plgpu.SMEM((2, tiling.warpgroups, tiling.rows), jnp.float32),
        plgpu.Barrier(num_arrivals=tiling.warpgroups),
    ]

    def kernel(*refs):
        n = len(arrays)
        inputs, output, buffers, rest = refs[:n], refs[n], refs[n + 1 : 2 * n + 1], refs[2 * n + 1 :]
        body(RowBlock(tiling, rows, inputs, output, buffers, rest))

    # a block for each row of wide rows, or each tile of narrow ones
    call = launch(
        kernel,
        name,
        interpret=interpret,
        out_type=out_type(first.shape, first.dtype, arrays),
        scratch=[*map(buffer, arrays), *shared],
        grid={"block": math.prod(_blocks(tiling, rows))},
        warpgroups=tiling.warpgroups,
    )
    return call(*arrays)


def _softmax(options: Options, interpret: bool, x: jax.Array, planes: dict) -> jax.Array:
    """Computes y of one shard."""
    # axes that every array has, or broadcasts over, are one axis; a band is that of the last one
    row_axes, width = x.shape[:-1], x.shape[-1]
    banded = options.is_causal or options.window is not None
    full = [tuple(n > 1 for n in plane.shape[:-1]) for plane in planes.values()]
    if banded:
        full.append((*(False,) * (len(row_axes) - 1), True))
    merged = collapse(row_axes, full)
    # tiles by the width that TMA needs
    arrays = kernel_rules.read_arrays(x, planes)
    padded = padded_width(width, x.dtype, math.prod(row_axes))
    tiling = Tiling.default_for(
        math.prod(row_axes[a] for a in merged[-1]),
        padded,
        x.dtype,
        sum(a.dtype.itemsize for a in arrays),
        _ELEMENTS[padded <= NARROW],
    )
    # the kernel reads x and the planes by number
    where = {name: 1 + i for i, name in enumerate(planes)}
    position = banded and row_axes[-1] > 1  # whether the last row axis is that of the band
    body = partial(_kernel, options, width, where, position)
    views = [view(a, merged) for a in arrays]
    y = run(body, "softmax_forward", views, tiling=tiling, interpret=interpret)
    return y.reshape(*row_axes, padded)[..., :width]


def _kernel(options: Options, width: int, where: dict[str, int], has_rows: bool, block: RowBlock) -> None:
    """Computes y of the rows of a block.

    `where` numbers the planes; `has_rows`: the last row axis is x's axis -2, which has rows.
    """
    tiling = block.tiling
    factor, slope, weight = kernel_rules.exponent(options, "bias" in where)

    def logits(k, i, last):
        """Returns z of a fragment `[rows, columns]`, -inf where nothing is seen."""
        z = block.fragment(0, k, i).astype(jnp.float32)
        z = z if factor == 1 else z * factor
        # the bias, and what hides: a bias of -inf, the mask, the band, the end of the row
        terms = []
        if "bias" in where:
            bias = block.fragment(where["bias"], k, i).astype(jnp.float32)
            z, terms = z + (bias if weight == 1 else bias * weight), [bias != -jnp.inf]
        if "mask" in where:
            terms.append(block.fragment(where["mask"], k, i) != jnp.int8(0))
        banded, overruns = options.is_causal or options.window, block.overruns(i, last, width)
        if banded or overruns:
            row, column = block.position(k, i)
            row = row if has_rows else jnp.int32(0)
            terms.append(masks.in_band(row, column, options.is_causal, options.window))
            terms.append(column < width if overruns else None)
        visible = masks.conjunction(*terms)
        return z if visible is None else jnp.where(visible, z, -jnp.inf)

    def exponential(z, top):
        return jnp.exp2((z - top) * np.float32(slope))

    # forwards: at each place of a fragment the maximum m of what came by, and the sum of exp(z - m)
    def add(k, last, carry):
        before, total, _ = carry
        z = [logits(k, i, last) for i in range(tiling.fragments)]
        m = functools.reduce(jnp.maximum, z, before)
        top = finite(m)
        e = [exponential(fragment, top) for fragment in z]
        total = functools.reduce(jnp.add, e, total * exponential(before, top))
        return m, total, e if tiling.tiles == 1 else None

    m, total, e = block.forwards(add, (block.full(-jnp.inf), block.full(0.0), None))
    # over all places of the row
    top = finite(block.row_value("max", m))
    correction = exponential(m, top)
    total = block.row_value("sum", total * correction)
    inverse = jnp.where(total == 0, 0.0, 1 / total)
    # backwards: y, from exponentials that are still there, or from logits once more
    if tiling.tiles == 1:
        correction = correction * inverse
        block.backwards(lambda k, last: (fragment * correction for fragment in e))
    else:
        block.backwards(
            lambda k, last: (exponential(logits(k, i, last), top) * inverse for i in range(tiling.fragments))
        )


# ---- backward: (4), (5) and (7) of `backward.py`; the gradient of a bias is XLA's, see `rules.by_kernels`


def _dx(scale: float, interpret: bool, y: jax.Array, dy: jax.Array) -> jax.Array:
    """Computes dx of one shard: the rows of all axes are one axis, of padded width."""
    count = y.size // y.shape[-1]
    width = padded_width(y.shape[-1], y.dtype, count)
    merged = collapse(y.shape[:-1], [])
    tiling = Tiling.default_for(count, width, y.dtype, 2 * y.dtype.itemsize, _ELEMENTS_BACKWARD)
    arrays = [view(x, merged) for x in (y, dy)]
    body = partial(_dx_kernel, scale)
    dx = run(body, "softmax_backward", arrays, tiling=tiling, interpret=interpret)
    return dx.reshape(*y.shape[:-1], width)[..., : y.shape[-1]]


def _dx_kernel(scale: float, block: RowBlock) -> None:
    """Computes dx of the rows of a block."""
    tiling = block.tiling

    def fragments(k):
        """Yields y and dy `[rows, columns]` of each fragment of the k-th tile."""
        for i in range(tiling.fragments):
            y = block.fragment(0, k, i).astype(jnp.float32)
            dy = block.fragment(1, k, i).astype(jnp.float32)
            yield y, jnp.where(y == 0, 0.0, dy)  # what dy holds where y is 0 (masked) is not read

    def add(k, last, dot):
        return functools.reduce(jnp.add, (y * dy for y, dy in fragments(k)), dot)

    # forwards over the tiles of a row the dot product, backwards dx, from what is still there
    dot = block.row_value("sum", block.forwards(add, block.full(0.0)))  # (4)
    block.backwards(lambda k, last: (scale * (y * (dy - dot)) for y, dy in fragments(k)))  # (5), (7)


supports = partial(kernel_rules.unsupported, dtypes=_DTYPES)
forward, backward = kernel_rules.by_kernels(mosaic_gpu.NAME, _softmax, _dx)
