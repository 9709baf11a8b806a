"""Backward of linear attention: derivation, then the portable code.

The letters and equations (1) to (6) are those of `decays.py`, `matrix.py` and `forward.py`. From dO and the
cotangent dS1 of the state behind a chunk, the stage `states`: one chunk after the other, the last first:

    dU = P^T dO + K~ dS1                                             from (6)           (7)
    dR = M^T dU,   dS0 = Q^^T dO + exp(c_C) dS1 - K^^T (b dR)        from (5), (6)      (8)

with R = b (V - K^ S0), so U = M R; without a delta rule dS0 has no third term. All chunks side by side:

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

from jax_attn_bwd._core.numerics import accumulator_dtype, reduce_to, to_rank, total
from jax_attn_bwd._core.sharding import match_type, vary_over, varying
from jax_attn_bwd.ops.linear_attention import layout
from jax_attn_bwd.ops.linear_attention.decays import EARLIER, LATER, SharedDecays, across_token
from jax_attn_bwd.ops.linear_attention.forward import (
    Inside,
    decayed,
    in_order,
    inside,
    merged_heads,
    split_heads,
    states,
    zero_state,
)
from jax_attn_bwd.ops.linear_attention.layout import Part, part, unit_gradient
from jax_attn_bwd.ops.linear_attention.matrix import dot_of, row_sums, strictly_lower, transposed
from jax_attn_bwd.ops.linear_attention.plan import Plan
from jax_attn_bwd.ops.linear_attention.spec import Residuals


@partial(jax.jit, static_argnums=0)
def backward(
    task: tuple[Plan, frozenset[str]], residuals: Residuals, dout: jax.Array | None, dfinal: jax.Array | None
) -> dict[str, jax.Array]:
    """Returns the gradients of the operands named in `task`; a cotangent that is None is zero."""
    (plan, wanted), operands = task, residuals.operands
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
        within = inside(plan, own)
        _, before, u = states(plan, own, within, state)
        dstate, back = _states(plan, own, within, dout, dstate)
        found = _of_tokens(plan, wanted, own, within, Through(before, u, dout, *back))
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
    """What (5) to (8) give of each chunk."""

    before: jax.Array  # S0, [H, Hv]
    u: jax.Array  # [C, Hv]
    dout: jax.Array  # [C, Hv]
    dstate: jax.Array  # dS1, [H, Hv]
    du: jax.Array  # [C, Hv]
    dr: Any  # [C, Hv], of the delta rule, else None


def _states(
    plan: Plan, own: Part, within: Inside, dout: jax.Array, dstate: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, Any]]:
    """Computes (7) and (8) for the chunks of a group: dS0 of the first, and (dS1, dU, dR or None) of each."""
    dot = dot_of(plan)
    du, of_out = dot("ij,iv", within.reads, dout), within.from_start.transposed_times(dot, dout)

    def corrected(dstate, given):
        du, of_out, beta, within = given
        du = du + within.at_end.times(dot, dstate)
        dr = dot("ij,iv", within.solved, du)
        before = of_out + within.whole * dstate - within.at_start.transposed_times(dot, beta * dr)
        return before, (dstate, du, dr)

    if plan.options.is_delta:
        return in_order(corrected, dstate, (du, of_out, own.beta, within), reverse=True)
    # no cotangent of a state depends on du
    before, dstates = in_order(decayed, dstate, (within.whole, of_out), reverse=True)
    return before, (dstates, du + within.at_end.times(dot, dstates), None)


class _OfRows(NamedTuple):
    """What queries and keys get, `[m, ..., K, G, C, H]`; None = not asked.

    Where channels share their decay, all that keys get of kkt is in `reader`: one product.
    """

    query: Any  # (12)
    reader: Any  # (13); None without a delta rule, too
    read: Any  # (14), without dP_ii


def _of_tokens(
    plan: Plan, wanted: Collection[str], own: Part, within: Inside, through: Through
) -> dict[str, jax.Array]:
    """Computes (9) to (18): the gradients in `wanted` of what is told of the tokens."""
    (query, key, value, beta, decays, query_factor, key_factor), dot = own, dot_of(plan)
    normed, query = query, plan.options.scale * query

    # solve and kkt: (9), (11)
    found, dkkt = {"value": through.du}, None
    if plan.options.is_delta:
        found["value"] = beta * through.dr
        da = -jnp.where(strictly_lower(key), dot("iv,jv", through.dr, through.u), 0)
        dkkt = beta * da
        if "beta" in wanted:
            rest = value - within.at_start.times(dot, through.before)
            found["beta"] = row_sums(through.dr * rest) + row_sums(da * within.kkt)

    # inter and intra: (9), (10), (12) to (14); what a token reads of its own would only cancel in (15)
    dreads = dot("iv,jv", through.dout, through.u)
    own_share = None if isinstance(decays.pairs, SharedDecays) else row_sums(through.dout * through.u)
    rows = frozenset(("query", "key") if "log_decay" in wanted else wanted)
    of_states = _inter(plan, rows, own, through)
    of_all = _intra(plan, own, query, dreads, dkkt, of_states)

    # (15) to (17), or (18)
    if "log_decay" in wanted:
        passed = decays.whole * transposed(row_sums(through.before * through.dstate))  # [C = 1, H]
        if isinstance(decays.pairs, SharedDecays):
            of_pairs = dreads * within.reads
            of_pairs = of_pairs if dkkt is None else of_pairs + dkkt * within.kkt
            dg = _of_shared_decays(query, key, of_states, of_pairs, passed)
        else:
            dg = _of_decays(query, key, of_all, key * of_states.read, passed)
        found["log_decay"] = jnp.where(decays.restarts, 0, dg)

    # all value heads of a key head, then through the scale and the norm
    if "query" in wanted:
        dq = reduce_to(total(of_all.query, None if own_share is None else own_share * key), query.shape)
        found["query"] = plan.options.scale * unit_gradient(normed, query_factor, dq)
    if "key" in wanted:
        dk = total(of_all.read, of_all.reader)
        dk = reduce_to(total(dk, None if own_share is None else own_share * query), key.shape)
        found["key"] = unit_gradient(key, key_factor, dk)
    return {name: x for name, x in found.items() if name in wanted}


def _inter(plan: Plan, rows: frozenset[str], own: Part, through: Through) -> _OfRows:
    """Computes (10) with its factors of (12) to (14): what `rows` get through the states `[..., H, Hv]`."""
    dot, decays, dq, reader, read = dot_of(plan), own.decays, None, None, None
    if "query" in rows:
        dq = decays.from_start * dot("iv,hv", through.dout, through.before)
    if "key" in rows:
        read = decays.to_end * dot("jv,hv", through.u, through.dstate)
        if plan.options.is_delta:
            reader = -decays.from_start * dot("iv,hv", own.beta * through.dr, through.before)
    return _OfRows(dq, reader, read)


def _intra(
    plan: Plan, own: Part, query: jax.Array, dreads: jax.Array, dkkt: Any, of_states: _OfRows
) -> _OfRows:
    """Adds the sums of (12) to (14) over the pairs of a chunk, whose cotangents are planes `[..., C, C]`."""
    (dq, reader, read), pairs, dot = of_states, own.decays.pairs, dot_of(plan)
    if dq is not None:
        dq = dq + pairs.sums(dot, EARLIER, dreads, own.key)
    if read is not None:
        read = read + pairs.sums(dot, LATER, dreads, query)
        if dkkt is not None and isinstance(pairs, SharedDecays):
            reader = reader + pairs.both(dot, dkkt, own.key)
        elif dkkt is not None:  # (15) takes them apart
            read = read + pairs.sums(dot, LATER, dkkt, own.key)
            reader = reader + pairs.sums(dot, EARLIER, dkkt, own.key)
    return _OfRows(dq, reader, read)


def _of_decays(
    query: jax.Array, key: jax.Array, of_all: _OfRows, end: jax.Array, passed: jax.Array
) -> jax.Array:
    """Computes (15) to (17), `[..., C, H]`, from `end`, k dk~, and the state's own share, `[..., 1, H]`."""
    dc = query * of_all.query - key * of_all.read
    dc = dc if of_all.reader is None else dc + key * of_all.reader
    is_last = jnp.arange(dc.shape[-2])[:, None] == dc.shape[-2] - 1
    dc = dc + jnp.where(to_rank(is_last, dc.ndim), end.sum(-2, keepdims=True) + passed, 0)
    return lax.cumsum(dc, key.ndim - 2, reverse=True)


def _of_shared_decays(
    query: jax.Array, key: jax.Array, of_states: _OfRows, of_pairs: jax.Array, passed: jax.Array
) -> jax.Array:
    """Computes (18), `[..., C, 1]`, from the products with P and A of their cotangents, `[..., C, C]`."""
    axis, start = key.ndim - 2, query * of_states.query
    start = start if of_states.reader is None else start + key * of_states.reader
    start, end, passed = map(row_sums, (start, key * of_states.read, passed))
    before = jnp.concatenate([jnp.zeros_like(end[..., :1, :]), end[..., :-1, :]], axis)
    dg = lax.cumsum(start, axis, reverse=True) + lax.cumsum(before, axis)
    return dg + across_token(of_pairs) + passed
