"""Portable forward of dense attention: one pass over the tiles with an online softmax.

A plane of one small tile has a shorter way, `materialized.py`.

For each query row, over the key tiles in any order, with m the running maximum of the logits:

    m'  = max(m, max_j logits_j)
    l'  = l  exp(m - m') + sum_j exp(logits_j - m')
    acc'= acc exp(m - m') + sum_j exp(logits_j - m') v_j
    at the end   out = acc / l,   lse = m + log l

Where all logits of a row are huge and alike (-1e9 as a mask), log l is lost when lse is rounded, so the
remainder lse_low = (m - lse) + log l is kept beside it: the backward needs exp(logits - lse) to be exact.

A sink is one more logit without a value: it starts the row at m = sink, l = 1.

References:
  Dao, FlashAttention-2, 2023, arXiv:2307.08691, section 3.1.
  Milakov and Gimelshein, Online normalizer calculation for softmax, 2018, arXiv:1805.02867.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core.numerics import accumulator_dtype, finite, to_rank
from jax_attn_bwd._core.sharding import full_like_operands, tie
from jax_attn_bwd._core.slicing import put_at, take_at
from jax_attn_bwd.ops.dot_product import (
    batch_slices,
    dropping,
    layout,
    materialized,
    mod_functions,
    row_terms,
    tile_schedule,
)
from jax_attn_bwd.ops.dot_product.logits import scaled_product, soft_capped
from jax_attn_bwd.ops.dot_product.spec import Operands, Options, Result
from jax_attn_bwd.ops.dot_product.tile_operands import Working, bias_tile, positions, tile, working
from jax_attn_bwd.ops.dot_product.tiling import Tiling


class State(NamedTuple):
    """Running state of every query row."""

    acc: jax.Array  # [..., K, G, T, Hv]
    m: jax.Array  # [..., K, G, T]
    l: jax.Array  # [..., K, G, T]


def forward(options: Options, operands: Operands) -> Result:
    """The output and its row values."""
    return tiled(options, Tiling.default_for(options, operands), operands)


@partial(jax.jit, static_argnums=(0, 1))
def tiled(options: Options, tiling: Tiling, operands: Operands) -> Result:
    """`forward` cut as `tiling` says."""
    form = materialized.forward if tiling.is_materialized else _of_slice
    of_slice = lambda operands, _: (form(options, tiling, operands), ())
    result, _ = batch_slices.over_slices(of_slice, tiling.batch_slices, operands, (), ())
    return tie(result, operands)


def _of_slice(options, tiling, operands):
    w = working(options, operands, tiling)
    step = partial(_step, options, tiling, w)
    state = tile_schedule.scan_tiles(step, _initial(w, operands), options, w.conditions, tiling)

    T = operands.query.shape[-3]
    m, l, empty = state.m, state.l, None
    if w.live is not None or not isinstance(T, int) or T % tiling.block_q:
        empty = l == 0
        m, l = finite(m), jnp.where(empty, 1, l)
    log_l = jnp.log(l)
    lse = m + log_l
    lse_low = lax.stop_gradient((m - lse) + log_l)
    if empty is not None:
        lse, lse_low = jnp.where(empty, -jnp.inf, lse), jnp.where(empty, 0, lse_low)
    out = layout.merge_heads(state.acc / l[..., None])[..., :T, :, :]
    out, out_low = row_terms.in_two(options, operands, out)
    lse, lse_low = (layout.merge_rows(x)[..., :T, :] for x in (lse, lse_low))
    return Result(out, lse, lse_low, out_low)


def _initial(w: Working, operands: Operands) -> State:
    dtype = accumulator_dtype(w.q.dtype)
    *lead, H = w.q.shape
    row = full_like_operands(w.q, (*lead, 1), 0, dtype, operands)
    acc = jnp.broadcast_to(row, (*lead, w.v.shape[-1]))
    if operands.sink is None:
        return State(acc, row[..., 0] - jnp.inf, row[..., 0])
    sink = to_rank(operands.sink.astype(dtype).reshape(*w.q.shape[-4:-2], 1), row.ndim - 1)
    sink = sink + row[..., 0]
    m = lax.stop_gradient(sink)
    return State(acc, m, jnp.where(m == -jnp.inf, 0, jnp.exp(sink - finite(m))))


def _step(options, tiling, w, state, i, j, mixed, live):
    """Folds key tile j into the rows of query tile i."""
    q = (i, tiling.block_q)
    blocks = State(acc={-2: q}, m={-1: q}, l={-1: q})
    rows = State(*map(take_at, state, blocks))
    update = jax.checkpoint(partial(_update, options, tiling, w, mixed=mixed), prevent_cse=False)
    skip = lambda rows, i, j: rows
    rows = update(rows, i, j) if live is None else lax.cond(live, update, skip, rows, i, j)
    return State(*map(put_at, state, rows, blocks))


def _update(options, tiling, w, rows, i, j, *, mixed):
    q, k, v, visible = tile(options, tiling, w, i, j, mixed)
    logits = scaled_product(options, q, k, rows.l.dtype)
    logits, _ = soft_capped(options, logits)
    bias = bias_tile(w, i, j, tiling)
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)
    if options.score_mod is not None:
        places = w.conditions.places
        at = mod_functions.Tile(places.batch, places.head, *positions(tiling, w, i, j), visible)
        logits = mod_functions.scored(options, logits, at, places.args)
    if visible is not None:
        logits = jnp.where(visible, logits, -jnp.inf)
    m = lax.stop_gradient(jnp.maximum(rows.m, logits.max(-1)))
    shift = finite(m)
    decay = jnp.exp(rows.m - shift)
    p = jnp.exp(logits - shift[..., None])
    l = rows.l * decay + p.sum(-1)
    if w.counters is not None:
        p = p * dropping.of_tile(options, tiling, w.counters, i, j, p.dtype)
    pv = jnp.einsum(
        "...gts,...sh->...gth",
        p.astype(v.dtype),
        v,
        precision=options.precision,
        preferred_element_type=p.dtype,
    )
    return State(rows.acc * decay[..., None] + pv, m, l)
