"""`MultiHeadAttention` with `forward_mode=True`: its tangents, along all parameters and inputs."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close, thorough
from layers.frameworks import (
    arrays,
    assert_all_close,
    drawn,
    frameworks,
    imported,
    jitted,
    lenient,
    multi_head,
    random_params,
)
from layers.multi_head_cases import E, N, some_mask
from layers.test_decode_with_cache import decoder

from jax_attn_bwd import Rotary

T, S = 3, 4
ROTARY = {"rotary": Rotary(size=2), "forward_mode": True}


def assert_tangents(function, *arguments):
    """Those of `function` are its differences along a random direction."""
    along, h = drawn(arguments, 6), 1e-5
    _, got = jitted(lambda *x: jax.jvp(function, x, along))(*arguments)
    values = jitted(function)
    above, below = (values(*jax.tree.map(lambda x, t, h=h: x + h * t, arguments, along)) for h in (h, -h))
    assert_close(got, (above - below) / (2 * h), 1e-8)


@pytest.mark.parametrize("framework", frameworks("flax_linen"))
def test_tangents_are_differences(framework):
    inputs, mask = tuple(arrays((2, T, E), (2, S, E), (2, S, E))), some_mask(2, 1, T, S)
    layer = multi_head(framework, True, **ROTARY)
    assert_tangents(partial(layer.call, mask=mask), random_params(layer, inputs), *inputs)


@thorough
def test_with_a_function_between_projections_and_attention():
    eqx, ours = imported("equinox")
    layer = ours.MultiheadAttention(N, E, **ROTARY, dtype=jnp.float64, key=jax.random.key(0))
    params, static = eqx.partition(layer, eqx.is_array)
    between = lambda q, k, v: (jnp.sin(q), k, v)
    call = lambda params, x: eqx.combine(params, static)(x, x, x, process_heads=between)
    assert_tangents(call, params, *arrays((T, E)))


def decoded_and_whole(framework, x):
    """(step by step, the causal pass), both of `x [batch, T, E]`."""
    if framework == "flax_linen":
        cls = partial(imported(framework)[1].MultiHeadAttention, N, param_dtype="float64", **ROTARY)
        step, causal = cls(decode=True), cls(is_causal=True)
        made = step.init(jax.random.key(0), x)

        def decoded(x):
            variables, outs = made, []
            for t in range(T):
                out, new = step.apply(variables, x[:, t : t + 1], mutable=["cache"])
                variables, outs = {**made, **new}, [*outs, out]
            return jnp.concatenate(outs, 1)

        return decoded, lambda x: causal.apply({"params": made["params"]}, x)
    if framework == "flax_nnx":
        nnx, ours = imported(framework)

        def called(decode, x):
            layer = ours.MultiHeadAttention(
                N, E, decode=decode, param_dtype="float64", **ROTARY, rngs=nnx.Rngs(0)
            )
            if not decode:
                return layer(x, is_causal=True)
            layer.init_cache(x.shape, "float64")
            return jnp.concatenate([layer(x[:, t : t + 1]) for t in range(T)], 1)

        return partial(called, True), partial(called, False)
    layer = decoder(framework, x, **ROTARY)

    def decoded(x):
        prompt, cache = layer.step(layer.cache, x[:, : T - 1])
        return jnp.concatenate([prompt, layer.step(cache, x[:, T - 1 :])[0]], 1)

    return decoded, layer.whole


@pytest.mark.parametrize("framework", frameworks())
def test_tangents_of_steps_with_a_cache_are_those_of_the_causal_pass(framework):
    (x,) = arrays((2, T, E))
    with lenient():  # Flax's own part mixes int32 and int64
        both = decoded_and_whole(framework, x)
        got, expected = jitted(lambda x, along: [jax.jvp(f, (x,), (along,)) for f in both])(x, jnp.cos(x))
    assert_all_close(got, expected, 1e-12)


@pytest.mark.parametrize("framework", frameworks("flax_nnx")[:2])
def test_an_attention_of_the_caller_s_is_asked_itself(framework):
    inputs, attend = arrays((2, T, E)) * 3, lambda q, k, v, **_: v
    layer = multi_head(framework, True, attention_fn=attend, forward_mode=True)
    with pytest.raises(ValueError, match=r"forward_mode.* must be left out with an attention_fn"):
        jax.eval_shape(layer.init, jax.random.key(0), *inputs)
