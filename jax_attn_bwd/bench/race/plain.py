"""Plain formulas, as one writes them with `jax.numpy` for JAX to differentiate; `peers` has more of them."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core.cases import keep_mask
from jax_attn_bwd.mods import alibi_slopes

RATE = 0.1  # of dropout


def softmax(
    x: jax.Array, where: jax.Array | None = None, sink: jax.Array | None = None, axis: int = -1
) -> jax.Array:
    """Computes a softmax over `axis`; `sink` broadcasts to `x` and is one more logit of each row."""
    if sink is None:
        return jax.nn.softmax(x, axis, where=where)
    x = x if where is None else jnp.where(where, x, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.maximum(x.max(axis, keepdims=True), sink))
    p = jnp.exp(x - top)
    return p / (p.sum(axis, keepdims=True) + jnp.exp(sink - top))


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    soft_cap: float | None = None,
    sink: jax.Array | None = None,
    dropout: Callable[[jax.Array], jax.Array] | None = None,
    **seen: Any,
) -> jax.Array:
    """Attends by `jax.nn`, or by its formula where that has no such option; `seen` are options of `jax.nn`.

    `dropout` makes of the probabilities `[B, N, T, S]` what is left of them.
    """
    if soft_cap is None and sink is None and dropout is None:
        return jax.nn.dot_product_attention(query, key, value, bias, mask, **seen)
    (B, T, N, H), (S, K) = query.shape, key.shape[1:3]
    # logits in float32, by groups of heads that read the same keys
    query = query.reshape(B, T, K, N // K, H)
    logits = jnp.einsum("btkgh,bskh->bkgts", query, key, preferred_element_type=jnp.float32)
    logits = logits.reshape(B, N, T, S) * H**-0.5
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    if bias is not None:
        logits = logits + bias
    # probabilities of what is seen, and the means of the values
    sink = None if sink is None else sink.astype(jnp.float32)[:, None, None]
    p = softmax(logits, visible(T, S, mask, **seen), sink)
    p = p if dropout is None else dropout(p)
    p = p.astype(value.dtype).reshape(B, K, N // K, T, S)
    return jnp.einsum("bkgts,bskh->btkgh", p, value).reshape(B, T, N, -1)


def visible(
    T: int,
    S: int,
    mask: jax.Array | None,
    is_causal: bool = False,
    local_window_size: tuple[int, int] | None = None,
    key_value_seq_lengths: jax.Array | None = None,
) -> jax.Array | None:
    """Makes one mask that broadcasts to `[..., T, S]` of all that hides; lengths are of `[B, N, T, S]`."""
    row, column = _places(T, S)
    found = [] if mask is None else [mask]
    if is_causal:
        found.append(column <= row)
    if local_window_size is not None:
        left, right = local_window_size
        found.append((column >= row - left) & (column <= row + right))
    if key_value_seq_lengths is not None:
        found.append((column < key_value_seq_lengths[:, None])[:, None, None])
    return reduce(jnp.logical_and, found) if found else None


def _places(T: int, S: int) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers of rows `[T, 1]` and of columns `[S]`."""
    return jnp.arange(T, dtype=jnp.int32)[:, None], jnp.arange(S, dtype=jnp.int32)


def dropout(words: jax.Array, p: jax.Array) -> jax.Array:
    """Drops some of `p` by random numbers of JAX, whose key is two `words`."""
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return _dropped(jax.random.bernoulli(key, 1 - RATE, p.shape), p)


def our_dropout(words: jax.Array, p: jax.Array) -> jax.Array:
    """Drops those of `p [..., N, T, S]` that ours drops by the same key."""
    *batch, N, T, S = p.shape
    return _dropped(keep_mask(words, RATE, (*batch,), (N, T, S)), p)


def _dropped(keep: jax.Array, p: jax.Array) -> jax.Array:
    return jnp.where(keep, p / (1 - RATE), 0)


def segments(ids: jax.Array) -> jax.Array:
    """Makes the mask of tokens `[B, T]` that see their own segment."""
    return (ids[:, :, None] == ids[:, None])[:, None]


def prefix(T: int, S: int, length: int) -> jax.Array:
    """Makes a causal mask, of which all see a prefix."""
    row, column = _places(T, S)
    return ((column <= row) | (column < length))[None, None]


def relative_bias(T: int, S: int, table: jax.Array) -> jax.Array:
    """Makes a bias of the entries of `table [N, 2 * farthest + 1]` at distances between columns and rows.

    Float32, as its gradient sums many terms.
    """
    (row, column), farthest = _places(T, S), table.shape[1] // 2
    return table.astype(jnp.float32)[:, jnp.clip(column - row, -farthest, farthest) + farthest][None]


def alibi(T: int, S: int, N: int) -> jax.Array:
    """Makes the bias of ALiBi."""
    row, column = _places(T, S)
    return -alibi_slopes(N)[:, None, None] * abs(column - row).astype(jnp.float32)[None, None]


def rotary(x: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Turns the two halves of each head of `x [B, T, N, H]` by its position."""
    T, half = x.shape[1], x.shape[-1] // 2
    angles = jnp.arange(T)[:, None] * base ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))  # [T, 1, half]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)
