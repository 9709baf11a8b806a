"""Forward of dense attention tile by tile: one pass with the online softmax, `online_softmax.py`.

References:
  Dao, FlashAttention-2, 2023, arXiv:2307.08691, section 3.1.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core.numerics import accumulator_dtype, rounding_of
from jax_attn_bwd._core.products import product
from jax_attn_bwd.ops.dot_product import online_softmax as online
from jax_attn_bwd.ops.dot_product import row_terms
from jax_attn_bwd.ops.dot_product.block import scaled_product
from jax_attn_bwd.ops.dot_product.online_softmax import State
from jax_attn_bwd.ops.dot_product.plan import Plan, Tiles
from jax_attn_bwd.ops.dot_product.spec import Operands, Result
from jax_attn_bwd.ops.dot_product.tiles import TileSource


def forward(plan: Plan, schedule: Tiles, operands: Operands) -> Result:
    """Computes the result tile by tile."""
    # What each row keeps begins with the sink, if there is one, broadcast to [..., K, G, T].
    w, sink = TileSource.of(plan.options, schedule, operands), operands.sink
    if sink is not None:
        sink = sink.astype(accumulator_dtype(w.q.dtype)).reshape(*w.q.shape[-4:-2], 1)
    state = online.initial(w.q, w.v.shape[-1], sink, operands)
    rounds = schedule.product_dtype != state.acc.dtype and plan.rounding_matters
    sums = _RowSums(state, jnp.zeros_like(state.acc) if rounds else None)

    # Every tile of keys is folded into its rows; a dead one leaves them as they are.
    def parts(q, _):
        return _RowSums(State({-2: q}, {-1: q}, {-1: q}), {-2: q} if rounds else None)

    step, tiles = w.scan(partial(_update, w), parts)
    if tiles is not None:
        sums, _ = lax.scan(step, sums, tiles)

    # The output and its row values.
    state, out_rounding = sums
    T = operands.query.shape[-3]
    may_be_empty = w.live is not None or not isinstance(T, int) or T % schedule.block_q != 0
    out, lse, rounding = online.finished(state, may_be_empty)
    if out_rounding is not None:
        out_rounding = online.finished(state._replace(acc=out_rounding), may_be_empty)[0]
    return row_terms.of_forward(operands, plan.has_wide_out, out, out_rounding, lse, rounding)


class _RowSums(NamedTuple):
    """Sums of each row that the walk carries."""

    state: State
    rounding: jax.Array | None  # of `state.acc`, by rounding p; no one reads it but gradients that ask


def _update(w, sums, row, column, *, mixed):
    """Returns the sums of the rows with the keys of the tile that begins there."""
    # The logits of the tile, [..., K, G, block_q, block_k], -inf where unseen.
    rows, rounding = sums
    block = w.tile(row, column, mixed)
    logits, _ = block.logits(scaled_product(block, block.q, block.k))

    # The sums so far decay to the new maximum, and the tile's weights are added; dropout spares l.
    m, decay, p = online.weights(rows.m, logits)
    l, p, v = rows.l * decay + p.sum(-1), block.dropped(p), block.v
    add = lambda acc, p: acc * decay[..., None] + product("...gts,...sh->...gth", p, v, **block.product)
    if rounding is not None:
        rounding = add(rounding, rounding_of(p, v.dtype))
    return _RowSums(State(add(rows.acc, p.astype(v.dtype)), m, l), rounding)
