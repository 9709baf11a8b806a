"""The Mosaic GPU kernels of the backward, in the interpreter, beyond the contract."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, interpreted, thorough
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ops.deformable.calls import evaluate, operator, sample

from jax_attn_bwd import check, explain
from jax_attn_bwd._core import mosaic_gpu, pallas
from jax_attn_bwd.ops.deformable.kernels import gpu_backward

NAME = "mosaic_gpu"
LEVELS = ((3, 2), (1, 2))


def rounded(arrays, dtype=np.float32):
    return {name: x.astype(dtype if name == "value" else np.float32) for name, x in arrays.items()}


def both(arrays, rtol=2e-6, **options):
    """The gradients by the kernels, and the definition's in float64, compared."""
    dout = np.random.default_rng(5).standard_normal(
        (*arrays["sampling_locations"].shape[:2], arrays["value"].shape[2] * arrays["value"].shape[3])
    )
    dout = np.asarray(dout.astype(arrays["value"].dtype))
    exact = {name: x.astype(np.float64) for name, x in arrays.items()}
    with pallas.interpreting(NAME):
        got = jax.block_until_ready(evaluate(operator.call, arrays, options | {"implementation": NAME}, dout))
    assert_trees_close(got, evaluate(operator.reference, exact, options, dout.astype(np.float64)), rtol)
    return got


@thorough
@interpreted
@pytest.mark.kernel
def test_a_crowded_cell_is_summed_in_parts(monkeypatch):
    """Cut every 4 samples: cells of one part, of several, and of none."""
    monkeypatch.setattr(gpu_backward, "_LENGTH", 4)
    arrays = sample(LEVELS, Q=9, M=1, P=2)
    arrays["sampling_locations"] = arrays["sampling_locations"].at[:, :6].set(0.6)
    both(rounded(arrays), spatial_shapes=LEVELS)


def test_sorted_samples_of_each_cell():
    """In their order; those in no cell come last, and an empty cell has none."""
    rng, cells = np.random.default_rng(0), 7
    for cell in (rng.integers(0, 9, 40), np.full(40, 3), np.full(40, 8)):
        given = jnp.asarray(np.minimum(cell, cells), jnp.int32)
        found, order, low, high = map(np.asarray, gpu_backward._sorted(given, cells))
        assert (found[low[low < high]] == np.flatnonzero(low < high)).all()
        for c in range(cells):
            assert order[low[c] : high[c]].tolist() == np.flatnonzero(cell == c).tolist()


@thorough
@interpreted
@pytest.mark.kernel
@pytest.mark.parametrize(
    ("channels", "dtype"), [*((D, "float32") for D in (1, 33, 256)), (130, "bfloat16"), (32, "float16")]
)
def test_channels(channels, dtype):
    arrays = rounded(sample(LEVELS, Q=2, M=1, D=channels, P=1), dtype)
    both(arrays, max(2e-6, 2 * float(jnp.finfo(dtype).eps)), spatial_shapes=LEVELS)


@thorough
@interpreted
@pytest.mark.kernel
@pytest.mark.parametrize("options", [{}, {"padding_mode": "border"}, {"method": "discrete"}], ids=str)
def test_options_on_thin_levels_with_ragged_points(options):
    levels, points = ((1, 4), (3, 1), (1, 1), (2, 2)), (5, 1, 0, 8)
    method = options.get("method", "bilinear")
    arrays = rounded(sample(levels, Q=2, P=points, method=method))
    both(arrays, spatial_shapes=levels, num_points=points, **options)


@thorough
@interpreted
@pytest.mark.kernel
@pytest.mark.parametrize("name", ["ragged", "far_locations"])
def test_other_named_cases(name):
    (case,) = (case for case in operator.cases if case.name == name)
    with pallas.interpreting(NAME):
        for row in check.measure(operator, NAME, case, "float32"):
            assert row.ok, row


@thorough
@interpreted
@pytest.mark.kernel
@pytest.mark.parametrize(("batched", "x64"), [(("sampling_locations",), True), (None, False)], ids=str)
def test_vmap_scan_and_remat(batched, x64):
    arrays = rounded(sample(LEVELS, Q=2, M=2, D=3, P=1))
    rng = np.random.default_rng(3)
    noise = {name: 0.01 * rng.standard_normal((2, *x.shape)) for name, x in arrays.items()}
    stacked = {
        name: x + noise[name].astype(x.dtype) if batched is None or name in batched else x
        for name, x in ((name, x[None].repeat(2, 0)) for name, x in arrays.items())
    }
    arrays = {name: x if batched is None or name in batched else arrays[name] for name, x in stacked.items()}
    axes = ({name: 0 if batched is None or name in batched else None for name in arrays},)

    def gradients(inputs):
        def loss(inputs):
            (out,) = operator.call(**inputs, spatial_shapes=LEVELS, implementation=NAME)
            return jnp.vdot(out, jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

        def scanned(inputs):
            step = lambda total, _: (total + jax.checkpoint(loss)(inputs) / 2, None)
            return jax.lax.scan(step, jnp.float32(0), None, 2)[0]

        return jax.grad(loss)(inputs), jax.grad(scanned)(inputs)

    with jax.enable_x64(x64), pallas.interpreting(NAME):
        plain, scanned = jax.block_until_ready(jax.jit(jax.vmap(gradients, axes))(arrays))
        assert_trees_close(scanned, plain, 1e-6)
        for b in range(2):
            one = jax.tree.map(lambda x, axis, b=b: x if axis is None else x[b], arrays, axes[0] | {})
            expected, _ = jax.block_until_ready(jax.jit(gradients)(one))
            assert_trees_close(jax.tree.map(lambda x, b=b: x[b], plain), expected, 1e-6)


def on(kind, sizes=(1,), names=("x",)):
    """Programs are for such devices, which are not there: they are traced, and not run."""
    about = AbstractDevice(device_kind=kind, num_cores=1, platform="gpu")
    types = (AxisType.Explicit,) * len(sizes)
    return jax.sharding.use_abstract_mesh(AbstractMesh(sizes, names, types, abstract_device=about))


def types(B=1, Q=2, M=1, K=1, D=3, dtype="float32", points="float32", levels=LEVELS):
    shapes = {
        "value": ((B, sum(h * w for h, w in levels), M, D), dtype),
        "sampling_locations": ((B, Q, M, len(levels), K, 2), points),
        "attention_weights": ((B, Q, M, len(levels), K), points),
    }
    return {name: jax.ShapeDtypeStruct(*x) for name, x in shapes.items()} | {"spatial_shapes": levels}


def reason(call, kind="NVIDIA A100-SXM4-80GB"):
    with on(kind):
        return explain(operator.call, **call).refused.get(NAME, "ok")


@interpreted
def test_each_refusal_says_what_is_wrong():
    for kind in ("NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA B200"):
        assert reason(types(), kind) == "ok"
    refused = {
        "at most 256 channels, got 257": types(D=257),
        "value must be one of ('float32', 'bfloat16', 'float16'), got float64": types(dtype="float64"),
        "sampling_locations must be one of": types(points="float64"),
        "value must not be empty": types(D=0),
        "attention_weights must not be empty": types(Q=0),
        "fewer than 2**30 elements": types(B=64, Q=100_000, M=8, K=8),
    }
    for said, call in refused.items():
        if said.startswith("attention"):
            call = types(Q=1) | {"attention_weights": jax.ShapeDtypeStruct((1, 1, 1, 2, 0), "float32")}
            call["sampling_locations"] = jax.ShapeDtypeStruct((1, 1, 1, 2, 0, 2), "float32")
            said = "must not be empty"
        assert said in reason(call), said
    assert "compute capability 8.0 or more, not Tesla T4" in reason(types(), "Tesla T4")


def test_an_older_jax_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert mosaic_gpu.too_old() == f"it needs JAX 0.12 or later, not {jax.__version__}"
    assert reason(types()) == mosaic_gpu.too_old()


def kernels(program):
    return re.findall(r"\bname=deformable_(\w+)", str(program))


def gradients(shapes):
    """`(inputs, the other arrays) -> gradients` of a program for a GPU."""

    def run(inputs, rest):
        def loss(inputs):
            (out,) = operator.call(**inputs, **rest, spatial_shapes=shapes, implementation=NAME)
            return (out * out).sum()

        return jax.grad(loss)(inputs)

    return run


@interpreted
def test_only_the_kernels_of_what_is_differentiated_run():
    def program(*wrt):
        call = types()
        run = gradients(call.pop("spatial_shapes"))
        rest = {name: x for name, x in call.items() if name not in wrt}
        with on("NVIDIA A100-SXM4-80GB"):
            return jax.make_jaxpr(run)({name: call[name] for name in wrt}, rest)

    assert sorted(kernels(program("value"))) == ["value_gradient", "value_gradient_cuts"]
    assert kernels(program("sampling_locations")) == kernels(program("attention_weights")) == ["products"]
    assert len(kernels(program("value", "attention_weights"))) == 3


AXES = {
    "value": P("b", None, "m"),
    "sampling_locations": P("b", None, "m"),
    "attention_weights": P("b", None, "m"),
}


SPLIT = {"value": P(), "sampling_locations": P(None, "q"), "attention_weights": P(None, "q")}


@thorough
@interpreted
@pytest.mark.kernel
@pytest.mark.parametrize("split", ["batch", "heads", "queries"])
def test_shards_have_the_gradients_of_the_whole(split):
    """Batch or heads on an Explicit mesh; queries in `shard_map`, where the value is on all devices.

    Races are looked for where one device runs the same programs.
    """
    arrays = rounded(sample(LEVELS, B=2, Q=4, M=2, D=3, P=1))
    run = gradients(LEVELS)
    explicit = split != "queries"
    specs, names = (AXES, ("b", "m")) if explicit else (SPLIT, ("q",))
    sizes = {"batch": (2, 1), "heads": (1, 2), "queries": (2,)}[split]
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))
    with pallas.interpreting(NAME):
        expected = jax.block_until_ready(jax.jit(run)(arrays, {}))
        if explicit:
            with jax.set_mesh(mesh):
                placed = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in arrays.items()}
                got = jax.block_until_ready(jax.jit(run)(placed, {}))
        else:
            local = jax.shard_map(lambda x: run(x, {}), mesh=mesh, in_specs=(specs,), out_specs=specs)
            got = jax.block_until_ready(jax.jit(local)(arrays))
    for name, x in got.items():
        assert len(x.sharding.device_set) == mesh.size, name
    assert_trees_close(got, expected, 1e-6)


@interpreted
def test_on_an_explicit_mesh_each_device_has_its_shard():
    call = types(B=2, M=4)
    run = gradients(call.pop("spatial_shapes"))
    with on("NVIDIA B200", (2, 2), ("b", "m")):
        mesh = jax.sharding.get_abstract_mesh()
        call = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, AXES[name]))
            for name, x in call.items()
        }
        program, found = jax.make_jaxpr(run, return_shape=True)(call, {})
    assert len(kernels(program)) == 3
    S = call["value"].shape[1]
    assert re.search(rf"f32\[{S},2,3\]|f32\[1,{S},2,3\]", str(program)), "local shards"
    for name, x in found.items():
        assert x.shape == call[name].shape
        assert tuple(x.sharding.spec)[:3] == tuple(AXES[name]), name


@interpreted
def test_in_shard_map_a_replicated_value_gets_the_sum_of_the_shares():
    """Queries split over devices, replication checked."""
    call = types(Q=4)
    run = gradients(call.pop("spatial_shapes"))
    with on("NVIDIA H200", (2,), ("q",)):
        mesh = jax.sharding.get_abstract_mesh()
        call = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, SPLIT[name]))
            for name, x in call.items()
        }
        local = jax.shard_map(lambda call: run(call, {}), in_specs=(SPLIT,), out_specs=SPLIT, check_vma=True)
        program = str(jax.make_jaxpr(local)(call))
    assert len(kernels(program)) == 3
    assert len(re.findall("= psum", program)) == 1
