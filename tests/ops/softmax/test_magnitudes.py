"""Accuracy at any magnitude: huge, tied, offset and overflowing logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

from jax_attn_bwd import scaled_masked_softmax


def normal(*shape, seed=0, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("magnitude", [1e0, 1e2, 1e4, 1e6])
@pytest.mark.parametrize("scale", [80**-0.5, -(80**-0.5)], ids=["positive", "negative"])
def test_exact_at_any_magnitude(magnitude, scale):
    """The scale is applied after the maximum is subtracted, so the error does not grow with x."""
    x = magnitude * normal(50, 40, dtype=np.float32)
    got = scaled_masked_softmax(x, scale=scale)
    exact = jax.nn.softmax(np.float32(scale).astype(np.float64) * x.astype(np.float64))
    # float32(scale) is exact here: the reference uses the rounded scale too
    assert np.abs(np.asarray(got, np.float64) - exact).max() < 5e-7


def test_a_large_sink_takes_what_it_should():
    x, sink = normal(3, 5), jnp.asarray([20.0, -20.0, -jnp.inf])
    y = scaled_masked_softmax(x, sink=sink)
    total = np.asarray(y.sum(-1))
    expected = np.exp(x).sum(-1) / (np.exp(x).sum(-1) + np.exp(sink))
    np.testing.assert_allclose(total, expected, rtol=1e-14)


@pytest.mark.parametrize("scale", [0.0, 1e-38])
def test_the_whole_range_of_float32(scale):
    x = jnp.asarray([3e38, -3e38], jnp.float32)
    exact = jax.nn.softmax(scale * x.astype(np.float64))
    assert_close(scaled_masked_softmax(x, scale=scale), exact, 1e-6)


@pytest.mark.parametrize("scale", [-3e38, 3e38])
@pytest.mark.parametrize("given", [float, jnp.float32], ids=["number", "array"])
def test_a_scale_of_which_twice_overflows(given, scale):
    """Differences to the maximum are halved: what undoes that must not be put into the scale."""
    y = scaled_masked_softmax(jnp.asarray([1.0, 0.0, 1.0], jnp.float32), scale=given(scale))
    np.testing.assert_array_equal(y, [0.5, 0, 0.5] if scale > 0 else [0, 1, 0])


@pytest.mark.parametrize("fill", [1e10, 1.7e10, -1e30, 3e38])
@pytest.mark.parametrize("extra", ["sink", "columns"])
def test_tied_rows_of_huge_logits(fill, extra):
    """A rounded product and the same product inside a fused difference are not alike."""
    x = jnp.full((2, 5), fill, jnp.float32)
    options = {"sink": {"scale": 0.3, "sink": jnp.float32(-jnp.inf)}}
    options["columns"] = {"scale": jnp.full(5, 0.3, jnp.float32)}
    y, pullback = jax.vjp(lambda x: scaled_masked_softmax(x, **options[extra]), x)
    assert_close(y, np.full(x.shape, 0.2), 1e-6)
    dy = jnp.arange(10, dtype=jnp.float32).reshape(2, 5)
    assert_close(pullback(dy)[0], 0.3 * 0.2 * (dy - dy.mean(-1, keepdims=True)), 1e-6)


@pytest.mark.parametrize(("top", "sink", "expected"), [(3e38, 0.0, 1.0), (-3e38, 0.0, 0.0)])
def test_sink_beside_logits_that_overflow(top, sink, expected):
    x = jnp.asarray([top, top / 2], jnp.float32)
    y, grad = jax.value_and_grad(lambda sink: scaled_masked_softmax(x, scale=2.0, sink=sink).sum())(
        jnp.float32(sink)
    )
    assert y == expected
    assert grad == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("with_sink", [False, True], ids=["plain", "sink"])
def test_gradient_of_scale_where_logits_share_an_offset(rng, dtype, with_sink):
    """x = 1000 + N(0, 1): the rounding of y must not be multiplied by the 1000."""
    x = jnp.asarray(1000 + rng.standard_normal((4, 64)), dtype)
    dy = jnp.asarray(rng.standard_normal((4, 64)), dtype)
    sink = 1503.0 if with_sink else -jnp.inf

    def loss(scale, dtype):
        y = scaled_masked_softmax(x.astype(dtype), scale=scale, sink=jnp.asarray(sink, scale.dtype))
        return jnp.vdot(y.astype(scale.dtype), dy.astype(scale.dtype))

    got = float(jax.grad(loss)(jnp.asarray(1.5, "float32"), dtype))
    expected = float(jax.grad(loss)(jnp.asarray(1.5, "float64"), "float64"))
    size = float(jnp.abs(dy.astype("float32")).max())
    assert abs(got - expected) <= 4 * float(jnp.finfo(dtype).eps) * size * max(1, abs(expected))
