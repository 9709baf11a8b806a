"""Multi-scale deformable attention as a GPU takes many samples: level by level, heads in front.

Second order and vmap also of its ways for few samples, and for the same bits.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_trees_close, thorough
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ops.deformable.calls import assert_as_defined, operator, sample
from ops.deformable.small import LEVELS, B, D, M, Q, first_order, second_order
from ops.deformable.small import sample as small
from ops.deformable.test_cpu import shapes
from ops.deformable.test_memory import equations

from jax_attn_bwd import explain, multi_scale_deformable_attention, multi_scale_deformable_attention_bwd
from jax_attn_bwd.ops.deformable import plan
from jax_attn_bwd.ops.deformable.spec import Options

NAME = "level by level"
AT_ONCE = "all points at once"
CALLS = {
    "border, ragged": {"padding_mode": "border", "num_points": (5, 0, 4), "normalize": "softmax"},
    "discrete": {"method": "discrete"},
    "zeros": {},
    "border": {"padding_mode": "border"},
}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """Few samples are many."""
    monkeypatch.setattr("jax_attn_bwd._core.targets.platform", lambda: "gpu")
    monkeypatch.setattr(plan, "_LEVEL_ROWS", 0)


@pytest.fixture(params=[True, pytest.param(False, marks=thorough)], ids=["merged", "apart"])
def merged(request, monkeypatch):
    """Batch and heads in one axis, or in two as where they may be sharded."""
    monkeypatch.setattr(plan, "_is_whole", lambda *_: request.param)


FORMS = ("merged", "apart", AT_ONCE, "sorted runs")


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """Each way of a GPU; returns the options that ask for it."""
    monkeypatch.setattr(plan, "_is_whole", lambda *_: request.param == "merged")
    if request.param == AT_ONCE:
        monkeypatch.setattr(plan, "_LEVEL_ROWS", 1 << 30)
    return {"spatial_shapes": LEVELS, "deterministic_sums": request.param == "sorted runs"}


def scatters(function, *arrays):
    """The shapes to which a program adds."""
    found = equations(jax.make_jaxpr(function)(*arrays).jaxpr)
    return [e.outvars[0].aval.shape for e in found if e.primitive.name.startswith("scatter")]


# ---------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("sizes", "form"),
    [
        ((2, 800, 8, 32, 5440), AT_ONCE),
        ((2, 801, 8, 32, 5440), NAME),
        ((1, 5440, 8, 32, 5440), NAME),
        ((1, 300, 8, 32, 5440), AT_ONCE),
        ((2, 5440, 8, 0, 5440), NAME),
        ((0, 5440, 8, 32, 5440), AT_ONCE),
        ((2, 0, 8, 32, 5440), AT_ONCE),
    ],
)
def test_many_samples_are_added_level_by_level(monkeypatch, sizes, form):
    monkeypatch.undo()
    monkeypatch.setattr("jax_attn_bwd._core.targets.platform", lambda: "gpu")
    options = Options(((64, 64), (32, 32)), (2, 2))
    assert plan.fastest_loops(options, shapes(*sizes)) == plan.Loops(form, form, form, merged=form == NAME)
    same_bits = plan.fastest_loops(replace(options, deterministic_sums=True), shapes(*sizes))
    assert same_bits == plan.Loops(AT_ONCE, "sorted runs", AT_ONCE)


def test_explain_tells_it_of_few_and_of_many_queries(monkeypatch):
    monkeypatch.undo()
    levels = ((64, 64), (32, 32), (16, 16), (8, 8))

    def told(queries, sums=None):
        kinds = (2, 5440, 8, 32), (2, queries, 8, 4, 4, 2), (2, queries, 8, 4, 4)
        value, at, weights = (jax.ShapeDtypeStruct(kind, jnp.float32) for kind in kinds)
        found = explain(
            multi_scale_deformable_attention, value, levels, at, weights, deterministic_sums=sums,
            platform="A100",
        )  # fmt: skip
        return found.choices[-1]

    many, few, same_bits = told(5440), told(300), told(5440, True)
    assert many.way == f"{NAME}; value's gradient: {NAME}, sums in any order; points' gradients: {NAME}"
    assert many.rules == ("deformable_by_level",)
    assert few.way.startswith(AT_ONCE)
    assert few.rules == ("deformable_at_once",)
    assert same_bits.way == f"{AT_ONCE}; value's gradient: sorted runs; points' gradients: {AT_ONCE}"


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_rows_are_those_of_a_device(monkeypatch, axis):
    monkeypatch.setattr(plan, "_LEVEL_ROWS", 64)
    mesh, sizes = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,)), (4, 16, 4)
    spec = ["x" if i == axis else None for i in range(3)]
    of_value = [spec[0], None, spec[2]]

    def told():
        at = lambda shape, spec: jax.ShapeDtypeStruct(shape, float, sharding=NamedSharding(mesh, P(*spec)))
        value = at((4, 14, 4, 3), of_value)
        rest = at((*sizes, 2, 2, 2), spec), at((*sizes, 2, 2), spec)
        return explain(multi_scale_deformable_attention, value, LEVELS, *rest).choices[-1].way

    with jax.set_mesh(mesh):
        assert told().startswith(AT_ONCE)
        monkeypatch.setattr(plan, "_LEVEL_ROWS", 63)
        assert told().startswith(NAME)


def test_it_adds_to_a_head_and_level_at_a_time():
    """A scatter for each corner of a level, to the pixels of one head after the other."""
    arrays = small()
    dout = jnp.ones((B, Q, M * D))
    call = lambda dout: multi_scale_deformable_attention_bwd(dout, spatial_shapes=LEVELS, **arrays).value
    assert scatters(call, dout) == [(B * M, height * width, D) for height, width in LEVELS for _ in range(4)]


# ---------------------------------------------------------------------- values


@pytest.mark.usefixtures("merged")
@pytest.mark.parametrize("spread", [1.5, pytest.param(0.0, marks=thorough)])
@pytest.mark.parametrize(
    "options", [pytest.param(x, id=name, marks=() if "," in name else thorough) for name, x in CALLS.items()]
)
def test_output_and_gradients_are_those_of_the_definition(monkeypatch, options, spread):
    monkeypatch.setattr("jax_attn_bwd.ops.deformable.sampling.BLOCK", 3)
    levels = ((3, 5), (1, 1), (4, 2))
    method = options.get("method", "bilinear")
    arrays = sample(levels, B=2, Q=13, M=2, D=3, P=options.get("num_points", 3), method=method, spread=spread)
    assert_as_defined(arrays, spatial_shapes=levels, **options)


@pytest.mark.parametrize("sizes", [{"D": 0}, {"P": 0}, {"Q": 0}, {"B": 0}], ids=str)
def test_nothing_may_be_there(sizes):
    assert_as_defined(sample(**sizes), spatial_shapes=((6, 4), (3, 2)))


@thorough
def test_a_narrow_value_is_added_in_float32():
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in small().items()}
    arrays["value"] = arrays["value"].astype(jnp.bfloat16)
    dout = jnp.asarray(np.random.default_rng(3).standard_normal((B, Q, M * D)), jnp.bfloat16)
    run = first_order({"spatial_shapes": LEVELS})
    got, exact = run(arrays, dout), run({name: x.astype(float) for name, x in arrays.items()}, dout)
    assert {name: x.dtype for name, x in got.items()} == {n: x.dtype for n, x in arrays.items()} | {
        "out": jnp.bfloat16
    }
    for name, x in got.items():
        tolerance = float(jnp.finfo(x.dtype).eps) * (1 if x.dtype == jnp.bfloat16 else 4)
        assert_close(x.astype(float), exact[name], tolerance, name)


MOVING = ("value", "sampling_locations", "attention_weights")


@pytest.mark.usefixtures("merged")
@pytest.mark.parametrize(
    "moving", [MOVING, *(pytest.param((name,), marks=thorough) for name in MOVING)], ids="-".join
)
def test_tangents_are_those_of_the_definition(moving):
    arrays, rng = {name: jnp.asarray(x) for name, x in small().items()}, np.random.default_rng(5)
    arrays["attention_weights"] = arrays["attention_weights"].at[:, :2, :, 0, 0].set(-jnp.inf)
    along = {name: rng.standard_normal(arrays[name].shape) for name in moving}

    def tangents(call, **options):
        run = lambda x: call(**arrays | x, spatial_shapes=LEVELS, normalize="softmax", **options)
        return jax.jit(lambda t: jax.jvp(run, ({n: arrays[n] for n in moving},), (t,))[1][0])

    hidden = {"attention_weights": arrays["attention_weights"] == -np.inf}
    read = {name: np.where(hidden.get(name, False), 0, x) for name, x in along.items()}
    assert_close(tangents(operator.call, forward_mode=True)(along), tangents(operator.reference)(read), 1e-12)


@thorough
@pytest.mark.parametrize("options", [{"normalize": "softmax"}, {"padding_mode": "border"}], ids=str)
def test_second_order_is_that_of_other_platforms(monkeypatch, form, options):
    arrays = {name: jnp.asarray(x) for name, x in small().items()}
    dout = jnp.asarray(np.random.default_rng(3).standard_normal((B, Q, M * D)))
    options = form | options
    got = second_order(options)(arrays, dout)
    monkeypatch.setattr("jax_attn_bwd._core.targets.platform", lambda: "cpu")
    assert_trees_close(got, second_order(options)(arrays, dout), 1e-12)


@thorough
@pytest.mark.parametrize("form", ["merged", "sorted runs"], indirect=True)
@pytest.mark.parametrize("batched", ["value", "sampling_locations", "dout"])
def test_vmap_over_one_array(batched, form):
    arrays = {name: jnp.asarray(x) for name, x in small().items()}
    arrays["dout"] = jnp.asarray(np.random.default_rng(3).standard_normal((B, Q, M * D)))
    run = lambda arrays: first_order(form)(arrays, arrays.pop("dout"))
    stacked = arrays | {batched: jnp.stack([arrays[batched], 0.9 * arrays[batched]])}
    axes = {name: 0 if name == batched else None for name in arrays}
    got = jax.vmap(lambda arrays: run(dict(arrays)), (axes,))(stacked)
    for i in range(2):
        expected = run({name: x[i] if name == batched else x for name, x in stacked.items()})
        assert_trees_close(jax.tree.map(lambda x, i=i: x[i], got), expected, 1e-13)


@thorough
def test_under_remat():
    arrays = {name: jnp.asarray(x) for name, x in small().items()}

    def gradients(wrap):
        call = wrap(lambda x: multi_scale_deformable_attention(spatial_shapes=LEVELS, **x))
        return jax.jit(jax.grad(lambda x: jnp.sin(call(x)).sum()))(arrays)

    assert_trees_close(gradients(jax.checkpoint), gradients(lambda call: call), 1e-13)


# ---------------------------------------------------------------------- over devices


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (AxisType.Explicit, P("b", "q")),
        *(
            pytest.param(kind, spec, marks=thorough)
            for kind, spec in (
                (AxisType.Explicit, P("b", None, "q")),
                (AxisType.Explicit, P(None, "q")),
                (AxisType.Auto, P("b", "q")),
                (AxisType.Auto, P("b", None, "q")),
            )
        ),
    ],
    ids=str,
)
def test_over_devices(kind, spec):
    """Batch entries, queries and heads are cut; results are those of one device, and lie as was given."""
    rng, heads = np.random.default_rng(0), 4
    arrays = {
        "value": rng.standard_normal((2, 14, heads, D)),
        "sampling_locations": rng.random((2, 8, heads, 2, 2, 2)),
        "attention_weights": rng.standard_normal((2, 8, heads, 2, 2)),
    }
    dout = rng.standard_normal((2, 8, heads * D))

    @jax.jit
    def step(arrays, dout):
        call = lambda x: multi_scale_deformable_attention(spatial_shapes=LEVELS, normalize="softmax", **x)
        out, pullback = jax.vjp(call, arrays)
        return {"out": out} | pullback(dout)[0]

    expected = step(arrays, jnp.asarray(dout))
    mesh = jax.make_mesh((2, 2), ("b", "q"), axis_types=(kind,) * 2)
    of_value = P(spec[0], None, *spec[2:])
    with jax.set_mesh(mesh):
        place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        placed = {name: place(x, of_value if name == "value" else spec) for name, x in arrays.items()}
        assert scatters(step, placed, place(dout, spec))
        got = step(placed, place(dout, spec))
    assert_trees_close(got, expected, 1e-13)
    if kind == AxisType.Explicit:
        for name, x in placed.items():
            assert got[name].sharding.is_equivalent_to(x.sharding, x.ndim), name


@thorough
def test_in_shard_map_with_queries_on_several_devices():
    arrays = tuple(map(jnp.asarray, small().values()))
    dout = jnp.asarray(np.random.default_rng(3).standard_normal((B, Q, M * D)))

    def step(value, at, weights, dout):
        call = lambda *x: multi_scale_deformable_attention(x[0], LEVELS, *x[1:])
        out, pullback = jax.vjp(call, value, at, weights)
        return out, *pullback(dout)

    mesh = jax.make_mesh((2, 2), ("b", "q"), axis_types=(AxisType.Auto,) * 2)
    specs = (P("b"), P("b", "q"), P("b", "q"))
    split = jax.shard_map(step, mesh=mesh, in_specs=(*specs, P("b", "q")), out_specs=(P("b", "q"), *specs))
    for got, expected in zip(jax.jit(split)(*arrays, dout), jax.jit(step)(*arrays, dout), strict=True):
        assert_close(got, expected, 1e-13)
