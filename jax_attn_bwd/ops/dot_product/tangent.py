"""Tangent rule of dense attention: derivation, then one pass over the live tiles.

The letters and equations (1) to (4) are those of `backward.py`. With tangents dq, dk, dv, dbias, da and dsink

    dx_ts      = scale (<dq_t, k_s> + <q_t, dk_s>)                      from (1)        (12)
    dc_ts      = dx_ts (1 - (soft_cap(x_ts) / cap)^2) + dbias_ts        from (1)        (13)
    dlogits_ts = d score / dc dc_ts + d score / da da                   from (1)        (14)

Of lse, with p the probabilities and p_t0 = exp(sink - lse_t) that of the sink,

    mu_t = dlse_t = sum_s p_ts dlogits_ts + p_t0 dsink                  from (3)        (15)
    dp_ts  = p_ts (dlogits_ts - mu_t)                                   from (2)        (16)
    dout_t = sum_s Z_ts (dp_ts v_s + p_ts dv_s)                         from (4)

and since sum_s Z_ts p_ts v_s = out_t, mu need not be known before the sum over s:

    dout_t = sum_s Z_ts p_ts (dlogits_ts v_s + dv_s) - mu_t out_t       from (16), (4)  (17)

p is formed again from the lse that the forward left, so (15) and (17) are sums over tiles in any order, and
nothing of size T x S is kept. A row that attends to nothing has p = 0 and out = 0, and tangent 0; tangents of
queries that see nothing, and of keys that nothing sees, are not read.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core.sharding import full_like_operands
from jax_attn_bwd.ops.dot_product import devices, layout, mod_functions, row_terms
from jax_attn_bwd.ops.dot_product.block import dropout_of_tile, scaled_product, soft_capped
from jax_attn_bwd.ops.dot_product.layout import put_at, take_at
from jax_attn_bwd.ops.dot_product.plan import Plan, Tiles
from jax_attn_bwd.ops.dot_product.spec import Operands, Options, Result
from jax_attn_bwd.ops.dot_product.tiles import TileOperands, tile, tile_operands, tile_scan, unpoisoned


@partial(jax.jit, static_argnums=0)
def tangent(
    plan: Plan, operands: Operands, result: Result, tangents: Operands
) -> tuple[jax.Array, jax.Array]:
    """Computes (dout, dlse), of the types of out and lse; None in `tangents` is zero."""
    total, mu = sums(plan, operands, result, tangents)
    return through_softmax(result, total, mu).astype(result.out.dtype), mu.astype(result.lse.dtype)


def sums(plan: Plan, operands: Operands, result: Result, tangents: Operands) -> tuple[jax.Array, jax.Array]:
    """Computes what keys give to the sum over s of (17), `[..., T, N, Hv]`, and to mu, `[..., T, N]`.

    `result` has the row values of all keys that the queries attend to: what disjoint blocks give adds up, in
    the dtype of lse. None in `tangents` is zero.
    """
    operands, tangents = map(devices.with_whole_keys, (operands, tangents))
    if plan.pieces is None:
        return _tiled(plan, operands, result, tangents)
    return devices.tangent(plan, _tiled, operands, result, tangents)


def _tiled(plan: Plan, operands: Operands, result: Result, tangents: Operands) -> tuple[jax.Array, jax.Array]:
    """Computes `sums` of the queries that one program has, tile by tile."""
    # What all tiles read, padded to whole ones.
    options, schedule, groups = plan.options, plan.tiles(operands), operands.sizes.G
    w, block_q = tile_operands(options, schedule, operands), schedule.block_q
    rows = lambda x: layout.pad(layout.split_rows(x, groups), {-1: block_q})
    lse, low = row_terms.finite_lse(result)
    saved = _Saved(w, _laid_out(options, schedule, operands, tangents), rows(lse), rows(low))

    # Every tile adds its share to the sums of its rows.
    mu = full_like_operands(saved.lse, saved.lse.shape, 0, lse.dtype, saved)
    shape = (*mu.shape, w.v.shape[-1])
    found = _Sums(jnp.broadcast_to(mu[..., None], shape), mu)
    step, tiles = tile_scan(partial(_step, options, schedule, saved), w.mask, schedule)
    if tiles is not None:
        found, _ = lax.scan(step, found, tiles)

    # Without padding, and with the share of the sink.
    T = operands.query.shape[-3]
    total, mu = layout.merge_heads(found.dout)[..., :T, :, :], layout.merge_rows(found.mu)[..., :T, :]
    if tangents.sink is not None:
        assert operands.sink is not None  # it has a tangent
        mu = mu + row_terms.tangent_of_sink(operands.sink, result, tangents.sink)
    return total, mu


def through_softmax(result: Result, total: jax.Array, mu: jax.Array) -> jax.Array:
    """Returns dout of (17), in the dtype of lse, from the whole sum over s and mu."""
    return total - mu[..., None] * result.wide_out()


class _Tangents(NamedTuple):
    """The tangents in the layout of tiles; None is zero."""

    q: jax.Array | None
    k: jax.Array | None
    v: jax.Array | None
    bias: jax.Array | None
    args: Any  # of the floats that the score reads


class _Saved(NamedTuple):
    """Arrays that the step of every tile reads."""

    operands: TileOperands
    tangents: _Tangents
    lse: jax.Array  # [..., K, G, T]
    lse_low: jax.Array


class _Sums(NamedTuple):
    """Sums that every tile adds to."""

    dout: jax.Array  # [..., K, G, T, Hv]
    mu: jax.Array  # [..., K, G, T]


def _laid_out(options: Options, schedule: Tiles, operands: Operands, tangents: Operands) -> _Tangents:
    """Lays the tangents out in tiles, 0 where the operands are for being poison."""
    # Where a tangent is zero the operand keeps its place: it tells which rows and keys become 0.
    names = ("query", "key", "value")
    given = {name: getattr(tangents, name) for name in names}
    filled: Any = {name: getattr(operands, name) if x is None else x for name, x in given.items()}
    whole = operands._replace(**filled)
    blocks = (schedule.block_q, schedule.block_k, schedule.block_k)
    laid: Any = [
        None if x is None else layout.pad(found, {-2: block})
        for x, found, block in zip(given.values(), unpoisoned(options, whole), blocks, strict=False)
    ]

    # Of the bias, and of what the score reads.
    bias, args = tangents.bias, None
    if bias is not None:
        plane = layout.plane(bias, operands.query.ndim - 3, operands.sizes[-1])
        bias = layout.pad(plane, {-2: schedule.block_q, -1: schedule.block_k})
    if options.score_mod is not None:
        args = mod_functions.tangents_of_args(operands.mod_args, tangents.mod_args)
    return _Tangents._make((*laid, bias, args))


def _step(options, schedule, saved, mixed, sums, visit):
    """Adds the share of tile (i, j) to the sums of its rows."""
    i, j, live = visit
    q = (i, schedule.block_q)
    blocks = _Sums({-2: q}, {-1: q})
    old = _Sums(*map(take_at, sums, blocks))
    share = jax.checkpoint(partial(_share, options, schedule, saved, mixed=mixed), prevent_cse=False)
    add = lambda old: jax.tree.map(jnp.add, old, share(i, j))
    new = add(old) if live is None else lax.cond(live, add, lambda old: old, old)
    return _Sums(*map(put_at, sums, new, blocks)), None


def _share(options, schedule, saved, i, j, *, mixed):
    """Computes what tile (i, j) gives to the sums of (15) and (17)."""
    # The tile's operands, and their tangents.
    w, moved = saved.operands, saved.tangents
    dtype, of_queries, of_keys = saved.lse.dtype, (i, schedule.block_q), (j, schedule.block_k)
    q, k, v, bias, seen, places = tile(options, schedule, w, i, j, mixed)
    part = lambda x, rows: None if x is None else take_at(x, {-2: rows}).astype(schedule.product_dtype)
    dq, dk, dv = part(moved.q, of_queries), part(moved.k, of_keys), part(moved.v, of_keys)
    lse, low = (take_at(x, {-1: of_queries})[..., None] for x in saved[2:])

    # The logits again, as in the forward, and their tangent, [..., K, G, block_q, block_k].
    logits, tanh = soft_capped(options, scaled_product(options, q, k, dtype))
    if bias is not None:
        logits = logits + bias.astype(dtype)
    dlogits = jnp.zeros_like(logits)
    for left, right in ((dq, k), (q, dk)):
        if left is not None and right is not None:
            dlogits += scaled_product(options, left, right, dtype)  # (12)
    if tanh is not None:
        dlogits = dlogits * (1 - tanh * tanh)
    if moved.bias is not None:
        dlogits += take_at(moved.bias, {-2: of_queries, -1: of_keys}).astype(dtype)  # (13)
    if places is not None:
        logits, dlogits = mod_functions.pushed_forward(
            options, logits, places, w.mask.places.args, dlogits, moved.args
        )  # (14)
    if seen is not None:
        logits, dlogits = jnp.where(seen, logits, -jnp.inf), jnp.where(seen, dlogits, 0)

    # The probabilities, and what they give to both sums.
    p = jnp.exp((logits - lse) - low)  # (2)
    pd = p * dlogits
    mu = pd.sum(-1)
    if w.counters is not None:
        z = dropout_of_tile(options, schedule, w.counters, i, j, p.dtype)
        p, pd = p * z, pd * z
    values = partial(
        jnp.einsum, "...gts,...sh->...gth", precision=options.precision, preferred_element_type=dtype
    )
    dout = values(pd.astype(v.dtype), v)
    if dv is not None:
        dout += values(p.astype(v.dtype), dv)
    return _Sums(dout, mu)
