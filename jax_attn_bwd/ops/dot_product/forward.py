"""Portable forward of dense attention: the way that the plan names, at once, in pieces or in slices.

The ways are the files of `portable/`. Where the queries lie on several devices, `devices.py` cuts the call in
pieces; on one device a large batch is taken in slices, so that what one of them computes stays in the cache.
No call is cut both ways.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax

from jax_attn_bwd._core import split
from jax_attn_bwd._core.dropout import Offset
from jax_attn_bwd._core.pallas import opaque
from jax_attn_bwd._core.sharding import tie
from jax_attn_bwd.ops.dot_product import devices
from jax_attn_bwd.ops.dot_product.clean_operands import with_whole_keys
from jax_attn_bwd.ops.dot_product.plan import Materialized, Plan, Planes, Schedule, Strips, Tiles
from jax_attn_bwd.ops.dot_product.portable import plane, planes, strips, tiles
from jax_attn_bwd.ops.dot_product.spec import Operands, Result


class Passes(NamedTuple):
    """What computes a schedule."""

    forward: Callable[..., Result]  # (plan, schedule, operands)
    backward: Callable[..., dict[str, Any]]  # (plan, schedule, wanted, operands, result, dout, dlse)


PASSES: dict[type[Schedule], Passes] = {
    Materialized: Passes(plane.forward, plane.backward),
    Tiles: Passes(tiles.forward, tiles.backward),
    Planes: Passes(planes.forward, planes.backward),
    Strips: Passes(strips.forward, strips.backward),
}


# Opaque as a kernel is: a policy that saves products would save those of every tile, T x S numbers.
@opaque
@partial(jax.jit, static_argnums=0)
def forward(plan: Plan, operands: Operands) -> Result:
    """Computes the output and its row values."""
    whole, schedule = with_whole_keys(operands), plan.schedule
    run = partial(PASSES[type(schedule)].forward, plan, schedule)

    # At once, in pieces of the queries, or in slices of the batch.
    if plan.pieces is not None:
        result = devices.forward(plan, run, whole)()
    elif plan.batch_slices > 1:
        step, indices = in_slices(plan, run, whole)
        result = split.joined(lax.scan(step, {}, indices)[1])
    else:
        result = run(whole)
    return tie(result, operands)


def in_slices(plan: Plan, run: Callable[..., Any], operands: Operands, *rows: Any) -> tuple[Any, Any]:
    """Returns what `lax.scan` takes to compute `run(operands, *rows)` slice by slice: a step, and indices.

    Args:
      plan: tells their number, which divides the first batch axis.
      run: gives results that have all batch axes, and shares of the sums that are scanned with, by name.
      operands: those of the call.
      rows: further arrays with all batch axes.
    """
    axes: Any = operands.axes(dict.fromkeys(operands.arrays_with_batch(), 0))
    if operands.dropout_words is not None:
        offset = split.dropout_indices(operands.dropout_offset, operands.query, operands.query.ndim - 3)
        operands = operands._replace(dropout_offset=offset)
        axes = axes._replace(dropout_offset=Offset(0, None, None, None))
    return split.scan_of_slices(plan.batch_slices, run, (operands, *rows), (axes, *(0 for _ in rows)))
