"""Rows that see nothing, blocks of rows, and what is saved of them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from helpers import assert_close, saved_arrays

from jax_attn_bwd import scaled_masked_softmax, scaled_masked_softmax_bwd


def normal(*shape, seed=0, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def saved_elements(differentiate, *inputs, **options):
    """Elements of the arrays that the backward keeps, when `differentiate` names what is perturbed."""
    arrays = dict(zip(("x", "mask", "bias", "sink", "scale"), inputs, strict=False))
    arrays = {name: value for name, value in arrays.items() if value is not None}
    fixed = {name: value for name, value in arrays.items() if name not in differentiate}

    def call(chosen):
        return scaled_masked_softmax(**chosen, **fixed, **options)

    _, pullback = jax.vjp(call, {name: arrays[name] for name in differentiate})
    return sorted(x.size for x in saved_arrays(pullback))


def test_only_y_is_saved():
    x, mask = normal(2, 3, 5, 7), jnp.asarray(np.random.default_rng(0).random((2, 1, 5, 7)) < 0.5)
    bias, sink, scale = normal(3, 1, 7), normal(3, 1), normal(3, 1, 1)
    assert saved_elements(["x"], x, mask) == [x.size]
    assert saved_elements(["x"], x, mask, bias) == [x.size]
    assert saved_elements(["x", "bias"], x, mask, bias) == [x.size]
    assert saved_elements(["x"], x, None, None, None, scale) == [3, x.size]
    assert saved_elements(["x", "scale"], x, None, None, None, scale) == [3, x.size, x.size]
    assert saved_elements(["x", "sink"], x, mask, None, sink) == [30, x.size]
    assert saved_elements(["x"], x, mask, fully_masked="uniform") == [30, x.size]


def test_rows_that_see_nothing():
    x = normal(2, 4)
    mask = jnp.asarray([[True, False, True, True], [False] * 4])
    for mode, filler in (("zero", 0.0), ("uniform", 0.25), ("nan", np.nan)):
        y, pullback = jax.vjp(lambda x, m=mode: scaled_masked_softmax(x, mask, fully_masked=m), x)
        np.testing.assert_array_equal(y[1], np.full(4, filler))
        (dx,) = pullback(normal(2, 4, seed=1))
        np.testing.assert_array_equal(dx[1], np.zeros(4))
        assert np.abs(dx[0, [0, 2, 3]]).min() > 0
        got = scaled_masked_softmax_bwd(normal(2, 4, seed=1), y, mask)
        assert_close(got, dx, 1e-14)


def test_plain_backward_of_nan_rows_at_second_order():
    mask = jnp.asarray([[True, False], [False, False]])
    y = scaled_masked_softmax(jnp.zeros((2, 2)), mask, fully_masked="nan")
    square = lambda dy: (scaled_masked_softmax_bwd(dy, y, mask) ** 2).sum()
    np.testing.assert_array_equal(jax.grad(square)(jnp.ones((2, 2))), np.zeros((2, 2)))


def test_tangents_of_what_is_hidden_are_not_read():
    """Nor those of a row that sees nothing, whatever it is filled with."""
    x, mask = normal(2, 3), np.array([[1, 1, 0], [0, 0, 0]], bool)
    along = jnp.where(mask, x, np.nan)
    call = partial(scaled_masked_softmax, mask=mask, fully_masked="uniform", forward_mode=True)
    y, dy = jax.jvp(lambda x, bias: call(x, bias=bias), (x, x), (along, along))
    moved = 2 * np.where(mask, x, 0)[0]
    assert_close(dy[0], y[0] * (moved - (y[0] * moved).sum()), 1e-12)
    assert not dy[1].any()


def test_x_that_is_hidden_is_not_read_where_its_scale_moves():
    x, mask, scale = normal(2, 3), np.array([True, True, False]), normal(2, 1, seed=1)
    call = lambda x: lambda scale: scaled_masked_softmax(x, mask, scale=scale, forward_mode=True)
    tangent = lambda x: jax.jvp(call(x), (scale,), (scale + 1,))[1]
    clean, dirty = (tangent(jnp.where(mask, x, beyond)) for beyond in (0.0, np.nan))
    assert np.abs(clean[:, :2]).min() > 0
    assert_close(dirty, clean, 0)
