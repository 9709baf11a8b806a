"""Rows of huge tied logits, dominant sinks, dtypes of lse, a learned temperature."""

from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough

from jax_attn_bwd import dot_product_attention, mods
from jax_attn_bwd.ops.dot_product import plan as planning


def normal(*shape, seed=0, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def test_lse_is_wide_whatever_the_inputs():
    for dtype, expected in ((jnp.bfloat16, "float32"), (np.float32, "float32"), (np.float64, "float64")):
        q = normal(1, 5, 2, 4, dtype=dtype)
        out, lse = dot_product_attention(q, q, q, return_residual=True)
        assert (out.dtype, lse.dtype) == (dtype, expected)


@thorough
def test_a_learned_temperature_goes_into_the_query():
    q, k, v = (normal(1, 7, 2, 4, seed=s) for s in range(3))
    dout = normal(1, 7, 2, 4, seed=4)
    got = jax.grad(lambda t: (dot_product_attention(q * t, k, v, scale=1.0) * dout).sum())(0.7)
    step = 1e-6
    at = lambda t: (dot_product_attention(q, k, v, scale=t) * dout).sum()
    np.testing.assert_allclose(got, (at(0.7 + step) - at(0.7 - step)) / (2 * step), rtol=1e-7)


@pytest.mark.parametrize("size", [25.0, 2000.0])
def test_a_dominant_sink_still_has_a_gradient(size):
    """Where lse rounds to the sink, the row is not taken for one that sees nothing."""
    q, k, v = (normal(1, 8, 2, 4, seed=s, dtype=np.float32) for s in range(3))
    dout = normal(1, 8, 2, 4, seed=4, dtype=np.float32)

    def loss(sink, *arrays):
        *qkv, dout = arrays
        return (dot_product_attention(*qkv, sink=sink) * dout).sum()

    sink = jnp.full(2, size, jnp.float32)
    got = jax.grad(loss)(sink, q, k, v, dout)
    expected = jax.grad(loss)(*(x.astype(np.float64) for x in (sink, q, k, v, dout)))
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    _, lse = dot_product_attention(q, k, v, sink=sink, return_residual=True)
    assert_close(lse, np.full(lse.shape, size), 1e-6)


@pytest.fixture(params=[False, True], ids=["whole", "tiles"])
def _form(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(planning, "MATERIALIZED_PLANE", 0)


@pytest.mark.usefixtures("_form")
@pytest.mark.parametrize("fill", [-1e9, float(np.finfo(np.float32).min)])
def test_rows_of_huge_tied_logits(fill):
    """A float mask over a whole row leaves a uniform row; lse alone would round log S away."""
    q, k, v, dout = (normal(1, n, 2, 8, seed=n, dtype=np.float32) for n in (5, 7, 7, 5))
    bias = jnp.zeros((1, 2, 5, 7), jnp.float32).at[0, 0, 2].set(fill).at[0, 1, :4].set(fill)

    def gradients(function):
        loss = lambda q, k, v, bias: (function(q, k, v, bias) * dout).sum()
        return jax.grad(loss, (0, 1, 2, 3))(q, k, v, bias)

    got = gradients(dot_product_attention)
    for a, b in zip(got, gradients(jax.nn.dot_product_attention), strict=True):
        assert_close(a, b, 1e-6)


@pytest.mark.usefixtures("_form")
def test_a_sink_tied_with_huge_logits_has_its_share():
    """Each of 7 keys and the sink has an eighth, which lse = -1e9 + log 8 in float32 does not tell."""
    q, bias, sink = jnp.zeros((1, 5, 2, 8), jnp.float32), jnp.float32(-1e9), jnp.full(2, -1e9, jnp.float32)
    k, v, dout = (normal(1, n, 2, 8, seed=n, dtype=np.float32) for n in (7, 7, 5))
    bias = jnp.broadcast_to(bias, (1, 2, 5, 7))
    got = jax.grad(lambda sink: (dot_product_attention(q, k, v, bias, sink=sink) * dout).sum())(sink)
    assert_close(got, -jnp.einsum("btnh,bsnh->n", dout, v) / 64, 1e-6)


def test_tangent_of_a_sink_tied_with_huge_logits():
    x, bias, sink = jnp.zeros((1, 7, 1, 1), jnp.float32), jnp.float32(-1e9), jnp.full(1, -1e9, jnp.float32)
    ones, bias = jnp.ones_like(x), jnp.broadcast_to(bias, (1, 1, 7, 7))
    call = lambda v, sink: dot_product_attention(x, x, v, bias, sink=sink, forward_mode=True)
    out, dout = jax.jvp(call, (ones, sink), (ones, jnp.ones(1, jnp.float32)))
    assert_close(out, 7 / 8 * ones, 1e-6)
    assert_close(dout, (7 / 8 - 7 / 64) * ones, 1e-6)


def test_tangents_of_what_is_hidden_are_not_read():
    x, hidden = jnp.ones((1, 3, 1, 1), jnp.float32), np.tri(3, k=-1, dtype=bool)[None, None]
    bias, along = (jnp.where(hidden, at, np.float32(1)) for at in (-np.inf, np.nan))
    call = partial(dot_product_attention, x, x, x, forward_mode=True)
    _, dout = jax.jvp(call, (bias,), (along,))
    assert not dout.any()  # what is seen moves alike


def test_tangent_of_a_sink_of_minus_infinity_in_rows_that_see_nothing():
    x = jnp.ones((1, 3, 1, 1), jnp.float32)
    sink, lengths = jnp.full(1, -jnp.inf, jnp.float32), jnp.asarray([2], jnp.int32)
    call = partial(dot_product_attention, x, x, x, query_seq_lengths=lengths, forward_mode=True)
    _, dout = jax.jvp(lambda sink: call(sink=sink), (sink,), (jnp.ones(1, jnp.float32),))
    assert not dout.any()


@pytest.mark.usefixtures("_form")
def test_a_sink_of_minus_infinity_has_no_gradient_in_rows_that_see_nothing():
    q, k, v, dout = (normal(1, n, 2, 8, seed=n) for n in (5, 7, 7, 5))

    def loss(sink):
        out = dot_product_attention(q, k, v, sink=sink, query_seq_lengths=jnp.asarray([3], jnp.int32))
        return (out * dout).sum()

    assert not jax.grad(loss)(jnp.full(2, -jnp.inf)).any()


def test_a_value_of_zero_has_a_gradient_under_a_dominant_sink():
    """out = 0 and lse = sink, but the row sees keys."""
    x = jnp.ones((1, 3, 1, 4), jnp.float32)
    sink = jnp.full(1, 20.0, jnp.float32)
    grad = jax.grad(lambda v: dot_product_attention(x, x, v, sink=sink).sum())
    expected = 3 / (np.exp(20 - 2) + 3)  # each of three queries gives each of three keys a third
    assert_close(grad(0 * x), np.full(x.shape, expected), 1e-6)


@pytest.mark.usefixtures("_form")
@pytest.mark.parametrize("cap", [1e30, 1e32, 1e38])
def test_a_cap_that_dwarfs_the_logits_leaves_them(cap):
    """`logits / cap` is flushed to 0 where it is below 1e-38: the softmax would be flat."""
    q, k, v = (normal(1, n, 2, 8, seed=n, dtype=np.float32) for n in (5, 7, 7))

    def loss(q, **options):
        return jnp.sin(dot_product_attention(q, k, v, **options)).sum()

    expected = jax.value_and_grad(loss)(q)
    for options in ({"logits_soft_cap": cap}, {"score_mod": mods.soft_cap(cap)}):
        got = jax.value_and_grad(partial(loss, **options))(q)
        for a, b in zip(got, expected, strict=True):
            assert_close(a, b, 1e-5)
