"""Sums of products by which JAX 0.10 would be slow on a CPU: without the axes of length 1."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close

from jax_attn_bwd._core import targets
from jax_attn_bwd._core.products import sum_of_products


@pytest.fixture(autouse=True)
def one_cpu_with_jax_0_10(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    monkeypatch.setattr(targets, "is_one_cpu", lambda: True)


@pytest.mark.parametrize("shape", [(1, 3, 1, 4, 1), (2, 1, 3), (1, 1), (1,), (5,), (3, 0, 1)], ids=str)
@pytest.mark.parametrize("keepdims", [False, True])
def test_are_those_of_all_axes(shape, keepdims, rng):
    x = jnp.asarray(rng.normal(size=shape))
    y = jnp.asarray(rng.normal(size=(1, *shape[1:])))  # which may be broadcast
    for axis in range(-len(shape), len(shape)):
        found = sum_of_products(x, y, axis, keepdims)
        expected = (x * y).sum(axis, keepdims=keepdims)
        assert found.shape == expected.shape
        assert_close(found, expected, 1e-12)


def test_no_axis_of_length_1_is_in_the_sum():
    x = jnp.ones((1, 3, 1, 4))
    products = [e for e in jax.make_jaxpr(sum_of_products)(x, x).eqns if e.primitive.name == "mul"]
    assert [e.outvars[0].aval.shape for e in products] == [(3, 4)]
