"""A softmax among its neighbours compiles to what the plain formula does: no loop of its own."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

from jax_attn_bwd import scaled_masked_softmax
from jax_attn_bwd._core import fusion, targets


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


def sines(function, *args):
    return len(re.findall(r" sine\(", jax.jit(function).lower(*args).compile().as_text()))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.5},
        {"scale": -0.5},
        {"scale": np.ones((64, 1), np.float32)},
        {"fully_masked": "uniform"},
        {"scale": 2.0**-101},
    ],
    ids=["bare", "scale", "negative", "rows", "uniform", "tiny"],
)
def test_what_computes_the_logits_is_computed_as_often_as_in_front_of_the_plain_formula(options):
    x = jnp.ones((64, 1000), jnp.float32)
    ours = sines(lambda x: scaled_masked_softmax(jnp.sin(x), **options), x)
    assert ours <= sines(lambda x: jax.nn.softmax(jnp.sin(x)), x)


def temporary_bytes(x, **options):
    """The bytes that a step takes, forward and backward."""

    def step(x, dy):
        y, pullback = jax.vjp(lambda x: scaled_masked_softmax(x, **options), x)
        return y, *pullback(dy)

    return jax.jit(step).lower(x, x).compile().memory_analysis().temp_size_in_bytes


NARROW = jax.ShapeDtypeStruct((8, 8, 256, 256), jnp.bfloat16)


def test_a_scale_is_not_made_an_array():
    assert temporary_bytes(NARROW, scale=0.125) < 0.1 * NARROW.size


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="older ones compute bfloat16 in arrays of float32")
def test_a_masked_step_in_bfloat16_makes_no_array_in_float32():
    mask = jnp.arange(256) < 200
    assert temporary_bytes(NARROW, mask=mask, scale=0.125) < 1.1 * 2 * NARROW.size


def test_what_makes_one_kernel_of_a_gpu_s_backward_is_the_identity_to_second_order(monkeypatch):
    """Where several numbers are their row's greatest, too."""
    monkeypatch.setattr(targets, "platform", lambda: "gpu")
    y = jnp.array([[0.3, 0.3, 0.3, 0.1], [0.0, 0.7, 0.0, 0.3]])
    cube = lambda y: (fusion.read_in_one_kernel(y, -1) ** 3).sum()
    gradient, second = jax.jit(lambda y: (jax.grad(cube)(y), jax.hessian(cube)(y)))(y)
    assert_close(gradient, 3 * y**2, 1e-15)
    assert_close(second.reshape(8, 8), jnp.diag(6 * y.ravel()), 1e-15)
    found = jax.jit(lambda y: fusion.read_in_one_kernel(y, -1)).lower(y).as_text()
    assert found.count("stablehlo.minimum") == 1
    # A barrier would part what makes rows that are too long for it from what sums them.
    barriers = lambda n: (
        jax.jit(lambda y: fusion.read_in_one_kernel(y, -1))
        .lower(jax.ShapeDtypeStruct((2, n), jnp.bfloat16))
        .as_text()
        .count("optimization_barrier")
    )
    assert (barriers(16384), barriers(16385)) == (1, 0)


def test_rows_of_minus_infinity_are_0_in_the_library_loop_of_one_cpu(one_device):
    x = jnp.full((64, 128), -jnp.inf).at[3:].set(0.0)
    softmax = jax.jit(lambda x: scaled_masked_softmax(x, scale=0.5))
    jax.clear_caches()  # what was traced for other devices
    expected = np.where(np.arange(64)[:, None] < 3, 0, np.full((64, 128), 1 / 128))
    np.testing.assert_array_equal(softmax(x), expected)
    # of entries that the compiler knows to be equal, and to be known
    wide = jax.jit(lambda column: softmax(jnp.broadcast_to(column, (64, 128))))
    np.testing.assert_array_equal(wide(x[:, :1]), expected)
    np.testing.assert_array_equal(jax.jit(lambda: softmax(jnp.full((64, 128), -jnp.inf)))(), 0 * expected)
    jax.clear_caches()
