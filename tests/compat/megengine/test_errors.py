"""Every error of `compat.megengine`."""

import numpy as np
import pytest
from compat.megengine.calls import E, H, L, N, S

from jax_attn_bwd.compat import megengine

CUDNN = dict(
    maybe_cudnn_style_mask=True, attn_mask=np.zeros((2, 3), int), key_padding_mask=np.zeros((2, 2), int)
)


ERRORS = {
    "length": (dict(io_weight_bias=np.zeros(7)), ValueError, "io_weight_bias must have 288 elements, got 7"),
    "no_weights": (dict(io_weight_bias=None), TypeError, "io_weight_bias must be a floating-point array"),
    "flag_alone": (dict(oproj_size=0), ValueError, "obias must be False where oproj_size is 0"),
    "heads": (dict(num_heads=3), ValueError, "qproj_size must be a multiple of num_heads = 3, got 8"),
    "value_heads": (dict(vproj_size=7), ValueError, "vproj_size must be a multiple of num_heads = 2"),
    "key_heads": (dict(kproj_size=6), ValueError, "kproj_size must make key heads as wide as query heads, 4"),
    "size": (dict(qproj_size=-8), ValueError, "qproj_size must be an int, 0 or more, got -8"),
    "embed_dim": (dict(embed_dim=9), ValueError, r"query must have shape \(N, L, embed_dim\) = \(2, 3, 9\)"),
    "rank": (dict(query=np.zeros(8)), ValueError, "query must have shape"),
    "key_rank": (dict(key=np.zeros((5, 8))), ValueError, r"key must have shape \(N, S, k_size\)"),
    "value_length": (dict(value=np.zeros((2, 4, 8))), ValueError, r"value must have shape \(N, S, v_size\)"),
    "bias_k_alone": (dict(bias_k=np.zeros((1, 1, 8))), ValueError, "bias_v must be given together"),
    "bias_v_alone": (dict(bias_v=np.zeros((1, 1, 8))), ValueError, "bias_k must be given together"),
    "row_shape": (
        dict(bias_k=np.zeros((1, 1, 4)), bias_v=np.zeros((1, 1, 8))),
        ValueError,
        r"bias_k must have shape \(1, 1, kproj_size or k_size\) = \(1, 1, 8\)",
    ),
    "reslink": (
        dict(oproj_size=0, obias=False, vproj_size=4, io_weight_bias=np.zeros(180), reslink=True),
        ValueError,
        "reslink must be False for an output of width 4 and a query of width 8",
    ),
    "narrow": (
        dict(num_heads=16, qproj_size=16, kproj_size=16, vproj_size=16, io_weight_bias=np.zeros(568)),
        ValueError,
        "embed_dim must be num_heads = 16 or more",
    ),
    "mask_shape": (
        dict(attn_mask=np.zeros((2, 3), bool)),
        ValueError,
        r"attn_mask must have shape \(L, S\) = \(3, 5\), got \(2, 3\); a mask in cudnn style needs",
    ),
    "mask_heads": (dict(attn_mask=np.zeros((2, 3, 5))), ValueError, r"shape \(N \* num_heads, L, S\)"),
    "padding_shape": (dict(key_padding_mask=np.zeros((5, 2))), ValueError, r"shape \(N, S\) = \(2, 5\)"),
    "integers": (dict(attn_mask=np.zeros((3, 5), int)), TypeError, "attn_mask must be boolean"),
    "cudnn_one": (CUDNN | dict(key_padding_mask=None), ValueError, "key_padding_mask must be given with"),
    "cudnn_none": (dict(maybe_cudnn_style_mask=True), ValueError, "attn_mask must be given with"),
    "cudnn_shape": (CUDNN | dict(attn_mask=np.zeros((3, 5), int)), ValueError, r"shape \(2, L\), with"),
    "cudnn_lengths": (CUDNN | dict(key_padding_mask=np.zeros((2, 5), int)), ValueError, r"shape \(2, N\)"),
    "cudnn_floats": (CUDNN | dict(attn_mask=np.zeros((2, 3))), TypeError, "attn_mask must be integers"),
    "dtypes": (dict(key=np.zeros((2, 5, 8), np.float32)), TypeError, "must have one dtype"),
    "no_key": (dict(out_drop=0.5), ValueError, "dropout_key must be given in training with attn_drop = 0.0"),
    "rate": (dict(attn_drop=-0.5), ValueError, r"attn_drop must lie in \[0, 1\]"),
    "flag": (dict(is_causal=1), TypeError, "is_causal must be a Python bool, got int"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input_gets_one_clear_error(name):
    wrong, error, words = ERRORS[name]
    arguments = {
        "query": np.zeros((N, L, E)),
        "key": np.zeros((N, S, E)),
        "value": np.zeros((N, S, E)),
        "embed_dim": E,
        "num_heads": H,
        "attn_drop": 0.0,
        "out_drop": 0.0,
        "io_weight_bias": np.zeros(288),
        "qbias": True,
        "kbias": True,
        "vbias": True,
        "obias": True,
    }
    with pytest.raises(error, match=f"^megengine.multi_head_attention: .*{words}"):
        megengine.multi_head_attention(**arguments | wrong)
