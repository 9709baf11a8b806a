"""`MultiHeadAttention` of each framework, beside the framework's own layer."""

import io
import pickle
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
from layers.multi_head_cases import WIDTHS, E, N, T, compared, inputs_of

CASES = {
    "flax_linen": ("cross", "head_mask", "unbatched", "batch_axes"),
    "flax_nnx": ("cross", "batch_axes"),
    "haiku": ("cross", "unbatched"),
    "equinox": ("cross", "head_mask"),
}
DEFAULT = {("flax_linen", "batch_axes"), ("haiku", "cross")}


@pytest.mark.parametrize(
    ("framework", "case"),
    [pytest.param(f, c, marks=() if (f, c) in DEFAULT else thorough) for f in CASES for c in CASES[f]],
)
def test_as_the_framework_s_own(framework, case):
    """Other widths than the defaults, keys that are not queries, masks of each kind."""
    expected, got = compared(framework, case, WIDTHS[framework])
    assert_all_close(got, expected, 1e-11)


@pytest.mark.parametrize("framework", frameworks("flax_nnx"))
def test_causal_self_attention_without_biases(framework):
    """Theirs takes a mask, or in NNX the flag; ours the flag."""
    no_bias = {
        "haiku": {"with_bias": False},
        "equinox": {f"use_{n}_bias": n == "value" for n in ("query", "key", "value", "output")},
    }.get(framework, {"use_bias": False})
    flag = {"causal": True} if framework == "flax_nnx" else {"is_causal": True}
    expected, got = compared(framework, "causal", no_bias, flag)
    assert_all_close(got, expected, 1e-11)


@pytest.mark.parametrize("framework", frameworks("flax_nnx", "equinox"))
def test_initial_values(framework):
    """The same tree, and the same values for the same key."""
    inputs, _ = inputs_of("cross", framework)
    key, params = jax.random.key(3), []
    for own in (False, True):
        layer = multi_head(framework, own, dtype="float32", **WIDTHS[framework])
        with lenient():
            narrow = [x.astype("float32") for x in inputs]
            params.append(jitted(layer.init)(key, *narrow))
    assert jax.tree.structure(params[0]) == jax.tree.structure(params[1])
    for x, y in zip(*map(jax.tree.leaves, params), strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.std() > 0


@pytest.mark.parametrize("framework", frameworks("haiku"))
def test_bfloat16(framework):
    """At most twice the error (root mean square) of the framework's own layer, for each gradient too."""
    inputs, mask = inputs_of("cross", framework)
    wide = multi_head(framework, False)
    params = random_params(wide, inputs)
    narrow = jax.tree.map(lambda x: x.astype("bfloat16"), (params, *inputs))
    exact = jax.tree.map(lambda x: x.astype("float64"), narrow)
    call = lambda layer: partial(values_and_gradients, partial(layer.call, mask=mask))
    ours = jitted(call(multi_head(framework, True, "bfloat16")))(*narrow)
    with lenient():
        expected = jitted(call(wide))(*exact)
        theirs = jitted(call(multi_head(framework, False, "bfloat16")))(*narrow)
    for x, y, z in zip(*map(jax.tree.leaves, (expected, theirs, ours)), strict=True):
        assert z.dtype == y.dtype == "bfloat16"
        error = [np.sqrt(np.square(np.asarray(a, np.float64) - x).mean()) for a in (y, z)]
        rounding = float(jnp.finfo("bfloat16").eps) / 2 * max(np.abs(x).max(), 1e-2)
        assert error[1] <= max(2 * error[0], rounding)


@pytest.mark.parametrize("framework", frameworks("flax_linen", "flax_nnx"))
def test_residuals(framework):
    """Inputs, parameters, the heads' output and its lse, and what `save` adds; theirs keep weights."""
    (x,) = arrays((1, 512, E))

    def kept(own, **options):
        layer = multi_head(framework, own, **options)
        with lenient():
            params = jax.eval_shape(layer.init, jax.random.key(0), x, x, x)
            run = lambda p, x: jax.vjp(lambda *a: layer.call(a[0], a[1], a[1], a[1]), p, x)[1]
            sizes = [leaf.size for leaf in jax.tree.leaves(jax.eval_shape(run, params, x))]
        return sum(sizes), sum(leaf.size for leaf in jax.tree.leaves(params))

    least, weights = kept(True)
    assert x.size + 512 * (E + N) <= least <= weights + x.size + 512 * (E + 2 * N)
    keys = 2 if framework == "flax_nnx" else 4
    assert kept(True, save="qkv")[0] == least + 512 * (E + 2 * E * keys // N)
    assert kept(True, save="probs")[0] == kept(True, save="qkv")[0] + N * 512 * 512
    assert kept(False)[0] > N * 512 * 512


@pytest.mark.parametrize("framework", frameworks("equinox"))
def test_dropout_keeps_the_mean(framework):
    inputs, mask = inputs_of("cross", framework)
    rate = {"dropout_p" if framework == "equinox" else "dropout_rate": 0.25}
    layer = multi_head(framework, True, **rate)
    params = random_params(layer, inputs)
    call = jitted(lambda rng: layer.call(params, *inputs, mask, rng))
    draws = np.stack([call(rng) for rng in jax.random.split(jax.random.key(4), 400)])
    undropped = jitted(lambda: layer.call(params, *inputs, mask))()
    error = draws.std(0) / np.sqrt(len(draws))
    assert (error > 0).all()
    assert np.abs((draws.mean(0) - undropped) / error).max() < 5
    np.testing.assert_array_equal(call(jax.random.key(5)), call(jax.random.key(5)))


@pytest.mark.parametrize("framework", frameworks("haiku")[:3])
def test_broadcast_dropout_shares_one_mask(framework):
    """Two equal entries of a batch stay equal with one mask for all; Haiku has the option at the call."""
    (x,) = arrays((1, T, E))
    x = jnp.concatenate([x, x])
    for shared in (True, False):
        options = {"dropout_rate": 0.5, "broadcast_dropout": shared}
        layer = multi_head(framework, True, **options)
        params = random_params(layer, (x, x, x))
        out = jitted(layer.call)(params, x, x, x, None, jax.random.key(2))
        assert bool((out[0] == out[1]).all()) == shared


@pytest.mark.parametrize("framework", frameworks("flax_linen"))
def test_a_query_that_sees_nothing_gives_the_output_bias(framework):
    inputs, mask = inputs_of("cross", framework)
    layer = multi_head(framework, True, **WIDTHS[framework])
    params = random_params(layer, inputs)
    mask = mask.at[:, :, 2].set(False)
    run = jitted(partial(values_and_gradients, partial(layer.call, mask=mask)))
    out, grads = run(params, *inputs)
    bias = (
        params[-1]
        if framework == "equinox"
        else params["multi_head_attention/linear"]["b"]
        if framework == "haiku"
        else params["out"]["bias"]
    )
    np.testing.assert_array_equal(out[:, 2], np.broadcast_to(bias, (2, 5)))
    np.testing.assert_array_equal(grads[1][:, 2], 0)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


def stored(framework, params):
    """`params` after a checkpoint in the way of the framework."""
    if framework.startswith("flax"):
        flax = pytest.importorskip("flax")
        return flax.serialization.msgpack_restore(flax.serialization.to_bytes(params))
    if framework == "haiku":
        return pickle.loads(pickle.dumps(jax.tree.map(np.asarray, params)))
    eqx = pytest.importorskip("equinox")
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, params)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, [jnp.zeros_like(x) for x in params])


@pytest.mark.parametrize("framework", frameworks("flax_linen", "haiku"))
def test_a_checkpoint_of_theirs_loads(framework):
    inputs, mask = inputs_of("cross", framework)
    theirs = multi_head(framework, False)
    params = random_params(theirs, inputs)
    with lenient():
        expected = jitted(theirs.call)(params, *inputs, mask)
    got = jitted(multi_head(framework, True).call)(stored(framework, params), *inputs, mask)
    assert_close(got, expected, 1e-13)


@thorough
def test_equinox_s_own_checkpoint_of_a_whole_layer():
    eqx = pytest.importorskip("equinox")
    from jax_attn_bwd.layers.equinox import MultiheadAttention

    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, theirs := eqx.nn.MultiheadAttention(N, E, key=jax.random.key(0)))
    file.seek(0)
    blank = MultiheadAttention(N, E, is_causal=True, key=jax.random.key(1))
    ours = eqx.tree_deserialise_leaves(file, blank)
    (x,) = arrays((T, E))
    expected = theirs(x, x, x, jnp.tril(jnp.ones((T, T), bool)))
    assert_close(ours(x, x, x), expected, 1e-13)
