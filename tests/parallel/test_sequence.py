"""Attention over a sharded sequence: values and gradients of one device, options in pairs, in each layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import QUICK, assert_close, assert_trees_close, thorough
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from parallel.sequences import (
    AXIS,
    KINDS,
    TOKENS,
    Told,
    assert_same,
    draw,
    mesh,
    outputs_and_gradients,
    sharded,
    single,
)

from jax_attn_bwd import mods
from jax_attn_bwd.ops.dot_product.reference import dot_product_attention as formula

DEFAULT = [
    ("ring", "causal-sink-cap", "zigzag"),
    ("ring", "bias-rows-mask-keys-sink", "zigzag"),
    ("ring", "dropout-causal", "zigzag"),
    ("ring", "functions", "zigzag"),
    ("ring", "window-both-sides-sink", "contiguous"),
    ("all_gather", "bias-keys-mask-rows", "contiguous"),
    ("ulysses", "dropout-bias-cap", "striped"),
]
REST = [
    ("all_gather", "functions", "contiguous"),
    ("ulysses", "functions", "striped"),
    ("ring", "segments-lengths-causal", "striped"),
    ("ring", "window-lengths", "contiguous"),
    ("ring", "segments-window", "zigzag"),
    ("ring", "dropout-shared-segments", "contiguous"),
    ("ring", "bias-lengths", "contiguous"),
    ("all_gather", "window-lengths", "zigzag"),
    ("all_gather", "bias-rows-mask-keys-sink", "contiguous"),
    ("all_gather", "dropout-bias-cap", "striped"),
    ("ulysses", "causal-sink-cap", "contiguous"),
    ("ulysses", "segments-lengths-causal", "contiguous"),
    ("ulysses", "window-lengths", "zigzag"),
]
CASES = [pytest.param(*c, id="-".join(c)) for c in DEFAULT]
CASES += [pytest.param(*c, id="-".join(c), marks=thorough) for c in REST]


@pytest.mark.parametrize(("kind", "case", "layout"), CASES)
def test_as_on_one_device(kind, case, layout, rng):
    assert_same(kind, case, layout, rng)


def test_outputs_of_many_options_at_once(rng):
    """On four devices; of the keys of some, one of the two batch entries sees nothing."""
    T, N = 8, 4
    qkv = tuple(draw(rng, 2, T, N, 2) for _ in range(3))
    ids = Told(jnp.asarray(np.stack([np.zeros(T, int), np.arange(T) // 4])), (-1,), TOKENS)
    told = {"query_segment_ids": ids, "key_value_segment_ids": ids, "mod_args_0": Told(draw(rng, N))}
    told |= {
        "bias": Told(draw(rng, N, T, T), (-2, -1), P(None, AXIS)),
        "dropout_key": Told(jax.random.key(7)),
        "mask": Told(jnp.asarray(rng.random((N, T, T)) < 0.8)),  # whole on each device
        "sink": Told(draw(rng, N)),
        "query_seq_lengths": Told(jnp.array([6, T])),
        "key_value_seq_lengths": Told(jnp.array([5, T])),
    }
    options = {"score_mod": mods.alibi, "dropout_rate": 0.4}
    runs = {kind: sharded(kind, 4, "contiguous", told, options) for kind in ("ring", "ulysses")}
    arrays = {name: x.array for name, x in told.items()}
    run = lambda *given: ({kind: run(*given) for kind, run in runs.items()}, single(options)(*given))
    found, expected = jax.jit(run, compiler_options=QUICK)(*qkv, arrays)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-13), found, dict.fromkeys(runs, expected))


@thorough
@pytest.mark.parametrize(("kind", "n"), [("ring", 1), ("ring", 2), ("all_gather", 2), ("ulysses", 1)])
def test_other_numbers_of_devices(kind, n, rng):
    assert_same(kind, "bias-keys-mask-rows", "contiguous", rng, n)


@thorough
@pytest.mark.parametrize("kind", KINDS)
def test_other_keys_than_queries(kind, rng):
    assert_same(kind, "plain", "contiguous", rng, S=36)


def test_a_window_reaches_keys_of_more_devices_than_queries(rng):
    """A device has six queries and two keys: those within four of its queries are those of three others."""
    qkv = tuple(draw(rng, 1, n, 1, 2) for n in (24, 8, 8))
    options = {"local_window_size": (4, 0)}
    runs = sharded("ring", 4, "contiguous", {}, options), single(options)
    got, expected = jax.jit(lambda *qkv: [run(*qkv, {}) for run in runs], compiler_options=QUICK)(*qkv)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-13), got, expected)


@thorough
def test_a_window_that_reaches_no_other_device(rng):
    """One step, and nothing travels."""
    q = draw(rng, 8, 2, 3)
    told, options = {}, {"local_window_size": (0, 0)}
    run = sharded("ring", 4, "contiguous", told, options)
    out, _ = jax.jit(run)(q[None], q[None], q[None], {})
    assert_close(out[0], q, 1e-13)


@pytest.mark.parametrize("kind", [pytest.param("all_gather", marks=thorough), "ring"])
def test_no_nan_from_hidden_tokens(kind, rng):
    """Keys and values beyond the length, queries that see nothing, and their cotangents."""
    n, T, keys = 4, 16, 10
    qkv = [draw(rng, 1, T, 2, 3) for _ in range(3)]
    told = {"key_value_seq_lengths": Told(jnp.array([keys])), "query_seq_lengths": Told(jnp.array([T - 2]))}
    told["sink"] = Told(draw(rng, 2))
    arrays = {name: x.array for name, x in told.items()}
    cotangents = draw(rng, 1, T, 2, 3), jnp.zeros((1, T, 2))
    run = sharded(kind, n, "contiguous", told, {"is_causal": True})
    clean = outputs_and_gradients(run, qkv, arrays, cotangents)
    hidden = lambda x, start: x.at[:, start:].set(jnp.nan)
    poisoned = [hidden(qkv[0], T - 2), hidden(qkv[1], keys), hidden(qkv[2], keys)]
    got = outputs_and_gradients(run, poisoned, arrays, (hidden(cotangents[0], T - 2), cotangents[1]))
    assert_trees_close(got, clean, 0)


@pytest.mark.parametrize("kind", [pytest.param("all_gather", marks=thorough), "ring"])
def test_second_order(kind, rng):
    """Reverse over reverse and forward over reverse, with steps that are skipped."""
    n, T = 2, 8
    qkv, ct = [draw(rng, 1, T, 2, 3) for _ in range(3)], draw(rng, 1, T, 2, 3)
    sink = draw(rng, 2)
    options = {"is_causal": True}

    def derivatives(function):
        def loss(arguments):
            *qkv, sink = arguments
            out, lse = function(*qkv, {"sink": sink})
            return (out * ct).sum() + jnp.sin(lse).sum()

        def curved(arguments):
            return sum(jnp.sin(x).sum() for x in jax.grad(loss)(arguments))

        @functools.partial(jax.jit, compiler_options=QUICK)
        def run(arguments):
            tangents = jax.tree.map(jnp.cos, arguments)
            return jax.grad(curved)(arguments), jax.jvp(jax.grad(loss), (arguments,), (tangents,))[1]

        return run([*qkv, sink])

    got = derivatives(sharded(kind, n, "contiguous", {"sink": Told(sink)}, options))
    expected = derivatives(single(options))
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-11), got, expected)


@thorough
def test_vmap_of_one_operand(rng):
    """Both outputs are batched, whatever is: JAX mixes up cotangents otherwise."""
    n, T = 4, 8
    q, k, v, ct = (draw(rng, 1, T, 2, 3) for _ in range(4))
    values = jnp.stack([v, 2 * v, v**2])

    def gradients(function):
        def loss(q, k, v):
            out, lse = function(q, k, v, {})
            return (out * ct).sum() + (lse * ct[..., 0]).sum()

        return jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2)), (None, None, 0)))(q, k, values)

    got = gradients(sharded("ring", n, "zigzag", {}, {"is_causal": True}))
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-12), got, gradients(single({"is_causal": True})))


@thorough
def test_gradients_inside_shard_map(rng):
    """A training step whose gradients are taken inside, beside an axis that shards the batch."""
    devices = Mesh([[jax.devices()[2 * i + j] for j in range(2)] for i in range(2)], ("data", AXIS))
    q, k, v, ct = (draw(rng, 2, 8, 2, 3) for _ in range(4))
    sink, spec = draw(rng, 2), P("data", AXIS)

    def loss(attend, q, k, v, sink, ct):
        return (attend(q, k, v, sink=sink, is_causal=True) * ct).sum()

    def step(q, k, v, sink, ct):
        attend = functools.partial(KINDS["ring"], axis_name=AXIS)
        return jax.grad(functools.partial(loss, attend), (0, 1, 2, 3))(q, k, v, sink, ct)

    run = jax.shard_map(step, mesh=devices, in_specs=(*(spec,) * 3, P(), spec), out_specs=(*(spec,) * 3, P()))
    expected = jax.grad(functools.partial(loss, single_out), (0, 1, 2, 3))(q, k, v, sink, ct)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-12), jax.jit(run)(q, k, v, sink, ct), expected)


def single_out(q, k, v, *, sink, **options):
    return single(options)(q, k, v, {"sink": sink})[0]


@thorough
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_narrow_dtypes(dtype, rng):
    """Within twice the error of the plain formula in that dtype."""
    q, k, v, ct = (draw(rng, 1, 32, 2, 4) for _ in range(4))

    def run(function, dtype):
        arrays = [x.astype(dtype) for x in (q, k, v)]

        def loss(q, k, v):
            return (function(q, k, v, {})[0].astype(jnp.float64) * ct).sum()

        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # the formula promotes
            return jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)

    options = {"is_causal": True}
    ring, plain = sharded("ring", 4, "zigzag", {}, options), lambda q, k, v, _: formula(q, k, v, **options)
    rounded = [x.astype(dtype).astype(jnp.float64) for x in (q, k, v)]
    exact = jax.grad(lambda q, k, v: (single(options)(q, k, v, {})[0] * ct).sum(), (0, 1, 2))(*rounded)
    for got, other, true in zip(run(ring, dtype), run(plain, dtype), exact, strict=True):
        assert got.dtype == dtype
        error = lambda x, true=true: jnp.abs(x.astype(jnp.float64) - true).max()
        assert error(got) <= 2 * error(other)


def test_unasked_gradients_do_not_travel(rng):
    """The query alone is differentiated: two arrays and their positions go round, nothing comes home."""
    q, k, v = (draw(rng, 1, 8, 2, 3) for _ in range(3))
    attend = functools.partial(KINDS["ring"], axis_name=AXIS, is_causal=True)
    run = jax.shard_map(attend, mesh=mesh(4), in_specs=(TOKENS,) * 3, out_specs=TOKENS)
    count = lambda wrt: str(jax.make_jaxpr(jax.grad(lambda *x: run(*x).sum(), wrt))(q, k, v)).count(
        "ppermute["
    )
    moved, gradients = 3, 2  # key, value, positions; dk, dv
    assert count(0) == 3 * moved  # forward; in the backward the first step apart
    assert count((0, 1, 2)) == 3 * moved + 2 * gradients
