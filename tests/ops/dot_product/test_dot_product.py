"""What is peculiar to dense attention: memory, residuals, dtypes, and shapes drawn at random."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPERATORS, assert_close
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_attn_bwd import dot_product_attention, dot_product_attention_bwd

operator = next(o for o in OPERATORS if o.name == "dot_product_attention")


def normal(*shape, seed=0, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def temporary_bytes(T, order=1, **options):
    """Of one compiled gradient (order 1), or gradient of its square (order 2)."""

    def loss(q, k, v, dout):
        return (dot_product_attention(q, k, v, **options) * dout).sum()

    first = jax.grad(loss, (0, 1, 2))
    second = jax.grad(lambda *a: sum((g**2).sum() for g in first(*a)), (0, 1, 2))
    x = jax.ShapeDtypeStruct((1, T, 2, 16), jnp.float32)
    step = jax.jit(first if order == 1 else second)
    return step.lower(x, x, x, x).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "local_window_size": (100, 0), "logits_soft_cap": 5.0},
        {"key_value_seq_lengths": np.array([1000], np.int32)},
        {"dropout_rate": 0.1, "dropout_key": np.array([1, 2], np.uint32)},
        {"mask": np.ones((1, 1, 1, 1), bool)},
    ],
    ids=["full", "causal", "window", "lengths", "dropout", "mask"],
)
def test_memory_is_linear_in_the_sequence(options):
    short, long = temporary_bytes(2048, **options), temporary_bytes(8192, **options)
    assert long < 4.5 * short
    assert long < 8192 * 8192 * 4 / 4, "an array of T x S would need more"


def test_second_order_memory_stays_far_below_the_plane():
    assert temporary_bytes(2048, order=2, is_causal=True) < 2 * 2048 * 2048 * 4


def test_residuals_are_the_inputs_and_two_outputs():
    q, k, v = normal(2, 9, 4, 8), normal(2, 13, 2, 8, seed=1), normal(2, 13, 2, 6, seed=2)
    (out, lse), pullback = jax.vjp(
        lambda q: dot_product_attention(q, k, v, return_residual=True), q
    )
    saved = {x.shape for x in jax.tree.leaves(pullback)}
    assert saved <= {q.shape, k.shape, v.shape, out.shape, lse.shape, ()}


def test_lse_is_wide_whatever_the_inputs():
    for dtype, expected in (
        (jnp.bfloat16, "float32"),
        (np.float32, "float32"),
        (np.float64, "float64"),
    ):
        q = normal(1, 5, 2, 4, dtype=dtype)
        out, lse = dot_product_attention(q, q, q, return_residual=True)
        assert (out.dtype, lse.dtype) == (dtype, expected)


def test_a_learned_temperature_goes_into_the_query():
    q, k, v = (normal(1, 7, 2, 4, seed=s) for s in range(3))
    dout = normal(1, 7, 2, 4, seed=4)
    got = jax.grad(lambda t: (dot_product_attention(q * t, k, v, scale=1.0) * dout).sum())(0.7)
    step = 1e-6
    at = lambda t: (dot_product_attention(q, k, v, scale=t) * dout).sum()  # noqa: E731
    np.testing.assert_allclose(got, (at(0.7 + step) - at(0.7 - step)) / (2 * step), rtol=1e-7)


def test_bottom_right_alignment_by_positions():
    """A cache: the last query sees all keys."""
    q, k = normal(1, 3, 2, 4), normal(1, 8, 2, 4, seed=1)
    got = dot_product_attention(q, k, k, is_causal=True, query_positions=jnp.arange(5, 8))
    mask = np.tri(3, 8, 5, dtype=bool)[None, None]
    assert_close(got, dot_product_attention(q, k, k, mask=jnp.asarray(mask)), 1e-14)


def test_lengths_are_counted_by_index_not_by_position():
    q, k = normal(1, 3, 2, 4), normal(1, 8, 2, 4, seed=1)
    reversed_positions = jnp.arange(8)[::-1]
    got = dot_product_attention(
        q, k, k, key_value_positions=reversed_positions, key_value_seq_lengths=jnp.asarray([5])
    )
    assert_close(got, dot_product_attention(q, k[:, :5], k[:, :5]), 1e-14)


def test_a_dominant_sink_still_has_a_gradient():
    """Where lse rounds to the sink, the row is not taken for one that sees nothing."""
    q, k, v = (normal(1, 8, 2, 4, seed=s, dtype=np.float32) for s in range(3))
    dout = normal(1, 8, 2, 4, seed=4, dtype=np.float32)

    def loss(sink, *arrays):
        *qkv, dout = arrays
        return (dot_product_attention(*qkv, sink=sink) * dout).sum()

    sink = jnp.full(2, 25.0, jnp.float32)
    got = jax.grad(loss)(sink, q, k, v, dout)
    expected = jax.grad(loss)(*(x.astype(np.float64) for x in (sink, q, k, v, dout)))
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_second_order_of_the_plain_backward():
    """dot_product_attention_bwd is itself differentiable, in both modes."""
    q, k, v, dout = (normal(1, 5, 2, 4, seed=s) for s in range(4))
    out, lse = dot_product_attention(q, k, v, return_residual=True)

    def dq(dout):
        grads = dot_product_attention_bwd(dout, q, k, v, out=out, lse=lse, wrt=("query",))
        return grads.query

    tangent = normal(1, 5, 2, 4, seed=9)
    _, got = jax.jvp(dq, (dout,), (tangent,))
    step = 1e-6  # dq is linear in dout, but out and lse are held fixed
    assert_close(got, (dq(dout + step * tangent) - dq(dout - step * tangent)) / (2 * step), 1e-7)


sizes = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 13])


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.data())
def test_any_shape_and_any_combination_of_options(data):
    draw = data.draw
    B, T, S = draw(st.sampled_from([(), (1,), (2,), (2, 3)])), draw(sizes), draw(sizes)
    K, G, H, Hv = (draw(st.integers(1, 3)) for _ in range(4))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    arrays = {"query": (*B, T, K * G, H), "key": (*B, S, K, H), "value": (*B, S, K, Hv)}
    full = (*B, K * G, T, S)
    if draw(st.booleans()):
        arrays["bias"] = tuple(n if draw(st.booleans()) else 1 for n in full)
    if draw(st.booleans()):
        arrays["sink"] = (K * G,)
    arrays = {name: jnp.asarray(rng.standard_normal(shape)) for name, shape in arrays.items()}
    names = tuple(arrays)
    if draw(st.booleans()):
        mask_shape = tuple(n if draw(st.booleans()) else 1 for n in full)
        arrays["mask"] = jnp.asarray(rng.random(mask_shape) < 0.7)
    if draw(st.booleans()):
        arrays["key_value_seq_lengths"] = jnp.asarray(rng.integers(0, S + 1, B))
    options = {"is_causal": draw(st.booleans())}
    options["local_window_size"] = draw(st.none() | st.tuples(st.integers(0, 5), st.integers(0, 5)))
    options["logits_soft_cap"] = draw(st.none() | st.floats(0.5, 3.0))

    def run(function):
        def outputs(inputs):
            out, lse = function(**{**arrays, **inputs}, **options)
            return out, jnp.where(jnp.isfinite(lse), lse, 0)

        out, pullback = jax.vjp(outputs, {n: arrays[n] for n in names})
        seeds = np.random.default_rng(1)
        return out, pullback(tuple(jnp.asarray(seeds.standard_normal(x.shape)) for x in out))[0]

    (got, gradients), (expected, exact) = run(operator.call), run(operator.reference)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, 1e-12)
    for name in names:
        assert_close(gradients[name], exact[name], 1e-11, name)


@pytest.mark.parametrize("fill", [-1e9, float(np.finfo(np.float32).min)])
def test_rows_of_huge_tied_logits(fill):
    """A float mask over a whole row leaves a uniform row; lse alone would round log S away."""
    q, k, v, dout = (normal(1, n, 2, 8, seed=n, dtype=np.float32) for n in (5, 7, 7, 5))
    bias = jnp.zeros((1, 2, 5, 7), jnp.float32).at[0, 0, 2].set(fill).at[0, 1, :4].set(fill)

    def gradients(function):
        loss = lambda q, k, v, bias: (function(q, k, v, bias) * dout).sum()  # noqa: E731
        return jax.grad(loss, (0, 1, 2, 3))(q, k, v, bias)

    got = gradients(dot_product_attention)
    for a, b in zip(got, gradients(jax.nn.dot_product_attention), strict=True):
        assert_close(a, b, 1e-6)


def test_gradient_of_a_bias_of_any_rank():
    q, k, dout = normal(2, 5, 4, 8), normal(2, 7, 2, 8, seed=1), normal(2, 5, 4, 8, seed=2)
    for shape in ((), (1,), (7,), (5, 1), (4, 1, 7), (1, 1, 5, 7)):
        bias = normal(*shape, seed=3)
        loss = lambda bias: (dot_product_attention(q, k, k, bias) * dout).sum()  # noqa: E731
        widen = lambda bias: jnp.broadcast_to(bias, (2, 4, 5, 7))  # noqa: E731
        full, narrow = jax.vjp(widen, bias)
        assert_close(jax.grad(loss)(bias), narrow(jax.grad(loss)(full))[0], 1e-12)


def test_export_of_a_broadcast_bias_with_symbolic_length():
    (t,) = jax.export.symbolic_shape("t")

    def gradient(q, bias):
        return jax.grad(lambda b: jnp.sin(dot_product_attention(q, q, q, b)).sum())(bias)

    types = (
        jax.ShapeDtypeStruct((1, t, 2, 4), np.float64),
        jax.ShapeDtypeStruct((2, 1, t), np.float64),
    )
    exported = jax.export.export(jax.jit(gradient))(*types)
    q, bias = normal(1, 9, 2, 4), normal(2, 1, 9, seed=1)
    assert_close(exported.call(q, bias), gradient(q, bias), 1e-12)


def test_traced_lengths_out_of_range_hide_nothing_or_all(rng):
    """Known ones are an error (test_errors.py)."""
    q, k, v = (jnp.asarray(rng.standard_normal((2, n, 2, 4))) for n in (3, 5, 5))
    attend = jax.jit(lambda n: dot_product_attention(q, k, v, key_value_seq_lengths=n))
    got = attend(jnp.asarray([9, -2]))
    assert_close(got[0], dot_product_attention(q, k, v)[0], 1e-14)
    assert not got[1].any()


def test_lengths_without_batch_axes(rng):
    q, k, v, ct = (jnp.asarray(rng.standard_normal((3, 5, 2, 4))) for _ in range(4))
    lengths = jnp.asarray([5, 0, 3])
    one = jax.grad(
        lambda q, k, v, n, ct: jnp.vdot(
            dot_product_attention(q, k, v, key_value_seq_lengths=n), ct
        ),
        (0, 1, 2),
    )
    together = jax.grad(
        lambda q, k, v: jnp.vdot(dot_product_attention(q, k, v, key_value_seq_lengths=lengths), ct),
        (0, 1, 2),
    )
    for got, expected in zip(jax.vmap(one)(q, k, v, lengths, ct), together(q, k, v), strict=True):
        assert_close(got, expected, 1e-13)
    for x, y in zip(one(q[2], k[2], v[2], 3, ct[2]), together(q, k, v), strict=True):
        assert_close(x, y[2], 1e-13)


def test_a_value_of_zero_has_a_gradient_under_a_dominant_sink():
    """out = 0 and lse = sink, but the row sees keys."""
    x = jnp.ones((1, 3, 1, 4), jnp.float32)
    sink = jnp.full(1, 20.0, jnp.float32)
    grad = jax.grad(lambda v: dot_product_attention(x, x, v, sink=sink).sum())
    expected = 3 / (np.exp(20 - 2) + 3)  # each of three queries gives each of three keys a third
    assert_close(grad(0 * x), np.full(x.shape, expected), 1e-6)


def test_no_batch_entries_with_segments_and_positions():
    x, index = jnp.ones((0, 8, 2, 4)), jnp.zeros((0, 8), jnp.int32)
    tokens = {"query_segment_ids": index, "key_value_segment_ids": index}
    tokens |= {"query_positions": index, "key_value_positions": index}
    grad = jax.grad(lambda x: dot_product_attention(x, x, x, **tokens).sum())(x)
    assert grad.shape == x.shape


def test_plain_backward_takes_numpy_arrays_of_another_width(rng):
    """With x64 off, NumPy's float64 is float32, in cotangents as in operands."""
    q, k, v, dout = (rng.standard_normal((1, 5, 2, 4)) for _ in range(4))
    with jax.enable_x64(False):
        out, lse = dot_product_attention(q, k, v, return_residual=True)
        grads = dot_product_attention_bwd(dout, q, k, v, out=np.asarray(out, float), lse=lse)
        _, pullback = jax.vjp(dot_product_attention, *(jnp.asarray(x) for x in (q, k, v)))
        assert_close(grads.key, pullback(jnp.asarray(dout))[1], 1e-6)
        with pytest.raises(TypeError, match="lse must be a floating-point array, got NoneType"):
            dot_product_attention_bwd(dout, q, k, v, out=out, lse=None)
