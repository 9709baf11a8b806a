"""Forward of dense attention tile by tile: one pass with the online softmax, `online_softmax.py`.

References:
  Dao, FlashAttention-2, 2023, arXiv:2307.08691, section 3.1.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core.numerics import accumulator_dtype, lost_to, split_rounding
from jax_attn_bwd.ops.dot_product import layout, mod_functions
from jax_attn_bwd.ops.dot_product import online_softmax as online
from jax_attn_bwd.ops.dot_product.block import dropout_of_tile, scaled_product, soft_capped
from jax_attn_bwd.ops.dot_product.layout import put_at, take_at
from jax_attn_bwd.ops.dot_product.online_softmax import State
from jax_attn_bwd.ops.dot_product.plan import Plan, Tiles
from jax_attn_bwd.ops.dot_product.spec import Operands, Result
from jax_attn_bwd.ops.dot_product.tiles import tile, tile_operands, tile_scan


def forward(plan: Plan, schedule: Tiles, operands: Operands) -> Result:
    """Computes the result tile by tile."""
    # What each row keeps begins with the sink, if there is one, broadcast to [..., K, G, T].
    w, sink = tile_operands(plan.options, schedule, operands), operands.sink
    step, tiles = tile_scan(partial(_step, plan.options, schedule, w), w.mask, schedule)
    if sink is not None:
        sink = sink.astype(accumulator_dtype(w.q.dtype)).reshape(*w.q.shape[-4:-2], 1)
    state = online.initial(w.q, w.v.shape[-1], sink, operands)
    rounds = schedule.product_dtype != state.acc.dtype and plan.low_matters
    sums = _Sums(state, jnp.zeros_like(state.acc) if rounds else None)
    if tiles is not None:
        sums, _ = lax.scan(step, sums, tiles)

    # The output and its row values, [..., T, N, Hv] and [..., T, N], without padding.
    state, lost = sums
    T = operands.query.shape[-3]
    may_be_empty = w.live is not None or not isinstance(T, int) or T % schedule.block_q != 0
    out, lse, low = online.finished(state, may_be_empty)
    whole_rows = lambda x: layout.merge_heads(x)[..., :T, :, :]
    if lost is not None:
        lost = whole_rows(online.finished(state._replace(acc=lost), may_be_empty)[0])
    out, out_low = split_rounding(whole_rows(out), operands.query.dtype, lost=lost, kept=plan.splits_out)
    lse, low = (layout.merge_rows(x)[..., :T, :] for x in (lse, low))
    return Result(out, lse, low, out_low)


class _Sums(NamedTuple):
    """Sums of each row that the walk carries."""

    state: State
    lost: jax.Array | None  # what rounding p takes from `state.acc`; no one reads it but gradients that ask


def _step(options, schedule, w, mixed, sums, visit):
    """Folds key tile j into the rows of query tile i."""
    i, j, live = visit
    q = (i, schedule.block_q)
    blocks = _Sums(State(acc={-2: q}, m={-1: q}, l={-1: q}), None if sums.lost is None else {-2: q})
    rows = jax.tree.map(take_at, sums, blocks)

    # The tile is formed again by a backward of this forward; a dead one leaves the rows as they are.
    update = jax.checkpoint(partial(_update, options, schedule, w, mixed=mixed), prevent_cse=False)
    skip = lambda rows, i, j: rows
    rows = update(rows, i, j) if live is None else lax.cond(live, update, skip, rows, i, j)
    return jax.tree.map(put_at, sums, rows, blocks), None


def _update(options, schedule, w, sums, i, j, *, mixed):
    """Returns the sums of the rows of query tile i with key tile j."""
    # The logits of the tile, [..., K, G, block_q, block_k], -inf where unseen.
    rows, lost = sums
    q, k, v, bias, seen, places = tile(options, schedule, w, i, j, mixed)
    logits, _ = soft_capped(options, scaled_product(options, q, k, rows.l.dtype))
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)
    if places is not None:
        logits = mod_functions.scored(options, logits, places, w.mask.places.args)
    if seen is not None:
        logits = jnp.where(seen, logits, -jnp.inf)

    # The sums so far decay to the new maximum, and the tile's weights are added; dropout spares l.
    m, decay, p = online.weights(rows.m, logits)
    l = rows.l * decay + p.sum(-1)
    if w.counters is not None:
        p = p * dropout_of_tile(options, schedule, w.counters, i, j, p.dtype)
    product = {"precision": options.precision, "preferred_element_type": p.dtype}
    add = lambda acc, p: acc * decay[..., None] + jnp.einsum("...gts,...sh->...gth", p, v, **product)
    if lost is not None:
        lost = add(lost, lost_to(v.dtype, p))
    return _Sums(State(add(rows.acc, p.astype(v.dtype)), m, l), lost)
