"""The dropout mask is a function of (key, batch, head, row, column)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from ops.dot_product.dropped import RATE, keep_mask, operands

from jax_attn_bwd import dot_product_attention


@thorough
def test_mask_of_a_plane_is_a_corner_of_that_of_a_larger_one():
    key = jax.random.key(11)
    whole = keep_mask(key, batch=2, heads=3, rows=300, columns=270)
    for b, n, t, s in ((1, 2, 5, 7), (2, 3, 1, 269), (1, 3, 129, 257)):
        corner = keep_mask(key, batch=b, heads=n, rows=t, columns=s)
        np.testing.assert_array_equal(corner, whole[:b, :n, :t, :s])


@thorough
def test_mask_does_not_depend_on_what_is_hidden(rng):
    """Skipped tiles draw nothing, and that changes nothing elsewhere."""
    args = operands(rng, rows=270, columns=610)
    key = jax.random.key(2)
    keep = keep_mask(key, heads=4, rows=270, columns=610)
    lengths = np.array([600, 9], np.int32)
    options = {"is_causal": True, "local_window_size": (40, 0), "key_value_seq_lengths": lengths}
    got = dot_product_attention(*args, dropout_rate=RATE, dropout_key=key, **options)

    # the same with the probabilities read off an identity, then dropped by hand
    identity = jnp.broadcast_to(jnp.eye(610)[:, None], (2, 610, 2, 610))
    p = dot_product_attention(*args[:2], identity, **options)  # [B, T, N, S]
    dropped = p * np.where(keep, 1 / (1 - RATE), 0.0).transpose(0, 2, 1, 3)
    expected = jnp.einsum("btns,bsnh->btnh", dropped, jnp.repeat(args[2], 2, 2))
    assert_close(got, expected, 1e-11)


OFFSET = (4, 2, 37, 53)


@pytest.fixture(scope="module")
def whole():
    return keep_mask(jax.random.key(13), batch=6, heads=5, rows=60, columns=80)


@thorough
def test_offset_places_a_block_in_the_whole_plane(whole):
    b, n, t, s = OFFSET
    got = keep_mask(jax.random.key(13), dropout_offset=OFFSET)
    np.testing.assert_array_equal(got, whole[b : b + 2, n : n + 3, t : t + 5, s : s + 7])


def test_rows_and_columns_may_be_indices(whole):
    """What zig-zag rings need: positions without order."""
    rows, columns = np.array([7, 59, 0, 8, 31]), np.array([3, 2, 79, 40, 41, 42, 0])
    got = keep_mask(jax.random.key(13), dropout_offset=(1, 2, rows, columns))
    np.testing.assert_array_equal(got, whole[1:3, 2:5, rows][..., columns])
    got = keep_mask(jax.random.key(13), dropout_offset=(0, 0, 6, columns))
    np.testing.assert_array_equal(got, whole[:2, :3, 6:11][..., columns])


@thorough
def test_offsets_may_be_traced(rng):
    """One program for every shard; forward and gradients as with the numbers written out."""
    args = operands(rng)
    key = jax.random.key(13)
    dout = rng.standard_normal((2, 5, 4, 3))

    def run(offset):
        def attend(*a):
            return dot_product_attention(*a, dropout_rate=RATE, dropout_key=key, dropout_offset=offset)

        out, pullback = jax.vjp(attend, *args)
        return (out, *pullback(dout))

    jitted = jax.jit(run)
    rows = np.array([9, 1, 4, 2, 100], np.int32)
    for offset in (OFFSET, (0, 1, 2, 3), (1, 0, rows, 8)):
        traced = tuple(jnp.asarray(x, jnp.int32) for x in offset)
        for a, b in zip(jitted(traced), run(offset), strict=True):
            assert_close(a, b, 1e-13)


def test_offset_zero_is_the_default():
    key = jax.random.key(1)
    np.testing.assert_array_equal(keep_mask(key, dropout_offset=(0, 0, 0, 0)), keep_mask(key))


def test_two_batch_axes_count_as_one(rng):
    """Row-major, as a reshape does."""
    query, keys, value = operands(rng, batch=6)
    options = {"dropout_rate": RATE, "dropout_key": jax.random.key(4)}
    flat = dot_product_attention(query, keys, value, **options)
    split = (x.reshape(2, 3, *x.shape[1:]) for x in (query, keys, value))
    got = dot_product_attention(*split, **options)
    assert_close(got.reshape(flat.shape), flat, 1e-14)
