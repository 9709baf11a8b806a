"""Every error of the softmax and of CANN's calls of it: its type, and the words that help its reader."""

import numpy as np
import pytest
from contract.errors import (
    FLOAT_MASK,
    INTEGER_MASK,
    cann_backward,
    cann_forward,
    check,
    int32,
    ones,
    rows,
    softmax,
)

import jax_attn_bwd


def softmax_bwd(**changes):
    arguments = {"dy": ones(2, 3, 5, 7), "y": ones(2, 3, 5, 7)} | changes
    return jax_attn_bwd.scaled_masked_softmax_bwd(**arguments)


SHAPE_OF_X = r"broadcast to the shape of x = \(2, 3, 5, 7\)"
SOFTMAX = rows(
    ("x_integer", TypeError, "x must be a floating-point array, got dtype int32",
     {"x": ones(3, 7, dtype=int32)}),
    ("x_list", TypeError, "x must be a floating-point array, got list", {"x": [1.0, 2.0]}),
    ("x_scalar", ValueError, r"x must have at least one axis, got \(\)", {"x": np.float32(1)}),
    ("axis_above", ValueError, r"axis must lie in \[-4, 4\), got 4", {"axis": 4}),
    ("axis_below", ValueError, r"axis must lie in \[-4, 4\), got -5", {"axis": -5}),
    ("axis_float", TypeError, "axis must be an int, got float", {"axis": 1.0}),
    ("axis_boolean", TypeError, "axis must be an int, got bool", {"axis": True}),
    ("axis_tuple", TypeError, "axis must be an int, got tuple", {"axis": (2, 3)}),
    ("causal_axis_0", ValueError, "axis must be -1, .* with is_causal .*, got 0 for rank 4",
     {"axis": 0, "is_causal": True}),
    ("causal_rank_1", ValueError, "axis must be -1, and x have rows on axis -2.* for rank 1",
     {"x": ones(7), "is_causal": True}),
    ("window_axis_1", ValueError, "axis must be -1, .*local_window_size, got 1 for rank 4",
     {"axis": 1, "local_window_size": 2}),
    ("window_rank_1", ValueError, "axis must be -1, .* for rank 1",
     {"x": ones(7), "local_window_size": (1, 0)}),
    ("window_negative", ValueError, "local_window_size must .*, got -1",
     {"local_window_size": -1}),
    ("causal_integer", TypeError, "is_causal must be a Python bool, got int", {"is_causal": 1}),
    ("mask_float", TypeError, FLOAT_MASK, {"mask": ones(5, 7)}),
    ("mask_integer", TypeError, INTEGER_MASK, {"mask": ones(5, 7, dtype=int32)}),
    ("mask_shape", ValueError, rf"mask must {SHAPE_OF_X}, got \(7, 5\)",
     {"mask": ones(7, 5, dtype=bool)}),
    ("mask_rank", ValueError, rf"mask must {SHAPE_OF_X}, got \(1, 2, 3, 5, 7\)",
     {"mask": ones(1, 2, 3, 5, 7, dtype=bool)}),
    ("bias_integer", TypeError, "bias must be a floating-point array, got dtype int32",
     {"bias": ones(7, dtype=int32)}),
    ("bias_shape", ValueError, rf"bias must {SHAPE_OF_X}, got \(5,\)", {"bias": ones(5)}),
    ("sink_shape", ValueError,
     r"sink must broadcast to the shape of x without axis = \(2, 3, 5\), got \(7,\)",
     {"sink": ones(7)}),
    ("sink_shape_axis_1", ValueError,
     r"sink must broadcast to the shape of x without axis = \(2, 5, 7\), got \(3, 5, 7\)",
     {"sink": ones(3, 5, 7), "axis": 1}),
    ("sink_float", TypeError, "sink must be a floating-point array, got float", {"sink": 1.0}),
    ("scale_shape", ValueError, rf"scale must {SHAPE_OF_X}, got \(5,\)", {"scale": ones(5)}),
    ("scale_integers", TypeError, "scale must be a floating-point array, got dtype int32",
     {"scale": ones(7, dtype=int32)}),
    ("scale_string", TypeError, "scale must be a Python float, got str", {"scale": "2"}),
    ("scale_nan", ValueError, "scale must be finite, got nan", {"scale": float("nan")}),
    ("fully_masked_unknown", ValueError,
     r"fully_masked must be one of \('zero', 'uniform', 'nan'\), got 'mean'",
     {"fully_masked": "mean"}),
    ("implementation_unknown", ValueError, "implementation must be None or one of .*, got 'cuda'",
     {"implementation": "cuda"}),
    ("implementation_absent", NotImplementedError,
     "implementation='mosaic_gpu' cannot run this call: .*; implementation=None picks",
     {"implementation": "mosaic_gpu"}),
)  # fmt: skip


@pytest.mark.parametrize(("exception", "words", "arguments"), SOFTMAX)
def test_scaled_masked_softmax(exception, words, arguments):
    check(softmax, "scaled_masked_softmax", exception, words, arguments)


SOFTMAX_BWD = rows(
    ("dy_shape", ValueError, r"dy must have shape the shape of y = \(2, 3, 5, 7\), got \(5, 7\)",
     {"dy": ones(5, 7)}),
    ("dy_dtype", TypeError, "y, dy must have one dtype, got y float32, dy float16; cast",
     {"dy": ones(2, 3, 5, 7, dtype=np.float16)}),
    ("dy_integer", TypeError, "dy must be a floating-point array, got dtype int32",
     {"dy": ones(2, 3, 5, 7, dtype=int32)}),
    ("y_integer", TypeError, "y must be a floating-point array, got dtype int32",
     {"y": ones(2, 3, 5, 7, dtype=int32)}),
    ("scalar", ValueError, "y must have at least one axis",
     {"y": np.float32(1), "dy": np.float32(1)}),
    ("axis", ValueError, r"axis must lie in \[-4, 4\), got 7", {"axis": 7}),
    ("scale_shape", ValueError, r"scale must broadcast to .*, got \(5,\)", {"scale": ones(5)}),
    ("mask_float", TypeError, FLOAT_MASK, {"mask": ones(5, 7)}),
    ("mask_integer", TypeError, INTEGER_MASK, {"mask": ones(5, 7, dtype=int32)}),
    ("mask_shape", ValueError,
     r"mask must broadcast to the shape of y = \(2, 3, 5, 7\), got \(7, 5\)",
     {"mask": ones(7, 5, dtype=bool)}),
)  # fmt: skip


@pytest.mark.parametrize(("exception", "words", "arguments"), SOFTMAX_BWD)
def test_scaled_masked_softmax_bwd(exception, words, arguments):
    check(softmax_bwd, "scaled_masked_softmax_bwd", exception, words, arguments)


# The masked = True polarity of the source must not be contradicted by the message.
CANN = rows(
    ("mask_float", TypeError, "got dtype float32; write mask != 0 if non-zero means masked; nothing is",
     {"mask": ones(5, 7)}),
    ("mask_integer", TypeError, "mask must be boolean .*, got dtype int32",
     {"mask": ones(5, 7, dtype=int32)}),
    ("mask_shape", ValueError, r"mask must broadcast to .* = \(2, 3, 5, 7\), got \(7, 5\)",
     {"mask": ones(7, 5, dtype=bool)}),
    ("mask_rank", ValueError, r"mask must broadcast to .*, got \(1, 2, 3, 5, 7\)",
     {"mask": ones(1, 2, 3, 5, 7, dtype=bool)}),
    ("scale_array", TypeError, "scale must be a Python float", {"scale": ones(7)}),
    ("scale_infinite", ValueError, "scale must be finite, got inf", {"scale": float("inf")}),
    ("triu_integer", TypeError, "fix_triu_mask must be a Python bool, got int",
     {"fix_triu_mask": 1}),
)  # fmt: skip


@pytest.mark.parametrize(("exception", "words", "arguments"), CANN)
def test_cann_forward_and_backward(exception, words, arguments):
    check(cann_forward, "cann.scaled_masked_softmax", exception, words, arguments)
    name = "cann.scaled_masked_softmax_backward"
    check(cann_backward, name, exception, words, arguments)


def test_cann_does_not_state_the_opposite_polarity():
    """A message that said "True = attend" would send the caller of compat.cann the wrong way."""
    for call in (cann_forward, cann_backward):
        for mask in (ones(5, 7), ones(5, 7, dtype=int32)):
            with pytest.raises(TypeError) as caught:
                call(mask=mask)
            assert "attend" not in str(caught.value)
            assert "bias" not in str(caught.value)  # it has none


def test_cann_arrays():
    words = "x must be a floating-point array, got dtype int32"
    x = ones(3, 7, dtype=int32)
    check(cann_forward, "cann.scaled_masked_softmax", TypeError, words, {"x": x})
    words = r"x must have rows on axis -2 with fix_triu_mask, got \(7,\)"
    arguments = {"x": ones(7), "fix_triu_mask": True}
    check(cann_forward, "cann.scaled_masked_softmax", ValueError, words, arguments)

    name = "cann.scaled_masked_softmax_backward"
    words = "y must be a floating-point array, got dtype int32"
    check(cann_backward, name, TypeError, words, {"y": x})
    arguments = {"y": ones(7), "grad_output": ones(7), "fix_triu_mask": True}
    words = r"must have rows on axis -2 with fix_triu_mask, got \(7,\)"
    check(cann_backward, name, ValueError, words, arguments)


def test_cann_backward_names_its_own_arguments():
    """The caller wrote `grad_output`; `dy` is a name of another function."""
    name = "cann.scaled_masked_softmax_backward"
    words = r"grad_output must have shape .* = \(2, 3, 5, 7\), got \(5, 7\)"
    check(cann_backward, name, ValueError, words, {"grad_output": ones(5, 7)})
