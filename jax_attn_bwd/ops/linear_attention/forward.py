"""Portable forward of linear attention: groups of chunks in order, and within a group its states in order.

A chunk of C tokens from the state S0, with the letters of `decays.py`, q scaled, b = beta. The functions
below have the names of its stages, those in which the chunked algorithm is published:

    q^_i = exp(c_i) q_i,   k^_i = exp(c_i) k_i,   k~_j = exp(c_C - c_j) k_j             (4)
    kkt      A_ij = b_i <k_i, k_j>_G for j < i
    solve    M = (I + A)^-1                                                             (`matrix.py`)
    states   U = M b (V - K^ S0);   U = V without a delta rule                          (5)
             S1 = exp(c_C) S0 + K~^T U,   the S0 of the next chunk                      (6)
    inter    Q^ S0, what the state adds,   and intra   P U, what the chunk itself does,
             P_ij = <q_i, k_j>_G for j <= i:   O = Q^ S0 + P U                          (6)

(5) are the u of all tokens of the chunk at once: each takes from v what the state before it holds at its key,
the earlier ones' shares among them. Only products with a state follow one another.

Where erase keys a and queries b stand apart from the keys that are written (`dplr_linear_attention`), V is
written by k, and U, less what the state holds at b, by a:

    A_ij = <b_i, a_j>_G,   L_ij = <b_i, k_j>_G,  both for j < i,   P^a_ij = <q_i, a_j>_G for j <= i
    U = - M (L V + B^ S0),   S1 = exp(c_C) S0 + K~^T V + A~^T U                         (24)
    O = Q^ S0 + P V + P^a U                                                             (25)

Where launches cost, as on a GPU, what does not depend on a state is multiplied out beforehand. B^ are the
rows that read the state for the correction, b K^ or those of (24), Z is the rest, b V or - L V, and A~ the
keys that correct, K~ or those of (24). Then the walk takes one product a chunk, and U is that of all chunks:

    W = M B^,   E = A~^T W,   S1 = exp(c_C) S0 - E S0 + A~^T M Z (+ K~^T V),   U = M Z - W S0      (31)

References:
  Yang et al., Parallelizing linear transformers with the delta rule over sequence length, arXiv:2406.06484.
  Yang et al., Gated delta networks, arXiv:2412.06464. Kimi Team, Kimi Linear, arXiv:2510.26692.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.sharding import full_like_operands, tie, vary_over, varying
from jax_attn_bwd.ops.linear_attention import layout
from jax_attn_bwd.ops.linear_attention.decays import Scaled
from jax_attn_bwd.ops.linear_attention.layout import Part, part
from jax_attn_bwd.ops.linear_attention.matrix import Dot, dot_of, solve, strictly_lower, transposed
from jax_attn_bwd.ops.linear_attention.plan import CHUNKS_OF_A_TRIP, Plan
from jax_attn_bwd.ops.linear_attention.spec import Operands, Result


class Inside(NamedTuple):
    """What tokens of a chunk are to one another and to the states around it, `[m, ..., K, G, C, X]`."""

    from_start: Scaled  # q^
    at_start: Scaled  # k^
    at_end: Scaled  # k~
    whole: jax.Array  # exp(c_C), [X, 1]
    reads: jax.Array  # P, [C, C]
    kkt: Any  # <k_i, k_j>_G for j < i, A without b, [C, C]; None without a delta rule, as the next
    solved: Any  # M, [C, C]
    # of erase keys alone, where `at_start` is b^, and kkt A
    erase_end: Any = None  # a~
    erase_reads: Any = None  # P^a, [C, C]
    writes: Any = None  # L, [C, C]
    # where the walk takes one product a chunk
    corrector: Any = None  # W, [C, H]
    erased: Any = None  # E, [H, H]

    @property
    def correcting(self) -> Scaled:
        """The keys by which u is written, A~ or K~."""
        return self.at_end if self.erase_end is None else self.erase_end


@partial(jax.jit, static_argnums=0)
def forward(plan: Plan, operands: Operands) -> Result:
    """Returns the output, the state after the last token, and those that the backward starts from."""
    dot = dot_of(plan)
    dtype = accumulator_dtype(operands.value.dtype)
    if plan.pairs == "one token":
        return _one_token(plan, operands)

    def group(state, tokens):
        own = part(plan, layout.of_group(plan, tokens, operands.groups), dtype)
        within = inside(plan, own)
        after, before, u = states(plan, own, within, state)
        out = inter(dot, within, before) + intra(dot, within, own.value, u)  # (6), (25)
        return after, (layout.rows(out.astype(operands.value.dtype)), state)

    group = jax.checkpoint(group, prevent_cse=False)
    final, (out, kept) = lax.scan(group, first_state(operands), layout.tokens(plan, operands))
    out, final = layout.join(out, operands.value.shape[-3]), merged_heads(final)
    return Result(*tie((out, final, kept), operands))


def _one_token(plan: Plan, operands: Operands) -> Result:
    """Returns the result of one token, as in decoding, by the definition.

    Only the state is large there: it keeps the shape that it is given in, so that XLA updates it in place.
    """
    # the token, [..., N, 1, X]
    dot, dtype = dot_of(plan), accumulator_dtype(operands.value.dtype)
    tokens = jax.tree.map(lambda x: x[0], layout.tokens(plan, operands))
    own = part(plan, layout.of_group(plan, tokens, operands.groups), dtype)

    def of_heads(x):  # N = 1 where all heads share it
        *batch, K, G, C, X = x.shape[1:]
        return merged_heads(jnp.broadcast_to(x[0], (*batch, K, G if K == 1 else operands.groups, C, X)))

    query, key, u, whole = map(of_heads, (own.query, own.key, own.value, own.decays.whole))

    first = merged_heads(first_state(operands))
    final = transposed(whole) * first
    if plan.options.is_delta:
        u = of_heads(own.beta) * (u - dot("ih,hv", key, final))
    if plan.options.is_erasing:
        read = dot("ih,hv", of_heads(own.erase_query), final)
        final = final - transposed(of_heads(own.erase_key)) * read
    final = final + transposed(key) * u
    out = jnp.swapaxes(dot("ih,hv", plan.options.scale * query, final), -3, -2).astype(operands.value.dtype)
    return Result(*tie((out, final, split_heads(first, operands.groups)[None]), operands))


def inside(plan: Plan, own: Part) -> Inside:
    """Computes (4), kkt, solve, and P, all that no state is needed for."""
    (query, key, _, beta, decays, *_), options, dot = own, plan.options, dot_of(plan)
    query = options.scale * query
    overlaps = kkt(dot, own, key, key) if options.is_delta else None
    found = Inside(
        decays.scaled(options.scale * decays.from_start, own.query),
        decays.scaled(decays.from_start, key),
        decays.scaled(decays.to_end, key),
        transposed(decays.whole),
        decays.pairs.products(dot, query, key),
        overlaps,
        None if overlaps is None else solve(dot, beta * overlaps),
    )
    if options.is_erasing:
        found = _with_erase_keys(dot, own, query, found)
    if plan.walk != "one product":
        return found
    rows = found.at_start.dense()
    corrector = dot("ij,jh", found.solved, rows if beta is None else beta * rows)
    return found._replace(corrector=corrector, erased=found.correcting.transposed_times(dot, corrector))


def _with_erase_keys(dot: Dot, own: Part, query: jax.Array, found: Inside) -> Inside:
    """Adds what (24) and (25) take of erase keys; `query` is scaled."""
    decays, key = own.decays, own.key
    overlaps = kkt(dot, own, own.erase_query, own.erase_key)
    return found._replace(
        at_start=decays.scaled(decays.from_start, own.erase_query),
        kkt=overlaps,
        solved=solve(dot, overlaps),
        erase_end=decays.scaled(decays.to_end, own.erase_key),
        erase_reads=decays.pairs.products(dot, query, own.erase_key),
        writes=kkt(dot, own, own.erase_query, key),
    )


def kkt(dot: Dot, own: Part, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns <x_i, y_j>_G for j < i, else 0: A without b, `[m, ..., K, G, C, C]` of keys `[..., C, H]`."""
    return jnp.where(strictly_lower(x), own.decays.pairs.products(dot, x, y), 0.0)


def intra(dot: Dot, within: Inside, value: jax.Array, u: jax.Array) -> jax.Array:
    """Returns P U, or P V + P^a U: what tokens read within their chunk, `[m, ..., K, G, C, Hv]`."""
    if within.erase_reads is None:
        return dot("ij,jv", within.reads, u)
    return dot("ij,jv", within.reads, value) + dot("ij,jv", within.erase_reads, u)


def inter(dot: Dot, within: Inside, state: jax.Array) -> jax.Array:
    """Returns Q^ S0 `[m, ..., K, G, C, Hv]`, what tokens read of the states before, `[m, ..., H, Hv]`."""
    return within.from_start.times(dot, state)


def states(plan: Plan, own: Part, within: Inside, state: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Passes a group of m chunks from the state before it, `[..., K, G, H, Hv]`, by (5) and (6), or (24).

    Returns:
      the state behind the group, `[..., K, G, H, Hv]`; those before its chunks, `[m, ..., K, G, H, Hv]`; u of
      its tokens, `[m, ..., K, G, C, Hv]`.
    """
    dot = dot_of(plan)

    def corrected(state, given):
        value, beta, within = given
        u = dot("ij,jv", within.solved, beta * (value - within.at_start.times(dot, state)))
        return within.whole * state + within.at_end.transposed_times(dot, u), (state, u)

    def erased(state, given):
        known, added, within = given
        u = dot("ij,jv", within.solved, known - within.at_start.times(dot, state))
        after = within.whole * state + added + within.erase_end.transposed_times(dot, u)
        return after, (state, u)

    if plan.walk == "one product":
        return _by_maps(dot, own, within, state)
    if plan.options.is_delta:
        after, (before, u) = in_order(corrected, state, (own.value, own.beta, within))
        return after, before, u
    # what each chunk adds to the states is known before they are, and so is u where nothing is corrected
    added = within.at_end.transposed_times(dot, own.value)
    if plan.options.is_erasing:
        known = -dot("ij,jv", within.writes, own.value)
        after, (before, u) = in_order(erased, state, (known, added, within))  # (24)
        return after, before, u
    after, before = in_order(decayed, state, (within.whole, added))
    return after, before, own.value


def _by_maps(dot: Dot, own: Part, within: Inside, state: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what `states` does, by (31)."""
    rest = own.beta * own.value if within.writes is None else -dot("ij,jv", within.writes, own.value)
    known = dot("ij,jv", within.solved, rest)
    added = within.correcting.transposed_times(dot, known)
    if within.erase_end is not None:
        added = added + within.at_end.transposed_times(dot, own.value)

    def mapped(state, given):
        whole, erased, added = given
        return whole * state + added - dot("hk,kv", erased, state), state

    after, before = in_order(mapped, state, (within.whole, within.erased, added), together=CHUNKS_OF_A_TRIP)
    return after, before, known - dot("ih,hv", within.corrector, before)


def decayed(state: jax.Array, given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns (the state behind a chunk, that before it) where what the chunk adds is known."""
    whole, added = given
    return whole * state + added, state


def in_order(
    step: Callable[..., Any], carry: Any, xs: Any, reverse: bool = False, together: int = 1
) -> tuple[Any, Any]:
    """Scans over the chunks of a group, their first axis, `together` of them in each trip of the loop."""
    if jax.tree.leaves(xs)[0].shape[0] > 1:
        return lax.scan(step, carry, xs, reverse=reverse, unroll=together)
    carry, found = step(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], found)


def split_heads(state: jax.Array, groups: Any) -> jax.Array:
    """Turns `[..., N, H, Hv]` into `[..., K, G, H, Hv]`."""
    *batch, N, H, Hv = state.shape
    return state.reshape(*batch, N // groups, groups, H, Hv)


def merged_heads(state: jax.Array) -> jax.Array:
    """Turns `[..., K, G, H, Hv]` into `[..., N, H, Hv]`."""
    *batch, K, G, H, Hv = state.shape
    return state.reshape(*batch, K * G, H, Hv)


def zero_state(operands: Operands, reads: Any) -> jax.Array:
    """Returns zeros `[..., K, G, H, Hv]`, that lie on the mesh as the heads of the value do."""
    like, (*batch, _, N, Hv), H = operands.value.sum(-3), operands.value.shape, operands.key.shape[-1]
    dtype = accumulator_dtype(operands.value.dtype)
    zeros = full_like_operands(like[..., None, :], (*batch, N, H, Hv), 0, dtype, reads)
    return split_heads(zeros, operands.groups)


def first_state(operands: Operands) -> jax.Array:
    """Returns the state before the first token, `[..., K, G, H, Hv]`."""
    if operands.initial_state is None:
        return zero_state(operands, operands)
    state = vary_over(operands.initial_state, varying(operands))
    return split_heads(state, operands.groups)
