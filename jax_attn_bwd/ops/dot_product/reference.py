"""THE DEFINITION of dense attention: whole matrices, plain jnp, any dtype. Every test measures against it.

logits = score_mod(soft_cap(scale * q k^T) + bias)                       [..., N, T, S]
probs  = exp(logits) / exp(lse) where visible, 0 elsewhere;   lse = log(sum exp(logits) + exp(sink))
out    = dropout(probs) v                                                [..., T, N, Hv]
"""

import jax.numpy as jnp
from jax import lax


def dot_product_attention(
    query, key, value, bias=None, mask=None, *, scale=None, is_causal=False, query_seq_lengths=None,
    key_value_seq_lengths=None, local_window_size=None, query_segment_ids=None,
    key_value_segment_ids=None, query_positions=None, key_value_positions=None, logits_soft_cap=None,
    sink=None, mask_mod=None, score_mod=None, mod_args=(), keep=None, keep_factor=1.0,
):  # fmt: skip
    """(out, lse) of `jax_attn_bwd.dot_product_attention`; `keep` is the dropout mask `[..., N, T, S]`."""
    (T, N, H), (S, K) = query.shape[-3:], key.shape[-3:-1]
    key, value = (jnp.repeat(x, N // K, axis=-2) for x in (key, value))
    scale = H**-0.5 if scale is None else scale
    logits = scale * jnp.einsum("...tnh,...snh->...nts", query, key)
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)

    def tokens(x, n):  # [...], [..., n] -> broadcasts to [..., N, T, S] as rows; columns drop the last None
        return (jnp.arange(n) if x is None else jnp.asarray(x))[..., None, :, None]

    row, column = tokens(None, T), tokens(None, S).swapaxes(-1, -2)
    q_at, k_at = tokens(query_positions, T), tokens(key_value_positions, S).swapaxes(-1, -2)
    visible = jnp.ones(logits.shape, bool)
    if mask is not None:
        visible &= mask
    if bias is not None:
        logits, visible = logits + bias, visible & (bias != -jnp.inf)
    if is_causal:
        visible &= k_at <= q_at
    if local_window_size is not None:
        left, right = jnp.broadcast_to(jnp.asarray(local_window_size), (2,))
        visible &= (q_at - k_at <= left) & (k_at - q_at <= right)
    if query_seq_lengths is not None:
        visible &= row < jnp.asarray(query_seq_lengths)[..., None, None, None]
    if key_value_seq_lengths is not None:
        visible &= column < jnp.asarray(key_value_seq_lengths)[..., None, None, None]
    if query_segment_ids is not None or key_value_segment_ids is not None:
        visible &= tokens(query_segment_ids, T) == tokens(key_value_segment_ids, S).swapaxes(-1, -2)

    entries = logits.shape[:-3]
    batch = jnp.arange(jnp.zeros(entries).size).reshape(*entries, 1, 1, 1)
    at = (batch, jnp.arange(N)[:, None, None], q_at, k_at)
    if mask_mod is not None:
        visible &= mask_mod(*at, *mod_args)
    if score_mod is not None:
        logits = score_mod(logits, *at, *mod_args)
    terms = jnp.where(visible, logits, -jnp.inf)
    if sink is not None:
        column_of_sink = jnp.broadcast_to(sink[:, None, None], (*terms.shape[:-1], 1))
        terms = jnp.concatenate([terms, column_of_sink.astype(terms.dtype)], -1)
    top = lax.stop_gradient(terms.max(-1, keepdims=True, initial=-jnp.inf))  # nothing depends on it
    top = jnp.where(jnp.isfinite(top), top, 0)
    total = jnp.exp(terms - top).sum(-1, keepdims=True)
    empty = total == 0
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1, total)))
    probs = jnp.where(visible, jnp.exp(terms[..., :S] - top) / jnp.where(empty, 1, total), 0)
    if keep is not None:
        probs = jnp.where(keep, probs * keep_factor, 0)
    out = jnp.einsum("...nts,...snh->...tnh", probs, value)
    return out, lse[..., 0].swapaxes(-1, -2)
