"""Backward of the multi-head attention layer: derivation, then the three stages that undo the forward.

The forward, z_o and z the factors of the two dropouts, P the weights over S' keys (with the appended rows):

    q = R(x_q W_q + b_q),   k = [R(x_k W_k + b_k); bias_k; 0],   v = [x_v W_v + b_v; bias_v; 0]  (1)
    P = softmax(soft_cap(scale q k^T) + bias, where visible; with the sink)                     (2)
    a = (z * P) v                                                                               (3)
    out = z_o * (a W_o + b_o) + x_q                                                             (4)

Given cotangents dout of (4) and dP of (2):

    dy = z_o * dout,   dx_q = dout from the last term of (4)                                    (5)
    db_o = sum dy,   dW_o = a^T dy,   da = dy W_o^T                         from (4)            (6)
    dp_ts = z_ts <da_t, v_s> + dP_ts                                        from (3), (2)       (7)
    delta_t = sum_s P_ts dp_ts = <da_t, a_t> + sum_s P_ts dP_ts                                 (8)
    dlogits = P (dp - delta)                                                from (2)            (9)
    and that of scale q k^T is dlogits (1 - tanh^2) under a soft cap

Dense attention's backward does (7) to (9) and the products with q, k, v tile by tile: it knows P from lse
over all S' keys. Here are done

    (7) to (9), dsink = -sum_t P_sink,t delta_t  on whole planes, where these exist: the weights have a
                                                 cotangent, or `save` kept P                          (10)
    (7) to (9)                                   for the R appended rows, O(T) work                   (11)

    dq becomes R^-1 dq, dk R^-1 dk: R turns pairs by an angle, R^-1 by its negative            (12)
    dW_q = x_q^T dq,   db_q = sum dq,   dx_q += dq W_q^T;   k, v alike      from (1)            (13)

An input that has no kernel was handed to every head: its gradient is the sum over heads. Queries, keys and
values are computed again from the inputs, unless `save` kept them.

References:
  Vaswani et al., Attention is all you need, 2017, arXiv:1706.03762, section 3.2.2: (1) to (4).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import trees
from jax_attn_bwd._core.numerics import accumulator_dtype, reduce_to, to_rank
from jax_attn_bwd._core.products import accumulated, sum_of_products
from jax_attn_bwd._core.rotary import rotate
from jax_attn_bwd._core.sharding import match_types, reshard_like
from jax_attn_bwd.ops.dot_product import blockwise
from jax_attn_bwd.ops.dot_product.spec import DotProductAttentionGrads as Shares
from jax_attn_bwd.ops.multi_head import appended
from jax_attn_bwd.ops.multi_head.plan import Plan
from jax_attn_bwd.ops.multi_head.projections import (
    attention_operands,
    matmul_over_rows,
    output_factors,
    project,
    without_poison,
)
from jax_attn_bwd.ops.multi_head.spec import INPUTS, Operands, Options, Residuals, Wanted


class _Columns(NamedTuple):
    """The columns of the S keys, and those of the rows appended after them; None = not formed, or none."""

    keys: Any  # [..., K, G, T, S]
    rows: Any  # [..., K, G, T, R]


def backward(plan: Plan, residuals: Residuals, dout: Any, dweights: Any) -> dict[str, jax.Array]:
    """Returns the gradients of the operands in `residuals.wanted`, by name; a cotangent of None is zero."""
    options = plan.options
    operands, saved, wanted = residuals.operands, residuals.residual, residuals.wanted.names
    clean, live = without_poison(options, operands)

    # nothing in front of the output projection is asked for
    through = _attention_wanted(operands, wanted)
    if not (through or wanted & {"bias_k", "bias_v"}):
        grads = {}
        if dout is not None:
            grads, _ = _undo_output_projection(options, False, residuals, live, dout)
        return _undo_projections(options, residuals, clean, grads, Shares())

    # back to da, and to what does not go tile by tile: the appended rows, and whole planes
    heads = project(options, clean) if saved.heads is None else saved.heads
    inner = attention_operands(clean, heads)
    grads, da, shares = _undo_output(options, Wanted(through), residuals, inner, live, dout, dweights)

    # dense attention's backward has the rest
    rest = through if shares.sink is None else through - {"sink"}
    if rest and not _on_planes(options, dweights):
        alone = options.appended_rows(operands) == 0
        attended = blockwise.backward(plan.attention, inner, saved.attention(), rest, da, alone=alone)
        shares = Shares(*map(_add, shares, attended))
    return _undo_projections(options, residuals, clean, grads, shares)


def _on_planes(options: Options, dweights: Any) -> bool:
    """Tells whether P is there as a whole plane, or its cotangent is."""
    return dweights is not None or options.save == "probs"


def _attention_wanted(operands: Operands, wanted: frozenset[str]) -> frozenset[str]:
    """Returns the operands of dense attention whose gradients those in `wanted` need."""
    found = set(wanted & {"bias", "sink", "mod_args"})
    for name, source in zip(INPUTS, operands.sources, strict=True):
        if wanted & {source, f"{name}_kernel", f"{name}_bias"}:
            found.add(name)
    return frozenset(found)


def _add(x: Any, y: Any) -> Any:
    """Adds them in the dtype of `x`; None is 0."""
    return y if x is None else x if y is None else x + y.astype(x.dtype)


@partial(jax.jit, static_argnums=(0,))
def _undo_output(options, through, residuals, inner, live, dout, dweights):
    """Computes (5) to (8), (10), (11).

    Returns (the layer's gradients that are whole here, by name; da; shares of the gradients of dense
    attention's operands, to which its backward over the tiles adds the rest).
    """
    # (5), (6): the output projection
    operands, result = residuals.operands, residuals.residual.attention()
    grads: dict[str, jax.Array] = {}
    da = jnp.zeros_like(result.out)
    if dout is not None:
        grads, da = _undo_output_projection(options, True, residuals, live, dout)
    rows, plane = appended.rows(options, operands, inner), None
    if _on_planes(options, dweights):
        plane = blockwise.plane(options.attention, inner)
    if rows is None and plane is None:
        return grads, da, Shares()

    # (7), (8): P and its cotangent, in columns of keys and of rows; delta [..., K, G, T, 1]
    dtype = accumulator_dtype(da.dtype)
    dz, a = (blockwise.split_heads(x, inner.sizes.G).astype(dtype) for x in (da, result.widest_out()))
    p = _probabilities(options, residuals, inner, rows, plane)
    dp = _Columns(  # without the cotangent of the weights
        None if plane is None else plane.through_values(dz),
        None if rows is None else appended.through_values(options, rows, dz),
    )
    if dweights is not None:
        more = _cotangents_of_weights(options, inner, plane, rows, dweights.astype(dtype))
        dp = _Columns(*map(_add, dp, more))
    delta = sum_of_products(dz, a, keepdims=True) if plane is None else _row_sums(p, dp)

    # (11), (10)
    shares = Shares()
    if rows is not None:
        wanted = (through.names & {"query"}) | (residuals.wanted.names & {"bias_k", "bias_v"})
        found = appended.gradients(options, rows, wanted, p.rows, dz, dp.rows, delta)
        shares = Shares(query=found.pop("query", None))
        grads |= found
    if plane is not None:
        found = blockwise.gradients(plane, through.names, p.keys, dz, dp.keys, delta)
        shares = Shares(*map(_add, shares, Shares(**found)))
    if "sink" in through.names:
        dsink = blockwise.gradient_of_sink(inner.sink, result, blockwise.merge_rows(delta[..., 0]))
        shares = shares._replace(sink=dsink)

    # dense attention sums these over the shards that share them, so what joins them must be summed
    joined = {name: x for name, x in shares._asdict().items() if x is not None and name != "query"}
    return grads, da, shares._replace(**match_types(joined, inner))


def _probabilities(options, residuals, inner, rows, plane) -> _Columns:
    """Returns P by (2), before dropout."""
    result, keys = residuals.residual.attention(), None
    if plane is not None:
        keys = residuals.residual.probs
        keys = blockwise.probabilities(plane, result) if keys is None else keys
        keys = keys.astype(accumulator_dtype(inner.query.dtype))
    return _Columns(keys, None if rows is None else appended.probabilities(options, rows, result))


def _cotangents_of_weights(options, inner, plane, rows, dweights) -> _Columns:
    """Returns dP, from that of the returned weights `[..., N, T, S']`, or averaged `[..., T, S']`."""
    batch, _, S, K, G = inner.sizes
    if options.average_weights:
        dweights = dweights[..., None, None, :, :] / (K * G)
        dweights = jnp.broadcast_to(dweights, (*batch, K, G, *dweights.shape[-2:]))
    else:
        dweights = dweights.reshape(*batch, K, G, *dweights.shape[-2:])
    keys = plane.where_seen(dweights[..., :S])
    return _Columns(keys, None if rows is None else dweights[..., S:])


def _row_sums(p: _Columns, dp: _Columns) -> jax.Array:
    """Returns sum_s P_ts dP_ts over keys and appended rows, `[..., K, G, T, 1]`."""
    total = sum_of_products(p.keys, dp.keys, keepdims=True)
    return total if p.rows is None else total + sum_of_products(p.rows, dp.rows, keepdims=True)


@partial(jax.jit, static_argnums=(0, 1))
def _undo_output_projection(options, through, residuals, live, dout):
    """Computes (5), (6): ({name: gradient}, da); da is only needed `through` the attention."""
    # dy: what is added and what is dropped after the projection
    operands, wanted, a = residuals.operands, residuals.wanted.names, residuals.residual.out
    dtype = accumulator_dtype(a.dtype)
    grads = {}
    if options.add_residual and "query" in wanted:
        grads["query"] = dout.astype(dtype)  # (5)
    drawn = options.out_dropout_rate, operands.dropout_words, operands.dropout_offset
    factors = output_factors(*drawn, dout.astype(dtype))
    dy = dout if factors is None else (dout.astype(dtype) * factors).astype(dout.dtype)

    # the projection
    if "out_bias" in wanted:
        grads["out_bias"] = reduce_to(dy.astype(dtype), dy.shape[-1:])  # (6)
    if live is not None:  # where a = 0 because nothing is seen, dy may be anything
        dy = jnp.where(to_rank(live, dy.ndim - 1)[..., None], dy, 0)
    if operands.out_kernel is None:
        return grads, dy.reshape(a.shape)
    if "out_kernel" in wanted:
        grads["out_kernel"] = matmul_over_rows("tnh", "to", "nho", a, dy, options.precision)  # (6)
    if not through:
        return grads, None
    da = accumulated("...to,nho->...tnh", dy, operands.out_kernel, options.precision)
    return grads, reshard_like(da.astype(a.dtype), a, tuple(range(a.ndim)))  # (6)


@partial(jax.jit, static_argnums=(0,))
def _undo_projections(options, residuals, clean, grads, shares):
    """Computes (12), (13), and brings every gradient to the type of its argument."""
    # back from the heads to the inputs and what they are mapped with
    operands, wanted = residuals.operands, residuals.wanted.names
    grads = dict(grads)
    for name, source, x in zip(INPUTS, operands.sources, clean.inputs, strict=True):
        dy, kernel = getattr(shares, name), getattr(operands, f"{name}_kernel")
        if dy is None:
            continue
        if options.rotary is not None and name != "value":
            dy = rotate(options.rotary, dy, operands.positions(name), back=True)  # (12)
        dy = dy.astype(x.dtype)
        dtype = accumulator_dtype(x.dtype)
        if f"{name}_bias" in wanted:
            grads[f"{name}_bias"] = reduce_to(dy.astype(dtype), dy.shape[-2:])
        if f"{name}_kernel" in wanted:
            grads[f"{name}_kernel"] = matmul_over_rows("te", "tnh", "enh", x, dy, options.precision)
        if source in wanted:
            if kernel is None:  # then x itself was every head
                dx = dy.astype(dtype).sum(-2)
            else:
                dx = accumulated("...tnh,enh->...te", dy, kernel, options.precision)
            grads[source] = _add(grads.get(source), dx)

    # in the types of the arguments
    grads |= {"bias": shares.bias, "sink": shares.sink, "mod_args": shares.mod_args}
    found = {}
    for name in sorted(wanted):
        primal, grad = trees.floats(getattr(operands, name)), grads.get(name)
        if grad is None:  # no cotangent leads there
            grad = jax.tree.map(jnp.zeros_like, primal)
        # rows that were handed to several heads get the sum of theirs
        found[name] = jax.tree.map(lambda x, like: reduce_to(x, like.shape), grad, primal)
    return match_types(found, operands)
