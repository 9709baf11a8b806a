"""The layer's dropout factors, 0 or 1 / (1 - rate), drawn again wherever they are needed."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd.ops.dot_product import engine
from jax_attn_bwd.ops.dot_product import spec as dot_product
from jax_attn_bwd.ops.multi_head.spec import Operands, Options

OUT = (0x6F757470, 0x75740000)  # tells the output's draws from those of the probabilities


def of_rows(options: Options, operands: Operands, inner: dot_product.Operands, R: int) -> jax.Array | None:
    """Factors of the probabilities of the R columns appended after the keys, `[..., K, G, T, R]`."""
    S, offset = inner.key.shape[-3], operands.dropout_offset
    column = jnp.arange(R, dtype=jnp.uint32) + jnp.asarray(S, jnp.uint32)
    if offset is not None:
        column = offset.column[S:] if offset.column.ndim else offset.column + column
    return engine.dropout_factors(options.attention, inner, column)


def of_output(rate: float, words: Any, offset: dropout.Offset | None, out: jax.Array) -> jax.Array | None:
    """Factors of the layer's output, `[..., T, Eo]`, as of its `out`; None if `rate` is 0."""
    if rate == 0:
        return None
    *batch, T, Eo = out.shape
    constant = (jnp.uint32(OUT[0]), jnp.uint32(OUT[1]))
    words = jnp.stack(dropout.threefry((words[0], words[1]), constant))
    zero = jnp.uint32(0)
    offset = offset or dropout.Offset(zero, zero, zero, zero)
    index = partial(jnp.arange, dtype=jnp.uint32)
    entry = index(math.prod(batch)).reshape(*batch, 1, 1) + offset.batch
    row = offset.row if offset.row.ndim else offset.row + index(T)
    row, column = to_rank(row[:, None], out.ndim), to_rank(index(Eo), out.ndim)
    return dropout.factors(dropout.head_keys(words, entry, zero), row, column, rate, out.dtype)
