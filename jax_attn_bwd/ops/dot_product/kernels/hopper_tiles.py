"""Shared by the Hopper kernels of dense attention: tiles, which of them are visited, what a tile sees.

XLA prepares the inputs (`inputs.py`), and tells each tile of queries which tiles of keys it visits, or the
reverse, in one of these forms:

    an array  int32 [B|1, tiles, 4]: a run of tiles, `first <= j < end`; those with
              `full_first <= j < full_end` need no comparison
    Listed    how many tiles, and each of them in order: where a mask may leave holes in the runs
    Each      every tile by itself, likewise, for the kernel whose blocks own one tile each

Kernels read them from memory step by step: registers are scarcer than loads that hit the cache.
"""

import math
from collections.abc import Callable, Sequence
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
from jax_attn_bwd._core.mosaic_gpu import COLUMNS, ROWS, WGMMA
from jax_attn_bwd.ops.dot_product import mod_functions
from jax_attn_bwd.ops.dot_product.kernels import blocks, functions
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.kernels.inputs import Inputs, at
from jax_attn_bwd.ops.dot_product.kernels.tile_flags import Logits, live_first, seen, tile_flags, unmasked
from jax_attn_bwd.ops.dot_product.spec import KernelOptions, Operands, Options

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
    """Returns why the kernels cannot run this call; None if they can."""

    def own(_, operands):
        shape = operands.query.shape
        if math.prod(shape[:-3]) * shape[-2] >= 2**16:
            return "a grid holds fewer than 65536 batch entries times heads"
        return None

    return kernel_inputs.unsupported(
        call, operands, own, ("bfloat16", "float16"), " on tensor cores", _LOWERS
    )


def inputs(options: KernelOptions, operands: Operands, keys: jax.Array | None) -> Inputs:
    """Prepares `kernel_inputs.inputs`, padded for these kernels."""
    refs = kernel_inputs.inputs(options, operands, keys, PADDING)
    end, T = refs.columns_end, refs.q.shape[1]
    values = (
        blocks.words(x, T, blocks.per_word(x, LENGTH)) if isinstance(x, blocks.Blocks) else x
        for x in refs.mask_values
    )
    end = None if end is None else jnp.asarray(end)
    return refs._replace(columns_end=end, mask_values=tuple(values))


class Tile(NamedTuple):
    """A tile of a call: batch entry, query head, first row and column, and how it is held."""

    options: KernelOptions
    refs: Inputs
    b: Any
    n: Any
    row: Any
    column: Any
    shape: tuple[int, int]
    transposed: bool = False  # rows along axis 1
    staged: dict[str, Any] | None = None  # loaders of row tokens in shared memory, by the field of Inputs

    def axis(self, side: int) -> int:
        """Returns the axis of the tile that runs over queries (side 0) or keys (side 1)."""
        return 1 - side if self.transposed else side

    def start(self, side: int) -> Any:
        """Returns the first query or key."""
        return self.column if side else self.row

    def offset(self, side: int) -> jax.Array:
        """Returns the distance of each element's query or key from the first one, over the tile."""
        return plgpu.broadcasted_iota(jnp.int32, self.shape, self.axis(side), layout=WGMMA)

    def spread(self, x: jax.Array, side: int) -> jax.Array:
        """Spreads a value per query or key over the tile."""
        return lax.broadcast_in_dim(x, self.shape, [self.axis(side)])

    def vector(self, ref: Any, side: int) -> jax.Array:
        """Loads the values of the tile's queries or keys from global memory `[n]`."""
        axis = self.axis(side)
        rows = ref.at[pl.ds(self.start(side), self.shape[axis])]
        return mosaic_gpu.load(rows, layout=COLUMNS if axis else ROWS, optimized=False)

    def tokens(self, name: str) -> jax.Array:
        """Loads a field of `Inputs` that is `[B|1, n]`, over the tile."""
        side, ref = int(name.startswith("column")), getattr(self.refs, name)
        if self.staged and name in self.staged:
            return self.spread(self.staged[name](), side)
        return self.spread(self.vector(ref.at[at(ref, 0, self.b)], side), side)

    def value(self, ref: Any) -> jax.Array:
        """Loads what a function is handed, `[B|1, N|1, T|1, S|1]` or words: a scalar, or over the tile."""
        if isinstance(ref, blocks.Words):
            return self._of_blocks(ref)
        ref = ref.at[at(ref, 0, self.b), at(ref, 1, self.n)]
        if ref.shape == (1, 1):
            return ref[0, 0]
        side = 0 if ref.shape[1] == 1 else 1
        return self.spread(self.vector(ref.at[0] if side else ref.at[:, 0], side), side)

    def _of_blocks(self, ref: blocks.Words) -> jax.Array:
        """Loads the values of blocks, of bools their bits, over the tile: from as many words as it takes."""
        # the word of the tile's first column, and where each column stands from that word on
        each, size = np.int32(blocks.per_word(ref, LENGTH)), self.shape[self.axis(1)]
        first, column = lax.div(self.column, each), self.offset(1) + lax.rem(self.column, each)
        # a word a row, the next one where the columns of the one before end
        words = ref.words.at[at(ref, 0, self.b), at(ref, 1, self.n)]
        x = self.spread(self.vector(words.at[first, 0], 0), 0)
        for i in range(1, size // each):
            x = jnp.where(column < i * each, x, self.spread(self.vector(words.at[first + i, 0], 0), 0))
        return ref.own_bit(x, column)

    def plane(self, ref: Any) -> jax.Array:
        """Loads the tile of a plane `[B|1, N|1, T|1, S|1]`."""
        ref = ref.at[at(ref, 0, self.b), at(ref, 1, self.n)]
        # one value for all, one a column, or one a row
        if ref.shape[0] == 1:
            if ref.shape[1] == 1:
                return jnp.full(self.shape, ref[0, 0])
            return self.spread(self.vector(ref.at[0], 1), 1)
        if ref.shape[1] == 1:
            return self.spread(self.vector(ref.at[:, 0], 0), 0)
        # one an element; a transposed tile is loaded in the layout of its transpose
        size = [self.shape[self.axis(side)] for side in (0, 1)]
        block = ref.at[pl.ds(self.row, size[0]), pl.ds(self.column, size[1])]
        if not self.transposed:
            return mosaic_gpu.load(block, layout=WGMMA, optimized=False).astype(jnp.float32)
        layout = plgpu.Layout.WGMMA_TRANSPOSED
        x = mosaic_gpu.load(block.T, layout=layout, optimized=False).astype(jnp.float32)
        return plgpu.layout_cast(x, WGMMA)

    def elements(self) -> jax.Array:
        """Loads the tile of the mask array."""
        return self.plane(self.refs.mask)

    def positions(self) -> tuple[jax.Array, jax.Array]:
        """Returns (rows, columns) of the elements, over the tile."""
        row, column = (
            self.offset(side) + self.start(side) if getattr(self.refs, name) is None else self.tokens(name)
            for side, name in enumerate(("row_position", "column_position"))
        )
        return row, column

    def in_band(self) -> jax.Array:
        """Does what `masks.in_band` does with few registers: one comparison, of offsets if they will do."""
        options, refs = self.options, self.refs
        if refs.row_position is None and refs.column_position is None:
            row, column = self.offset(0) + (self.row - self.column), self.offset(1)
        else:
            row, column = self.positions()
        if options.window is None:
            return column <= row
        left, right = options.window
        width = left + (0 if options.is_causal else right)
        distance = column - (row - jnp.int32(left))  # negative to the left of the band, so huge below
        return lax.convert_element_type(distance, jnp.uint32) <= jnp.uint32(width)

    def by_function(self, mask_mod: Callable[..., Any]) -> jax.Array:
        """Tells what `mask_mod` lets be seen, of the tile's place and of what XLA read of arrays."""
        numbers = self.refs.batch_number[self.b], self.refs.head_number[self.n]
        values = (self.value(ref) for ref in self.refs.mask_values)
        return functions.on_tile(functions.for_gpus(mask_mod), *numbers, *self.positions(), *values)

    def logits(self, products: jax.Array, mixed: Any) -> Logits:
        """Computes the logits of a tile of products q k^T, -inf where nothing is seen."""
        options, refs = self.options, self.refs

        def plane():
            return self.plane(refs.bias).astype(jnp.float32)

        def scored(x):
            return self._on_tile(partial(mod_functions.scored, options), x)

        # scale, soft cap, bias and score; what a bias of -inf hides is hidden in every tile
        found, terms = unmasked(options, refs, products, functions.tanh, plane, scored)
        x = found.x
        if terms:
            x = jnp.where(masks.conjunction(*terms), x, -jnp.inf)
        # all else that hides, in tiles that must be compared
        given = options.window, options.mask_mod, refs.columns_end, refs.row_segment, refs.mask
        if options.is_causal or any(x is not None for x in given):
            masked = lambda: jnp.where(masks.conjunction(*seen(self, self.b)), x, -jnp.inf)
            x = lax.cond(mixed, masked, lambda: x) if refs.bounds is not None else x
        return found._replace(x=x)

    def score_slope(self, before: jax.Array) -> jax.Array:
        """Computes the derivative of `score_mod` by the logits that it is handed (8a)."""

        def slope(x, at, values):
            one = jnp.ones_like(x)
            return mod_functions.pulled_back(self.options, x, at, values, one, to_args=False)[0]

        return self._on_tile(slope, before)

    def pulled_back(self, before: jax.Array, dlogits: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Returns (cotangent of what `score_mod` was handed, of each float in its values) (8a).

        Each is of the size of the tile: what belongs to a row or a column is the sum of its elements.
        """

        def of(x, at, values, dlogits):
            values = tuple(jnp.broadcast_to(value, x.shape) for value in values)
            dx, dvalues = mod_functions.pulled_back(self.options, x, at, values, dlogits, to_args=True)
            return dx, jax.tree.leaves(dvalues)

        return self._on_tile(of, before, dlogits)

    def _on_tile(self, function: Any, logits: jax.Array, *more: jax.Array) -> Any:
        """Calls `function(logits, where they stand, what the score is handed, *more)`."""
        row, column = self.positions()
        numbers = self.refs.batch_number[self.b], self.refs.head_number[self.n]
        values = [self.value(ref) for ref in self.refs.score_values]

        def call(logits, batch, head, row, column, *others):
            place, count = mod_functions.Elements(batch, head, row, column, None), len(values)
            return function(logits, place, others[:count], *others[count:])

        return functions.on_tile(functions.for_gpus(call), logits, *numbers, row, column, *values, *more)

    def keep(self) -> jax.Array | None:
        """Returns which probabilities dropout lets pass; None without dropout."""
        refs = self.refs
        if refs.dropout_keys is None:
            return None
        keys = refs.dropout_keys.at[at(refs.dropout_keys, 0, self.b), at(refs.dropout_keys, 1, self.n)]
        row, column = (
            self.spread(self.vector(ref, side), side)
            for side, ref in enumerate((refs.row_counter, refs.column_counter))
        )
        return dropout.keep((keys[0], keys[1]), row, column, self.options.dropout_rate)


class Listed(NamedTuple):
    """The tiles that are visited, without holes."""

    words: Any  # int32 [B|1, tiles, 1 + all]: how many, then 2 * tile + (whether it must be compared)


class Each(NamedTuple):
    """All tiles."""

    words: Any  # int32 [B|1, tiles, all]: 0 nothing is seen, 1 all is, 2 it must be compared


def bounds(
    options: KernelOptions, refs: Inputs, rows: int, columns: int, by_key: bool = False, each: bool = False
) -> jax.Array | Listed | Each | None:
    """Finds which tiles a tile visits, as `Inputs.bounds`: rows x columns is the size of a tile.

    For each tile of queries over the tiles of keys; with `by_key` the reverse. None: all, and all full.
    Where there may be holes `Listed`, or with `each` `Each`.
    """
    # of each tile: whether something of it is seen, and whether all is; NumPy if shapes alone decide
    some, every, _ = tile_flags(options, refs, rows, columns, common=64)
    if by_key:
        some, every = some.swapaxes(-1, -2), every.swapaxes(-1, -2)
    xp: Any = np if isinstance(some, np.ndarray) else jnp
    if xp is np and every.all():
        return None
    # the run from the first tile that is seen to the last one
    every = xp.broadcast_to(every, some.shape)
    n = some.shape[-1]
    first = some.argmax(-1)
    end = xp.where(some.any(-1), n - some[..., ::-1].argmax(-1), 0)
    # where it may have holes, tiles one by one
    may_have_holes = any(x is not None for x in (options.mask_mod, refs.mask, refs.bias))
    if may_have_holes and (xp is jnp or (end - first > some.sum(-1)).any()):
        if each:
            return Each(jnp.asarray(some, jnp.int32) * (2 - jnp.asarray(every, jnp.int32)))
        return _listed(xp, some, every)
    # else the full ones within it: from the first full tile to the next that is not
    full_first = every.argmax(-1)
    after = ~every & (xp.arange(n)[None, None] >= full_first[..., None])
    full_end = xp.where(after.any(-1), after.argmax(-1), n)
    return jnp.stack([jnp.asarray(x, jnp.int32) for x in (first, full_first, full_end, end)], -1)


def _listed(xp: Any, some: Any, every: Any) -> Listed:
    """Packs (how many tiles are seen, then 2 * tile + whether it must be compared) for each tile."""
    order, counts = live_first(some)
    compared = ~xp.take_along_axis(every, order, axis=-1)
    counts, order, compared = (x.astype(np.int32) for x in (counts, order, compared))
    return Listed(jnp.asarray(xp.concatenate([counts, 2 * order + compared], -1)))


class Run(NamedTuple):
    """The tiles that one tile of the other side visits, one after the other."""

    ref: Any  # int32 [4] in global memory; None: all, and all full
    first: Any
    end: Any

    @property
    def count(self) -> Any:
        """Counts them."""
        return self.end - self.first

    def tile(self, step: Any) -> Any:
        """Returns the tile that is visited at a step."""
        return self.first + step

    def visits(self, tile: Any) -> Any:
        """Tells whether a tile is visited."""
        return (tile >= self.first) & (tile < self.end)

    def compares(self, tile: Any) -> Any:
        """Tells whether a tile must be compared element by element."""
        if self.ref is None:
            return jnp.bool_(False)
        return (tile < self.ref[1]) | (tile >= self.ref[2])

    def mixed(self, step: Any) -> Any:
        """Tells whether the tile of a step must be compared element by element."""
        return self.compares(self.tile(step))

    def opaque_zero(self) -> Any:
        """Returns 0, which compilers cannot know: addresses it is added to are computed inside the loop.

        Hoisted out of it, the descriptors of a tile with H = 256 take more registers than there are.
        """
        return jnp.int32(0) if self.ref is None else lax.shift_right_logical(self.ref[1], jnp.int32(31))


class Steps(NamedTuple):
    """The tiles that are visited, in a list; the methods are those of `Run`."""

    ref: Any  # int32 [1 + all] in global memory, of `Listed`
    count: Any

    def tile(self, step: Any) -> Any:
        return lax.shift_right_logical(self.ref[step + 1], jnp.int32(1))

    def mixed(self, step: Any) -> Any:
        return (self.ref[step + 1] & 1) != 0

    def opaque_zero(self) -> Any:
        return lax.shift_right_logical(self.ref[0], jnp.int32(31))


class Kinds(NamedTuple):
    """A mark for each tile of the other side; the methods are those of `Run`."""

    ref: Any  # int32 [all] in global memory, of `Each`

    def visits(self, tile: Any) -> Any:
        return self.ref[tile] != 0

    def compares(self, tile: Any) -> Any:
        return self.ref[tile] == 2


def load_bounds(refs: Inputs, b: Any, tile: Any, count: int) -> Any:
    """Loads what `tile` visits: `Run`, `Steps` or `Kinds`; `count` tiles if it visits all."""
    if refs.bounds is None:
        return Run(None, jnp.int32(0), jnp.int32(count))
    (words,) = jax.tree.leaves(refs.bounds)
    ref = words.at[at(words, 0, b), tile]
    if isinstance(refs.bounds, Listed):
        return Steps(ref, ref[0])
    if isinstance(refs.bounds, Each):
        return Kinds(ref)
    return Run(ref, ref[0], ref[3])


def key_rings(refs: Inputs, tiling: Tiling) -> dict[str, Any]:
    """Returns the types of two rings of `stages` places, for k and for v, and of their barriers.

    A barrier `loaded` and one `free` for each place.
    """
    stages, ring = tiling.stages, partial(plgpu.Barrier, num_barriers=tiling.stages)
    places = lambda x: mosaic_gpu.tile((stages, tiling.block_k, x.shape[-1]), refs.q.dtype, tiling.swizzle)
    free = partial(ring, num_arrivals=COMPUTE_WARPGROUPS)
    return dict(
        k_tiles=places(refs.k), v_tiles=places(refs.v), k_loaded=ring(), v_loaded=ring(), k_free=free(),
        v_free=free(),
    )  # fmt: skip


def stream_keys(refs: Inputs, b: Any, head: Any, bounds: Any, tiling: Tiling, rings: Sequence[Any]) -> None:
    """Loads k and v of each tile of keys in `bounds` into two rings, each (tiles, loaded, free)."""

    def source(ref):
        rows = lambda step: pl.ds(bounds.tile(step) * tiling.block_k, tiling.block_k)
        return lambda step: [ref.at[b, rows(step), head]]

    filled = [
        (source(ref), [places], loaded, free)
        for ref, (places, loaded, free) in zip((refs.k, refs.v), rings, strict=True)
    ]
    mosaic_gpu.stream(bounds.count, tiling.stages, filled)
