"""`Plan`: how a call is computed, decided once in the public function and used by every rule.

The portable loops take one sampling point of all queries and heads at a time. On a CPU, what lies between two
operations (5.6 MB for 5440 queries and 8 heads of 32) is then too long for a core's cache, and neither a dot
product nor a scatter-add of 32 numbers fills a core's units. On a GPU each point would be some launches, each
of which reads and writes the sums. There other loops run: `Loops`.

Queries may lie on several devices. A piece of them samples the whole value. Its rows of the output and of the
points' gradients are those of the whole, and the gradient of the value, equation (8) of `backward.py`, is the
sum over the pieces: it is taken once, after the loop over the points. `_core/split.py` runs the pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from jax_attn_bwd._core import split, targets
from jax_attn_bwd._core.sharding import explicit_spec, gathered, unsharded
from jax_attn_bwd._core.split import Pieces
from jax_attn_bwd.ops.deformable import sampling
from jax_attn_bwd.ops.deformable.spec import DIFFERENTIABLE, Operands, Options

# the axis Q that pieces cut
QUERY_AXES: dict[str, Any] = {"value": None, "sampling_locations": 1, "attention_weights": 1}

_MANY_ROWS = 1 << 13  # rows of one query and head; from here on a second core helps
_MANY_QUERIES = 256  # from here on pairs of pixels are faster
_BLOCK_BYTES = 1 << 17  # bytes of pairs that a core's cache holds; XLA leaves them to one core
_CORNER_NUMBERS = 1 << 20  # numbers in the rows of all corners: 4 MiB, which caches hold
_PIXELS_PER_CORNER = 4  # from here on most pixels are read by no one
_INDICES = 1 << 29  # numbers that int32 can index: padding makes up to three times as many


class Loops(NamedTuple):
    """The loops that differ from the portable ones."""

    on_all_cores: bool = False  # of the output and its tangent
    heads_first: bool = False  # in these, too, so that the points are transposed once
    by_channel: bool = False  # products with the cotangent: `point_gradients.by_channel`
    paired_queries: int = 0  # in a block of `value_gradient.in_pairs`; 0 = portable
    all_corners: bool = False  # at once in the backward, but of a value in pairs
    by_pixel: bool = False  # where their sums lie: for one entry whose value caches do not hold
    few_pixels: bool = False  # are read: so too in the forward of a step, and the value is made where read
    all_points: bool = False  # at once
    in_order: bool = False  # the value's gradient: `value_gradient.in_runs`


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
    def of_a_forward(self) -> "Plan":
        """The plan of a forward that no backward follows."""
        return replace(self, loops=self.loops._replace(few_pixels=False))

    @property
    def read_twice(self) -> Sequence[str]:
        """The operands that are computed once for both rules; not a value of which both read little."""
        return [name for name in DIFFERENTIABLE if name != "value" or not self.loops.few_pixels]


def plan(implementation: str, options: Options, operands: Operands) -> Plan:
    """Returns the plan of a call whose implementation is chosen."""
    weights = operands.attention_weights
    pieces = split.pieces_for_rows(weights, 1, weights.shape[0])
    return Plan(options, implementation, fastest_loops(options, operands, pieces), pieces)


def fastest_loops(options: Options, operands: Operands, pieces: Pieces | None = None) -> Loops:
    """Returns the loops that are faster; arrays may be their shapes.

    Measured with 5440 pixels, 8 heads of 32, B of 1 or 8, 100 to 5440 queries. Sums by channel and pairs lay
    heads and batch entries one behind the other, so they are left out where these may be on different
    devices, or an Explicit mesh names their axes.
    """
    if targets.platform() == "gpu":
        return Loops(all_points=True, in_order=options.deterministic_sums)
    weights, (_, S, _, D) = operands.attention_weights, operands.value.shape
    B, Q, M, K = weights.shape
    if targets.platform() != "cpu" or not all(isinstance(n, int) for n in (B, Q, M, S, D)):
        return Loops()
    # a device that holds its own piece has as many rows as its shard
    if pieces is not None and pieces.mesh_axes:
        B, Q, M, _ = jax.typeof(weights).sharding.shard_shape(weights.shape)
    many = B * Q * M >= _MANY_ROWS
    is_named = any(explicit_spec(weights)) or any(explicit_spec(operands.value))
    if pieces is not None or is_named or not targets.is_one_cpu() or operands.value.size >= _INDICES:
        return Loops(on_all_cores=many)
    by_channel = many and 4 * Q >= S  # with fewer, transposing the pixels costs more
    corners = (4 if options.method == "bilinear" else 1) * weights.size
    all_corners = not by_channel and 0 < corners * D <= _CORNER_NUMBERS
    # as many queries in a block as its pairs of pixels fit the cache
    paired = options.method == "bilinear" and Q >= _MANY_QUERIES and B * M * D > 0
    paired = paired and 2 * Q * K >= S  # else to pad the pixels, and drop that, would cost more than the sums
    pair_bytes = 2 * D * sampling.compute_dtype(operands).itemsize
    return Loops(
        on_all_cores=many,
        heads_first=many,
        by_channel=by_channel,
        all_corners=all_corners,
        by_pixel=all_corners and B == 1 and operands.value.size > _CORNER_NUMBERS,
        few_pixels=all_corners and _PIXELS_PER_CORNER * corners <= B * S * M,
        paired_queries=min(Q, max(1, _BLOCK_BYTES // pair_bytes)) if paired else 0,
    )


def with_all_pixels(plan: Plan, operands: Operands) -> Operands:
    """Returns `operands` with all pixels of the value on each device, since a query reads any of them."""
    value = unsharded(operands.value, 1)
    if plan.pieces is not None and not plan.pieces.mesh_axes:
        value = gathered(value, 1, operands)
    return operands._replace(value=value)
