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


def forward_of(plan: Plan) -> Callable[[Plan, Operands], Result]:
    """Returns the forward `(plan, operands) -> Result` of all entries."""
    run = backend.named(IMPLEMENTATIONS, plan.implementation).forward
    return partial(_forward_over_entries, run) if plan.batch_rank else run


def backward_of(plan: Plan) -> Callable[[Plan, Residuals, Cotangents], dict[str, jax.Array]]:
    """Returns the backward `(plan, residuals, cotangents) -> gradients by name` of all entries."""
    run = backend.named(IMPLEMENTATIONS, plan.implementation).backward
    return partial(_backward_over_entries, run) if plan.batch_rank else run


def _forward_over_entries(run: Callable[..., Result], plan: Plan, operands: Operands) -> Result:
    """Computes what `run` returns for every entry."""
    of_entry = lambda own: run(plan, Operands(**own))
    arrays, axes = operands._asdict(), _axes(plan, operands)
    return split.over_entries(of_entry, plan.batch_rank, arrays, axes, plan.in_turn)


def _backward_over_entries(
    run: Callable[..., dict[str, jax.Array]], plan: Plan, residuals: Residuals, cotangents: Cotangents
) -> dict[str, jax.Array]:
    """Computes the gradients that `run` gives for every entry; what entries share gets their sum."""
    operands, result, wanted = residuals

    def of_entry(own):
        result, cotangents = own.pop("result"), own.pop("cotangents")
        return run(plan, Residuals(Operands(**own), result, wanted), cotangents)

    # what varies is summed over devices by no entry
    arrays = pallas.vary_alike(operands)._asdict() | {"result": result, "cotangents": cotangents}
    axes = _axes(plan, operands) | {"result": 0, "cotangents": 0}
    grads = split.over_entries(of_entry, plan.batch_rank, arrays, axes, plan.in_turn)
    return {name: _summed(x, getattr(operands, name)) for name, x in grads.items()}


def _axes(plan: Plan, operands: Operands) -> dict[str, Any]:
    """Returns 0 for each of the operands that has the axes of the batch; entries share the others."""
    has_batch = lambda x, own_rank: x is not None and x.ndim - own_rank == plan.batch_rank
    axes: dict[str, Any] = {n: 0 for n, rank in RANKS.items() if has_batch(getattr(operands, n), rank)}
    if operands.dropout_words is not None:
        axes["dropout_offset"] = dropout.Offset(0, None, None, None)
    return axes


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

    def of_entry(own):
        result, tangents = own.pop("result"), own.pop("tangents")
        return written_tangent.tangent(plan, Operands(**own), result, tangents)

    # tangents have the axes of their operands
    axes = _axes(plan, operands)
    of_tangents: dict[str, Any] = {n: axes.get(n) if n in RANKS else None for n in Operands._fields}
    arrays = operands._asdict() | {"result": result, "tangents": tangents._replace(graph=None)}
    axes |= {"result": 0, "tangents": Operands(**of_tangents)}
    found = split.over_entries(of_entry, plan.batch_rank, arrays, axes, plan.in_turn)
    return _outputs(plan, operands, found)


OPERATION = Operation(DIFFERENTIABLE, _primal, _forward, _backward, _tangent)
