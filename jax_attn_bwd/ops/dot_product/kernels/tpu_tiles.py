"""What the TPU kernels of dense attention share: their tiles, and which blocks of the inputs a tile reads.

XLA prepares the inputs (`inputs.py`) and the schedule (`tpu_schedule.py`); what a tile sees of them is told
in `tpu_part.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jax_attn_bwd._core import mosaic_tpu
from jax_attn_bwd._core.mosaic_tpu import LANES, ZERO
from jax_attn_bwd.ops.dot_product.kernels import blocks, functions
from jax_attn_bwd.ops.dot_product.kernels import inputs as kernel_inputs
from jax_attn_bwd.ops.dot_product.kernels import tpu_distances as distances
from jax_attn_bwd.ops.dot_product.kernels.inputs import Inputs, at, whole
from jax_attn_bwd.ops.dot_product.spec import KernelOptions, Operands, Options

HEAD = 64  # head sizes are padded to a multiple
_LONGEST = 2**17  # tokens: 1024 of the shortest tiles, so that a schedule fits scalar memory
_MOST_SUMS = 2**19  # gradients of distances in vector memory: 12 MiB, each is there six times
_SCALARS = ("rows_end", "columns_end", "sink", "dropout_keys", "batch_number", "head_number")
# what functions may be made of
_LOWERS = functions.EVERYWHERE | frozenset(
    ("exp", "exp2", "log", "log1p", "tanh", "logistic", "sin", "cos", "sqrt", "rsqrt", "pow", "integer_pow")
)
_LOWERS |= {"square", "one_minus_square", "add_any", "floor", "ceil", "round", "stop_gradient"}
_LOWERS |= {"shift_right_logical"}
VALUES = ("mask_values", "score_values")
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


def is_light(options: KernelOptions, operands: Operands) -> bool:
    """Whether an element takes little more than its products: larger tiles then pay for their compilation."""
    mask = operands.mask
    compares = operands.bias is not None or mask.has_positions or mask.has("elements", "query_segment_ids")
    narrow = max(operands.query.shape[-1], operands.value.shape[-1]) <= 128
    plain = options.logits_soft_cap is None and not options.dropout_rate and options.scale > 0
    plain = plain and options.score_mod is None
    return narrow and plain and operands.query.dtype == jnp.bfloat16 and not compares


def longest_side(options: KernelOptions, operands: Operands) -> int:
    """The side of a light call's tile: a longer one takes fewer bundles a score, but more of it is masked."""
    most_is_masked = options.is_causal and operands.key.shape[-3] <= 8192
    return 1024 if most_is_masked or options.window is not None or options.mask_mod is not None else 2048


def unsupported(call: Options, operands: Operands) -> str | None:
    """Why the kernels cannot run this call; None if they can."""
    options = KernelOptions.of(call, operands.mask)
    q, v = operands.query, operands.value
    if not all(isinstance(n, int) for x in jax.tree.leaves(operands) for n in x.shape):
        return "it needs static shapes"
    if q.dtype not in mosaic_tpu.DTYPES:
        return f"it multiplies {' and '.join(mosaic_tpu.DTYPES)}, not {q.dtype}"
    if (reason := functions.unsupported(options, operands, _LOWERS, distances=True)) is not None:
        return reason
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"head sizes go up to 256, got H = {q.shape[-1]} and Hv = {v.shape[-1]}"
    if 0 in (*q.shape, *v.shape):
        return "there is nothing to compute"
    if max(q.shape[-3], operands.key.shape[-3]) > _LONGEST:
        return f"sequences go up to {_LONGEST}: its list of tiles lies in scalar memory"
    groups = q.shape[-2] // operands.key.shape[-2]
    sums = groups * (q.shape[-3] + operands.key.shape[-3]) * functions.floats_of_distance(options, operands)
    if sums > _MOST_SUMS:
        return (
            f"the gradients of what score_mod reads at row - column lie in vector memory: up to {_MOST_SUMS} "
            f"distances, of all query heads of a key head, got {sums}"
        )
    if operands.bias is not None and operands.bias.dtype == jnp.float64:
        return "a float64 bias asks for float64 arithmetic"
    if not isinstance(options.precision, lax.Precision | None):
        return f"it has one product algorithm, got precision={options.precision}"
    return kernel_inputs.sharded_sequence(operands)


def kernel_inputs_of(options: KernelOptions, refs: Inputs, tiling: Tiling) -> Inputs:
    """In the layout that the kernels read: heads before the sequence, one value a position along lanes."""

    def heads(x):
        return jnp.swapaxes(x, 1, 2)

    def tokens(x):
        return None if x is None else jnp.asarray(x).reshape(-1, 1, x.shape[-1])

    fields = {name: tokens(getattr(refs, name)) for name in TOKENS}
    S = refs.k.shape[1]
    planes = {name: _laid(getattr(refs, name), S) for name in ("bias", "mask")}
    values = {name: tuple(_laid_value(x, refs, tiling) for x in getattr(refs, name)) for name in VALUES}
    ends: dict[str, Any] = {}
    if isinstance(refs.rows_end, np.ndarray):  # what lies beyond T is cut off, but functions see it
        ends["rows_end"] = jnp.asarray(refs.rows_end) if functions.any_given(options) else None
    if refs.columns_end is not None:
        ends["columns_end"] = jnp.asarray(refs.columns_end)
    qkv = {name: heads(getattr(refs, name)) for name in ("q", "k", "v")}
    return refs._replace(bounds=None, mod_args=(), **qkv, **fields, **planes, **ends, **values)


def _laid(plane: Any, S: int) -> Any:
    """A plane; one value a row `[B|1, N|1, T, 1]` becomes `[B|1, N|1, 1, T]`, one for all `[.., 1, S]`."""
    if plane is None or plane.shape[-1] != 1:
        return plane
    if plane.shape[-2] == 1:
        return jnp.broadcast_to(plane, (*plane.shape[:-1], S))
    return jnp.swapaxes(plane, -1, -2)


def _laid_value(x: Any, refs: Inputs, tiling: Tiling) -> Any:
    """One value a query or key `[B|1, N|1, 1, n]`, for scalar memory one for all of them `[B|1, N|1]`.

    One a distance as `distances.windows`, one a block as `blocks.Words`.
    """
    side = value_side(x)
    if side == blocks.SIDE:
        return blocks.words(x, refs.q.shape[1], tiling.block_k)
    if side == distances.SIDE:
        return distances.windows(x, tiling)
    return {0: jnp.swapaxes(x, -1, -2), 1: x, None: x[..., 0, 0]}[side]


def value_side(x: Any) -> int | None:
    """What an array tells before it is laid: 1 one value a key, 0 one value a query, None one for all.

    `distances.SIDE` one a distance, `blocks.SIDE` one a block.
    """
    if isinstance(x, blocks.Blocks):
        return blocks.SIDE
    if functions.is_of_distance(x):
        return distances.SIDE
    return None if x.shape[-2:] == (1, 1) else 1 if x.shape[-2] == 1 else 0


def plane_side(plane: Any) -> int | None:
    """What a plane tells before it is laid: 1 one value a key (or for all), 0 one a query, None full."""
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
        """The sides of `Inputs` before they are laid."""
        values = (tuple(map(value_side, getattr(refs, name))) for name in VALUES)
        return cls(plane_side(refs.bias), plane_side(refs.mask), *values)

    @property
    def distances(self) -> int:
        """How many values of the distance functions are handed."""
        return (*self.mask_values, *self.score_values).count(distances.SIDE)


def input_specs(refs: Inputs, sides: PlaneSides, tiling: Tiling, locate: Any) -> Inputs:
    """The block specs of the fields of `refs`; `locate(*grid indices, steps) -> Step`."""
    size = (tiling.block_q, tiling.block_k)

    def spec(shape, index):
        return pl.BlockSpec(shape, lambda *where: index(locate(*where)))

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

    specs = {
        "q": spec((None, None, size[0], refs.q.shape[-1]), lambda s: (s.b, s.n, s.row, ZERO)),
        "k": spec((None, None, size[1], refs.k.shape[-1]), lambda s: (s.b, s.k, s.column, ZERO)),
        "v": spec((None, None, size[1], refs.v.shape[-1]), lambda s: (s.b, s.k, s.column, ZERO)),
        "bias": plane(refs.bias, sides.bias),
        "mask": plane(refs.mask, sides.mask),
    }
    specs |= {name: tokens(getattr(refs, name), side) for name, side in TOKENS.items()}
    specs |= {name: mosaic_tpu.scalars() for name in _SCALARS}
    given: dict[str, Any] = {name: None if getattr(refs, name) is None else s for name, s in specs.items()}
    for name in VALUES:
        values = _values(refs, sides, name)
        given[name] = tuple(mosaic_tpu.scalars() if side is None else plane(x, side) for x, side in values)
    return Inputs(**given, bounds=None)


def bands(refs: Inputs, sides: PlaneSides, tiling: Tiling) -> list[Any]:
    """Vector memory for the bands of what functions are handed, see `tpu_distances.py`: a kernel's last."""
    values = ((x, side) for name in VALUES for x, side in _values(refs, sides, name))
    return [distances.band(tiling, x.dtype) for x, side in values if side == distances.SIDE]


def spread(refs: Inputs, sides: PlaneSides, bands: Sequence[Any], mixed: bool) -> Inputs:
    """`refs` in a kernel with `bands` in the place of windows, spread if a tile of that kind reads them."""
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


def gathered(tree: Any, sides: PlaneSides, refs: Sequence[Any]) -> tuple[Inputs, Any, Sequence[Any]]:
    """(`Inputs` of that tree, which come first among `refs`; the others; `bands`, which come last)."""
    start, end = tree.num_leaves, len(refs) - sides.distances
    return jax.tree.unflatten(tree, refs[:start]), refs[start:end], refs[end:]
