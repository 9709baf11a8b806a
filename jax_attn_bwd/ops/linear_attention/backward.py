"""Backward of linear attention: derivation, then the portable code.

The letters and equations (1) to (6) are those of `decays.py`, `matrix.py` and `forward.py`. From dO and the
cotangent dS1 of the state behind a chunk, for one chunk after the other, the last first:

    dU = P^T dO + K~ dS1                                             from (6)           (7)
    dR = M^T dU,   dS0 = Q^^T dO + exp(c_C) dS1 - K^^T (b dR)        from (5), (6)      (8)

with R = b (V - K^ S0), so U = M R; without a delta rule dS0 has no third term. All else side by side:

    dP_ij = <dO_i, U_j>,   dA_ij = - <dR_i, U_j>                     from (5), (6)      (9)
    dQ^ = dO S0^T,   dK^ = - (b dR) S0^T,   dK~ = U dS1^T                              (10)
    dV = b dR,   db_i = <dR_i, (V - K^ S0)_i> + sum_j dA_ij <k_i, k_j>_G               (11)
    dq_i = exp(c_i) dq^_i + sum_{j<=i} dP_ij exp(c_i - c_j) k_j                        (12)
    dk_i = exp(c_i) dk^_i + sum_{j<i} b_i dA_ij exp(c_i - c_j) k_j                     (13)
         + exp(c_C - c_i) dk~_i + sum_{j>i} exp(c_j - c_i) (b_j dA_ji k_j + dP_ji q_j) + dP_ii q_i   (14)

q_i, and k_i where (13) has it, come with the factor exp(c_i), k_i where (14) has it with exp(-c_i). So of
each channel, or summed over those that share a decay,

    dc_i = q_i dq_i + k_i (13) - k_i (14),   without dP_ii                             (15)
    dc_C += sum_j k~_j dk~_j + exp(c_C) sum_v S0 dS1                                   (16)
    dg_t = sum of dc_i over i >= t of the chunk, 0 where a part begins                 (17)

(15) takes differences of large sums. Where channels share their decay, each sum is taken by itself:

    dg_t = sum over j < t <= i of (dP_ij P_ij + dA_ij A_ij) + exp(c_C) sum S0 dS1
         + sum of <q^_i, dq^_i> + <k^_i, dk^_i> over i >= t + sum of <k~_j, dk~_j> over j < t          (18)

With l2_norm_epsilon, q = s r x of the given x, r = (sum x^2 + epsilon)^-1/2: dx = s r (dq - rx <rx, dq>), and
so for k. U and S0 are computed again from the state before the group, by (5) and (6).

References:
  As in `forward.py`; (7) to (18) follow from (1) to (6).
"""

from collections.abc import Collection
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core.numerics import accumulator_dtype, reduce_to, to_rank
from jax_attn_bwd._core.sharding import match_type, vary_over, varying
from jax_attn_bwd.ops.linear_attention import layout
from jax_attn_bwd.ops.linear_attention.chunk import Part, part, unit_gradient
from jax_attn_bwd.ops.linear_attention.decays import SharedDecays, across_token
from jax_attn_bwd.ops.linear_attention.forward import (
    Inside,
    decayed,
    in_order,
    inside,
    merged_heads,
    split_heads,
    through_chunks,
    zero_state,
)
from jax_attn_bwd.ops.linear_attention.matrix import dot_of, row_sums, strictly_lower, transposed
from jax_attn_bwd.ops.linear_attention.plan import Plan
from jax_attn_bwd.ops.linear_attention.spec import Options, Residuals


@partial(jax.jit, static_argnums=(0, 2))
def backward(
    plan: Plan, residuals: Residuals, wanted: frozenset[str], dout: jax.Array | None, dfinal: jax.Array | None
) -> dict[str, jax.Array]:
    """Returns the gradients of the operands in `wanted`, by name; a cotangent that is None is zero."""
    options, operands = plan.options, residuals.operands
    dtype, groups = accumulator_dtype(operands.value.dtype), operands.groups
    tokens = layout.tokens(plan, operands)

    # the cotangents; that of a token beyond the lengths is not read
    reads = operands, residuals.states, dout, dfinal
    if dout is None:
        dout = jnp.zeros_like(operands.value)
    seen = layout.seen_tokens(operands)
    dout = layout.split(plan, dout if seen is None else jnp.where(seen, dout, 0))
    if dfinal is None:
        dstate = zero_state(operands, reads)
    else:
        dstate = split_heads(vary_over(dfinal.astype(dtype), varying(reads)), groups)

    def group(dstate, given):
        tokens, state, dout = given
        tokens, dout = layout.of_group(plan, tokens, groups), layout.chunks(plan, dout, groups).astype(dtype)
        own = part(plan, tokens, dtype)
        within = inside(options, own)
        _, states, u = through_chunks(options, own, within, state)
        dstate, through = _through_states(options, own, within, dout, dstate)
        found = _of_tokens(options, wanted, own, within, states, u, dout, through)
        shapes = {name: getattr(tokens, name).shape for name in found}
        return dstate, {name: layout.rows(reduce_to(x, shapes[name])) for name, x in found.items()}

    group = jax.checkpoint(group, prevent_cse=False)
    dstate, found = lax.scan(group, dstate, (tokens, residuals.states, dout), reverse=True)

    # in the shapes and types of the operands
    grads = {name: layout.like_operand(operands, name, x) for name, x in found.items()}
    if "initial_state" in wanted:
        grads["initial_state"] = merged_heads(dstate)
    return {name: match_type(x, getattr(operands, name)) for name, x in grads.items()}


class Through(NamedTuple):
    """What (7) and (8) give of each chunk."""

    dstate: jax.Array  # dS1
    du: jax.Array
    dr: Any  # of the delta rule, else None


def _through_states(
    options: Options, own: Part, within: Inside, dout: jax.Array, dstate: jax.Array
) -> tuple[jax.Array, Through]:
    """Computes (7) and (8) for the chunks of a group; returns dS0 of the first, too."""
    dot = dot_of(options)
    du, of_out = dot("ij,iv", within.reads, dout), within.from_start.transposed_times(dot, dout)

    def corrected(dstate, given):
        du, of_out, beta, within = given
        du = du + within.at_end.times(dot, dstate)
        dr = dot("ij,iv", within.inverse, du)
        before = of_out + within.whole * dstate - within.at_start.transposed_times(dot, beta * dr)
        return before, Through(dstate, du, dr)

    if options.is_delta:
        return in_order(corrected, dstate, (du, of_out, own.beta, within), reverse=True)
    # no cotangent of a state depends on du
    before, dstates = in_order(decayed, dstate, (within.whole, of_out), reverse=True)
    return before, Through(dstates, du + within.at_end.times(dot, dstates), None)


def _of_tokens(
    options: Options,
    wanted: Collection[str],
    own: Part,
    within: Inside,
    states: jax.Array,
    u: jax.Array,
    dout: jax.Array,
    through: Through,
) -> dict[str, jax.Array]:
    """Computes (9) to (18): the gradients in `wanted` of what is told of the tokens."""
    (query, key, value, beta, decays, query_factor, key_factor), dot = own, dot_of(options)
    normed, query = query, options.scale * query
    dstate, du, dr = through
    needs_decay, pairs = "log_decay" in wanted, decays.pairs
    shared = pairs if isinstance(pairs, SharedDecays) else None
    found = {"value": du}

    # (9); what a token reads of its own would only cancel in (15)
    dreads = dot("iv,jv", dout, u)
    own_share = row_sums(dout * u) if shared is None else None
    if options.is_delta:
        db_dr = beta * dr
        doverlaps = -jnp.where(strictly_lower(key), dot("iv,jv", dr, u), 0)
        found["value"] = db_dr
        if "beta" in wanted:  # (11)
            rest = value - within.at_start.times(dot, states)
            found["beta"] = row_sums(dr * rest) + row_sums(doverlaps * within.overlaps)
        doverlaps = beta * doverlaps

    # (12)
    dq: Any = None
    dk: Any = None
    drows: Any = None
    if "query" in wanted or needs_decay:
        dq_start = decays.from_start * dot("iv,hv", dout, states)
        dq = dq_start + pairs.rows(dot, dreads, key)
    # (13), (14)
    if "key" in wanted or needs_decay:
        dat_end = decays.to_end * dot("jv,hv", u, dstate)
        dcolumns = dat_end + pairs.columns(dot, dreads, query)
        if options.is_delta:
            dk_start = decays.from_start * dot("iv,hv", db_dr, states)
            if shared is not None:
                drows = shared.both(dot, doverlaps, key) - dk_start
            else:  # (15) takes them apart
                dcolumns = dcolumns + pairs.columns(dot, doverlaps, key)
                drows = pairs.rows(dot, doverlaps, key) - dk_start
        dk = dcolumns if drows is None else dcolumns + drows
    # (15) to (17), or (18)
    if needs_decay:
        axis, end = key.ndim - 2, key * dat_end
        passed = decays.whole * transposed(row_sums(states * dstate))
        if shared is not None:
            start, of_pairs = query * dq_start, dreads * within.reads
            if options.is_delta:
                start, of_pairs = start - key * dk_start, of_pairs + doverlaps * within.overlaps
            start, end, passed = map(row_sums, (start, end, passed))
            before = jnp.concatenate([jnp.zeros_like(end[..., :1, :]), end[..., :-1, :]], axis)
            dg = lax.cumsum(start, axis, reverse=True) + lax.cumsum(before, axis)
            dg = dg + across_token(of_pairs) + passed
        else:
            dc = query * dq - key * dcolumns
            dc = dc if drows is None else dc + key * drows
            is_last = jnp.arange(dc.shape[-2])[:, None] == dc.shape[-2] - 1
            dc = dc + jnp.where(to_rank(is_last, dc.ndim), end.sum(-2, keepdims=True) + passed, 0)
            dg = lax.cumsum(dc, axis, reverse=True)
        found["log_decay"] = jnp.where(decays.restarts, 0, dg)

    # all value heads of a key head, then through the scale and the norm
    if "query" in wanted:
        dq = reduce_to(dq if own_share is None else dq + own_share * key, query.shape)
        found["query"] = options.scale * unit_gradient(normed, query_factor, dq)
    if "key" in wanted:
        dk = reduce_to(dk if own_share is None else dk + own_share * query, key.shape)
        found["key"] = unit_gradient(key, key_factor, dk)
    return {name: x for name, x in found.items() if name in wanted}
