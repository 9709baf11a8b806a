"""Dropout keys: typed, raw, long, folded; none has a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from ops.dot_product.dropped import RATE, assert_uncorrelated, keep_mask, operands

from jax_attn_bwd import dot_product_attention


def test_typed_and_raw_key_of_one_seed_give_the_same_mask():
    typed = keep_mask(jax.random.key(5))
    np.testing.assert_array_equal(keep_mask(jax.random.PRNGKey(5)), typed)
    np.testing.assert_array_equal(keep_mask(np.array([0, 5], np.uint32)), typed)
    assert (keep_mask(jax.random.key(6)) != typed).any()


@pytest.mark.parametrize("kind", [pytest.param("threefry2x32", marks=thorough), "rbg", "unsafe_rbg"])
def test_every_key_type_raw_and_typed_eager_and_jitted(kind):
    key = jax.random.key(3, impl=kind)
    typed = keep_mask(key)
    assert 0 < typed.mean() < 1
    np.testing.assert_array_equal(keep_mask(jax.random.key_data(key)), typed)
    query, keys, value = operands(np.random.default_rng(0))

    def attend(key):
        return dot_product_attention(query, keys, value, dropout_rate=RATE, dropout_key=key)

    assert_close(jax.jit(attend)(key), attend(key), 1e-13)


def test_every_word_of_a_long_key_counts():
    words = np.array([1, 2, 3, 4], np.uint32)
    base = keep_mask(words)
    for i in range(4):
        other = words.copy()
        other[i] += 1
        assert (keep_mask(other) != base).any(), i


@thorough
def test_a_folded_key_gives_an_independent_mask():
    key = jax.random.key(0)
    a, b = (keep_mask(jax.random.fold_in(key, i), rows=61, columns=67) for i in range(2))
    assert_uncorrelated(a, b)


def test_no_gradient_and_no_tangent_for_the_key(rng):
    """The key is an argument of the differentiated function here, not a constant."""
    query, keys, value = operands(rng)

    def form(query, key):
        out = dot_product_attention(query, keys, value, dropout_rate=RATE, dropout_key=key)
        return jnp.vdot(out, np.linspace(-1.0, 1.0, out.size).reshape(out.shape))

    got = jax.jit(jax.grad(form))(query, jax.random.key(0))
    assert_close(got, jax.grad(form)(query, jax.random.PRNGKey(0)), 1e-13)
