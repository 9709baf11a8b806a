"""The mask that a call drops by, read off its output, for the tests of dropout beside this file."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import assert_close

from jax_attn_bwd import dot_product_attention

RATE = 0.3


def keep_mask(key, *, batch=2, heads=3, rows=5, columns=7, rate=RATE, **options):
    """The mask `[B, N, T, S]`: equal probabilities, and the identity for a value."""
    query = jnp.zeros((batch, rows, heads, 1), jnp.float32)
    keys = jnp.zeros((batch, columns, 1, 1), jnp.float32)
    value = jnp.broadcast_to(jnp.eye(columns, dtype=jnp.float32), (batch, columns, columns))
    out = dot_product_attention(query, keys, value[:, :, None], dropout_rate=rate, dropout_key=key, **options)
    factors = np.asarray(out.transpose(0, 2, 1, 3)) * columns
    keep = factors > 0
    assert_close(factors, np.where(keep, 1 / (1 - rate), 0), 1e-5)  # inverted, nothing between
    return keep


def operands(rng, batch=2, heads=4, key_heads=2, rows=5, columns=7, size=6, dtype=np.float64):
    return (
        rng.standard_normal((batch, rows, heads, size)).astype(dtype),
        rng.standard_normal((batch, columns, key_heads, size)).astype(dtype),
        rng.standard_normal((batch, columns, key_heads, 3)).astype(dtype),
    )


def assert_uncorrelated(a, b, rate=RATE):
    """The sample covariance of two masks within 5 of its standard deviations."""
    variance = rate * (1 - rate)
    covariance = ((a - (1 - rate)) * (b - (1 - rate))).mean()
    assert abs(covariance) < 5 * variance / np.sqrt(a.size)


def explicit(query, key, value, keep, rate):
    """Attention with a mask that is handed over, for grouped heads."""
    groups = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, groups, 2), jnp.repeat(value, groups, 2)
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[-1])
    p = jax.nn.softmax(logits) * keep / (1 - rate)
    return jnp.einsum("bnts,bsnh->btnh", p, value)
