"""Packed sequences in the layers of the four frameworks and in `attention_fn`: as with a mask of T x S."""

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
    lenient,
    multi_head,
    random_params,
    values_and_gradients,
)
from layers.multi_head_cases import E, N, S, T, inputs_of

from jax_attn_bwd import attention_fn, dot_product_attention
from jax_attn_bwd.layers.attention_fn import attention_weights

CAP = 1.5
IDS = {"query": [[0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 1, 1]], "key": [[0, 0, 1, 1, 1, 1, 2, 2, 2]] * 2}
PLACES = {"query": [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]], "key": [[0, 1, 0, 1, 2, 3, 0, 1, 2]] * 2}
TOKENS = {
    "query_segment_ids": jnp.asarray(IDS["query"]),
    "key_value_segment_ids": jnp.asarray(IDS["key"]),
    "query_positions": jnp.asarray(PLACES["query"]),
    "key_value_positions": jnp.asarray(PLACES["key"]),
    "query_seq_lengths": jnp.asarray([6, 5]),
    "key_value_seq_lengths": jnp.asarray([8, 9]),
}


def mask_of(tokens, left=None):
    """`[2, 1, T, S]`: who sees whom; `left` keys before its own at most, and none after it."""
    row, column = (np.asarray(tokens[f"{x}_segment_ids"]) for x in ("query", "key_value"))
    sees = row[:, :, None] == column[:, None]
    row, column = (np.asarray(tokens[f"{x}_positions"]) for x in ("query", "key_value"))
    distance = row[:, :, None] - column[:, None]
    sees &= True if left is None else (distance >= 0) & (distance <= left)
    lengths = [np.asarray(tokens[f"{x}_seq_lengths"])[:, None] for x in ("query", "key_value")]
    sees &= (np.arange(sees.shape[1]) < lengths[0])[:, :, None]
    return jnp.asarray(sees & (np.arange(sees.shape[2]) < lengths[1])[:, None])[:, None]


@pytest.mark.parametrize("framework", frameworks("flax_nnx", "haiku"))
def test_tokens_are_as_a_mask(framework):
    """Values and gradients; positions decide what a window is."""
    inputs, _ = inputs_of("cross", framework)
    plain = multi_head(framework, True, logits_soft_cap=CAP)
    banded = multi_head(framework, True, logits_soft_cap=CAP, local_window_size=(2, 0))
    params = random_params(plain, inputs)
    run = lambda call: jitted(partial(values_and_gradients, call))(params, *inputs)
    expected = run(partial(plain.call, mask=mask_of(TOKENS, 2)))
    assert_all_close(run(partial(banded.call, **TOKENS)), expected, 1e-12)


def heads(keys=N):
    return arrays((2, T, N, 3), (2, S, keys, 3), (2, S, keys, 5))


def test_attention_fn_takes_all_that_dense_attention_takes():
    options = dict(
        is_causal=True, local_window_size=2, logits_soft_cap=CAP, scale=0.7, precision="highest", **TOKENS
    )
    got = attention_fn(*heads(2), **options, deterministic_sums=False)
    np.testing.assert_array_equal(got, dot_product_attention(*heads(2), **options))
    # the weights that a layer sows are of the same options
    left_out = dict.fromkeys(("mask_mod", "score_mod", "deterministic_sums")) | dict(mod_args=())
    weights = attention_weights(*heads(), None, None, **options, **left_out, broadcast_dropout=False)
    out = jnp.einsum("bnts,bsnh->btnh", weights, heads()[2], precision="highest")
    assert_close(out, attention_fn(*heads(), **options), 1e-12)
    with pytest.raises(TypeError, match="attention_fn: deterministic_sums must be None or a Python bool"):
        attention_fn(*heads(), deterministic_sums=0)
    with pytest.raises(ValueError, match="key_value_segment_ids must be given together"):
        attention_fn(*heads(), query_segment_ids=TOKENS["query_segment_ids"])


nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

from jax_attn_bwd.layers import flax_linen, flax_nnx  # noqa: E402


def linen_params(*shapes):
    layer = nn.MultiHeadDotProductAttention(N, param_dtype="float64")
    init = lambda key, *inputs: layer.init(key, *inputs)["params"]
    return random_params(type("Layer", (), {"init": staticmethod(init)}), arrays(*shapes))


@pytest.mark.parametrize(
    "api", ["linen", pytest.param("nnx", marks=thorough), "own", pytest.param("own nnx", marks=thorough)]
)
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_sown_weights_and_bound_arguments(api):
    """In Flax's own layers by `functools.partial`; the parts give what the whole gives, and their weights."""
    x, y = arrays((2, T, E), (2, S, E))
    band = dict(local_window_size=(2, 0), logits_soft_cap=CAP)
    bound = partial(attention_fn, **band, **TOKENS)
    params = linen_params((2, T, E), (2, S, E))

    def of_linen(layer, x, sow_weights, **tokens):
        tokens |= dict(sow_weights=sow_weights, mutable=["intermediates"])
        out, state = layer.apply({"params": params}, x, y, **tokens)
        return out, *state.get("intermediates", {}).get("attention_weights", ())

    def of_nnx(layer, x, sow_weights, **tokens):
        out = layer(x, y, sow_weights=sow_weights, **tokens)
        return out, *(nnx.pop(layer, nnx.Intermediate)["attention_weights"] if sow_weights else ())

    if "nnx" in api:
        exact = dict(decode=False, param_dtype="float64")
        call, own = of_nnx, flax_nnx.MultiHeadAttention(N, E, **exact, **band, rngs=nnx.Rngs(0))
        flax = nnx.MultiHeadAttention(N, E, **exact, attention_fn=bound, rngs=nnx.Rngs(0))
    else:
        call, own = of_linen, flax_linen.MultiHeadAttention(N, param_dtype="float64", **band)
        flax = nn.MultiHeadDotProductAttention(N, param_dtype="float64", attention_fn=bound)
    (whole,) = call(own, x, False, **TOKENS)
    with lenient():
        out, weights = call(own, x, True, **TOKENS) if "own" in api else call(flax, x, True)
    assert_close(out, whole, 1e-12)
    seen = np.broadcast_to(mask_of(TOKENS, 2), weights.shape)
    np.testing.assert_array_equal(np.asarray(weights) > 0, seen)
    assert_close(weights.sum(-1), seen.any(-1), 1e-12)


@pytest.mark.parametrize("window", [None, pytest.param(1, marks=thorough)])
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_decoding_of_packed_sequences(api, window):
    """Keys are those of the cache; a step is told its own segment and theirs."""
    (x,) = arrays((2, T, E))
    ids = TOKENS["query_segment_ids"]
    options = dict(param_dtype="float64", local_window_size=window, logits_soft_cap=CAP)
    tokens = lambda t: dict(query_segment_ids=ids[:, t : t + 1], key_value_segment_ids=ids)
    packed = dict(query_segment_ids=ids, key_value_segment_ids=ids)
    if api == "linen":
        params = linen_params((2, T, E), (2, T, E))
        layer = flax_linen.MultiHeadAttention(N, decode=True, is_causal=True, **options)
        cache = jax.eval_shape(layer.init, jax.random.key(0), x)["cache"]
        cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache)
        step = jitted(
            lambda cache, x, told: layer.apply(
                {"params": params, "cache": cache}, x, **told, mutable=["cache"]
            )
        )
        steps = []
        for t in range(T):
            with lenient():  # Flax's own part mixes int32 and int64
                out, state = step(cache, x[:, t : t + 1], tokens(t))
            cache = state["cache"]
            steps.append(out)
        whole = layer.clone(decode=False)
        expected = jitted(whole.apply)({"params": params}, x, **packed)
    else:
        layer = flax_nnx.MultiHeadAttention(N, E, num_kv_heads=2, **options, rngs=nnx.Rngs(0))
        layer.init_cache(x.shape, "float64")
        step = nnx.jit(lambda layer, x, told: layer(x, decode=True, **told))
        with lenient():
            steps = [step(layer, x[:, t : t + 1], tokens(t)) for t in range(T)]
        expected = layer(x, decode=False, is_causal=True, **packed)
    assert_close(jnp.concatenate(steps, 1), expected, 1e-12)


def test_a_layer_of_nnx_outside_of_jit_with_rotary_embedding():
    """Tokens reach an `attention_fn` of the caller's, without setting an attribute of the layer."""
    (x,) = arrays((2, T, E))
    ids = TOKENS["query_segment_ids"]
    packed = dict(query_segment_ids=ids, key_value_segment_ids=ids)
    turn = lambda x, positions=None: 2 * x
    options = dict(decode=False, param_dtype="float64")
    layer = flax_nnx.MultiHeadAttention(
        N, E, **options, attention_fn=partial(attention_fn, rope=turn), rngs=nnx.Rngs(0)
    )
    attention = layer.attention_fn
    run = jax.jit(jax.remat(lambda x, packed: layer(x, **packed)))
    assert layer.attention_fn is attention
    mask = (ids[:, :, None] == ids[:, None])[:, None]
    assert_close(run(x, packed), layer(x, mask=mask), 1e-12)


def test_tokens_need_an_attention_that_takes_them():
    (x,) = arrays((2, T, E))
    ids = TOKENS["query_segment_ids"]
    packed = dict(query_segment_ids=ids, key_value_segment_ids=ids)
    words = r"MultiHeadAttention: query_segment_ids must be left out .*, got shape \(2, 6\); use jax_attn_bwd"
    layer = flax_linen.MultiHeadAttention(N, attention_fn=lambda q, k, v, mask=None: q, param_dtype="float64")
    with pytest.raises(TypeError, match=words):
        layer.init(jax.random.key(0), x, **packed)
    layer = flax_nnx.MultiHeadAttention(
        N, E, attention_fn=nnx.dot_product_attention, decode=False, rngs=nnx.Rngs(0), param_dtype="float64"
    )
    with pytest.raises(TypeError, match=words):
        layer(x, **packed)
