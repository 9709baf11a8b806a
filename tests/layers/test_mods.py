"""Masks and scores as functions in the layers of the four frameworks, and in `attention_fn`."""

import copy
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from layers.frameworks import (
    arrays,
    assert_all_close,
    frameworks,
    jitted,
    multi_head,
    random_params,
    values_and_gradients,
)
from layers.multi_head_cases import E, N, S, T, inputs_of

from jax_attn_bwd import attention_fn, mods

IDS = jnp.asarray([0, 0, 0, 1, 1, 1, 1, 2, 2], jnp.int32)  # document of each token
MASK = mods.document & mods.sliding_window(2, 1)


def scaled_and_capped(logits, *place):
    """What a scale of 0.7 and a cap of 1.5 make of the logits of the default scale, with heads of 3."""
    return mods.soft_cap(1.5)(0.7 * 3**0.5 * logits, *place)


def mask():
    """`[1, 1, T, S]`: `MASK` of `IDS`."""
    index = lambda n: jnp.arange(n, dtype=jnp.int32)
    zero = jnp.zeros((1, 1), jnp.int32)
    return MASK(zero, zero, index(T)[:, None], index(S)[None], IDS)[None, None]


@pytest.mark.parametrize("framework", frameworks("flax_nnx", "haiku"))
def test_functions_are_as_a_mask_and_a_cap(framework):
    """Values and gradients; what a score reads has one, too. A scale comes before the cap."""
    inputs, _ = inputs_of("cross", framework)
    plain = multi_head(framework, True, scale=0.7, logits_soft_cap=1.5)
    layer = multi_head(framework, True, mask_mod=MASK, score_mod=scaled_and_capped)
    params = random_params(plain, inputs)
    run = lambda call: jitted(partial(values_and_gradients, call))(params, *inputs)
    expected = run(partial(plain.call, mask=mask()))
    assert_all_close(run(partial(layer.call, mod_args=(IDS,))), expected, 1e-12)

    layer = multi_head(framework, True, mask_mod=MASK, score_mod=mods.alibi)
    slopes, direction = arrays((2, N))[0]
    weight = arrays(expected[0].shape)[0]
    loss = lambda slopes: jnp.vdot(weight, layer.call(params, *inputs, mod_args=(IDS, slopes)))
    value, gradient = jitted(loss), jitted(jax.grad(loss))(slopes)
    by_difference = (value(slopes + 1e-5 * direction) - value(slopes - 1e-5 * direction)) / 2e-5
    assert_close(jnp.vdot(gradient, direction), by_difference, 1e-7)


@pytest.mark.parametrize("api", ["linen", pytest.param("nnx", marks=thorough)])
def test_functions_need_an_attention_that_takes_them(api):
    """One of the caller's may have them bound: then it is handed what they read."""
    pytest.importorskip("flax")
    from flax import nnx

    from jax_attn_bwd.layers import flax_linen, flax_nnx

    (x,) = arrays((2, T, E))
    args = (IDS[:T],)

    def called(attention, mod_args=args, **options):
        options |= dict(attention_fn=attention, param_dtype="float64")
        if api == "linen":
            layer = flax_linen.MultiHeadAttention(N, **options)
            return layer.init_with_output(jax.random.key(0), x, mod_args=mod_args)[0]
        return flax_nnx.MultiHeadAttention(N, E, decode=False, rngs=nnx.Rngs(0), **options)(
            x, mod_args=mod_args
        )

    bound = partial(attention_fn, mask_mod=mods.document)
    assert_close(called(bound), called(attention_fn, mask_mod=mods.document), 1e-13)
    theirs = nnx.dot_product_attention
    with pytest.raises(TypeError, match=r"mod_args must be left out with an attention_fn .*, got a tuple"):
        called(theirs)
    with pytest.raises(ValueError, match=r"score_mod\b.* must be left out with an attention_fn"):
        called(theirs, (), score_mod=mods.soft_cap(1.0))


@pytest.mark.parametrize(
    "functions", [{"mask_mod": mods.causal}, {"score_mod": mods.soft_cap(1.0)}], ids=list
)
def test_functions_in_a_step_of_decoding_of_flax_s_own_layers(functions):
    """Its row is not known there."""
    q, k = arrays((2, 1, N, 3), (2, S, N, 3))
    numbers = jnp.ones((2, 1, 1, S))
    (name,) = functions
    with pytest.raises(ValueError, match=f"{name} must be None in what may be a step of decoding"):
        attention_fn(q, k, k, mask=numbers, **functions)
    row = jnp.asarray([S - 1], jnp.int32)
    got = attention_fn(q, k, k, mask=numbers, query_positions=row, **functions)
    np.testing.assert_array_equal(
        got, attention_fn(q, k, k, mask=numbers != 0, query_positions=row, **functions)
    )


@pytest.mark.parametrize("framework", ["equinox", "flax_nnx"])
def test_a_deep_copy_of_a_layer_has_its_structure(framework):
    """A target network is such a copy."""
    mask = mods.causal & mods.sliding_window(3)
    if framework == "equinox":
        pytest.importorskip("equinox")
        from jax_attn_bwd.layers import equinox

        layer = equinox.MultiheadAttention(2, 8, mask_mod=mask, key=jax.random.key(0))
    else:
        nnx = pytest.importorskip("flax.nnx")
        from jax_attn_bwd.layers import flax_nnx

        layer = flax_nnx.MultiHeadAttention(2, 8, mask_mod=mask, decode=False, rngs=nnx.Rngs(0))
    jax.tree.map(lambda a, b: a, layer, copy.deepcopy(layer))
