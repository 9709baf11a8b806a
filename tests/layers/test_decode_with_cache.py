"""Decoding with the caches of Haiku and Equinox; those of Flax are in `test_multi_head_decode.py`."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from layers.frameworks import HEADS as N
from layers.frameworks import arrays, imported, jitted, values_and_gradients

from jax_attn_bwd import Rotary, mods

T, E = 5, 12
OPTIONS = {
    "plain": {},
    "window": {"local_window_size": (2, 0)},
    "mask_mod": {"mask_mod": mods.sliding_window(2)},
    "rotary": {"rotary": Rotary(size=2), "logits_soft_cap": 2.0},
}


class Decoder:
    """`MultiHeadAttention` with a cache: `cache`, `step(cache, x, **tokens)`, `whole(x)`, `index(cache)`."""

    @staticmethod
    def haiku(x, **options):
        hk, ours = imported("haiku")
        uniform = hk.initializers.RandomUniform(-1, 1)
        options = {"key_size": 3, "w_init": uniform, "b_init": uniform} | options

        def transformed(**more):
            def forward(x, mask=None, **tokens):
                return ours.MultiHeadAttention(N, **options, **more)(x, x, x, mask, **tokens)

            return hk.without_apply_rng(hk.transform_with_state(forward))

        decoder = transformed(cache_length=x.shape[-2])
        params, cache = decoder.init(jax.random.key(0), x[..., :1, :])

        def step(cache, x, **tokens):
            return decoder.apply(params, cache, x, **tokens)

        def whole(x, **more):
            return transformed(is_causal=True).apply(params, {}, x, **more)[0]

        index = lambda cache: next(iter(cache.values()))["cache_index"]
        return SimpleNamespace(cache=cache, step=step, whole=whole, index=index)

    @staticmethod
    def equinox(x, **options):
        eqx, ours = imported("equinox")
        names = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
        make = partial(ours.MultiheadAttention, N, x.shape[-1], dtype=x.dtype, **names, **options)
        layer, causal = (make(key=jax.random.key(0), is_causal=c) for c in (False, True))
        cache = jax.vmap(lambda _: layer.init_cache(x.shape[1]))(jnp.arange(x.shape[0]))
        shared = ("mask",)

        def step(cache, x, **tokens):
            axes = {name: None if name in shared else 0 for name in tokens}
            tokens = {
                name: n if name in shared else jnp.broadcast_to(n, (x.shape[0], n.shape[-1]))
                for name, n in tokens.items()
            }
            one = lambda cache, x, tokens: layer.decode(x, x, x, cache, **tokens)
            return jax.vmap(one, in_axes=(0, 0, axes))(cache, x, tokens)

        def whole(x, mask=None):
            return jax.vmap(lambda x: causal(x, x, x, mask))(x)

        return SimpleNamespace(cache=cache, step=step, whole=whole, index=lambda cache: cache.tokens[0])


def decoder(framework, *arguments, **options):
    return getattr(Decoder, framework)(*arguments, **options)


def by_default(chosen):
    """The other framework is left to the thorough tier."""
    marks = {name: [thorough] * (name != chosen) for name in ("haiku", "equinox")}
    return pytest.mark.parametrize("framework", [pytest.param(n, marks=m) for n, m in marks.items()])


@pytest.mark.parametrize(
    ("framework", "name"),
    [
        ("haiku", "rotary"),
        *(
            pytest.param(*of, marks=thorough)
            for of in (("equinox", "rotary"), ("haiku", "window"), ("equinox", "mask_mod"))
        ),
    ],
)
def test_steps_are_the_causal_pass(framework, name):
    """A prompt in one call, then token by token, as the pass over the whole sequence; with gradients."""
    (x,) = arrays((2, T, E))
    layer = decoder(framework, x, **OPTIONS[name])

    def decoded(x):
        prompt, cache = layer.step(layer.cache, x[:, :4])
        return jnp.concatenate([prompt, layer.step(cache, x[:, 4:])[0]], 1)

    run = lambda f: jitted(partial(values_and_gradients, f))(x)
    for got, expected in zip(*map(jax.tree.leaves, (run(decoded), run(layer.whole))), strict=True):
        assert_close(got, expected, 1e-12)


@by_default("equinox")
def test_rows_that_begin_at_different_places(framework):
    """Left-padded rows, each decoded at its own offset, as each alone; two tokens a step, or one."""
    (x,) = arrays((2, T, E))
    padding = np.array([[2], [0]])
    layer = decoder(framework, x, rotary=Rotary(base=10.0, size=2, interleaved=True), local_window_size=3)
    keys = dict(
        key_value_positions=jnp.asarray(np.arange(T) - padding),
        key_value_segment_ids=jnp.asarray(np.arange(T) < padding, int),
    )
    cache, steps = layer.cache, []
    step = jitted(
        lambda cache, x, at: layer.step(cache, x, query_positions=at, query_segment_ids=0 * at, **keys)
    )
    for t, end in ((0, 2), (2, 3), (3, 5)):
        out, cache = step(cache, x[:, t:end], jnp.asarray(np.arange(t, end) - padding))
        steps.append(out)
    assert int(layer.index(cache)) == T
    out = jnp.concatenate(steps, 1)
    for row, start in enumerate([2, 0]):
        assert_close(out[row, start:], layer.whole(x[row : row + 1, start:])[0], 1e-12)


def test_tokens_of_one_call_see_what_the_cache_holds_so_far():
    """Whatever their positions are, and where lengths reach beyond what is in the cache."""
    (x,) = arrays((2, E))
    _, layers = imported("equinox")
    layer = layers.MultiheadAttention(N, E, key=jax.random.key(0), dtype=x.dtype)

    @jitted
    def both(x):
        decode = partial(layer.decode, key_value_seq_lengths=jnp.array(T))
        together, _ = decode(x, x, x, layer.init_cache(T), query_positions=jnp.array([9, 9]))
        step = partial(decode, query_positions=jnp.array([9]))
        first, cache = step(x[:1], x[:1], x[:1], layer.init_cache(T))
        return together, jnp.concatenate([first, step(x[1:], x[1:], x[1:], cache)[0]])

    together, one_by_one = both(x)
    assert_close(together, one_by_one, 1e-12)


@by_default("equinox")
def test_a_full_cache(framework):
    """Known: an error; traced: NaN. A mask is of the cache."""
    (x,) = arrays((1, T, E))
    layer = decoder(framework, x)
    out, cache = jitted(layer.step)(layer.cache, x, mask=jnp.ones((T, T), bool))
    assert_close(out, layer.whole(x), 1e-12)
    assert np.isnan(jitted(layer.step)(cache, x[:, :1])[0]).all()
    with pytest.raises(ValueError, match="the cache must have room for 6 tokens more, got 5"):
        layer.step(layer.cache, jnp.concatenate([x, x[:, :1]], 1))


def test_errors_of_equinox():
    eqx, layers = imported("equinox")
    layer = layers.MultiheadAttention(N, E, key=jax.random.key(0), dtype=jnp.float64)
    (x,) = arrays((T, E))
    cache = layer.init_cache(2, "bfloat16")
    assert cache.key.shape == (2, N, E // N)
    assert cache.key.dtype == jnp.bfloat16
    _, cache = layer.decode(x[:2], x[:2], x[:2], cache)
    for call, error, message in (
        (
            lambda: layer.decode(x[:1], x[:1], x[:1], cache),
            ValueError,
            "room for 1 token more, got 2, of which 2",
        ),
        (
            lambda: layer.decode(x[:1], x, x, cache),
            ValueError,
            "key must have the 1 tokens of query, which are new",
        ),
        (lambda: layer.decode(x[None], x, x, cache), ValueError, "query must have shape .* the cache too"),
        (
            lambda: layer.decode(x, x, x, None),
            TypeError,
            "cache must be a KeyValueCache, got NoneType; begin",
        ),
        (
            lambda: layer.decode(x, x, x, jax.tree.map(lambda x: x[None], cache)),
            ValueError,
            "cache must be that of one",
        ),
        (lambda: layer.init_cache(2, "int8"), TypeError, "dtype must be a floating dtype, got int8"),
        (lambda: layer.init_cache(0), ValueError, "length must be a positive int"),
        (
            lambda: layer.decode(x[:1], x[:1], x[:1], cache, jnp.ones((1, T), bool)),
            ValueError,
            r"\[T, L\] = \(1, 2\)",
        ),
    ):
        with pytest.raises(error, match=message):
            call()
    other = eqx.tree_at(lambda layer: layer.key_proj, layer, eqx.nn.Identity())
    with pytest.raises(TypeError, match=r"projections must be equinox\.nn\.Linear for decode, got Identity"):
        other.decode(x, x, x, cache)


def test_errors_of_haiku():
    hk, layers = imported("haiku")

    def forward(x, **options):
        make = lambda **more: layers.MultiHeadAttention(N, key_size=3, w_init=jnp.zeros, **more)
        return make(cache_length=options.pop("cache_length", 4))(x, x, x, **options)

    model, (x,) = hk.transform_with_state(forward), arrays((1, 2, E))
    with pytest.raises(ValueError, match="cache_length must be a positive int"):
        model.init(jax.random.key(0), x, cache_length=0)
    with pytest.raises(ValueError, match=r"dropout_rate must be 0 with cache_length, got 0\.5"):
        model.init(jax.random.key(0), x, dropout_rate=0.5)
