"""`configured_attention_fn`: what is bound holds, whatever a framework passes."""

import copy
import math
import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, quick_jit, thorough
from layers.frameworks import lenient

from jax_attn_bwd import Rotary, attention_fn, configured_attention_fn, mods, parallel

nnx = pytest.importorskip("flax.nnx")
nn = pytest.importorskip("flax.linen")

from jax_attn_bwd.layers import flax_linen, flax_nnx  # noqa: E402
from jax_attn_bwd.layers.attention_fn import ConfiguredKeywords  # noqa: E402

N, T, E = 2, 6, 8
CAUSAL = configured_attention_fn(is_causal=True)
LAYERS = {
    "linen": nn.MultiHeadDotProductAttention,
    "ours for linen": flax_linen.MultiHeadDotProductAttention,
    "nnx": nnx.MultiHeadAttention,
    "ours for nnx": flax_nnx.MultiHeadAttention,
}


def tokens(length=T):
    return jnp.asarray(np.random.default_rng(0).normal(size=(1, length, E)))


def made(name, x, attend):
    """A call of the layer, its parameters drawn from one seed."""
    with lenient():
        if "nnx" in name:
            return LAYERS[name](
                N, E, attention_fn=attend, decode=False, param_dtype="float64", rngs=nnx.Rngs(0)
            )
        layer = LAYERS[name](num_heads=N, attention_fn=attend, param_dtype="float64")
        return partial(layer.apply, layer.init(jax.random.key(0), x))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"mask_mod": mods.causal}], ids=["flag", "function"]
)
def test_no_layer_sees_the_future(name, options):
    """The layer of NNX passes `is_causal=False`, which undoes what `functools.partial` binds."""
    x = tokens()
    layer = made(name, x, configured_attention_fn(**options))
    visible = np.tri(T, dtype=bool)[None, None]
    assert_close(layer(x), made(name, x, attention_fn)(x, mask=visible), 1e-12)


def test_every_option_holds_and_has_its_gradient():
    q, k, v = (tokens().reshape(1, T, N, E // N) * c for c in (1.0, 0.5, 2.0))
    ids = jnp.array([[0, 0, 0, 1, 1, 1]])
    options = dict(
        bias=tokens()[0, :, :T], is_causal=True, rotary=Rotary(), local_window_size=(2, 0),
        query_seq_lengths=jnp.array([5]), key_value_seq_lengths=jnp.array([5]), query_segment_ids=ids,
        key_value_segment_ids=ids, query_positions=jnp.arange(T), key_value_positions=jnp.arange(T),
        scale=0.7, logits_soft_cap=3.0, mask_mod=mods.document, mod_args=(ids,), deterministic_sums=False,
        implementation="xla", forward_mode=True,
    )  # fmt: skip
    taken = ConfiguredKeywords.__optional_keys__
    assert taken - options.keys() == {"input_positions", "rope", "score_mod"}
    nothing = {n: () if n == "mod_args" else None for n in options} | {"is_causal": False}
    expected = attention_fn(q, k, v, **options)
    np.testing.assert_array_equal(configured_attention_fn(**options)(q, k, v, **nothing), expected)
    assert not np.allclose(expected, attention_fn(q, k, v))

    def loss(attend, bias):
        return jnp.sin(attend(bias)(q, k, v)).sum()

    bound = jax.grad(partial(loss, lambda bias: configured_attention_fn(bias=bias)))(options["bias"])
    assert_close(
        bound, jax.grad(partial(loss, lambda bias: partial(attention_fn, bias=bias)))(options["bias"]), 0
    )


def test_a_contradiction_is_an_error():
    q = tokens().reshape(1, T, N, E // N)
    np.testing.assert_array_equal(CAUSAL(q, q, q, is_causal=True), CAUSAL(q, q, q))
    with pytest.raises(ValueError, match=r"is_causal must be .* got True from the layer where False is conf"):
        configured_attention_fn(is_causal=False)(q, q, q, is_causal=True)
    with pytest.raises(ValueError, match=r"query_positions must be .* got an array of shape"):
        configured_attention_fn(query_positions=jnp.arange(T))(q, q, q, query_positions=jnp.arange(T))
    with pytest.raises(TypeError, match="is_causal must be a Python bool"):
        configured_attention_fn(is_causal=1)
    with pytest.raises(TypeError, match="mask_mod must be left out: attention_fn does not take it"):
        configured_attention_fn(nnx.dot_product_attention, mask_mod=mods.causal)
    with pytest.raises(TypeError, match="attention_fn must be a function"):
        configured_attention_fn("ring")


@pytest.mark.parametrize("name", ["nnx", "linen"])
def test_a_step_of_decoding_sees_what_the_cache_holds(name):
    """The only query of a step has index 0 here: by it causality would hide all keys but the first."""
    x = tokens()
    whole = made(name, x, CAUSAL)
    with lenient():
        if name == "nnx":
            steps = nnx.clone(whole)
            steps.init_cache((1, T, E), dtype="float64")
            got = [steps(x[:, t : t + 1], decode=True) for t in range(T)]
        else:
            layer = nn.MultiHeadDotProductAttention(
                num_heads=N, attention_fn=CAUSAL, param_dtype="float64", decode=True
            )
            variables, got = layer.init(jax.random.key(0), x), []
            for t in range(T):
                out, new = layer.apply(variables, x[:, t : t + 1], mutable=["cache"])
                variables = {**variables, **new}
                got.append(out)
        assert_close(jnp.concatenate(got, 1), whole(x), 1e-12)


def test_a_mask_of_numbers_lifts_causality_for_one_query_alone():
    """Of several queries, or beside a mask of bools, what is configured holds."""
    causal = []

    def attention_fn(query, key, value, mask, is_causal):
        causal.append(is_causal)

    attend = configured_attention_fn(attention_fn, is_causal=True)
    for T, S, dtype in ((2, 4, np.float32), (1, 4, np.bool_), (1, 1, np.float32), (1, 4, np.float32)):
        q, k = (np.zeros((1, n, N, 3)) for n in (T, S))
        attend(q, k, k, mask=np.ones((1, 1, T, S), dtype), is_causal=False)
    assert causal == [True, True, True, False]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=thorough if "ours" in name else []) for name in LAYERS]
)
def test_forward_mode_goes_through_layers(name):
    def formula(query, key, value, **_):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key) / math.sqrt(E // N))
        return jnp.einsum("bnts,bsnh->btnh", weights, value)

    x = tokens()

    def tangents(attend):
        layer = made(name, x, attend)
        with lenient():
            return quick_jit(lambda x, along: jnp.stack(jax.jvp(layer, (x,), (along,))))(x, jnp.cos(x))

    assert_close(tangents(configured_attention_fn(forward_mode=True)), tangents(formula), 1e-12)


def test_over_a_mesh():
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("sequence",))
    attend = configured_attention_fn(parallel.attention_fn(mesh, sequence="sequence"), is_causal=True)
    x = tokens()
    assert_close(jax.jit(made("nnx", x, attend))(x), made("nnx", x, CAUSAL)(x), 1e-12)


def test_equal_ones_are_equal_and_survive_pickle():
    build = partial(configured_attention_fn, is_causal=True, local_window_size=(3, 0), mask_mod=mods.causal)
    first = build()
    for other in (build(), copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert (first == other, hash(first) == hash(other)) == (True, True)
    assert first != CAUSAL
    held = configured_attention_fn(query_positions=jnp.arange(T))
    assert held == held
    assert held != configured_attention_fn(query_positions=jnp.arange(T))
    assert hash(held) == hash(held)
