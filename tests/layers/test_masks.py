"""Masks of numbers in `attention_fn` and the Flax layers: what is not 0 attends, as in Flax."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from layers.frameworks import (
    FRAMEWORKS,
    arrays,
    assert_all_close,
    frameworks,
    jitted,
    lenient,
    multi_head,
    random_params,
    values_and_gradients,
)
from layers.multi_head_cases import E, N, S, T, inputs_of, some_mask

from jax_attn_bwd import attention_fn, dot_product_attention

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

from jax_attn_bwd.layers import flax_linen, flax_nnx  # noqa: E402

NUMBERS = (("float32", 1, True), ("int32", T, False))  # dtype, queries, causal: in the default tier


def heads(queries):
    return arrays((2, queries, N, 3), (2, S, N, 3), (2, S, N, 3))


@pytest.mark.parametrize(
    ("dtype", "queries", "is_causal"),
    [
        pytest.param(dtype, queries, causal, marks=() if (dtype, queries, causal) in NUMBERS else thorough)
        for dtype in ("float32", "int32", "bfloat16", "uint8")
        for queries in (1, T)
        for causal in (False, True)
    ],
)
def test_numbers_mean_what_they_mean_to_flax(queries, is_causal, dtype):
    """At every T, with `is_causal`, known and traced: bit for bit the boolean mask, and as NNX computes."""
    query, key, value = heads(queries)
    mask = some_mask(2, 1, queries, S)
    numbers = mask.astype(dtype) * (1 if "float" in dtype else 3)
    call = partial(attention_fn, query, key, value, is_causal=is_causal)
    with lenient():
        theirs = nnx.dot_product_attention(query, key, value, mask=numbers, is_causal=is_causal)
    expected = call(mask=mask)
    assert_close(expected, theirs, 1e-6)  # whose softmax is in float32
    np.testing.assert_array_equal(call(mask=numbers), expected)
    np.testing.assert_array_equal(call(mask=np.asarray(numbers)), expected)
    np.testing.assert_array_equal(jax.jit(lambda mask: call(mask=mask))(numbers), jax.jit(call)(mask=mask))


def test_additive_numbers_are_an_error_where_they_are_known():
    """Under `jit`, too."""
    query, key, value = heads(T)
    mask = some_mask(2, 1, T, S)
    additive = jnp.where(mask, -1e9, 0.0)
    call = lambda mask: attention_fn(query, key, value, mask=mask)
    message = r"attention_fn: mask must be .*zeros and ones .*, got -1e\+09 in it; .*bias: .*bias=bias\)"
    with pytest.raises(TypeError, match=message):
        call(additive)
    with pytest.raises(TypeError, match=message):
        jax.jit(lambda query: attention_fn(query, key, value, mask=additive))(query)
    for wrong in (0.5, jnp.nan, -jnp.inf):
        with pytest.raises(TypeError, match="mask must be"):
            call(jnp.full((T, S), wrong).at[0].set(1.0))
    with pytest.raises(TypeError, match=r"mask must be boolean .* not an array"):
        call([[True]])
    with pytest.raises(TypeError, match="dtype complex"):
        dot_product_attention(query, key, value, mask=mask.astype(complex))


def test_traced_additive_numbers_give_nan():
    """One negative number makes all of the output NaN, that of its own entry under `vmap`, and gradients."""
    query, key, value = heads(T)
    mask = some_mask(2, 1, T, S)
    one = jnp.ones((T, S)).at[1, 2].set(-1e9)
    call = jax.checkpoint(lambda query, mask: attention_fn(query, key, value, mask=mask))
    both = jitted(lambda query, mask: (lambda out, back: (out, *back(out)))(*jax.vjp(call, query, mask))[:2])
    assert all(np.isnan(x).all() for x in both(query, one))
    for got, expected in zip(both(query, mask.astype(float)), both(query, mask), strict=True):
        np.testing.assert_array_equal(got, expected)
    mapped = jitted(jax.vmap(call, (None, 0)))(query, jnp.stack([one, jnp.abs(one)]))
    assert np.isnan(mapped).all((1, 2, 3, 4)).tolist() == [True, False]


@pytest.mark.parametrize("framework", [x for x in frameworks("flax_nnx") if x.values[0] != "equinox"])
def test_traced_additive_numbers_give_nan_in_layers(framework):
    inputs, mask = inputs_of("cross", framework)
    layer = multi_head(framework, True)
    params = random_params(layer, inputs)
    call = jitted(lambda mask: layer.call(params, *inputs, mask))
    assert np.isnan(call(jnp.where(mask, 0.0, -jnp.inf))).all()
    np.testing.assert_array_equal(call(mask.astype(float)), jitted(layer.call)(params, *inputs, mask))


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_mask_by_position_is_not_taken_for_values(api):
    (x,) = arrays((2, E, E), dtype="float32")
    if api == "linen":
        module = flax_linen.MultiHeadDotProductAttention(N)
        layer = lambda *inputs: module.init_with_output(jax.random.key(0), *inputs)
    else:
        layer = flax_nnx.MultiHeadAttention(N, E, decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"inputs_v must be numbers, got dtype bool; .* by name: mask=mask"):
        layer(x, x, jnp.ones(x.shape, bool))
    with pytest.warns(UserWarning, match="may be meant for a mask; .* mask=mask"):
        jax.eval_shape(layer, x, x, jnp.ones(x.shape, "float32"))
    jax.eval_shape(layer, x, x, x)


def test_classes_that_are_replaced_in_a_program(monkeypatch):
    """What runs Flax's own projections finds them, and not the class that stands in their place."""
    x = jnp.ones((2, T, E))
    monkeypatch.setattr(nnx, "MultiHeadAttention", flax_nnx.MultiHeadAttention)
    monkeypatch.setattr(nn, "MultiHeadDotProductAttention", flax_linen.MultiHeadDotProductAttention)
    layer = nnx.MultiHeadAttention(N, E, decode=False, normalize_qk=True, rngs=nnx.Rngs(0))
    linen = nn.MultiHeadDotProductAttention(N, normalize_qk=True)
    with lenient():
        assert jax.eval_shape(layer, x).shape == x.shape
        assert jax.eval_shape(linen.init_with_output, jax.random.key(0), x)[0].shape == x.shape


def test_inputs_of_another_width_than_the_layer_was_built_for():
    layer = flax_nnx.MultiHeadAttention(N, E, decode=False, rngs=nnx.Rngs(0))
    words = rf"MultiHeadAttention: inputs_q must have the width {E} that .*, got shape \(2, 3, {E - 1}\)"
    with pytest.raises(ValueError, match=words):
        layer(jnp.ones((2, 3, E - 1)))


def test_complex_inputs_are_refused_by_name():
    """Flax's own layer computes them; ours blames the input, not the kernels that are promoted with it."""
    (x,) = arrays((2, T, E), dtype="complex64")
    layer = flax_linen.MultiHeadDotProductAttention(N)
    with lenient(), pytest.raises(TypeError, match=r"query must be a floating.*, got .*complex64"):
        jax.eval_shape(layer.init, jax.random.key(0), x)


@thorough
def test_inputs_of_another_width_than_the_layer_of_equinox_was_built_for():
    eqx = pytest.importorskip("jax_attn_bwd.layers.equinox")
    layer = eqx.MultiheadAttention(2, 8, key=jax.random.key(0))
    x = jnp.ones((3, 8), "float32")
    with pytest.raises(ValueError, match=r"MultiheadAttention: value must have the width 8 that"):
        layer(x, x, x[:, :7])


def test_the_operator_takes_booleans_alone():
    query, key, value = heads(T)
    with pytest.raises(TypeError, match="bias"):
        dot_product_attention(query, key, value, mask=jnp.ones((T, S)))


def test_a_window_with_one_query_and_a_mask_of_numbers_may_be_a_step_of_decoding():
    query, key, value = heads(1)
    mask = some_mask(2, 1, 1, S)
    call = partial(attention_fn, query, key, value, local_window_size=2)
    with pytest.raises(ValueError, match=r"local_window_size must be None in what may be .*flax_linen"):
        call(mask=mask.astype("float32"))
    assert np.isfinite(call(mask=mask)).all()


@pytest.mark.parametrize(
    ("length", "own"),
    [
        pytest.param(1, False, id="1-flax", marks=thorough),
        pytest.param(1, True, id="1-own", marks=thorough),
        pytest.param(T, False, id=f"{T}-flax", marks=thorough),
        pytest.param(T, True, id=f"{T}-own"),
    ],
)
def test_the_mask_helpers_of_linen(own, length):
    """float32 by default, in ours and in Flax's own layer around `attention_fn`."""
    (x,) = arrays((2, length, E))
    mask = nn.combine_masks(
        nn.make_causal_mask(x[..., 0]), nn.make_attention_mask(*[jnp.ones((2, length))] * 2)
    )
    assert mask.dtype == jnp.float32
    theirs = nn.MultiHeadDotProductAttention(N, param_dtype="float64")
    ours = partial(nn.MultiHeadDotProductAttention, attention_fn=attention_fn)
    layer = (flax_linen.MultiHeadDotProductAttention if own else ours)(N, param_dtype="float64")
    init = lambda key, x: theirs.init(key, x)["params"]
    params = random_params(type("Layer", (), {"init": staticmethod(init)}), (x,))
    run = lambda layer, mask: lambda params, x: layer.apply({"params": params}, x, mask=mask)
    with lenient():
        expected = jitted(partial(values_and_gradients, run(theirs, mask)))(params, x)
        assert_all_close(jitted(partial(values_and_gradients, run(layer, mask)))(params, x), expected, 1e-11)
        traced = jitted(lambda mask: run(layer, mask)(params, x))(mask)
    assert_close(traced, expected[0], 1e-12)


@pytest.mark.parametrize(
    ("is_causal", "own"),
    [
        pytest.param(False, False, id="False-flax", marks=thorough),
        pytest.param(False, True, id="False-own", marks=thorough),
        pytest.param(True, False, id="True-flax", marks=thorough),
        pytest.param(True, True, id="True-own"),
    ],
)
def test_the_mask_helpers_of_nnx(own, is_causal):
    """One query over more keys, too; a rate, though not dropping, keeps Flax's softmax in float64."""
    x, y = arrays((2, T, E), (2, S, E))
    options = dict(dropout_rate=0.5, deterministic=True, decode=False, param_dtype="float64")
    theirs = nnx.MultiHeadAttention(N, E, **options, rngs=nnx.Rngs(0))
    ours = partial(nnx.MultiHeadAttention, attention_fn=attention_fn)
    layer = (flax_nnx.MultiHeadAttention if own else ours)(N, E, **options, rngs=nnx.Rngs(0))
    nnx.update(layer, nnx.to_pure_dict(nnx.state(theirs, nnx.Param)))
    for query, keys, mask in (
        (x, x, nnx.make_causal_mask(x[..., 0])),
        (
            x[:, :1],
            y,
            nnx.make_attention_mask(
                jnp.ones((2, 1)), jnp.asarray(np.arange(S) < 5, float)[None].repeat(2, 0)
            ),
        ),
    ):
        assert mask.dtype == jnp.float32
        with lenient():
            expected = theirs(query, keys, mask=mask, is_causal=is_causal)
            assert_close(layer(query, keys, mask=mask, is_causal=is_causal), expected, 1e-12)
            traced = nnx.jit(lambda layer, mask: layer(query, keys, mask=mask, is_causal=is_causal))  # noqa: B023
            assert_close(traced(layer, mask), expected, 1e-12)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_additive_masks_are_refused_by_every_layer(framework):
    """Equinox's takes booleans alone; those of Flax and Haiku take their numbers."""
    inputs, mask = inputs_of("cross", framework)
    layer = multi_head(framework, True)
    params = random_params(layer, inputs)
    with pytest.raises(TypeError, match=r"mask must be boolean.*bias"):
        layer.call(params, *inputs, jnp.where(mask, 0.0, -1e9))
    for numbers in (mask.astype("float32"), mask.astype(int)):
        if framework != "equinox":
            np.testing.assert_array_equal(
                layer.call(params, *inputs, numbers), layer.call(params, *inputs, mask)
            )
        else:
            with pytest.raises(TypeError, match=r"mask must be boolean \(True = attend\).*bias"):
                layer.call(params, *inputs, numbers)
