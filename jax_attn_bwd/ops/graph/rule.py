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
    chosen = backend.select(operator, IMPLEMENTATIONS, implementation, options, operands)
    return Plan.of(options, operands, chosen.name, return_residual)


def attend(
    operator: str,
    options: Options,
    operands: Operands,
    return_residual: Any,
    forward_mode: Any,
    implementation: Any,
) -> Any:
    """Runs a call whose other arguments are checked: returns out, and the weights and lse if asked for."""
    plan = decide(operator, options, operands, return_residual, implementation)
    return _OPERATION.runner(operator, forward_mode)(plan, operands)


def forward_of(plan: Plan) -> Callable[[Plan, Operands], Result]:
    """Returns the forward `(plan, operands) -> Result` of all entries."""
    run = backend.named(IMPLEMENTATIONS, plan.implementation).forward
    return partial(_over_entries, run) if plan.batch_rank else run


def backward_of(plan: Plan) -> Callable[[Plan, Residuals, Cotangents], dict[str, jax.Array]]:
    """Returns the backward `(plan, residuals, cotangents) -> gradients by name` of all entries."""
    run = backend.named(IMPLEMENTATIONS, plan.implementation).backward
    return partial(_summed_over_entries, run) if plan.batch_rank else run


def _over_entries(
    function: Callable[..., Any],
    plan: Plan,
    operands: Operands,
    moving: Operands | None = None,
    **of_entries: Any,
) -> Any:
    """Calls `function(plan, operands, **of_entries)` for every entry; `of_entries` have all batch axes.

    Those of `moving`, which it gets as `tangents`, have the axes of the operands.
    """
    # which axes are those of entries: none for operands that all share, 0 for the rest
    given = operands._asdict()
    has_batch = lambda x, own_rank: x is not None and x.ndim - own_rank == plan.batch_rank
    axes: dict[str, Any] = {name: 0 for name, rank in RANKS.items() if has_batch(given[name], rank)}
    if moving is not None:
        of_operands: dict[str, Any] = {name: axes.get(name) for name in given}
        axes["tangents"] = Operands(**of_operands)
        of_entries["tangents"] = moving
    if operands.dropout_words is not None:
        axes["dropout_offset"] = dropout.Offset(0, None, None, None)

    # the batch axes are mapped one inside the other
    def of_entry(arrays):
        own = {name: arrays.pop(name) for name in of_entries}
        return function(plan, Operands(**arrays), **own)

    axes = dict.fromkeys(of_entries, 0) | axes
    return split.over_entries(of_entry, plan.batch_rank, given | of_entries, axes, plan.in_turn)


def _summed_over_entries(
    run: Callable[..., dict[str, jax.Array]], plan: Plan, residuals: Residuals, cotangents: Cotangents
) -> dict[str, jax.Array]:
    """Computes the gradients that `run` gives of every entry; what entries share gets their sum."""
    operands, result, wanted = residuals

    def of_entry(plan, operands, result, cotangents):
        return run(plan, Residuals(operands, result, wanted), cotangents)

    # what varies is summed over devices by no entry
    alike = pallas.vary_alike(operands)
    grads = _over_entries(of_entry, plan, alike, result=result, cotangents=cotangents)
    return {name: _summed(x, getattr(operands, name)) for name, x in grads.items()}


def _summed(grad: jax.Array, primal: jax.Array) -> jax.Array:
    """Sums the gradient of `primal`, where `grad` has one for each entry."""
    surplus = grad.ndim - primal.ndim
    if surplus:
        grad = grad.astype(accumulator_dtype(grad.dtype)).sum(tuple(range(surplus)))
    return match_type(grad, primal)


def _returned(plan: Plan) -> list[str]:
    """Names, as in `Cotangents`, what the operator returns."""
    asked = {"out": True, "weights": plan.options.return_weights, "lse": plan.return_residual}
    return [name for name, is_asked in asked.items() if is_asked]


def _outputs(plan: Plan, operands: Operands, result: Result) -> Any:
    out, lse = result.out if plan.options.concat_heads else result.mean, result.lse
    if plan.tied > 1:
        out, lse = (rows_sharded_like(x, operands.dst) for x in (out, lse))
    found = {"out": out, "weights": result.weights, "lse": lse}
    outputs = tuple(found[name] for name in _returned(plan))
    return outputs if len(outputs) > 1 else out


def _primal(plan: Plan, operands: Operands) -> Any:
    operands = fusion.computed_once(operands, DIFFERENTIABLE)
    return _outputs(plan, operands, forward_of(plan)(plan, operands))


def _forward(plan, operands, wanted):
    result = forward_of(plan)(plan, fusion.computed_once(operands, DIFFERENTIABLE))
    result = result._replace(
        out=checkpoint_name(result.out, "attention_out"),
        out_low=None if result.out_low is None else checkpoint_name(result.out_low, "attention_out"),
        m=checkpoint_name(result.m, "attention_lse"),
        l=checkpoint_name(result.l, "attention_lse"),
    )
    return _outputs(plan, operands, result), (operands, result._replace(mean=None, lse=None))


def _backward(plan, saved, wanted, cotangents):
    operands, result = saved
    operands = fusion.computed_once(operands, DIFFERENTIABLE)
    residuals = Residuals(operands, result, Wanted(wanted))
    names = _returned(plan)
    given = dict(zip(names, cotangents if len(names) > 1 else (cotangents,), strict=True))
    grads = backward_of(plan)(plan, residuals, Cotangents(**given))
    return Operands(None, None, None)._replace(**grads)


def _tangent(plan, saved, tangents):
    operands, result = saved
    along = tangents._replace(graph=None)
    found = _over_entries(written_tangent.tangent, plan, operands, along, result=result)
    return _outputs(plan, operands, found)


_OPERATION = Operation(DIFFERENTIABLE, _primal, _forward, _backward, _tangent)
