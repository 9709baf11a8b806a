"""What the Hopper kernels of dense attention share: which tiles they visit, what a tile sees.

XLA prepares the inputs (`inputs.py`), and for each tile of queries the run of key tiles that it
visits, or the reverse: int32 [B|1, tiles, 4]. A kernel visits the tiles `first <= j < end`; those with
`full_first <= j < full_end` need no comparison.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core import dropout, masks, mosaic_gpu
from jax_attn_bwd._core.hopper import COLUMNS, ROWS, WGMMA
from jax_attn_bwd.ops.dot_product import modifiers
from jax_attn_bwd.ops.dot_product.kernels import functions
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.kernels.inputs import (
    LN_2,
    LOG2_E,
    Inputs,
    at,
    dropout_keys,
    is_plain,
    pad,
    tile_flags,
    whole,
)
from jax_attn_bwd.ops.dot_product.kernels.logits import Logits, unmasked
from jax_attn_bwd.ops.dot_product.spec import Operands, Options

__all__ = ["LN_2", "LOG2_E", "Inputs", "at", "dropout_keys", "is_plain", "pad", "whole"]

COMPUTE_WARPGROUPS = 2
HEAD = 64  # head sizes are padded to a multiple: 128 bytes, one swizzled row
LENGTH = 128  # sequences likewise; tiles divide it, or are a multiple of it that divides the length
# what functions may be made of
_LOWERS = functions.EVERYWHERE | frozenset(("exp", "exp2", "tanh", "one_minus_square", "add_any"))


@dataclass(frozen=True)
class Tiling:
    """Tiles of a kernel: changes speed and rounding, never the meaning.

    Attributes:
      block_q: query rows of one warpgroup, or of one step where a kernel steps over queries.
      block_k: keys of one step, or of one warpgroup where a kernel steps over queries.
      stages: steps whose loads are in flight.
      overlap: products q k^T and dout v^T run together (needs registers for both).
    """

    block_q: int
    block_k: int
    stages: int
    overlap: bool = True

    @property
    def swizzle(self) -> int:
        """Bytes of a swizzled row that divide both blocks."""
        return 2 * min(64, self.block_q, self.block_k)


def unsupported(options: Options, operands: Operands) -> str | None:
    """Why the kernels cannot run this call; None if they can."""
    q, v = operands.query, operands.value
    if (reason := functions.unsupported(options, operands, _LOWERS)) is not None:
        return reason
    if functions.reads_floats(options, operands):
        return "it sums no gradients of mod_args, and score_mod reads floats of them"
    if not all(isinstance(n, int) for x in jax.tree.leaves(operands) for n in x.shape):
        return "it needs static shapes"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it multiplies bfloat16 and float16 on tensor cores, not {q.dtype}"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"head sizes go up to 256, got H = {q.shape[-1]} and Hv = {v.shape[-1]}"
    if 0 in (*q.shape, *v.shape):
        return "there is nothing to compute"
    if math.prod(q.shape[:-3]) * q.shape[-2] >= 2**16:
        return "a grid holds fewer than 65536 batch entries times heads"
    if operands.bias is not None and operands.bias.dtype == jnp.float64:
        return "a float64 bias asks for float64 arithmetic"
    if not isinstance(options.precision, lax.Precision | None):
        return f"it has one product algorithm, got precision={options.precision}"
    return kernel_inputs.sharded_sequence(operands)


def inputs(options: Options, operands: Operands, keys: jax.Array | None) -> Inputs:
    """`kernel_inputs.inputs`, padded for these kernels."""
    padding = kernel_inputs.Padding(LENGTH, LENGTH, HEAD)
    refs = kernel_inputs.inputs(options, operands, keys, padding)
    end = refs.columns_end
    return refs._replace(columns_end=None if end is None else jnp.asarray(end))


def pad_heads(x: jax.Array) -> jax.Array:
    """`[B, T, N, H]` with whole T and H."""
    return pad(x, {-3: LENGTH, -1: HEAD})


def bounds(options: Options, refs: Inputs, rows: int, columns: int, by_key: bool = False) -> jax.Array | None:
    """Which tiles a tile visits, as `Inputs.bounds`: rows x columns is the size of a tile.

    For each tile of queries over the tiles of keys; with `by_key` the reverse. None: all, and all full.
    """
    some, every = tile_flags(options, refs, rows, columns)
    if by_key:
        some, every = some.swapaxes(-1, -2), every.swapaxes(-1, -2)
    if isinstance(every, np.ndarray) and every.all():
        return None
    xp = np if isinstance(every, np.ndarray) else jnp
    n = some.shape[-1]
    first = some.argmax(-1)
    end = xp.where(some.any(-1), n - some[..., ::-1].argmax(-1), 0)
    full_first = every.argmax(-1)
    after = ~every & (xp.arange(n)[None, None] >= full_first[..., None])
    full_end = xp.where(after.any(-1), after.argmax(-1), n)
    return jnp.stack([jnp.asarray(x, jnp.int32) for x in (first, full_first, full_end, end)], -1)


class Bounds(NamedTuple):
    """Which tiles one tile of the other side visits."""

    ref: Any  # int32 [4] in global memory, or None
    first: Any
    end: Any

    @classmethod
    def load(cls, refs: Inputs, b: Any, tile: Any, count: int) -> "Bounds":
        """Of `tile`; `count` is the number of tiles if all are visited."""
        if refs.bounds is None:
            return cls(None, jnp.int32(0), jnp.int32(count))
        ref = refs.bounds.at[at(refs.bounds, 0, b), tile]
        return cls(ref, ref[0], ref[3])

    def mixed(self, step: Any) -> Any:
        """Whether tile `step` must be compared element by element.

        Reads memory at every step: registers are scarcer than loads that hit the cache.
        """
        if self.ref is None:
            return jnp.bool_(False)
        return (step < self.ref[1]) | (step >= self.ref[2])

    def opaque_zero(self) -> Any:
        """0, which compilers cannot know: addresses it is added to are computed inside the loop.

        Hoisted out of it, the descriptors of a tile with H = 256 take more registers than there are.
        """
        return jnp.int32(0) if self.ref is None else lax.shift_right_logical(self.ref[1], jnp.int32(31))


class Tile(NamedTuple):
    """Where a tile lies: batch entry, query head, first row and column, and how it is held."""

    b: Any
    n: Any
    row: Any
    column: Any
    shape: tuple[int, int]
    transposed: bool = False  # rows along axis 1
    staged: dict[str, Any] | None = None  # loaders of row tokens in shared memory, by the field of Inputs

    def axis(self, side: int) -> int:
        """The axis of the tile that runs over queries (side 0) or keys (side 1)."""
        return 1 - side if self.transposed else side

    def start(self, side: int) -> Any:
        """The first query or key."""
        return self.column if side else self.row

    def offset(self, side: int) -> jax.Array:
        """Of each element's query or key from the first one, over the tile."""
        return plgpu.broadcasted_iota(jnp.int32, self.shape, self.axis(side), layout=WGMMA)

    def spread(self, x: jax.Array, side: int) -> jax.Array:
        """A value per query or key over the tile."""
        return lax.broadcast_in_dim(x, self.shape, [self.axis(side)])

    def vector(self, ref: Any, side: int) -> jax.Array:
        """The values of the tile's queries or keys, from global memory `[n]`."""
        axis = self.axis(side)
        rows = ref.at[pl.ds(self.start(side), self.shape[axis])]
        return mosaic_gpu.load(rows, layout=COLUMNS if axis else ROWS, optimized=False)

    def tokens(self, refs: Inputs, name: str) -> jax.Array:
        """A field of `Inputs` that is `[B|1, n]`, over the tile."""
        side, ref = int(name.startswith("column")), getattr(refs, name)
        if self.staged and name in self.staged:
            return self.spread(self.staged[name](), side)
        return self.spread(self.vector(ref.at[at(ref, 0, self.b)], side), side)

    def value(self, ref: Any) -> jax.Array:
        """What a function is handed, `[B|1, N|1, T|1, S|1]`: a scalar, or over the tile."""
        ref = ref.at[at(ref, 0, self.b), at(ref, 1, self.n)]
        if ref.shape == (1, 1):
            return ref[0, 0]
        side = 0 if ref.shape[1] == 1 else 1
        return self.spread(self.vector(ref.at[0] if side else ref.at[:, 0], side), side)

    def plane(self, ref: Any) -> jax.Array:
        """The tile of a plane `[B|1, N|1, T|1, S|1]`."""
        ref = ref.at[at(ref, 0, self.b), at(ref, 1, self.n)]
        if ref.shape[0] == 1:
            if ref.shape[1] == 1:
                return jnp.full(self.shape, ref[0, 0])
            return self.spread(self.vector(ref.at[0], 1), 1)
        if ref.shape[1] == 1:
            return self.spread(self.vector(ref.at[:, 0], 0), 0)
        size = [self.shape[self.axis(side)] for side in (0, 1)]
        block = ref.at[pl.ds(self.row, size[0]), pl.ds(self.column, size[1])]
        if not self.transposed:
            return mosaic_gpu.load(block, layout=WGMMA, optimized=False).astype(jnp.float32)
        layout = plgpu.Layout.WGMMA_TRANSPOSED
        x = mosaic_gpu.load(block.T, layout=layout, optimized=False).astype(jnp.float32)
        return plgpu.layout_cast(x, WGMMA)


def logits(options: Options, refs: Inputs, products: jax.Array, tile: Tile, mixed: Any) -> Logits:
    """The logits of a tile of products q k^T, -inf where nothing is seen."""

    def plane(name):
        x = tile.plane(getattr(refs, name))
        return x.astype(jnp.float32) if name == "bias" else x

    def scored(x):
        return _on_tile(partial(modifiers.scored, options), x, refs, tile)

    found, terms = unmasked(options, refs, products, functions.tanh, plane, scored)
    x = found.x
    if terms:
        x = jnp.where(masks.conjunction(*terms), x, -jnp.inf)
    in_band = options.is_causal or options.window is not None
    if in_band or options.mask_mod or refs.columns_end is not None or refs.row_segment is not None:
        masked = lambda: jnp.where(_seen(options, refs, tile), x, -jnp.inf)
        x = lax.cond(mixed, masked, lambda: x) if refs.bounds is not None else x
    return found._replace(x=x)


def _seen(options: Options, refs: Inputs, tile: Tile) -> jax.Array:
    terms = []
    if options.is_causal or options.window is not None:
        terms.append(_in_band(options, refs, tile))
    if refs.columns_end is not None:
        end = refs.columns_end[at(refs.columns_end, 0, tile.b)]
        terms.append(tile.offset(1) < end - tile.column)
    if refs.row_segment is not None:
        terms.append(tile.tokens(refs, "row_segment") == tile.tokens(refs, "column_segment"))
    if options.mask_mod is not None:
        numbers = refs.batch_number[tile.b], refs.head_number[tile.n]
        mask_mod = functions.for_gpus(options.mask_mod)
        values = (tile.value(ref) for ref in refs.mask_values)
        terms.append(functions.on_tile(mask_mod, *numbers, *_positions(refs, tile), *values))
    return masks.conjunction(*terms)


def score_slope(options: Options, refs: Inputs, before: jax.Array, tile: Tile) -> jax.Array:
    """The derivative of `score_mod` by the logits that it is handed (8a)."""

    def slope(x, at, values):
        return modifiers.pulled_back(options, x, at, values, jnp.ones_like(x), to_args=False)[0]

    return _on_tile(slope, before, refs, tile)


def _on_tile(function: Any, logits: jax.Array, refs: Inputs, tile: Tile) -> jax.Array:
    """`function(logits, where they stand, what the score is handed)`."""
    row, column = _positions(refs, tile)
    numbers = refs.batch_number[tile.b], refs.head_number[tile.n]
    values = [tile.value(ref) for ref in refs.score_values]

    def call(logits, batch, head, row, column, *values):
        return function(logits, modifiers.Tile(batch, head, row, column, None), values)

    return functions.on_tile(functions.for_gpus(call), logits, *numbers, row, column, *values)


def _positions(refs: Inputs, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """(rows, columns) of the elements, over the tile."""
    row, column = (
        tile.offset(side) + tile.start(side) if getattr(refs, name) is None else tile.tokens(refs, name)
        for side, name in enumerate(("row_position", "column_position"))
    )
    return row, column


def _in_band(options: Options, refs: Inputs, tile: Tile) -> jax.Array:
    """`masks.in_band` with few registers: one comparison an element, of offsets where they suffice."""
    if refs.row_position is None and refs.column_position is None:
        row, column = tile.offset(0) + (tile.row - tile.column), tile.offset(1)
    else:
        row, column = _positions(refs, tile)
    if options.window is None:
        return column <= row
    left, right = options.window
    width = left + (0 if options.is_causal else right)
    distance = column - (row - jnp.int32(left))  # negative to the left of the band, so huge below
    return lax.convert_element_type(distance, jnp.uint32) <= jnp.uint32(width)


def keep(options: Options, refs: Inputs, tile: Tile) -> jax.Array | None:
    """Which probabilities dropout lets pass; None without dropout."""
    if refs.dropout_keys is None:
        return None
    keys = refs.dropout_keys.at[at(refs.dropout_keys, 0, tile.b), at(refs.dropout_keys, 1, tile.n)]
    row, column = (
        tile.spread(tile.vector(ref, side), side)
        for side, ref in enumerate((refs.row_counter, refs.column_counter))
    )
    return dropout.keep((keys[0], keys[1]), row, column, options.dropout_rate)
