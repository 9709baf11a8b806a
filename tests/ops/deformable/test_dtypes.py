"""Narrow values beside wide locations; dtypes of gradients."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from ops.deformable.small import LEVELS, B, D, M, Q, first_order, sample

from jax_attn_bwd import multi_scale_deformable_attention


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=thorough)])
def test_locations_stay_float32_beside_a_narrow_value(dtype):
    """A row of 167 pixels 0, 1, 0, 1, ...: the output tells where the sample was taken.

    Locations rounded to bfloat16 are wrong by up to a third of a pixel, and some gradients have the
    wrong sign; float32 locations are not touched whatever the dtype of the value.
    """
    W = 167
    rng = np.random.default_rng(0)
    x = rng.integers(0, W - 1, 400) + rng.uniform(0.05, 0.95, 400)
    exact = np.where(x.astype(int) % 2, 1 - x % 1, x % 1)
    slope = np.where(x.astype(int) % 2, -W, W)
    value = jnp.asarray(np.arange(W) % 2, dtype).reshape(1, W, 1, 1)
    weights = jnp.ones((1, 400, 1, 1, 1), np.float32)

    def run(location_dtype):
        at = np.stack([(x + 0.5) / W, np.full(400, 0.5)], -1).reshape(1, 400, 1, 1, 1, 2)
        at = jnp.asarray(at, np.float32).astype(location_dtype)
        out, pullback = jax.vjp(
            lambda at: multi_scale_deformable_attention(value, ((1, W),), at, weights), at
        )
        (gradient,) = pullback(jnp.ones_like(out))
        assert (out.dtype, gradient.dtype) == (value.dtype, location_dtype)
        error = np.abs(np.asarray(out, np.float64).ravel() - exact)
        return error.max(), np.asarray(gradient, np.float64)[..., 0].ravel()

    error, gradient = run(np.float32)
    assert error < 2.0**-8
    assert_close(gradient, slope, 1e-6)
    with pytest.warns(UserWarning, match="sampling_locations in bfloat16 are off by up to W / 256 pixels"):
        error, gradient = run(jnp.bfloat16)
    assert 0.25 < error < 0.35
    assert (np.sign(gradient) != np.sign(slope)).any()


def test_every_gradient_has_the_dtype_of_its_argument():
    """And sums are taken in the widest of them."""
    run = first_order({"spatial_shapes": LEVELS})
    dout = np.random.default_rng(4).integers(-8, 9, (B, Q, M * D)).astype(np.float64)
    for value_dtype, dtype in (("float64", "float32"), ("float32", "float64"), ("float16", "bfloat16")):
        arrays = {name: jnp.asarray(x, dtype) for name, x in sample().items()}
        arrays["value"] = arrays["value"].astype(value_dtype)
        got = run(arrays, dout)
        exact = run({name: x.astype(np.float64) for name, x in arrays.items()}, dout)
        assert got["out"].dtype == value_dtype
        for name, x in arrays.items():
            assert got[name].dtype == x.dtype
        for name, x in got.items():
            assert_close(x.astype(np.float64), exact[name], float(jnp.finfo(x.dtype).eps), name)
