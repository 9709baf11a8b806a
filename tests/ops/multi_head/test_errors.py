"""Every error of the multi-head layer."""

import jax.numpy as jnp
import pytest
from ops.multi_head.calls import EK, EO, EQ, EV, HV, B, H, K, N, S, T, draw, inputs, layer

from jax_attn_bwd import MultiHeadAttentionParams, multi_head_attention, multi_head_attention_bwd
from jax_attn_bwd.ops.multi_head.spec import MultiHeadAttentionResidual


def error(words, exception=ValueError, id=None, **changes):
    return pytest.param(words, exception, changes, id=id or words)


ERRORS = [
    error("params must be a MultiHeadAttentionParams, got dict", TypeError, params={}),
    error("params.query_bias must be None where params.query_kernel is None",
          params=layer("query_kernel")),
    error("params.out_bias must be None where params.out_kernel is None", params=layer("out_kernel")),
    error("params.bias_v must be given together with params.bias_k", params=layer("bias_v")),
    error("params.bias_k must be given together with params.bias_v", params=layer("bias_k")),
    error("params.key_kernel must have shape [Ek, K, H], got", params=layer(key_kernel=draw(EK, 6))),
    error("params.key_kernel must have H = 3, as params.query_kernel, got 4",
          params=layer("key_bias", "bias_k", "bias_v", key_kernel=draw(EK, K, 4))),
    error("params.key_kernel must have Ek = 7, as key, got 6", params=layer(key_kernel=draw(6, K, H))),
    error("query heads N must be a positive multiple of the key heads K, got 4; params.key_kernel has K = 3",
          params=layer("key_bias", "value_bias", "bias_k", "bias_v", key_kernel=draw(EK, 3, H),
                       value_kernel=draw(EV, 3, HV))),
    error("params.query_kernel must have N = 3, as num_heads, got 4", num_heads=3),
    error("num_heads must be given where neither query nor the output is projected",
          params=MultiHeadAttentionParams(), key=None, value=None),
    error("key, which has no kernel, must have H = 3, as params.query_kernel, got 7",
          params=layer("key_kernel", "key_bias")),
    error("value must have shape [..., S, Ev] = (2, 7, 8), got (2, 6, 8)", value=draw(B, 6, EV)),
    error("mask must be boolean (True = attend), got dtype float64; pass additive values as bias", TypeError,
          mask=draw(T, S)),
    error("mask must broadcast to [..., N, T, S] = (2, 4, 5, 7), got (7, 5)", mask=draw(S, T) > 0),
    error("bias must be a floating-point array", TypeError, bias=draw(T, S) > 0),
    error("must have one dtype", TypeError, query=draw(B, T, EQ).astype("float32")),
    error("the output, with add_residual, must have the width 6 of query", add_residual=True),
    error("dropout_key must be given when dropout_rate = 0.0, out_dropout_rate = 0.1", out_dropout_rate=0.1),
    error("dropout_key must be one JAX random key, got int", TypeError, dropout_key=0),
    error("dropout_offset must be (batch, head, row, column), got 3", dropout_offset=3),
    error("save must be one of ('inputs', 'qkv', 'probs'), got 'all'", save="all"),
    error("scale must be a Python float", TypeError, scale=jnp.ones((), bool)),
    error("is_causal must be a Python bool", TypeError, is_causal=1),
    error("query_seq_lengths must lie in [0, 5], got 2 to 6", query_seq_lengths=[6, 2]),
    error("key_value_seq_lengths must broadcast to [...] = (2,), got (3,)", key_value_seq_lengths=[1, 2, 3]),
    error("key_value_segment_ids must be given together with query_segment_ids",
          query_segment_ids=jnp.zeros((B, T), int)),
    error("key_value_segment_ids must broadcast to [..., S] = (2, 7), got (2, 5)",
          query_segment_ids=jnp.zeros((B, T), int), key_value_segment_ids=jnp.zeros((B, T), int)),
    error("query_positions must be integers, got dtype float64", TypeError, query_positions=draw(T)),
    error("logits_soft_cap must be positive, got 0.0", logits_soft_cap=0.0),
    error("logits_soft_cap must be a Python float", TypeError, logits_soft_cap=jnp.ones(())),
    error("precision must be None, a jax.lax.Precision", precision="exact"),
    error("deterministic_sums must be None or a Python bool", TypeError, deterministic_sums="no"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "exception", "changes"), ERRORS)
def test_one_clear_error(words, exception, changes):
    q, k, v = inputs()
    arguments = {"params": layer(), "query": q, "key": k, "value": v} | changes
    with pytest.raises(exception) as raised:
        multi_head_attention(**arguments)
    assert str(raised.value).startswith("multi_head_attention: ")
    assert words in str(raised.value)


BWD_ERRORS = [
    error("dout must have shape [..., T, Eo] = (2, 5, 9), got (2, 5, 8)", dout=draw(B, T, 8)),
    error("wrt must name some of", wrt=("kernel",)),
    error("wrt must name arguments that were given, got 'bias', which is None", wrt=("bias",)),
    error("dweights must have shape", dweights=draw(B, N, T, S)),
    error(
        "residual must be what the forward of the same arguments and save='qkv' returned",
        save="qkv",
        residual=MultiHeadAttentionResidual(draw(B, T, N, HV), draw(B, T, N), draw(B, T, N), None, None),
    ),
    error(
        "residual must be what the forward of the same arguments and save='inputs' returned",
        residual=MultiHeadAttentionResidual(
            draw(B, T, N, HV).astype("float32"), draw(B, T, N), draw(B, T, N), None, None
        ),
    ),
    error("residual must be what the forward", residual=(draw(B, T, N, HV),) * 5),
]


@pytest.mark.parametrize(("words", "exception", "changes"), BWD_ERRORS)
def test_one_clear_error_of_the_backward(words, exception, changes):
    q, k, v = inputs()
    arguments = {"dout": draw(B, T, EO), "params": layer(), "query": q, "key": k, "value": v}
    with pytest.raises(exception) as raised:
        multi_head_attention_bwd(**{**arguments, **changes})
    assert str(raised.value).startswith("multi_head_attention_bwd: ")
    assert words in str(raised.value)
