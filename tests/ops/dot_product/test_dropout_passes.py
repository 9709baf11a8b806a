"""The dropout mask of the forward is that of the backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from ops.dot_product.dropped import RATE, explicit, keep_mask, operands

from jax_attn_bwd import dot_product_attention


@thorough
def test_forward_and_backward_use_the_same_mask():
    """dvalue with the identity as cotangent is the mask that the backward applied."""
    batch, rows, columns, heads = 2, 5, 7, 3
    key = jax.random.key(8)
    query = jnp.zeros((batch, rows, heads, 1))
    keys = jnp.zeros((batch, columns, heads, 1))
    value = jnp.zeros((batch, columns, heads, rows))
    _, pullback = jax.vjp(
        lambda v: dot_product_attention(query, keys, v, dropout_rate=RATE, dropout_key=key), value
    )
    identity = jnp.broadcast_to(jnp.eye(rows)[:, None], (batch, rows, heads, rows))
    dvalue = pullback(identity)[0]  # [B, S, N, T]
    got = np.asarray(dvalue.transpose(0, 2, 3, 1)) > 0
    np.testing.assert_array_equal(got, keep_mask(key))


@pytest.mark.parametrize(("rows", "columns"), [(5, 7), pytest.param(270, 610, marks=thorough)])
def test_gradients_are_those_of_the_recovered_mask(rng, rows, columns):
    """The gradients of query and key are so too, also where both directions visit several tiles."""
    args = operands(rng, rows=rows, columns=columns)
    key = jax.random.key(9)
    keep = keep_mask(key, heads=4, rows=rows, columns=columns)
    dout = rng.standard_normal((2, rows, 4, 3))

    def run(function):
        out, pullback = jax.vjp(jax.jit(function), *args)
        return (out, *pullback(dout))

    got = run(lambda *a: dot_product_attention(*a, dropout_rate=RATE, dropout_key=key))
    expected = run(lambda *a: explicit(*a, jnp.asarray(keep, float), RATE))
    for name, a, b in zip(("out", "query", "key", "value"), got, expected, strict=True):
        assert_close(a, b, 1e-11, name)


@thorough
def test_log_sum_exp_knows_nothing_of_dropout(rng):
    args = operands(rng)
    _, plain = dot_product_attention(*args, return_residual=True)
    _, dropped = dot_product_attention(
        *args, dropout_rate=RATE, dropout_key=jax.random.key(0), return_residual=True
    )
    assert_close(dropped, plain, 1e-14)


def test_broadcast_dropout_is_one_mask_for_all_batches_and_heads():
    key = jax.random.key(21)
    mask = keep_mask(key, rows=31, columns=37, broadcast_dropout=True)
    np.testing.assert_array_equal(mask, np.broadcast_to(mask[:1, :1], mask.shape))
    assert 0 < mask.mean() < 1
    row, column = 11, 23
    block = keep_mask(key, broadcast_dropout=True, dropout_offset=(3, 2, row, column))
    np.testing.assert_array_equal(block, mask[:, :, row : row + 5, column : column + 7])


@thorough
def test_broadcast_dropout_gradients(rng):
    args, key = operands(rng), jax.random.key(21)
    keep = keep_mask(key, heads=4, broadcast_dropout=True)
    dout = rng.standard_normal((2, 5, 4, 3))
    options = {"dropout_rate": RATE, "dropout_key": key, "broadcast_dropout": True}
    _, pullback = jax.vjp(lambda *a: dot_product_attention(*a, **options), *args)
    _, expected = jax.vjp(lambda *a: explicit(*a, jnp.asarray(keep, float), RATE), *args)
    for a, b in zip(pullback(dout), expected(dout), strict=True):
        assert_close(a, b, 1e-12)
