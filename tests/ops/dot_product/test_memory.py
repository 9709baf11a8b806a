"""Memory is linear in the sequence; what is saved; what is computed once."""

import re
from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import saved_arrays, thorough

from jax_attn_bwd import MultiHeadAttentionParams, dot_product_attention, mods, multi_head_attention
from jax_attn_bwd._core import targets


def normal(*shape, seed=0, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def temporary_bytes(T, order=1, **options):
    """The bytes that one compiled gradient takes (order 1), or the gradient of its square (order 2)."""

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
        pytest.param({}, marks=thorough),
        pytest.param({"is_causal": True}, marks=thorough),
        {"is_causal": True, "local_window_size": (100, 0), "logits_soft_cap": 5.0},
        pytest.param({"key_value_seq_lengths": np.array([1000], np.int32)}, marks=thorough),
        pytest.param({"dropout_rate": 0.1, "dropout_key": np.array([1, 2], np.uint32)}, marks=thorough),
        pytest.param({"mask": np.ones((1, 1, 1, 1), bool)}, marks=thorough),
    ],
    ids=["full", "causal", "window", "lengths", "dropout", "mask"],
)
def test_memory_is_linear_in_the_sequence(options):
    short, long = temporary_bytes(2048, **options), temporary_bytes(8192, **options)
    assert long < 4.5 * short
    assert long < 8192 * 8192 * 4 / 4, "an array of T x S would need more"


def test_a_step_with_a_mask_as_a_function_needs_a_small_part_of_its_plane():
    """No copies of the gradients, no table of the ranges of documents: beside tiles the output alone."""
    T = 16384
    x, documents = jax.ShapeDtypeStruct((1, T, 1, 64), jnp.float32), jax.ShapeDtypeStruct((1, T), jnp.int32)

    def step(q, k, v, dout, documents):
        attend = partial(dot_product_attention, mask_mod=mods.causal & mods.document, mod_args=(documents,))
        return jax.grad(lambda *a: (attend(*a) * dout).sum(), (0, 1, 2))(q, k, v)

    compiled = jax.jit(step).lower(x, x, x, x, documents).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < T * T / 40


def test_a_mask_array_is_copied_once_to_be_padded():
    T = 4100
    x, mask = jax.ShapeDtypeStruct((1, T, 1, 8), jnp.float32), jax.ShapeDtypeStruct((T, T), bool)

    def step(q, k, v, dout, mask):
        return jax.vjp(partial(dot_product_attention, mask=mask), q, k, v)[1](dout)

    compiled = jax.jit(step).lower(x, x, x, x, mask).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.8 * T * T


@thorough
def test_second_order_memory_stays_far_below_the_plane():
    assert temporary_bytes(2048, order=2, is_causal=True) < 2 * 2048 * 2048 * 4


def test_residuals_are_the_inputs_and_two_outputs():
    q, k, v = normal(2, 9, 4, 8), normal(2, 13, 2, 8, seed=1), normal(2, 13, 2, 6, seed=2)
    (out, lse), pullback = jax.vjp(lambda q: dot_product_attention(q, k, v, return_residual=True), q)
    saved = {x.shape for x in saved_arrays(pullback)}
    assert saved <= {q.shape, k.shape, v.shape, out.shape, lse.shape, ()}


@pytest.mark.parametrize(
    "options",
    [{"is_causal": True}, {"key_value_seq_lengths": np.array([3, 9], np.int32)}, {"logits_soft_cap": 5.0}],
    ids=" ".join,
)
def test_logits_computed_once(options):
    """Where forward and backward of a small plane are one program: two products forward, four backward."""
    x = jax.ShapeDtypeStruct((2, 16, 3, 8), jnp.float32)
    step = jax.grad(lambda *a: (dot_product_attention(*a, **options) ** 2).sum(), (0, 1, 2))
    assert jax.jit(step).lower(x, x, x).compile().as_text().count(" dot(") == 6


def test_what_makes_a_bias_is_computed_once():
    x, bias = jnp.ones((2, 16, 2, 8), jnp.float32), jnp.ones((2, 2, 16, 16), jnp.float32)
    kernels = MultiHeadAttentionParams(value_kernel=jnp.ones((16, 2, 8), jnp.float32))

    def both(x, bias):
        inputs = x.reshape(2, 16, 16)
        out = multi_head_attention(kernels, inputs, num_heads=2, bias=jnp.sin(bias))
        return dot_product_attention(x, x, x, jnp.cos(bias)), out

    compiled = jax.jit(both).lower(x, bias).compile().as_text()
    assert (compiled.count(" sine("), compiled.count(" cosine(")) == (1, 1)


@pytest.mark.parametrize(("chip", "barriers"), [("cpu", 1), ("H200", 0), ("v6e", 0)])
def test_where_a_barrier_keeps_a_bias_whole(chip, barriers):
    """XLA:GPU would pass over the plane once more."""
    x, bias = jnp.ones((2, 16, 2, 8), jnp.float32), jnp.ones((2, 1, 16, 16), jnp.float32)
    with targets.aimed_at(chip):
        program = jax.make_jaxpr(lambda bias: dot_product_attention(x, x, x, jnp.cos(bias)))(bias)
    kept = r"f32\[2,1,16,16\] = (optimization_barrier|\w+\[\s*name=_as_they_are)"
    assert len(re.findall(kept, str(program))) == barriers
