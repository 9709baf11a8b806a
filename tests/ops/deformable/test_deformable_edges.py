"""Multi-scale deformable attention at borders, at kinks, and with poison where no sample counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_trees_close
from test_deformable import evaluate, operator, program

from jax_attn_bwd import multi_scale_deformable_attention
from jax_attn_bwd.ops.deformable.cases import locations

LEVELS = ((3, 4), (2, 1))
B, Q, M, D, POINTS = 2, 6, 3, 4, 2
on_each_platform = pytest.mark.parametrize("platform", ["cpu", "gpu"])


def sample(seed=0):
    rng = np.random.default_rng(seed)
    at = locations(rng, (B, Q, M), LEVELS, (POINTS,) * len(LEVELS))
    return {
        "value": rng.standard_normal((B, 14, M, D)),
        "sampling_locations": at.reshape(B, Q, M, len(LEVELS), POINTS, 2),
        "attention_weights": rng.standard_normal((B, Q, M, len(LEVELS), POINTS)),
    }


def first_order(options):
    """`(arrays, dout) -> output and gradients by name`."""
    return program(operator.call, options)


def second_order(options):
    """`(arrays, dout) -> gradients of a random form of the gradients, by name, and of dout`."""
    first = first_order(options)

    def form(arrays, dout):
        rng, gradients = np.random.default_rng(1), first(arrays, dout)
        return sum(
            (jnp.sin(gradients[name]) * rng.standard_normal(x.shape)).sum()
            for name, x in arrays.items()
        )

    @jax.jit
    def run(arrays, dout):
        by_array, by_dout = jax.grad(form, (0, 1))(arrays, dout)
        return by_array | {"dout": by_dout}

    return run


# -------------------------------------------------------------------- borders and kinks


def on_row(levels, x, y, **options):
    """(value [H, W], out, dloc_x, dloc_y, dvalue) of samples at pixels (x, y) of one level, weight 1."""
    ((H, W),) = levels
    x, y = np.broadcast_arrays(np.asarray(x, float), np.asarray(y, float))
    at = np.stack([(x + 0.5) / W, (y + 0.5) / H], -1).reshape(1, x.size, 1, 1, 1, 2)
    arrays = {
        "value": np.random.default_rng(0).standard_normal((1, H * W, 1, 1)),
        "sampling_locations": at,
        "attention_weights": np.ones((1, x.size, 1, 1, 1)),
    }
    run = first_order({"spatial_shapes": levels, **options})
    got = {n: np.asarray(g) for n, g in run(arrays, np.ones((1, x.size, 1))).items()}
    slope = got["sampling_locations"].reshape(-1, 2)
    plane = arrays["value"].reshape(H, W)
    return plane, got["out"].ravel(), slope[:, 0], slope[:, 1], got["value"].reshape(H, W)


def test_integers_have_the_right_hand_derivative():
    """At pixels, at x = -1 and x = W exactly; sizes are powers of two, so that coordinates are exact."""
    plane, out, dx, dy, dvalue = on_row(((2, 8),), np.arange(-1, 9), 1)
    row = np.concatenate([[0], plane[1], [0, 0]])  # at x = -1, 0, ..., 8, 9
    assert_close(out, row[:-1], 1e-15)
    right = 8 * np.diff(row)
    right[0] = 0  # a sample at -1 does not count, though it would to the right of it
    assert_close(dx, right, 1e-15)
    below = -2 * row[:-1]  # y = H - 1: towards the padding
    assert_close(dy, below, 1e-15)
    np.testing.assert_array_equal(dvalue, [[0] * 8, [1] * 8])


def test_a_sample_fades_over_the_pixel_outside():
    step = 2.0**-20
    plane, out, dx, _, _ = on_row(((2, 8),), [-1, -1 + step, -0.5, 7.5, 8 - step, 8], 0)
    first, last = plane[0, 0], plane[0, 7]
    assert_close(out, [0, step * first, first / 2, last / 2, step * last, 0], 1e-15)
    assert_close(dx, [0, 8 * first, 8 * first, -8 * last, -8 * last, 0], 1e-15)


def test_the_skip_is_decided_by_both_coordinates():
    _, out, dx, dy, dvalue = on_row(((2, 8),), [3, 3, -1, 8, 3], [-1, 2, 0, 1, np.nan])
    for x in (out, dx, dy, dvalue):
        np.testing.assert_array_equal(x, 0)


def test_border_clamps_and_stops_the_gradient():
    x = np.array([-9, -1, -0.5, 0, 0.5, 6.5, 7, 7.5, 8, 1e30])
    plane, out, dx, _, dvalue = on_row(((2, 8),), x, 0, padding_mode="border")
    assert_close(out, np.interp(x, np.arange(8), plane[0]), 1e-14)
    first, last = 8 * (plane[0, 1] - plane[0, 0]), 8 * (plane[0, 7] - plane[0, 6])
    assert_close(dx, [0, 0, 0, first, first, last, 0, 0, 0, 0], 1e-15)
    assert_close(dvalue[0, [0, 1, 6, 7]], [4.5, 0.5, 0.5, 4.5], 1e-15)


def test_discrete_rounds_as_rt_detr_v2_and_clamps_each_axis():
    """Pixel int(loc * size + 1/2), so half a pixel to the right of the nearest centre."""
    x = np.array([-3, -1, -0.6, -0.5, -0.1, 0, 0.4, 0.9, 6.2, 7, 99])
    plane, out, dx, dy, dvalue = on_row(((2, 8),), x, 1, method="discrete")
    column = np.clip(np.trunc((x + 0.5) + 0.5).astype(int), 0, 7)
    assert column.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 7, 7, 7]
    np.testing.assert_array_equal(out, plane[1, column])  # row 2 is clamped to 1, not to 7
    np.testing.assert_array_equal(dvalue[1], np.bincount(column, minlength=8))
    for gradient in (dx, dy, dvalue[0]):
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize(
    "options", [{}, {"padding_mode": "border"}, {"method": "discrete"}], ids=str
)
def test_levels_of_one_row_or_column(options):
    """At every exact place around the first pixel, on kinks too."""
    rng = np.random.default_rng(0)
    levels = ((1, 1), (1, 8), (8, 1))
    exact = np.array([-1, -0.5, 0, 0.25, 1])
    x, y = (z.reshape(25, 1) for z in np.meshgrid(exact, exact))
    at = np.stack([(x + 0.5) / [1, 8, 1], (y + 0.5) / [1, 1, 8]], -1)  # [25, L, 2]
    arrays = {
        "value": rng.standard_normal((1, 17, 1, 2)),
        "sampling_locations": at.reshape(1, 25, 1, 3, 1, 2),
        "attention_weights": rng.standard_normal((1, 25, 1, 3, 1)),
    }
    options = {"spatial_shapes": levels, **options}
    dout = rng.standard_normal((1, 25, 2))
    expected = evaluate(operator.reference, arrays, options, dout)
    assert_trees_close(first_order(options)(arrays, dout), expected, 1e-13)


@pytest.mark.parametrize("mode", ["zeros", "border", "discrete"])
def test_the_whole_range_of_locations(mode):
    """A huge location is outside or clamped, also where times the width it overflows; inf is skipped."""
    dtype = np.float32
    largest = np.finfo(dtype).max
    at = np.array([0.3, 1e30, largest, -largest, np.inf, -np.inf, np.nan], dtype)
    at = np.stack([at, np.full_like(at, 0.3)], -1).reshape(1, 7, 1, 1, 1, 2)
    value, weights = (
        np.arange(1.0, 33, dtype=dtype).reshape(1, 32, 1, 1),
        np.ones((1, 7, 1, 1, 1), dtype),
    )
    options = {"method": mode} if mode == "discrete" else {"padding_mode": mode}
    arrays = {"value": value, "sampling_locations": at, "attention_weights": weights}
    options["spatial_shapes"] = ((4, 8),)
    dout = np.ones((1, 7, 1), dtype)
    got = first_order(options)(arrays, dout)
    rtol = 4 * float(np.finfo(dtype).eps)
    assert_trees_close(got, evaluate(operator.reference, arrays, options, dout), rtol)
    out = np.asarray(got["out"]).ravel()
    np.testing.assert_array_equal(out[4:], 0)
    assert (out[1:4] == 0).all() if mode == "zeros" else (out[1:4] > 0).all()
    slope = np.asarray(got["sampling_locations"]).reshape(7, 2)
    np.testing.assert_array_equal(slope[4:], 0)
    np.testing.assert_array_equal(slope[1:4, 0], 0)
    for x in got.values():
        assert np.isfinite(x).all()


# -------------------------------------------------------------------- poison


def poisoned_call():
    """(clean arrays, poisoned arrays, clean dout, poisoned dout): samples skipped at random, and rows."""
    rng = np.random.default_rng(3)
    clean = sample()
    skipped = rng.random(clean["attention_weights"].shape) < 0.4
    skipped[0, 1] = skipped[1, 2, 0] = True
    far = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 5.0, -3.0])[
        rng.integers(0, 7, skipped.shape)
    ]
    which = skipped[..., None] & (np.arange(2) == rng.integers(0, 2, (*skipped.shape, 1)))
    clean["sampling_locations"][skipped] = -7.0
    at = np.where(
        which, far[..., None], np.where(skipped[..., None], 0.5, clean["sampling_locations"])
    )
    clean["attention_weights"][skipped] = 0
    dead = skipped.all((-1, -2))  # rows of dout [B, Q, M]
    dout = rng.standard_normal((B, Q, M, D)) * ~dead[..., None]
    ones = clean | {"attention_weights": np.ones_like(clean["attention_weights"])}
    read = jax.grad(
        lambda v: operator.reference(**ones | {"value": v}, spatial_shapes=LEVELS)[0].sum()
    )
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


@on_each_platform
@pytest.mark.parametrize("order", [first_order, second_order], ids=["first", "second"])
def test_poison_where_no_sample_counts_reaches_nothing(monkeypatch, order, platform):
    """NaN in unread pixels, in weights and locations of skipped samples, in dout rows without samples."""
    monkeypatch.setattr("jax_attn_bwd._core.backend.target_platform", lambda: platform)
    clean, bad, dout, bad_dout = poisoned_call()
    run = order({"spatial_shapes": LEVELS})
    expected, got = run(clean, dout), run(bad, bad_dout)
    for name, x in got.items():
        assert np.isfinite(x).all(), name
    assert_trees_close(got, expected, 1e-13)


@pytest.mark.parametrize("options", [{"padding_mode": "border"}, {"method": "discrete"}], ids=str)
@pytest.mark.parametrize("order", [first_order, second_order], ids=["first", "second"])
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
        expected[name] = np.where(skipped.reshape(skipped.shape + (1,) * (expected[name].ndim - 5)),
                                  0, expected[name])  # fmt: skip
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
        return multi_scale_deformable_attention(
            arrays[0], ((1, 3),), *arrays[1:], padding_mode="border"
        )

    out, pullback = jax.vjp(call, value, point, jnp.full((1,) * 5, 2.0))
    assert out.item() == (6.0 if at < 0 else 14.0)
    dvalue, dpoint, dweight = pullback(jnp.ones_like(out))
    np.testing.assert_array_equal(dvalue.ravel(), [2, 0, 0] if at < 0 else [0, 0, 2])
    np.testing.assert_array_equal(dpoint, 0)
    assert dweight.item() == (3.0 if at < 0 else 7.0)
