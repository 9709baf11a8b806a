"""`Plan`: how a call is computed, decided once in the public function and used by every rule.

The portable loops take one sampling point of all queries and heads at a time. On a CPU, what lies between two
operations (5.6 MB for 5440 queries and 8 heads of 32) is then too long for a core's cache, and neither a dot
product nor a scatter-add of 32 numbers fills a core's units. On a GPU each point would be some launches, each
of which reads and writes the sums. There other ways are taken, for the output and for each of its gradients.

Queries may lie on several devices. A piece of them samples the whole value. Its rows of the output and of the
points' gradients are those of the whole, and the gradient of the value, equation (8) of `backward.py`, is the
sum over the pieces: it is taken once, after the loop over the points. `_core/split.py` runs the pieces.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax

from jax_attn_bwd._core import split, targets
from jax_attn_bwd._core.choices import Rule, Way
from jax_attn_bwd._core.sharding import auto_devices, explicit_spec, gathered, unsharded
from jax_attn_bwd._core.split import Pieces
from jax_attn_bwd.ops.deformable import sampling
from jax_attn_bwd.ops.deformable.spec import Operands, Options

WAYS = (
    Way("point by point", "forward.py, value_gradient.py, point_gradients.py", "everywhere else"),
    Way(
        "all points at once",
        "forward.py, value_gradient.py, point_gradients.py",
        "GPU; the gradient of the value, which adds in any order, but with deterministic_sums=True",
        "0.25 GB in 11 launches, instead of 3.2 GB in 505",
        "a6d4fd1, as compiled for an H200",
    ),
    Way(
        "level by level",
        "forward.py, value_gradient.py, point_gradients.py",
        "GPU, many samples, any order: in the place of all points at once",
        "the scatters of the plain formula, of which a step took 1.15 ms instead of 2.21; not timed itself",
        "nvidia_h100.md",
    ),
    Way(
        "sorted runs",
        "value_gradient.py",
        "GPU, deterministic_sums=True: the gradient of the value",
        "a step moves 0.57 GB in 71 launches, instead of 3.2 GB in 505",
        "a6d4fd1, as compiled for an H200",
    ),
    Way(
        "row for each corner",
        "value_gradient.py, point_gradients.py",
        "one CPU, few samples: the gradients",
        "most steps of 20 to 900 queries take 0.65 to 0.95 of their time",
        "ad795cd",
    ),
    Way(
        "by channel",
        "point_gradients.py",
        "one CPU, many queries: the gradients of the points",
        "tables of one channel stay in the fastest cache",
        "2e77276",
    ),
    Way(
        "pairs of pixels",
        "value_gradient.py",
        "one CPU, as many pairs as pixels: the gradient of the value",
        "one addition reaches two pixels",
        "2e77276",
    ),
)

AT_ONCE = Rule(
    "deformable_at_once", "GPU", "Sums of points are some kernels, instead of some for each point."
)
BY_LEVEL = Rule(
    "deformable_by_level",
    "GPU, any order, more than 12,800 rows of one query and head on a device",
    "Its scatters are those of the plain formula, of which a step of 5,440 queries took 1.15 ms on an H100, "
    "and 2.21 all points at once; of 300 queries 0.223, and 0.107. It was not timed itself.",
)
ALL_CORES = Rule(
    "deformable_all_cores",
    "CPU, 8192 rows of one query and head",
    "The loop over the points has a sort in it, and heads in front: XLA:CPU leaves one without to one core.",
)
BY_CHANNEL = Rule(
    "deformable_by_channel",
    "one CPU, 8192 rows of one query and head, 4 queries for each pixel",
    "Products with the cotangent fill a core's units; with fewer queries, transposing the pixels costs more.",
)
PAIRS = Rule(
    "deformable_pairs",
    "one CPU, bilinear, 256 queries, as many pairs as pixels",
    "Half as many additions; 300 queries on 113 x 170 pixels, fewer pairs than pixels, take 0.35 without.",
)
CORNERS = Rule(
    "deformable_corners",
    "one CPU, rows of all corners in 4 MiB, not by channel",
    "0.65 to 0.95 of the time of a step of 20 to 900 queries.",
)
BY_PIXEL = Rule(
    "deformable_by_pixel",
    "rows of corners, one entry, whose value caches do not hold",
    "Sums lie in the axes of the value: XLA:CPU copies them under vmap else, 17 to 21 ms instead of 5 to 8.",
    "memory",
)
RULES = (AT_ONCE, BY_LEVEL, ALL_CORES, BY_CHANNEL, PAIRS, CORNERS, BY_PIXEL)

# the axis Q that pieces cut
QUERY_AXES: dict[str, Any] = {"value": None, "sampling_locations": 1, "attention_weights": 1}

_LEVEL_ROWS = 2 * 800 * 8  # rows of one query and head, up to which a GPU is faster all at once
_MANY_ROWS = 1 << 13  # rows of one query and head; from here on a second core helps
_MANY_QUERIES = 256  # from here on pairs of pixels are faster
_BLOCK_BYTES = 1 << 17  # bytes of pairs that a core's cache holds; XLA leaves them to one core
_CORNER_NUMBERS = 1 << 20  # numbers in the rows of all corners: 4 MiB, which caches hold
_INDICES = 1 << 29  # numbers that int32 can index: padding makes up to three times as many

Name = Literal[
    "point by point",
    "all points at once",
    "level by level",
    "sorted runs",
    "row for each corner",
    "by channel",
    "pairs of pixels",
]


class Loops(NamedTuple):
    """How each sum is computed: names of `WAYS`, and what these need."""

    output: Name = "point by point"
    dvalue: Name = "point by point"
    dpoints: Name = "point by point"
    on_all_cores: bool = False  # the loop of the output and its tangent, with heads in front of queries
    paired_queries: int = 0  # in a block of pairs
    by_pixel: bool = False  # where the sums of corners lie
    merged: bool = False  # level by level: batch and heads in one axis


@dataclass(frozen=True)
class Plan:
    """Everything static of a call.

    Attributes:
      options: what is computed.
      implementation: the name of the one that runs.
      loops: those of the portable path, which also gives the derivatives of kernels' results.
      pieces: into which the portable path cuts the queries for devices; None = it does not.
    """

    options: Options
    implementation: str
    loops: Loops
    pieces: Pieces | None = None

    @property
    def way(self) -> str:
        """How a call is computed, for `explain`."""
        loops = self.loops
        blocks = f", {loops.paired_queries} queries in a block" if loops.paired_queries else ""
        blocks += ", sums in any order" if loops.dvalue in ("all points at once", "level by level") else ""
        cut = "" if self.pieces is None else "; queries in pieces"
        of_value, of_points = f"{loops.dvalue}{blocks}", f"{loops.dpoints}{cut}"
        return f"{loops.output}; value's gradient: {of_value}; points' gradients: {of_points}"


def plan(implementation: str, options: Options, operands: Operands) -> Plan:
    """Returns the plan of a call whose implementation is chosen."""
    weights = operands.attention_weights
    pieces = split.pieces_for_rows(weights, 1, weights.shape[0])
    return Plan(options, implementation, fastest_loops(options, operands, pieces), pieces)


def fastest_loops(options: Options, operands: Operands, pieces: Pieces | None = None) -> Loops:
    """Returns the loops that are faster; arrays may be their shapes.

    Sums by channel and pairs lay heads and batch entries one behind the other, so they are left out where
    these may be on different devices, or an Explicit mesh names their axes.
    """
    weights, (_, S, _, D) = operands.attention_weights, operands.value.shape
    B, Q, M, K = weights.shape
    if targets.platform() == "gpu":
        if BY_LEVEL.holds(not options.deterministic_sums and _rows_of_a_device(weights) > _LEVEL_ROWS):
            form: Name = "level by level"
            return Loops(form, form, form, merged=_is_whole(weights, pieces))
        form = "all points at once" if AT_ONCE.holds() else "point by point"
        return Loops(form, "sorted runs" if options.deterministic_sums else form, form)
    if targets.platform() != "cpu" or not all(isinstance(n, int) for n in (B, Q, M, S, D)):
        return Loops()
    # a device that holds its own piece has as many rows as its shard
    if pieces is not None and pieces.mesh_axes:
        B, Q, M, _ = jax.typeof(weights).sharding.shard_shape(weights.shape)
    many = B * Q * M >= _MANY_ROWS
    loops = Loops(on_all_cores=ALL_CORES.holds(many))
    is_named = any(explicit_spec(weights)) or any(explicit_spec(operands.value))
    if pieces is not None or is_named or not targets.is_one_cpu() or operands.value.size >= _INDICES:
        return loops
    # in pairs as many queries at a time as fit the cache
    # with fewer pairs than pixels, to pad these, and drop that, would cost more than the sums
    is_paired = options.method == "bilinear" and Q >= _MANY_QUERIES and B * M * D > 0 and 2 * Q * K >= S
    if in_pairs := PAIRS.holds(is_paired):
        pair_bytes = 2 * D * sampling.compute_dtype(operands).itemsize
        size = min(Q, max(1, _BLOCK_BYTES // pair_bytes))
        loops = loops._replace(dvalue="pairs of pixels", paired_queries=size)
    corners = (4 if options.method == "bilinear" else 1) * weights.size
    if BY_CHANNEL.holds(many and 4 * Q >= S):
        loops = loops._replace(dpoints="by channel")
    elif CORNERS.holds(0 < corners * D <= _CORNER_NUMBERS):
        loops = loops._replace(dpoints="row for each corner")
        if not in_pairs:
            by_pixel = BY_PIXEL.holds(B == 1 and operands.value.size > _CORNER_NUMBERS)
            loops = loops._replace(dvalue="row for each corner", by_pixel=by_pixel)
    return loops


def _rows_of_a_device(weights: jax.Array) -> int:
    """Counts the rows of one query and head that a device has; 0 where a size is symbolic."""
    shape = weights.shape[:3]
    if not all(isinstance(n, int) for n in shape):
        return 0
    if any(explicit_spec(weights)):
        shape = jax.typeof(weights).sharding.shard_shape(weights.shape)[:3]
    return math.prod(shape) // auto_devices(weights)


def _is_whole(weights: jax.Array, pieces: Pieces | None) -> bool:
    """Tells whether the device that runs the loops holds batch and heads whole.

    One axis of both keeps a head's pixels side by side. With two, XLA:GPU lays heads behind pixels again.
    """
    on_device = pieces is not None and bool(pieces.mesh_axes)
    of_batch, _, of_heads, _ = explicit_spec(weights)
    return auto_devices(weights) == 1 and (on_device or of_batch is of_heads is None)


def with_all_pixels(plan: Plan, operands: Operands) -> Operands:
    """Returns `operands` with all pixels of the value on each device, since a query reads any of them."""
    value = unsharded(operands.value, 1)
    if plan.pieces is not None and not plan.pieces.mesh_axes:
        value = gathered(value, 1, operands)
    return operands._replace(value=value)
