"""Shapes that other implementations are tested with, shapes drawn at random, finite differences."""

import jax
import numpy as np
import pytest
from helpers import assert_close, thorough
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.deformable.calls import LEVELS, assert_as_defined, evaluate, operator, sample

# The shapes that other implementations are tested with, and those that broke them.
GRID = {
    **{f"D{D}": dict(levels=((3, 5),), D=D) for D in (1, 4, 30, 64, 71, 256, 1025)},
    **{f"P{P}": dict(levels=((5, 3),), P=P) for P in (1, 16)},
    "P21_D147_M7": dict(levels=((3, 5), (2, 1)), P=21, D=147, M=7, Q=1),
    **{
        f"L{L}": dict(levels=((6, 4), (3, 5), (1, 1), (1, 7), (5, 1), (2, 2), (9, 1), (3, 3))[:L], P=1)
        for L in (8,)
    },
    "one_pixel_level": dict(levels=((1, 1),)),
    "one_query": dict(Q=1),
    "prime_batch_and_queries": dict(B=7, Q=13),
    "many_queries": dict(B=8, Q=900, levels=((8, 5),), M=1, D=1, P=1),
    "far": dict(Q=40, spread=40.0),
    "ragged": dict(P=(3, 0)),
    "ragged_as_in_d_fine": dict(levels=((4, 6), (2, 3), (1, 2)), P=(3, 6, 3)),
}


KEPT = ("D1025", "P21_D147_M7")  # the cases of the operator are of the other kinds


@pytest.mark.parametrize("name", [*KEPT, *(pytest.param(n, marks=thorough) for n in GRID if n not in KEPT)])
def test_grid_of_shapes_against_the_definition(name):
    shape = {"levels": LEVELS} | GRID[name]
    options = {"num_points": shape["P"]} if isinstance(shape.get("P"), tuple) else {}
    assert_as_defined(sample(**shape), spatial_shapes=shape["levels"], **options)


@thorough
@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.data())
def test_any_shape_and_any_combination_of_options(data):
    draw = data.draw
    side = st.integers(1, 5)
    levels = tuple(draw(st.lists(st.tuples(side, side), min_size=1, max_size=3)))
    sizes = {name: draw(st.sampled_from([0, 1, 2, 3, 5])) for name in "BQMD"}
    points = draw(st.integers(0, 3) | st.tuples(*(st.integers(0, 3) for _ in levels)))
    options = {
        "spatial_shapes": levels,
        "padding_mode": draw(st.sampled_from(["zeros", "border"])),
        "method": draw(st.sampled_from(["bilinear", "bilinear", "discrete"])),
        "normalize": draw(st.sampled_from([None, "softmax"])),
    }
    if isinstance(points, tuple):
        options["num_points"] = points
    seed = draw(st.integers(0, 1000))
    arrays = sample(levels, **sizes, P=points, seed=seed, method=options["method"])
    assert_as_defined(arrays, **options)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="zeros", marks=thorough),
        pytest.param({"padding_mode": "border"}, id="border"),
        pytest.param({"normalize": "softmax"}, id="softmax", marks=thorough),
        pytest.param({"num_points": (1, 4)}, id="ragged", marks=thorough),
    ],
)
def test_gradients_against_finite_differences(options):
    """Central differences in float64 along random directions, in each argument by itself."""
    arrays = sample(Q=5, D=3, P=options.get("num_points", 2))
    rng = np.random.default_rng(4)
    dout = rng.standard_normal((1, 5, 6))
    got = evaluate(operator.call, arrays, {"spatial_shapes": LEVELS, **options}, dout)

    @jax.jit
    def value(inputs):
        out = operator.call(**{**arrays, **inputs}, spatial_shapes=LEVELS, **options)[0]
        return (out * dout).sum()

    step = 1e-5  # a share of a level of 6 pixels; samples lie 0.05 pixels from kinks
    for name, x in arrays.items():
        for _ in range(3):
            u = rng.standard_normal(x.shape)
            slope = (value({name: x + step * u}) - value({name: x - step * u})) / (2 * step)
            assert_close((got[name] * u).sum(), slope, 1e-8, name)
