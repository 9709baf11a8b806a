"""Portable forward of multi-scale deformable attention: a loop over the K sampling points, or all at once.

    out = sum over k of weight_k * sum over corners c of share_c * value[pixel_c]

The largest intermediate that is written has the size of `out`, or of the points. XLA:GPU takes gathers into
the loop of a sum: there one kernel sums all points, and no array of the points and the channels is written.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax

from jax_attn_bwd._core import fusion, split
from jax_attn_bwd._core.numerics import total
from jax_attn_bwd._core.remat import checkpoint
from jax_attn_bwd._core.sharding import full_like_operands, tie
from jax_attn_bwd.ops.deformable import sampling
from jax_attn_bwd.ops.deformable.plan import QUERY_AXES, Plan, with_all_pixels
from jax_attn_bwd.ops.deformable.spec import Operands

Terms = Sequence[tuple[jax.Array, Sequence[jax.Array]]]  # tables [B, S, M, D], a factor for each corner


@partial(jax.jit, static_argnums=0)
def forward(plan: Plan, operands: Operands) -> jax.Array:
    """Returns `out [B, Q, M * D]`, in the dtype of the value, wherever queries and pixels lie."""
    return over_queries(plan, partial(_of_queries, plan), with_all_pixels(plan, operands))()


def over_queries(
    plan: Plan, function: Callable[..., jax.Array], *arrays: Operands
) -> Callable[[], jax.Array]:
    """Returns the call `function(*arrays)`, for all queries, over the devices that hold some of them."""
    # what one query reads is not summed over them: XLA may cut them as it likes
    if plan.pieces is None or not plan.pieces.mesh_axes:
        return partial(function, *arrays)
    spec, axes = split.out_spec(arrays[0].attention_weights, 1), (Operands(**QUERY_AXES),) * len(arrays)
    return split.over(plan.pieces, function, arrays, axes, spec._replace(spec=spec.spec[:3]))


def _of_queries(plan: Plan, operands: Operands) -> jax.Array:
    """Returns the output of some queries."""
    terms = lambda at, weight: [(operands.value, sampling.scales(at, weight))]
    out = sum_over_points(plan, operands, terms, operands)
    return tie(out, operands)


def sum_over_points(
    plan: Plan, operands: Operands, terms: Callable[..., Terms], reads: Any, along: Sequence[jax.Array] = ()
) -> jax.Array:
    """Returns the sum over points and corners of `factor * table[pixel]`, `[B, Q, M * D]`.

    Args:
      terms: `(pixels, weight, *along) -> the tables that are read there, and their factors`.
      reads: all arrays of the sum.
      along: `[B, Q, M, K]`, more numbers of each point.
    """
    options, loops, dtype = plan.options, plan.loops, sampling.compute_dtype(operands)
    (B, Q, M, _), D = operands.attention_weights.shape, operands.value.shape[3]

    # all points at once
    if loops.output == "all points at once":
        at, weight = sampling.all_pixels(options, operands)
        sum_of = partial(_sum_at_all_points, sampling.read)
        sums = [sum_of(table, at.pixels, x) for table, x in terms(at, weight, *along)]
        return total(*sums).reshape(B, Q, M * D).astype(operands.value.dtype)

    # all points of a level at once, heads in front: [B * M, Q, D] or [B, M, Q, D]
    if loops.output == "level by level":
        samples, sums = sampling.points(options, operands), []
        for level in sampling.one_by_one(options, loops.merged):
            some, numbers = jax.tree.map(level.of_points, (samples, tuple(along)))
            at, sum_of = level.pixels_around(some), partial(_sum_at_all_points, sampling.read_level)
            found = terms(at, some.weight, *numbers)
            sums += [sum_of(level.of_pixels(table), at.pixels, x) for table, x in found]
        out = sampling.heads_behind(total(*sums), B, loops.merged)
        return out.reshape(B, Q, M * D).astype(operands.value.dtype)

    # or point by point: what a point adds to all queries and heads, [B, Q, M, D] or [B, M, Q, D]
    def add_point(out, point):
        level, (x, y, weight), numbers = point
        level = sampling.on_all_cores(level) if loops.on_all_cores else level
        at = sampling.pixels_around(options, level, x, y)
        found = terms(at, weight, *numbers)
        # once for a point, not once for each of its D channels in the loop that XLA fuses
        pixels, factors = fusion.barrier((at.pixels, [x for _, x in found]))
        for corner, pixel in enumerate(pixels):
            for (table, _), factor in zip(found, factors, strict=True):
                rows = sampling.read(table, pixel, dtype, loops.on_all_cores)
                out += factor[corner][..., None] * rows
        return out, None

    # the sum begins with zeros that lie on the mesh as the queries do
    like, shape = operands.attention_weights, (B, Q, M, D)
    if loops.on_all_cores:
        like, shape = like.transpose(0, 2, 1, 3), (B, M, Q, D)
    zeros = full_like_operands(like, shape, 0, dtype, reads)
    in_front = tuple(sampling.points_in_front(x, loops.on_all_cores) for x in along)
    points = (options.levels(), sampling.samples(options, operands, loops.on_all_cores), in_front)
    out, _ = lax.scan(checkpoint(add_point, prevent_cse=False), zeros, points)
    out = out.transpose(0, 2, 1, 3) if loops.on_all_cores else out
    return out.reshape(B, Q, M * D).astype(operands.value.dtype)


def _sum_at_all_points(
    read: Callable[..., jax.Array],
    table: jax.Array,
    pixels: Sequence[jax.Array],
    factors: Sequence[jax.Array],
) -> jax.Array:
    """Returns the sum over points and corners of `factor * table` at the corner's pixel, `[..., D]`.

    Pixels and factors are `[..., K]`, of all points or of those of a level.
    """
    sums = []
    for first in range(0, max(1, factors[0].shape[-1]), sampling.BLOCK):
        some = slice(first, first + sampling.BLOCK)
        terms = [
            factor[..., some, None] * read(table, pixel[..., some], factor.dtype)
            for pixel, factor in zip(pixels, factors, strict=True)
        ]
        sums.append(total(*terms).sum(-2))
    return total(*sums)
