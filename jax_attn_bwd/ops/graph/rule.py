"""The rule of the graph attentions: their implementations and the custom_vjp."""

from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_attn_bwd._core import backend, checks
from jax_attn_bwd._core.sharding import runs_in_shard_map
from jax_attn_bwd.ops.graph import backward as portable_backward
from jax_attn_bwd.ops.graph import batch_axes
from jax_attn_bwd.ops.graph import forward as portable_forward
from jax_attn_bwd.ops.graph.spec import (
    DIFFERENTIABLE,
    Cotangents,
    Operands,
    Options,
    Residuals,
    Result,
    Wanted,
)

_PORTABLE = backend.Implementation("xla", portable_forward.forward, portable_backward.backward)
IMPLEMENTATIONS = (backend.kernel("mosaic_gpu", __package__, _PORTABLE, ("gpu",)), _PORTABLE)


def attend(
    operator: str, options: Options, operands: Operands, return_residual: Any, implementation: Any
) -> Any:
    """out, and the weights and lse if they are asked for."""
    return_residual = checks.flag(operator, "return_residual", return_residual)
    chosen = backend.select(operator, IMPLEMENTATIONS, implementation, options, operands)
    out, weights, lse = _run((options, chosen.name), operands)
    outputs = (out,) + ((weights,) if options.return_weights else ())
    outputs += (lse,) if return_residual else ()
    return outputs if len(outputs) > 1 else out


def _outputs(options: Options, result: Result) -> tuple[Any, Any, Any]:
    return (result.out if options.concat_heads else result.mean), result.weights, result.lse


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: tuple[Options, str], operands: Operands):
    options, implementation = static
    result = batch_axes.forward(backend.named(IMPLEMENTATIONS, implementation).forward, options, operands)
    return _outputs(options, result)


def _fwd(static, operands):
    options, implementation = static
    wanted, operands = backend.perturbed(operands, DIFFERENTIABLE)
    result = batch_axes.forward(backend.named(IMPLEMENTATIONS, implementation).forward, options, operands)
    result = result._replace(
        out=checkpoint_name(result.out, "attention_out"),
        m=checkpoint_name(result.m, "attention_lse"),
        l=checkpoint_name(result.l, "attention_lse"),
    )
    saved = result._replace(mean=None, lse=None)
    return _outputs(options, result), (operands, saved, backend.note(wanted, DIFFERENTIABLE))


def _bwd(static, residuals, cotangents):
    options, implementation = static
    *saved, note = residuals
    residuals = Residuals(*saved, Wanted(backend.noted(note, DIFFERENTIABLE)))
    given = Cotangents(*(None if isinstance(x, SymbolicZero) else x for x in cotangents))
    run = backend.named(IMPLEMENTATIONS, implementation).backward
    grads = batch_axes.backward(run, options, residuals, given)
    return (Operands(None, None, None)._replace(**grads),)


_attention.defvjp(_fwd, _bwd, symbolic_zeros=True)
_run = runs_in_shard_map(_attention)
