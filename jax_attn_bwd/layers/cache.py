"""Decoding with a cache, for layers of frameworks that have none of their own.

    keys, values of the cache at n ... n + T - 1  =  those of the T new tokens, where n are in it
    out  =  attention of the new queries to the first n + T of them, each to those up to its own

The cache holds keys before the rotation: rows that begin at different places tell positions at each call.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd._core.rotary import Rotary, checked, rotate
from jax_attn_bwd.layers.multi_head import check_room, promote, within_room
from jax_attn_bwd.ops.dot_product import dot_product_attention
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams


class KeyValueCache(NamedTuple):
    """Projected keys and values of the tokens so far, with room for L of them.

    Attributes:
      key: `[..., L, N, H]`, not turned by `rotary`.
      value: `[..., L, N, Hv]`.
      tokens: int32 `[]`, how many there are.
    """

    key: jax.Array
    value: jax.Array
    tokens: jax.Array


def decode(
    layer: str,
    params: MultiHeadAttentionParams,
    cache: KeyValueCache,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    rotary: Rotary | None = None,
    precision: Any = None,
    query_positions: jax.Array | None = None,
    key_value_positions: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    **options: Any,
) -> tuple[jax.Array, KeyValueCache]:
    """(out `[..., T, Eo]`, the cache with T tokens more); NaN where it has no room for them.

    Masks, and what is told of keys, are of the cache, `[..., L]`; a query's position is its index there
    unless it is given.
    """
    T, length = query.shape[-2], cache.key.shape[-3]
    for name, x in (("key", key), ("value", value)):
        if x.shape[-2] != T:
            expected = f"have the {T} tokens of query, which are new to the cache"
            raise ValueError(checks.message(layer, name, expected, x.shape))
    check_room(layer, length, cache.tokens, T)
    p = params
    # The new tokens are projected, and their keys and values written behind those in the cache.
    q = _heads(query, p.query_kernel, p.query_bias, precision)
    new = (
        _heads(key, p.key_kernel, p.key_bias, precision),
        _heads(value, p.value_kernel, p.value_bias, precision),
    )
    for name, x, held in zip(("key", "value"), new, cache[:2], strict=True):
        size = (*held.shape[:-3], T, *held.shape[-2:])
        if x.shape != size:
            expected = f"have heads {size}, as the cache has"
            raise ValueError(checks.message(layer, name, expected, x.shape))
    filled = KeyValueCache(
        _written(new[0], cache.key, cache.tokens),
        _written(new[1], cache.value, cache.tokens),
        jnp.asarray(cache.tokens + T, jnp.int32),
    )
    end = cache.tokens + T
    at = cache.tokens + jnp.arange(T, dtype=jnp.int32)
    # A query sees what stands in the cache up to itself.
    if query_positions is None and key_value_positions is None:
        options |= {"is_causal": True}
    elif T > 1:  # by index: positions may be told in any order
        seen = jnp.arange(length, dtype=jnp.int32)[None] <= at[:, None]
        mask = seen if mask is None else mask & to_rank(seen, mask.ndim)
    query_positions = at if query_positions is None else query_positions
    limit = end if key_value_seq_lengths is None else jnp.minimum(key_value_seq_lengths, end)
    q, *_ = promote(None, q, *new)  # a narrower cache does not narrow what is computed
    k, v = (x.astype(q.dtype) for x in filled[:2])
    if (rotary := checked(layer, rotary, q.shape[-1])) is not None:
        q = rotate(rotary, q, query_positions).astype(q.dtype)
        k = rotate(rotary, k, key_value_positions).astype(k.dtype)
    out = dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        query_positions=query_positions,
        key_value_positions=key_value_positions,
        key_value_seq_lengths=jnp.minimum(limit, length),
        precision=precision,
        **options,
    )
    # Heads are projected to the output.
    out, kernel, bias = promote(None, out, p.out_kernel, p.out_bias)
    out = jnp.einsum("...nh,nhe->...e", out, kernel, precision=precision)
    out = out if bias is None else out + to_rank(bias, out.ndim)
    return within_room(out, length, end), filled


def _heads(x: jax.Array, kernel: Any, bias: Any, precision: Any) -> jax.Array:
    """`[..., T, E]` -> `[..., T, N, H]`."""
    x, kernel, bias = promote(None, x, kernel, bias)
    heads = jnp.einsum("...e,enh->...nh", x, kernel, precision=precision)
    return heads if bias is None else heads + to_rank(bias, heads.ndim)


def _written(x: jax.Array, to: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(to, x.astype(to.dtype), index, axis=to.ndim - 3)
