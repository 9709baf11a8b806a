"""THE DEFINITION of the multi-head attention layer: whole matrices, plain jnp, any dtype.

q = R(x_q W_q + b_q),   k = [R(x_k W_k + b_k); bias_k; 0],   v = [x_v W_v + b_v; bias_v; 0]
R: pair j of features at position p as a complex number, times exp(i p base^(-2 j / size))
logits = soft_cap(scale * q k^T)   (+ bias, where visible, then score_mod, on the S columns not appended)
weights = exp(logits) / (sum exp(logits) + exp(sink))                         [..., N, T, S']
out = dropout(dropout(weights) v W_o + b_o) + x_q
"""

import jax.numpy as jnp
from jax import lax


def multi_head_attention(
    params, query, key=None, value=None, *, num_heads=None, bias=None, mask=None, scale=None,
    is_causal=False, local_window_size=None, query_seq_lengths=None, key_value_seq_lengths=None,
    query_segment_ids=None, key_value_segment_ids=None, query_positions=None, key_value_positions=None,
    logits_soft_cap=None, rotary=None, mask_mod=None, score_mod=None, mod_args=(), add_zero_attn=False,
    add_residual=False, average_weights=False, factors=1.0, out_factors=1.0,
):  # fmt: skip
    """(out, weights) of the layer; dropout: `factors` [..., N, T, S'] and `out_factors` [..., T, Eo]."""
    p = params
    key = query if key is None else key
    value = key if value is None else value

    def project(x, kernel, offset):
        if kernel is None:
            return x[..., None, :]
        y = jnp.einsum("...te,enh->...tnh", x, kernel)
        return y if offset is None else y + offset

    def turn(x, positions):  # [..., L, heads, H]
        if rotary is None:
            return x
        n = x.shape[-1] if rotary.size is None else rotary.size
        first = range(0, n, 2) if rotary.interleaved else range(n // 2)
        a, b = jnp.array(first, int), jnp.array(first, int) + (1 if rotary.interleaved else n // 2)
        frequency = jnp.array(rotary.frequencies or [rotary.base ** (-2 * j / n) for j in range(n // 2)])
        p = jnp.arange(x.shape[-3]) if positions is None else jnp.asarray(positions)
        z = (x[..., a] + 1j * x[..., b]) * jnp.exp(1j * p[..., None, None] * frequency)
        return x.at[..., a].set(z.real.astype(x.dtype)).at[..., b].set(z.imag.astype(x.dtype))

    def heads(x):  # [..., K, H] -> [..., N, H]
        return jnp.repeat(x, N // x.shape[-2], axis=-2)

    def append(x, row):
        return jnp.concatenate([x, jnp.broadcast_to(row, (*x.shape[:-3], 1, *x.shape[-2:]))], -3)

    q = project(query, p.query_kernel, p.query_bias)
    N = q.shape[-2]
    if p.query_kernel is None:
        N = num_heads if p.out_kernel is None else p.out_kernel.shape[0]
    q = heads(turn(q, query_positions))
    k = heads(turn(project(key, p.key_kernel, p.key_bias), key_value_positions))
    v = heads(project(value, p.value_kernel, p.value_bias))
    (T, H), S = (q.shape[-3], q.shape[-1]), k.shape[-3]
    if p.bias_k is not None:
        k, v = append(k, heads(p.bias_k)), append(v, heads(p.bias_v))
    if add_zero_attn:
        k, v = append(k, jnp.zeros((), k.dtype)), append(v, jnp.zeros((), v.dtype))
    logits = (H**-0.5 if scale is None else scale) * jnp.einsum("...tnh,...snh->...nts", q, k)
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)

    def tokens(x, n):  # [...], [..., n] -> broadcasts to [..., N, T, S] as rows; columns drop the last None
        return (jnp.arange(n) if x is None else jnp.asarray(x))[..., None, :, None]

    row, column = tokens(None, T), tokens(None, S).swapaxes(-1, -2)
    q_at, k_at = tokens(query_positions, T), tokens(key_value_positions, S).swapaxes(-1, -2)
    visible = jnp.ones((*logits.shape[:-1], S), bool)
    if mask is not None:
        visible &= mask
    if bias is not None:
        visible &= bias != -jnp.inf
        logits = logits.at[..., :S].add(jnp.where(bias != -jnp.inf, bias, 0).astype(logits.dtype))
    entries = logits.shape[:-3]
    batch = jnp.arange(jnp.zeros(entries).size).reshape(*entries, 1, 1, 1)
    at = (batch, jnp.arange(N)[:, None, None], q_at, k_at)
    if score_mod is not None:
        logits = logits.at[..., :S].set(score_mod(logits[..., :S], *at, *mod_args))
    if mask_mod is not None:
        visible &= mask_mod(*at, *mod_args)
    if is_causal:
        visible &= k_at <= q_at
    if local_window_size is not None:
        left, right = jnp.broadcast_to(jnp.asarray(local_window_size), (2,))
        visible &= (q_at - k_at <= left) & (k_at - q_at <= right)
    if query_seq_lengths is not None:
        visible &= row < jnp.asarray(query_seq_lengths)[..., None, None, None]
    if key_value_seq_lengths is not None:
        visible &= column < jnp.asarray(key_value_seq_lengths)[..., None, None, None]
    if query_segment_ids is not None:
        visible &= tokens(query_segment_ids, T) == tokens(key_value_segment_ids, S).swapaxes(-1, -2)
    appended = jnp.ones((*visible.shape[:-1], k.shape[-3] - S), bool)
    terms = jnp.where(jnp.concatenate([visible, appended], -1), logits, -jnp.inf)
    if p.sink is not None:
        sink = jnp.broadcast_to(p.sink[:, None, None], (*terms.shape[:-1], 1))
        terms = jnp.concatenate([terms, sink.astype(terms.dtype)], -1)
    top = lax.stop_gradient(terms.max(-1, keepdims=True, initial=-jnp.inf))  # nothing depends on it
    terms = jnp.exp(terms - jnp.where(jnp.isfinite(top), top, 0))
    total = terms.sum(-1, keepdims=True)
    weights = terms[..., : logits.shape[-1]] / jnp.where(total == 0, 1, total)

    out = jnp.einsum("...nts,...snh->...tnh", weights * factors, v)
    if p.out_kernel is None:
        out = out.reshape(*out.shape[:-2], -1)
    else:
        out = jnp.einsum("...tnh,nho->...to", out, p.out_kernel)
        out = out if p.out_bias is None else out + p.out_bias
    out = out * out_factors + (query if add_residual else 0)
    return out, weights.mean(-3) if average_weights else weights
