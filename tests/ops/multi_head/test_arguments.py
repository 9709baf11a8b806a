"""Counts of NumPy, and what `explain` tells."""

import numpy as np
from helpers import assert_close
from ops.multi_head.calls import EQ, B, T, draw, inputs, layer

from jax_attn_bwd import MultiHeadAttentionParams, explain, multi_head_attention


def test_num_heads_may_be_an_integer_of_numpy():
    x = draw(B, T, EQ)
    out = multi_head_attention(MultiHeadAttentionParams(), x, num_heads=np.int64(2))
    assert_close(out, multi_head_attention(MultiHeadAttentionParams(), x, num_heads=2), 0)


def test_explain_tells_of_the_attention_inside():
    reasons = explain(multi_head_attention, layer(), *inputs())
    assert reasons["xla"] == "ok"
    assert "gpu" in reasons["mosaic_gpu"]
