"""Multi-scale deformable attention as a GPU takes it: all points at once, and runs of sorted samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from ops.deformable.calls import assert_as_defined, operator, sample

from jax_attn_bwd import multi_scale_deformable_attention_bwd
from jax_attn_bwd.ops.deformable import plan, value_gradient
from jax_attn_bwd.ops.deformable.spec import Options

IN_RUNS = {"deterministic_sums": True}
CALLS = {
    "border, ragged": {"padding_mode": "border", "num_points": (5, 0, 4), "normalize": "softmax"} | IN_RUNS,
    "discrete": {"method": "discrete"} | IN_RUNS,
    "zeros": IN_RUNS,
    "border": {"padding_mode": "border"} | IN_RUNS,
    "any order": {},
}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    monkeypatch.setattr("jax_attn_bwd._core.targets.platform", lambda: "gpu")


@pytest.fixture
def short_blocks(monkeypatch):
    """Few samples make blocks of blocks of blocks, and few points more than one sum."""
    monkeypatch.setattr(value_gradient, "BLOCK", 3)
    monkeypatch.setattr("jax_attn_bwd.ops.deformable.sampling.BLOCK", 3)
    monkeypatch.setattr(value_gradient, "_GROUP_BYTES", 1 << 10)


@pytest.mark.parametrize("spread", [1.5, pytest.param(0.0, marks=thorough)])
@pytest.mark.parametrize(
    "options", [pytest.param(x, id=name, marks=() if "," in name else thorough) for name, x in CALLS.items()]
)
def test_output_and_gradients_are_those_of_the_definition(short_blocks, options, spread):
    levels = ((3, 5), (1, 1), (4, 2))
    method = options.get("method", "bilinear")
    arrays = sample(levels, B=2, Q=13, M=2, D=3, P=options.get("num_points", 3), method=method, spread=spread)
    assert_as_defined(arrays, spatial_shapes=levels, **options)


MOVING = ("value", "sampling_locations", "attention_weights")


@pytest.mark.parametrize(
    "moving", [MOVING, *(pytest.param((name,), marks=thorough) for name in MOVING)], ids="-".join
)
def test_tangents_are_those_of_the_definition(short_blocks, moving):
    """Of all at once, and of one alone; those of a hidden weight and of a skipped sample are not read."""
    levels, rng = ((3, 5), (4, 2)), np.random.default_rng(5)
    arrays = sample(levels, B=1, Q=5, M=2, D=3, P=2)
    arrays["attention_weights"] = arrays["attention_weights"].at[:, :2, :, 0, 0].set(-jnp.inf)
    arrays["sampling_locations"] = arrays["sampling_locations"].at[:, 2:, :, 1, 1].set(9.0)
    along = {name: rng.standard_normal(arrays[name].shape) for name in moving}

    def tangents(call, unread, **options):
        read = {"attention_weights": arrays["attention_weights"] > -np.inf, "value": True}
        read["sampling_locations"] = arrays["sampling_locations"] < 9
        moved = {name: jnp.where(read[name], x, unread) for name, x in along.items()}
        run = lambda x: call(**arrays | x, spatial_shapes=levels, normalize="softmax", **options)
        return jax.jit(lambda x, t: jax.jvp(run, (x,), (t,))[1][0])({n: arrays[n] for n in moving}, moved)

    assert_close(tangents(operator.call, np.nan, forward_mode=True), tangents(operator.reference, 0), 1e-12)


def test_the_tangent_of_the_weight_of_what_does_not_count_is_not_read(short_blocks):
    arrays = sample(((3, 5),), B=1, Q=2, M=1, D=1, P=2)
    arrays["sampling_locations"] = arrays["sampling_locations"].at[0, 0, 0, 0, 1].set(jnp.nan)
    weights = arrays.pop("attention_weights")
    call = lambda weights: operator.call(
        **arrays, attention_weights=weights, spatial_shapes=((3, 5),), forward_mode=True
    )
    push = jax.jit(lambda along: jax.jvp(call, (weights,), (along,))[1][0])
    clean, dirty = (push(jnp.cos(weights).at[0, 0, 0, 0, 1].set(x)) for x in (0, jnp.nan))
    assert clean[0, 0].all()
    assert_close(dirty, clean, 0)


@thorough
def test_a_run_may_hold_all_samples():
    """5,000 samples in a cell, 20 of its blocks of blocks: what a run sums is spread over all of them."""
    arrays = sample(((1, 1),), Q=2500, M=1, D=1, P=2, spread=0.0)
    assert_as_defined(arrays, 1e-11, spatial_shapes=((1, 1),), **IN_RUNS)


@pytest.mark.parametrize("n", [1, pytest.param(9, marks=thorough), 28])
def test_what_follows_is_of_the_same_cell(short_blocks, n):
    rng = np.random.default_rng(n)
    rows, cell = rng.standard_normal((2, 1, n, 1, 2)), np.sort(rng.integers(0, 4, (2, 1, n)), axis=2)
    same = (cell[..., None] == cell[..., None, :]) & np.triu(np.ones((n, n), bool))
    expected = np.einsum("bmij,bmjcd->bmicd", same, rows)
    assert_close(jax.jit(value_gradient._all_that_follow)(rows, cell), expected, 1e-13)


@pytest.mark.parametrize("padding", [pytest.param("zeros", marks=thorough), "border"])
def test_a_cotangent_that_is_not_finite_reaches_its_own_pixels_alone(short_blocks, monkeypatch, padding):
    """Samples of one cell share a run, cells share blocks, and a clamped sample has one column of pixels."""
    at = np.array([[0.05, 0.3], [0.5, 0.5], [0.5, 0.6], [0.95, 0.4], [-3.0, 0.5]]).reshape(1, 5, 1, 1, 1, 2)
    arrays = {
        "value": jnp.zeros((1, 12, 1, 1)),
        "sampling_locations": jnp.asarray(at),
        "attention_weights": jnp.ones((1, 5, 1, 1, 1)),
    }
    options = {"spatial_shapes": ((3, 4),), "padding_mode": padding, "wrt": "value"} | IN_RUNS

    @jax.jit
    @jax.vmap
    def reached(dout):
        return jnp.isnan(multi_scale_deformable_attention_bwd(dout, **arrays, **options).value)

    each = jnp.where(jnp.eye(5, dtype=bool), jnp.nan, 1.0)[:, None, :, None]
    got = reached(each)
    monkeypatch.setattr(plan, "fastest_loops", lambda *_: plan.Loops())
    jax.clear_caches()
    np.testing.assert_array_equal(got, reached(each))


def test_levels_are_taken_together_while_that_needs_little_memory():
    def groups(points, Q):
        options = Options(((8, 8),) * len(points), points)
        dout = jax.ShapeDtypeStruct((1, Q, 8, 32), jnp.float32)
        return [range(len(points))[group] for group in value_gradient._groups(options, dout)]

    assert groups((4, 4, 4, 4), 300) == [range(4)]
    assert groups((4, 4, 4, 4), 5440) == [range(3), range(3, 4)]
    assert groups((4, 4, 4, 4), 20000) == [range(2), range(2, 4)]
    assert groups((64, 0, 2), 20000) == [range(1), range(1, 3)]
