"""Backward of the multi-head attention layer: derivation, then the three stages that undo the forward.

The forward, z_o and z the factors of the two dropouts, P the weights over S' keys (with the appended rows):

    q = x_q W_q + b_q,   k = [x_k W_k + b_k; bias_k; 0],   v = [x_v W_v + b_v; bias_v; 0]        (1)
    P = softmax(scale q k^T + bias, where visible; with the sink)                               (2)
    a = (z * P) v                                                                               (3)
    out = z_o * (a W_o + b_o) + x_q                                                             (4)

Given cotangents dout of (4) and dP of (2):

    dy = z_o * dout,   dx_q = dout from the last term of (4)                                    (5)
    db_o = sum dy,   dW_o = a^T dy,   da = dy W_o^T                         from (4)            (6)
    dp_ts = z_ts <da_t, v_s> + dP_ts                                        from (3), (2)       (7)
    delta_t = sum_s P_ts dp_ts = <da_t, a_t> + sum_s P_ts dP_ts                                 (8)
    dlogits = P (dp - delta)                                                from (2)            (9)

Dense attention's backward does (7) to (9) and the products with q, k, v tile by tile: it knows P from lse
over all S' keys. Here are done

    (7) to (9), dsink = -sum_t P_sink,t delta_t  on whole planes, where these exist: the weights have a
                                                 cotangent, or `save` kept P                          (10)
    (7) to (9)                                   for the R appended rows, O(T) work                   (11)

    dW_q = x_q^T dq,   db_q = sum dq,   dx_q += dq W_q^T;   k, v alike      from (1)            (12)

An input that has no kernel was handed to every head: its gradient is the sum over heads. Queries, keys and
values are computed again from the inputs, unless `save` kept them.

References:
  Vaswani et al., Attention is all you need, 2017, arXiv:1706.03762, section 3.2.2: (1) to (4).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core.backend import Implementation
from jax_attn_bwd._core.numerics import accumulator_dtype, reduce_to, to_rank
from jax_attn_bwd._core.sharding import match_type
from jax_attn_bwd.ops.dot_product import layout
from jax_attn_bwd.ops.dot_product import spec as dot_product
from jax_attn_bwd.ops.multi_head import appended, dropping, whole
from jax_attn_bwd.ops.multi_head.projections import (
    attention_operands,
    matmul,
    matmul_over_rows,
    project,
    without_poison,
)
from jax_attn_bwd.ops.multi_head.spec import Operands, Options, Residuals, Wanted

_INPUTS = ("query", "key", "value")


def backward(
    attention: Implementation, options: Options, residuals: Residuals, dout: Any, dweights: Any
) -> dict[str, jax.Array]:
    """Gradients of the operands in `residuals.wanted`, by name; a cotangent that is None is zero."""
    operands, saved, wanted = residuals.operands, residuals.residual, residuals.wanted.names
    clean, live = without_poison(options, operands)
    through = _attention_wanted(operands, wanted)
    if not (through or wanted & {"bias_k", "bias_v"}):
        grads = {}
        if dout is not None:
            grads, _ = _undo_output_projection(options, False, residuals, live, dout)
        return _undo_projections(options, residuals, clean, grads, {})
    heads = project(options, clean) if saved.heads is None else saved.heads
    inner = attention_operands(clean, heads)
    result = dot_product.Result(saved.out, saved.lse, saved.lse_low)

    grads, da, parts = _undo_output(
        options, Wanted(through), residuals, inner, live, dout, dweights
    )
    if through and not _on_planes(options, dweights):
        rest = dot_product.Residuals(inner, result, Wanted(through))
        found = attention.backward(options.attention, rest, da, None)._asdict()
        parts = _sum(parts, {name: x for name, x in found.items() if x is not None})
    return _undo_projections(options, residuals, clean, grads, parts)


def _on_planes(options: Options, dweights: Any) -> bool:
    return dweights is not None or options.save == "probs"


def _attention_wanted(operands: Operands, wanted: frozenset[str]) -> frozenset[str]:
    """The operands of dense attention whose gradients those in `wanted` need."""
    found = set(wanted & {"bias", "sink"})
    for name, source in zip(_INPUTS, _sources(operands), strict=True):
        if wanted & {source, f"{name}_kernel", f"{name}_bias"}:
            found.add(name)
    return frozenset(found)


def _sources(operands: Operands) -> tuple[str, str, str]:
    """The arguments that queries, keys and values are projected from."""
    key = "query" if operands.key is None else "key"
    return "query", key, key if operands.value is None else "value"


def _sum(parts: Mapping[str, jax.Array], more: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    total = dict(parts)
    for name, x in more.items():
        total[name] = total[name] + x.astype(total[name].dtype) if name in total else x
    return total


@partial(jax.jit, static_argnums=(0,))
def _undo_output(options, through, residuals, inner, live, dout, dweights):
    """(5) to (8), (10), (11): (gradients, da, parts of the gradients of dense attention's operands)."""
    saved = residuals.residual
    grads: dict[str, jax.Array] = {}
    da = jnp.zeros_like(saved.out)
    if dout is not None:
        grads, da = _undo_output_projection(options, True, residuals, live, dout)
    rows = appended.rows(options, residuals.operands, inner)
    planes = _on_planes(options, dweights)
    if rows is None and not planes:
        return grads, da, {}

    result = dot_product.Result(saved.out, saved.lse, saved.lse_low)
    groups = inner.query.shape[-2] // inner.key.shape[-2]
    dtype = accumulator_dtype(da.dtype)
    dz, a = (layout.split_heads(x, groups).astype(dtype) for x in (da, saved.out))
    given = _Parts(0, 0)
    if dweights is not None:
        given = _cotangents_of_weights(options, inner, dweights.astype(dtype))
    p: dict[str, jax.Array] = {}
    dp: dict[str, jax.Array] = {}
    if planes:
        known = saved.probs
        known = whole.probabilities(options, inner, result) if known is None else known
        p["keys"] = known.astype(dtype)
        dp["keys"] = whole.through_values(options, inner, dz) + given.keys  # (7)
    if rows is not None:
        p["rows"] = appended.probabilities(options, inner, rows, result)
        dp["rows"] = (
            appended.through_values(options, residuals.operands, inner, rows, dz)
            + given.rows  # (7)
        )
    if planes:
        delta = sum((p[part] * dp[part]).sum(-1, keepdims=True) for part in p)  # (8)
    else:
        delta = (dz * a).sum(-1, keepdims=True)  # (8)
    parts: dict[str, jax.Array] = {}
    if rows is not None:  # (11)
        of_rows = (through.names & {"query"}) | (residuals.wanted.names & {"bias_k", "bias_v"})
        found = appended.gradients(
            options, residuals.operands, inner, rows, of_rows, p["rows"], dz, dp["rows"], delta
        )
        if "query" in found:
            parts["query"] = found.pop("query")
        grads |= found
    if planes:  # (10)
        if "sink" in through.names:
            parts["sink"] = _gradient_of_sink(inner, result, delta[..., 0])
        found = whole.gradients(options, inner, through.names, p["keys"], dz, dp["keys"], delta)
        parts = _sum(parts, found)
    # Dense attention sums these over the shards that share them, so the parts that join them must be summed.
    shared = {n: match_type(parts[n], getattr(inner, n)) for n in ("bias", "sink") if n in parts}
    return grads, da, parts | shared


def _gradient_of_sink(
    inner: dot_product.Operands, result: dot_product.Result, delta: jax.Array
) -> jax.Array:
    """(10): the gradient of the sink `[N]`; delta `[..., K, G, T]`."""
    assert inner.sink is not None
    delta, low = layout.merge_rows(delta), 0 if result.lse_low is None else result.lse_low
    lse = jnp.where(result.lse == -jnp.inf, jnp.inf, result.lse)  # nothing seen, and a sink of -inf
    p = jnp.exp((to_rank(inner.sink.astype(delta.dtype), delta.ndim) - lse) - low)
    return reduce_to(-(p * delta), inner.sink.shape)


class _Parts(NamedTuple):
    """Something of the S keys, and of the rows appended after them."""

    keys: Any  # [..., K, G, T, S]
    rows: Any  # [..., K, G, T, R]


@partial(jax.jit, static_argnums=(0, 1))
def _undo_output_projection(options, through, residuals, live, dout):
    """(5), (6): ({name: gradient}, da); da is only needed `through` the attention."""
    operands, wanted, a = residuals.operands, residuals.wanted.names, residuals.residual.out
    dtype = accumulator_dtype(a.dtype)
    grads = {}
    if options.add_residual and "query" in wanted:
        grads["query"] = dout.astype(dtype)  # (5)
    factors = dropping.of_output(options, operands, dout.astype(dtype))
    dy = dout if factors is None else (dout.astype(dtype) * factors).astype(dout.dtype)
    if "out_bias" in wanted:
        grads["out_bias"] = reduce_to(dy.astype(dtype), dy.shape[-1:])  # (6)
    if live is not None:  # where a = 0 because nothing is seen, dy may be anything
        dy = jnp.where(to_rank(live, dy.ndim - 1)[..., None], dy, 0)
    if operands.out_kernel is None:
        return grads, dy.reshape(a.shape)
    if "out_kernel" in wanted:
        grads["out_kernel"] = matmul_over_rows("tnh", "to", "nho", a, dy)  # (6)
    da = matmul("...to,nho->...tnh", dy, operands.out_kernel).astype(a.dtype) if through else None
    return grads, da  # (6)


def _cotangents_of_weights(options, inner, dweights):
    """That of the returned weights, `[..., N, T, S']` or averaged `[..., T, S']`, by keys and rows."""
    *batch, T, N, _ = inner.query.shape
    S, K, _ = inner.key.shape[-3:]
    if options.average_weights:
        dweights = dweights[..., None, None, :, :] / N
        dweights = jnp.broadcast_to(dweights, (*batch, K, N // K, *dweights.shape[-2:]))
    else:
        dweights = dweights.reshape(*batch, K, N // K, *dweights.shape[-2:])
    return _Parts(whole.where_seen(options, inner, dweights[..., :S]), dweights[..., S:])


@partial(jax.jit, static_argnums=(0,))
def _undo_projections(options, residuals, clean, grads, parts):
    """(12), and every gradient in the type of its argument."""
    operands, wanted = residuals.operands, residuals.wanted.names
    grads = dict(grads)
    for name, source, x in zip(_INPUTS, _sources(operands), clean.inputs, strict=True):
        if name not in parts:
            continue
        dy, kernel = parts[name].astype(x.dtype), getattr(operands, f"{name}_kernel")
        dtype = accumulator_dtype(x.dtype)
        if f"{name}_bias" in wanted:
            grads[f"{name}_bias"] = reduce_to(dy.astype(dtype), dy.shape[-2:])
        if f"{name}_kernel" in wanted:
            grads[f"{name}_kernel"] = matmul_over_rows("te", "tnh", "enh", x, dy)
        if source in wanted:
            lone = kernel is None  # then x itself was every head
            dx = dy.astype(dtype).sum(-2) if lone else matmul("...tnh,enh->...te", dy, kernel)
            grads = _sum(grads, {source: dx})
    grads |= {name: parts[name] for name in ("bias", "sink") if name in parts}
    return {
        name: match_type(_like(grads.get(name), getattr(operands, name)), getattr(operands, name))
        for name in wanted
    }


def _like(grad: jax.Array | None, primal: jax.Array) -> jax.Array:
    """0 where no cotangent leads to; rows that were handed to several heads get the sum of theirs."""
    if grad is None:
        return jnp.zeros_like(primal)
    return grad if grad.shape == primal.shape else reduce_to(grad, primal.shape)
