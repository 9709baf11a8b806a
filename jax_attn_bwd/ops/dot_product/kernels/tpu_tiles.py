"""What the TPU kernels of dense attention share: their tiles, and what a tile sees.

XLA prepares the inputs (`inputs.py`) and the schedule (`tpu_schedule.py`).
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
from jax_attn_bwd.ops.dot_product import modifiers
from jax_attn_bwd.ops.dot_product.kernels import functions
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.kernels.inputs import Inputs, at, whole
from jax_attn_bwd.ops.dot_product.kernels.logits import Logits, unmasked
from jax_attn_bwd.ops.dot_product.kernels.tpu_schedule import Step
from jax_attn_bwd.ops.dot_product.spec import Operands, Options

HEAD = 64  # head sizes are padded to a multiple
_FAR = 2**30  # no position is as far as this from another
_LONGEST = 2**17  # tokens: 1024 of the shortest tiles, so that a schedule fits scalar memory
_SCALARS = ("rows_end", "columns_end", "sink", "dropout_keys", "batch_number", "head_number")
# what functions may be made of
_LOWERS = functions.EVERYWHERE | frozenset(
    ("exp", "exp2", "log", "log1p", "tanh", "logistic", "sin", "cos", "sqrt", "rsqrt", "pow", "integer_pow")
)
_LOWERS |= {"square", "one_minus_square", "add_any", "floor", "ceil", "round", "stop_gradient"}
VALUES = ("mask_values", "score_values")
_TOKENS = {
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
        """What the operands are padded to."""
        return kernel_inputs.Padding(self.block_q, self.block_k, HEAD)

    def parts(self) -> list[tuple[slice, slice]]:
        """(queries, keys) of each part: neighbours belong to different queries, and wait for nothing."""
        queries, keys = (
            [slice(i, i + part) for i in range(0, block, part)]
            for block, part in ((self.block_q, self.part_q), (self.block_k, self.part_k))
        )
        return [(q, k) for k in keys for q in queries]


def in_stages(parts: Sequence[Any], stages: Sequence[Callable[[Any, Any], Any]], apart: int) -> None:
    """`value = stage(part, value)` for each part and stage, a stage `apart` parts behind the one before it.

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
    """A multiple of 128 up to `limit` whose blocks cover `length` with little padding."""
    return whole(-(-length // -(-length // limit)), LANES)


def even_part(block: int, limit: int) -> int:
    """The largest multiple of 128 up to `limit` that divides `block`."""
    return max(n for n in range(LANES, min(block, max(limit, LANES)) + 1, LANES) if block % n == 0)


def is_light(options: Options, operands: Operands) -> bool:
    """Whether an element takes little more than its products: larger tiles then pay for their compilation."""
    planes = (
        operands.bias,
        operands.mask,
        operands.query_segment_ids,
        operands.query_positions,
        operands.key_value_positions,
    )
    narrow = max(operands.query.shape[-1], operands.value.shape[-1]) <= 128
    plain = options.logits_soft_cap is None and not options.dropout_rate and options.scale > 0
    plain = plain and options.score_mod is None
    return narrow and plain and operands.query.dtype == jnp.bfloat16 and all(x is None for x in planes)


def longest_side(options: Options, operands: Operands) -> int:
    """Of a tile of a light call: a longer one takes fewer bundles a score, but more of it is masked."""
    most_is_masked = options.is_causal and operands.key.shape[-3] <= 8192
    return 1024 if most_is_masked or options.window is not None or options.mask_mod is not None else 2048


def unsupported(options: Options, operands: Operands) -> str | None:
    """Why the kernels cannot run this call; None if they can."""
    q, v = operands.query, operands.value
    if (reason := functions.unsupported(options, operands, _LOWERS)) is not None:
        return reason
    if not all(isinstance(n, int) for x in jax.tree.leaves(operands) for n in x.shape):
        return "it needs static shapes"
    if q.dtype not in mosaic_tpu.DTYPES:
        return f"it multiplies {' and '.join(mosaic_tpu.DTYPES)}, not {q.dtype}"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"head sizes go up to 256, got H = {q.shape[-1]} and Hv = {v.shape[-1]}"
    if 0 in (*q.shape, *v.shape):
        return "there is nothing to compute"
    if max(q.shape[-3], operands.key.shape[-3]) > _LONGEST:
        return f"sequences go up to {_LONGEST}: its list of tiles lies in scalar memory"
    if operands.bias is not None and operands.bias.dtype == jnp.float64:
        return "a float64 bias asks for float64 arithmetic"
    if not isinstance(options.precision, lax.Precision | None):
        return f"it has one product algorithm, got precision={options.precision}"
    return kernel_inputs.sharded_sequence(operands)


def kernel_inputs_of(options: Options, refs: Inputs) -> Inputs:
    """In the layout that the kernels read: heads before the sequence, one value a position along lanes."""

    def heads(x):
        return jnp.swapaxes(x, 1, 2)

    def tokens(x):
        return None if x is None else jnp.asarray(x).reshape(-1, 1, x.shape[-1])

    fields = {name: tokens(getattr(refs, name)) for name in _TOKENS}
    S = refs.k.shape[1]
    planes = {name: _laid(getattr(refs, name), S) for name in ("bias", "mask")}
    values = {name: tuple(map(_laid_value, getattr(refs, name))) for name in VALUES}
    ends: dict[str, Any] = {}
    if isinstance(refs.rows_end, np.ndarray):  # what lies beyond T is cut off, but functions see it
        ends["rows_end"] = jnp.asarray(refs.rows_end) if functions.any_given(options) else None
    if refs.columns_end is not None:
        ends["columns_end"] = jnp.asarray(refs.columns_end)
    return refs._replace(
        q=heads(refs.q), k=heads(refs.k), v=heads(refs.v), bounds=None, **fields, **planes, **ends, **values
    )


def _laid(plane: Any, S: int) -> Any:
    """A plane; one value a row `[B|1, N|1, T, 1]` becomes `[B|1, N|1, 1, T]`, one for all `[.., 1, S]`."""
    if plane is None or plane.shape[-1] != 1:
        return plane
    if plane.shape[-2] == 1:
        return jnp.broadcast_to(plane, (*plane.shape[:-1], S))
    return jnp.swapaxes(plane, -1, -2)


def _laid_value(x: jax.Array) -> jax.Array:
    """One value a query or key `[B|1, N|1, 1, n]`, for scalar memory one for all of them `[B|1, N|1]`."""
    return {0: jnp.swapaxes(x, -1, -2), 1: x, None: x[..., 0, 0]}[value_side(x)]


def value_side(x: jax.Array) -> int | None:
    """Of what is handed before it is laid: 1 one value a key, 0 one value a query, None one for all."""
    return None if x.shape[-2:] == (1, 1) else 1 if x.shape[-2] == 1 else 0


def plane_side(plane: Any) -> int | None:
    """Of a plane before it is laid: 1 one value a key (or one for all), 0 one value a query, None full."""
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
        """Of `Inputs` before they are laid."""
        values = (tuple(map(value_side, getattr(refs, name))) for name in VALUES)
        return cls(plane_side(refs.bias), plane_side(refs.mask), *values)


def input_specs(refs: Inputs, sides: PlaneSides, tiling: Tiling, locate: Any) -> Inputs:
    """Of the fields of `refs`; `locate(*grid indices, steps) -> Step`."""
    size = (tiling.block_q, tiling.block_k)

    def spec(shape, index):
        return pl.BlockSpec(shape, lambda *where: index(locate(*where)))

    def tokens(x, side):
        return spec((None, 1, size[side]), lambda s: (at(x, 0, s.b), ZERO, s.tile(side)))

    def plane(x, side):
        lead = lambda s: (at(x, 0, s.b), at(x, 1, s.n))
        if side is None:
            return spec((None, None, *size), lambda s: (*lead(s), s.row, s.column))
        return spec((None, None, 1, size[side]), lambda s: (*lead(s), ZERO, s.tile(side)))

    specs = {
        "q": spec((None, None, size[0], refs.q.shape[-1]), lambda s: (s.b, s.n, s.row, ZERO)),
        "k": spec((None, None, size[1], refs.k.shape[-1]), lambda s: (s.b, s.k, s.column, ZERO)),
        "v": spec((None, None, size[1], refs.v.shape[-1]), lambda s: (s.b, s.k, s.column, ZERO)),
        "bias": plane(refs.bias, sides.bias),
        "mask": plane(refs.mask, sides.mask),
    }
    specs |= {name: tokens(getattr(refs, name), side) for name, side in _TOKENS.items()}
    specs |= {name: mosaic_tpu.scalars() for name in _SCALARS}
    given: dict[str, Any] = {name: None if getattr(refs, name) is None else s for name, s in specs.items()}
    for name in VALUES:
        values = zip(getattr(refs, name), getattr(sides, name), strict=True)
        given[name] = tuple(mosaic_tpu.scalars() if side is None else plane(x, side) for x, side in values)
    return Inputs(**given, bounds=None)


class Part(NamedTuple):
    """A part of a tile, in a kernel: of the step's tile the given queries and keys."""

    options: Options
    refs: Inputs
    sides: PlaneSides
    tiling: Tiling
    step: Step
    slices: tuple[slice, slice]  # (queries, keys) within the tile
    transposed: bool = False  # keys along axis 0
    row_offset: int = 0  # of the first tile of queries

    def axis(self, side: int) -> int:
        """The axis that runs over queries (side 0) or keys (side 1)."""
        return 1 - side if self.transposed else side

    @property
    def shape(self) -> tuple[int, int]:
        """Of the part as it is held."""
        sizes = tuple(s.stop - s.start for s in self.slices)
        return (sizes[1], sizes[0]) if self.transposed else (sizes[0], sizes[1])

    def start(self, side: int) -> Any:
        """The index of the first query or key."""
        if side:
            return self.step.column * self.tiling.block_k + self.slices[1].start
        return self.step.row * self.tiling.block_q + (self.slices[0].start + self.row_offset)

    def offset(self, side: int) -> jax.Array:
        """Of each element's query or key from the first one."""
        return lax.broadcasted_iota(jnp.int32, self.shape, self.axis(side))

    def vector(self, ref: Any, side: int) -> jax.Array:
        """The values of the part's queries or keys from a block `[1, n]`, to broadcast over the part."""
        row = ref[:, self.slices[side]]
        return row if self.axis(side) else mosaic_tpu.stand(row)

    def tokens(self, name: str) -> jax.Array:
        """A field of `Inputs` that has one value a position."""
        return self.vector(getattr(self.refs, name), _TOKENS[name])

    def plane(self, ref: Any, side: int | None) -> jax.Array:
        """A mask or bias over the part, 32 bits."""
        if side is not None:
            row = ref[:, self.slices[side]].astype(_wide(ref.dtype))
            return row if self.axis(side) else mosaic_tpu.stand(row)
        block = ref[self.slices[0], self.slices[1]].astype(_wide(ref.dtype))
        return block.T if self.transposed else block

    def logits(self, products: jax.Array, mixed: bool) -> Logits:
        """The logits of products q k^T, -inf where nothing is seen."""

        def plane(name):
            return self.plane(getattr(self.refs, name), getattr(self.sides, name))

        def scored(x):
            values = self.values("score_values")
            return functions.on_tile(modifiers.scored, self.options, x, self.place(), values)

        found, terms = unmasked(self.options, self.refs, products, _tanh, plane, scored)
        visible = masks.conjunction(*terms, *(self._seen() if mixed else ()))
        return found if visible is None else found._replace(x=jnp.where(visible, found.x, -jnp.inf))

    def _seen(self) -> list[Any]:
        options, refs, terms = self.options, self.refs, []
        if options.is_causal or options.window is not None:
            terms.append(self._in_band())
        if refs.columns_end is not None:
            end = refs.columns_end[at(refs.columns_end, 0, self.step.b)]
            terms.append(self.offset(1) < end - self.start(1))
        if refs.row_segment is not None:
            terms.append(self.tokens("row_segment") == self.tokens("column_segment"))
        if options.mask_mod is not None:
            values = self.values("mask_values")
            terms.append(functions.on_tile(options.mask_mod, *self.place()[:4], *values))
        return terms

    def values(self, name: str) -> tuple[jax.Array, ...]:
        """What a function is handed, to broadcast over the part."""
        refs, sides = getattr(self.refs, name), getattr(self.sides, name)
        lead = lambda ref: (at(ref, 0, self.step.b), at(ref, 1, self.step.n))
        return tuple(
            jnp.full((1, 1), ref[lead(ref)]) if side is None else self.plane(ref, side)
            for ref, side in zip(refs, sides, strict=True)
        )

    def place(self) -> modifiers.Tile:
        """Where the elements stand, as functions are handed it; padding stands where the last query does."""
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
        return modifiers.Tile(batch, head, row, column, None)

    def _indices(self, side: int) -> jax.Array:
        """Of the part's queries or keys, to broadcast over the part."""
        axis, shape = self.axis(side), [1, 1]
        shape[axis] = self.shape[axis]
        return lax.broadcasted_iota(jnp.int32, shape, axis) + self.start(side)

    def _in_band(self) -> Any:
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
        """Which probabilities dropout lets pass; None without dropout."""
        keys = self.refs.dropout_keys
        if keys is None:
            return None
        lead = at(keys, 0, self.step.b), at(keys, 1, self.step.n)
        words = keys[(*lead, 0)], keys[(*lead, 1)]
        row, column = (
            jnp.broadcast_to(self.tokens(name), self.shape) for name in ("row_counter", "column_counter")
        )
        return dropout.keep(words, row, column, self.options.dropout_rate)


def _tanh(x: jax.Array, cap: float) -> jax.Array:
    return jnp.tanh(x * (1.0 / cap))


def _wide(dtype: Any) -> Any:
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32


def product(options: Options, a: jax.Array, b: jax.Array, axes: tuple[int, int] = (1, 0)) -> jax.Array:
    """The matrix product of two blocks over `axes`, in float32."""
    wide = a.dtype == jnp.float32
    precision = options.precision if wide else lax.Precision.DEFAULT  # bfloat16 products are exact
    if wide and precision == lax.Precision.HIGH:
        precision = lax.Precision.HIGHEST  # the matrix unit has no three-pass mode in kernels
    return lax.dot_general(
        a, b, (((axes[0],), (axes[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def gathered(tree: Any, refs: Sequence[Any]) -> tuple[Inputs, Sequence[Any]]:
    """(`Inputs` of that tree, which come first among `refs`; the others)."""
    count = tree.num_leaves
    return jax.tree.unflatten(tree, refs[:count]), refs[count:]
