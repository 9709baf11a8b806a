"""Portable forward of dense attention: one pass over the tiles with an online softmax.

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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.blocks import put_at, take_at
from jax_attn_bwd._core.numerics import accumulator_dtype, to_rank
from jax_attn_bwd._core.sharding import full_like_operands, tie
from jax_attn_bwd.ops.dot_product import layout, parts, tiles
from jax_attn_bwd.ops.dot_product.layout import Working
from jax_attn_bwd.ops.dot_product.spec import Operands, Options, Result
from jax_attn_bwd.ops.dot_product.tiling import Tiling


class State(NamedTuple):
    """Running state of every query row."""

    acc: jax.Array  # [..., K, G, T, Hv]
    m: jax.Array  # [..., K, G, T]
    l: jax.Array  # [..., K, G, T]


def forward(options: Options, operands: Operands) -> Result:
    """The output and its row values."""
    return _forward(options, Tiling.default_for(options, operands), operands)


@partial(jax.jit, static_argnums=(0, 1))
def _forward(options, tiling, operands):
    part = lambda operands, _: (_of_part(options, tiling, operands), ())  # noqa: E731
    result, _ = parts.over_parts(part, tiling.parts, operands, (), ())
    return tie(result, operands)


def _of_part(options, tiling, operands):
    w = layout.working(options, operands, tiling)
    step = partial(_step, options, tiling, w)
    state = tiles.scan_tiles(step, _initial(w, operands), options, w, tiling)

    empty = state.l == 0
    l = jnp.where(empty, 1, state.l)
    m, log_l = _finite(state.m), jnp.log(l)
    lse = jnp.where(empty, -jnp.inf, m + log_l)
    lse_low = lax.stop_gradient(jnp.where(empty, 0, (m - lse) + log_l))
    T = operands.query.shape[-3]
    out = layout.merge_heads(state.acc / l[..., None])[..., :T, :, :].astype(operands.query.dtype)
    lse, lse_low = (layout.merge_rows(x)[..., :T, :] for x in (lse, lse_low))
    return Result(out, lse, lse_low)


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
    return State(acc, m, jnp.where(m == -jnp.inf, 0, jnp.exp(sink - _finite(m))))


def _step(options, tiling, w, state, i, j, mixed, live):
    """Folds key tile j into the rows of query tile i."""
    q = (i, tiling.block_q)
    blocks = State(acc={-2: q}, m={-1: q}, l={-1: q})
    rows = State(*map(take_at, state, blocks))
    update = jax.checkpoint(partial(_update, options, tiling, w, mixed=mixed), prevent_cse=False)
    skip = lambda rows, i, j: rows  # noqa: E731
    rows = update(rows, i, j) if live is None else lax.cond(live, update, skip, rows, i, j)
    return State(*map(put_at, state, rows, blocks))


def _update(options, tiling, w, rows, i, j, *, mixed):
    q, k, v, visible = unpoisoned_tile(options, tiling, w, i, j, mixed)
    logits = scaled_product(options, q, k, rows.l.dtype)
    logits, _ = soft_capped(options, logits)
    bias = tiles.take_plane(w.bias, i, j, tiling)
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)
    if visible is not None:
        logits = jnp.where(visible, logits, -jnp.inf)
    m = lax.stop_gradient(jnp.maximum(rows.m, logits.max(-1)))
    shift = _finite(m)
    decay = jnp.exp(rows.m - shift)
    p = jnp.exp(logits - shift[..., None])
    l = rows.l * decay + p.sum(-1)
    if w.counters is not None:
        p = p * keep_factors(options, tiling, w.counters, i, j, p.dtype)
    pv = jnp.einsum(
        "...gts,...sh->...gth", p.astype(v.dtype), v,
        precision=options.precision, preferred_element_type=p.dtype,
    )  # fmt: skip
    return State(rows.acc * decay[..., None] + pv, m, l)


def _finite(m: jax.Array) -> jax.Array:
    """`m`, with 0 for the -inf of a row that has seen nothing, so that exp(-inf - m) is 0, not NaN."""
    return jnp.where(m == -jnp.inf, 0, m)


def unpoisoned_tile(options: Options, tiling: Tiling, w: Working, i: Any, j: Any, mixed: bool):
    """(q, k, v, visible) of tile (i, j); rows that see nothing in it and columns that nothing sees are 0."""
    q = tiles.take(w.q, i, tiling.block_q, -2).astype(tiling.product_dtype)
    k, v = (tiles.take(x, j, tiling.block_k, -2).astype(tiling.product_dtype) for x in (w.k, w.v))
    visible = tiles.visible(options, w, i, j, mixed, tiling)
    if visible is None:
        return q, k, v, None
    q = jnp.where(row_live(visible)[..., None], q, 0)
    seen = visible.any((-3, -2))[..., None]
    return q, jnp.where(seen, k, 0), jnp.where(seen, v, 0), visible


def row_live(visible: jax.Array) -> jax.Array:
    """Which rows of a tile see something in it, `[..., K|1, G|1, block_q]`."""
    return visible.any(-1)


def scaled_product(
    options: Options, q: jax.Array, k: jax.Array, dtype: Any, transposed: bool = False
) -> jax.Array:
    """Scale * q k^T of a tile, `[..., K, G, T, S]`, or transposed `[..., K, S, G, T]`.

    Wide factors: the scale goes into q. Then the logits are bare sums of products, the same bits in the
    forward and in the backward, and exp(logits - lse) is exact where one logit of 1e5 takes all. (Where
    it multiplies the logits, compilers contract it with the subtraction, and round differently.)
    """
    in_q = q.dtype == dtype
    q = q * options.scale if in_q else q
    *lead, G, T, H = q.shape
    q, S = q.reshape(*lead, G * T, H), k.shape[-2]
    # XLA:CPU of JAX 0.10 sums in an order that depends on the width of the second factor, so where that
    # may differ the product is taken as in the forward, and transposed afterwards.
    swap = transposed and all(isinstance(n, int) and n % 64 == 0 for n in (G * T, S))
    factors = (k, q) if swap else (q, k)
    logits = jnp.einsum(
        "...ah,...bh->...ab", *factors, precision=options.precision, preferred_element_type=dtype
    )
    logits = logits.reshape(*lead, *((S, G, T) if swap else (G, T, S)))
    if transposed and not swap:
        logits = jnp.moveaxis(logits, -1, -3)
    return logits if in_q else options.scale * logits


def soft_capped(options: Options, logits: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """(soft_cap(logits), its tanh)."""
    if options.logits_soft_cap is None:
        return logits, None
    tanh = jnp.tanh(logits / options.logits_soft_cap)
    return options.logits_soft_cap * tanh, tanh


def keep_factors(
    options: Options, tiling: Tiling, counters: layout.Counters, i: Any, j: Any, dtype: Any
) -> jax.Array:
    """0 for the dropped probabilities of tile (i, j), 1 / (1 - rate) for the others."""
    first, second = (x[..., None, None] for x in counters.keys)
    row = to_rank(tiles.take(counters.rows, i, tiling.block_q, 0)[:, None], first.ndim)
    column = to_rank(tiles.take(counters.columns, j, tiling.block_k, 0), first.ndim)
    keep = dropout.keep((first, second), row, column, options.dropout_rate)
    return jnp.where(keep, jnp.asarray(dropout.survivor_factor(options.dropout_rate), dtype), 0)
