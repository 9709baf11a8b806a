"""The softmax inside the rule, and logits of minus infinity."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import assert_close, assert_trees_close, thorough
from ops.deformable.calls import LEVELS, evaluate, operator, sample

from jax_attn_bwd import multi_scale_deformable_attention


@thorough
def test_softmax_inside_the_rule_is_softmax_outside():
    arrays = sample(Q=7, P=3)
    logits = arrays["attention_weights"] * 5

    def outside(value, sampling_locations, logits):
        flat = jax.nn.softmax(logits.reshape(*logits.shape[:3], -1))
        weights = flat.reshape(logits.shape)
        return multi_scale_deformable_attention(value, LEVELS, sampling_locations, weights)

    def inside(value, sampling_locations, logits):
        return multi_scale_deformable_attention(
            value, LEVELS, sampling_locations, logits, normalize="softmax"
        )

    inputs = (arrays["value"], arrays["sampling_locations"], logits)
    dout = jnp.asarray(np.random.default_rng(9).standard_normal((1, 7, 4)))
    for shift in (0.0, 1e4, -1e4):
        got, pullback = jax.vjp(inside, *inputs[:2], logits + shift)
        expected, exact = jax.vjp(outside, *inputs)
        assert_close(got, expected, 1e-11)
        for a, b in zip(pullback(dout), exact(dout), strict=True):
            assert_close(a, b, 1e-11)


@thorough
def test_masked_logits_take_no_part():
    """-inf masks a point: as if it were not there, whatever its location; all masked gives 0."""
    arrays = sample(Q=5, P=3)
    hidden = np.random.default_rng(2).random(arrays["attention_weights"].shape) < 0.4
    hidden[0, 2] = True
    logits = jnp.where(hidden, -jnp.inf, arrays["attention_weights"])
    weights = jnp.where(hidden, 0, jnp.exp(arrays["attention_weights"]))
    total = weights.sum((3, 4), keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)
    options = {"spatial_shapes": LEVELS, "normalize": "softmax"}
    got = evaluate(operator.call, arrays | {"attention_weights": logits}, options)
    plain = arrays | {"attention_weights": weights}
    expected = evaluate(operator.call, plain, {"spatial_shapes": LEVELS})
    for name in ("out", "value", "sampling_locations"):
        assert_close(got[name], expected[name], 1e-13, name)
    np.testing.assert_array_equal(got["out"][0, 2], 0)
    for name in ("sampling_locations", "attention_weights"):
        np.testing.assert_array_equal(np.asarray(got[name])[hidden], 0)
    at = jnp.where(hidden[..., None], jnp.nan, arrays["sampling_locations"])
    poisoned = arrays | {"attention_weights": logits, "sampling_locations": at}
    assert_trees_close(evaluate(operator.call, poisoned, options), got, 1e-14)
