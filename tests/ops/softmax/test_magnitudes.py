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


def test_a_sink_beside_a_scale_that_is_no_normal_number():
    x, scale = jnp.asarray([3e38, 0.0], jnp.float32), 8e-39
    exact = np.exp(scale * x.astype(np.float64))
    assert_close(scaled_masked_softmax(x, scale=scale, sink=jnp.float32(0)), exact / (exact.sum() + 1), 1e-6)


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


@pytest.fixture(params=[False, True], ids=["any", "one CPU"])
def device(request):
    """What is traced is for any device, or for a CPU alone, whose forward hides by sums."""
    if request.param:
        request.getfixturevalue("one_device")
    jax.clear_caches()  # what was traced for another
    yield
    jax.clear_caches()


LIBRARY = (48, 130)  # entries enough for the library loops of XLA:CPU


@pytest.mark.parametrize("shape", [(3, 5), LIBRARY])
@pytest.mark.parametrize("scale", [0.0, 2e-38, -1e-37, 2.0**-101, 3.0])
def test_a_scale_that_is_an_array_at_any_magnitude_under_a_mask(scale, shape, rng, device):
    """Among them 0, and the least normal numbers; what is hidden is not read."""
    x = (rng.uniform(-1, 1, shape) * np.finfo("float32").max).astype("float32")
    mask = np.arange(shape[1]) != 2
    logits = np.where(mask, np.float32(scale) * x.astype("float64"), -np.inf)
    exact = np.exp(logits - logits.max(-1, keepdims=True))
    hidden = jnp.asarray(np.where(mask, x, np.nan))
    found = scaled_masked_softmax(hidden, mask, scale=jnp.full((shape[0], 1), scale, "float32"))
    np.testing.assert_allclose(found, exact / exact.sum(-1, keepdims=True), atol=2e-6)


@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_a_scale_that_is_not_finite_makes_no_nan_of_what_is_hidden(scale, rng, device):
    """Neither in rows that see nothing nor beside rows of another scale; what it scales is NaN."""
    x = rng.standard_normal(LIBRARY).astype("float32")
    mask, scales = rng.random(LIBRARY) < 0.5, np.ones((LIBRARY[0], 1), "float32")
    mask[:8], scales[4:12] = False, scale
    found = np.asarray(scaled_masked_softmax(x, mask, scale=jnp.asarray(scales)))
    np.testing.assert_array_equal(found[:8], 0)
    assert np.isnan(found[8:12][mask[8:12]]).all()
    np.testing.assert_allclose(found[12:].sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize("wrt", ["x", "scale"])
def test_second_order_reads_nothing_hidden_under_a_scale_that_is_an_array(wrt, rng, device):
    x, dy = rng.standard_normal((2, *LIBRARY)).astype("float32")
    mask, scale = rng.random(LIBRARY) < 0.5, jnp.full((1, 1), 0.7, "float32")
    mask[:2] = False

    def derivatives(hidden):
        arrays = {"x": jnp.where(mask, x, hidden), "scale": scale}

        def first(arrays):
            y, pullback = jax.vjp(lambda a: scaled_masked_softmax(a["x"], mask, scale=a["scale"]), arrays)
            return y, pullback(jnp.where(mask, dy, hidden))[0]

        return first(arrays), jax.grad(lambda a: (first(a)[1][wrt] ** 2).sum())(arrays)

    jax.tree.map(np.testing.assert_array_equal, derivatives(0.0), derivatives(np.nan))
