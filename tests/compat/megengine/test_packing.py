"""Weights and biases in one array, and back."""

import jax
import numpy as np
import pytest
from compat.megengine.calls import ALL, E, H, draw

from jax_attn_bwd.compat import megengine


@pytest.mark.parametrize(
    ("sizes", "flags"),
    [
        ((8, 8, 8, 8), ALL),
        ((0, 16, 6, 0), (False, True, False, False)),
        ((8, 8, 0, 5), (False, False, False, True)),
    ],
    ids=["all", "key_and_value", "no_value"],
)
def test_packing_round_trip(sizes, flags):
    packed = draw(sizes, flags)["io_weight_bias"]
    parts = megengine.unpack_io_weight_bias(packed, E, H, *sizes, *flags, k_size=6, v_size=10)
    widths = (E, 6, 10, sizes[2] or H * 10)
    for name, size, flag, width in zip(("query", "key", "value", "out"), sizes, flags, widths, strict=True):
        weight, bias = getattr(parts, f"{name}_weight"), getattr(parts, f"{name}_bias")
        assert weight is None if size == 0 else weight.shape == (width, size)
        assert bias.shape == (size,) if flag else bias is None
    first = next(x for x in parts if x is not None)
    np.testing.assert_array_equal(first.ravel(), packed[0, : first.size])
    np.testing.assert_array_equal(megengine.pack_io_weight_bias(*parts), packed)
    shaped = megengine.unpack_io_weight_bias(packed[0], E, H, *sizes, *flags, k_size=6, v_size=10)
    jax.tree.map(np.testing.assert_array_equal, shaped, parts)


PACKING_ERRORS = {
    "nothing": (lambda: megengine.pack_io_weight_bias(), ValueError, "at least one weight must be given"),
    "bias_alone": (
        lambda: megengine.pack_io_weight_bias(np.ones((2, 2)), out_bias=np.ones(2)),
        ValueError,
        "out_bias must be None without out_weight",
    ),
    "bias_width": (
        lambda: megengine.pack_io_weight_bias(np.ones((2, 3)), query_bias=np.ones(2)),
        ValueError,
        r"query_bias must have shape \(out,\) of its weight = \(3,\)",
    ),
    "rank": (lambda: megengine.pack_io_weight_bias(np.ones(2)), ValueError, "query_weight must have shape"),
    "length": (
        lambda: megengine.unpack_io_weight_bias(np.ones(255), E, H),
        ValueError,
        r"io_weight_bias must have 256 elements, got 255; it holds query_weight \(8, 8\)",
    ),
}


@pytest.mark.parametrize("name", PACKING_ERRORS)
def test_bad_packing_gets_one_clear_error(name):
    function, error, words = PACKING_ERRORS[name]
    with pytest.raises(error, match=words):
        function()
