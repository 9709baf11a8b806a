"""The dropout mask is a function of (key, batch, head, row, column), the same in both passes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

from jax_attn_bwd import dot_product_attention

RATE = 0.3


def keep_mask(key, *, batch=2, heads=3, rows=5, columns=7, rate=RATE, **options):
    """The mask `[B, N, T, S]`: equal probabilities, and the identity for a value."""
    query = jnp.zeros((batch, rows, heads, 1), jnp.float32)
    keys = jnp.zeros((batch, columns, 1, 1), jnp.float32)
    value = jnp.broadcast_to(jnp.eye(columns, dtype=jnp.float32), (batch, columns, columns))
    out = dot_product_attention(
        query, keys, value[:, :, None], dropout_rate=rate, dropout_key=key, **options
    )
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


# ---------------------------------------------------------------------- keys


def test_typed_and_raw_key_of_one_seed_give_the_same_mask():
    typed = keep_mask(jax.random.key(5))
    np.testing.assert_array_equal(keep_mask(jax.random.PRNGKey(5)), typed)
    np.testing.assert_array_equal(keep_mask(np.array([0, 5], np.uint32)), typed)
    assert (keep_mask(jax.random.key(6)) != typed).any()


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
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


def test_a_folded_key_gives_an_independent_mask():
    key = jax.random.key(0)
    a, b = (keep_mask(jax.random.fold_in(key, i), rows=61, columns=67) for i in range(2))
    assert_uncorrelated(a, b)


# ---------------------------------------------------------------------- statistics


def assert_uncorrelated(a, b, rate=RATE):
    """The sample covariance of two masks within 5 of its standard deviations."""
    variance = rate * (1 - rate)
    covariance = ((a - (1 - rate)) * (b - (1 - rate))).mean()
    assert abs(covariance) < 5 * variance / np.sqrt(a.size)


@pytest.fixture(scope="module")
def plane():
    return keep_mask(jax.random.key(17), batch=2, heads=3, rows=211, columns=211)


@pytest.mark.parametrize("rate", [0.02, 0.5, 0.9])
def test_keep_rate(rate):
    keep = keep_mask(jax.random.key(23), batch=1, heads=2, rows=307, columns=293, rate=rate)
    assert abs(keep.mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / keep.size)


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


# ---------------------------------------------------------------------- both passes


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


def explicit(query, key, value, keep, rate):
    """Attention with a mask that is handed over, for grouped heads."""
    groups = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, groups, 2), jnp.repeat(value, groups, 2)
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[-1])
    p = jax.nn.softmax(logits) * keep / (1 - rate)
    return jnp.einsum("bnts,bsnh->btnh", p, value)


@pytest.mark.parametrize(("rows", "columns"), [(5, 7), (270, 610)])
def test_gradients_are_those_of_the_recovered_mask(rng, rows, columns):
    """Of query and key too, and where the forward and the backward visit several tiles."""
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


def test_log_sum_exp_knows_nothing_of_dropout(rng):
    args = operands(rng)
    _, plain = dot_product_attention(*args, return_residual=True)
    _, dropped = dot_product_attention(
        *args, dropout_rate=RATE, dropout_key=jax.random.key(0), return_residual=True
    )
    assert_close(dropped, plain, 1e-14)


# ---------------------------------------------------------------------- shape and place


def test_mask_of_a_plane_is_a_corner_of_that_of_a_larger_one():
    key = jax.random.key(11)
    whole = keep_mask(key, batch=2, heads=3, rows=300, columns=270)
    for b, n, t, s in ((1, 2, 5, 7), (2, 3, 1, 269), (1, 3, 129, 257)):
        corner = keep_mask(key, batch=b, heads=n, rows=t, columns=s)
        np.testing.assert_array_equal(corner, whole[:b, :n, :t, :s])


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


def test_offsets_may_be_traced(rng):
    """One program for every shard; forward and gradients as with the numbers written out."""
    args = operands(rng)
    key = jax.random.key(13)
    dout = rng.standard_normal((2, 5, 4, 3))

    def run(offset):
        def attend(*a):
            return dot_product_attention(
                *a, dropout_rate=RATE, dropout_key=key, dropout_offset=offset
            )

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


# ---------------------------------------------------------------------- options


def test_broadcast_dropout_is_one_mask_for_all_batches_and_heads():
    key = jax.random.key(21)
    mask = keep_mask(key, rows=31, columns=37, broadcast_dropout=True)
    np.testing.assert_array_equal(mask, np.broadcast_to(mask[:1, :1], mask.shape))
    assert 0 < mask.mean() < 1
    row, column = 11, 23
    block = keep_mask(key, broadcast_dropout=True, dropout_offset=(3, 2, row, column))
    np.testing.assert_array_equal(block, mask[:, :, row : row + 5, column : column + 7])


def test_broadcast_dropout_gradients(rng):
    args, key = operands(rng), jax.random.key(21)
    keep = keep_mask(key, heads=4, broadcast_dropout=True)
    dout = rng.standard_normal((2, 5, 4, 3))
    options = {"dropout_rate": RATE, "dropout_key": key, "broadcast_dropout": True}
    _, pullback = jax.vjp(lambda *a: dot_product_attention(*a, **options), *args)
    _, expected = jax.vjp(lambda *a: explicit(*a, jnp.asarray(keep, float), RATE), *args)
    for a, b in zip(pullback(dout), expected(dout), strict=True):
        assert_close(a, b, 1e-12)


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


@pytest.mark.parametrize("rate", [1e-12, 5e-324])
def test_tiny_rate_drops_nothing(rng, rate):
    args = operands(rng)
    got = dot_product_attention(*args, dropout_rate=rate, dropout_key=jax.random.key(0))
    assert_close(got, dot_product_attention(*args), 1e-11)


def test_rate_next_to_one_is_finite(rng):
    """Nearly all is dropped, and no survivor is multiplied by infinity."""
    args = operands(rng)
    rate = float(np.nextafter(1.0, 0.0))
    options = {"dropout_rate": rate, "dropout_key": jax.random.key(0)}
    out, pullback = jax.vjp(lambda *a: dot_product_attention(*a, **options), *args)
    for x in (out, *pullback(rng.standard_normal(out.shape))):
        assert np.isfinite(x).all()


def test_no_gradient_and_no_tangent_for_the_key(rng):
    """The key is an argument of the differentiated function here, not a constant."""
    query, keys, value = operands(rng)

    def form(query, key):
        out = dot_product_attention(query, keys, value, dropout_rate=RATE, dropout_key=key)
        return jnp.vdot(out, np.linspace(-1.0, 1.0, out.size).reshape(out.shape))

    got = jax.jit(jax.grad(form))(query, jax.random.key(0))
    assert_close(got, jax.grad(form)(query, jax.random.PRNGKey(0)), 1e-13)
