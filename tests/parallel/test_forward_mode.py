"""Forward mode over several devices: tangents, and what is made of them, against the plain formula."""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import QUICK, assert_close, thorough
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from parallel.sequences import AXIS, KINDS, TOKENS, arguments, draw, inputs, mesh, sharded
from parallel.test_exchange import COLLECTIVE

from jax_attn_bwd import (
    BipartiteCSC,
    MultiHeadAttentionParams,
    Rotary,
    dot_product_attention,
    graph_transformer_attention,
    multi_head_attention,
    parallel,
)
from jax_attn_bwd.ops.dot_product import plan as planning
from jax_attn_bwd.ops.dot_product.cases import with_mod_args
from jax_attn_bwd.ops.dot_product.reference import dot_product_attention as reference

CASES = [("ring", "bias-rows-mask-keys-sink", "zigzag", 24)]
REST = [
    ("ring", "causal-sink-cap", "contiguous", 16),
    ("all_gather", "bias-keys-mask-rows", "contiguous", 24),
    ("ulysses", "dropout-bias-cap", "striped", 24),
    ("ring", "dropout-causal", "zigzag", 24),
    ("ring", "functions", "zigzag", 24),
    ("ring", "segments-window", "striped", 24),
    ("ring", "window-lengths", "contiguous", 24),
    ("all_gather", "causal-sink-cap", "zigzag", 16),
]


def formula(*args, **options):
    """The definition; with dropout, of which it knows nothing, the operator on one device."""
    if "dropout_rate" in options:
        return dot_product_attention(*args, **options, return_residual=True, forward_mode=True)
    with jax.numpy_rank_promotion("allow"):
        return reference(*args, **options)


def close(got, expected, rtol):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_close(x, y, rtol)


def tangents_like(rng, tree):
    return jax.tree.map(lambda x: draw(rng, *x.shape), tree)


@pytest.mark.parametrize(
    ("kind", "case", "layout", "S"), [*CASES, *(pytest.param(*c, marks=thorough) for c in REST)]
)
def test_tangents_are_those_of_the_formula(kind, case, layout, S, rng):
    told, options = arguments(case, rng, kind)
    arrays = {name: x.array for name, x in told.items()}
    moving = {"qkv": inputs(rng, S), **{n: x for n, x in arrays.items() if x.dtype == jnp.float64}}
    rest = {n: x for n, x in arrays.items() if n not in moving}
    along = tangents_like(rng, moving)
    exchanged = sharded(kind, 4, layout, told, {**options, "forward_mode": True})
    defined = lambda q, k, v, more: formula(q, k, v, **with_mod_args(more), **options)

    @functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
    def pushed(call, moving, along):
        def run(moving):
            more = {n: x for n, x in moving.items() if n != "qkv"} | rest
            return tuple(jnp.where(jnp.isfinite(x), x, 0) for x in call(*moving["qkv"], more))

        return jax.jvp(run, (moving,), (along,))

    close(pushed(exchanged, moving, along), pushed(defined, moving, along), 1e-11)


def small(kind, forward_mode=True, **options):
    """(the exchange over two devices, the formula), of (q, k, v)."""
    attend = functools.partial(KINDS[kind], axis_name=AXIS, forward_mode=forward_mode, **options)
    mapped = jax.shard_map(attend, mesh=mesh(2), in_specs=(TOKENS,) * 3, out_specs=TOKENS)
    return mapped, lambda q, k, v: formula(q, k, v, **options)[0]


def test_a_bias_and_a_sink_alone_have_tangents_on_a_ring(rng):
    """The columns of the bias are those of the keys that have come, which have no tangent."""
    q, k = (draw(rng, *shape) for shape in ((1, 3, 2, 2), (1, 6, 1, 2)))
    moving, along = ((draw(rng, 2, 3, 6), draw(rng, 2)) for _ in range(2))
    attend = functools.partial(KINDS["ring"], axis_name=AXIS, forward_mode=True)
    mapped = jax.shard_map(
        lambda q, k, bias, sink: attend(q, k, k, bias, sink=sink),
        mesh=mesh(3),
        in_specs=(TOKENS, TOKENS, P(None, AXIS), P()),
        out_specs=TOKENS,
    )
    plain = lambda q, k, bias, sink: formula(q, k, k, bias, sink=sink)[0]
    push = lambda f: jax.jit(lambda *x: jax.jvp(lambda *x: f(q, k, *x), x, along), compiler_options=QUICK)(
        *moving
    )
    close(push(mapped), push(plain), 1e-12)


@thorough
@pytest.mark.parametrize("kind", KINDS)
def test_transformations_of_it(kind, rng):
    qkv = tuple(draw(rng, 2, n, 2, 3) for n in (8, 4, 4))
    along = tangents_like(rng, qkv)

    def found(call, qkv, along):
        loss = lambda *qkv: (call(*qkv) ** 2).sum()
        push = lambda f, *at: jax.jvp(f, at, along)

        def mean_flow(stopped, *qkv):
            out, dout = push(call, *qkv)
            return ((out - (jax.lax.stop_gradient(dout) if stopped else dout)) ** 2).sum()

        gradient = functools.partial(jax.grad, argnums=(0, 1, 2))
        return {
            "stopped": gradient(functools.partial(mean_flow, True))(*qkv),
            "both": gradient(functools.partial(mean_flow, False))(*qkv),
            "jvp of grad": push(gradient(loss), *qkv)[1],
            "linearize": jax.linearize(call, *qkv)[1](*along),
            "vmap": jax.vmap(lambda dv: jax.jvp(lambda v: call(*qkv[:2], v), qkv[2:], (dv,)))(
                jnp.stack([along[2], 2 * along[2]])
            ),
        }

    run = jax.jit(found, static_argnums=0, compiler_options=QUICK)
    got, expected = (run(call, qkv, along) for call in small(kind, is_causal=True))
    close(got, expected, 1e-10)


@thorough
def test_reverse_mode_has_the_same_bits(rng):
    qkv = tuple(draw(rng, 1, n, 2, 3).astype(jnp.float32) for n in (8, 4, 4))
    both = [
        jax.jit(jax.grad(lambda *x, call=call: (call(*x) ** 2).sum(), (0, 1, 2)), compiler_options=QUICK)
        for call in (small("ring", on)[0] for on in (True, False))
    ]
    close(*(f(*qkv) for f in both), 0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ring", ["collective-permute"] * (2 + 4)),
        pytest.param("all_gather", ["all-gather"] * 4, marks=thorough),
        pytest.param("ulysses", ["all-to-all"] * 8, marks=thorough),
    ],
)
def test_tangents_of_keys_and_values_travel_once(kind, expected):
    """Keys and values in the forward; for the tangent those again on a ring alone, and their tangents."""
    attend = functools.partial(KINDS[kind], axis_name=AXIS, forward_mode=True)
    mapped = jax.shard_map(attend, mesh=mesh(4), in_specs=(TOKENS,) * 3, out_specs=TOKENS)
    x = jax.ShapeDtypeStruct((1, 32, 8, 4), jnp.float32)
    program = jax.jit(lambda *x: jax.jvp(mapped, x[:3], x[3:]), compiler_options=QUICK)
    assert sorted(COLLECTIVE.findall(program.lower(*[x] * 6).compile().as_text())) == expected


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, pytest.param(AxisType.Auto, marks=thorough)])
def test_queries_cut_over_devices(axis_type, rng, monkeypatch):
    """Dense attention whose queries lie along a mesh axis, in tiles."""
    monkeypatch.setattr(planning, "MATERIALIZED_PLANE", 0)  # else an Auto mesh has no pieces
    devices = jax.make_mesh((4,), (AXIS,), axis_types=(axis_type,))
    bias = draw(rng, 4, 264, 1)
    primals = [draw(rng, 1, 264, 4, 3), draw(rng, 1, 272, 2, 3), draw(rng, 1, 272, 2, 5), bias, draw(rng, 4)]
    along, specs = tangents_like(rng, primals), (TOKENS, TOKENS, TOKENS, P(None, AXIS), P())
    options = {"is_causal": True, "dropout_rate": 0.25, "dropout_key": jax.random.key(1)}

    def pushed(call, *given):
        call = functools.partial(call, **options)
        return jax.jvp(lambda q, k, v, b, sink: call(q, k, v, b, sink=sink), given[:5], given[5:])

    attend = functools.partial(dot_product_attention, forward_mode=True, implementation="xla")
    expected = jax.jit(functools.partial(pushed, lambda *x, **o: formula(*x, **o)[0]))(*primals, *along)
    with jax.set_mesh(devices):
        given = [
            jax.device_put(x, NamedSharding(devices, s))
            for x, s in zip([*primals, *along], specs * 2, strict=True)
        ]
        run = jax.jit(functools.partial(pushed, attend), compiler_options=QUICK)
        close(run(*given), expected, 1e-11)


@thorough
@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_queries_of_the_layer_cut_over_devices(axis_type, rng, monkeypatch):
    """Projected heads in tiles, with appended rows, as on one device."""
    monkeypatch.setattr(planning, "MATERIALIZED_PLANE", 0)
    devices = jax.make_mesh((4,), (AXIS,), axis_types=(axis_type,))
    shapes = (6, 4, 3), (4, 3), (6, 2, 3), (2, 3), (6, 2, 3), (2, 3), (4, 3, 6), (6,), (2, 3), (2, 3), (4,)
    params = MultiHeadAttentionParams(*(draw(rng, *shape) for shape in shapes))
    primals = params, draw(rng, 1, 264, 6)
    along = tangents_like(rng, primals)
    options = {"is_causal": True, "logits_soft_cap": 3.0, "add_zero_attn": True, "rotary": Rotary(size=2)}
    layer = functools.partial(multi_head_attention, forward_mode=True, implementation="xla", **options)
    pushed = jax.jit(lambda *x: jax.jvp(layer, *x), compiler_options=QUICK)
    expected = pushed(primals, along)
    with jax.set_mesh(devices):
        place = lambda given: (
            jax.device_put(given[0], NamedSharding(devices, P())),
            jax.device_put(given[1], NamedSharding(devices, P(None, AXIS))),
        )
        close(pushed(place(primals), place(along)), expected, 1e-11)


@thorough
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_attention_fn(kind, rng):
    qkv = tuple(draw(rng, 2, 8, 2, 3) for _ in range(3))
    along = tangents_like(rng, qkv)
    attend = parallel.attention_fn(mesh(2), sequence=AXIS, kind=kind)
    attend = functools.partial(attend, is_causal=True, forward_mode=True)
    plain = lambda *qkv: formula(*qkv, is_causal=True)[0]
    close(*(jax.jit(functools.partial(jax.jvp, f))(qkv, along) for f in (attend, plain)), 1e-12)


@thorough
def test_graph_attention(rng):
    edges = rng.integers(0, 12, (2, 40))
    graph = BipartiteCSC.from_coo(*edges, 12, 12)
    devices, x = mesh(2), draw(rng, 12, 8)
    dx = draw(rng, 12, 8)
    parts = parallel.partition_graph(graph, 2)
    call = functools.partial(
        parallel.sharded_graph_attention, mesh=devices, axis=AXIS, num_heads=2, kind="transformer"
    )
    through = lambda x: parts.dst.collect(call(parts, parts.src.place(x), value=None, forward_mode=True))
    alone = lambda x: graph_transformer_attention(graph, x, x, x, num_heads=2, forward_mode=True)
    got, expected = (jax.jit(lambda x, dx, f=f: jax.jvp(f, (x,), (dx,)))(x, dx) for f in (through, alone))
    close(got, expected, 1e-12)
