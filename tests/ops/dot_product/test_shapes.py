"""Shapes and options drawn at random; a bias of any rank."""

from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from helpers import OPERATORS, assert_close, thorough
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_attn_bwd import dot_product_attention

operator = next(o for o in OPERATORS if o.name == "dot_product_attention")

QUICK = {"xla_backend_optimization_level": 0}  # for what runs once: compiling it takes longer


def normal(*shape, seed=0, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


sizes = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 13])


@thorough
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

        @partial(jax.jit, compiler_options=QUICK)
        def both(inputs):
            out, pullback = jax.vjp(outputs, inputs)
            seeds = np.random.default_rng(1)
            return out, pullback(tuple(jnp.asarray(seeds.standard_normal(x.shape)) for x in out))[0]

        return both({n: arrays[n] for n in names})

    (got, gradients), (expected, exact) = run(operator.call), run(operator.reference)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, 1e-12)
    for name in names:
        assert_close(gradients[name], exact[name], 1e-11, name)


@thorough
def test_gradient_of_a_bias_of_any_rank():
    q, k, dout = normal(2, 5, 4, 8), normal(2, 7, 2, 8, seed=1), normal(2, 5, 4, 8, seed=2)
    for shape in ((), (1,), (7,), (5, 1), (4, 1, 7), (1, 1, 5, 7)):
        bias = normal(*shape, seed=3)
        loss = lambda bias: (dot_product_attention(q, k, k, bias) * dout).sum()
        widen = lambda bias: jnp.broadcast_to(bias, (2, 4, 5, 7))
        full, narrow = jax.vjp(widen, bias)
        assert_close(jax.grad(loss)(bias), narrow(jax.grad(loss)(full))[0], 1e-12)


@thorough
def test_export_of_a_broadcast_bias_with_symbolic_length():
    (t,) = jax.export.symbolic_shape("t")

    def gradient(q, bias):
        return jax.grad(lambda b: jnp.sin(dot_product_attention(q, q, q, b)).sum())(bias)

    types = (jax.ShapeDtypeStruct((1, t, 2, 4), np.float64), jax.ShapeDtypeStruct((2, 1, t), np.float64))
    exported = jax.export.export(jax.jit(gradient))(*types)
    q, bias = normal(1, 9, 2, 4), normal(2, 1, 9, seed=1)
    assert_close(exported.call(q, bias), gradient(q, bias), 1e-12)
