"""`compat.cann` against a literal float64 transcription of what the source system computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough

from jax_attn_bwd.compat import cann

SHAPE = (2, 3, 5, 7)


def source_forward(x, mask, scale):
    """Scale, fill, subtract the maximum, exponentiate, divide; mask True = masked."""
    z = x.astype(np.float64) * scale
    if mask is not None:
        z = np.where(mask, -10000.0, z)
    z = z - z.max(axis=-1, keepdims=True)
    e = np.exp(z)
    return e / e.sum(axis=-1, keepdims=True)


def source_backward(grad_output, y, mask, scale):
    """The softmax gradient, scaled, zero where masked."""
    g, y = grad_output.astype(np.float64), y.astype(np.float64)
    dx = scale * (g * y - (g * y).sum(axis=-1, keepdims=True) * y)
    return dx if mask is None else np.where(mask, 0.0, dx)


def masked(*shape, share=0.4):
    return np.random.default_rng(2).random(shape) < share


def assert_as_the_source(x, mask, scale, *, triu=False, rtol=1e-13):
    """Forward, backward by hand from the same y, and `jax.grad` of the forward."""
    rng = np.random.default_rng(4)
    exact = np.asarray(x, np.float64)
    g = jnp.asarray(rng.standard_normal(x.shape), x.dtype)
    source_mask = mask
    if triu:
        upper = np.triu(np.ones(x.shape[-2:], bool), 1)
        source_mask = upper if mask is None else mask | upper
    y = source_forward(exact, source_mask, scale)
    dx = source_backward(np.asarray(g, np.float64), y, source_mask, scale)

    got, pullback = jax.vjp(lambda x: cann.scaled_masked_softmax(x, mask, scale, triu), x)
    assert (got.shape, got.dtype) == (x.shape, x.dtype)
    assert_close(got.astype(jnp.float64), y, rtol, "y")
    (by_jax,) = pullback(g)
    by_hand = cann.scaled_masked_softmax_backward(g, got, mask, scale, triu)
    for name, gradient in (("jax.grad", by_jax), ("backward", by_hand)):
        assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
        assert_close(gradient.astype(jnp.float64), dx, 4 * rtol, name)
    return got, by_jax, by_hand


MASKS = {
    "none": None,
    "full": masked(*SHAPE),
    "of_batches": masked(2, 1, 5, 7),
    "of_heads": masked(1, 3, 5, 7),
    "of_both": masked(1, 1, 5, 7),
    "of_keys": masked(2, 1, 1, 7),
    "low_rank": masked(5, 7),
    "nothing": np.zeros(SHAPE, bool),
}


DEFAULT = {(1.0, "none"), (-2.0, "full"), (0.125, "of_batches"), (0.125, "of_heads"), (1.0, "nothing")}


@pytest.mark.parametrize(
    ("scale", "name"),
    [
        pytest.param(scale, name, marks=() if (scale, name) in DEFAULT else thorough)
        for scale in (1.0, 0.125, -2.0)
        for name in MASKS
    ],
)
def test_as_the_source(rng, name, scale):
    assert_as_the_source(jnp.asarray(rng.standard_normal(SHAPE)), MASKS[name], scale)


@pytest.mark.parametrize(
    ("dtype", "rtol"), [("float16", 1e-3), ("bfloat16", 8e-3), pytest.param("float32", 1e-6, marks=thorough)]
)
def test_dtypes_are_kept_and_computed_in_float32(rng, dtype, rtol):
    """Scores of 100 times 8: the fill and the exponent would not survive bfloat16."""
    x = jnp.asarray(100 * rng.standard_normal(SHAPE), dtype)
    assert_as_the_source(x, MASKS["of_batches"], 8.0, rtol=rtol)


def test_true_means_masked(rng):
    x = rng.standard_normal((5, 7))
    mask = masked(5, 7)
    mask[:, 0] = False
    y = cann.scaled_masked_softmax(x, mask)
    assert (np.asarray(y)[mask] == 0).all()
    assert (np.asarray(y)[~mask] > 0).all()


def test_row_masked_whole_is_uniform_with_gradient_zero(rng):
    mask = masked(2, 1, 5, 7)
    mask[1, 0, 3] = True
    x = jnp.asarray(rng.standard_normal(SHAPE))
    y, by_jax, by_hand = assert_as_the_source(x, mask, 0.5)
    assert_close(y[1, :, 3], np.full((3, 7), 1 / 7), 1e-15)
    for dx in (by_jax, by_hand):
        np.testing.assert_array_equal(dx[1, :, 3], 0)


def test_everything_masked(rng):
    x = jnp.asarray(rng.standard_normal(SHAPE))
    y, by_jax, by_hand = assert_as_the_source(x, np.ones((1, 1, 5, 7), bool), 3.0)
    assert_close(y, np.full(SHAPE, 1 / 7), 1e-15)
    np.testing.assert_array_equal(by_jax, 0)
    np.testing.assert_array_equal(by_hand, 0)


def test_masked_logit_wins_over_real_ones_below_the_fill(rng):
    """A quirk of filling with -10000: a masked column takes probability, and gets no gradient."""
    x = rng.standard_normal((3, 7)) - 10001.0
    mask = np.zeros((3, 7), bool)
    mask[:, 2] = True
    y, by_jax, _ = assert_as_the_source(jnp.asarray(x), mask, 1.0, rtol=1e-11)
    assert (y[:, 2] > 0.05).all()
    np.testing.assert_array_equal(by_jax[:, 2], 0)
    far = cann.scaled_masked_softmax(jnp.asarray(x - 1000), mask)
    assert_close(far, mask.astype(float), 1e-15)


@pytest.mark.parametrize(
    ("shape", "mask_shape"),
    [
        ((7,), (7,)),
        pytest.param((5, 7), (5, 7), marks=thorough),
        pytest.param((5, 7), (1, 7), marks=thorough),
        ((3, 5, 7), (3, 1, 7)),
        pytest.param((2, 1, 3, 5, 7), (3, 5, 7), marks=thorough),
        ((2, 1, 3, 5, 7), (2, 1, 1, 1, 7)),
        ((2, 5000), (5000,)),
        pytest.param((1, 2, 3, 4097), (1, 1, 3, 1), marks=thorough),
        ((2, 0, 7), (7,)),
        pytest.param((3, 1), (3, 1), marks=thorough),
    ],
)
def test_shapes_beyond_the_limits_of_the_source(rng, shape, mask_shape):
    """Any rank, rows wider than 4096, a mask of any broadcastable shape."""
    x = jnp.asarray(rng.standard_normal(shape))
    assert_as_the_source(x, masked(*mask_shape), 0.5, rtol=1e-12)


@pytest.mark.parametrize(
    ("shape", "mask"),
    [
        pytest.param(SHAPE, None, id="wide-alone", marks=thorough),
        pytest.param(SHAPE, masked(2, 1, 5, 7), id="wide-with_mask"),
        pytest.param((2, 1, 7, 5), None, id="tall-alone"),
        pytest.param((2, 1, 7, 5), masked(2, 1, 5, 7), id="tall-with_mask", marks=thorough),
    ],
)
def test_fix_triu_mask_masks_the_strict_upper_triangle(rng, shape, mask):
    if mask is not None:
        mask = mask.reshape(2, 1, *shape[-2:])
    x = jnp.asarray(rng.standard_normal(shape))
    y, *_ = assert_as_the_source(x, mask, 0.7, triu=True)
    if mask is None:
        upper = np.broadcast_to(np.triu(np.ones(shape[-2:], bool), 1), shape)
        assert (np.asarray(y)[upper] == 0).all()
        assert (np.asarray(y)[~upper] > 0).all()


def test_fix_triu_mask_is_off_by_default(rng):
    x = jnp.asarray(rng.standard_normal((5, 7)))
    default = cann.scaled_masked_softmax(x, None)
    np.testing.assert_array_equal(cann.scaled_masked_softmax(x, None, 1.0, False), default)


def test_under_jit_and_vmap(rng):
    x, mask = jnp.asarray(rng.standard_normal(SHAPE)), jnp.asarray(masked(2, 1, 5, 7))
    expected = cann.scaled_masked_softmax(x, mask, 0.5)
    jitted = jax.jit(cann.scaled_masked_softmax, static_argnums=(2, 3))
    assert_close(jitted(x, mask, 0.5, False), expected, 1e-15)
    mapped = jax.vmap(lambda x, mask: cann.scaled_masked_softmax(x, mask, 0.5))
    assert_close(mapped(x, mask), expected, 1e-15)


def test_second_order(rng):
    """The Hessian of a linear form of y, against the formula differentiated by JAX."""
    x, mask = jnp.asarray(rng.standard_normal((3, 4))), masked(3, 4)
    weight = rng.standard_normal((3, 4))

    def plain(x):
        return jax.nn.softmax(jnp.where(mask, -10000.0, 0.5 * x))

    got = jax.hessian(lambda x: jnp.vdot(cann.scaled_masked_softmax(x, mask, 0.5), weight))(x)
    assert_close(got, jax.hessian(lambda x: jnp.vdot(plain(x), weight))(x), 1e-12)


def test_nan_behind_the_mask_reaches_nothing(rng):
    x = rng.standard_normal(SHAPE)
    mask = np.broadcast_to(MASKS["of_batches"], SHAPE)
    g = rng.standard_normal(SHAPE)

    def run(x, g):
        y, pullback = jax.vjp(lambda x: cann.scaled_masked_softmax(x, mask, 0.5), jnp.asarray(x))
        return y, *pullback(g), cann.scaled_masked_softmax_backward(g, y, mask, 0.5)

    expected = run(x, np.where(mask & ~mask.all(-1, keepdims=True), 0.0, g))
    got = run(np.where(mask, np.nan, x), g)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, 1e-13)
