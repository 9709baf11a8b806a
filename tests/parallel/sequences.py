"""Calls of attention over a sharded sequence, and the same on one device."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from helpers import QUICK, assert_trees_close
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_attn_bwd import dot_product_attention, mods, parallel
from jax_attn_bwd.ops.dot_product.cases import with_mod_args

AXIS = "x"
KINDS = {
    "ring": parallel.ring_attention,
    "all_gather": parallel.all_gather_attention,
    "ulysses": parallel.ulysses_attention,
}
LAYOUTS = {
    "contiguous": (lambda x, n, axis: x, lambda x, n, axis: x),
    "zigzag": (parallel.zigzag, parallel.unzigzag),
    "striped": (parallel.striped, parallel.unstriped),
}
B, T, N, K, H, HV = 2, 24, 8, 4, 3, 5
TOKENS = P(None, AXIS)


class Told(NamedTuple):
    """An argument beside query, key and value: which of its axes are tokens, and how it is sharded."""

    array: Any
    tokens: tuple[int, ...] = ()
    spec: P = P()


def mesh(n: int) -> Mesh:
    return Mesh(jax.devices()[:n], (AXIS,))


def draw(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape))


def arguments(case: str, rng, kind: str = "ring") -> tuple[dict[str, Told], dict[str, Any]]:
    """(arrays, options) of a named case."""
    bias = np.where(rng.random((N, T, T)) < 0.3, -np.inf, rng.standard_normal((N, T, T)))
    bias[:, 3] = -np.inf  # a query that sees nothing
    by_rows, of_keys = Told(jnp.asarray(bias), (-2, -1), P(None, AXIS)), P(None, None, None, AXIS)
    ids = jnp.asarray(np.sort(rng.integers(0, 4, (B, T)), axis=1))
    segments = {f"{side}_segment_ids": Told(ids, (-1,), TOKENS) for side in ("query", "key_value")}
    lengths = {
        "query_seq_lengths": Told(jnp.array([T, 13])),
        "key_value_seq_lengths": Told(jnp.array([5, 20])),
    }
    mask = jnp.asarray(rng.random((T, T)) < 0.6)
    rows, whole_mask = Told(mask, (-2, -1), P() if kind == "ulysses" else P(AXIS)), Told(mask, (-2, -1))
    key_bias = Told(draw(rng, B, N, 1, T), (-1,), of_keys)
    key_mask = Told(jnp.asarray(rng.random((B, 1, 1, T)) < 0.6), (-1,), of_keys)
    slopes, ids_of_all = Told(jnp.asarray(rng.random(N))), Told(ids.astype(np.int32))
    args = {"mod_args_0": ids_of_all, "mod_args_1": slopes}
    sink, key = {"sink": Told(draw(rng, N))}, {"dropout_key": Told(jax.random.key(7))}
    return {
        "plain": ({}, {}),
        "causal-sink-cap": (sink, {"is_causal": True, "logits_soft_cap": 2.0}),
        "window-lengths": (lengths, {"is_causal": True, "local_window_size": (7, 0)}),
        "window-both-sides-sink": (sink | {"mask": whole_mask}, {"local_window_size": (2, 5)}),
        "segments-window": (segments, {"local_window_size": (9, 2)}),
        "segments-lengths-causal": (segments | lengths, {"is_causal": True}),
        "bias-rows-mask-keys-sink": ({"bias": by_rows, "mask": key_mask} | sink, {"is_causal": True}),
        "bias-keys-mask-rows": (lengths | sink | {"bias": key_bias, "mask": rows}, {"local_window_size": 6}),
        "bias-lengths": ({"bias": by_rows} | lengths, {}),
        "functions": (args, {"mask_mod": mods.causal & mods.document, "score_mod": mods.alibi}),
        "dropout-causal": (key, {"dropout_rate": 0.3, "is_causal": True}),
        "dropout-shared-segments": (segments | key, {"dropout_rate": 0.4, "broadcast_dropout": True}),
        "dropout-bias-cap": ({"bias": by_rows} | key, {"dropout_rate": 0.2, "logits_soft_cap": 1.5}),
    }[case]


def sharded(kind: str, n: int, layout: str, told: dict[str, Told], options: dict[str, Any]):
    """The function over n devices, of whole arrays in the order of the sequence: laid out, run, laid back."""
    lay, back = (functools.partial(f, n=n) for f in LAYOUTS[layout])
    specs = {name: x.spec for name, x in told.items()}
    if layout != "contiguous":
        specs |= {"query_positions": P(AXIS), "key_value_positions": P(AXIS)}

    def run(query, key, value, more):
        run = functools.partial(KINDS[kind], axis_name=AXIS, return_residual=True, **options)
        for name, x in more.items():
            for axis in told[name].tokens:
                x = lay(x, axis=axis)
            more = more | {name: x}
        if layout != "contiguous":
            positions = (("query_positions", query), ("key_value_positions", key))
            more = more | {name: lay(np.arange(x.shape[1]), axis=0) for name, x in positions}
        tokens = [lay(x, axis=1) for x in (query, key, value)]
        in_specs = (*(TOKENS,) * 3, specs)
        call = jax.shard_map(
            lambda q, k, v, more: run(q, k, v, **with_mod_args(more)),
            mesh=mesh(n),
            in_specs=in_specs,
            out_specs=(TOKENS, TOKENS),
        )
        return tuple(back(x, axis=1) for x in call(*tokens, more))

    return run


def single(options: dict[str, Any]):
    def run(query, key, value, more):
        more = with_mod_args(more)
        return dot_product_attention(query, key, value, **more, **options, return_residual=True)

    return run


def inputs(rng, S: int = T):
    return draw(rng, B, T, N, H), draw(rng, B, S, K, H), draw(rng, B, S, K, HV)


def outputs_and_gradients(function, qkv, arrays, cotangents):
    """By name; those of integers, masks and keys are left out."""
    differentiated = {n: x for n, x in arrays.items() if x.dtype == jnp.float64}
    rest = {n: x for n, x in arrays.items() if n not in differentiated}

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(qkv, differentiated):
        (out, lse), pullback = jax.vjp(lambda qkv, d: function(*qkv, d | rest), qkv, differentiated)
        dlse = jnp.where(jnp.isfinite(lse), cotangents[1], jnp.nan)  # ignored where nothing is seen
        (dq, dk, dv), others = pullback((cotangents[0], dlse))
        return {"out": out, "lse": lse, "query": dq, "key": dk, "value": dv, **others}

    return run(qkv, differentiated)


def assert_same(kind: str, case: str, layout: str, rng, n: int = 4, S: int = T):
    told, options = arguments(case, rng, kind)
    qkv = inputs(rng, S)
    arrays = {name: x.array for name, x in told.items()}
    cotangents = draw(rng, B, T, N, HV), draw(rng, B, T, N)
    results = (
        outputs_and_gradients(f, qkv, arrays, cotangents)
        for f in (sharded(kind, n, layout, told, options), single(options))
    )
    assert_trees_close(*results, 1e-12)
