"""At pixels, borders and beyond: where bilinear interpolation has its kinks."""

import numpy as np
import pytest
from helpers import assert_close, assert_trees_close, thorough
from ops.deformable.calls import evaluate, operator
from ops.deformable.small import first_order, on_row


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
    "options",
    [{}, *(pytest.param(x, marks=thorough) for x in ({"padding_mode": "border"}, {"method": "discrete"}))],
    ids=str,
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
    value, weights = (np.arange(1.0, 33, dtype=dtype).reshape(1, 32, 1, 1), np.ones((1, 7, 1, 1, 1), dtype))
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
