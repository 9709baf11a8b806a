"""Tables of any kind, static tables, calls without jit."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close
from ops.deformable.small import LEVELS, B, M, Q, first_order, sample

from jax_attn_bwd import multi_scale_deformable_attention


@pytest.mark.parametrize(
    "shapes",
    [LEVELS, [list(x) for x in LEVELS], np.array(LEVELS), np.array(LEVELS, np.uint8)],
    ids=["tuple", "list", "int64", "uint8"],
)
def test_spatial_shapes_of_any_kind(shapes):
    arrays = sample()
    value, at, weights = arrays.values()
    expected = multi_scale_deformable_attention(value, LEVELS, at, weights)
    for table in (shapes, jnp.asarray(shapes)):
        call = jax.jit(lambda *a, t=table: multi_scale_deformable_attention(a[0], t, *a[1:]))
        np.testing.assert_array_equal(call(value, at, weights), expected)
    starts = np.array([0, 12])
    got = multi_scale_deformable_attention(value, shapes, at, weights, level_start_index=starts)
    np.testing.assert_array_equal(got, expected)


def test_spatial_shapes_as_a_static_argument():
    value, at, weights = sample().values()
    call = jax.jit(multi_scale_deformable_attention, static_argnums=1)
    expected = multi_scale_deformable_attention(value, LEVELS, at, weights)
    np.testing.assert_array_equal(call(value, LEVELS, at, weights), expected)


def test_without_jit():
    arrays = sample()
    arrays["value"] = arrays["value"][..., :1]
    dout = np.random.default_rng(4).standard_normal((B, Q, M))
    expected = first_order({"spatial_shapes": LEVELS})(arrays, dout)
    with jax.disable_jit():
        got = first_order({"spatial_shapes": LEVELS})(arrays, jnp.asarray(dout))
    assert_trees_close(got, expected, 1e-13)
