"""Calls of deformable attention: what it takes, and what is refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from layers.deformable_cases import LEVELS, B, C, L, M, Q, S, build, call_with, inputs, torch_state
from layers.frameworks import FRAMEWORKS

from jax_attn_bwd.layers.deformable import encoder_reference_points, from_torch


def test_any_batch_axes(rng):
    params, layer = from_torch(torch_state(rng)), build("flax_linen")
    query, points, value, mask = inputs(rng, masked=True)
    call = lambda *arrays: layer.call(params, *arrays[:3], LEVELS, arrays[3])
    expected = call(query, points, value, mask)
    assert_close(call(query[0], points[0], value[0], mask[0]), expected[0], 1e-13)
    nested = [x.reshape(B, 1, *x.shape[1:]) for x in (query, points, value, mask)]
    assert_close(call(*nested)[:, 0], expected, 1e-13)


def test_reference_points_may_be_wider_than_the_rest(rng):
    params, layer, (query, points, value, _) = from_torch(torch_state(rng)), build("flax_linen"), inputs(rng)
    rest = jax.tree.map(lambda x: jnp.asarray(x, "float32"), (params, query, value))
    call = lambda params, query, value: layer.call(params, query, points, value, LEVELS)
    assert points.dtype == "float64"
    assert jax.eval_shape(call, *rest).dtype == "float32"


def test_points_and_masks_of_all_pictures(rng):
    params, layer = from_torch(torch_state(rng)), build("flax_linen")
    query, points, value, mask = inputs(rng, masked=True)
    call = lambda points, mask: layer.call(params, query, points, value, LEVELS, mask)
    every = jnp.broadcast_to(points[:1], points.shape)
    assert_close(call(points[:1], mask[:1]), call(every, jnp.broadcast_to(mask[:1], mask.shape)), 0)
    assert_close(call(points[:1, :, :1], mask[0]), call(every[:, :, :1], mask[:1]), 0)


def test_reference_points_of_an_encoder(rng):
    """They are those that the loop of Deformable-DETR makes."""
    ratios = rng.uniform(0.5, 1, (B, L, 2))
    got = jax.jit(encoder_reference_points, static_argnums=(0, 2))(LEVELS, ratios, "float64")
    expected = []
    for level, (height, width) in enumerate(LEVELS):
        y, x = np.meshgrid(np.arange(height) + 0.5, np.arange(width) + 0.5, indexing="ij")
        x = x.reshape(1, -1) / (ratios[:, level, :1] * width)
        y = y.reshape(1, -1) / (ratios[:, level, 1:] * height)
        expected.append(np.stack([x, y], -1))
    expected = np.concatenate(expected, 1)[:, :, None] * ratios[:, None]
    assert got.shape == (B, S, L, 2)
    assert_close(got, expected, 1e-15)
    whole = encoder_reference_points(LEVELS, np.ones((1, L, 2)), "float64")
    alike = encoder_reference_points(LEVELS, dtype="float64")
    assert alike.shape == (1, S, 1, 2)
    assert_close(jnp.broadcast_to(alike, whole.shape), whole, 0)
    with pytest.raises(ValueError, match=r"^encoder_reference_points: valid_ratios must have shape"):
        encoder_reference_points(LEVELS, ratios[..., :1])


def test_no_queries_and_no_pictures(rng):
    params, layer = from_torch(torch_state(rng)), build("flax_linen")
    query, points, value, mask = inputs(rng, masked=True)
    assert layer.call(params, query[:, :0], points[:, :0], value, LEVELS, mask).shape == (B, 0, C)
    empty = [x[:0] for x in (query, points, value)]
    assert layer.call(params, *empty, LEVELS, mask[:0]).shape == (0, Q, C)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"query": jnp.zeros((B, Q, C + 1))}, ValueError, r"query must have shape \[..., Q, C\] with C = 6"),
        ({"query": jnp.zeros((B, Q, C), int)}, TypeError, "query must be a floating-point array"),
        (
            {"points": jnp.zeros((B, Q, 3))},
            ValueError,
            r"reference_points must .* \(2, 7, 3, '2 or 4'\).*got \(2, 7, 3\)",
        ),
        ({"points": jnp.zeros((B, Q, 2, 2))}, ValueError, "reference_points must"),
        ({"points": jnp.zeros((B + 1, Q, 3, 2))}, ValueError, "reference_points must"),
        ({"points": jnp.zeros((B, 1, 3, 2))}, ValueError, "reference_points must"),
        ({"points": jnp.zeros(())}, ValueError, "reference_points must"),
        ({"value": jnp.zeros((B, S + 1, C))}, ValueError, r"value must .* \(2, 25, 6\), got \(2, 26, 6\)"),
        ({"shapes": LEVELS[:2]}, ValueError, "spatial_shapes must hold one .* of the 3 levels"),
        ({"shapes": ((3, 5), (4,), (2, 3))}, ValueError, "spatial_shapes must be a rectangular table"),
        ({"shapes": ((3.9, 5.0), (4, 2), (2, 3))}, TypeError, "spatial_shapes must be integers"),
        ({"shapes": ((0, 5), (4, 2), (2, 3))}, ValueError, "spatial_shapes must be positive"),
        ({"options": {"num_heads": True}}, TypeError, "num_heads must be a positive int, got bool"),
        ({"mask": jnp.zeros((B, S))}, TypeError, "mask must be a boolean .*True = keep.* got dtype float"),
        ({"mask": jnp.zeros(L, int)}, TypeError, "got dtype int64; a level_start_index is left out"),
        ({"mask": jnp.zeros((B, S, 1), bool)}, ValueError, r"mask must broadcast to \[..., S\]"),
        ({"mask": jnp.zeros((B, 1), bool)}, ValueError, r"mask must tell of each of the S = 25 pixels"),
        ({"options": {"num_heads": 4}}, ValueError, "features must be a multiple of the 4 heads, got 6"),
        ({"options": {"num_points": (1, 2)}}, ValueError, "num_points must .* of the 3 levels"),
        ({"options": {"num_points": 0}}, ValueError, "num_points must be a positive int"),
        ({"options": {"attention_fn": "sharded"}}, TypeError, "attention_fn must be a function .* got str"),
        ({"options": {"num_levels": 0}}, ValueError, "num_levels must be a positive int"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_errors(changed, error, message):
    with pytest.raises(error, match=message):
        call_with(**changed)


def test_traced_spatial_shapes_are_refused():
    with pytest.raises(TypeError, match=r"spatial_shapes must be concrete, got a traced array"):
        jax.jit(lambda shapes: call_with(shapes=shapes))(jnp.array(LEVELS))


def test_array_of_spatial_shapes():
    np.testing.assert_array_equal(call_with(shapes=np.array(LEVELS)), call_with())


@pytest.mark.parametrize(
    ("framework", "width"),
    list(zip(FRAMEWORKS, ("features", "in_features", "model_size", "query_size"), strict=True)),
)
def test_every_framework_passes_on_its_arguments(framework, width):
    """Each wrong value is refused under its own name, the width's in the words of the framework."""
    wrong = {
        width: ({"num_heads": 4}, ValueError),
        "padding_mode": ({"padding_mode": "wrap"}, ValueError),
        "method": ({"method": "nearest"}, ValueError),
        "forward_mode": ({"forward_mode": 1}, TypeError),
        "deterministic_sums": ({"deterministic_sums": 1}, TypeError),
        "'mine'": ({"implementation": "mine"}, ValueError),
    }
    for name, (options, error) in wrong.items():
        with pytest.raises(error, match=name):
            call_with(framework, options)


def test_equinox_asks_for_vmap():
    pytest.importorskip("equinox")
    from jax_attn_bwd.layers.equinox import MultiScaleDeformableAttention

    layer = MultiScaleDeformableAttention(M, C, num_levels=L, key=jax.random.key(0))
    query, points, value, _ = inputs(np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"query must have shape \[Q, C\].*use jax.vmap"):
        layer(query, points, value, LEVELS)


def test_counts_may_be_numpy_integers(rng):
    params = from_torch(torch_state(rng))
    query, points, value = inputs(rng)[:3]
    expected = build("flax_linen").call(params, query, points, value, LEVELS)
    counts = {"num_heads": np.int64(M), "num_levels": np.int32(L), "num_points": np.array([2] * L)}
    assert_close(build("flax_linen", **counts).call(params, query, points, value, LEVELS), expected, 0)
