"""Tangent rule of the multi-head attention layer: derivation, then code.

The letters and equations (1) to (4) are those of `backward.py`. With tangents dx, dW, db of inputs, kernels
and biases, and those of the sink and of what masks and scores read,

    dq = R(dx_q W_q + x_q dW_q + db_q),   k alike,   v alike without R                     from (1)      (14)

R is linear. Dense attention's tangent over the S keys, whose probabilities are those of all S' keys, gives

    total_t = sum_s z_ts P_ts (dlogits_ts v_s + dv_s),   mu_t = sum_s P_ts dlogits_ts      from (2), (3) (15)

to which each of the R appended rows, with x_tr = scale <q_t, k_r> under the soft cap, adds its share:

    dx_tr = scale (<dq_t, k_r> + <q_t, dk_r>) (1 - tanh^2)                                 from (2)      (16)
    total_t += sum_r z_tr P_tr (dx_tr v_r + dv_r),   mu_t += sum_r P_tr dx_tr              from (3)      (17)

and as the tangent of the logarithm of the softmax's sum is mu,

    da_t  = total_t - mu_t a_t                                                             from (3)      (18)
    dP_ts = P_ts (dlogits_ts - mu_t)                                                       from (2)      (19)
    dout  = z_o * (da W_o + a dW_o + db_o) + dx_q                                          from (4)      (20)

Only returned weights need (19), on planes as they are. A query that sees nothing has P = 0, a = 0 and da = 0.
What no tangent reaches is not computed.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core.sharding import reshard_like
from jax_attn_bwd.ops.dot_product import blockwise
from jax_attn_bwd.ops.dot_product import spec as dot_product
from jax_attn_bwd.ops.multi_head import appended
from jax_attn_bwd.ops.multi_head.forward import weights_of
from jax_attn_bwd.ops.multi_head.plan import Plan
from jax_attn_bwd.ops.multi_head.projections import (
    attention_operands,
    output_tangent,
    project,
    project_tangents,
    without_poison,
)
from jax_attn_bwd.ops.multi_head.spec import MultiHeadAttentionResidual, Operands


@partial(jax.jit, static_argnums=(0,))
def tangent(
    plan: Plan, operands: Operands, saved: MultiHeadAttentionResidual, along: Operands
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (dout, dweights), of the types of out and weights; None in `along` is zero."""
    options, result = plan.options, saved.attention()

    # (14): the operands of dense attention, and their tangents
    clean, _ = without_poison(options, operands)
    heads = project(options, clean) if saved.heads is None else saved.heads
    inner = attention_operands(clean, heads)
    query, key, value = (getattr(along, source) for source in operands.sources)
    of_heads = project_tangents(options, clean, heads, (query, key, value), along)
    moved = _attention_tangents(heads.query, of_heads, along)
    keys_move = bool(jax.tree.leaves(moved))

    # (15): over the S keys, total [..., T, N, Hv] and mu [..., T, N]
    total, mu = jnp.zeros_like(result.widest_out()), jnp.zeros_like(result.lse)
    if keys_move:
        total, mu = blockwise.tangent_sums(plan.attention, inner, result, moved)

    # (16), (17): over the appended rows
    rows, dx = appended.rows(options, operands, inner), None
    rows_move = rows is not None and not (moved.query is along.bias_k is along.bias_v is None)
    if rows_move:
        assert rows is not None  # they move
        dx, more, more_mu = appended.tangent_sums(options, inner, rows, result, moved.query, along)
        total, mu = total + more, mu + more_mu

    # (18), (20)
    da = blockwise.through_softmax(result, total, mu) if keys_move or rows_move else None
    da = None if da is None else da.astype(result.out.dtype)
    dout = output_tangent(options, operands, result.out, along, da)
    if not options.return_weights:
        return dout, None
    return dout, _weights(options, inner, moved, rows, result, mu, dx).astype(operands.query.dtype)


def _attention_tangents(q: jax.Array, of_heads: list[Any], along: Operands) -> dot_product.Operands:
    """Returns the tangents of dense attention's operands, sharded as these are; its counters have none."""
    bias, sink = along.bias, along.sink
    if bias is not None:
        bias = reshard_like(bias, q, (*range(q.ndim - 3), -2, -3, None))
    if sink is not None:
        sink = reshard_like(sink, q, (-2,))
    query, key, value = of_heads
    return dot_product.Operands(query, key, value, bias, sink, along.mask)


def _weights(options, inner, moved, rows, result, mu, dx) -> jax.Array:
    """Returns the tangent of the weights by (19), with those of the appended rows."""
    plane = blockwise.plane(options.attention, inner)
    mu = blockwise.split_rows(mu, inner.sizes.G)[..., None]
    dp = blockwise.probabilities(plane, result) * (blockwise.tangent_of_logits(plane, moved) - mu)
    if rows is None:
        return weights_of(options, dp, None)
    p = appended.probabilities(options, rows, result)
    return weights_of(options, dp, p * (-mu if dx is None else dx - mu))
