"""The rules of the layer: which of dense attention's implementations runs inside, and the derivatives."""

import dataclasses
from typing import Any

import jax

from jax_attn_bwd._core import backend, fusion
from jax_attn_bwd._core.operation import Operation
from jax_attn_bwd._core.sharding import types_of
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


def _primal(static: tuple[Options, Plan], operands: Operands) -> tuple[Any, Any, Any]:
    result = layer_forward.forward(*static, operands)
    return result.out, result.weights, result.residual if static[0].return_residual else None


def _forward(static, operands, wanted):
    options, plan = static
    plan = engine.differentiated(plan, wanted)
    given = fusion.computed_once(operands, _READ_TWICE)
    out, weights, saved = layer_forward.forward(options, plan, given)
    kept = engine.pack_residuals(plan, saved.attention(), wanted)
    outputs = out, weights, saved if options.return_residual else None
    return outputs, (operands, saved._replace(**kept._asdict()))


def _backward(static, saved, wanted, cotangents):
    dout, dweights, of_residual = cotangents
    if jax.tree.leaves(of_residual):
        raise NotImplementedError(
            "multi_head_attention: the residual of return_residual has no gradient; "
            "differentiate out and weights"
        )
    operands, residual = saved
    operands = fusion.computed_once(operands, _READ_TWICE)
    residuals = Residuals(operands, _restored(residual), Wanted(wanted))
    return as_cotangents(operands, layer_backward.backward(*static, residuals, dout, dweights))


def _tangent(static, saved, tangents):
    operands, residual = saved
    return layer_tangent.tangent(*static, operands, _restored(residual), tangents)


def _restored(residual):
    return residual._replace(**engine.unpack_residuals(residual.attention())._asdict())


OPERATION = Operation(DIFFERENTIABLE, _primal, _forward, _backward, _tangent)
