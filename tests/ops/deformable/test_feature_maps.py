"""A value given as one feature map for each level."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from ops.deformable.calls import evaluate, operator, sample

from jax_attn_bwd import multi_scale_deformable_attention, multi_scale_deformable_attention_bwd


@pytest.mark.parametrize(
    "points", [pytest.param(3, id="rectangular", marks=thorough), pytest.param((2, 0, 5), id="ragged")]
)
def test_feature_maps_of_each_level(points):
    """A sequence of maps is the concatenated value; its gradient is a tuple of maps."""
    levels = ((3, 5), (2, 4), (1, 1))
    arrays = sample(levels, B=2, D=3, P=points)
    options = {"num_points": points} if isinstance(points, tuple) else {}
    expected = evaluate(operator.call, arrays, {"spatial_shapes": levels, **options})
    ends = np.cumsum([h * w for h, w in levels])[:-1]
    parts = jnp.split(arrays["value"], ends, axis=1)
    maps = tuple(x.reshape(2, *shape, 2, 3) for x, shape in zip(parts, levels, strict=True))
    rest = (levels, arrays["sampling_locations"], arrays["attention_weights"])
    dout = jnp.asarray(np.random.default_rng(9).standard_normal((2, 3, 6)))
    for sequence in (maps, list(maps)):
        out, pullback = jax.vjp(
            lambda maps: multi_scale_deformable_attention(maps, *rest, **options), sequence
        )
        assert_close(out, expected["out"], 1e-14)
        by_rule = multi_scale_deformable_attention_bwd(dout, sequence, *rest, **options).value
        assert isinstance(by_rule, tuple)
        for gradients in (pullback(dout)[0], by_rule):
            for gradient, x in zip(gradients, maps, strict=True):
                assert gradient.shape == x.shape
            flat = jnp.concatenate([x.reshape(2, -1, 2, 3) for x in gradients], 1)
            assert_close(flat, expected["value"], 1e-14)
