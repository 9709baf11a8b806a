"""What the Hopper kernels of dense attention share: their tiles, and what a tile sees.

XLA prepares the inputs (`inputs.py`), and which tiles are visited (`hopper_bounds.py`).
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
from jax_attn_bwd.ops.dot_product import mod_functions
from jax_attn_bwd.ops.dot_product.kernels import blocks, functions
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.kernels.inputs import (
    LN_2,
    LOG2_E,
    Inputs,
    at,
    dropout_keys,
    is_plain,
    pad,
    whole,
)
from jax_attn_bwd.ops.dot_product.kernels.logits import Logits, unmasked
from jax_attn_bwd.ops.dot_product.spec import KernelOptions, Operands, Options

__all__ = ["LN_2", "LOG2_E", "Inputs", "at", "dropout_keys", "is_plain", "pad", "whole"]

COMPUTE_WARPGROUPS = 2
HEAD = 64  # head sizes are padded to a multiple: 128 bytes, one swizzled row
LENGTH = 128  # sequences likewise; tiles divide it, or are a multiple of it that divides the length
PADDING = kernel_inputs.Padding(LENGTH, LENGTH, HEAD)
# what functions may be made of
_LOWERS = functions.EVERYWHERE | frozenset(
    ("exp", "exp2", "tanh", "one_minus_square", "integer_pow", "square", "add_any", "shift_right_logical")
)


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


def unsupported(call: Options, operands: Operands) -> str | None:
    """Why the kernels cannot run this call; None if they can."""
    options = KernelOptions.of(call, operands.mask)
    q, v = operands.query, operands.value
    if not all(isinstance(n, int) for x in jax.tree.leaves(operands) for n in x.shape):
        return "it needs static shapes"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it multiplies bfloat16 and float16 on tensor cores, not {q.dtype}"
    if (reason := functions.unsupported(options, operands, _LOWERS)) is not None:
        return reason
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


def inputs(options: KernelOptions, operands: Operands, keys: jax.Array | None) -> Inputs:
    """`kernel_inputs.inputs`, padded for these kernels."""
    refs = kernel_inputs.inputs(options, operands, keys, PADDING)
    end, T = refs.columns_end, refs.q.shape[1]
    values = (
        blocks.words(x, T, blocks.per_word(x, LENGTH)) if isinstance(x, blocks.Blocks) else x
        for x in refs.mask_values
    )
    end = None if end is None else jnp.asarray(end)
    return refs._replace(columns_end=end, mask_values=tuple(values))


def pad_heads(x: jax.Array) -> jax.Array:
    """`[B, T, N, H]` with whole T and H."""
    return pad(x, {-3: LENGTH, -1: HEAD})


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
        """The distance of each element's query or key from the first one, over the tile."""
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
        """What a function is handed, `[B|1, N|1, T|1, S|1]` or words: a scalar, or over the tile."""
        if isinstance(ref, blocks.Words):
            return self._of_blocks(ref)
        ref = ref.at[at(ref, 0, self.b), at(ref, 1, self.n)]
        if ref.shape == (1, 1):
            return ref[0, 0]
        side = 0 if ref.shape[1] == 1 else 1
        return self.spread(self.vector(ref.at[0] if side else ref.at[:, 0], side), side)

    def _of_blocks(self, ref: blocks.Words) -> jax.Array:
        """The values of blocks, of bools their bits, over the tile: of as many words as its columns take."""
        each, size = np.int32(blocks.per_word(ref, LENGTH)), self.shape[self.axis(1)]
        first, column = lax.div(self.column, each), self.offset(1) + lax.rem(self.column, each)
        words = ref.words.at[at(ref, 0, self.b), at(ref, 1, self.n)]
        x = self.spread(self.vector(words.at[first, 0], 0), 0)
        for i in range(1, size // each):
            x = jnp.where(column < i * each, x, self.spread(self.vector(words.at[first + i, 0], 0), 0))
        return ref.own_bit(x, column)

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


def logits(options: KernelOptions, refs: Inputs, products: jax.Array, tile: Tile, mixed: Any) -> Logits:
    """The logits of a tile of products q k^T, -inf where nothing is seen."""

    def plane():
        return tile.plane(refs.bias).astype(jnp.float32)

    def scored(x):
        return _on_tile(partial(mod_functions.scored, options), refs, tile, x)

    found, terms = unmasked(options, refs, products, functions.tanh, plane, scored)
    x = found.x
    if terms:
        x = jnp.where(masks.conjunction(*terms), x, -jnp.inf)
    given = options.window, options.mask_mod, refs.columns_end, refs.row_segment, refs.mask
    if options.is_causal or any(x is not None for x in given):
        masked = lambda: jnp.where(_seen(options, refs, tile), x, -jnp.inf)
        x = lax.cond(mixed, masked, lambda: x) if refs.bounds is not None else x
    return found._replace(x=x)


def _seen(options: KernelOptions, refs: Inputs, tile: Tile) -> jax.Array:
    terms = []
    if options.is_causal or options.window is not None:
        terms.append(_in_band(options, refs, tile))
    if refs.columns_end is not None:
        end = refs.columns_end[at(refs.columns_end, 0, tile.b)]
        terms.append(tile.offset(1) < end - tile.column)
    if refs.row_segment is not None:
        terms.append(tile.tokens(refs, "row_segment") == tile.tokens(refs, "column_segment"))
    if refs.mask is not None:
        terms.append(tile.plane(refs.mask) != 0)
    if options.mask_mod is not None:
        numbers = refs.batch_number[tile.b], refs.head_number[tile.n]
        mask_mod = functions.for_gpus(options.mask_mod)
        values = (tile.value(ref) for ref in refs.mask_values)
        terms.append(functions.on_tile(mask_mod, *numbers, *_positions(refs, tile), *values))
    return masks.conjunction(*terms)


def score_slope(options: KernelOptions, refs: Inputs, before: jax.Array, tile: Tile) -> jax.Array:
    """The derivative of `score_mod` by the logits that it is handed (8a)."""

    def slope(x, at, values):
        return mod_functions.pulled_back(options, x, at, values, jnp.ones_like(x), to_args=False)[0]

    return _on_tile(slope, refs, tile, before)


def pulled_back(
    options: KernelOptions, refs: Inputs, before: jax.Array, tile: Tile, dlogits: jax.Array
) -> tuple[jax.Array, list[jax.Array]]:
    """(cotangent of what `score_mod` was handed, of each float in its values) (8a).

    Each is of the size of the tile: what belongs to a row or a column is the sum of its elements.
    """

    def of(x, at, values, dlogits):
        values = tuple(jnp.broadcast_to(value, x.shape) for value in values)
        dx, dvalues = mod_functions.pulled_back(options, x, at, values, dlogits, to_args=True)
        return dx, jax.tree.leaves(dvalues)

    return _on_tile(of, refs, tile, before, dlogits)


def _on_tile(function: Any, refs: Inputs, tile: Tile, logits: jax.Array, *more: jax.Array) -> Any:
    """`function(logits, where they stand, what the score is handed, *more)`."""
    row, column = _positions(refs, tile)
    numbers = refs.batch_number[tile.b], refs.head_number[tile.n]
    values = [tile.value(ref) for ref in refs.score_values]

    def call(logits, batch, head, row, column, *others):
        place, count = mod_functions.Tile(batch, head, row, column, None), len(values)
        return function(logits, place, others[:count], *others[count:])

    return functions.on_tile(functions.for_gpus(call), logits, *numbers, row, column, *values, *more)


def _positions(refs: Inputs, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """(rows, columns) of the elements, over the tile."""
    row, column = (
        tile.offset(side) + tile.start(side) if getattr(refs, name) is None else tile.tokens(refs, name)
        for side, name in enumerate(("row_position", "column_position"))
    )
    return row, column


def _in_band(options: KernelOptions, refs: Inputs, tile: Tile) -> jax.Array:
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


def keep(options: KernelOptions, refs: Inputs, tile: Tile) -> jax.Array | None:
    """Which probabilities dropout lets pass; None without dropout."""
    if refs.dropout_keys is None:
        return None
    keys = refs.dropout_keys.at[at(refs.dropout_keys, 0, tile.b), at(refs.dropout_keys, 1, tile.n)]
    row, column = (
        tile.spread(tile.vector(ref, side), side)
        for side, ref in enumerate((refs.row_counter, refs.column_counter))
    )
    return dropout.keep((keys[0], keys[1]), row, column, options.dropout_rate)
