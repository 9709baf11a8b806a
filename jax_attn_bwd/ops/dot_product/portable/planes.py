"""Dense attention on whole planes of some batch entries and heads, one slice after the other, for GPUs.

Where all planes at once would take too much memory, and no mask leaves much less than a plane, slices of the
first batch axis and of the key heads are taken in turn, by a loop that a program has once. Each slice is what
`plane.py` computes of whole rows: the products and reductions of a plain softmax. Forward and backward are
loops of their own, so the backward forms its logits again.

What entries share is cut by heads, as far as the heads reach: the gradient of such a bias is then a sum
inside a slice, and nothing is carried from slice to slice.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jax_attn_bwd._core import split
from jax_attn_bwd._core.numerics import accumulator_dtype, moved
from jax_attn_bwd._core.pallas import on_local_shards, vary_alike
from jax_attn_bwd._core.sharding import explicit_spec, full_like_operands, match_type, varying
from jax_attn_bwd.ops.dot_product.plan import Materialized, Plan, Planes
from jax_attn_bwd.ops.dot_product.portable import plane
from jax_attn_bwd.ops.dot_product.spec import Operands, Result, Wanted


def forward(plan: Plan, schedule: Planes, operands: Operands) -> Result:
    """Computes the output and its row values; on an Explicit mesh each device has slices of its own."""
    rows: Any = PartitionSpec(*explicit_spec(operands.query)[:-1])
    specs = Result(rows, rows, rows, rows if plan.has_wide_out else None)
    run = partial(plane.forward, plan, Materialized(whole_rows=schedule.whole_rows))
    on_a_device = lambda operands: _in_turn(schedule, frozenset(), run, vary_alike(operands))
    return on_local_shards(on_a_device, lambda _: specs, (operands,))


def backward(
    plan: Plan, schedule: Planes, wanted: Wanted, operands: Operands, *rows: Any
) -> dict[str, jax.Array]:
    """Computes the gradients named in `wanted`; `rows` are the result, dout and dlse."""
    specs = {name: PartitionSpec(*explicit_spec(operands.array(name))) for name in wanted.names}

    def on_a_device(operands, rows):
        # What slices or devices share is summed in the accumulator's dtype.
        alike, rows = vary_alike((operands, rows))
        shared = _shared(schedule, operands)
        given = {name: operands.array(name) for name in wanted.names}
        is_whole = lambda name: name not in shared and varying(given[name]) == varying(alike.array(name))

        of_slice = Materialized(whole_rows=schedule.whole_rows, fused_dp=schedule.fused_dp)

        def run(*slices):
            grads = plane.backward(plan, of_slice, wanted, *slices)
            return {n: x.astype(given[n].dtype) if is_whole(n) else x for n, x in grads.items()}

        grads = _in_turn(schedule, wanted.names, run, alike, *rows)
        return {name: match_type(x, given[name]) for name, x in grads.items()}

    return on_local_shards(on_a_device, lambda *_: specs, (operands, rows))


def _cuts(schedule: Planes, operands: Operands) -> list[tuple[int, dict[str, int], int]]:
    """Lists (number of slices, the axis of each array that is cut, that of row values), outermost last."""
    heads = operands.query.ndim - 2
    cuts = [
        (schedule.batch_slices, dict.fromkeys(operands.arrays_with_batch(), 0), 0),
        (schedule.head_slices, operands.arrays_with("n"), heads),
    ]
    return [cut for cut in cuts if cut[0] > 1]


def _shared(schedule: Planes, operands: Operands) -> frozenset[str]:
    """Names the arrays that several slices read."""
    names = frozenset(name for name in operands._fields if name != "mask")
    return frozenset().union(*(names - axes.keys() for _, axes, _ in _cuts(schedule, operands)))


def _in_turn(
    schedule: Planes, names: frozenset[str], run: Callable[..., Any], operands: Operands, *rows: Any
) -> Any:
    """Computes `run(operands, *rows)`, a `Result` or the gradients of these names, slice after slice."""
    run = jax.checkpoint(run, prevent_cse=False)
    for cut in _cuts(schedule, operands):
        run = partial(_by_slices, cut, names, run)
    return run(operands, *rows)


def _by_slices(
    cut: tuple[int, dict[str, int], int], names: frozenset[str], run: Any, operands: Operands, *rows: Any
) -> Any:
    """Computes it by slices of one axis: what these share is summed, all else is joined."""
    count, axes, axis_of_rows = cut
    of_all = operands.axes(axes), *(axis_of_rows for _ in rows)
    step, indices = split.scan_of_slices(count, run, (operands, *rows), of_all)
    dtype = accumulator_dtype(operands.query.dtype)
    zeros = lambda x: full_like_operands(x, x.shape, 0, dtype, (operands, rows))
    shared = {name: zeros(operands.array(name)) for name in sorted(names - axes.keys())}
    sums, found = lax.scan(step, shared, indices)

    def joined(x, axis):
        return split.join(moved(x, 0, axis), axis)

    if not names:
        return jax.tree.map(lambda x: joined(x, axis_of_rows), found)
    return sums | {name: joined(x, axes[name]) for name, x in found.items()}
