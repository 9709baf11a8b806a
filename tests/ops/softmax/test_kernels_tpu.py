"""The TPU kernels of the softmax, in the interpreter: races, two cores, memory that starts as NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough

from jax_attn_bwd import scaled_masked_softmax
from jax_attn_bwd._core import pallas
from jax_attn_bwd.ops.softmax.kernels import tpu as kernel
from jax_attn_bwd.ops.softmax.spec import Operands, Options

NAME = "mosaic_tpu"
pytestmark = pytest.mark.kernel


@pytest.fixture(autouse=True)
def _interpreter():
    with pallas.interpreting(NAME), jax.enable_x64(True):
        yield


def step(implementation, x, dy, mask=None, **options):
    call = lambda x: scaled_masked_softmax(x, mask, implementation=implementation, **options)
    y, pullback = jax.vjp(call, x)
    return y, pullback(dy)[0]


@pytest.mark.parametrize(("count", "width"), [(70, 2177), pytest.param(1, 131072, marks=thorough)])
def test_groups_of_rows_and_long_rows_with_poison(count, width, rng):
    """A row that sees nothing, NaN in every hidden place, rows and columns that fill no group."""
    x, dy = (jnp.asarray(3 * rng.standard_normal((count, width)), np.float32) for _ in range(2))
    mask = jnp.asarray(rng.random((count, width)) < 0.5)
    mask = mask.at[count // 2].set(count == 1)
    expected = step("xla", x, dy, mask, scale=-0.5)
    got = step(NAME, jnp.where(mask, x, jnp.nan), jnp.where(mask, dy, jnp.nan), mask, scale=-0.5)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, 2e-6)


def test_blocks_of_rows(monkeypatch, rng):
    """Several blocks, the last of them not whole; second order and vmap go through the portable rule."""
    monkeypatch.setattr(kernel, "_ELEMENTS", 32 * 20)
    jax.clear_caches()
    x, dy = (jnp.asarray(rng.standard_normal((2, 40, 20)), np.float32) for _ in range(2))

    def both(implementation):
        square = lambda x, dy: (step(implementation, x, dy, is_causal=True)[1] ** 2).sum()

        def run(x, dy):
            return step(implementation, x, dy, is_causal=True), jax.grad(square)(x, dy)

        return jax.tree.leaves(jax.jit(jax.vmap(run))(x, dy))

    for a, b in zip(both(NAME), both("xla"), strict=True):
        assert_close(a, b, 1e-5)


@thorough
def test_on_an_explicit_mesh_each_device_takes_its_shard(rng):
    mesh = jax.make_mesh((2,), ("b",), axis_types=(jax.sharding.AxisType.Explicit,))
    arrays = [jnp.asarray(rng.standard_normal((4, 6, 40)), np.float32) for _ in range(2)]
    mask = jnp.asarray(rng.random((1, 6, 40)) < 0.6)
    expected = step("xla", *arrays, mask)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, jax.NamedSharding(mesh, jax.P("b"))) for a in arrays]
        got = jax.jit(lambda x, dy: step(NAME, x, dy, mask))(*placed)
    for a, b in zip(got, expected, strict=True):
        assert a.sharding.spec[0] == "b"
        assert_close(a, b, 2e-6)


X = jnp.zeros((2, 8), np.float32)


@pytest.mark.parametrize(
    ("options", "operands", "reason"),
    [
        (Options(axis=-2), Operands(X), "the last axis"),
        (Options(fully_masked="nan"), Operands(X), "rows that see nothing"),
        (Options(), Operands(X.astype(np.float16)), "x must be one of"),
        (Options(), Operands(jnp.zeros((1, 131073), np.float32)), "at most 131072"),
        (Options(), Operands(X, mask=X[:1] == 0), None),
    ],
    ids=["axis", "nan", "float16", "width", "runs"],
)
def test_supports(options, operands, reason):
    got = kernel.supports(options, operands)
    assert got is None if reason is None else reason in got


def test_blocks_fit_in_vector_memory():
    for width in (1, 100, 1000, 16384, 40000, 131072):
        for count in (1, 7, 100, 10**6):
            size = kernel.block_rows(count, width)
            assert size == count or size % 8 == 0
            assert size <= 8 or size * width <= 2**19
