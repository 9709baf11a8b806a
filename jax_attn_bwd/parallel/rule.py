"""The rule of ring and all-gather attention: blocks on each device, a custom_vjp around their exchange.

With `forward_mode=True` the same forward and backward, and a tangent rule beside them.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jax_attn_bwd._core import backend, checks, float_leaves, pallas
from jax_attn_bwd._core.forward_mode import Rule, both_modes, require
from jax_attn_bwd._core.sharding import match_type, runs_in_shard_map, tie
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
    run = _run
    if checks.flag(operator, "forward_mode", forward_mode):
        require(operator)
        run = _run_both_modes
    out, lse = run((operator, exchange, plan), operands)
    return (out, lse) if return_residual else out


def _alike(exchange: Exchange, operands: Operands) -> Operands:
    """`operands`, each varying over the axis of the sequence and every other that one of them varies over.

    Then no rule of a block has anything to sum over devices: that waits until the exchange is over.
    """
    return pallas.vary_alike((operands, lax.axis_index(exchange.axis_name)))[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: tuple[str, Exchange, engine.Plan], operands: Operands) -> tuple[jax.Array, jax.Array]:
    result = _forward(static, operands)
    return result.out, result.lse


def _forward(static, operands) -> Result:
    operator, exchange, plan = static
    alike = _alike(exchange, operands)
    return tie(_EXCHANGES[operator].forward(exchange, plan, alike), alike)


def _fwd(static, operands):
    wanted, operands = backend.perturbed(operands, DIFFERENTIABLE)
    *exchange, plan = static
    result = _forward((*exchange, engine.differentiated(plan, operands, wanted)), operands)
    kept = engine.kept(plan, operands, result, wanted)
    return (kept.out, kept.lse), (operands, kept, backend.note(wanted, DIFFERENTIABLE))


def _bwd(static, residuals, cotangents):
    operator, exchange, plan = static
    operands, result, note = residuals
    wanted, result = backend.noted(note, DIFFERENTIABLE), engine.restored(result)
    alike, names = _alike(exchange, operands), wanted - {"sink"}
    dout, dlse = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
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
    return (as_cotangents(operands, matched),)


def _jvp(static, residuals, tangents):
    operator, exchange, plan = static
    operands, result, _ = residuals
    result = engine.restored(result)
    alike, along = pallas.vary_alike((_alike(exchange, operands), tangents[0]))
    total, mu = _EXCHANGES[operator].tangent(exchange, plan, alike, result, along)
    dout = engine.through_softmax(result, total, mu)  # (9) of `ring.py`
    return dout.astype(result.out.dtype), mu


_attention.defvjp(_fwd, _bwd, symbolic_zeros=True)
_run = runs_in_shard_map(_attention)
_run_both_modes = runs_in_shard_map(both_modes(Rule(_attention, _fwd, _bwd, _jvp)))
