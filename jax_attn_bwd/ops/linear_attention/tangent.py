"""Tangent rule of linear attention: derivation, then the code.

The letters and equations (1) to (6) are those of `decays.py`, `matrix.py` and `forward.py`; x' is the
tangent of x. The factor exp(c_i - c_j) of a pair of tokens moves by the sum of g' from j to i, which is taken
by itself, as that of g is, and not as a difference of sums:

    <x_i, y_j>_G' = <x_i', y_j>_G + <x_i, y_j'>_G + sum_d x_id y_jd exp(c_id - c_jd) (c_id - c_jd)'   (19)
    q^' = exp(c) (q' + c' q),   k~_j' = exp(c_C - c_j) (k_j' + (c_C - c_j)' k_j),   and so k^'        (20)
    U' = M (b' (V - K^ S0) + b (V' - K^' S0 - K^ S0') - A' U),   A' by (19) and b'      (21)
    U' = - M (L' V + L V' + B^' S0 + B^ S0' + A' U),   of (24)                          (30)
    O' = Q^' S0 + Q^ S0' + P' U + P U'                                                  (22)
    S1' = exp(c_C) (c_C' S0 + S0') + K~'^T U + K~^T U'                                  (23)

Of erase keys (22) and (23) have P V + P^a U, and K~^T V + A~^T U, for P U and K~^T U.

The states are computed again with their tangents, so nothing is read of what the backward reads.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd.ops.linear_attention import layout
from jax_attn_bwd.ops.linear_attention.decays import beside
from jax_attn_bwd.ops.linear_attention.forward import (
    Inside,
    first_state,
    in_order,
    inside,
    inter,
    intra,
    merged_heads,
    split_heads,
    zero_state,
)
from jax_attn_bwd.ops.linear_attention.layout import TokenRows, part, unit_gradient
from jax_attn_bwd.ops.linear_attention.matrix import Dot, dot_of, strictly_lower, transposed
from jax_attn_bwd.ops.linear_attention.plan import Plan
from jax_attn_bwd.ops.linear_attention.spec import Operands


@partial(jax.jit, static_argnums=0)
def tangent(plan: Plan, operands: Operands, tangents: Operands) -> tuple[jax.Array, jax.Array]:
    """Returns the tangents of the output and of the final state; None in `tangents` is zero."""
    dtype = accumulator_dtype(operands.value.dtype)
    moved = {
        name: jnp.zeros_like(x) if (t := getattr(tangents, name)) is None else t
        for name, x in operands._asdict().items()
        if x is not None and name not in ("seq_lengths", "restarts")
    }
    along = operands._replace(**moved)
    state = first_state(operands)
    dstate = zero_state(operands, (operands, along))
    if "initial_state" in moved:
        dstate = dstate + split_heads(moved["initial_state"], operands.groups)

    def group(states, given):
        told, moves = (layout.of_group(plan, x, operands.groups) for x in given)
        states, dout = in_order(partial(_next, plan), states, _of_group(plan, told, moves, dtype))
        return states, layout.rows(dout)

    group = jax.checkpoint(group, prevent_cse=False)
    given = layout.tokens(plan, operands), layout.tokens(plan, along)
    (_, dfinal), dout = lax.scan(group, (state, dstate), given)
    dout = layout.join(dout, operands.value.shape[-3]).astype(operands.value.dtype)
    return dout, merged_heads(dfinal)


def _of_group(
    plan: Plan, tokens: TokenRows, along: TokenRows, dtype
) -> tuple[Any, Any, Inside, Inside, TokenRows]:
    """Returns value, beta and insides of chunks, then tangents: of these by (19) and (20), of the tokens."""
    options = plan.options
    own, dot = part(plan, tokens, dtype), dot_of(plan)
    within, decays = inside(plan, own), own.decays
    moved = jax.tree.map(lambda x: x.astype(dtype), along._replace(restarts=None))
    dquery = options.scale * unit_gradient(own.query, own.query_factor, moved.query)
    dkey = unit_gradient(own.key, own.key_factor, moved.key)
    query, key = options.scale * own.query, own.key

    # of the decays, and of what comes with them
    dg = jnp.where(decays.restarts, 0, moved.log_decay)
    axis, pairs = dg.ndim - 2, decays.pairs
    from_start, to_end = lax.cumsum(dg, axis), lax.cumsum(beside(dg, 1), axis, reverse=True)

    def products(x, dx, y, dy):
        return pairs.products(dot, dx, y) + pairs.products(dot, x, dy) + pairs.moved(dot, x, y, dg)

    dreads = products(query, dquery, key, dkey)
    doverlaps = None
    if options.is_delta:
        doverlaps = products(key, dkey, key, dkey)
        doverlaps = jnp.where(strictly_lower(key), doverlaps, 0)
        doverlaps = moved.beta * within.kkt + own.beta * doverlaps
    start = lambda x, dx: decays.scaled(decays.from_start, dx + from_start * x)
    end = lambda x, dx: decays.scaled(decays.to_end, dx + to_end * x)
    moves = Inside(
        start(query, dquery),
        start(key, dkey),
        end(key, dkey),
        transposed(decays.whole * from_start[..., -1:, :]),
        dreads,
        doverlaps,  # A'
        None,
    )
    if options.is_erasing:
        (a, da), (b, db) = (own.erase_key, moved.erase_key), (own.erase_query, moved.erase_query)
        earlier = lambda x: jnp.where(strictly_lower(key), x, 0)
        moves = moves._replace(
            at_start=start(b, db),
            kkt=earlier(products(b, db, a, da)),
            erase_end=end(a, da),
            erase_reads=products(query, dquery, a, da),
            writes=earlier(products(b, db, key, dkey)),
        )
    return own.value, own.beta, within, moves, moved


def _next(plan, states, given):
    """Returns the state and its tangent behind a chunk, and the tangent of the output, (21) to (23)."""
    (state, dstate), (value, beta, within, moves, moved), dot = states, given, dot_of(plan)
    u, du = value, moved.value
    if plan.options.is_delta:
        rest = u - within.at_start.times(dot, state)
        u = dot("ij,jv", within.solved, beta * rest)
        du = du - moves.at_start.times(dot, state) - within.at_start.times(dot, dstate)
        du = moved.beta * rest + beta * du - dot("ij,jv", moves.kkt, u)
        du = dot("ij,jv", within.solved, du)
    if plan.options.is_erasing:  # (30)
        rest = dot("ij,jv", within.writes, value) + within.at_start.times(dot, state)
        u = -dot("ij,jv", within.solved, rest)
        du = dot("ij,jv", moves.writes, value) + dot("ij,jv", within.writes, moved.value)
        du = du + moves.at_start.times(dot, state) + within.at_start.times(dot, dstate)
        du = -dot("ij,jv", within.solved, du + dot("ij,jv", moves.kkt, u))
    dout = inter(dot, moves, state) + inter(dot, within, dstate)
    dout = dout + intra(dot, moves, value, u) + intra(dot, within, moved.value, du)
    dstate = moves.whole * state + within.whole * dstate + _written(dot, moves, value, u)
    dstate = dstate + _written(dot, within, moved.value, du)
    return (within.whole * state + _written(dot, within, value, u), dstate), dout


def _written(dot: Dot, within: Inside, value: jax.Array, u: jax.Array) -> jax.Array:
    """Returns what a chunk writes, K~^T U or K~^T V + A~^T U."""
    if within.erase_end is None:
        return within.at_end.transposed_times(dot, u)
    return within.at_end.transposed_times(dot, value) + within.erase_end.transposed_times(dot, u)
