"""Scaled products, the soft cap and dropout: what a tile, a strip and the whole plane have in common.

(1) of `backward.py` tells what the logits are made of, in the forward and in the backward alike. The dropout
factors of the probabilities, 0 or 1 / (1 - rate), are drawn again wherever they are needed.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.numerics import accumulator_dtype, to_rank
from jax_attn_bwd.ops.dot_product import layout
from jax_attn_bwd.ops.dot_product.layout import take_at
from jax_attn_bwd.ops.dot_product.plan import Tiles
from jax_attn_bwd.ops.dot_product.spec import Operands, Options


def scaled_product(
    options: Options, q: jax.Array, k: jax.Array, dtype: Any, transposed: bool = False
) -> jax.Array:
    """Computes scale * q k^T of a tile, `[..., K, G, T, S]`, or transposed `[..., K, S, G, T]`.

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
    """Returns (soft_cap(logits), its tanh)."""
    if options.logits_soft_cap is None:
        return logits, None
    tanh = jnp.tanh(logits / options.logits_soft_cap)
    return options.logits_soft_cap * tanh, tanh


class DropoutCounters(NamedTuple):
    """Counters that the dropout bits of an element are a function of."""

    keys: dropout.Words  # each [..., K, G]
    rows: jax.Array  # [T] uint32
    columns: jax.Array  # [S] uint32


def dropout_counters(options: Options, operands: Operands, block_q: int, block_k: int) -> DropoutCounters:
    """Counts what dropout bits are drawn from, rows and columns padded to whole blocks."""
    # Where the call's block begins; an index may be an array already.
    batch, T, S, K, groups = operands.sizes
    zero = jnp.uint32(0)
    offset = operands.dropout_offset or dropout.Offset(zero, zero, zero, zero)

    def index(n, start):
        return start if start.ndim else start + jnp.arange(n, dtype=jnp.uint32)

    # A key for each batch entry and head [..., K, G], or one for all.
    if options.broadcast_dropout:
        batch_index = head_index = jnp.zeros((1,) * (len(batch) + 2), jnp.uint32)
    else:
        batch_index = index(math.prod(batch), offset.batch).reshape(*batch, 1, 1)
        head_index = index(K * groups, offset.head).reshape(K, groups)
        head_index = to_rank(head_index, batch_index.ndim)
    assert operands.dropout_words is not None  # checked with the arguments
    return DropoutCounters(
        dropout.head_keys(operands.dropout_words, batch_index, head_index),
        layout.pad(index(T, offset.row), {0: block_q}),
        layout.pad(index(S, offset.column), {0: block_k}),
    )


def dropout_of_tile(
    options: Options, schedule: Tiles, counters: DropoutCounters, i: Any, j: Any, dtype: Any
) -> jax.Array:
    """Returns the factors of tile (i, j), `[..., K, G, block_q, block_k]`."""
    rows = take_at(counters.rows, {0: (i, schedule.block_q)})
    columns = take_at(counters.columns, {0: (j, schedule.block_k)})
    return _factors(options, counters.keys, rows, columns, dtype, drawn_once=False)


def dropout_factors(
    options: Options, operands: Operands, columns: jax.Array | None = None
) -> jax.Array | None:
    """Returns the factors of the plane `[..., K, G, T, S]`, or of other `columns [n]` (uint32).

    None = no dropout.
    """
    if options.dropout_rate == 0:
        return None
    drawn = dropout_counters(options, operands, 1, 1)
    columns = drawn.columns if columns is None else columns
    dtype = accumulator_dtype(operands.query.dtype)
    return _factors(options, drawn.keys, drawn.rows, columns, dtype, drawn_once=True)


def _factors(
    options: Options,
    keys: dropout.Words,
    rows: jax.Array,
    columns: jax.Array,
    dtype: Any,
    *,
    drawn_once: bool,
) -> jax.Array:
    first, second = (x[..., None, None] for x in keys)
    rows, columns = to_rank(rows[:, None], first.ndim), to_rank(columns, first.ndim)
    return dropout.factors((first, second), rows, columns, options.dropout_rate, dtype, drawn_once)
