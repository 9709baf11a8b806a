"""Dropout rates: the share that is kept, nothing correlated, 0, 1 and next to them."""

import jax
import numpy as np
import pytest
from helpers import assert_close, thorough
from ops.dot_product.dropped import RATE, assert_uncorrelated, keep_mask, operands

from jax_attn_bwd import dot_product_attention


@pytest.fixture(scope="module")
def plane():
    return keep_mask(jax.random.key(17), batch=2, heads=3, rows=211, columns=211)


@pytest.mark.parametrize("rate", [*(pytest.param(r, marks=thorough) for r in (0.02, 0.5)), 0.9])
def test_keep_rate(rate):
    keep = keep_mask(jax.random.key(23), batch=1, heads=2, rows=307, columns=293, rate=rate)
    assert abs(keep.mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / keep.size)


@thorough
def test_keep_rate_of_every_row_and_column(plane):
    """6 sigma, for there are hundreds of them."""
    for axis in (2, 3):
        rates = plane.mean(axis)
        sigma = np.sqrt(RATE * (1 - RATE) / plane.shape[axis])
        assert np.abs(rates - (1 - RATE)).max() < 6 * sigma


@pytest.mark.parametrize("step", [1, 2, 64])
def test_neighbouring_rows_and_columns_are_uncorrelated(plane, step):
    assert_uncorrelated(plane[:, :, step:], plane[:, :, :-step])
    assert_uncorrelated(plane[..., step:], plane[..., :-step])


def test_heads_and_batches_are_uncorrelated(plane):
    assert_uncorrelated(plane[0], plane[1])
    for other in (1, 2):
        assert_uncorrelated(plane[:, 0], plane[:, other])
    assert_uncorrelated(plane[0, 1], plane[1, 0])  # (batch, head) is not (head, batch)


def test_mask_is_not_symmetric(plane):
    """(row, column) is not (column, row); each pair once, or all count twice."""
    upper = np.triu_indices(plane.shape[-1], 1)
    transposed = plane.swapaxes(-1, -2)
    assert_uncorrelated(plane[..., *upper], transposed[..., *upper])


def test_rate_one_gives_zeros_with_zero_gradients(rng):
    args = operands(rng)
    options = {"dropout_rate": 1.0, "dropout_key": jax.random.key(0)}
    out, pullback = jax.vjp(lambda *a: dot_product_attention(*a, **options), *args)
    for x in (out, *pullback(rng.standard_normal(out.shape))):
        np.testing.assert_array_equal(x, 0)


def test_rate_zero_needs_no_key_and_ignores_one(rng):
    args = operands(rng)
    plain = dot_product_attention(*args)
    np.testing.assert_array_equal(dot_product_attention(*args, dropout_rate=0), plain)
    with_key = dot_product_attention(*args, dropout_rate=0.0, dropout_key=jax.random.key(0))
    np.testing.assert_array_equal(with_key, plain)


@pytest.mark.parametrize("rate", [pytest.param(1e-12, marks=thorough), 5e-324])
def test_tiny_rate_drops_nothing(rng, rate):
    args = operands(rng)
    got = dot_product_attention(*args, dropout_rate=rate, dropout_key=jax.random.key(0))
    assert_close(got, dot_product_attention(*args), 1e-11)


@thorough
def test_rate_next_to_one_is_finite(rng):
    """Nearly all is dropped, and no survivor is multiplied by infinity."""
    args = operands(rng)
    rate = float(np.nextafter(1.0, 0.0))
    options = {"dropout_rate": rate, "dropout_key": jax.random.key(0)}
    out, pullback = jax.vjp(lambda *a: dot_product_attention(*a, **options), *args)
    for x in (out, *pullback(rng.standard_normal(out.shape))):
        assert np.isfinite(x).all()
