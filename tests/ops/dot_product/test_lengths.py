"""Lengths and positions: by index, without batch axes, traced out of range."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from helpers import assert_close, thorough

from jax_attn_bwd import dot_product_attention


def normal(*shape, seed=0, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@thorough
def test_bottom_right_alignment_by_positions():
    """A cache: the last query sees all keys."""
    q, k = normal(1, 3, 2, 4), normal(1, 8, 2, 4, seed=1)
    got = dot_product_attention(q, k, k, is_causal=True, query_positions=jnp.arange(5, 8))
    mask = np.tri(3, 8, 5, dtype=bool)[None, None]
    assert_close(got, dot_product_attention(q, k, k, mask=jnp.asarray(mask)), 1e-14)


def test_lengths_are_counted_by_index_not_by_position():
    q, k = normal(1, 3, 2, 4), normal(1, 8, 2, 4, seed=1)
    reversed_positions = jnp.arange(8)[::-1]
    got = dot_product_attention(
        q, k, k, key_value_positions=reversed_positions, key_value_seq_lengths=jnp.asarray([5])
    )
    assert_close(got, dot_product_attention(q, k[:, :5], k[:, :5]), 1e-14)


def test_traced_lengths_out_of_range_hide_nothing_or_all(rng):
    """Known ones are an error (test_errors.py)."""
    q, k, v = (jnp.asarray(rng.standard_normal((2, n, 2, 4))) for n in (3, 5, 5))
    attend = jax.jit(lambda n: dot_product_attention(q, k, v, key_value_seq_lengths=n))
    got = attend(jnp.asarray([9, -2]))
    assert_close(got[0], dot_product_attention(q, k, v)[0], 1e-14)
    assert not got[1].any()


@thorough
def test_lengths_without_batch_axes(rng):
    q, k, v, ct = (jnp.asarray(rng.standard_normal((3, 5, 2, 4))) for _ in range(4))
    lengths = jnp.asarray([5, 0, 3])
    one = jax.grad(
        lambda q, k, v, n, ct: jnp.vdot(dot_product_attention(q, k, v, key_value_seq_lengths=n), ct),
        (0, 1, 2),
    )
    together = jax.grad(
        lambda q, k, v: jnp.vdot(dot_product_attention(q, k, v, key_value_seq_lengths=lengths), ct), (0, 1, 2)
    )
    for got, expected in zip(jax.vmap(one)(q, k, v, lengths, ct), together(q, k, v), strict=True):
        assert_close(got, expected, 1e-13)
    for x, y in zip(one(q[2], k[2], v[2], 3, ct[2]), together(q, k, v), strict=True):
        assert_close(x, y[2], 1e-13)


def test_no_batch_entries_with_segments_and_positions():
    x, index = jnp.ones((0, 8, 2, 4)), jnp.zeros((0, 8), jnp.int32)
    tokens = {"query_segment_ids": index, "key_value_segment_ids": index}
    tokens |= {"query_positions": index, "key_value_positions": index}
    grad = jax.grad(lambda x: dot_product_attention(x, x, x, **tokens).sum())(x)
    assert grad.shape == x.shape
