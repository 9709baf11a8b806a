"""THE DEFINITION of linear attention: token by token, any dtype. Every test measures against it."""

import jax.numpy as jnp
from jax import lax


def gated_delta_rule(
    query,
    key,
    value,
    log_decay=None,
    beta=None,
    *,
    erase_key=None,
    erase_query=None,
    initial_state=None,
    scale=None,
    l2_norm_epsilon=None,
    seq_lengths=None,
    segment_ids=None,
):
    """(out, final_state) of `S' = exp(log_decay) S`, `S = S' + k u^T`, `out = scale S^T q`.

    `u = beta (v - S'^T k)`, or v without beta: linear attention; with erase_key a and erase_query b, and no
    beta, `S = S' - a (b^T S') + k v^T`.
    """
    (*batch, T, _, H), (N, Hv) = key.shape, value.shape[-2:]
    scale = (H**-0.5 if H else 1.0) if scale is None else scale
    if l2_norm_epsilon is not None:
        query, key = (
            x / jnp.sqrt((x * x).sum(-1, keepdims=True) + jnp.asarray(l2_norm_epsilon, x.dtype))
            for x in (query, key)
        )
    heads = lambda x: None if x is None else jnp.repeat(x, N // x.shape[-2], axis=-2)
    query, key, erase_key, erase_query = map(heads, (query, key, erase_key, erase_query))
    if log_decay is None:
        log_decay = jnp.zeros(N, value.dtype)
    if log_decay.ndim == 1:
        log_decay = jnp.broadcast_to(log_decay, (*batch, T, N))
    if log_decay.ndim == len(batch) + 2:
        log_decay = log_decay[..., None]
    keep, ids = jnp.ones((*batch, T), bool), jnp.zeros((*batch, T), jnp.int32)
    if seq_lengths is not None:
        keep &= jnp.arange(T) < jnp.asarray(seq_lengths)[..., None]
    if segment_ids is not None:
        ids = jnp.broadcast_to(segment_ids, (*batch, T))
    follows = jnp.concatenate([ids[..., :1] == ids[..., :1], ids[..., 1:] == ids[..., :-1]], -1)
    zeros = jnp.zeros((*batch, N, H, Hv), value.dtype)
    state = zeros if initial_state is None else initial_state.astype(value.dtype)

    def token(S, given):
        q, k, v, g, b, a, read_by, keep, follows = given
        moved = jnp.where(follows[..., None, None, None], S, 0) * jnp.exp(g)[..., None]
        u = v if b is None else b[..., None] * (v - jnp.einsum("...kv,...k->...v", moved, k))
        if a is not None:
            erased = jnp.einsum("...kv,...k->...v", moved, read_by)
            moved = moved - a[..., :, None] * erased[..., None, :]
        moved = (moved + k[..., :, None] * u[..., None, :]).astype(S.dtype)
        keep = keep[..., None, None, None]
        S, read = jnp.where(keep, moved, S), jnp.where(keep, moved, 0)
        return S, jnp.where(keep[..., 0], scale * jnp.einsum("...kv,...k->...v", read, q), 0)

    keep_tokens = keep[..., None, None]
    clean = lambda x: jnp.where(keep_tokens, x, 0)
    given = clean(query), clean(key), clean(value), clean(log_decay)
    given += (None if beta is None else clean(beta[..., None])[..., 0],)
    given += (*(None if x is None else clean(x) for x in (erase_key, erase_query)), keep, follows)
    lead = lambda x: None if x is None else jnp.moveaxis(x, len(batch), 0)
    state, out = lax.scan(token, state, tuple(map(lead, given)))
    return jnp.moveaxis(out, 0, len(batch)).astype(value.dtype), state


def gated_linear_attention(query, key, value, log_decay=None, **options):
    """`gated_delta_rule` with u = v."""
    return gated_delta_rule(query, key, value, log_decay, None, **options)


def dplr_linear_attention(query, key, value, log_decay=None, **options):
    """`gated_linear_attention` that first takes `erase_key (erase_query^T S')` from S'."""
    return gated_delta_rule(query, key, value, log_decay, None, **options)
