"""The Mosaic GPU kernels of the softmax, in the interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPERATORS, assert_close, interpreted, thorough

from jax_attn_bwd import check, scaled_masked_softmax
from jax_attn_bwd._core import pallas
from jax_attn_bwd.ops.softmax.kernels import hopper as kernel
from jax_attn_bwd.ops.softmax.reference import scaled_masked_softmax as reference
from jax_attn_bwd.ops.softmax.spec import Operands, Options

NAME = "mosaic_gpu"
pytestmark = pytest.mark.kernel
(OPERATOR,) = (o for o in OPERATORS if o.name == "scaled_masked_softmax")


@pytest.fixture(autouse=True)
def _interpreter():
    with pallas.interpreting(NAME), jax.enable_x64(True):
        yield


def refusal(case, dtype="float32"):
    """Why the kernel cannot run a case."""
    implementation = {"implementation": NAME}
    try:
        jax.eval_shape(lambda a: OPERATOR.call(**a, **case.options, **implementation), case.arrays(dtype))
    except NotImplementedError as error:
        return str(error)
    return None


CASES = list(OPERATOR.tagged("ci", "edge", "second", "shard"))
REFUSED = {
    "uniform", "scale_array", "scale_scalar", "scale_columns", "sink_heads", "sink_rows", "sink_uniform",
    "axis_0", "axis_1", "no_rows", "no_columns", "second_scale", "second_causal", "shard_sink",
}  # fmt: skip
RUN = [case for case in CASES if case.name not in REFUSED]


@interpreted
def test_enough_cases_run():
    assert {case.name for case in CASES if refusal(case)} == REFUSED
    assert len(RUN) >= 20


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("width", [1, 100, 129, 500, 1000, 2048])
def test_no_piece_overruns_a_single_row(width, dtype):
    padded = kernel.padded_width(width, dtype, 1)
    assert padded % kernel.Tiling.default_for(1, padded, dtype, 4, 8192).columns == 0


@thorough
@interpreted
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["mask_rows", "bias_heads", "causal_window"])
def test_low_precision_against_definition(name, dtype):
    (case,) = (case for case in RUN if case.name == name)
    for row in check.measure(OPERATOR, NAME, case, dtype):
        assert row.ok, row


def close(x, dy, *, tolerance=2e-6, **arguments):
    """Compares y and dx of the kernel with the definition in float64."""
    call = lambda x: scaled_masked_softmax(x, **arguments, implementation=NAME)
    y, pullback = jax.vjp(call, x)
    widen = lambda a: a.astype(np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a
    exact = {k: widen(v) if hasattr(v, "dtype") else v for k, v in arguments.items()}
    with jax.numpy_rank_promotion("allow"):
        expected, exact_pullback = jax.vjp(lambda x: reference(x, **exact), widen(x))
    assert_close(y, expected, tolerance, "y")
    assert_close(pullback(dy)[0], exact_pullback(widen(dy))[0], tolerance, "dx")


def normal(shape, dtype=np.float32, seed=0):
    return jnp.asarray(3 * np.random.default_rng(seed).standard_normal(shape), dtype)


@interpreted
@pytest.mark.parametrize(
    ("count", "width"),
    [
        (300, 7),
        *(
            pytest.param(*n, marks=thorough)
            for n in ((2, 2177), (70, 1), (9, 128), (5, 2048), (2, 8192), (1, 131072))
        ),
    ],
)
def test_widths(count, width):
    close(normal((count, width)), normal((count, width), seed=1), scale=0.7)


@thorough
@interpreted
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
@pytest.mark.parametrize("width", [129, 3000])
def test_widths_in_low_precision(width, dtype):
    x, dy = normal((3, width), dtype), normal((3, width), dtype, 1)
    close(x, dy, tolerance=2 * float(jnp.finfo(dtype).eps))


@thorough
@interpreted
@pytest.mark.parametrize("width", [40, 2200])
@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 3, 5), (2, 3, 5), (1, 1, 5), (1, 3, 1)])
def test_planes_broadcast(shape, width, rng):
    """Rows that end inside a tile, in every group of axes that masks and biases leave."""
    x, dy = normal((2, 3, 5, width)), normal((2, 3, 5, width), seed=1)
    mask = jnp.asarray(rng.random((*shape, width)) < 0.5)
    bias = jnp.asarray(rng.standard_normal((2, 1, 5, width)), np.float32)
    close(x, dy, mask=mask, bias=bias, is_causal=True, scale=-0.5)


@thorough
@interpreted
@pytest.mark.parametrize("width", [300, 20000])
def test_rows_of_a_wide_and_a_narrow_array_that_see_nothing(width, rng):
    mask = jnp.asarray(rng.random((6, width)) < 0.5).at[2:4].set(False)
    close(normal((6, width))[:2], normal((6, width))[1:3], mask=mask[1:3])


@thorough
@interpreted
def test_tiles_that_shared_memory_cannot_hold_are_read_again(monkeypatch):
    monkeypatch.setattr(kernel, "SHARED_MEMORY", 30000)
    for element_bytes in (4, 8):
        tiling = kernel.Tiling.default_for(1, 8192, np.float32, element_bytes, 4096)
        assert 3 <= tiling.slots < tiling.tiles
    jax.clear_caches()
    close(normal((2, 8111)), normal((2, 8111), seed=1))


@thorough
@interpreted
@pytest.mark.parametrize("width", [50, 2100])
def test_poison_where_nothing_is_seen(width, rng):
    mask = jnp.asarray(rng.random((4, width)) < 0.5)
    x, dy = normal((2, 4, width)), normal((2, 4, width), seed=1)

    def run(x, dy):
        call = lambda x: scaled_masked_softmax(x, mask, implementation=NAME)
        y, pullback = jax.vjp(call, x)
        return y, pullback(dy)[0]

    poisoned = run(jnp.where(mask, x, jnp.nan), jnp.where(mask, dy, jnp.nan))
    for got, expected in zip(poisoned, run(x, dy), strict=True):
        np.testing.assert_array_equal(got, expected)


@thorough
@interpreted
def test_extremes():
    x = jnp.asarray([[3e38, -3e38, 1.0, 3e38], [-np.inf] * 4, [1e4, 1e4 + 1, -1e30, 0]], np.float32)
    for scale in (1.0, -2.0, 0.0, 1e-37):
        finite = x if scale > 1e-30 else jnp.where(jnp.isfinite(x), x, 0)
        got = scaled_masked_softmax(finite, scale=scale, implementation=NAME)
        expected = scaled_masked_softmax(finite.astype(np.float64), scale=scale, implementation="xla")
        if scale < 0:
            got, expected = got[::2], expected[::2]  # a whole row of +inf is NaN
        assert_close(got, expected, 1e-6, f"{scale}")


@thorough
@interpreted
def test_vmap():
    x, mask = normal((3, 4, 40)), jnp.asarray(np.random.default_rng(1).random((3, 40)) < 0.6)

    def run(implementation, x, mask):
        call = lambda x: scaled_masked_softmax(x, mask[None], implementation=implementation)
        y, pullback = jax.vjp(call, x)
        return y, pullback(jnp.sin(7 * x))[0]

    for axes in ((0, 0), (0, None), (None, 0)):
        operands = [a if axis == 0 else a[0] for a, axis in zip((x, mask), axes, strict=True)]
        got, expected = (jax.vmap(lambda *a, i=i: run(i, *a), axes)(*operands) for i in (NAME, "xla"))
        for a, b in zip(got, expected, strict=True):
            assert_close(a, b, 1e-6)


def step(x, dy, mask, implementation=NAME):
    call = lambda x: scaled_masked_softmax(x, mask, implementation=implementation)
    y, pullback = jax.vjp(call, x)
    return y, pullback(dy)[0]


def mesh_and_operands(devices):
    mesh = jax.make_mesh((devices,), ("b",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = jax.NamedSharding(mesh, jax.P("b"))
    x, dy = (jax.device_put(normal((4, 6, 40), seed=i), sharding) for i in (0, 1))
    return mesh, (x, dy, jnp.asarray(np.random.default_rng(1).random((1, 6, 40)) < 0.6))


@thorough
@interpreted
def test_inside_shard_map():
    """On one device: the interpreter mixes up the barriers of devices that do not run in step."""
    mesh, operands = mesh_and_operands(1)
    spec = jax.P("b")
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(step, in_specs=(spec, spec, jax.P()), out_specs=spec)
        got, expected = jax.jit(mapped)(*operands), step(*operands, "xla")
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, 2e-6)


@interpreted
def test_on_an_explicit_mesh_each_device_takes_its_shard():
    mesh, operands = mesh_and_operands(2)
    with jax.set_mesh(mesh):
        traced = jax.jit(step).trace(*operands)
    assert str(traced.jaxpr).count("shard_map") >= 2
    for out in traced.jaxpr.out_avals:
        assert out.sharding.spec == jax.P("b", None, None)


X = jnp.zeros((2, 8), np.float32)


@pytest.mark.parametrize(
    ("options", "operands", "reason"),
    [
        (Options(axis=-2), Operands(X), "the last axis"),
        (Options(fully_masked="nan"), Operands(X), "rows that see nothing"),
        (Options(None), Operands(X, scale=X[:1, :1]), "scale must be a Python float"),
        (Options(), Operands(X, sink=X[:, :1]), "no sink"),
        (Options(), Operands(X.astype(np.int32).astype(np.float64)), "x must be one of"),
        (Options(), Operands(X, bias=X.astype(np.float64)), "bias must be one of"),
        (Options(), Operands(jnp.zeros((0, 8), np.float32)), "must not be empty"),
        (Options(), Operands(jnp.zeros((1, 131073), np.float32)), "at most 131072"),
        (Options(), Operands(X, mask=X[:1] == 0), None),
    ],
)
def test_supports(options, operands, reason):
    got = kernel.supports(options, operands)
    assert got is None if reason is None else reason in got


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("element_bytes", [2, 4, 8, 9])
def test_tilings_cover_every_width(element_bytes, dtype):
    for width in (1, 5, 33, 128, 1000, 2048, 2049, 5000, 16385, 50304, 100001, 131072):
        padded = kernel.padded_width(width, dtype, 9)
        tiling = kernel.Tiling.default_for(9, padded, dtype, element_bytes, 4096)
        if not tiling.wide:
            assert tiling.columns < padded <= tiling.columns * tiling.fragments
            assert tiling.rows <= 256
            continue
        share = 128 * tiling.segments * tiling.warpgroups
        assert (tiling.tiles - 1) * share < width <= tiling.tiles * share
        assert tiling.segments <= min(256, padded // 128)
        assert tiling.slots >= min(3, tiling.tiles)
