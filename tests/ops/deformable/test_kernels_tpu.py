"""The TPU kernels of deformable attention, interpreted: races, two cores, memory that starts as NaN."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, thorough
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ops.deformable.calls import evaluate, operator, sample

from jax_attn_bwd import check, explain
from jax_attn_bwd._core import pallas
from jax_attn_bwd.ops.deformable.kernels import tpu_hat as hat

NAME = "mosaic_tpu"
LEVELS = ((3, 2), (1, 2))
STRIPS = ((9, 20),)  # in two strips


def rounded(arrays, dtype=np.float32):
    return {name: x.astype(dtype if name == "value" else np.float32) for name, x in arrays.items()}


def both(arrays, rtol=2e-6, **options):
    """Output and gradients by the kernels, and the definition's in float64, compared."""
    B, Q = arrays["sampling_locations"].shape[:2]
    dout = np.random.default_rng(5).standard_normal((B, Q, np.prod(arrays["value"].shape[2:])))
    dout = np.asarray(dout.astype(arrays["value"].dtype))
    exact = {name: x.astype(np.float64) for name, x in arrays.items()}
    with pallas.interpreting(NAME):
        got = jax.block_until_ready(evaluate(operator.call, arrays, options | {"implementation": NAME}, dout))
    assert_trees_close(got, evaluate(operator.reference, exact, options, dout.astype(np.float64)), rtol)
    return got


@thorough
@pytest.mark.kernel
def test_several_tiles_of_queries_and_strips_of_pixels():
    both(rounded(sample(STRIPS, Q=130, M=1, D=3, P=1)), 4e-6, spatial_shapes=STRIPS)


@thorough
@pytest.mark.kernel
@pytest.mark.parametrize(
    ("channels", "dtype"), [(1, "float32"), (100, "float32"), (33, "bfloat16"), (17, "float16")]
)
def test_channels_on_thin_levels(channels, dtype):
    levels = ((1, 7), (5, 1))
    arrays = rounded(sample(levels, Q=2, M=1, D=channels, P=1), dtype)
    both(arrays, max(2e-6, 2 * float(jnp.finfo(dtype).eps)), spatial_shapes=levels)


@thorough
@pytest.mark.kernel
def test_samples_of_the_nearest_pixel():
    both(rounded(sample(LEVELS, Q=2, M=1, D=3, P=1)), spatial_shapes=LEVELS, method="discrete")


@thorough
@pytest.mark.kernel
@pytest.mark.parametrize("name", ["ragged", "far_locations"])
def test_other_named_cases(name):
    (case,) = (case for case in operator.cases if case.name == name)
    with pallas.interpreting(NAME):
        for row in check.measure(operator, NAME, case, "float32"):
            assert row.ok, row


@thorough
@pytest.mark.kernel
def test_what_is_not_finite_stays_with_those_that_touch_it():
    """A NaN and an infinite pixel of one channel, a cotangent and a weight: the rest keeps its bits.

    Where it is a cotangent or a weight, all channels of a pixel have it.
    """
    arrays = rounded(sample(STRIPS, Q=9, M=2, D=3, P=1))
    dout = np.random.default_rng(5).standard_normal((1, 9, 6)).astype(np.float32)

    def run(arrays, dout, name):
        with pallas.interpreting(NAME):
            options = {"spatial_shapes": STRIPS, "implementation": name}
            return jax.block_until_ready(evaluate(operator.call, arrays, options, dout))

    plain = run(arrays, dout, NAME)
    value, bad_dout = np.array(arrays["value"]), dout.copy()
    for m, bad in enumerate((np.nan, -np.inf)):
        touched = np.flatnonzero(plain["value"][0, :, m, 0] != 0)
        value[0, touched[4], m, m] = bad
    weights = np.array(arrays["attention_weights"])
    counts = [np.flatnonzero(plain["attention_weights"][0, :, m, 0, 0] != 0) for m in range(2)]
    weights[0, counts[1][0], 1, 0, 0], bad_dout[0, counts[0][-1], :3] = np.inf, np.nan
    for changed, bad in (({"value": value}, dout), ({"attention_weights": weights}, bad_dout)):
        got = run(arrays | changed, bad, NAME)
        expected = run(arrays | changed, bad, "xla")
        assert not all(np.isfinite(x).all() for x in got.values())
        for key, x in got.items():
            lost = ~np.isfinite(x)
            assert (lost == ~np.isfinite(expected[key])).all(), key
            assert (x[~lost] == np.asarray(plain[key])[~lost]).all() or "weights" in changed, key


def test_parts_add_up_exactly():
    rng = np.random.default_rng(0)
    for dtype in ("bfloat16", "float16", "float32"):
        scales = 2.0 ** rng.integers(-7, 8, 1000)
        x = jnp.asarray(rng.standard_normal(1000) * scales, dtype).astype(np.float32)
        found = hat.split(x, hat.parts_of(dtype))
        assert all(part.dtype == jnp.bfloat16 for part in found)
        assert (sum(part.astype(np.float64) for part in map(np.asarray, found)) == np.asarray(x)).all()


def test_strips_that_are_touched():
    """Those with a row that a sample reads, and none where no sample counts."""
    rng = np.random.default_rng(0)
    for height, width in ((1, 1), (25, 42), (100, 167), (37, 400)):
        cut = hat.cut_of(height, width)
        assert cut.pixels % 128 == 0
        assert cut.strips * cut.rows >= height > (cut.strips - 1) * cut.rows
        for _ in range(20):
            low, high = np.sort(rng.integers(-1, height, 2))
            row = rng.integers(low, high + 1, (2, 128)).astype(np.float32)
            row[0, :5] = hat._NOWHERE
            first, end = map(int, hat.touched(cut, jnp.asarray(row)))
            read = np.concatenate([row[row >= -1], row[row >= -1] + 1])
            read = read[(read >= 0) & (read < cut.strips * cut.rows)] // cut.rows
            assert (first, end) == (read.min(), read.max() + 1)
    first, end = hat.touched(cut, jnp.full((2, 128), hat._NOWHERE))
    assert int(end) <= int(first)


@thorough
@pytest.mark.kernel
@pytest.mark.parametrize(("batched", "x64"), [("value", True), ("sampling_locations", False)])
def test_vmap_and_scan(batched, x64):
    arrays = rounded(sample(LEVELS, Q=2, M=1, D=3, P=1))
    noise = 0.01 * np.random.default_rng(3).standard_normal((2, *arrays[batched].shape))
    arrays[batched] = arrays[batched][None] + noise.astype(np.float32)
    axes = {name: 0 if name == batched else None for name in arrays}

    def gradients(inputs):
        def loss(inputs):
            (out,) = operator.call(**inputs, spatial_shapes=LEVELS, implementation=NAME)
            return jnp.vdot(out, jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

        def scanned(inputs):
            step = lambda total, _: (total + loss(inputs) / 2, None)
            return jax.lax.scan(step, jnp.float32(0), None, 2)[0]

        return jax.grad(scanned)(inputs)

    with jax.enable_x64(x64), pallas.interpreting(NAME):
        got = jax.block_until_ready(jax.jit(jax.vmap(gradients, (axes,)))(arrays))
    for b in range(2):
        one = arrays | {batched: arrays[batched][b]}
        exact = {name: x.astype(np.float64) for name, x in one.items()}

        def loss(inputs):
            (out,) = operator.reference(**inputs, spatial_shapes=LEVELS)
            return jnp.vdot(out, jnp.cos(jnp.arange(out.size)).reshape(out.shape))

        assert_trees_close(jax.tree.map(lambda x, b=b: x[b], got), jax.grad(loss)(exact), 1e-6)


def on(kind, sizes=(1,), names=("x",)):
    """Programs are for such devices, which are not there: they are traced, and not run."""
    about = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    types = (AxisType.Explicit,) * len(sizes)
    return jax.sharding.use_abstract_mesh(AbstractMesh(sizes, names, types, abstract_device=about))


def types(B=1, Q=2, M=1, K=1, D=3, dtype="float32", points="float32", levels=LEVELS):
    shapes = {
        "value": ((B, sum(h * w for h, w in levels), M, D), dtype),
        "sampling_locations": ((B, Q, M, len(levels), K, 2), points),
        "attention_weights": ((B, Q, M, len(levels), K), points),
    }
    return {name: jax.ShapeDtypeStruct(*x) for name, x in shapes.items()} | {"spatial_shapes": levels}


def test_each_refusal_says_what_is_wrong():
    def reason(call, kind="TPU v6 lite"):
        with on(kind):
            return explain(operator.call, **call).refused.get(NAME, "ok")

    detector = ((100, 167), (50, 84), (25, 42), (13, 21))
    assert reason(types(levels=detector, D=32, K=4)) == "ok"
    assert reason(types(levels=((64, 64),), D=256, dtype="bfloat16")) == "ok"
    refused = {
        "at most 256 channels, got 257": types(D=257),
        "at most 32 points on a level, got 33": types(K=33),
        "value must be one of ('bfloat16', 'float16', 'float32'), got float64": types(dtype="float64"),
        "sampling_locations must be one of": types(points="float64"),
        "must not be empty": types(Q=0),
        "to about 20480 pixels of 32 channels, 267 of them in a row, got 200 x 267": types(
            levels=((2, 2), (200, 267)), D=32
        ),
        "to about 8192 pixels of 256 channels": types(levels=((100, 100),), D=256),
    }
    for said, call in refused.items():
        assert said in reason(call), said
    assert "not TPU v4" in reason(types(), "TPU v4")


def gradients(inputs, rest):
    def loss(inputs):
        (out,) = operator.call(**inputs, **rest, spatial_shapes=LEVELS, implementation=NAME)
        return (out * out).sum()

    return jax.grad(loss)(inputs)


def kernels(program):
    return re.findall(r"\bname=deformable_(\w+)", str(program))


def test_kernels_compute_what_is_differentiated():
    """For each level: the gradient of the value, the four products of a sample, or both."""

    def results(*wrt):
        call = types()
        del call["spatial_shapes"]
        rest = {name: x for name, x in call.items() if name not in wrt}
        with on("TPU v5 lite"):
            program = str(jax.make_jaxpr(gradients)({name: call[name] for name in wrt}, rest))
        assert kernels(program) == ["forward"] * 2 + ["backward"] * 2
        results = " ".join(re.findall(r"^ *(\S.*) = pallas_call", program, re.M))
        return results.count("[1,1,1,128,16]"), results.count("[1,1,4,128]")

    assert results("value") == (2, 0)
    assert results("sampling_locations") == results("attention_weights") == (0, 2)
    assert results("value", "attention_weights") == (2, 2)


AXES = dict.fromkeys(("value", "sampling_locations", "attention_weights"), P("b", None, "m"))
SPLIT = {"value": P(), "sampling_locations": P(None, "q"), "attention_weights": P(None, "q")}
PIXELS = {**SPLIT, "value": P(None, "q")}


@thorough
@pytest.mark.kernel
@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="interpreted kernels of two devices and their exchange do not end"
)
@pytest.mark.parametrize("split", ["heads", "queries and pixels", "queries in shard_map"])
def test_shards_have_the_gradients_of_the_whole(split):
    arrays = rounded(sample(LEVELS, B=2, Q=4, M=2, D=3, P=1))
    explicit = "shard_map" not in split
    specs = {"heads": AXES, "queries and pixels": PIXELS}.get(split, SPLIT)
    sizes, names = ((1, 2), ("b", "m")) if specs is AXES else ((2,), ("q",))
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))
    with pallas.interpreting(NAME):
        expected = jax.block_until_ready(jax.jit(gradients)(arrays, {}))
        if explicit:
            with jax.set_mesh(mesh):
                placed = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in arrays.items()}
                got = jax.block_until_ready(jax.jit(gradients)(placed, {}))
        else:
            local = jax.shard_map(lambda x: gradients(x, {}), mesh=mesh, in_specs=(specs,), out_specs=specs)
            got = jax.block_until_ready(jax.jit(local)(arrays))
    for name, x in got.items():
        assert len(x.sharding.device_set) == mesh.size, name
    assert_trees_close(got, expected, 1e-6)


def test_in_shard_map_a_replicated_value_gets_the_sum_of_the_shares():
    """Queries split over devices, replication checked."""
    call = types(Q=4)
    del call["spatial_shapes"]
    with on("TPU v6 lite", (2,), ("q",)):
        mesh = jax.sharding.get_abstract_mesh()
        call = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, SPLIT[name]))
            for name, x in call.items()
        }
        run = lambda call: gradients(call, {})
        local = jax.shard_map(run, in_specs=(SPLIT,), out_specs=SPLIT, check_vma=True)
        program = str(jax.make_jaxpr(local)(call))
    assert len(kernels(program)) == 4
    assert len(re.findall("= psum", program)) == 1
