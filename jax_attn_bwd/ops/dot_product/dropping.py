"""The dropout factors of the probabilities, 0 or 1 / (1 - rate), drawn again wherever they are needed."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.numerics import accumulator_dtype, to_rank
from jax_attn_bwd._core.slicing import take_at
from jax_attn_bwd.ops.dot_product import layout
from jax_attn_bwd.ops.dot_product.spec import Operands, Options
from jax_attn_bwd.ops.dot_product.tiling import Tiling


class Counters(NamedTuple):
    """What the dropout bits of an element are a function of."""

    keys: dropout.Words  # each [..., K, G]
    rows: jax.Array  # [T] uint32
    columns: jax.Array  # [S] uint32


def counters(options: Options, operands: Operands, block_q: int, block_k: int) -> Counters:
    """What the dropout bits are drawn from, rows and columns padded to whole blocks."""
    *batch, T, N, _ = operands.query.shape
    S, K, _ = operands.key.shape[-3:]
    groups = N // K
    zero = jnp.uint32(0)
    offset = operands.dropout_offset or dropout.Offset(zero, zero, zero, zero)

    def index(n, start):
        return start if start.ndim else start + jnp.arange(n, dtype=jnp.uint32)

    if options.broadcast_dropout:
        batch_index = head_index = jnp.zeros((1,) * (len(batch) + 2), jnp.uint32)
    else:
        batch_index = index(math.prod(batch), offset.batch).reshape(*batch, 1, 1)
        head_index = index(N, offset.head).reshape(N // groups, groups)
        head_index = to_rank(head_index, batch_index.ndim)
    assert operands.dropout_words is not None  # checked with the arguments
    return Counters(
        dropout.head_keys(operands.dropout_words, batch_index, head_index),
        layout.pad(index(T, offset.row), {0: block_q}),
        layout.pad(index(S, offset.column), {0: block_k}),
    )


def of_tile(options: Options, tiling: Tiling, counters: Counters, i: Any, j: Any, dtype: Any) -> jax.Array:
    """Factors of tile (i, j), `[..., K, G, block_q, block_k]`."""
    rows = take_at(counters.rows, {0: (i, tiling.block_q)})
    columns = take_at(counters.columns, {0: (j, tiling.block_k)})
    return _factors(options, counters.keys, rows, columns, dtype, drawn_once=False)


def of_columns(options: Options, operands: Operands, columns: jax.Array | None = None) -> jax.Array | None:
    """Factors of the plane `[..., K, G, T, S]`, or of other `columns [n]` (uint32); None = no dropout."""
    if options.dropout_rate == 0:
        return None
    drawn = counters(options, operands, 1, 1)
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
