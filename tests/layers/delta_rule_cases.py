"""The layers around the delta rule: their sizes, weights as PyTorch has them, and each token by token."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from layers.frameworks import from_equinox, from_haiku, imported, lenient, to_equinox, to_haiku

E, TAPS = 7, 4


class Case(NamedTuple):
    layer: str
    root: str  # its name in Haiku
    sizes: tuple[int, ...]  # of its heads, as constructors take them
    shapes: dict[str, tuple[int, ...]]  # as in PyTorch, by the names that they have here
    definition: Callable  # (parameters as in linen, tokens [T, E], np) -> [T, E]
    row: tuple[int, int]  # the shape of what the convolution reads of a token
    state: tuple[int, int, int]


def torch_state(case, rng, prefix=""):
    return {prefix + name: rng.standard_normal(shape) for name, shape in case.shapes.items()}


def tree_of(state):
    """The parameters as in linen."""
    tree = {}
    for name, x in state.items():
        owner, _, part = name.rpartition(".")
        if part == "weight":
            tree[owner] = {"scale" if x.ndim == 1 else "kernel": jnp.asarray(x.T)}
        else:
            tree[name] = jnp.asarray(x)
    return tree


def convolved(rows, tree, np):
    """SiLU of the causal convolution of `rows [T, C]`."""
    T, C = rows.shape
    padded = np.concatenate([np.zeros((TAPS - 1, C), rows.dtype), rows])
    kernel = tree["conv1d"]["kernel"][:, 0]
    mixed = sum(padded[tap : tap + T] * kernel[tap][None] for tap in range(TAPS))
    return mixed / (1 + np.exp(-mixed))


def recurrence(q, k, v, decay, beta, np):
    """The gated delta rule of `q, k [T, N, H]`, `v [T, N, Hv]`, `decay [T, N, 1 or H]`, `beta [T, N]`."""
    unit = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)

    def token(S, given):
        q, k, v, decay, beta = given
        S = S * decay[:, :, None]
        u = beta[:, None] * (v - np.einsum("nhv,nh->nv", S, k))
        S = S + k[:, :, None] * u[:, None]
        return S, np.einsum("nhv,nh->nv", S, q) / q.shape[-1] ** 0.5

    S, given = np.zeros((*k.shape[1:], v.shape[-1]), v.dtype), (unit(q), unit(k), v, decay, beta)
    if np is jnp:
        return jax.lax.scan(token, S, given)[1]
    rows = []
    for t in range(v.shape[0]):
        S, row = token(S, [x[t] for x in given])
        rows.append(row)
    return np.stack(rows)


def normed(out, scale, epsilon, np):
    return out / np.sqrt((out * out).mean(-1, keepdims=True) + epsilon) * scale


def gated_delta_net(K, N, H, HV):
    G, C = N // K, 2 * K * H + N * HV

    def definition(tree, x, np=jnp):
        T, size = x.shape[0], 2 * H + 2 * G * HV
        qkvz = (x @ tree["in_proj_qkvz"]["kernel"]).reshape(T, K, size)
        q, k, v, z = np.split(qkvz, (H, 2 * H, 2 * H + G * HV), -1)
        ba = (x @ tree["in_proj_ba"]["kernel"]).reshape(T, K, 2 * G)
        b, a = ba[..., :G].reshape(T, N), ba[..., G:].reshape(T, N)
        mixed = np.concatenate([q.reshape(T, -1), k.reshape(T, -1), v.reshape(T, -1)], -1)
        q, k, v = np.split(convolved(mixed, tree, np), (K * H, 2 * K * H), -1)
        q, k = (np.repeat(x.reshape(T, K, H), G, 1) for x in (q, k))
        v, z = v.reshape(T, N, HV), z.reshape(T, N, HV)
        decay = np.exp(-np.exp(tree["A_log"]) * np.log1p(np.exp(a + tree["dt_bias"])))
        out = recurrence(q, k, v, decay[..., None], 1 / (1 + np.exp(-b)), np)
        out = normed(out, tree["norm"]["scale"], 1e-6, np) * z / (1 + np.exp(-z))
        return out.reshape(T, -1) @ tree["out_proj"]["kernel"]

    shapes = {
        "in_proj_qkvz.weight": (C + N * HV, E),
        "in_proj_ba.weight": (2 * N, E),
        "conv1d.weight": (C, 1, TAPS),
        "dt_bias": (N,),
        "A_log": (N,),
        "norm.weight": (HV,),
        "out_proj.weight": (E, N * HV),
    }
    rows = (K, C // K), (N, H, HV)
    return Case("GatedDeltaNet", "gated_delta_net", (K, N, H, HV), shapes, definition, *rows)


def kimi_delta_attention(N, H):
    def definition(tree, x, np=jnp):
        by_name = lambda name, x=x: x @ tree[f"{name}_proj"]["kernel"]
        by_head = lambda x: x.reshape(*x.shape[:-1], N, H)
        mixed = convolved(np.concatenate([by_name(name) for name in "qkv"], -1), tree, np)
        q, k, v = map(by_head, np.split(mixed, 3, -1))
        f, g = (by_head(by_name(f"{name}_b", by_name(f"{name}_a"))) for name in "fg")
        step = np.log1p(np.exp(f + by_head(tree["dt_bias"])))
        decay = np.exp(-np.exp(tree["A_log"])[:, None] * step)
        out = recurrence(q, k, v, decay, 1 / (1 + np.exp(-by_name("b"))), np)
        out = normed(out, tree["o_norm"]["scale"], 1e-5, np) / (1 + np.exp(-g))
        return out.reshape(x.shape[0], -1) @ tree["o_proj"]["kernel"]

    projections = {**dict.fromkeys("qkv", (N * H, E)), "b": (N, E), "o": (E, N * H)}
    projections |= {"f_a": (H, E), "f_b": (N * H, H), "g_a": (H, E), "g_b": (N * H, H)}
    shapes = {f"{name}_proj.weight": shape for name, shape in projections.items()}
    shapes |= {
        "conv1d.weight": (3 * N * H, 1, TAPS),
        "o_norm.weight": (H,),
        "dt_bias": (N * H,),
        "A_log": (N,),
    }
    rows = (N, 3 * H), (N, H, H)
    return Case("KimiDeltaAttention", "kimi_delta_attention", (N, H), shapes, definition, *rows)


GATED, KIMI = gated_delta_net(2, 4, 6, 5), kimi_delta_attention(3, 5)
CASES = {"gated": GATED, "kimi": KIMI}


def of_zeros(make):
    """What `make()` returns, with zeros for arrays: initial values take long to compile."""
    zeros = lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x
    return jax.tree.map(zeros, imported("equinox")[0].filter_eval_shape(make))


class Layer:
    """`build(case, framework, **options)`: `init(key)`, `call(params, x, **tokens)` and, from an empty cache,
    `decode(params, [(x, tokens), ...])`, the output of each call; parameters are trees as in linen.
    """

    @staticmethod
    def flax_linen(case, **options):
        _, layers = imported("flax_linen")
        made = lambda **more: getattr(layers, case.layer)(*case.sizes, **options, **more)
        x = jnp.zeros((1, 3, E), "float32")

        def call(params, x, **tokens):
            return made().apply({"params": params}, x, **tokens)

        def decode(params, pieces):
            layer, outs = made(decode=True), []
            with lenient():  # inputs and parameters may differ in dtype
                shapes = jax.eval_shape(layer.init, jax.random.key(0), pieces[0][0])["cache"]
            cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            for x, tokens in pieces:
                variables = {"params": params, "cache": cache}
                out, changed = layer.apply(variables, x, **tokens, mutable=["cache"])
                outs, cache = [*outs, out], changed["cache"]
            return outs

        init = lambda key: made().init(key, x)["params"]
        return SimpleNamespace(init=init, call=call, decode=decode)

    @staticmethod
    def flax_nnx(case, **options):
        nnx, layers = imported("flax_nnx")
        layer = lambda key: getattr(layers, case.layer)(E, *case.sizes, **options, rngs=nnx.Rngs(key))

        def made(params):
            layer_ = nnx.eval_shape(lambda: layer(0))
            nnx.update(layer_, params)
            return layer_

        def decode(params, pieces):
            layer_ = made(params)
            layer_.init_cache(pieces[0][0].shape, pieces[0][0].dtype)
            return [layer_(x, decode=True, **tokens) for x, tokens in pieces]

        init = lambda key: nnx.to_pure_dict(nnx.state(layer(key), nnx.Param))
        return SimpleNamespace(
            init=init, call=lambda params, x, **tokens: made(params)(x, **tokens), decode=decode
        )

    @staticmethod
    def haiku(case, **options):
        hk, layers = imported("haiku")

        def transformed(**more):
            made = lambda: getattr(layers, case.layer)(*case.sizes, **options, **more)
            return hk.without_apply_rng(hk.transform_with_state(lambda x, **tokens: made()(x, **tokens)))

        def call(params, x, **tokens):
            return transformed().apply(to_haiku(params, case.root), {}, x, **tokens)[0]

        def decode(params, pieces):
            model, outs = transformed(decode=True), []
            _, state = model.init(jax.random.key(0), pieces[0][0])
            for x, tokens in pieces:
                out, state = model.apply(to_haiku(params, case.root), state, x, **tokens)
                outs.append(out)
            return outs

        x = jnp.zeros((1, 3, E), "float32")
        init = lambda key: from_haiku(transformed().init(key, x)[0], case.root)
        return SimpleNamespace(init=init, call=call, decode=decode)

    @staticmethod
    def equinox(case, **options):
        eqx, layers = imported("equinox")
        layer = lambda key: getattr(layers, case.layer)(E, *case.sizes, **options, key=key)
        made = lambda params: to_equinox(of_zeros(lambda: layer(jax.random.key(0))), params, eqx)

        def call(params, x, **tokens):
            return jax.vmap(lambda x, tokens: made(params)(x, **tokens))(x, tokens)

        def decode(params, pieces):
            layer_, outs = made(params), []
            dtype = pieces[0][0].dtype
            cache = jax.vmap(lambda _: layer_.init_cache(dtype))(jnp.arange(pieces[0][0].shape[0]))
            for x, tokens in pieces:
                step = lambda x, cache, tokens: layer_.decode(x, cache, **tokens)
                out, cache = jax.vmap(step)(x, cache, tokens)
                outs.append(out)
            return outs

        return SimpleNamespace(init=lambda key: from_equinox(layer(key), eqx), call=call, decode=decode)


def build(case, framework, **options):
    return getattr(Layer, framework)(case, **options)


def numbers(shape, first=0):
    """Numbers that any system computes alike."""
    return np.sin(1.7 * np.arange(first, first + np.prod(shape)) + 0.3).reshape(shape)
