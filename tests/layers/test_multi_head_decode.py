"""Decoding with the caches of linen and NNX."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from layers.frameworks import arrays, jitted, lenient, random_params
from layers.multi_head_cases import E, N, S, T

from jax_attn_bwd import Rotary, attention_fn, mods

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

from jax_attn_bwd.layers import flax_linen, flax_nnx  # noqa: E402


def linen_params(**options):
    layer = nn.MultiHeadDotProductAttention(N, param_dtype="float64", **options)
    init = lambda key, *inputs: layer.init(key, *inputs)["params"]
    return random_params(type("Layer", (), {"init": staticmethod(init)}), arrays((2, T, E), (2, S, E)))


LINEN = {
    "theirs": nn.MultiHeadDotProductAttention,
    "flax": partial(nn.MultiHeadDotProductAttention, attention_fn=attention_fn),
    "flax_causal": partial(
        nn.MultiHeadDotProductAttention, attention_fn=partial(attention_fn, is_causal=True)
    ),
    "own": flax_linen.MultiHeadDotProductAttention,
    "own_causal": partial(flax_linen.MultiHeadDotProductAttention, is_causal=True),
    "window": partial(flax_linen.MultiHeadDotProductAttention, local_window_size=2),
    "mask_mod": partial(flax_linen.MultiHeadDotProductAttention, mask_mod=mods.sliding_window(2)),
    "rotary": partial(flax_linen.MultiHeadDotProductAttention, rotary=Rotary(size=2)),
}


@pytest.mark.parametrize("name", list(LINEN)[1:])
def test_decoding_in_linen(name):
    """Step by step as the causal pass over the whole sequence; the cache is Flax's."""
    (x,) = arrays((2, T, E))
    options = {"param_dtype": "float64"}
    cls = LINEN[name]
    layer = cls(N, decode=True, **options)
    params = linen_params()
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x)["cache"]
    with lenient():
        theirs = LINEN["theirs"](N, decode=True, **options)
        assert shapes == jax.eval_shape(theirs.init, jax.random.key(0), x)["cache"]
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    variables = lambda cache: {"params": params, "cache": cache}
    step = jitted(lambda cache, x: layer.apply(variables(cache), x, mutable=["cache"]))
    steps = []
    for t in range(T):
        with lenient():  # Flax's own part mixes int32 and int64
            out, state = step(cache, x[:, t : t + 1])
        cache = state["cache"]
        steps.append(out)
    causal = jnp.tril(jnp.ones((1, 1, T, T), bool))
    mask = causal & ~jnp.tril(causal, -3) if name in ("window", "mask_mod") else causal
    with lenient():
        whole = LINEN["rotary" if name == "rotary" else "theirs"](N, **options)
        expected = jitted(whole.apply)({"params": params}, x, mask=mask)
    assert_close(jnp.concatenate(steps, 1), expected, 1e-12)
    assert int(cache["cache_index"]) == T
    if name == "own":
        with lenient():
            assert np.isnan(step(cache, x[:, :1])[0]).all()
        with pytest.raises(ValueError, match="the cache must have room for 1 token more, got 6, of which 6"):
            layer.apply(variables(cache), x[:, :1], mutable=["cache"])


def test_weights_of_a_causal_step_of_decoding():
    """What is sown are the weights that were used."""
    (x,) = arrays((2, T, E))
    layer = LINEN["flax_causal"](N, decode=True, param_dtype="float64")
    variables = jitted(layer.init)(jax.random.key(0), x)
    for t in range(3):
        with lenient():
            _, state = layer.apply(
                variables, x[:, t : t + 1], sow_weights=True, mutable=["cache", "intermediates"]
            )
        variables = {**variables, "cache": state["cache"]}
    (weights,) = state["intermediates"]["attention_weights"]
    np.testing.assert_array_equal(weights > 0, np.broadcast_to(np.arange(T) < 3, weights.shape))


@pytest.mark.parametrize(
    "name", [pytest.param("flax", marks=thorough), "own", pytest.param("window", marks=thorough), "mask_mod"]
)
def test_decoding_in_nnx(name):
    """Grouped heads; `is_causal` at the call changes nothing in ours (that of Flax 0.12.8 heeds it)."""
    (x,) = arrays((2, T, E))
    kind = {"flax": partial(nnx.MultiHeadAttention, attention_fn=attention_fn)}
    cls = kind.get(name, flax_nnx.MultiHeadAttention)
    options = {"window": {"local_window_size": 2}, "mask_mod": {"mask_mod": mods.sliding_window(2)}}
    options = {"num_kv_heads": 2, "param_dtype": "float64"} | options.get(name, {})
    layer = cls(N, E, **options, rngs=nnx.Rngs(0))
    layer.init_cache(x.shape, "float64")
    step = nnx.jit(lambda layer, x: layer(x, decode=True, is_causal=name == "own"))
    with lenient():
        steps = [step(layer, x[:, t : t + 1]) for t in range(T)]
    expected = layer(x, decode=False, is_causal=True)
    assert_close(jnp.concatenate(steps, 1), expected, 1e-12)
    assert int(layer.cache_index[...]) == T
    if name == "own":
        with pytest.raises(ValueError, match="the cache must have room for 1 token more, got 6, of which 6"):
            layer(x[:, :1], decode=True)
        with lenient():
            assert np.isnan(step(layer, x[:, :1])).all()
