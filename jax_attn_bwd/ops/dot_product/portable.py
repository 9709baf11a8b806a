"""The portable path of dense attention: what computes each schedule, at once, in pieces or in slices.

A small plane is computed at once, `materialized.py`; a larger one tile by tile, `forward.py` and
`backward.py`, or on a GPU in strips, `strips.py`. Where the queries lie on several devices, `devices.py`
cuts the call in pieces; on one device a large batch is taken in slices, so that what one of them computes
stays in the cache. No call is cut both ways.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax

from jax_attn_bwd._core import float_leaves, split
from jax_attn_bwd._core.dropout import Offset
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.pallas import opaque
from jax_attn_bwd._core.sharding import full_like_operands, match_type, tie
from jax_attn_bwd.ops.dot_product import backward as tiled_backward
from jax_attn_bwd.ops.dot_product import devices, layout, materialized, row_terms, strips
from jax_attn_bwd.ops.dot_product import forward as tiled_forward
from jax_attn_bwd.ops.dot_product.plan import Materialized, Plan, Schedule, Strips, Tiles
from jax_attn_bwd.ops.dot_product.spec import DotProductAttentionGrads, Operands, Residuals, Result


class _Passes(NamedTuple):
    """What computes a schedule."""

    forward: Callable[..., Result]  # (plan, schedule, operands)
    backward: Callable[..., dict[str, Any]]  # (plan, schedule, wanted, operands, result, dout, dlse)


_PASSES: dict[type[Schedule], _Passes] = {
    Materialized: _Passes(materialized.forward, materialized.backward),
    Tiles: _Passes(tiled_forward.forward, tiled_backward.backward),
    Strips: _Passes(strips.forward, strips.backward),
}


# Opaque as a kernel is: a policy that saves products would save those of every tile, T x S numbers.
@opaque
@partial(jax.jit, static_argnums=0)
def forward(plan: Plan, operands: Operands) -> Result:
    """Computes the output and its row values."""
    whole, schedule = devices.with_whole_keys(operands), plan.schedule
    run = partial(_PASSES[type(schedule)].forward, plan, schedule)

    # At once, in pieces of the queries, or in slices of the batch.
    if plan.pieces is not None:
        result = devices.forward(plan, run, whole)()
    elif plan.batch_slices > 1:
        step, indices = _in_slices(plan, run, whole)
        result = split.joined(lax.scan(step, {}, indices)[1])
    else:
        result = run(whole)
    return tie(result, operands)


@partial(jax.jit, static_argnums=0)
def backward(
    plan: Plan, residuals: Residuals, dout: jax.Array | None, dlse: jax.Array | None
) -> DotProductAttentionGrads:
    """Computes the gradients of the operands in `residuals.wanted`; a cotangent that is None is zero."""
    given, result, wanted = residuals
    operands, rows = devices.with_whole_keys(given), (result, dout, dlse)
    schedule = plan.schedule
    run = partial(_PASSES[type(schedule)].backward, plan, schedule, wanted)
    if wanted.names == {"sink"} and not (isinstance(schedule, Materialized) and wanted.alone):
        run = partial(_of_sink_alone, plan)

    # At once, in pieces of the queries, or in slices of the batch, which add up what the batch shares.
    if plan.pieces is not None:
        grads = devices.gradients(plan, run, operands, wanted.names, rows)()
    elif plan.batch_slices > 1:
        step, indices = _in_slices(plan, run, operands, *rows)
        sums, found = lax.scan(
            step, _zeros_like(operands, wanted.names - operands.arrays_with_batch(), rows), indices
        )
        grads = split.joined(found) | sums
    else:
        grads = run(operands, *rows)

    # In the types of the operands.
    like = lambda name: float_leaves.floats(getattr(given, name))
    return DotProductAttentionGrads(
        **{name: jax.tree.map(match_type, grad, like(name)) for name, grad in grads.items()}
    )


def _in_slices(plan: Plan, run: Callable[..., Any], operands: Operands, *rows: Any) -> tuple[Any, Any]:
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


def _zeros_like(operands: Operands, names: frozenset[str], rows: Any) -> dict[str, Any]:
    """Returns zeros of the shapes of these operands, in the accumulator's dtype."""
    dtype = accumulator_dtype(operands.query.dtype)
    zero = lambda x: full_like_operands(x, x.shape, 0, dtype, (operands, rows))
    return {n: jax.tree.map(zero, float_leaves.floats(getattr(operands, n))) for n in sorted(names)}


def _of_sink_alone(plan: Plan, operands: Operands, result: Result, dout: Any, dlse: Any) -> dict[str, Any]:
    """Computes the gradient of the sink, which needs the rows alone."""
    _, delta = row_terms.of_backward(plan.options, operands, result, dout, dlse)
    return {"sink": row_terms.gradient_of_sink(operands.sink, result, layout.merge_rows(delta))}
