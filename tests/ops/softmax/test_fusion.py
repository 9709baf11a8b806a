"""A softmax among its neighbours compiles to what the plain formula does: no loop of its own."""

import re

import jax
import jax.numpy as jnp
import pytest

from jax_attn_bwd import scaled_masked_softmax


def loops(function, *args):
    """The fusions of the compiled program."""
    entry = jax.jit(function).lower(*args).compile().as_text().split("ENTRY")[1]
    return len(re.findall(r" fusion\(", entry))


@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_gradient_between_neighbours_takes_the_loops_of_the_plain_formula(scale):
    x, bias, factor = (jnp.ones((n, n, 64, 64), jnp.float32) for n in (8, 1, 1))

    def program(softmax):
        return jax.grad(lambda x, b, f: (softmax(x + b) * f).sum() ** 2, argnums=(0, 1))

    ours = loops(program(lambda x: scaled_masked_softmax(x, scale=scale)), x, bias, factor)
    plain = loops(program(lambda x: jax.nn.softmax(scale * x)), x, bias, factor)
    assert ours <= plain


def test_gradient_alone_takes_the_loops_of_the_plain_formula():
    x = jnp.ones((4, 8, 64, 64), jnp.float32)
    ours, plain = (
        loops(jax.grad(lambda x, f=f: (f(x) ** 2).sum()), x) for f in (scaled_masked_softmax, jax.nn.softmax)
    )
    assert ours <= plain


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="older ones compute bfloat16 in arrays of float32")
def test_a_masked_step_in_bfloat16_makes_no_array_in_float32():
    x, mask = jax.ShapeDtypeStruct((8, 8, 256, 256), jnp.bfloat16), jnp.arange(256) < 200

    def step(x, dy):
        y, pullback = jax.vjp(lambda x: scaled_masked_softmax(x, mask), x)
        return y, *pullback(dy)

    temporary = jax.jit(step).lower(x, x).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 1.1 * x.size * x.dtype.itemsize
