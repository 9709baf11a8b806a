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

from jax_attn_bwd._core.products import product
from jax_attn_bwd._core.sharding import full_like_operands
from jax_attn_bwd.ops.dot_product import devices, layout, mod_functions, row_terms
from jax_attn_bwd.ops.dot_product.block import scaled_product
from jax_attn_bwd.ops.dot_product.clean_operands import with_whole_keys
from jax_attn_bwd.ops.dot_product.layout import take_part
from jax_attn_bwd.ops.dot_product.plan import Plan
from jax_attn_bwd.ops.dot_product.portable.tiles import TileSource, padded
from jax_attn_bwd.ops.dot_product.spec import Operands, Result


@partial(jax.jit, static_argnums=0)
def tangent(
    plan: Plan, operands: Operands, result: Result, tangents: Operands
) -> tuple[jax.Array, jax.Array]:
    """Computes (dout, dlse), of the types of out and lse; None in `tangents` is zero."""
    total, mu = tangent_sums(plan, operands, result, tangents)
    return through_softmax(result, total, mu).astype(result.out.dtype), mu.astype(result.lse.dtype)


def tangent_sums(
    plan: Plan, operands: Operands, result: Result, tangents: Operands
) -> tuple[jax.Array, jax.Array]:
    """Computes what keys give to the sum over s of (17), `[..., T, N, Hv]`, and to mu, `[..., T, N]`.

    `result` has the row values of all keys that the queries attend to: what disjoint blocks give adds up, in
    the dtype of lse. None in `tangents` is zero.
    """
    operands, tangents = map(with_whole_keys, (operands, tangents))
    if plan.pieces is None:
        return _tiled(plan, operands, result, tangents)
    return devices.tangent(plan, _tiled, operands, result, tangents)()


def _tiled(plan: Plan, operands: Operands, result: Result, tangents: Operands) -> tuple[jax.Array, jax.Array]:
    """Computes `tangent_sums` of the queries that one program has, tile by tile."""
    # What all tiles read, padded to whole ones.
    w, groups = TileSource.of(plan.options, plan.tiles(operands), operands), operands.sizes.G
    lse, rounding = row_terms.finite_lse(result)
    rows = [layout.pad(layout.split_rows(x, groups), {-1: w.schedule.block_q}) for x in (lse, rounding)]
    moved = _laid_out(w, operands, tangents)

    # Every tile adds its share to the sums of its rows.
    mu = full_like_operands(rows[0], rows[0].shape, 0, lse.dtype, (operands, moved, rows))
    shape = (*mu.shape, w.v.shape[-1])
    found = _RowTangents(jnp.broadcast_to(mu[..., None], shape), mu)
    step, tiles = w.scan(partial(_added, w, moved, rows), lambda q, _: _RowTangents._make(({-2: q}, {-1: q})))
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
    return total - mu[..., None] * result.widest_out()


class _Tangents(NamedTuple):
    """The tangents in the layout of tiles; None is zero."""

    q: jax.Array | None
    k: jax.Array | None
    v: jax.Array | None
    bias: jax.Array | None
    args: Any  # of the floats that the score reads


class _RowTangents(NamedTuple):
    """Sums that every tile adds to."""

    dout: jax.Array  # [..., K, G, T, Hv]
    mu: jax.Array  # [..., K, G, T]


def _laid_out(w: TileSource, operands: Operands, tangents: Operands) -> _Tangents:
    """Lays the tangents out in tiles, 0 where the operands are for being poison."""
    # Where a tangent is zero the operand keeps its place: it tells which rows and keys become 0.
    given = {name: getattr(tangents, name) for name in ("query", "key", "value")}
    filled: Any = {name: getattr(operands, name) if x is None else x for name, x in given.items()}
    *found, _ = padded(w.options, w.schedule, operands._replace(**filled))
    laid: Any = [None if x is None else y for x, y in zip(given.values(), found, strict=True)]

    # Of the bias, and of what the score reads.
    bias, args = tangents.bias, None
    if bias is not None:
        plane = layout.plane(bias, operands.query.ndim - 3, operands.sizes[-1])
        bias = layout.pad(plane, {-2: w.schedule.block_q, -1: w.schedule.block_k})
    if w.options.score_mod is not None:
        args = mod_functions.tangents_of_args(operands.mod_args, tangents.mod_args)
    return _Tangents._make((*laid, bias, args))


def _added(w, moved, rows, sums, row, column, *, mixed):
    """Adds what a tile gives to the sums of (15) and (17)."""
    # The tile's operands, and their tangents.
    block, (block_q, block_k) = w.tile(row, column, mixed), w.schedule.blocks
    of_queries, of_keys = (row, block_q), (column, block_k)
    part = lambda x, rows: None if x is None else take_part(x, {-2: rows}).astype(block.q.dtype)
    dq, dk, dv = part(moved.q, of_queries), part(moved.k, of_keys), part(moved.v, of_keys)
    dbias = None if moved.bias is None else take_part(moved.bias, {-2: of_queries, -1: of_keys})
    lse, rounding = (w.rows(x, row)[..., None] for x in rows)

    # The logits again, as in the forward, and their tangent, [..., K, G, block_q, block_k].
    logits = scaled_product(block, block.q, block.k)
    dlogits = jnp.zeros_like(logits)
    for left, right in ((dq, block.k), (block.q, dk)):
        if left is not None and right is not None:
            dlogits += scaled_product(block, left, right)  # (12)
    logits, dlogits = block.pushed_forward(logits, dlogits, dbias, moved.args)  # (14)

    # The probabilities, and what they give to both sums.
    p = jnp.exp((block.where_seen(logits, -jnp.inf) - lse) - rounding)  # (2)
    pd = p * block.where_seen(dlogits)
    mu, values = pd.sum(-1), partial(product, "...gts,...sh->...gth", **block.product)
    dtype = block.dlogits_dtype
    dout = values(block.dropped(pd).astype(dtype), block.v.astype(dtype))
    if dv is not None:
        dout += values(block.dropped(p).astype(dv.dtype), dv)
    return _RowTangents(sums.dout + dout, sums.mu + mu)
