"""Sequences over 8 virtual devices: same numbers, keys gathered once, their gradients summed once, no
collective in a loop.
"""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.test_sharding import collectives
from helpers import QUICK, assert_close, thorough
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from parallel.exchanges import loops_and_collectives_in_them

from jax_attn_bwd import (
    MultiHeadAttentionParams,
    dot_product_attention,
    mods,
    multi_head_attention,
    multi_scale_deformable_attention,
)
from jax_attn_bwd._core.split import Pieces
from jax_attn_bwd.ops.dot_product import plan as planning
from jax_attn_bwd.ops.dot_product import visibility
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.plan import Tiles

T, N, H = 64, 4, 8
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
ALL = dict.fromkeys(("query", "key", "value"), P("b", "t", "n"))
LAYOUTS = {  # name: (sizes of the mesh axes b, t and n; specs of what is not whole)
    "all": ((1, 8, 1), ALL),
    "query": ((1, 8, 1), {"query": P(None, "t")}),
    "keys": ((1, 8, 1), dict.fromkeys(("key", "value"), P(None, "t"))),
    "all-BxTxN": ((2, 2, 2), ALL),
}


def draw(*shape):
    return lambda rng: jnp.asarray(rng.standard_normal(shape))


CASES = {  # name: (arguments or what draws them; options; specs; collectives beyond the budget)
    "full": ({}, {}, {}, 0),
    "causal": ({}, {"is_causal": True}, {}, 0),
    "window": ({}, {"local_window_size": (9, 0)}, {}, 0),
    "dropped": (  # sums of the gradients of sink and bias; the bias comes and goes otherwise than the query
        {"bias": draw(1, N, 1, T), "sink": draw(N), "dropout_key": lambda rng: jax.random.key(3)},
        {"is_causal": True, "dropout_rate": 0.3, "logits_soft_cap": 5.0, "dropout_offset": (0, 0, 7, 0)},
        {},
        4,
    ),
    "rows": (
        {
            "mask": lambda rng: jnp.asarray(rng.random((2, 1, T, T)) < 0.4),
            "dropout_key": lambda rng: jax.random.key(3),
        },
        {"dropout_rate": 0.3, "dropout_offset": (0, 0, np.arange(T) * 2, 0)},
        {"mask": P(None, None, "t")},
        0,
    ),
    "lengths": (  # which tiles are seen
        {
            "query_seq_lengths": lambda rng: jnp.asarray([50, 3]),
            "key_value_seq_lengths": lambda rng: jnp.asarray([T, 20]),
        },
        {"is_causal": True},
        {},
        1,
    ),
    "positions": (  # gathered where they are sharded; which tiles are seen
        {
            name: lambda rng: jnp.asarray(np.arange(T)[::-1].copy())
            for name in ("query_positions", "key_value_positions")
        },
        {"local_window_size": (11, 2)},
        {"query_positions": P("t"), "key_value_positions": P("t")},
        3,
    ),
}
DEFAULT = (
    ("causal", "all", AUTO), ("window", "all", AUTO), ("causal", "all", EXPLICIT),
    ("lengths", "all-BxTxN", EXPLICIT), ("rows", "query", AUTO),
)  # fmt: skip
IN_TURN = [(case, "all-BxTxN", (AUTO, EXPLICIT)[number % 2]) for number, case in enumerate(CASES)]


@pytest.fixture
def small_tiles(monkeypatch):
    """4 x 8, so that 64 tokens are many tiles, two also of one part of 8."""

    def small(operands, sizes, parts=1):
        return Tiles(min(4, sizes.T), 8, str(operands.query.dtype), parts=parts)

    jax.clear_caches()  # what was traced with other tiles
    monkeypatch.setattr(planning, "default_schedule", small)
    yield
    jax.clear_caches()


def around(mesh, kind):
    """What a step is traced in: on Auto axes nobody sets the mesh, and arrays alone tell of it."""
    return jax.set_mesh(mesh) if kind == EXPLICIT else contextlib.nullcontext()


def inputs(case):
    """(arguments, options, names of the differentiated, cotangents) with a batch of 2."""
    given, options, _, _ = CASES[case]
    rng = np.random.default_rng(0)
    arrays = {
        "query": draw(2, T, N, H)(rng), "key": draw(2, T, N // 2, H)(rng), "value": draw(2, T, N // 2, H)(rng)
    }  # fmt: skip
    arrays |= {name: make(rng) for name, make in given.items()}
    if case == "lengths":  # what nobody sees reaches nothing
        arrays |= {name: arrays[name].at[1, 20:].set(jnp.nan) for name in ("key", "value")}
    names = [name for name in ("query", "key", "value", "bias", "sink") if name in arrays]
    return arrays, options, names, (draw(2, T, N, H)(rng), draw(2, T, N)(rng))


def program(options, names):
    def step(arrays, cts):
        def call(inputs):
            return dot_product_attention(**{**arrays, **inputs}, **options, return_residual=True)

        (out, lse), pullback = jax.vjp(call, {name: arrays[name] for name in names})
        cts = cts[0], jnp.where(jnp.isfinite(lse), cts[1], 0)
        return out, lse, pullback(cts)[0]

    return jax.jit(step, compiler_options=QUICK)


@pytest.mark.parametrize(
    ("case", "layout", "kind"),
    [
        pytest.param(case, layout, kind, marks=[thorough] * ((case, layout, kind) not in DEFAULT))
        for case in CASES
        for layout in LAYOUTS
        for kind in (AUTO, EXPLICIT)
        if case == "causal" or (case, layout, kind) in {*DEFAULT, *IN_TURN}
    ],
)
def test_a_step(case, layout, kind, small_tiles):
    arrays, options, names, cts = inputs(case)
    step = program(options, names)
    expected = step(arrays, cts)
    sizes, specs = LAYOUTS[layout]
    *_, of_rows, beyond = CASES[case]
    specs = specs | of_rows if "query" in specs else specs
    mesh = jax.make_mesh(sizes, ("b", "t", "n"), axis_types=(kind,) * 3)
    rows = specs.get("query", P())
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P()))) for name, x in arrays.items()
    }
    placed_cts = tuple(jax.device_put(ct, NamedSharding(mesh, rows)) for ct in cts)
    with around(mesh, kind):
        compiled = step.lower(placed, placed_cts).compile()
        out, lse, grads = compiled(placed, placed_cts)

    assert_close(out, expected[0], 1e-12, "out")
    assert_close(lse, expected[1], 1e-12, "lse")
    for name in names:
        assert_close(grads[name], expected[2][name], 1e-12, name)
        if kind == EXPLICIT:
            assert grads[name].sharding.is_equivalent_to(placed[name].sharding, grads[name].ndim), name
    for x in (out, lse, grads["query"]):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, rows), x.ndim)
    loops, inside = loops_and_collectives_in_them(compiled)
    assert loops >= 2
    assert inside == 0
    counted = collectives(compiled)
    folded = "is_causal" in options and rows != P()  # 4 arrays of rows in the forward, 7 in the backward
    assert counted.pop("collective-permute", 0) <= 11 * folded, counted
    gathers = sum(specs.get(name, P()) != P() and sizes[1] > 1 for name in ("key", "value"))
    reductions = int(rows != P())
    assert sum(counted.values()) <= gathers + reductions + beyond, counted


@pytest.mark.parametrize("by_arrays", [False, True], ids=["ambient mesh", "mesh of arrays"])
def test_devices_share_causal_work_evenly(by_arrays, small_tiles):
    """Each has an eighth of the tiles that a causal mask leaves: of 16 x 8 tiles 72."""
    mesh = jax.make_mesh((8,), ("t",), axis_types=(AUTO,))
    x = jax.ShapeDtypeStruct(
        (2, T, N, H), jnp.float32, sharding=NamedSharding(mesh, P(None, "t")) if by_arrays else None
    )
    attend = lambda x: dot_product_attention(x, x, x, is_causal=True)
    with contextlib.nullcontext() if by_arrays else jax.set_mesh(mesh):
        steps = str(jax.jit(jax.grad(lambda x: attend(x).sum())).trace(x).jaxpr)
    assert re.findall(r"length=(\d+)", steps) == ["9", "9"]
    rows = [visibility.Tokens(8, origin=Pieces(8, folded=True).origins(device, 8)) for device in range(8)]
    some = [
        visibility.of_tiles(Mask(is_causal=True), tokens, visibility.Tokens(T), 4, 8)[0] for tokens in rows
    ]
    assert [x.sum() for x in some] == [9] * 8


@thorough
@pytest.mark.parametrize("layout", ["all", "all-BxTxN"])
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_functions_of_rows_and_columns(layout, kind, small_tiles):
    """They count in the whole, along batch, heads and tokens; what they read besides gets one gradient."""
    arrays, _, names, (ct, _) = inputs("full")
    mask = mods.document & (mods.sliding_window(13) | mods.global_tokens(3))
    ids = jnp.asarray([np.repeat([0, 1, 2], lengths) for lengths in ((30, 3, 31), (9, 50, 5))])
    slopes = jnp.asarray([0.5, 0.3, 0.1, -0.2])

    def loss(inputs, slopes):
        out = dot_product_attention(**inputs, mask_mod=mask, score_mod=mods.alibi, mod_args=(ids, slopes))
        return (jnp.sin(out) * ct).sum()

    step = jax.jit(jax.value_and_grad(loss, (0, 1)), compiler_options=QUICK)
    given = {name: arrays[name] for name in names}
    expected = step(given, slopes)
    mesh = jax.make_mesh(LAYOUTS[layout][0], ("b", "t", "n"), axis_types=(kind,) * 3)
    with around(mesh, kind):
        placed = {name: jax.device_put(x, NamedSharding(mesh, ALL[name])) for name, x in given.items()}
        compiled = step.lower(placed, slopes).compile()
        value, (grads, dslopes) = compiled(placed, slopes)
    assert_close(value, expected[0], 1e-12)
    assert_close(dslopes, expected[1][1], 1e-12)
    for name in names:
        assert_close(grads[name], expected[1][0][name], 1e-12, name)
    assert loops_and_collectives_in_them(compiled)[1] == 0


@pytest.mark.parametrize(
    ("options", "args"),
    [({"score_mod": mods.alibi}, (np.array([0.3, -1.0]),)), ({"is_causal": True}, ())],
    ids=["a score alone", "causal, parts of three blocks"],
)
def test_rows_of_two_devices(options, args, small_tiles):
    """A part counts its rows in the whole, for a score alone, too; one of odd blocks is not folded."""
    q, k = draw(1, 24, 2, 3)(rng := np.random.default_rng(0)), draw(1, 32, 1, 3)(rng)

    def loss(q, k, args):
        return jnp.sin(dot_product_attention(q, k, k, mod_args=args, **options)).sum()

    step = jax.jit(jax.grad(loss, (0, 1, 2)), compiler_options=QUICK)
    expected = step(q, k, args)
    mesh = jax.make_mesh((2,), ("t",), axis_types=(AUTO,), devices=jax.devices()[:2])
    placed = (jax.device_put(x, NamedSharding(mesh, P(None, "t"))) for x in (q, k))
    for x, y in zip(jax.tree.leaves(step(*placed, args)), jax.tree.leaves(expected), strict=True):
        assert_close(x, y, 1e-12)


@thorough
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_second_order_and_vmap(kind, small_tiles):
    """The gradient of a loss of a gradient, under vmap of the query alone."""
    arrays, options, names, (ct, _) = inputs("causal")
    names = ("query", "key", "value")

    def loss(inputs, queries):
        def first(x):
            attend = lambda q: jnp.sin(dot_product_attention(q * x[0], *x[1:], is_causal=True)) * ct
            return jax.vmap(attend)(queries).sum()

        return sum((g * g).sum() for g in jax.grad(first)(inputs))

    given = tuple(arrays[name] for name in names)
    queries = jnp.stack([given[0], 0.5 * given[0]])
    find = jax.jit(jax.grad(loss), compiler_options=QUICK)
    expected = find(given, queries)
    mesh = jax.make_mesh((8,), ("t",), axis_types=(kind,))
    with around(mesh, kind):
        rows = NamedSharding(mesh, P(None, "t"))
        placed = tuple(jax.device_put(x, rows) for x in given)
        got = find(placed, jax.device_put(queries, NamedSharding(mesh, P(None, None, "t"))))
    for name, x, y in zip(names, got, expected, strict=True):
        assert_close(x, y, 1e-11, name)


def test_a_batch_that_fills_the_mesh_leaves_the_program_as_it_is(small_tiles):
    """Then no one shards the sequence, and parts walking in step would cost a causal mask its worth."""
    x = jax.ShapeDtypeStruct((8, T, N, H), jnp.float32)

    def lowered(mesh):
        with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
            run = jax.jit(lambda x: dot_product_attention(x, x, x, is_causal=True))
            return run.lower(x).as_text()

    on_mesh = lowered(jax.make_mesh((8,), ("b",), axis_types=(AUTO,)))
    assert on_mesh.count("stablehlo.while") == 1
    assert "stablehlo.gather" not in on_mesh
    assert "sharding_constraint" not in on_mesh


QUERIES = dict.fromkeys(("sampling_locations", "attention_weights"), P("b", "t", "n"))


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(layout, kind, marks=[thorough] * (layout != "queries"))
        for layout in ("queries", "queries-BxQxM", "pixels")
        for kind in (AUTO, EXPLICIT)
    ],
)
def test_queries_of_deformable_attention(layout, kind):
    """One reduction, of the gradient of the value; a value that lies on several devices is gathered once."""
    rng, levels = np.random.default_rng(0), ((6, 5), (3, 6))
    arrays = {
        "value": draw(2, 48, 4, 3)(rng),
        "sampling_locations": jnp.asarray(rng.random((2, 16, 4, 2, 2, 2)) * 1.2 - 0.1),
        "attention_weights": draw(2, 16, 4, 2, 2)(rng),
    }
    ct = draw(2, 16, 4 * 3)(rng)

    def step(arrays, ct):
        def call(arrays):
            return multi_scale_deformable_attention(spatial_shapes=levels, normalize="softmax", **arrays)

        out, pullback = jax.vjp(call, arrays)
        return out, pullback(ct)[0]

    step = jax.jit(step, compiler_options=QUICK)
    expected = step(arrays, ct)
    sizes = (2, 2, 2) if layout == "queries-BxQxM" else (1, 8, 1)
    specs = QUERIES | {"value": P("b", "t" if layout == "pixels" else None, "n")}
    mesh = jax.make_mesh(sizes, ("b", "t", "n"), axis_types=(kind,) * 3)
    with around(mesh, kind):
        placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}
        rows = NamedSharding(mesh, P("b", "t", "n"))
        placed_ct = jax.device_put(ct, rows)
        compiled = step.lower(placed, placed_ct).compile()
        out, grads = compiled(placed, placed_ct)
    assert_close(out, expected[0], 1e-12, "out")
    assert out.sharding.is_equivalent_to(rows, 3)
    for name in arrays:
        assert_close(grads[name], expected[1][name], 1e-12, name)
        if kind == EXPLICIT or name != "value":
            assert grads[name].sharding.is_equivalent_to(placed[name].sharding, grads[name].ndim), name
    loops, inside = loops_and_collectives_in_them(compiled)
    assert loops >= 2
    assert inside == 0
    counted = collectives(compiled)
    assert sum(counted.values()) <= 1 + (layout == "pixels"), counted


HEADS = {
    "query_kernel": P(None, "n"), "key_kernel": P(None, "n"), "value_kernel": P(None, "n"),
    "query_bias": P("n"), "out_kernel": P("n"),
}  # fmt: skip
LAYERS = {  # name: (sizes of the mesh axes, specs of the parameters, options)
    "tokens": ((1, 8, 1), {}, {"is_causal": True}),
    "batch-tokens-heads": ((2, 2, 2), HEADS, {"is_causal": True, "save": "qkv", "dropout_rate": 0.3}),
    "weights": ((1, 8, 1), {}, {"return_weights": True, "average_weights": True, "add_zero_attn": True}),
}


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(layout, kind, marks=[thorough] * ((layout, kind) != ("batch-tokens-heads", EXPLICIT)))
        for layout in LAYERS
        for kind in (AUTO, EXPLICIT)
    ],
)
def test_tokens_of_the_multi_head_layer(layout, kind, small_tiles):
    """Keys and values are gathered before the loops, in the forward and in the backward; x never is."""
    rng, (sizes, placement, options) = np.random.default_rng(0), LAYERS[layout]
    if "dropout_rate" in options:
        options = options | {"dropout_key": jax.random.key(0), "out_dropout_rate": 0.2}
    shapes = {
        "query_kernel": (16, N, H), "key_kernel": (16, N // 2, H), "value_kernel": (16, N // 2, H),
        "query_bias": (N, H), "out_kernel": (N, H, 16), "out_bias": (16,),
    }  # fmt: skip
    arrays = {name: draw(*shape)(rng) for name, shape in shapes.items()} | {"x": draw(2, T, 16)(rng)}
    names = MultiHeadAttentionParams._fields

    def step(arrays, ct):
        def call(arrays):
            params = MultiHeadAttentionParams(**{name: arrays.get(name) for name in names})
            found = multi_head_attention(params, arrays["x"], **options)
            return found if isinstance(found, tuple) else (found,)

        found, pullback = jax.vjp(call, arrays)
        return found, pullback((ct, *(jnp.cos(x) for x in found[1:])))[0]

    ct, step = draw(2, T, 16)(rng), jax.jit(step, compiler_options=QUICK)
    expected = step(arrays, ct)
    mesh = jax.make_mesh(sizes, ("b", "t", "n"), axis_types=(kind,) * 3)
    with around(mesh, kind):
        rows, specs = NamedSharding(mesh, P("b", "t")), {"x": P("b", "t")} | placement
        placed = {
            name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P()))) for name, x in arrays.items()
        }
        placed_ct = jax.device_put(ct, rows)
        compiled = step.lower(placed, placed_ct).compile()
        found, grads = compiled(placed, placed_ct)
    for x, y in zip(found, expected[0], strict=True):
        assert_close(x, y, 1e-12)
    for name in arrays:
        assert_close(grads[name], expected[1][name], 1e-12, name)
    for x in (found[0], grads["x"]):
        assert x.sharding.is_equivalent_to(rows, 3)
    _, inside = loops_and_collectives_in_them(compiled)
    assert inside == 0
