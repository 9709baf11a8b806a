"""Shared by the TPU kernels of dense attention: tiles, the order of these, what a part of a tile sees.

XLA prepares the inputs (`inputs.py`) and the schedule, one int32 for each tile that is visited. The grid runs
over it, and it lies in scalar memory before a step begins, so the loads of what is skipped are skipped too.
A step holds one tile, and a kernel runs over parts of it, which the compiler overlaps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jax_attn_bwd._core import dropout, masks, mosaic_tpu
from jax_attn_bwd._core.mosaic_tpu import LANES, ZERO
from jax_attn_bwd.ops.dot_product import mod_functions
from jax_attn_bwd.ops.dot_product.kernels import blocks, functions
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.kernels import tpu_distances as distances
from jax_attn_bwd.ops.dot_product.kernels.inputs import Inputs, at, whole
from jax_attn_bwd.ops.dot_product.kernels.tile_flags import Flags, Logits, live_first, seen, unmasked
from jax_attn_bwd.ops.dot_product.spec import KernelOptions, Operands, Options

HEAD = 64  # head sizes are padded to a multiple
_LONGEST = 2**17  # tokens: 1024 of the shortest tiles, so that a schedule fits scalar memory
_MOST_SUMS = 2**19  # gradients of distances in vector memory: 12 MiB, each is there six times
_MOST_STEPS = 2**16  # of all schedules of a call: 256 KiB of the 1 MiB of scalar memory
_LIVE, _MIXED, _FIRST, _LAST = 1, 2, 4, 8  # flags of a step
_COLUMN_SHIFT, _ROW_SHIFT = 4, 17  # of a step's word: 4 bits of flags, 13 for the tile of keys, the rest
_SCALARS = ("rows_end", "columns_end", "sink", "dropout_keys", "batch_number", "head_number")
_FAR = 2**30  # no position is as far as this from another
# what functions may be made of
_LOWERS = functions.EVERYWHERE | frozenset(
    ("exp", "exp2", "log", "log1p", "tanh", "logistic", "sin", "cos", "sqrt", "rsqrt", "pow", "integer_pow")
)
_LOWERS |= {"square", "one_minus_square", "add_any", "floor", "ceil", "round", "stop_gradient"}
_LOWERS |= {"shift_right_logical"}
VALUES = ("mask_values", "score_values")
# fields of `Inputs` with a value a token: of a query (0) or of a key (1)
TOKENS = {
    "row_position": 0,
    "row_segment": 0,
    "row_counter": 0,
    "column_position": 1,
    "column_segment": 1,
    "column_counter": 1,
}


@dataclass(frozen=True)
class Tiling:
    """Tiles of a kernel: changes speed and rounding, never the meaning.

    Attributes:
      block_q, block_k: queries and keys of one step.
      part_q, part_k: of one part of a tile: parts are what the compiler overlaps.
      apart: how many parts a stage of the work runs behind the one before it.
    """

    block_q: int
    block_k: int
    part_q: int
    part_k: int
    apart: int = 0

    @property
    def padding(self) -> kernel_inputs.Padding:
        """Returns the multiples that the operands are padded to."""
        return kernel_inputs.Padding(self.block_q, self.block_k, HEAD)

    def parts(self) -> list[tuple[slice, slice]]:
        """Lists (queries, keys) of each part: neighbours have different queries, and wait for nothing."""
        queries, keys = (
            [slice(i, i + part) for i in range(0, block, part)]
            for block, part in ((self.block_q, self.part_q), (self.block_k, self.part_k))
        )
        return [(q, k) for k in keys for q in queries]


def in_stages(parts: Sequence[Any], stages: Sequence[Callable[[Any, Any], Any]], apart: int) -> None:
    """Runs `value = stage(part, value)` for each part and stage, each `apart` parts behind the one before.

    The compiler overlaps what stands close together in the program: the products of one part with the
    exponentials of another. A program that finishes part after part keeps it from that.
    """
    values: dict[int, Any] = {}
    for step in range(len(parts) + apart * (len(stages) - 1)):
        for n, stage in enumerate(stages):
            i = step - apart * n
            if 0 <= i < len(parts):
                values[i] = stage(parts[i], values.pop(i, None))


def even_block(length: int, limit: int) -> int:
    """Returns a multiple of 128 up to `limit` whose blocks cover `length` with little padding."""
    return whole(-(-length // -(-length // limit)), LANES)


def even_part(block: int, limit: int) -> int:
    """Returns the largest multiple of 128 up to `limit` that divides `block`."""
    return max(n for n in range(LANES, min(block, max(limit, LANES)) + 1, LANES) if block % n == 0)


def is_light(options: KernelOptions, operands: Operands) -> bool:
    """Tells whether an element takes little more than its products: larger tiles are worth compiling."""
    mask = operands.mask
    compares = operands.bias is not None or mask.has_positions or mask.has("elements", "query_segment_ids")
    narrow = max(operands.query.shape[-1], operands.value.shape[-1]) <= 128
    plain = options.logits_soft_cap is None and not options.dropout_rate and options.scale > 0
    plain = plain and options.score_mod is None
    return narrow and plain and operands.query.dtype == jnp.bfloat16 and not compares


def longest_side(options: KernelOptions, operands: Operands) -> int:
    """Picks the side of a light call's tile: a longer one takes fewer bundles a score, but masks more."""
    most_is_masked = options.is_causal and operands.key.shape[-3] <= 8192
    return 1024 if most_is_masked or options.window is not None or options.mask_mod is not None else 2048


def unsupported(call: Options, operands: Operands) -> str | None:
    """Returns why the kernels cannot run this call; None if they can."""
    return kernel_inputs.unsupported(
        call, operands, _too_long, mosaic_tpu.DTYPES, "", _LOWERS, distances=True
    )


def _too_long(options: KernelOptions, operands: Operands) -> str | None:
    """Returns why memory does not hold what is kept of tiles and distances; None if it does."""
    (T, N), (S, K) = operands.query.shape[-3:-1], operands.key.shape[-3:-1]
    if max(T, S) > _LONGEST:
        return f"sequences go up to {_LONGEST}: its list of tiles lies in scalar memory"
    sums = N // K * (T + S) * functions.floats_of_distance(options, operands)
    if sums > _MOST_SUMS:
        return (
            f"the gradients of what score_mod reads at row - column lie in vector memory: up to {_MOST_SUMS} "
            f"distances, of all query heads of a key head, got {sums}"
        )
    return None


def lay_inputs(options: KernelOptions, refs: Inputs, tiling: Tiling) -> Inputs:
    """Lays the inputs as the kernels read them: heads before the sequence, one value a token along lanes."""

    def heads(x):
        return jnp.swapaxes(x, 1, 2)

    def tokens(x):
        return None if x is None else jnp.asarray(x).reshape(-1, 1, x.shape[-1])

    # tokens [B|1, 1, n], planes and values by what they have one value of, q, k and v [B, N|K, n, H]
    fields = {name: tokens(getattr(refs, name)) for name in TOKENS}
    S = refs.k.shape[1]
    planes = {name: _lay_plane(getattr(refs, name), S) for name in ("bias", "mask")}
    values = {name: tuple(_lay_value(x, refs, tiling) for x in getattr(refs, name)) for name in VALUES}
    # where tokens end, for scalar memory
    ends: dict[str, Any] = {}
    if isinstance(refs.rows_end, np.ndarray):  # what lies beyond T is cut off, but functions see it
        ends["rows_end"] = jnp.asarray(refs.rows_end) if functions.any_given(options) else None
    if refs.columns_end is not None:
        ends["columns_end"] = jnp.asarray(refs.columns_end)
    qkv = {name: heads(getattr(refs, name)) for name in ("q", "k", "v")}
    return refs._replace(bounds=None, mod_args=(), **qkv, **fields, **planes, **ends, **values)


def _lay_plane(plane: Any, S: int) -> Any:
    """Lays a plane: one value a row `[B|1, N|1, T, 1]` as `[B|1, N|1, 1, T]`, one for all as `[.., 1, S]`."""
    if plane is None or plane.shape[-1] != 1:
        return plane
    if plane.shape[-2] == 1:
        return jnp.broadcast_to(plane, (*plane.shape[:-1], S))
    return jnp.swapaxes(plane, -1, -2)


def _lay_value(x: Any, refs: Inputs, tiling: Tiling) -> Any:
    """Lays one value a query or key as `[B|1, N|1, 1, n]`, one for all as `[B|1, N|1]`, for scalar memory.

    One a distance as `distances.windows`, one a block as `blocks.Words`.
    """
    side = value_side(x)
    if side == blocks.SIDE:
        return blocks.words(x, refs.q.shape[1], tiling.block_k)
    if side == distances.SIDE:
        return distances.windows(x, tiling)
    return {0: jnp.swapaxes(x, -1, -2), 1: x, None: x[..., 0, 0]}[side]


def value_side(x: Any) -> int | None:
    """Tells what an array holds before it is laid: 1 one value a key, 0 one value a query, None one for all.

    `distances.SIDE` one a distance, `blocks.SIDE` one a block.
    """
    if isinstance(x, blocks.Blocks):
        return blocks.SIDE
    if functions.is_of_distance(x):
        return distances.SIDE
    return None if x.shape[-2:] == (1, 1) else 1 if x.shape[-2] == 1 else 0


def plane_side(plane: Any) -> int | None:
    """Tells what a plane holds before it is laid: 1 one value a key, or for all; 0 one a query; None full."""
    if plane is None or (plane.shape[-2] != 1 and plane.shape[-1] != 1):
        return None
    return 1 if plane.shape[-2] == 1 else 0


class PlaneSides(NamedTuple):
    """`plane_side` of bias and mask, `value_side` of what functions are handed."""

    bias: int | None
    mask: int | None
    mask_values: tuple[int | None, ...]
    score_values: tuple[int | None, ...]

    @classmethod
    def of(cls, refs: Inputs) -> "PlaneSides":
        """Returns the sides of `Inputs` before they are laid."""
        values = (tuple(map(value_side, getattr(refs, name))) for name in VALUES)
        return cls(plane_side(refs.bias), plane_side(refs.mask), *values)

    @property
    def distances(self) -> int:
        """Counts the values of the distance that functions are handed."""
        return (*self.mask_values, *self.score_values).count(distances.SIDE)


def block_specs(locate: Any) -> Callable[..., pl.BlockSpec]:
    """Returns `spec(shape, index)`, where `index(Step)` tells the block of a step that `locate` finds."""
    return lambda shape, index: pl.BlockSpec(shape, lambda *where: index(locate(*where)))


def input_specs(refs: Inputs, sides: PlaneSides, tiling: Tiling, locate: Any) -> Inputs:
    """Returns the block specs of the fields of `refs`; `locate(*grid indices, steps) -> Step`."""
    size, spec = (tiling.block_q, tiling.block_k), block_specs(locate)

    def tokens(x, side):
        return spec((None, 1, size[side]), lambda s: (at(x, 0, s.b), ZERO, s.tile(side)))

    def plane(x, side):
        lead = lambda s: (at(x, 0, s.b), at(x, 1, s.n))
        if side == distances.SIDE:
            number = lambda s: distances.window(s, tiling, refs.k.shape[2])
            return spec((None, None, None, *x.shape[3:]), lambda s: (*lead(s), number(s), ZERO, ZERO))
        if side == blocks.SIDE:
            shape = (None, None, None, x.words.shape[3], size[0])
            return spec(shape, lambda s: (*lead(s), s.column, ZERO, s.row))
        if side is None:
            return spec((None, None, *size), lambda s: (*lead(s), s.row, s.column))
        return spec((None, None, 1, size[side]), lambda s: (*lead(s), ZERO, s.tile(side)))

    # heads of q, k and v; of planes and tokens the step's rows or columns; single numbers in scalar memory
    specs = {
        "q": spec((None, None, size[0], refs.q.shape[-1]), lambda s: (s.b, s.n, s.row, ZERO)),
        "k": spec((None, None, size[1], refs.k.shape[-1]), lambda s: (s.b, s.k, s.column, ZERO)),
        "v": spec((None, None, size[1], refs.v.shape[-1]), lambda s: (s.b, s.k, s.column, ZERO)),
        "bias": plane(refs.bias, sides.bias),
        "mask": plane(refs.mask, sides.mask),
    }
    specs |= {name: tokens(getattr(refs, name), side) for name, side in TOKENS.items()}
    specs |= {name: mosaic_tpu.scalars() for name in _SCALARS}
    # those that are given; values of functions by what they have one of
    given: dict[str, Any] = {name: None if getattr(refs, name) is None else s for name, s in specs.items()}
    for name in VALUES:
        values = _values(refs, sides, name)
        given[name] = tuple(mosaic_tpu.scalars() if side is None else plane(x, side) for x, side in values)
    return Inputs(**given, bounds=None)


def bands(refs: Inputs, sides: PlaneSides, tiling: Tiling) -> list[Any]:
    """Returns vector memory for bands of what functions are handed by distance: a kernel's last scratch."""
    values = ((x, side) for name in VALUES for x, side in _values(refs, sides, name))
    return [distances.band(tiling, x.dtype) for x, side in values if side == distances.SIDE]


def spread_bands(refs: Inputs, sides: PlaneSides, bands: Sequence[Any], mixed: bool) -> Inputs:
    """Puts `bands` in the place of windows in a kernel's `refs`, spread if a tile of that kind reads them."""
    left, found = list(bands), {}
    for name in VALUES:
        values = []
        for ref, side in _values(refs, sides, name):
            if side == distances.SIDE:
                window, ref = ref, left.pop(0)
                if mixed or name == "score_values":
                    distances.spread(ref, window[...])
            values.append(ref)
        found[name] = tuple(values)
    return refs._replace(**found)


def _values(refs: Inputs, sides: PlaneSides, name: str) -> Any:
    return zip(getattr(refs, name), getattr(sides, name), strict=True)


def split_refs(tree: Any, sides: PlaneSides, refs: Sequence[Any]) -> tuple[Inputs, Any, Sequence[Any]]:
    """Splits `refs` of a kernel: (`Inputs` of that tree, which come first; others; `bands`, the last)."""
    start, end = tree.num_leaves, len(refs) - sides.distances
    return jax.tree.unflatten(tree, refs[:start]), refs[start:end], refs[end:]


class Schedule(NamedTuple):
    """The tiles that a kernel visits."""

    steps: Any  # int32 [B|1, steps]; NumPy if shapes alone decide
    has_full: bool  # whether a tile may need no comparison
    has_mixed: bool  # whether a tile may need comparison element by element

    @property
    def length(self) -> int:
        """Counts the steps of the grid."""
        return self.steps.shape[1]

    def name(self, kernel: str, tiling: Any) -> str:
        """Returns the name of a kernel in reports: its tile, and which programs for a tile it holds."""
        kind = "both" if self.has_full and self.has_mixed else "mixed" if self.has_mixed else "full"
        return f"{kernel}_{tiling.block_q}x{tiling.block_k}_{kind}"


def schedule(flags: Flags, by_key: bool = False) -> Schedule:
    """Makes the schedule for these flags; a tile of queries ends before the next begins.

    With `by_key` a tile of keys is. One that visits nothing has one step, which is not live.
    """
    # which kinds of tiles there may be: a program is compiled for each
    some, every, by_shapes = flags
    every = np.broadcast_to(every, some.shape) if isinstance(every, np.ndarray) else every
    xp: Any = np if isinstance(some, np.ndarray) else jnp
    has_full, has_mixed = True, True
    if isinstance(every, np.ndarray):
        has_full, has_mixed = bool(every.any()), bool((by_shapes & ~every).any())
    # flags `[B|1, tiles of the outer side, tiles of the inner side]`
    some, every = _merge_batch(some, every)
    if by_key:
        some, every = some.swapaxes(-1, -2), every.swapaxes(-1, -2)
        by_shapes = None if by_shapes is None else by_shapes.swapaxes(-1, -2)
    # the tiles that have a step, in order; the number of steps is that of the longest batch entry
    B = some.shape[0]
    visited, minors = _with_idle(some), some.shape[-1]
    most = visited.shape[1] if by_shapes is None else int(_with_idle(by_shapes).sum(-1).max())
    some, every = some.reshape(B, -1), xp.asarray(every.reshape(B, -1))
    order, counts = live_first(visited)
    steps = int(counts.max()) if xp is np else most
    order = order[:, :steps]
    # others repeat their last tile, without flags
    rank = xp.arange(steps)[None]
    valid = rank < counts
    order = xp.take_along_axis(order, xp.minimum(rank, counts - 1), axis=-1)  # repeats the last
    # where a tile of the outer side begins and ends
    major, minor = order // minors, order % minors
    begins = xp.concatenate([xp.ones((B, 1), bool), major[:, 1:] != major[:, :-1]], -1)
    ends = xp.concatenate([begins[:, 1:], xp.ones((B, 1), bool)], -1) | (rank == counts - 1)
    # a word a step: tile of queries, tile of keys, flags
    row, column = (minor, major) if by_key else (major, minor)
    word = (row << _ROW_SHIFT) | (column << _COLUMN_SHIFT)
    bits = (
        (_LIVE, xp.take_along_axis(some, order, axis=-1)),
        (_MIXED, ~xp.take_along_axis(every, order, axis=-1)),
        (_FIRST, begins),
        (_LAST, ends),
    )
    for flag, given in bits:
        word = word | xp.where(given & valid, flag, 0)
    return Schedule(word.astype(np.int32), has_full, has_mixed)


def _merge_batch(some: Any, every: Any) -> tuple[Any, Any]:
    """Merges the flags of all batch entries where those of each are too many for scalar memory."""
    if some.size <= _MOST_STEPS:
        return some, every
    return some.any(0, keepdims=True), every.all(0, keepdims=True)


def _with_idle(some: Any) -> Any:
    """Returns which tiles have a step, `[B|1, all]`: the first one, too, where a tile visits nothing."""
    xp: Any = np if isinstance(some, np.ndarray) else jnp
    idle = ~some.any(-1, keepdims=True)
    return (some | (idle & (xp.arange(some.shape[-1]) == 0)[None, None])).reshape(some.shape[0], -1)


def every_tile(flags: Flags) -> Schedule:
    """Makes a schedule of all tiles, each with its flags: for a result that has a place for every tile."""
    xp: Any = np if isinstance(flags.some, np.ndarray) else jnp
    some, every = _merge_batch(flags.some, flags.every)
    rows, columns = some.shape[1:]
    place = (xp.arange(rows)[:, None] << _ROW_SHIFT) | (xp.arange(columns)[None] << _COLUMN_SHIFT)
    word = place[None] | xp.where(some, _LIVE, 0) | xp.where(every, 0, _MIXED)
    return Schedule(word.reshape(some.shape[0], -1).astype(np.int32), True, True)


class Step(NamedTuple):
    """Where a grid step is: batch entry, key head, query head, tiles, flags."""

    b: Any
    k: Any
    n: Any
    row: Any
    column: Any
    word: Any

    @classmethod
    def at(cls, steps: Any, groups: int, b: Any, k: Any, g: Any, p: Any) -> "Step":
        """Returns step `p` of the schedule of batch entry `b`, for query head `g` of key head `k`."""
        word = steps[at(steps, 0, b), p]
        column = (word >> _COLUMN_SHIFT) & (2 ** (_ROW_SHIFT - _COLUMN_SHIFT) - 1)
        return cls(b, k, k * groups + g, word >> _ROW_SHIFT, column, word)

    def tile(self, side: int) -> Any:
        """Returns the tile of queries (side 0) or of keys (side 1)."""
        return self.column if side else self.row

    def flag(self, flag: int) -> Any:
        """Tells whether the step has one of the flags above."""
        return (self.word & flag) != 0

    @property
    def first(self) -> Any:
        """Tells whether a tile of the outer side begins here."""
        return self.flag(_FIRST)

    @property
    def last(self) -> Any:
        """Tells whether a tile of the outer side ends here."""
        return self.flag(_LAST)

    def each_kind(self, tiles: Schedule, run: Any) -> None:
        """Calls `run(mixed)` if the tile is live: two programs, of which the full one compares nothing."""
        live, mixed = self.flag(_LIVE), self.flag(_MIXED)
        if tiles.has_full:
            pl.when(live & ~mixed)(lambda: run(False))
        if tiles.has_mixed:
            pl.when(live & mixed)(lambda: run(True))


class TilePart(NamedTuple):
    """A part of a tile, in a kernel: of the step's tile the given queries and keys."""

    options: KernelOptions
    refs: Inputs
    sides: PlaneSides
    tiling: Tiling
    step: Step
    slices: tuple[slice, slice]  # (queries, keys) within the tile
    transposed: bool = False  # keys along axis 0
    row_offset: int = 0  # of the first tile of queries

    def axis(self, side: int) -> int:
        """Returns the axis that runs over queries (side 0) or keys (side 1)."""
        return 1 - side if self.transposed else side

    @property
    def shape(self) -> tuple[int, int]:
        """Returns the shape of the part as it is held."""
        sizes = tuple(s.stop - s.start for s in self.slices)
        return (sizes[1], sizes[0]) if self.transposed else (sizes[0], sizes[1])

    def start(self, side: int) -> Any:
        """Returns the index of the first query or key."""
        if side:
            return self.step.column * self.tiling.block_k + self.slices[1].start
        return self.step.row * self.tiling.block_q + (self.slices[0].start + self.row_offset)

    def offset(self, side: int) -> jax.Array:
        """Returns the distance of each element's query or key from the first one."""
        return lax.broadcasted_iota(jnp.int32, self.shape, self.axis(side))

    def vector(self, ref: Any, side: int) -> jax.Array:
        """Reads the values of the part's queries or keys in a block `[1, n]`, to broadcast over the part."""
        row = ref[:, self.slices[side]]
        return row if self.axis(side) else mosaic_tpu.stand(row)

    def tokens(self, name: str) -> jax.Array:
        """Reads a field of `Inputs` that has one value a position."""
        return self.vector(getattr(self.refs, name), TOKENS[name])

    def plane(self, ref: Any, side: int | None) -> jax.Array:
        """Reads a mask or bias over the part, or a value that a function is handed, 32 bits."""
        if side == distances.SIDE:
            block = distances.block(ref, self.slices, self.tiling)
            return block if self.transposed else block.T
        if side == blocks.SIDE:
            block = ref.spread(self.slices)
            return block if self.transposed else block.T
        if side is not None:
            row = ref[:, self.slices[side]].astype(_wide(ref.dtype))
            return row if self.axis(side) else mosaic_tpu.stand(row)
        block = ref[self.slices[0], self.slices[1]].astype(_wide(ref.dtype))
        return block.T if self.transposed else block

    def logits(self, products: jax.Array, mixed: bool) -> Logits:
        """Computes the logits of products q k^T, -inf where nothing is seen."""

        def plane():
            return self.plane(self.refs.bias, self.sides.bias)

        def scored(x):
            values = self.values("score_values")
            return functions.on_tile(mod_functions.scored, self.options, x, self.place(), values)

        # scale, soft cap, bias and score; what a bias of -inf hides is hidden in every tile
        tanh = lambda x, cap: jnp.tanh(x * (1.0 / cap))
        found, terms = unmasked(self.options, self.refs, products, tanh, plane, scored)
        visible = masks.conjunction(*terms, *(seen(self, self.step.b) if mixed else ()))
        return found if visible is None else found._replace(x=jnp.where(visible, found.x, -jnp.inf))

    def elements(self) -> jax.Array:
        """Reads the mask array over the part."""
        return self.plane(self.refs.mask, self.sides.mask)

    def by_function(self, mask_mod: Callable[..., Any]) -> jax.Array:
        """Tells what `mask_mod` lets be seen of the part."""
        values = self.values("mask_values")
        return functions.on_tile(mask_mod, *self.place()[:4], *values)

    def values(self, name: str) -> tuple[jax.Array, ...]:
        """Reads what a function is handed, to broadcast over the part."""
        refs, sides = getattr(self.refs, name), getattr(self.sides, name)
        lead = lambda ref: (at(ref, 0, self.step.b), at(ref, 1, self.step.n))
        return tuple(
            jnp.full((1, 1), ref[lead(ref)]) if side is None else self.plane(ref, side)
            for ref, side in zip(refs, sides, strict=True)
        )

    def place(self) -> mod_functions.Elements:
        """Returns where elements stand, as functions are handed it.

        Padding stands where the last query does.
        """
        refs = self.refs
        batch, head = (
            jnp.full((1, 1), ref[i], jnp.int32)
            for ref, i in ((refs.batch_number, self.step.b), (refs.head_number, self.step.n))
        )
        row, column = (
            self._indices(side) if getattr(refs, name) is None else self.tokens(name)
            for side, name in enumerate(("row_position", "column_position"))
        )
        if refs.rows_end is not None and refs.row_position is None:
            end = refs.rows_end[at(refs.rows_end, 0, self.step.b)]
            row = jnp.minimum(row, jnp.maximum(end - 1, 0))
        return mod_functions.Elements(batch, head, row, column, None)

    def _indices(self, side: int) -> jax.Array:
        """Returns the indices of the part's queries or keys, to broadcast over the part."""
        axis, shape = self.axis(side), [1, 1]
        shape[axis] = self.shape[axis]
        return lax.broadcasted_iota(jnp.int32, shape, axis) + self.start(side)

    def in_band(self) -> Any:
        """Compares rows and columns as causality and the window ask for."""
        options, refs = self.options, self.refs
        if refs.row_position is not None or refs.column_position is not None:
            row, column = (
                self.offset(side) + self.start(side) if getattr(refs, name) is None else self.tokens(name)
                for side, name in enumerate(("row_position", "column_position"))
            )
            return masks.in_band(row, column, options.is_causal, options.window)
        # one comparison an element for each bound, of constants with a scalar
        distance, shift = self.offset(1) - self.offset(0), self.start(0) - self.start(1)
        left, right = options.window or (_FAR, _FAR)
        right = 0 if options.is_causal else right
        terms = [distance <= shift + right] if right < _FAR else []
        terms += [distance >= shift - left] if left < _FAR else []
        return masks.conjunction(*terms)

    def keep(self) -> jax.Array | None:
        """Returns which probabilities dropout lets pass; None without dropout."""
        keys = self.refs.dropout_keys
        if keys is None:
            return None
        lead = at(keys, 0, self.step.b), at(keys, 1, self.step.n)
        words = keys[(*lead, 0)], keys[(*lead, 1)]
        row, column = (
            jnp.broadcast_to(self.tokens(name), self.shape) for name in ("row_counter", "column_counter")
        )
        return dropout.keep(words, row, column, self.options.dropout_rate)


def _wide(dtype: Any) -> Any:
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32


def product(options: KernelOptions, a: jax.Array, b: jax.Array, axes: tuple[int, int] = (1, 0)) -> jax.Array:
    """Multiplies two blocks as matrices over `axes`, in float32."""
    wide = a.dtype == jnp.float32
    precision = options.precision if wide else lax.Precision.DEFAULT  # bfloat16 products are exact
    if wide and precision == lax.Precision.HIGH:
        precision = lax.Precision.HIGHEST  # the matrix unit has no three-pass mode in kernels
    return lax.dot_general(
        a, b, (((axes[0],), (axes[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
