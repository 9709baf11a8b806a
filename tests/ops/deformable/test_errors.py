"""Every error of multi-scale deformable attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.errors import check, ones, rows
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_attn_bwd

LEVELS = ((3, 4), (2, 1))
B, Q, M, D, POINTS = 2, 5, 3, 4, 2
VALUE, AT, WEIGHTS = ones(B, 14, M, D), ones(B, Q, M, 2, POINTS, 2), ones(B, Q, M, 2, POINTS)
MAPS = [ones(B, 3, 4, M, D), ones(B, 2, 1, M, D)]
DOUT = ones(B, Q, M * D)


def deformable(**changes):
    arguments = {"value": VALUE, "spatial_shapes": LEVELS, "sampling_locations": AT}
    arguments |= {"attention_weights": WEIGHTS} | changes
    return jax_attn_bwd.multi_scale_deformable_attention(**arguments)


def deformable_bwd(**changes):
    arguments = {"value": VALUE, "spatial_shapes": LEVELS, "sampling_locations": AT}
    arguments |= {"attention_weights": WEIGHTS, "dout": DOUT} | changes
    return jax_attn_bwd.multi_scale_deformable_attention_bwd(**arguments)


RAGGED = {"sampling_locations": ones(B, Q, M, 5, 2), "attention_weights": ones(B, Q, M, 5)}


FORWARD = rows(
    # value
    ("value_integer", TypeError, "value must be a floating-point array, got dtype int32",
     {"value": ones(B, 14, M, D, dtype=np.int32)}),
    ("value_none", TypeError, "value must be a floating-point array, got NoneType",
     {"value": None}),
    ("value_rank", ValueError,
     r"value must have shape \[B, S, M, D\] with S = 14, the pixels .*, got \(14, 3, 4\)",
     {"value": ones(14, M, D)}),
    ("levels_do_not_sum", ValueError, r"value must .* S = 14, .*, got \(2, 15, 3, 4\)",
     {"value": ones(B, 15, M, D)}),
    ("maps_missing", ValueError, "value must hold one feature map for each of the 2 levels, got 1",
     {"value": MAPS[:1]}),
    ("maps_none", ValueError, "value must hold one feature map for .* 2 levels, got 0",
     {"value": ()}),
    ("map_integer", TypeError, r"value\[1\] must be a floating-point array, got dtype int32",
     {"value": [MAPS[0], ones(B, 2, 1, M, D, dtype=np.int32)]}),
    ("map_transposed", ValueError,
     r"value\[0\] must have shape \[B, H, W, M, D\] = \(2, 3, 4, 3, 4\), got \(2, 4, 3, 3, 4\)",
     {"value": [ones(B, 4, 3, M, D), MAPS[1]]}),
    ("map_rank", ValueError, r"value\[0\] must have shape \[B, H, W, M, D\] .*got \(2, 12, 3, 4\)",
     {"value": [ones(B, 12, M, D), MAPS[1]]}),
    ("map_flat", ValueError,
     r"value\[0\] must have shape \[B, H, W, M, D\] with \[H, W\] = \(3, 4\), got \(2, 12, 3, 4\)",
     {"value": [ones(B, 12, M, D), MAPS[1]]}),
    ("map_heads", ValueError, r"value\[1\] must have .* = \(2, 2, 1, 3, 4\), got \(2, 2, 1, 6, 4\)",
     {"value": [MAPS[0], ones(B, 2, 1, 6, D)]}),
    ("map_dtypes", TypeError, r"value\[0\], value\[1\] must have one dtype, .* float16; cast",
     {"value": [MAPS[0], ones(B, 2, 1, M, D, dtype=np.float16)]}),
    # spatial_shapes, level_start_index
    ("shapes_of_floats", TypeError, "spatial_shapes must be integers, got dtype float64",
     {"spatial_shapes": np.array(LEVELS, float)}),
    ("shapes_none", TypeError, "spatial_shapes must be integers", {"spatial_shapes": None}),
    ("shapes_flat", ValueError, r"spatial_shapes must hold one \(H, W\) .*, got shape \(2,\)",
     {"spatial_shapes": (3, 4)}),
    ("shapes_of_three", ValueError, r"spatial_shapes must hold one \(H, W\) .*, got shape \(1, 3\)",
     {"spatial_shapes": ((3, 4, 1),)}),
    ("shapes_empty", ValueError, r"spatial_shapes must hold one \(H, W\) .*, got shape \(0,\)",
     {"spatial_shapes": ()}),
    ("shapes_uneven", ValueError, r"spatial_shapes must be a rectangular table, got .*; pass \(\(H",
     {"spatial_shapes": ((3, 4), (2,))}),
    ("level_without_pixels", ValueError, r"spatial_shapes must be positive, got \(\(3, 4\), \(0, 2",
     {"spatial_shapes": ((3, 4), (0, 2))}),
    ("too_many_pixels", ValueError, r"spatial_shapes must hold fewer than 2\*\*31 pixels in all",
     {"spatial_shapes": ((40000, 40000), (40000, 40000))}),
    ("starts_of_another_order", ValueError,
     r"level_start_index must be the running sum \[0, 12\] of H \* W, got \[0, 2\]; None will do",
     {"level_start_index": np.array([0, 2])}),
    ("starts_with_the_end", ValueError, r"level_start_index .*\[0, 12\].*, got \[0, 12, 14\]",
     {"level_start_index": [0, 12, 14]}),
    ("starts_of_floats", TypeError, "level_start_index must be integers, got dtype float64",
     {"level_start_index": [0.0, 12.0]}),
    # sampling_locations, attention_weights
    ("locations_integer", TypeError, "sampling_locations must be a floating-point array, got dtype",
     {"sampling_locations": ones(B, Q, M, 2, POINTS, 2, dtype=np.int32)}),
    ("weights_integer", TypeError, "attention_weights must be a floating-point array, got dtype",
     {"attention_weights": ones(B, Q, M, 2, POINTS, dtype=np.int32)}),
    ("locations_of_three", ValueError,
     r"sampling_locations .* \[B, Q, M, L, P, 2\] = \(2, 5, 3, 2, 2, 2\), got \(2, 5, 3, 2, 2, 3\)",
     {"sampling_locations": ones(B, Q, M, 2, POINTS, 3)}),
    ("locations_of_other_points", ValueError, r"sampling_locations must .*, got \(2, 5, 3, 2, 3, 2\)",
     {"sampling_locations": ones(B, Q, M, 2, 3, 2)}),
    ("batch", ValueError,
     r"attention_weights .* \[B, Q, M, L, P\] = \(1, 5, 3, 2, 2\), got \(2, 5, 3, 2, 2\)",
     {"value": ones(1, 14, M, D)}),
    ("batch_of_locations", ValueError, r"sampling_locations must have shape .*, got \(1, 5, 3,",
     {"sampling_locations": AT[:1]}),
    ("heads", ValueError, r"attention_weights .* = \(2, 5, 6, 2, 2\), got \(2, 5, 3, 2, 2\)",
     {"value": ones(B, 14, 6, D)}),
    ("levels_of_weights", ValueError,
     r"attention_weights must have shape \[B, Q, M, L, P\] with L = 1, got .*; for a ragged",
     {"spatial_shapes": ((2, 7),)}),
    ("ragged_without_counts", ValueError,
     r"attention_weights .*, got \(2, 5, 3, 5\); for a ragged .* give num_points=\(P_1", RAGGED),
    # num_points
    ("points_do_not_add_up", ValueError,
     r"attention_weights .* sum of num_points\] = \(2, 5, 3, 6\), got \(2, 5, 3, 5\)",
     RAGGED | {"num_points": (2, 4)}),
    ("points_and_levels", ValueError,
     r"attention_weights must have shape \[B, Q, M, sum of num_points\], got \(2, 5, 3, 2, 2\)",
     {"num_points": (2, 2)}),
    ("points_int", ValueError, "num_points must hold a count, .*, for each of the 2 levels, got 5",
     RAGGED | {"num_points": 5}),
    ("points_short", ValueError, r"num_points must hold a count, .* 2 levels, got \(5,\)",
     RAGGED | {"num_points": (5,)}),
    ("points_negative", ValueError, r"num_points must hold a count, 0 or more, .*, got \(6, -1\)",
     RAGGED | {"num_points": (6, -1)}),
    ("points_of_floats", TypeError, "num_points must be integers, got dtype float64",
     RAGGED | {"num_points": (2.0, 3.0)}),
    # options
    ("padding_mode", ValueError,
     r"padding_mode must be one of \('zeros', 'border'\), got 'reflection'",
     {"padding_mode": "reflection"}),
    ("method", ValueError, r"method must be one of \('bilinear', 'discrete'\), got 'default'",
     {"method": "default"}),
    ("normalize", ValueError, "normalize must be None or 'softmax', got True",
     {"normalize": True}),
    ("deterministic_sums", TypeError, "deterministic_sums must be None or a Python bool, got int",
     {"deterministic_sums": 1}),
    ("implementation_unknown", ValueError, "implementation must be None or one of .*, got 'cuda'",
     {"implementation": "cuda"}),
    ("implementation_absent", NotImplementedError,
     "implementation='mosaic_tpu' cannot run this call: .*; implementation=None picks",
     {"implementation": "mosaic_tpu"}),
)  # fmt: skip


@pytest.mark.parametrize(("exception", "words", "arguments"), FORWARD)
def test_forward_and_backward(exception, words, arguments):
    check(deformable, "multi_scale_deformable_attention", exception, words, arguments)
    check(deformable_bwd, "multi_scale_deformable_attention_bwd", exception, words, arguments)


BACKWARD = rows(
    ("dout_integer", TypeError, "dout must be a floating-point array, got dtype int32",
     {"dout": ones(B, Q, M * D, dtype=np.int32)}),
    ("dout_shape", ValueError,
     r"dout must have shape \[B, Q, M \* D\] = \(2, 5, 12\), got \(2, 5, 3, 4\)",
     {"dout": ones(B, Q, M, D)}),
    ("dout_dtype", TypeError, "value, dout must have one dtype, .* dout float16; cast",
     {"dout": ones(B, Q, M * D, dtype=np.float16)}),
    ("wrt_unknown", ValueError, "wrt must name some of .*'value'.*, got 'location'",
     {"wrt": ("location",)}),
    ("wrt_number", TypeError, "wrt must name some of .*, got 1", {"wrt": 1}),
)  # fmt: skip


@pytest.mark.parametrize(("exception", "words", "arguments"), BACKWARD)
def test_backward_alone(exception, words, arguments):
    check(deformable_bwd, "multi_scale_deformable_attention_bwd", exception, words, arguments)


def test_the_argument_that_follows_from_the_shapes_is_not_taken_by_position():
    """The order of Deformable-DETR's function."""
    words = "by name; 5 were given by position; level_start_index is given by name, or left out: it follows"
    call = lambda: jax_attn_bwd.multi_scale_deformable_attention(VALUE, LEVELS, [0, 12], AT, WEIGHTS)
    with pytest.raises(TypeError, match=words):
        call()


def test_pixels_for_locations_warn_where_they_are_known():
    pixels = AT * np.array([3.5, 2.5], np.float32)
    with pytest.warns(
        UserWarning, match=r"sampling_locations all lie outside .* from 0 to 1 .*\+ 0\.5\) / \(W"
    ):
        deformable(sampling_locations=pixels)
    pixels[-1, -1, -1, -1, -1] = 0.5
    deformable(sampling_locations=pixels)
    jax.jit(lambda x: deformable(sampling_locations=x)).trace(AT * 5)


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ("spatial_shapes", r"pass \(\(H, W\), \.\.\.\), known at trace time"),
        ("level_start_index", "None will do"),
    ],
)
def test_traced_tables(argument, remedy):
    table = jnp.asarray([0, 12]) if argument == "level_start_index" else jnp.asarray(LEVELS)
    words = f"{argument} must be concrete, got a traced array; {remedy}"
    traced = jax.jit(lambda x: deformable(**{argument: x}))
    check(lambda: traced(table), "multi_scale_deformable_attention", TypeError, words, {})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"sampling_locations": P("b", "h")},
            r"sampling_locations must be sharded like value, \('b', 'h'\), in batch and heads, got",
        ),
        ({"value": P("b", None, None, "h")}, "value must be sharded along batch, heads, .* alone"),
        (
            {"attention_weights": P("b")},
            r"attention_weights must be sharded like value, \('b', 'h'\), in batch and heads, got",
        ),
    ],
    ids=["queries", "channels", "otherwise"],
)
def test_shardings_on_an_explicit_mesh(changes, words):
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    arrays = {
        "value": ones(4, 14, 4, 4),
        "sampling_locations": ones(4, 8, 4, 2, 2, 2),
        "attention_weights": ones(4, 8, 4, 2, 2),
    }
    specs = dict.fromkeys(arrays, P("b", None, "h")) | changes
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(x, specs[name]) for name, x in arrays.items()}
        check(deformable, "multi_scale_deformable_attention", ValueError, words, placed)


def test_feature_map_split_along_its_width_on_an_explicit_mesh():
    mesh = jax.make_mesh((4,), ("w",), axis_types=(AxisType.Explicit,))
    words = r"value\[0\] must be sharded along batch, heads, and queries or pixels alone"
    with jax.set_mesh(mesh):
        maps = [jax.device_put(MAPS[0], P(None, None, "w")), jax.device_put(MAPS[1], P())]
        check(deformable, "multi_scale_deformable_attention", ValueError, words, {"value": maps})
