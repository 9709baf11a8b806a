"""Backward of dense attention: derivation, then one pass over the tiles.

The forward, for query row t, key s, with Z the dropout factors (0 or 1 / (1 - rate)):

    x_ts = scale <q_t, k_s>,   c_ts = soft_cap(x_ts) + bias_ts,   logits_ts = score(c_ts, a) (1)
    p_ts = exp(logits_ts - lse_t)   where visible, 0 elsewhere                           (2)
    lse_t = log(sum_s exp(logits_ts) + exp(sink))                                        (3)
    out_t = sum_s Z_ts p_ts v_s                                                          (4)

Given cotangents dout of (4) and dlse of (3), and undoing the forward from its end:

    dv_s      = sum_t Z_ts p_ts dout_t                                  from (4)         (5)
    dp_ts     = Z_ts <dout_t, v_s>                                      from (4)         (6)
    dlogits_ts = p_ts (dp_ts - sum_u p_tu dp_tu) + p_ts dlse_t          from (2), (3)

The sum over u needs no second pass, since sum_u p_tu Z_tu <dout_t, v_u> = <dout_t, out_t>:

    delta_t    = <dout_t, out_t> - dlse_t                                                (7)
    dlogits_ts = p_ts (dp_ts - delta_t)                                                  (8)
    dc_ts, da_ts = dlogits_ts d score / d (c_ts, a)                     from (1)        (8a)
    dbias = dc, and da, summed over broadcast axes
    dsink      = - sum_t exp(sink - lse_t) delta_t                      from (3)         (9)
    dx_ts      = dc_ts (1 - (soft_cap(x_ts) / cap)^2)                   from (1)        (10)
    dq_t = scale sum_s dx_ts k_s,   dk_s = scale sum_t dx_ts q_t        from (1)        (11)

score is the caller's `score_mod` of arrays a, `mod_args`; without it c is the logits and (8a) is void. Its
derivative is JAX's, of the function alone, tile by tile.

p is recomputed from lse tile by tile, so nothing of size T x S is kept. A tile is held transposed,
`[..., K, S, G, T]`: then (5) and (11) for dk are plain matrix products, and a tile of dq is formed as its
transpose, k^T dx^T, for the same reason (on a CPU a product that contracts the major axis of both
factors takes 2.3 times as long).

References:
  Dao, FlashAttention-2, 2023, arXiv:2307.08691, section 3.1, Algorithm 2: (5) to (8), (11).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import float_leaves
from jax_attn_bwd._core.numerics import accumulator_dtype, moved, reduce_to
from jax_attn_bwd._core.sharding import full_like_operands
from jax_attn_bwd.ops.dot_product import layout, mod_functions, row_terms
from jax_attn_bwd.ops.dot_product.block import scaled_product
from jax_attn_bwd.ops.dot_product.plan import Plan, Tiles
from jax_attn_bwd.ops.dot_product.spec import Operands, Result, Wanted
from jax_attn_bwd.ops.dot_product.tiles import TileSource


def backward(
    plan: Plan, schedule: Tiles, wanted: Wanted, operands: Operands, result: Result, dout: Any, dlse: Any
) -> dict[str, Any]:
    """Computes the gradients named in `wanted`, in the accumulator's dtype, tile by tile."""
    # What all tiles read, padded to whole ones; rows that see nothing have a cotangent of 0.
    dout, delta = row_terms.of_backward(plan.options, operands, result, dout, dlse)
    w = TileSource.of(plan.options, schedule, operands)
    rows = row_terms.in_rows(result, w.live, dout, delta)
    rows = rows.map(lambda x, axis: layout.pad(x, {axis: schedule.block_q}))

    # Every tile adds its share to the sums; a dead one gives zeros. A branch that added, or transposed, would
    # make copies of what it is handed: it costs 5% of the time.
    sums = _zeros(wanted.names, w, (operands, rows), accumulator_dtype(operands.query.dtype))
    step, tiles = w.scan(
        partial(_share, w, rows),
        partial(_parts, sums),
        lambda old, row, column: jax.tree.map(jnp.zeros_like, _swapped(old)),
        lambda old, added: jax.tree.map(jnp.add, old, _swapped(added)),
    )
    if tiles is not None:
        sums, _ = lax.scan(step, sums, tiles)
    grads = _in_shapes_of(operands, w, sums)
    if "sink" in wanted.names:
        grads["sink"] = row_terms.gradient_of_sink(operands.sink, result, layout.merge_rows(delta))
    return grads


def _parts(sums: dict[str, Any], q: Any, k: Any) -> dict[str, Any]:
    """Tells which part of each sum a tile adds to, by its rows and columns: of what a score reads all."""
    parts = {"query": {-3: q}, "key": {-3: k}, "value": {-3: k}, "bias": {-2: q, -1: k}}
    whole = lambda x: jax.tree.map(lambda _: {}, x)
    return {name: parts[name] if name in parts else whole(x) for name, x in sums.items()}


def _in_shapes_of(operands: Operands, w: TileSource, sums: dict[str, Any]) -> dict[str, Any]:
    """Cuts the padding off the sums over the tiles, and reduces those of what broadcasts to its shape."""
    _, T, S, _, groups = operands.sizes
    lengths = {"query": T, "key": S, "value": S}
    grads = {name: sums[name][..., :length, :, :] for name, length in lengths.items() if name in sums}
    if "bias" in sums:
        bias = operands.bias
        assert bias is not None  # its gradient is asked for
        *_, t, s = layout.plane(bias, w.q.ndim - 4, groups).shape
        *batch, k, g, _, _ = sums["bias"].shape
        dbias = sums["bias"][..., :t, :s].reshape(*batch, k * g, t, s)
        grads["bias"] = reduce_to(dbias, bias.shape)
    if "mod_args" in sums:
        numbers = float_leaves.floats(operands.mod_args)
        grads["mod_args"] = jax.tree.map(lambda x, like: reduce_to(x, like.shape), sums["mod_args"], numbers)
    return grads


def _zeros(wanted: frozenset[str], w: TileSource, operands: Any, dtype: Any) -> dict[str, jax.Array]:
    """Returns zeros that the tiles are summed into, by operand.

    Those of query, key and value have the caller's layout: they are the gradients then, and no copy is made.
    """
    # Of which array each sum has the sharding, and its shape.
    *batch, K, G, _, _ = w.q.shape
    arrays = layout.merge_heads(w.q), moved(w.k, -2, -3), moved(w.v, -2, -3)
    like = {name: (x, x.shape) for name, x in zip(("query", "key", "value"), arrays, strict=True)}
    if w.mask.bias is not None:
        shape = w.mask.bias.shape
        if 1 in shape[-2:]:  # small: leave the sum over the batch, maybe a collective, to the end
            shape = (*batch, *shape[-4:])
        like["bias"] = (w.q, shape)
    zeros: dict[str, Any] = {
        name: full_like_operands(x, shape, 0, dtype, operands)
        for name, (x, shape) in like.items()
        if name in wanted
    }

    # What a score reads has one for each batch entry and head, where these are small enough.
    if "mod_args" in wanted:
        assert w.mask.places is not None  # differentiated with a function
        lead = (*batch, K, G) if mod_functions.may_lie_apart(w.mask.places, w.q) else ()

        def zero(x):  # apart: the sum over batch and heads, maybe a collective, is left to the end
            like = w.q[..., :1, :1].sum((-2, -1)).reshape(*lead, *(1 for _ in x.shape)) if lead else x
            return full_like_operands(like, (*lead, *x.shape), 0, dtype, operands)

        zeros["mod_args"] = jax.tree.map(zero, float_leaves.floats(w.mask.places.args))
    return zeros


def _swapped(shares):
    """Turns those of keys and values from the layout of tiles, `[..., K, S, H]`, to the caller's, or back."""
    swap = lambda name, x: moved(x, -2, -3) if name in ("key", "value") else x
    return {name: swap(name, x) for name, x in shares.items()}


def _share(w, rows, old, row, column, *, mixed):
    """Computes what a tile gives to each sum named in `old`; keys and values are `_swapped`."""
    # The tile's operands; its elements lie transposed, [..., K, S, G, T].
    block = w.tile(row, column, mixed).transposed()
    dout, lse, rounding, delta = rows.map(lambda x, axis: w.rows(x, row, axis))
    lse, rounding, delta = (x[..., None, :, :] for x in (lse, rounding, delta))

    # The probabilities again, from logits formed as in the forward and the row's lse.
    logits, of = block.logits(scaled_product(block, block.q, block.k))  # (1)
    p = jnp.exp((logits - lse) - rounding)  # (2)

    # What they give to the gradients, in the layout of the sums; arrays that no score reads get nothing.
    dout = dout.astype(block.v.dtype)
    dp = block.through_values(dout) if old.keys() != {"value"} else None
    apart = w.mask.places is not None and mod_functions.may_lie_apart(w.mask.places, w.q)
    share = block.gradients(old, p, dout, dp, delta, of, apart)
    if "mod_args" in old and "mod_args" not in share:
        share["mod_args"] = jax.tree.map(jnp.zeros_like, old["mod_args"])
    if "bias" in old:
        share["bias"] = reduce_to(share["bias"], old["bias"].shape)
    if "query" in old:
        share["query"] = layout.merge_heads(share["query"])
    return share
