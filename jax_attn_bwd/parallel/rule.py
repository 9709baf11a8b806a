"""The rule of ring and all-gather attention: blocks on each device, and the derivatives of their exchange.

With `forward_mode=True` the same forward and backward, and a tangent rule beside them.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import checks, float_leaves, pallas
from jax_attn_bwd._core.operation import Operation
from jax_attn_bwd._core.sharding import match_type, tie
from jax_attn_bwd.ops.dot_product import engine
from jax_attn_bwd.ops.dot_product.spec import DIFFERENTIABLE, Operands, Result, as_cotangents
from jax_attn_bwd.parallel import all_gather, ring
from jax_attn_bwd.parallel.arguments import Exchange, prepare

_EXCHANGES: dict[str, Any] = {"ring_attention": ring, "all_gather_attention": all_gather}


def exchanged(
    operator: str, *, return_residual: bool, forward_mode: bool, implementation: str | None, **arguments: Any
) -> Any:
    """out, and lse if it is asked for, of the checked arguments of a call."""
    exchange, options, operands = prepare(operator, **arguments)
    return_residual = checks.flag(operator, "return_residual", return_residual)
    example = jax.eval_shape(partial(_EXCHANGES[operator].example, exchange), _alike(exchange, operands))
    plan = engine.plan(operator, implementation, options, example)
    run = _OPERATION.runner(operator, forward_mode)
    out, lse = run((operator, exchange, plan), operands)
    return (out, lse) if return_residual else out


def _alike(exchange: Exchange, operands: Operands) -> Operands:
    """`operands`, each varying over the axis of the sequence and every other that one of them varies over.

    Then no rule of a block has anything to sum over devices: that waits until the exchange is over.
    """
    return pallas.vary_alike((operands, lax.axis_index(exchange.axis_name)))[0]


def _primal(static: tuple[str, Exchange, engine.Plan], operands: Operands) -> tuple[jax.Array, jax.Array]:
    result = _exchanged(static, operands)
    return result.out, result.lse


def _exchanged(static, operands) -> Result:
    operator, exchange, plan = static
    alike = _alike(exchange, operands)
    return tie(_EXCHANGES[operator].forward(exchange, plan, alike), alike)


def _forward(static, operands, wanted):
    *exchange, plan = static
    result = _exchanged((*exchange, engine.differentiated(plan, wanted)), operands)
    kept = engine.pack_residuals(plan, result, wanted)
    return (kept.out, kept.lse), (operands, kept)


def _backward(static, saved, wanted, cotangents):
    operator, exchange, plan = static
    (operands, result), (dout, dlse) = saved, cotangents
    result = engine.unpack_residuals(result)
    alike, names = _alike(exchange, operands), wanted - {"sink"}
    if dout is None:
        dout = jnp.zeros_like(result.out)
    else:
        dout = jnp.where(engine.sees_nothing(alike, result)[..., None], 0, dout)
    if dlse is not None:
        dlse = jnp.where(result.lse == -jnp.inf, 0, dlse)  # nothing seen: it may be anything
    run, grads = _EXCHANGES[operator].backward, {}
    if names:
        grads = run(exchange, plan, alike, result, names, dout, dlse)
    if "sink" in wanted:
        delta = engine.delta(plan.options, alike, result, dout, dlse)
        grads["sink"] = engine.gradient_of_sink(alike.sink, result, delta)  # (7) of `ring.py`
    matched = {
        name: jax.tree.map(match_type, x, float_leaves.floats(getattr(operands, name)))
        for name, x in grads.items()
    }
    return as_cotangents(operands, matched)


def _tangent(static, saved, tangents):
    operator, exchange, plan = static
    operands, result = saved
    result = engine.unpack_residuals(result)
    alike, along = pallas.vary_alike((_alike(exchange, operands), tangents))
    total, mu = _EXCHANGES[operator].tangent(exchange, plan, alike, result, along)
    dout = engine.through_softmax(result, total, mu)  # (9) of `ring.py`
    return dout.astype(result.out.dtype), mu


_OPERATION = Operation(DIFFERENTIABLE, _primal, _forward, _backward, _tangent)
