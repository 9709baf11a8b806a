"""Poison where no sample counts reaches nothing; where one counts it is not hidden."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, thorough
from ops.deformable.calls import operator
from ops.deformable.small import LEVELS, B, D, M, Q, first_order, sample, second_order

from jax_attn_bwd import multi_scale_deformable_attention
from jax_attn_bwd.ops.deformable import plan


def poisoned_call():
    """(clean arrays, poisoned arrays, clean dout, poisoned dout): samples skipped at random, and rows."""
    rng = np.random.default_rng(3)
    clean = sample()
    skipped = rng.random(clean["attention_weights"].shape) < 0.4
    skipped[0, 1] = skipped[1, 2, 0] = True
    far = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 5.0, -3.0])[rng.integers(0, 7, skipped.shape)]
    which = skipped[..., None] & (np.arange(2) == rng.integers(0, 2, (*skipped.shape, 1)))
    clean["sampling_locations"][skipped] = -7.0
    at = np.where(which, far[..., None], np.where(skipped[..., None], 0.5, clean["sampling_locations"]))
    clean["attention_weights"][skipped] = 0
    dead = skipped.all((-1, -2))  # rows of dout [B, Q, M]
    dout = rng.standard_normal((B, Q, M, D)) * ~dead[..., None]
    ones = clean | {"attention_weights": np.ones_like(clean["attention_weights"])}
    read = jax.grad(lambda v: operator.reference(**ones | {"value": v}, spatial_shapes=LEVELS)[0].sum())
    unread = np.asarray(read(jnp.asarray(clean["value"]))) == 0
    assert unread.any()
    assert dead.any()
    clean["value"][unread] = 0
    bad = {
        "value": np.where(unread, np.nan, clean["value"]),
        "sampling_locations": at,
        "attention_weights": np.where(skipped, np.nan, clean["attention_weights"]),
    }
    bad_dout = np.where(dead[..., None], np.nan, dout)
    return clean, bad, dout.reshape(B, Q, M * D), bad_dout.reshape(B, Q, M * D)


@pytest.mark.parametrize(
    "platform", [pytest.param("cpu", marks=thorough), "gpu", pytest.param("gpu, many", marks=thorough)]
)
@pytest.mark.parametrize(
    "order", [first_order, pytest.param(second_order, marks=thorough)], ids=["first", "second"]
)
def test_poison_where_no_sample_counts_reaches_nothing(monkeypatch, order, platform):
    """NaN in unread pixels, in weights and locations of skipped samples, in dout rows without samples."""
    monkeypatch.setattr("jax_attn_bwd._core.targets.platform", lambda: platform[:3])
    if "many" in platform:
        monkeypatch.setattr(plan, "_LEVEL_ROWS", 0)
    clean, bad, dout, bad_dout = poisoned_call()
    for sums in (True, None) if platform == "gpu" else (None,):
        run = order({"spatial_shapes": LEVELS, "deterministic_sums": sums})
        expected, got = run(clean, dout), run(bad, bad_dout)
        for name, x in got.items():
            assert np.isfinite(x).all(), name
        assert_trees_close(got, expected, 1e-13)


@pytest.mark.parametrize("options", [{"padding_mode": "border"}, {"method": "discrete"}], ids=str)
@pytest.mark.parametrize(
    "order", [first_order, pytest.param(second_order, marks=thorough)], ids=["first", "second"]
)
def test_poison_at_locations_that_are_not_finite(order, options):
    clean = sample()
    skipped = np.random.default_rng(3).random(clean["attention_weights"].shape) < 0.4
    clean["attention_weights"][skipped] = 0
    bad = clean | {
        "sampling_locations": np.where(skipped[..., None], np.nan, clean["sampling_locations"]),
        "attention_weights": np.where(skipped, np.nan, clean["attention_weights"]),
    }
    # what a skipped sample would change has weight 0 in the clean call, but for its own gradients
    dout = np.random.default_rng(4).standard_normal((B, Q, M * D))
    run = order({"spatial_shapes": LEVELS, **options})
    expected, got = run(clean, dout), run(bad, dout)
    for name in ("sampling_locations", "attention_weights"):
        np.testing.assert_array_equal(np.asarray(got[name])[skipped], 0)
        expected[name] = np.where(
            skipped.reshape(skipped.shape + (1,) * (expected[name].ndim - 5)), 0, expected[name]
        )
    if order is first_order:
        assert_trees_close(got, expected, 1e-13)
    for name, x in got.items():
        assert np.isfinite(x).all(), name


def test_nan_in_a_pixel_that_is_read_is_not_hidden():
    arrays = sample()
    arrays["value"][0, :, 1] = np.nan
    out = np.asarray(operator.call(**arrays, spatial_shapes=LEVELS)[0]).reshape(B, Q, M, D)
    assert np.isnan(out[0, :, 1]).any()
    assert np.isfinite(out[1]).all()
    assert np.isfinite(out[0, :, [0, 2]]).all()


@pytest.mark.parametrize("at", [-5.0, 5.0])
def test_a_pixel_beside_a_clamped_point_is_not_read(at):
    value = jnp.asarray([3.0, jnp.nan, 7.0]).reshape(1, 3, 1, 1)
    point = jnp.asarray([at, 0.5]).reshape(1, 1, 1, 1, 1, 2)

    def call(*arrays):
        return multi_scale_deformable_attention(arrays[0], ((1, 3),), *arrays[1:], padding_mode="border")

    out, pullback = jax.vjp(call, value, point, jnp.full((1,) * 5, 2.0))
    assert out.item() == (6.0 if at < 0 else 14.0)
    dvalue, dpoint, dweight = pullback(jnp.ones_like(out))
    np.testing.assert_array_equal(dvalue.ravel(), [2, 0, 0] if at < 0 else [0, 0, 2])
    np.testing.assert_array_equal(dpoint, 0)
    assert dweight.item() == (3.0 if at < 0 else 7.0)
