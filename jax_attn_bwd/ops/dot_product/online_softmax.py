"""The online softmax: keys arrive in blocks, and each row keeps the maximum and the sums so far.

With m the greatest logit of a row so far, over blocks in any order:

    m'   = max(m, max_s logits_s)
    l'   = l   exp(m - m') + sum_s exp(logits_s - m')
    acc' = acc exp(m - m') + sum_s exp(logits_s - m') v_s
    at the end   out = acc / l,   lse = m + log l

A block is a tile of keys, the keys of a device of a ring, or the rows that the layer appends; one whose
attention (out, lse) is known counts as a single logit lse with the value out. A sink is one more logit
without a value: it starts the row at m = sink, l = 1.

Where all logits of a row are huge and alike (-1e9 as a mask), lse is m, so its rounding, of which
`_core/numerics.py` tells, is kept beside it: the backward needs exp(logits - lse) to be exact.

References:
  Milakov and Gimelshein, Online normalizer calculation for softmax, 2018, arXiv:1805.02867.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core.numerics import accumulator_dtype, fast_two_sum, finite, to_rank
from jax_attn_bwd._core.sharding import full_like_operands


class State(NamedTuple):
    """The sums that every query row keeps; the axes in front are the caller's."""

    acc: jax.Array  # [..., Hv]
    m: jax.Array  # [...]
    l: jax.Array  # [...]


def initial(like: jax.Array, width: Any, sink: jax.Array | None, operands: Any) -> State:
    """Returns the state before any key, for queries `like [..., H]`; `sink` broadcasts to `[...]`."""
    dtype = accumulator_dtype(like.dtype)
    zero = full_like_operands(like, (*like.shape[:-1], 1), 0, dtype, operands)
    acc, row = jnp.broadcast_to(zero, (*like.shape[:-1], width)), zero[..., 0]
    if sink is None:
        return State(acc, row - jnp.inf, row)
    sink = to_rank(sink.astype(dtype), row.ndim) + row
    m = lax.stop_gradient(sink)
    return State(acc, m, jnp.where(m == -jnp.inf, 0, jnp.exp(sink - finite(m))))


def weights(m: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (m', the factor of the sums so far, exp(logits - m')) for logits `[..., keys]`."""
    greatest = lax.stop_gradient(jnp.maximum(m, logits.max(-1)))
    shift = finite(greatest)
    return greatest, jnp.exp(m - shift), jnp.exp(logits - shift[..., None])


def merged(state: State, out: jax.Array, lse: jax.Array, rounding: Any) -> State:
    """Adds keys whose attention is (out, lse) to the state: together they weigh as one logit lse."""
    m = lax.stop_gradient(jnp.maximum(state.m, lse))
    shift = finite(m)
    decay, factor = jnp.exp(state.m - shift), jnp.exp((lse - shift) + (0 if rounding is None else rounding))
    return State(state.acc * decay[..., None] + factor[..., None] * out, m, state.l * decay + factor)


def finished(state: State, may_be_empty: bool = True) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (out, lse, lse_rounding); a row without a key, where there may be one, gives 0, -inf, 0."""
    if not may_be_empty:
        return state.acc / state.l[..., None], *fast_two_sum(state.m, jnp.log(state.l))
    _, l, lse, rounding = of_rows(state.m, state.l)
    return state.acc / l[..., None], lse, rounding


def of_rows(m: jax.Array, l: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns (m, l, lse, lse_rounding); of a row without a key 0, 1, -inf, 0."""
    empty = l == 0
    m, l = finite(m), jnp.where(empty, 1, l)
    lse, rounding = fast_two_sum(m, jnp.log(l))
    return m, l, jnp.where(empty, -jnp.inf, lse), jnp.where(empty, 0, rounding)
