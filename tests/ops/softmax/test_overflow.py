"""Logits beyond what float32 holds: the softmax of scale * x + bias is that of the exact logits."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import interpreted, thorough

from jax_attn_bwd import scaled_masked_softmax
from jax_attn_bwd._core import pallas

X = np.asarray([[1e38, 9e37, -1e38, 0], [-1e38, -1e38, -2e38, -3e38], [3e38, 3e38, 0, 1]], np.float32)
BIAS = np.asarray([[0, 3e38, 1, 0], [0.5, -0.5, 0, 3e38], [0, 0, 3e38, 0]], np.float32)
IMPLEMENTATIONS = (
    "xla",
    pytest.param("mosaic_tpu", marks=pytest.mark.kernel),
    pytest.param("mosaic_gpu", marks=[pytest.mark.kernel, interpreted]),
)


@pytest.mark.parametrize("scale", [*(pytest.param(scale, marks=thorough) for scale in (10.0, 2.0)), -10.0])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_with_a_bias(implementation, scale):
    logits = scale * X.astype(np.float64) + BIAS.astype(np.float64)
    exact = np.exp(logits - logits.max(-1, keepdims=True))
    exact /= exact.sum(-1, keepdims=True)

    @jax.jit
    def step(x, bias, dy):
        f = lambda x, b: scaled_masked_softmax(x, scale=scale, bias=b, implementation=implementation)
        y, pullback = jax.vjp(f, x, bias)
        return y, *pullback(dy)

    dy = np.linspace(-1, 1, X.size, dtype=np.float32).reshape(X.shape)
    kernel = implementation != "xla"
    with pallas.interpreting(implementation) if kernel else contextlib.nullcontext():
        y, dx, dbias = step(X, BIAS, dy)
    np.testing.assert_allclose(y, exact, atol=2e-7)
    dz = exact * (dy - (exact * dy).sum(-1, keepdims=True))
    np.testing.assert_allclose(dx, scale * dz, atol=4e-6)
    np.testing.assert_allclose(dbias, dz, atol=4e-7)


def test_with_a_sink():
    y = scaled_masked_softmax(X, scale=10.0, bias=jnp.asarray(BIAS), sink=jnp.asarray([0.0, 0.0, -jnp.inf]))
    np.testing.assert_allclose(y, [[0, 1, 0, 0], [0, 0, 0, 0], [0.5, 0.5, 0, 0]])
