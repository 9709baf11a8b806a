"""`MultiHeadAttention` of each framework, beside the framework's own layer."""

import io
import pickle
import zlib
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

FRAMEWORKS = ("flax_linen", "flax_nnx", "haiku", "equinox")
N, T, S, E = 4, 6, 9, 12
# Most of the time of these tests is LLVM's.
jitted = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@contextmanager
def lenient():
    """The frameworks' own layers promote dtypes and ranks implicitly."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def linen(own, dtype="float64", **options):
    nn = pytest.importorskip("flax.linen")
    from jax_attn_bwd.layers import flax_linen as ours

    uniform = nn.initializers.uniform()
    options = {"kernel_init": uniform, "bias_init": uniform, "param_dtype": dtype} | options
    module = (ours if own else nn).MultiHeadDotProductAttention(N, **options)

    def call(params, query, key, value, mask=None, rng=None):
        mode = {"deterministic": rng is None, "dropout_rng": rng}
        return module.apply({"params": params}, query, key, value, mask=mask, **mode)

    init = lambda rng, *inputs: module.init(rng, *inputs, deterministic=True)["params"]  # noqa: E731
    return SimpleNamespace(init=init, call=call)


def nnx(own, dtype="float64", causal=False, **options):
    nnx = pytest.importorskip("flax.nnx")
    from jax_attn_bwd.layers import flax_nnx as ours

    # With a rate, though not dropping, Flax's own attention computes as its inputs do, not in float32.
    uniform = nnx.initializers.uniform()
    options = {"dropout_rate": 0.5, "kernel_init": uniform, "bias_init": uniform,
               "decode": False, "num_kv_heads": 2} | options  # fmt: skip

    def layer(rng, query, key):
        cls = (ours if own else nnx).MultiHeadAttention
        widths = query.shape[-1], options.get("qkv_features"), options.get("out_features")
        rest = {n: x for n, x in options.items() if n not in ("qkv_features", "out_features")}
        kv = key.shape[-1]
        return cls(N, *widths, in_kv_features=kv, param_dtype=dtype, rngs=nnx.Rngs(rng), **rest)

    def init(rng, query, key, value):
        return nnx.to_pure_dict(nnx.state(layer(rng, query, key), nnx.Param))

    def call(params, query, key, value, mask=None, rng=None):
        made = layer(0, query, key)
        nnx.update(made, params)
        mode = {} if rng is None else {"rngs": nnx.Rngs(dropout=rng)}
        mode |= {"is_causal": causal}
        return made(query, key, value, mask=mask, deterministic=rng is None, **mode)

    return SimpleNamespace(init=init, call=call)


def haiku(own, dtype="float64", dropout_rate=0.0, broadcast_dropout=False, **options):
    hk = pytest.importorskip("haiku")
    from jax_attn_bwd.layers import haiku as ours

    uniform = hk.initializers.RandomUniform(-1, 1)
    options = {"key_size": 3, "w_init": uniform, "b_init": uniform} | options

    def forward(query, key, value, mask=None, **drop):
        return (ours if own else hk).MultiHeadAttention(N, **options)(
            query, key, value, mask, **drop
        )

    transformed = hk.transform(forward)

    def call(params, query, key, value, mask=None, rng=None):
        drop = {} if rng is None else {
            "dropout_rate": dropout_rate, "broadcast_dropout": broadcast_dropout,
        }  # fmt: skip
        return transformed.apply(params, rng, query, key, value, mask, **drop)

    return SimpleNamespace(init=transformed.init, call=call)


def equinox(own, dtype="float64", **options):
    eqx = pytest.importorskip("equinox")
    from jax_attn_bwd.layers import equinox as ours

    names = ("query", "key", "value", "output")
    options = {f"use_{name}_bias": True for name in names} | options

    def layer(rng, *inputs):
        sizes = (x.shape[-1] for x in inputs)
        cls = (ours if own else eqx.nn).MultiheadAttention
        return cls(N, *sizes, dtype=jnp.dtype(dtype), key=rng, **options)

    def init(rng, *inputs):
        return eqx.filter(layer(rng, *inputs), eqx.is_array)

    def call(params, query, key, value, mask=None, rng=None):
        made = eqx.combine(
            params, eqx.filter_eval_shape(layer, jax.random.key(0), query, key, value)
        )
        axes = query.ndim - 2
        if mask is not None:  # one for each entry of the batch, [T, S] or [N, T, S]
            mask = jnp.broadcast_to(mask, (*query.shape[:-2], *mask.shape[-3:]))
            mask = mask[..., 0, :, :] if mask.shape[-3] == 1 else mask
        mode = {"key": rng, "inference": rng is None}
        function = lambda *inputs: made(*inputs, **mode)  # noqa: E731
        for _ in range(axes):
            function = jax.vmap(function, in_axes=(0, 0, 0, None if mask is None else 0))
        return function(query, key, value, mask)

    # Leaves alone: the trees differ in the class of their root.
    leaves = SimpleNamespace(init=lambda *x: jax.tree.leaves(init(*x)))
    tree = lambda *x: jax.tree.structure(jax.eval_shape(init, jax.random.key(0), *x))  # noqa: E731
    leaves.call = lambda params, *inputs, **rest: call(
        jax.tree.unflatten(tree(*inputs[:3]), params), *inputs, **rest
    )
    return leaves


BUILD = dict(zip(FRAMEWORKS, (linen, nnx, haiku, equinox), strict=True))
# Widths other than the defaults, under the names of each framework.
WIDTHS = {
    "flax_linen": {"qkv_features": 8, "out_features": 5},
    "flax_nnx": {"qkv_features": 8, "out_features": 5},
    "haiku": {"key_size": 2, "value_size": 3, "model_size": 5},
    "equinox": {"qk_size": 2, "vo_size": 3, "output_size": 5},
}


def arrays(*shapes, dtype="float64"):
    seed = zlib.crc32(repr(shapes).encode())
    return [jnp.asarray(np.random.default_rng(seed).standard_normal(s), dtype) for s in shapes]


def some_mask(*shape):
    """Every query sees a key: what one that sees none gives is where the layers differ."""
    mask = np.random.default_rng(5).random(shape) < 0.6
    mask[..., 0] = True
    return jnp.asarray(mask)


def inputs_of(case, framework):
    """(query, key, value), mask"""
    width = {"flax_nnx": 7}.get(framework, 5)  # NNX has one width for keys and values
    if case == "self":
        (x,) = arrays((2, T, E))
        return (x, x, x), None
    if case == "causal":
        (x,) = arrays((2, T, E))
        return (x, x, x), jnp.tril(jnp.ones((1, 1, T, T), bool))
    batch = {"unbatched": (), "batch_axes": (2, 3)}.get(case, (2,))
    inputs = arrays((*batch, T, E), (*batch, S, 7), (*batch, S, width))
    shape = {"unbatched": (1, T, S), "batch_axes": (2, 1, 1, T, S), "head_mask": (2, N, T, S)}
    return tuple(inputs), some_mask(*shape.get(case, (2, 1, T, S)))


def value_and_gradients(function, *arguments):
    """The output, and the gradients of all arguments for a random cotangent."""
    out, pullback = jax.vjp(function, *arguments)
    dout = np.random.default_rng(9).standard_normal(out.shape)
    return out, pullback(jnp.asarray(dout, out.dtype))


def assert_all_close(got, expected, rtol):
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, x), y in zip(leaves, jax.tree.leaves(got), strict=True):
        assert_close(y, x, rtol, jax.tree_util.keystr(path))


def random_params(layer, inputs, dtype="float64"):
    """Parameters with the shapes of `layer`'s: its own initial values take long to compile."""
    with lenient():
        shapes = jax.eval_shape(layer.init, jax.random.key(0), *inputs)
    leaves, tree = jax.tree.flatten(shapes)
    values = [0.5 * x for x in arrays(*(leaf.shape for leaf in leaves), dtype=dtype)]
    return jax.tree.unflatten(tree, values)


def compared(framework, case, options, own_options=None):
    """Output and gradients, (theirs, ours), on the same parameters."""
    inputs, mask = inputs_of(case, framework)
    own_mask = mask if own_options is None else None
    theirs = BUILD[framework](False, **options)
    ours = BUILD[framework](True, **options, **(own_options or {}))
    params = random_params(theirs, inputs)
    with lenient():
        run = jitted(partial(value_and_gradients, partial(theirs.call, mask=mask)))
        expected = run(params, *inputs)
    run = jitted(partial(value_and_gradients, partial(ours.call, mask=own_mask)))
    return expected, run(params, *inputs)


CASES = {
    "flax_linen": ("cross", "head_mask", "unbatched", "batch_axes"),
    "flax_nnx": ("cross", "batch_axes"),
    "haiku": ("cross", "unbatched"),
    "equinox": ("cross", "head_mask"),
}


@pytest.mark.parametrize(("framework", "case"), [(f, c) for f in CASES for c in CASES[f]])
def test_as_the_framework_s_own(framework, case):
    """Other widths than the defaults, keys that are not queries, masks of each kind."""
    expected, got = compared(framework, case, WIDTHS[framework])
    assert_all_close(got, expected, 1e-11)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_causal_self_attention_without_biases(framework):
    """Theirs takes a mask, or in NNX the flag; ours the flag."""
    no_bias = {
        "haiku": {"with_bias": False},
        "equinox": {f"use_{n}_bias": n == "value" for n in ("query", "key", "value", "output")},
    }.get(framework, {"use_bias": False})
    flag = {"causal": True} if framework == "flax_nnx" else {"is_causal": True}
    expected, got = compared(framework, "causal", no_bias, flag)
    assert_all_close(got, expected, 1e-11)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_initial_values(framework):
    """The same tree, and the same values for the same key."""
    inputs, _ = inputs_of("cross", framework)
    key, params = jax.random.key(3), []
    for own in (False, True):
        layer = BUILD[framework](own, dtype="float32", **WIDTHS[framework])
        with lenient():
            narrow = [x.astype("float32") for x in inputs]
            params.append(jitted(layer.init)(key, *narrow))
    assert jax.tree.structure(params[0]) == jax.tree.structure(params[1])
    for x, y in zip(*map(jax.tree.leaves, params), strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.std() > 0


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_bfloat16(framework):
    """At most twice the error (root mean square) of the framework's own layer, for each gradient too."""
    inputs, mask = inputs_of("cross", framework)
    wide = BUILD[framework](False)
    params = random_params(wide, inputs)
    narrow = jax.tree.map(lambda x: x.astype("bfloat16"), (params, *inputs))
    exact = jax.tree.map(lambda x: x.astype("float64"), narrow)
    call = lambda layer: partial(value_and_gradients, partial(layer.call, mask=mask))  # noqa: E731
    ours = jitted(call(BUILD[framework](True, "bfloat16")))(*narrow)
    with lenient():
        expected = jitted(call(wide))(*exact)
        theirs = jitted(call(BUILD[framework](False, "bfloat16")))(*narrow)
    for x, y, z in zip(*map(jax.tree.leaves, (expected, theirs, ours)), strict=True):
        assert z.dtype == y.dtype == "bfloat16"
        error = [np.sqrt(np.square(np.asarray(a, np.float64) - x).mean()) for a in (y, z)]
        rounding = float(jnp.finfo("bfloat16").eps) / 2 * max(np.abs(x).max(), 1e-2)
        assert error[1] <= max(2 * error[0], rounding)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_residuals(framework):
    """Inputs, parameters, the heads' output and its lse, and what `save` adds; theirs keep weights."""
    (x,) = arrays((1, 512, E))

    def kept(own, **options):
        layer = BUILD[framework](own, **options)
        with lenient():
            params = jax.eval_shape(layer.init, jax.random.key(0), x, x, x)
            run = lambda p, x: jax.vjp(lambda *a: layer.call(a[0], a[1], a[1], a[1]), p, x)[1]  # noqa: E731
            sizes = [leaf.size for leaf in jax.tree.leaves(jax.eval_shape(run, params, x))]
        return sum(sizes), sum(leaf.size for leaf in jax.tree.leaves(params))

    least, weights = kept(True)
    assert x.size + 512 * (E + N) <= least <= weights + x.size + 512 * (E + 2 * N)
    keys = 2 if framework == "flax_nnx" else 4
    assert kept(True, save="qkv")[0] == least + 512 * (E + 2 * E * keys // N)
    assert kept(True, save="probs")[0] == kept(True, save="qkv")[0] + N * 512 * 512
    assert kept(False)[0] > N * 512 * 512


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_dropout_keeps_the_mean(framework):
    inputs, mask = inputs_of("cross", framework)
    rate = {"dropout_p" if framework == "equinox" else "dropout_rate": 0.25}
    layer = BUILD[framework](True, **rate)
    params = random_params(layer, inputs)
    call = jitted(lambda rng: layer.call(params, *inputs, mask, rng))
    draws = np.stack([call(rng) for rng in jax.random.split(jax.random.key(4), 400)])
    undropped = jitted(lambda: layer.call(params, *inputs, mask))()
    error = draws.std(0) / np.sqrt(len(draws))
    assert (error > 0).all()
    assert np.abs((draws.mean(0) - undropped) / error).max() < 5
    np.testing.assert_array_equal(call(jax.random.key(5)), call(jax.random.key(5)))


@pytest.mark.parametrize("framework", FRAMEWORKS[:3])
def test_broadcast_dropout_shares_one_mask(framework):
    """Two equal entries of a batch stay equal with one mask for all; Haiku has the option at the call."""
    (x,) = arrays((1, T, E))
    x = jnp.concatenate([x, x])
    for shared in (True, False):
        options = {"dropout_rate": 0.5, "broadcast_dropout": shared}
        layer = BUILD[framework](True, **options)
        params = random_params(layer, (x, x, x))
        out = jitted(layer.call)(params, x, x, x, None, jax.random.key(2))
        assert bool((out[0] == out[1]).all()) == shared


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_query_that_sees_nothing_gives_the_output_bias(framework):
    inputs, mask = inputs_of("cross", framework)
    layer = BUILD[framework](True, **WIDTHS[framework])
    params = random_params(layer, inputs)
    mask = mask.at[:, :, 2].set(False)
    run = jitted(partial(value_and_gradients, partial(layer.call, mask=mask)))
    out, grads = run(params, *inputs)
    bias = (
        params[-1] if framework == "equinox" else
        params["multi_head_attention/linear"]["b"] if framework == "haiku" else
        params["out"]["bias"]
    )  # fmt: skip
    np.testing.assert_array_equal(out[:, 2], np.broadcast_to(bias, (2, 5)))
    np.testing.assert_array_equal(grads[1][:, 2], 0)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_options_reach_the_operator(framework):
    """A window; each wrong value is refused under its own name."""
    inputs, mask = inputs_of("cross", framework)
    distance = np.arange(T)[:, None] - np.arange(S)[None]
    window = jnp.asarray((distance <= 2) & (distance >= -1))[None, None]
    plain = BUILD[framework](True, implementation="xla")
    params = random_params(plain, inputs)
    narrow = BUILD[framework](True, local_window_size=(2, 1))
    got = jitted(narrow.call)(params, *inputs, mask)
    assert_close(got, jitted(plain.call)(params, *inputs, mask & window), 1e-13)
    for name, value in {"implementation": "mine", "local_window_size": -1, "save": "all"}.items():
        with pytest.raises(ValueError, match="mine" if value == "mine" else name):
            BUILD[framework](True, **{name: value}).call(params, *inputs, mask)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_mask_must_be_boolean(framework):
    inputs, mask = inputs_of("cross", framework)
    layer = BUILD[framework](True)
    params = random_params(layer, inputs)
    for wrong in (jnp.where(mask, 0.0, -1e9), mask.astype("float32"), mask.astype(int)):
        with pytest.raises(
            TypeError, match=r"mask must be boolean \(True = attend\).*bias"
        ) as caught:
            layer.call(params, *inputs, wrong)
        # the mask helpers of Flax are of no use to others, who have a bias to pass
        assert ("Flax" in str(caught.value)) == framework.startswith("flax")


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


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_checkpoint_of_theirs_loads(framework):
    inputs, mask = inputs_of("cross", framework)
    theirs = BUILD[framework](False)
    params = random_params(theirs, inputs)
    with lenient():
        expected = jitted(theirs.call)(params, *inputs, mask)
    got = jitted(BUILD[framework](True).call)(stored(framework, params), *inputs, mask)
    assert_close(got, expected, 1e-13)


def test_equinox_s_own_checkpoint_of_a_whole_layer():
    eqx = pytest.importorskip("equinox")
    from jax_attn_bwd.layers.equinox import MultiheadAttention

    file = io.BytesIO()
    eqx.tree_serialise_leaves(
        file, theirs := eqx.nn.MultiheadAttention(N, E, key=jax.random.key(0))
    )
    file.seek(0)
    blank = MultiheadAttention(N, E, is_causal=True, key=jax.random.key(1))
    ours = eqx.tree_deserialise_leaves(file, blank)
    (x,) = arrays((T, E))
    expected = theirs(x, x, x, jnp.tril(jnp.ones((T, T), bool)))
    assert_close(ours(x, x, x), expected, 1e-13)


def stacked(framework, own):
    """Two residual layers by the framework's own scan and remat: `(params, x) -> out`, and the params."""
    (x,) = arrays((2, T, E))
    causal = jnp.tril(jnp.ones((1, 1, T, T), bool))
    if framework == "flax_linen":
        nn = pytest.importorskip("flax.linen")
        from jax_attn_bwd.layers import flax_linen as ours

        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                layer = (ours if own else nn).MultiHeadAttention(N, param_dtype=x.dtype)
                return x + layer(x, mask=causal), None

        axes = {"params": 0}
        scanned = nn.scan(nn.remat(Block), axes, split_rngs={"params": True}, length=2)()
        return lambda params, x: scanned.apply(params, x, None)[0], lambda: scanned.init(
            jax.random.key(0), x, None
        )
    if framework == "flax_nnx":
        nnx = pytest.importorskip("flax.nnx")
        from jax_attn_bwd.layers import flax_nnx as ours

        def make(rng):
            cls = (ours if own else nnx).MultiHeadAttention
            return cls(N, E, param_dtype=x.dtype, decode=False, dropout_rate=0.5,
                       deterministic=True, keep_rngs=False, rngs=nnx.Rngs(rng))  # fmt: skip

        many = nnx.vmap(make)
        step = nnx.remat(lambda x, layer: x + layer(x, is_causal=True))

        def run(params, x):
            layers = many(jax.random.split(jax.random.key(0), 2))
            nnx.update(layers, params)
            return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, layers)

        def init():
            made = many(jax.random.split(jax.random.key(0), 2))
            return nnx.to_pure_dict(nnx.state(made, nnx.Param))

        return run, init
    if framework == "haiku":
        hk = pytest.importorskip("haiku")
        from jax_attn_bwd.layers import haiku as ours

        def forward(x):
            def block(x):
                init = hk.initializers.RandomUniform()
                layer = (ours if own else hk).MultiHeadAttention(N, E // N, w_init=init)
                return x + layer(x, x, x, causal)

            return hk.experimental.layer_stack(2)(hk.remat(block))(x)

        model = hk.without_apply_rng(hk.transform(forward))
        return model.apply, lambda: model.init(jax.random.key(0), x)
    eqx = pytest.importorskip("equinox")
    from jax_attn_bwd.layers import equinox as ours

    cls = (ours if own else eqx.nn).MultiheadAttention

    def make():
        keys = jax.random.split(jax.random.key(0), 2)
        return eqx.partition(eqx.filter_vmap(lambda key: cls(N, E, key=key))(keys), eqx.is_array)

    def run(params, x):
        static = make()[1]

        def block(x, params):
            layer = eqx.combine(params, static)
            return x + jax.vmap(lambda x: layer(x, x, x, causal[0, 0]))(x), None

        return jax.lax.scan(jax.checkpoint(block), x, params)[0]

    return run, lambda: make()[0]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_scan_over_layers_with_remat(framework):
    """Each layer's gradients are those of the framework's own, scanned and recomputed alike."""
    (x,) = arrays((2, T, E))
    results = []
    for own in (False, True):
        with lenient():
            run, init = stacked(framework, own)
            leaves, tree = jax.tree.flatten(jax.eval_shape(init))
            params = [0.3 * p for p in arrays(*(leaf.shape for leaf in leaves))]
            loss = lambda p, x: jnp.sin(run(jax.tree.unflatten(tree, p), x)).sum()  # noqa: B023, E731
            results.append(jitted(jax.value_and_grad(loss, (0, 1)))(params, x))
    assert_all_close(results[1], results[0], 1e-11)
