"""The custom_vjp that the three graph attentions share, and their implementations."""

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_attn_bwd._core import backend, checks
from jax_attn_bwd._core.sharding import reshard_like
from jax_attn_bwd.ops.graph import backward as portable_backward
from jax_attn_bwd.ops.graph import forward as portable_forward
from jax_attn_bwd.ops.graph.arguments import check_cotangents
from jax_attn_bwd.ops.graph.spec import (
    DIFFERENTIABLE,
    Cotangents,
    GraphAttentionGrads,
    Operands,
    Options,
    Residuals,
    Result,
    Wanted,
)

IMPLEMENTATIONS = (
    backend.Implementation("xla", portable_forward.forward, portable_backward.backward),
)


def attend(
    operator: str, options: Options, operands: Operands, return_residual: Any, implementation: Any
) -> Any:
    """out, and the weights and lse if they are asked for."""
    return_residual = checks.flag(operator, "return_residual", return_residual)
    chosen = backend.select(operator, IMPLEMENTATIONS, implementation, options, operands)
    out, weights, lse = _attention((options, chosen.name), operands)
    outputs = (out,) + ((weights,) if options.return_weights else ())
    outputs += (lse,) if return_residual else ()
    return outputs if len(outputs) > 1 else out


def gradients(
    operator: str, options: Options, operands: Operands, dout: Any, out: Any, lse: Any,
    dweights: Any, dlse: Any, wanted: Iterable[str], implementation: Any,
) -> dict[str, jax.Array]:  # fmt: skip
    """The backward as a plain function: gradients of the operands in `wanted`, by name."""
    check_cotangents(operator, options, operands, dout, out, lse, dweights, dlse)
    chosen = backend.select(operator, IMPLEMENTATIONS, implementation, options, operands)
    if out is None or lse is None or dweights is not None:
        needed = dataclasses.replace(options, return_weights=dweights is not None)
        result = chosen.forward(needed, operands)
    else:
        out, lse = (reshard_like(x, operands.src, (None, 1)) for x in (out, lse))
        result = Result(out, None, None, lse, None)
    dout_axes = (None, 1 if options.concat_heads else None)
    axes = ((dout, dout_axes), (dweights, (None, 1)), (dlse, (None, 1)))
    cts = (None if x is None else reshard_like(x, operands.src, at) for x, at in axes)
    residuals = Residuals(operands, result, Wanted(frozenset(wanted)))
    return chosen.backward(options, residuals, Cotangents(*cts))


def additive_gradients(
    operator: str, options: Options, operands: Operands, given: dict[str, Any], dout: Any, out: Any,
    lse: Any, dweights: Any, dlse: Any, wrt: Any, implementation: Any,
) -> GraphAttentionGrads:  # fmt: skip
    """`gradients` of gat and gatv2; `given` holds the caller's arguments, whose dst may be None."""
    present = [name for name, x in given.items() if x is not None]
    wrt = [name for name in present if name != "edge"] if wrt is None else wrt
    wanted = set(checks.wanted(operator, wrt, tuple(given), present))
    shared = given["dst"] is None and "src" in wanted
    grads = gradients(
        operator, options, operands, dout, out, lse, dweights, dlse,
        wanted | ({"dst"} if shared else set()), implementation,
    )  # fmt: skip
    if shared:
        ddst = grads.pop("dst")
        grads["src"] = grads["src"].at[: ddst.shape[0]].add(ddst)
    return GraphAttentionGrads(**grads)


def _outputs(options: Options, result: Result) -> tuple[Any, Any, jax.Array]:
    return (result.out if options.concat_heads else result.mean), result.weights, result.lse


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: tuple[Options, str], operands: Operands):
    options, implementation = static
    result = backend.named(IMPLEMENTATIONS, implementation).forward(options, operands)
    return _outputs(options, result)


def _fwd(static, operands):
    options, implementation = static
    wanted, operands = backend.perturbed(operands, DIFFERENTIABLE)
    result = backend.named(IMPLEMENTATIONS, implementation).forward(options, operands)
    result = result._replace(
        out=checkpoint_name(result.out, "attention_out"),
        lse=checkpoint_name(result.lse, "attention_lse"),
        lse_low=checkpoint_name(result.lse_low, "attention_lse"),
    )
    saved = result._replace(mean=None)
    return _outputs(options, result), Residuals(operands, saved, Wanted(frozenset(wanted)))


def _bwd(static, residuals, cotangents):
    options, implementation = static
    given = Cotangents(*(None if isinstance(x, SymbolicZero) else x for x in cotangents))
    grads = backend.named(IMPLEMENTATIONS, implementation).backward(options, residuals, given)
    return (Operands(None, None, None)._replace(**grads),)


_attention.defvjp(_fwd, _bwd, symbolic_zeros=True)
