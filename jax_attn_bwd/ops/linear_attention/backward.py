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

The decay of a token t moves what the state before the chunk gives to tokens from t on, what tokens before t
give to the state behind it, and the pairs j < t <= i:

    dg_t = sum over j < t <= i of (dP_ij P_ij + dA_ij A_ij) + exp(c_C) sum S0 dS1
         + sum of <q^_i, dq^_i> + <k^_i, dk^_i> over i >= t + sum of <k~_j, dk~_j> over j < t          (18)

of each channel, or summed over those that share a decay; 0 where a part begins. Each sum is taken by itself,
that of the pairs from planes, or from the parts of (12) to (14) that halvings give (`decays.py`). Shorter is
q dq - k dk, (15) to (17) of the notebook: a difference of large sums, of which a strong decay leaves nothing.

Where erase keys and queries stand apart, with R = - L V - B^ S0 and U = M R of (24):

    dU = P^a^T dO + A~ dS1,   dR = M^T dU,   dS0 = Q^^T dO + exp(c_C) dS1 - B^^T dR     (26)
    dV = P^T dO + K~ dS1 - L^T dR                                                       (27)
    dP_ij = <dO_i, V_j>,   dP^a_ij = <dO_i, U_j>,   dA_ij = - <dR_i, U_j>,   dL_ij = - <dR_i, V_j>  (28)
    dQ^ = dO S0^T,   dB^ = - dR S0^T,   dK~ = V dS1^T,   dA~ = U dS1^T                  (29)

from which q, b, k and a get their sums as in (12) to (14), and the decays theirs as in (18).

By (31), (8) and (26) take one product a chunk, too, and dU and dR are all chunks' at once:

    dS0 = Q^^T dO - W^T P^T dO + exp(c_C) dS1 - E^T dS1                                 (32)

With l2_norm_epsilon, q = s r x of the given x, r = (sum x^2 + epsilon)^-1/2: dx = s r (dq - rx <rx, dq>), and
so for k. U and S0 are computed again from the state before the group, by (5) and (6).

References:
  As in `forward.py`; (7) to (18), (26) to (29) and (32) follow from (1) to (6), (24), (25) and (31).
"""

from collections.abc import Collection
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core.numerics import accumulator_dtype, reduce_to, total
from jax_attn_bwd._core.sharding import match_type, vary_over, varying
from jax_attn_bwd.ops.linear_attention import layout
from jax_attn_bwd.ops.linear_attention.decays import EARLIER, LATER, SharedDecays, across_token, beside
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
from jax_attn_bwd.ops.linear_attention.matrix import Dot, dot_of, row_sums, strictly_lower, transposed
from jax_attn_bwd.ops.linear_attention.plan import CHUNKS_OF_A_TRIP, Plan
from jax_attn_bwd.ops.linear_attention.spec import Residuals


@partial(jax.jit, static_argnums=(0, 2))
def backward(
    plan: Plan, residuals: Residuals, wanted: frozenset[str], dout: jax.Array | None, dfinal: jax.Array | None
) -> dict[str, jax.Array]:
    """Returns the gradients of the operands in `wanted`, by name; a cotangent that is None is zero."""
    operands = residuals.operands
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
        of_tokens = _of_erasing_tokens if plan.options.is_erasing else _of_tokens
        found = of_tokens(plan, wanted, own, within, Through(before, u, dout, *back))
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
    dr: Any  # [C, Hv], where something is corrected, else None


def _states(
    plan: Plan, own: Part, within: Inside, dout: jax.Array, dstate: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, Any]]:
    """Computes (7) and (8), (26), or (32), for the chunks of a group.

    Returns:
      dS0 of the first, and (dS1, dU, dR or None) of each.
    """
    dot = dot_of(plan)
    reads = within.reads if within.erase_reads is None else within.erase_reads
    du, of_out = dot("ij,iv", reads, dout), within.from_start.transposed_times(dot, dout)

    def corrected(dstate, given):
        du, of_out, beta, within = given
        du = du + within.correcting.times(dot, dstate)
        dr = dot("ij,iv", within.solved, du)
        by_start = within.at_start.transposed_times(dot, dr if beta is None else beta * dr)
        return of_out + within.whole * dstate - by_start, (dstate, du, dr)

    if plan.walk == "one product":
        known = of_out - dot("ih,iv", within.corrector, du)

        def mapped(dstate, given):
            whole, erased, known = given
            return known + whole * dstate - dot("kh,kv", erased, dstate), dstate

        given = within.whole, within.erased, known
        before, dstates = in_order(mapped, dstate, given, reverse=True, together=CHUNKS_OF_A_TRIP)
        du = du + within.correcting.times(dot, dstates)
        return before, (dstates, du, dot("ij,iv", within.solved, du))
    if plan.options.corrects:
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
    (query, key, value, beta, decays, query_factor, key_factor, *_), dot = own, dot_of(plan)
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

    # inter and intra: (9), (10), (12) to (14); what a token reads of its own no decay moves
    pairs, dreads = decays.pairs, dot("iv,jv", through.dout, through.u)
    own_share = None if isinstance(pairs, SharedDecays) else row_sums(through.dout * through.u)
    rows = frozenset(("query", "key") if "log_decay" in wanted else wanted)
    of_states = _inter(plan, rows, own, through)
    terms = _terms(plan, rows, own, query, dreads, dkkt)
    of_all = _intra(own, dot, terms, of_states, dkkt)

    # (18)
    if "log_decay" in wanted:
        passed = decays.whole * transposed(row_sums(through.before * through.dstate))  # [C = 1, H]
        start, end = query * of_states.query, key * of_states.read
        start = start if of_states.reader is None else start + key * of_states.reader
        if isinstance(pairs, SharedDecays):
            start, end, passed = map(row_sums, (start, end, passed))
            planes = dreads * within.reads
            of_pairs = across_token(planes if dkkt is None else planes + dkkt * within.kkt)
        else:
            of_pairs = pairs.of_decays(dot, [(over, x, shares) for _, over, x, shares in terms])
        found["log_decay"] = jnp.where(decays.restarts, 0, _of_decays(start, end, of_pairs, passed))

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


class _Term(NamedTuple):
    """A sum over the pairs of a chunk that rows get."""

    to: str  # a field of `_OfRows`
    over: str  # the `EARLIER` or the `LATER` tokens
    rows: jax.Array  # those that get it, of which (18) takes the product with it
    shares: Any  # [C, H], or parts of it


def _terms(
    plan: Plan, rows: frozenset[str], own: Part, query: jax.Array, dreads: jax.Array, dkkt: Any
) -> list[_Term]:
    """Computes the sums of (12) to (14), from cotangents that are planes `[..., C, C]`."""
    pairs, key, dot, found = own.decays.pairs, own.key, dot_of(plan), []

    def add(to, over, rows, plane, x):
        found.append(_Term(to, over, rows, pairs.shares(dot, over, plane, x)))

    if "query" in rows:
        add("query", EARLIER, query, dreads, key)
    if "key" in rows:
        add("read", LATER, key, dreads, query)
        # where channels share their decay both sums of kkt are one product
        if dkkt is not None and not isinstance(pairs, SharedDecays):
            add("read", LATER, key, dkkt, key)
            add("reader", EARLIER, key, dkkt, key)
    return found


def _intra(own: Part, dot: Dot, terms: list[_Term], of_states: _OfRows, dkkt: Any) -> _OfRows:
    """Adds `terms` to what rows get through the states."""
    pairs, found = own.decays.pairs, _added(own, terms, of_states._asdict())
    if found["read"] is not None and dkkt is not None and isinstance(pairs, SharedDecays):
        found["reader"] = found["reader"] + pairs.both(dot, dkkt, own.key)
    return _OfRows(**found)


def _added(own: Part, terms: list[_Term], of_states: dict[str, Any]) -> dict[str, Any]:
    """Returns the sums of `terms` and of what rows get through the states, by name."""
    found = dict(of_states)
    for to, over, _, shares in terms:
        found[to] = found[to] + own.decays.pairs.added(over, shares)
    return found


def _of_erasing_tokens(
    plan: Plan, wanted: Collection[str], own: Part, within: Inside, through: Through
) -> dict[str, jax.Array]:
    """Computes (27) to (29), and with them (12) to (14) and (18): the gradients in `wanted`."""
    (before, u, dout, dstate, _, dr), dot, decays = through, dot_of(plan), own.decays
    query, key, value, a, b = (
        plan.options.scale * own.query,
        own.key,
        own.value,
        own.erase_key,
        own.erase_query,
    )
    dvalue = dot("ij,iv", within.reads, dout) + within.at_end.times(dot, dstate)
    found = {"value": dvalue - dot("ij,iv", within.writes, dr)}

    # the planes, and what rows get through the states
    earlier = lambda x: jnp.where(strictly_lower(query), x, 0)
    dreads, derase_reads = dot("iv,jv", dout, value), dot("iv,jv", dout, u)
    da, dwrites = (-earlier(dot("iv,jv", dr, x)) for x in (u, value))
    of_states = {
        "query": decays.from_start * dot("iv,hv", dout, before),
        "erase_query": -decays.from_start * dot("iv,hv", dr, before),
        "key": decays.to_end * dot("jv,hv", value, dstate),
        "erase_key": decays.to_end * dot("jv,hv", u, dstate),
    }

    # the sums over pairs: each plane gives to the rows of both its sides
    pairs, terms = decays.pairs, []
    sides = {"query": query, "key": key, "erase_key": a, "erase_query": b}
    rows = sides.keys() if "log_decay" in wanted else [n for n in sides if n in wanted]
    for later, before_it, plane in (
        ("query", "key", dreads),
        ("query", "erase_key", derase_reads),
        ("erase_query", "erase_key", da),
        ("erase_query", "key", dwrites),
    ):
        for to, over, x in ((later, EARLIER, before_it), (before_it, LATER, later)):
            if to in rows:
                terms.append(_Term(to, over, sides[to], pairs.shares(dot, over, plane, sides[x])))
    of_all = _added(own, terms, {name: of_states[name] for name in rows})

    # (18)
    if "log_decay" in wanted:
        passed = decays.whole * transposed(row_sums(before * dstate))
        start = query * of_states["query"] + b * of_states["erase_query"]
        end = key * of_states["key"] + a * of_states["erase_key"]
        if isinstance(pairs, SharedDecays):
            start, end, passed = map(row_sums, (start, end, passed))
            planes = dreads * within.reads + derase_reads * within.erase_reads
            of_pairs = across_token(planes + da * within.kkt + dwrites * within.writes)
        else:
            of_pairs = pairs.of_decays(dot, [(over, x, shares) for _, over, x, shares in terms])
        found["log_decay"] = jnp.where(decays.restarts, 0, _of_decays(start, end, of_pairs, passed))

    # what a token reads of its own, all value heads of a key head, the scale and the norm
    if not isinstance(pairs, SharedDecays):
        of_own, of_erased = row_sums(dout * value), row_sums(dout * u)
        own_shares = {
            "query": of_own * key + of_erased * a,
            "key": of_own * query,
            "erase_key": of_erased * query,
        }
        of_all |= {n: of_all[n] + x for n, x in own_shares.items() if n in of_all}
    for name in rows:
        found[name] = reduce_to(of_all[name], sides[name].shape)
    if "query" in rows:
        found["query"] = plan.options.scale * unit_gradient(own.query, own.query_factor, found["query"])
    if "key" in rows:
        found["key"] = unit_gradient(key, own.key_factor, found["key"])
    return {name: x for name, x in found.items() if name in wanted}


def _of_decays(start: jax.Array, end: jax.Array, of_pairs: jax.Array, passed: jax.Array) -> jax.Array:
    """Computes (18), `[..., C, X]`, from the products of rows and states and the sums over pairs."""
    axis = start.ndim - 2
    return lax.cumsum(start, axis, reverse=True) + lax.cumsum(beside(end, -1), axis) + of_pairs + passed
