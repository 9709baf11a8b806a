"""Every error of `compat.torch`."""

import numpy as np
import pytest
from compat.torch.calls import arrays, call

from jax_attn_bwd.compat import torch as compat

ERRORS = {
    "heads": (dict(num_heads=4), ValueError, "embed_dim_to_check must be a multiple of num_heads = 4, got 6"),
    "embed_dim": (dict(embed_dim_to_check=9), ValueError, r"query must have shape \(L, N, E\) = \(4, 2, 9\)"),
    "query_rank": (dict(query=np.zeros((1, 2, 3, 6))), ValueError, "query must have shape"),
    "key_rank": (dict(key=np.zeros((5, 6))), ValueError, r"key must have shape \(S, N, E\), got \(5, 6\)"),
    "key_width": (dict(key=np.zeros((5, 2, 3))), ValueError, r"key must have shape \(S, N, E\)"),
    "value_length": (dict(value=np.zeros((4, 2, 6))), ValueError, "value must have shape"),
    "packed": (dict(in_proj_weight=np.zeros((6, 6))), ValueError, "in_proj_weight must have shape"),
    "no_weight": (dict(in_proj_weight=None), TypeError, "in_proj_weight must be a floating"),
    "no_separate_weight": (dict(use_separate_proj_weight=True), TypeError, "q_proj_weight must be"),
    "bias_k_alone": (dict(bias_k=np.zeros((1, 1, 6))), ValueError, "bias_v must be given together"),
    "bias_v_alone": (dict(bias_v=np.zeros((1, 1, 6))), ValueError, "bias_k must be given together"),
    "row_shape": (dict(bias_k=np.zeros(6), bias_v=np.zeros(6)), ValueError, "bias_k must have shape"),
    "static_and_row": (
        dict(bias_k=np.zeros((1, 1, 6)), bias_v=np.zeros((1, 1, 6)), static_v=np.zeros((6, 5, 2))),
        ValueError,
        "static_v must be None together with bias_k and bias_v",
    ),
    "static_shape": (dict(static_v=np.zeros((6, 5, 3))), ValueError, "static_v must have shape"),
    "static_length": (dict(static_k=np.zeros((6, 7, 2))), ValueError, "value must have the length S = 7"),
    "hint_alone": (dict(is_causal=True), ValueError, "attn_mask must be given with is_causal=True"),
    "mask_shape": (dict(attn_mask=np.zeros((5, 4), bool)), ValueError, r"attn_mask must have shape \(L, S\)"),
    "mask_heads": (dict(attn_mask=np.zeros((3, 4, 5))), ValueError, r"shape \(N \* num_heads, L, S\)"),
    "padding_shape": (dict(key_padding_mask=np.zeros((5, 2), bool)), ValueError, r"shape \(N, S\)"),
    "integers": (dict(attn_mask=np.zeros((4, 5), int)), TypeError, "attn_mask must be boolean"),
    "dtypes": (dict(key=np.zeros((5, 2, 6), np.float32)), TypeError, "must have one dtype"),
    "no_key": (dict(dropout_p=0.5), ValueError, "dropout_key must be given in training with dropout_p = 0.5"),
    "seed_unused": (dict(training=False, dropout_key=17), TypeError, "dropout_key must be one JAX"),
    "seed": (dict(dropout_p=0.5, dropout_key=17), TypeError, "dropout_key must be one JAX"),
    "rate": (dict(dropout_p=1.5), ValueError, r"dropout_p must lie in \[0, 1\], got 1.5"),
    "flag": (dict(need_weights=1), TypeError, "need_weights must be a Python bool, got int"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input_gets_one_clear_error(name):
    wrong, error, words = ERRORS[name]
    with pytest.raises(error, match=f"^torch.multi_head_attention_forward: .*{words}"):
        call(compat.multi_head_attention_forward, {**arrays(frozenset({"plain"})), **wrong})
