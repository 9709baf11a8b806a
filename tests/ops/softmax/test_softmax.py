"""What is peculiar to the softmax: what it saves, its accuracy at any magnitude, its filled rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPERATORS, assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_attn_bwd import scaled_masked_softmax, scaled_masked_softmax_bwd
from jax_attn_bwd._core.sharding import match_type
from jax_attn_bwd.ops.softmax import forward

operator = next(o for o in OPERATORS if o.name == "scaled_masked_softmax")


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
    return sorted(x.size for x in jax.tree.leaves(pullback))


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


@pytest.mark.parametrize("magnitude", [1e0, 1e2, 1e4, 1e6])
@pytest.mark.parametrize("scale", [80**-0.5, -(80**-0.5)], ids=["positive", "negative"])
def test_exact_at_any_magnitude(magnitude, scale):
    """The scale is applied after the maximum is subtracted, so the error does not grow with x."""
    x = magnitude * normal(50, 40, dtype=np.float32)
    got = scaled_masked_softmax(x, scale=scale)
    exact = jax.nn.softmax(np.float32(scale).astype(np.float64) * x.astype(np.float64))
    # float32(scale) is exact here: the reference uses the rounded scale too
    assert np.abs(np.asarray(got, np.float64) - exact).max() < 5e-7


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


def test_a_large_sink_takes_what_it_should():
    x, sink = normal(3, 5), jnp.asarray([20.0, -20.0, -jnp.inf])
    y = scaled_masked_softmax(x, sink=sink)
    total = np.asarray(y.sum(-1))
    expected = np.exp(x).sum(-1) / (np.exp(x).sum(-1) + np.exp(sink))
    np.testing.assert_allclose(total, expected, rtol=1e-14)


def test_blocks_of_rows_do_not_change_the_answer(monkeypatch):
    """The loop over rows on a CPU, with a last block that is not whole, against the whole at once."""
    x, mask = (
        normal(2, 3, 23, 11),
        jnp.asarray(np.random.default_rng(0).random((2, 1, 23, 11)) < 0.5),
    )

    def run():
        return jax.value_and_grad(
            lambda x: (scaled_masked_softmax(x, mask, scale=0.3, is_causal=True) * x).sum()
        )(x)

    results = []
    for block in (None, 5, 23, 1):
        monkeypatch.setattr(forward, "row_block", lambda options, x, b=block: b)
        monkeypatch.setattr("jax_attn_bwd.ops.softmax.backward.row_block", lambda o, x, b=block: b)
        results.append(run())
    for value, gradient in results[1:]:
        assert_close(value, results[0][0], 1e-14)
        assert_close(gradient, results[0][1], 1e-14)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.data())
def test_any_shape_and_any_combination_of_options(data):
    draw = data.draw
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 7]), min_size=1, max_size=4)))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))

    def broadcasting(full):
        kept = full[draw(st.integers(0, len(full))) :]
        return tuple(n if draw(st.booleans()) else 1 for n in kept)

    arrays = {"x": jnp.asarray(rng.standard_normal(shape))}
    if draw(st.booleans()):
        arrays["bias"] = jnp.asarray(rng.standard_normal(broadcasting(shape)))
    if draw(st.booleans()):
        arrays["scale"] = jnp.asarray(rng.standard_normal(broadcasting(shape)))
    if draw(st.booleans()):
        at = axis % len(shape)
        arrays["sink"] = jnp.asarray(
            rng.standard_normal(broadcasting(shape[:at] + shape[at + 1 :]))
        )
    names = tuple(arrays)
    if draw(st.booleans()):
        arrays["mask"] = jnp.asarray(rng.random(broadcasting(shape)) < 0.6)
    options = {"axis": axis, "fully_masked": draw(st.sampled_from(["zero", "uniform"]))}

    def run(function):
        def outputs(inputs):
            return function(**{**arrays, **inputs}, **options)[0]

        y, pullback = jax.vjp(outputs, {n: arrays[n] for n in names})
        return y, pullback(jnp.asarray(np.random.default_rng(1).standard_normal(y.shape)))[0]

    (got, gradients), (expected, exact) = run(operator.call), run(operator.reference)
    assert_close(got, expected, 1e-13)
    for name in names:
        assert_close(gradients[name], exact[name], 1e-12, name)


def test_plain_backward_of_nan_rows_at_second_order():
    mask = jnp.asarray([[True, False], [False, False]])
    y = scaled_masked_softmax(jnp.zeros((2, 2)), mask, fully_masked="nan")
    square = lambda dy: (scaled_masked_softmax_bwd(dy, y, mask) ** 2).sum()  # noqa: E731
    np.testing.assert_array_equal(jax.grad(square)(jnp.ones((2, 2))), np.zeros((2, 2)))


@pytest.mark.parametrize("scale", [0.0, 1e-38])
def test_the_whole_range_of_float32(scale):
    x = jnp.asarray([3e38, -3e38], jnp.float32)
    exact = jax.nn.softmax(scale * x.astype(np.float64))
    assert_close(scaled_masked_softmax(x, scale=scale), exact, 1e-6)


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


def test_operands_are_placed_like_x_on_an_explicit_mesh(rng):
    x, bias, dy = (jnp.asarray(rng.standard_normal((4, 4, 6))) for _ in range(3))
    mask, sink = jnp.asarray(rng.random((4, 4, 6)) < 0.7), jnp.asarray(rng.standard_normal((4, 4)))

    def step(x, bias, mask, sink, dy):
        y, pullback = jax.vjp(
            lambda *a: scaled_masked_softmax(a[0], mask, bias=a[1], sink=a[2]), x, bias, sink
        )
        return y, *pullback(match_type(dy, y)), scaled_masked_softmax_bwd(dy, y, mask)

    expected = jax.jit(step)(x, bias, mask, sink, dy)
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    specs = (P("b", "h"), P(None, None, "b"), P("h", "b"), P(), P("h"))
    with jax.set_mesh(mesh):
        arrays = zip((x, bias, mask, sink, dy), specs, strict=True)
        placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in arrays]
        got = jax.jit(lambda *a: step(*a))(*placed)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, 1e-13)
