"""The rules of the graph attentions: their implementations, the batch in front of them, and the derivatives.

The implementations know one graph and the features of one entry of a batch. The rule maps them over the
entries, so that the gradient of what entries share is summed once: over the batch, and over devices after.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_attn_bwd._core import backend, checks, dropout, fusion, pallas, split
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.operation import Operation
from jax_attn_bwd._core.sharding import match_type
from jax_attn_bwd.ops.graph import backward as portable_backward
from jax_attn_bwd.ops.graph import forward as portable_forward
from jax_attn_bwd.ops.graph import tangent as written_tangent
from jax_attn_bwd.ops.graph.placement import rows_sharded_like
from jax_attn_bwd.ops.graph.plan import Plan
from jax_attn_bwd.ops.graph.spec import (
    DIFFERENTIABLE,
    RANKS,
    Cotangents,
    Operands,
    Options,
    Residuals,
    Result,
    Wanted,
)

_PORTABLE = backend.Implementation("xla", portable_forward.forward, portable_backward.backward)
IMPLEMENTATIONS = (backend.kernel("mosaic_gpu", __package__, _PORTABLE, ("gpu",)), _PORTABLE)


def decide(
    operator: str, options: Options, operands: Operands, return_residual: Any, implementation: Any
) -> Plan:
    """Makes the plan of a call, whose other arguments are checked."""
    return_residual = checks.flag(operator, "return_residual", return_residual)
    plan = partial(Plan.of, return_residual=return_residual)
    return backend.planned(operator, IMPLEMENTATIONS, implementation, options, operands, plan)


def forward_of(plan: Plan, operands: Operands) -> Callable[[], Result]:
    """Returns the call that computes the result of every entry."""
    run = partial(backend.named(IMPLEMENTATIONS, plan.implementation).forward, plan)
    return split.over_entries(run, plan.batch_rank, (operands,), (_axes(plan, operands),), plan.in_turn)


def backward_of(
    plan: Plan, residuals: Residuals, cotangents: Cotangents
) -> Callable[[], dict[str, jax.Array]]:
    """Returns the call that computes the gradients of every entry, by name; `summed` adds up those of all."""
    run, operands = backend.named(IMPLEMENTATIONS, plan.implementation).backward, residuals.operands
    of_residuals: Any = _axes(plan, operands), 0, None
    if plan.batch_rank:  # what varies is summed over devices by no entry
        residuals = residuals._replace(operands=pallas.vary_alike(operands))
    arrays, axes = (residuals, cotangents), (Residuals(*of_residuals), 0)
    return split.over_entries(partial(run, plan), plan.batch_rank, arrays, axes, plan.in_turn)


def _axes(plan: Plan, operands: Operands) -> Operands:
    """Returns 0 for each of the operands that has the axes of the batch, None for what entries share."""
    has_batch = lambda x, own_rank: x is not None and x.ndim - own_rank == plan.batch_rank
    axes: Any = {n: 0 for n, rank in RANKS.items() if has_batch(getattr(operands, n), rank)}
    if operands.dropout_words is not None:
        axes["dropout_offset"] = dropout.Offset(0, None, None, None)
    return Operands(**dict.fromkeys(Operands._fields) | axes)


def summed(grads: dict[str, jax.Array], operands: Operands) -> dict[str, jax.Array]:
    """Sums the gradients of operands that entries share, of which there is one for each entry."""

    def of_all(grad, primal):
        surplus = grad.ndim - primal.ndim
        if surplus:
            grad = grad.astype(accumulator_dtype(grad.dtype)).sum(tuple(range(surplus)))
        return match_type(grad, primal)

    return {name: of_all(grad, getattr(operands, name)) for name, grad in grads.items()}


def _returned(plan: Plan) -> list[str]:
    """Names, as in `Cotangents`, what the operator returns."""
    asked = {"out": True, "weights": plan.options.return_weights, "lse": plan.return_residual}
    return [name for name, is_asked in asked.items() if is_asked]


def _outputs(plan: Plan, operands: Operands, result: Result) -> Any:
    out, lse = result.out if plan.options.concat_heads else result.mean, result.lse
    if plan.tied:
        out, lse = (rows_sharded_like(x, operands.dst) for x in (out, lse))
    found = {"out": out, "weights": result.weights, "lse": lse}
    outputs = tuple(found[name] for name in _returned(plan))
    return outputs if len(outputs) > 1 else out


def _primal(plan: Plan, operands: Operands) -> Any:
    operands = fusion.computed_once(operands, DIFFERENTIABLE)
    return _outputs(plan, operands, forward_of(plan, operands)())


def _forward(plan, operands, wanted):
    result = forward_of(plan, fusion.computed_once(operands, DIFFERENTIABLE))()
    result = result._replace(
        out=checkpoint_name(result.out, "attention_out"),
        wide_out=None if result.wide_out is None else checkpoint_name(result.wide_out, "attention_out"),
        m=checkpoint_name(result.m, "attention_lse"),
        l=checkpoint_name(result.l, "attention_lse"),
    )
    return _outputs(plan, operands, result), (operands, result._replace(mean=None, lse=None))


def _backward(plan, saved, wanted, cotangents):
    operands, result = saved
    operands = fusion.computed_once(operands, DIFFERENTIABLE)
    residuals = Residuals(operands, result, Wanted(wanted))
    names = _returned(plan)
    cotangents = jax.tree.map(partial(fusion.kept_whole, may_be_gathered=True), cotangents)
    given = dict(zip(names, cotangents if len(names) > 1 else (cotangents,), strict=True))
    grads = summed(backward_of(plan, residuals, Cotangents(**given))(), operands)
    return Operands(None, None, None)._replace(**grads)


def _tangent(plan, saved, tangents):
    operands, result = saved

    # tangents have the axes of their operands
    axes, run = _axes(plan, operands), partial(written_tangent.tangent, plan)
    arrays = operands, result, tangents._replace(graph=None)
    of_tangents = axes._replace(dropout_offset=None)
    run = split.over_entries(run, plan.batch_rank, arrays, (axes, 0, of_tangents), plan.in_turn)
    return _outputs(plan, operands, run())


OPERATION = Operation(DIFFERENTIABLE, _primal, _forward, _backward, _tangent)
