"""`GatedDeltaNet`: sizes, weights as PyTorch has them, the published layer token by token, and the layers."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from layers.frameworks import from_equinox, from_haiku, imported, lenient, to_equinox, to_haiku

E, K, N, H, HV, TAPS = 7, 2, 4, 6, 5, 4
G = N // K
C = 2 * K * H + N * HV
SIZES = (K, N, H, HV)
SHAPES = {  # as in PyTorch
    "in_proj_qkvz.weight": (C + N * HV, E),
    "in_proj_ba.weight": (2 * N, E),
    "conv1d.weight": (C, 1, TAPS),
    "dt_bias": (N,),
    "A_log": (N,),
    "norm.weight": (HV,),
    "out_proj.weight": (E, N * HV),
}
ROOT = "gated_delta_net"


def torch_state(rng, prefix=""):
    return {prefix + name: rng.standard_normal(shape) for name, shape in SHAPES.items()}


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


def definition(tree, x, np=jnp):
    """The published layer of one sequence `[T, E]`, written out; parameters as in linen."""
    T, size = x.shape[0], 2 * H + 2 * G * HV
    qkvz = (x @ tree["in_proj_qkvz"]["kernel"]).reshape(T, K, size)
    q, k, v, z = np.split(qkvz, (H, 2 * H, 2 * H + G * HV), -1)
    ba = (x @ tree["in_proj_ba"]["kernel"]).reshape(T, K, 2 * G)
    b, a = ba[..., :G].reshape(T, N), ba[..., G:].reshape(T, N)

    mixed = np.concatenate([q.reshape(T, -1), k.reshape(T, -1), v.reshape(T, -1)], -1)
    padded = np.concatenate([np.zeros((TAPS - 1, C), x.dtype), mixed])
    kernel = tree["conv1d"]["kernel"][:, 0]
    mixed = sum(padded[tap : tap + T] * kernel[tap][None] for tap in range(TAPS))
    mixed = mixed / (1 + np.exp(-mixed))
    q, k, v = np.split(mixed, (K * H, 2 * K * H), -1)

    unit = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
    q, k = (np.repeat(unit(x.reshape(T, K, H)), G, 1) for x in (q, k))
    v, z = v.reshape(T, N, HV), z.reshape(T, N, HV)
    decay = np.exp(-np.exp(tree["A_log"]) * np.log1p(np.exp(a + tree["dt_bias"])))
    beta = 1 / (1 + np.exp(-b))

    def token(S, given):
        q, k, v, decay, beta = given
        S = S * decay[:, None, None]
        u = beta[:, None] * (v - np.einsum("nhv,nh->nv", S, k))
        S = S + k[:, :, None] * u[:, None]
        return S, np.einsum("nhv,nh->nv", S, q) / H**0.5

    S, given = np.zeros((N, H, HV), x.dtype), (q, k, v, decay, beta)
    if np is jnp:
        _, out = jax.lax.scan(token, S, given)
    else:
        rows = []
        for t in range(T):
            S, row = token(S, [x[t] for x in given])
            rows.append(row)
        out = np.stack(rows)
    out = out / np.sqrt((out * out).mean(-1, keepdims=True) + 1e-6) * tree["norm"]["scale"]
    return (out * z / (1 + np.exp(-z))).reshape(T, -1) @ tree["out_proj"]["kernel"]


def of_zeros(make):
    """What `make()` returns, with zeros for arrays: initial values take long to compile."""
    zeros = lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x
    return jax.tree.map(zeros, imported("equinox")[0].filter_eval_shape(make))


class GatedDeltaNet:
    """`build(framework, **options)`: `init(key)`, `call(params, x, **tokens)` and, from an empty cache,
    `decode(params, [(x, tokens), ...])`, the output of each call; parameters are trees as in linen.
    """

    @staticmethod
    def flax_linen(**options):
        _, layers = imported("flax_linen")
        x = jnp.zeros((1, 3, E), "float32")

        def call(params, x, **tokens):
            return layers.GatedDeltaNet(*SIZES, **options).apply({"params": params}, x, **tokens)

        def decode(params, pieces):
            layer, outs = layers.GatedDeltaNet(*SIZES, decode=True, **options), []
            with lenient():  # inputs and parameters may differ in dtype
                shapes = jax.eval_shape(layer.init, jax.random.key(0), pieces[0][0])["cache"]
            cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            for x, tokens in pieces:
                variables = {"params": params, "cache": cache}
                out, changed = layer.apply(variables, x, **tokens, mutable=["cache"])
                outs, cache = [*outs, out], changed["cache"]
            return outs

        init = lambda key: layers.GatedDeltaNet(*SIZES, **options).init(key, x)["params"]
        return SimpleNamespace(init=init, call=call, decode=decode)

    @staticmethod
    def flax_nnx(**options):
        nnx, layers = imported("flax_nnx")
        layer = lambda key: layers.GatedDeltaNet(E, *SIZES, **options, rngs=nnx.Rngs(key))

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
    def haiku(**options):
        hk, layers = imported("haiku")

        def transformed(**more):
            forward = lambda x, **tokens: layers.GatedDeltaNet(*SIZES, **options, **more)(x, **tokens)
            return hk.without_apply_rng(hk.transform_with_state(forward))

        def call(params, x, **tokens):
            return transformed().apply(to_haiku(params, ROOT), {}, x, **tokens)[0]

        def decode(params, pieces):
            model, outs = transformed(decode=True), []
            _, state = model.init(jax.random.key(0), pieces[0][0])
            for x, tokens in pieces:
                out, state = model.apply(to_haiku(params, ROOT), state, x, **tokens)
                outs.append(out)
            return outs

        init = lambda key: from_haiku(transformed().init(key, jnp.zeros((1, 3, E), "float32"))[0], ROOT)
        return SimpleNamespace(init=init, call=call, decode=decode)

    @staticmethod
    def equinox(**options):
        eqx, layers = imported("equinox")
        layer = lambda key: layers.GatedDeltaNet(E, *SIZES, **options, key=key)
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


def build(framework, **options):
    return getattr(GatedDeltaNet, framework)(**options)


def numbers(shape, first=0):
    """Numbers that any system computes alike."""
    return np.sin(1.7 * np.arange(first, first + np.prod(shape)) + 0.3).reshape(shape)
