"""The rules of the layer: which of dense attention's implementations runs inside, and the derivatives."""

import dataclasses
from functools import partial
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from jax_attn_bwd._core import backend, fusion
from jax_attn_bwd._core.forward_mode import Rule, both_modes
from jax_attn_bwd._core.sharding import runs_in_shard_map, types_of
from jax_attn_bwd.ops.dot_product import engine
from jax_attn_bwd.ops.dot_product.engine import Plan
from jax_attn_bwd.ops.dot_product.spec import as_cotangents
from jax_attn_bwd.ops.multi_head import backward as layer_backward
from jax_attn_bwd.ops.multi_head import forward as layer_forward
from jax_attn_bwd.ops.multi_head import tangent as layer_tangent
from jax_attn_bwd.ops.multi_head.projections import attention_operands, project
from jax_attn_bwd.ops.multi_head.spec import DIFFERENTIABLE, PARAMS, Operands, Options, Residuals, Wanted


def _inner(options: Options, operands: Operands) -> Any:
    """The shapes of what dense attention is handed."""
    return types_of(lambda o: attention_operands(o, project(options, o)), operands)


def _around(attention: backend.Implementation) -> backend.Implementation:
    """The layer around one implementation of dense attention."""

    def supports(options: Options, operands: Operands) -> str | None:
        if attention.platform is None:
            return None
        return attention.supports(options.attention, _inner(options, operands))

    return dataclasses.replace(
        attention,
        forward=layer_forward.forward,
        backward=layer_backward.backward,
        supports=supports,
        sized=_inner,
    )


IMPLEMENTATIONS = tuple(_around(attention) for attention in engine.IMPLEMENTATIONS)


def plan(operator: str, implementation: str | None, options: Options, operands: Operands) -> Plan:
    """How the attention inside is computed; raises where the implementation asked for cannot."""
    chosen = backend.select(operator, IMPLEMENTATIONS, implementation, options, operands)
    return engine.planned(chosen.name, options.attention, _inner(options, operands))


_READ_TWICE = (*PARAMS, "query", "key", "value")  # in the forward and in the backward


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer(static: tuple[Options, Plan], operands: Operands) -> tuple[Any, Any, Any]:
    result = layer_forward.forward(*static, operands)
    return result.out, result.weights, result.residual if static[0].return_residual else None


def _fwd(static, operands):
    wanted, operands = backend.perturbed(operands, DIFFERENTIABLE)
    options, plan = static
    forward = partial(layer_forward.forward, options, engine.differentiated(plan, operands, wanted))
    out, weights, saved = forward(fusion.computed_once(operands, _READ_TWICE))
    kept = engine.kept(plan, operands, saved.attention(), wanted)
    residuals = (operands, saved._replace(**kept._asdict()), backend.note(wanted, DIFFERENTIABLE))
    return (out, weights, saved if options.return_residual else None), residuals


def _bwd(static, residuals, cotangents):
    zero = lambda x: x is None or isinstance(x, SymbolicZero)
    if not all(zero(x) for x in jax.tree.leaves(cotangents[2], is_leaf=zero)):
        raise NotImplementedError(
            "multi_head_attention: the residual of return_residual has no gradient; "
            "differentiate out and weights"
        )
    dout, dweights = (None if zero(x) else x for x in cotangents[:2])
    operands, saved, note = residuals
    operands = fusion.computed_once(operands, _READ_TWICE)
    residuals = Residuals(operands, _restored(saved), Wanted(backend.noted(note, DIFFERENTIABLE)))
    return (as_cotangents(operands, layer_backward.backward(*static, residuals, dout, dweights)),)


def _jvp(static, residuals, along):
    operands, saved, _ = residuals
    return layer_tangent.tangent(*static, operands, _restored(saved), along[0])


def _restored(saved):
    return saved._replace(**engine.restored(saved.attention())._asdict())


_layer.defvjp(_fwd, _bwd, symbolic_zeros=True)
run = runs_in_shard_map(_layer)
run_both_modes = runs_in_shard_map(both_modes(Rule(_layer, _fwd, _bwd, _jvp)))
