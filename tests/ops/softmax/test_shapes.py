"""Shapes and options drawn at random."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from helpers import OPERATORS, assert_close, thorough
from hypothesis import given, settings
from hypothesis import strategies as st

operator = next(o for o in OPERATORS if o.name == "scaled_masked_softmax")


@thorough
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
        arrays["sink"] = jnp.asarray(rng.standard_normal(broadcasting(shape[:at] + shape[at + 1 :])))
    names = tuple(arrays)
    if draw(st.booleans()):
        arrays["mask"] = jnp.asarray(rng.random(broadcasting(shape)) < 0.6)
    options = {"axis": axis, "fully_masked": draw(st.sampled_from(["zero", "uniform"]))}

    def run(function):
        def outputs(inputs):
            return function(**{**arrays, **inputs}, **options)[0]

        @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
        def both(inputs):
            y, pullback = jax.vjp(outputs, inputs)
            return y, pullback(jnp.asarray(np.random.default_rng(1).standard_normal(y.shape)))[0]

        return both({n: arrays[n] for n in names})

    (got, gradients), (expected, exact) = run(operator.call), run(operator.reference)
    assert_close(got, expected, 1e-13)
    for name in names:
        assert_close(gradients[name], exact[name], 1e-12, name)
