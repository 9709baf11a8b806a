"""The layers of the four frameworks behind one call: `layer.init(key, ...)`, `layer.call(params, ...)`.

Parameters of graph layers and deformable attention are trees as in linen, whatever the framework; those of
`MultiHeadAttention` are the framework's own, to be compared with those of the framework's own layer.
"""

import zlib
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import QUICK, assert_close, thorough

from jax_attn_bwd.layers.torch_weights import name_of_weight

FRAMEWORKS = ("flax_linen", "flax_nnx", "haiku", "equinox")
PACKAGES = {"flax_linen": "flax.linen", "flax_nnx": "flax.nnx", "haiku": "haiku", "equinox": "equinox"}
HEADS = 4  # heads of MultiHeadAttention
RENAMED = {"kernel": "w", "bias": "b", "scale": "scale"}
# Most of the time of these tests is LLVM's.
jitted = partial(jax.jit, compiler_options=QUICK)


def frameworks(*default):
    """All of them as parameters; those that are not named are left to the thorough tier."""
    return [pytest.param(name, marks=() if name in default else thorough) for name in FRAMEWORKS]


def imported(framework):
    """(the framework, this package's layers for it); a missing framework skips the test."""
    theirs = pytest.importorskip(PACKAGES[framework])
    import jax_attn_bwd

    return theirs, getattr(jax_attn_bwd.layers, framework)


@contextmanager
def lenient():
    """The frameworks' own layers promote dtypes and ranks implicitly."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def arrays(*shapes, dtype="float64"):
    seed = zlib.crc32(repr(shapes).encode())
    return [jnp.asarray(np.random.default_rng(seed).standard_normal(s), dtype) for s in shapes]


def values_and_gradients(function, *arguments):
    """The outputs, and the gradients of all arguments for random cotangents."""
    outputs, pullback = jax.vjp(function, *arguments)
    return outputs, pullback(drawn(outputs))


def drawn(like, seed=5):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda y: jnp.asarray(rng.standard_normal(y.shape), y.dtype), like)


def assert_tangents_agree(function, arguments, outputs, gradients):
    """<cotangents, J t> = <J^T cotangents, t>, where `values_and_gradients` gave outputs and gradients."""
    along = drawn(arguments, 6)
    found, tangents = jitted(lambda *x: jax.jvp(function, x, along))(*arguments)
    assert_all_close(found, outputs, 1e-11)
    inner = lambda xs, ys: sum(map(np.vdot, jax.tree.leaves(xs), jax.tree.leaves(ys)))
    assert_close(inner(drawn(outputs), tangents), inner(gradients, along), 1e-10)


def assert_all_close(got, expected, rtol):
    """`assert_close` of every leaf, by name."""
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


def from_haiku(flat, root):
    """The tree as in linen of the layer `root`."""
    linears = {path: x for path, x in flat.items() if path != root}
    assert all(path.startswith(f"{root}/") for path in linears)
    tree = {
        path.rpartition("/")[2]: {p: x[q] for p, q in RENAMED.items() if q in x}
        for path, x in linears.items()
    }
    return tree | dict(flat.get(root, {}))


def to_haiku(tree, root, between=""):
    """The parameters of Haiku of a tree as in linen."""
    flat = {}
    for name, x in tree.items():
        if isinstance(x, dict):
            flat[f"{root}/{between}{name}"] = {RENAMED[part]: p for part, p in x.items()}
        else:
            flat.setdefault(root, {})[name] = x
    return flat


def from_equinox(layer, eqx):
    """The tree as in linen."""
    tree = {}
    for name, x in vars(layer).items():
        if isinstance(x, eqx.Module) and hasattr(x, "weight"):
            tree[name] = {name_of_weight(x.weight): x.weight.T} | ({} if x.bias is None else {"bias": x.bias})
        elif eqx.is_array(x):
            tree[name] = x
    return tree


def to_equinox(layer, tree, eqx):
    """`layer` with the parameters of a tree as in linen."""
    for name, x in tree.items():
        if isinstance(x, dict):
            weight = next(part for part in x if part != "bias")
            parts = {"weight": x[weight].T} | ({"bias": x["bias"]} if "bias" in x else {})
            where = lambda layer: [getattr(getattr(layer, name), part) for part in parts]  # noqa: B023
            layer = eqx.tree_at(where, layer, list(parts.values()))
        else:
            layer = eqx.tree_at(lambda layer: getattr(layer, name), layer, x)  # noqa: B023
    return layer


class Graph:
    """`GATConv`, `GATv2Conv`, `TransformerConv`: `graph(framework, kind, in_channels, C, H, **options)`."""

    @staticmethod
    def flax_linen(kind, in_channels, *sizes, **options):
        layer = getattr(imported("flax_linen")[1], kind)(*sizes, **options)

        def init(key, *inputs):
            return layer.init(key, *inputs, deterministic=True)["params"]

        def call(params, *inputs, key=None, **call_options):
            rngs = None if key is None else {"dropout": key}
            call_options = {"deterministic": key is None, **call_options}
            return layer.apply({"params": params}, *inputs, rngs=rngs, **call_options)

        return SimpleNamespace(init=init, call=call)

    @staticmethod
    def flax_nnx(kind, in_channels, *sizes, **options):
        nnx, layers = imported("flax_nnx")

        def layer(key):
            return getattr(layers, kind)(in_channels, *sizes, **options, rngs=nnx.Rngs(key))

        def init(key, *inputs):
            return nnx.to_pure_dict(nnx.state(layer(key), nnx.Param))

        def call(params, *inputs, key=None, **call_options):
            made = layer(0) if options.get("dropout") else nnx.eval_shape(lambda: layer(0))
            nnx.update(made, params)
            rngs = None if key is None else nnx.Rngs(dropout=key)
            return made(*inputs, **{"deterministic": key is None, "rngs": rngs, **call_options})

        return SimpleNamespace(init=init, call=call)

    @staticmethod
    def haiku(kind, in_channels, *sizes, **options):
        hk, layers = imported("haiku")
        root = {"GATConv": "gat_conv", "GATv2Conv": "gatv2_conv", "TransformerConv": "transformer_conv"}[kind]

        def forward(*inputs, **call_options):
            return getattr(layers, kind)(*sizes, **options)(*inputs, **call_options)

        model = hk.transform(forward)

        def init(key, *inputs):
            return from_haiku(model.init(key, *inputs, is_training=False), root)

        def call(params, *inputs, key=None, **call_options):
            call_options = {"is_training": key is not None, **call_options}
            return model.apply(to_haiku(params, root), key, *inputs, **call_options)

        return SimpleNamespace(init=init, call=call)

    @staticmethod
    def equinox(kind, in_channels, *sizes, **options):
        eqx, layers = imported("equinox")

        def layer(key):
            return getattr(layers, kind)(in_channels, *sizes, **options, key=key)

        def call(params, *inputs, key=None, **call_options):
            made = to_equinox(layer(jax.random.key(0)), params, eqx)
            return made(*inputs, **{"key": key, "inference": key is None, **call_options})

        return SimpleNamespace(init=lambda key, *inputs: from_equinox(layer(key), eqx), call=call)


class Deformable:
    """`MultiScaleDeformableAttention`: `deformable(framework, levels, width, **options)`."""

    @staticmethod
    def flax_linen(levels, width, **options):
        layer = imported("flax_linen")[1].MultiScaleDeformableAttention(features=width, **options)
        S = sum(H * W for H, W in levels)

        def init(key):
            query, value = jnp.zeros((1, 1, width), "float32"), jnp.zeros((1, S, width), "float32")
            return layer.init(key, query, jnp.zeros((1, 1, 2)), value, levels)["params"]

        def call(params, *inputs, method=None):
            return layer.apply({"params": params}, *inputs, method=method)

        return SimpleNamespace(init=init, call=call)

    @staticmethod
    def flax_nnx(levels, width, **options):
        nnx, layers = imported("flax_nnx")

        def layer(key):
            return layers.MultiScaleDeformableAttention(in_features=width, **options, rngs=nnx.Rngs(key))

        def init(key):
            return nnx.to_pure_dict(nnx.state(layer(key), nnx.Param))

        def call(params, *inputs, method="__call__"):
            made = nnx.eval_shape(lambda: layer(0))
            nnx.update(made, params)
            return getattr(made, method)(*inputs)

        return SimpleNamespace(init=init, call=call)

    @staticmethod
    def haiku(levels, width, **options):
        hk, layers = imported("haiku")
        root, S = "multi_scale_deformable_attention", sum(H * W for H, W in levels)

        def transformed(method):
            def forward(*inputs):
                layer = layers.MultiScaleDeformableAttention(model_size=width, **options)
                return getattr(layer, method)(*inputs)

            return hk.without_apply_rng(hk.transform(forward))

        def init(key):
            inputs = jnp.zeros((1, 1, width)), jnp.zeros((1, 1, 2)), jnp.zeros((1, S, width))
            params = transformed("__call__").init(key, *inputs, levels)
            assert all(path.startswith(f"{root}/~/") for path in params)
            return from_haiku(params, root)

        def call(params, *inputs, method="__call__"):
            return transformed(method).apply(to_haiku(params, root, "~/"), *inputs)

        return SimpleNamespace(init=init, call=call)

    @staticmethod
    def equinox(levels, width, **options):
        eqx, layers = imported("equinox")

        def layer(key):
            return layers.MultiScaleDeformableAttention(query_size=width, **options, key=key)

        def call(params, *inputs, method="__call__"):
            made = to_equinox(layer(jax.random.key(0)), params, eqx)

            def picture(b):
                own = (x[b] if isinstance(x, jax.Array) else x for x in inputs)
                return getattr(made, method)(*own)

            return jnp.stack([picture(b) for b in range(inputs[0].shape[0])])

        return SimpleNamespace(init=lambda key: from_equinox(layer(key), eqx), call=call)


def graph(framework, *arguments, **options):
    return getattr(Graph, framework)(*arguments, **options)


def deformable(framework, *arguments, **options):
    return getattr(Deformable, framework)(*arguments, **options)


class MultiHead:
    """`MultiHeadAttention`, ours or the framework's own: `multi_head(framework, own, **options)`."""

    @staticmethod
    def flax_linen(own, dtype="float64", **options):
        nn, ours = imported("flax_linen")

        uniform = nn.initializers.uniform()
        options = {"kernel_init": uniform, "bias_init": uniform, "param_dtype": dtype} | options
        module = (ours if own else nn).MultiHeadDotProductAttention(HEADS, **options)

        def call(params, query, key, value, mask=None, rng=None, **tokens):
            mode = {"deterministic": rng is None, "dropout_rng": rng} | tokens
            return module.apply({"params": params}, query, key, value, mask=mask, **mode)

        init = lambda rng, *inputs: module.init(rng, *inputs, deterministic=True)["params"]
        return SimpleNamespace(init=init, call=call)

    @staticmethod
    def flax_nnx(own, dtype="float64", causal=False, **options):
        nnx, ours = imported("flax_nnx")

        # With a rate, though not dropping, Flax's own attention computes as its inputs do, not in float32.
        uniform = nnx.initializers.uniform()
        options = {
            "dropout_rate": 0.5,
            "kernel_init": uniform,
            "bias_init": uniform,
            "decode": False,
            "num_kv_heads": 2,
        } | options

        def layer(rng, query, key):
            cls = (ours if own else nnx).MultiHeadAttention
            widths = query.shape[-1], options.get("qkv_features"), options.get("out_features")
            rest = {n: x for n, x in options.items() if n not in ("qkv_features", "out_features")}
            kv = key.shape[-1]
            return cls(HEADS, *widths, in_kv_features=kv, param_dtype=dtype, rngs=nnx.Rngs(rng), **rest)

        def init(rng, query, key, value):
            return nnx.to_pure_dict(nnx.state(layer(rng, query, key), nnx.Param))

        def call(params, query, key, value, mask=None, rng=None, **tokens):
            made = layer(0, query, key)
            nnx.update(made, params)
            mode = {} if rng is None else {"rngs": nnx.Rngs(dropout=rng)}
            mode |= {"is_causal": causal} | tokens
            return made(query, key, value, mask=mask, deterministic=rng is None, **mode)

        return SimpleNamespace(init=init, call=call)

    @staticmethod
    def haiku(own, dtype="float64", dropout_rate=0.0, broadcast_dropout=False, **options):
        hk, ours = imported("haiku")

        uniform = hk.initializers.RandomUniform(-1, 1)
        options = {"key_size": 3, "w_init": uniform, "b_init": uniform} | options

        def forward(query, key, value, mask=None, **drop):
            return (ours if own else hk).MultiHeadAttention(HEADS, **options)(query, key, value, mask, **drop)

        transformed = hk.transform(forward)

        def call(params, query, key, value, mask=None, rng=None, **tokens):
            drop = (
                {} if rng is None else {"dropout_rate": dropout_rate, "broadcast_dropout": broadcast_dropout}
            )
            return transformed.apply(params, rng, query, key, value, mask, **drop, **tokens)

        return SimpleNamespace(init=transformed.init, call=call)

    @staticmethod
    def equinox(own, dtype="float64", **options):
        eqx, ours = imported("equinox")

        names = ("query", "key", "value", "output")
        options = {f"use_{name}_bias": True for name in names} | options

        def layer(rng, *inputs):
            sizes = (x.shape[-1] for x in inputs)
            cls = (ours if own else eqx.nn).MultiheadAttention
            return cls(HEADS, *sizes, dtype=jnp.dtype(dtype), key=rng, **options)

        def init(rng, *inputs):
            return eqx.filter(layer(rng, *inputs), eqx.is_array)

        def call(params, query, key, value, mask=None, rng=None, **tokens):
            made = eqx.combine(params, eqx.filter_eval_shape(layer, jax.random.key(0), query, key, value))
            axes = query.ndim - 2
            if mask is not None:  # one for each entry of the batch, [T, S] or [N, T, S]
                mask = jnp.broadcast_to(mask, (*query.shape[:-2], *mask.shape[-3:]))
                mask = mask[..., 0, :, :] if mask.shape[-3] == 1 else mask
            mode = {"key": rng, "inference": rng is None}
            function = lambda *inputs: made(*inputs[:-1], **inputs[-1], **mode)
            mapped = {name: None if name == "mod_args" else 0 for name in tokens}
            for _ in range(axes):
                function = jax.vmap(function, in_axes=(0, 0, 0, None if mask is None else 0, mapped))
            return function(query, key, value, mask, tokens)

        # Leaves alone: the trees differ in the class of their root.
        leaves = SimpleNamespace(init=lambda *x: jax.tree.leaves(init(*x)))
        tree = lambda *x: jax.tree.structure(jax.eval_shape(init, jax.random.key(0), *x))
        leaves.call = lambda params, *inputs, **rest: call(
            jax.tree.unflatten(tree(*inputs[:3]), params), *inputs, **rest
        )
        return leaves


def multi_head(framework, *arguments, **options):
    return getattr(MultiHead, framework)(*arguments, **options)
