"""Multi-scale deformable attention: the gradient of the value summed in a fixed order, as on a GPU."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPERATORS, assert_close, thorough

from jax_attn_bwd import multi_scale_deformable_attention_bwd

operator = next(o for o in OPERATORS if o.name == "multi_scale_deformable_attention")


def dvalue_of(dout, arrays, levels, **options):
    return multi_scale_deformable_attention_bwd(
        dout,
        arrays["value"],
        levels,
        arrays["sampling_locations"],
        arrays["attention_weights"],
        wrt="value",
        implementation="xla",
        **{"deterministic_sums": True} | options,
    ).value


def crowd(queries, levels, dtype=np.float64, spread=0.5):
    """Queries whose samples meet in a few pixels."""
    rng = np.random.default_rng(5)
    S = sum(height * width for height, width in levels)
    arrays = {
        "value": rng.standard_normal((2, S, 2, 3)),
        "sampling_locations": rng.uniform(0.5 - spread, 0.5 + spread, (2, queries, 2, len(levels), 2, 2)),
        "attention_weights": rng.standard_normal((2, queries, 2, len(levels), 2)),
    }
    dout = jnp.asarray(rng.standard_normal((2, queries, 6)), dtype)
    return {name: jnp.asarray(x, dtype) for name, x in arrays.items()}, dout


KEPT = (({}, 97, 0.01),)
OPTIONS = ({}, {"method": "discrete"}, {"padding_mode": "border"})
REST = [
    pytest.param(*case, marks=thorough)
    for case in itertools.product(OPTIONS, (1, 97), (0.01, 0.3, 1.5))  # one pixel, some, far
    if case not in KEPT
]


@pytest.mark.parametrize(("options", "queries", "spread"), [*KEPT, *REST], ids=str)
def test_sorted_sums_are_the_plain_ones(monkeypatch, queries, spread, options):
    """What runs on a GPU, where a scatter-add adds in the order of the moment."""
    levels = ((3, 5), (1, 1))
    arrays, dout = crowd(queries, levels, spread=spread)
    plain = dvalue_of(dout, arrays, levels, **options)
    monkeypatch.setattr("jax_attn_bwd._core.targets.platform", lambda: "gpu")
    assert_close(dvalue_of(dout, arrays, levels, **options), plain, 1e-12)


def test_only_a_gpu_whose_sums_are_to_repeat_sorts(monkeypatch):
    arrays, dout = crowd(3, ((2, 2),))

    def sorts(**options):
        jaxpr = jax.make_jaxpr(lambda d: dvalue_of(d, arrays, ((2, 2),), **options))(dout)
        return "sort[" in str(jaxpr)

    assert not sorts(deterministic_sums=True)
    monkeypatch.setattr("jax_attn_bwd._core.targets.platform", lambda: "gpu")
    assert sorts(deterministic_sums=True)
    assert not sorts(deterministic_sums=None)
    assert not sorts(deterministic_sums=False)


def test_sorted_sums_have_the_same_bits_however_cells_are_interleaved(monkeypatch):
    """Only the order within a cell counts: queries of other cells may come between, or not."""
    monkeypatch.setattr("jax_attn_bwd._core.targets.platform", lambda: "gpu")
    rng = np.random.default_rng(0)
    cells = rng.integers(0, 5, 200)
    x = (cells + 0.5 + rng.uniform(0.05, 0.95, 200)) / 8
    at = np.stack([x, np.full(200, 0.5)], -1).astype(np.float32).reshape(1, 200, 1, 1, 1, 2)
    dout = rng.standard_normal((1, 200, 3)).astype(np.float32)
    weights = rng.standard_normal((1, 200, 1, 1, 1)).astype(np.float32)

    def dvalue(order):
        arrays = {
            "value": np.zeros((1, 8, 1, 3), np.float32),
            "sampling_locations": at[:, order],
            "attention_weights": weights[:, order],
        }
        return np.asarray(dvalue_of(dout[:, order], arrays, ((1, 8),)))

    expected = dvalue(np.arange(200))
    np.testing.assert_array_equal(dvalue(np.arange(200)), expected)
    np.testing.assert_array_equal(dvalue(np.argsort(cells, kind="stable")), expected)
    assert (dvalue(np.arange(200)[::-1]) != expected).any()  # these data can tell


@pytest.mark.parametrize("platform", ["cpu", pytest.param("gpu", marks=thorough)])
def test_many_samples_on_one_pixel_in_float32(monkeypatch, platform):
    """2000 terms in a pixel: the error of a plain running sum, no worse."""
    monkeypatch.setattr("jax_attn_bwd._core.targets.platform", lambda: platform)
    levels = ((3, 5),)
    arrays, dout = crowd(1000, levels, np.float32, spread=0.0)
    got = dvalue_of(dout, arrays, levels)
    wide = {name: x.astype(np.float64) for name, x in arrays.items()}
    exact = dvalue_of(dout.astype(np.float64), wide, levels)
    assert_close(got, exact, 3e-6)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_products_are_not_rounded_to_a_narrower_format(monkeypatch, platform):
    """A matrix unit multiplies float32 as TF32 or bfloat16 unless told otherwise."""
    monkeypatch.setattr("jax_attn_bwd._core.targets.platform", lambda: platform)
    arrays, dout = crowd(5, ((2, 3),), np.float32)

    def backward(dout):
        return multi_scale_deformable_attention_bwd(
            dout, spatial_shapes=((2, 3),), implementation="xla", **arrays
        )

    program = str(jax.make_jaxpr(backward)(dout))
    assert program.count("dot_general[") == program.count("precision=(Precision.HIGHEST, ")
