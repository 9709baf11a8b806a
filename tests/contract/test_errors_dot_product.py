"""Every error of dense attention: its type, and the words that help whoever reads it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.errors import (
    FLOAT_MASK,
    HV,
    INTEGER_MASK,
    B,
    H,
    K,
    N,
    S,
    T,
    attention,
    check,
    int32,
    ones,
    rows,
)

import jax_attn_bwd

DOUT, LSE = ones(B, T, N, HV), ones(B, T, N)
PLANE = r"broadcast to \[\.\.\., N, T, S\] = \(2, 6, 5, 7\)"


def attention_bwd(**changes):
    arguments = {"query": ones(B, T, N, H), "key": ones(B, S, K, H), "value": ones(B, S, K, HV)}
    arguments |= {"dout": DOUT, "out": DOUT, "lse": LSE} | changes
    return jax_attn_bwd.dot_product_attention_bwd(**arguments)


def two_keys():
    """Made when a test runs, not when it is collected."""
    return jax.random.split(jax.random.key(0))


ATTENTION = rows(
    # query, key, value
    ("query_integer", TypeError, "query must be a floating-point array, got dtype int32",
     {"query": ones(B, T, N, H, dtype=int32)}),
    ("query_list", TypeError, "query must be a floating-point array, got list",
     {"query": [[[1.0]]]}),
    ("key_complex", TypeError, "key must be a floating-point array, got dtype complex64",
     {"key": ones(B, S, K, H, dtype=np.complex64)}),
    ("value_none", TypeError, "value must be a floating-point array, got NoneType",
     {"value": None}),
    ("float8", TypeError,
     "query must be of dtype bfloat16, float16, float32 or float64, got float8_e4m3fn; cast it",
     {"query": ones(B, T, N, H, dtype=jnp.float8_e4m3fn)}),
    ("float4_bias", TypeError, "bias must be of dtype bfloat16, .*, got float4_e2m1fn",
     {"bias": ones(T, S, dtype=jnp.float4_e2m1fn)}),
    ("mixed_dtypes", TypeError,
     "query, key, value must have one dtype, got query float32, key float16, value float32; cast",
     {"key": ones(B, S, K, H, dtype=np.float16)}),
    ("query_rank_2", ValueError,
     r"query must have shape \[\.\.\., T, N, H\], got \(5, 4\)", {"query": ones(T, H)}),
    ("key_rank_2", ValueError,
     r"key must have shape \[\.\.\., S, K, H\], got \(7, 4\)", {"key": ones(S, H)}),
    ("value_rank_2", ValueError,
     r"value must have shape \[\.\.\., S, K, Hv\], got \(7, 8\)", {"value": ones(S, HV)}),
    ("key_head_size", ValueError,
     r"key must have shape \[\.\.\., S, K, H\] = \(2, 7, 3, 4\), got \(2, 7, 3, 9\)",
     {"key": ones(B, S, K, 9)}),
    ("key_batch", ValueError,
     r"key must have shape .* = \(2, 7, 3, 4\), got \(3, 7, 3, 4\)", {"key": ones(3, S, K, H)}),
    ("key_batch_rank", ValueError, r"key must have shape .*, got \(7, 3, 4\)",
     {"key": ones(S, K, H)}),
    ("key_batch_of_one", ValueError,
     r"key must have shape .*, got \(1, 7, 3, 4\)", {"key": ones(1, S, K, H)}),
    ("value_length", ValueError,
     r"value must have shape \[\.\.\., S, K, Hv\] = \(2, 7, 3, 8\), got \(2, 9, 3, 8\)",
     {"value": ones(B, 9, K, HV)}),
    ("value_heads", ValueError,
     r"value must have shape .* = \(2, 7, 3, 8\), got \(2, 7, 6, 8\)",
     {"value": ones(B, S, N, HV)}),
    ("heads_not_a_multiple", ValueError,
     "query heads N must be a positive multiple of the key heads K, got 6; "
     r"key and value have K = 4; the layout is \[\.\.\., T, N, H\]",
     {"key": ones(B, S, 4, H), "value": ones(B, S, 4, HV)}),
    ("fewer_query_heads", ValueError, "query heads N must be a positive multiple .*, got 6; .* K = 12",
     {"key": ones(B, S, 12, H), "value": ones(B, S, 12, HV)}),
    ("no_key_heads", ValueError, "query heads N must be a positive multiple .*, got 6; .* K = 0",
     {"key": ones(B, S, 0, H), "value": ones(B, S, 0, HV)}),
    # bias, mask, sink
    ("mask_float", TypeError, FLOAT_MASK, {"mask": ones(B, 1, T, S)}),
    ("mask_integer", TypeError, INTEGER_MASK, {"mask": ones(B, 1, T, S, dtype=int32)}),
    ("mask_list", TypeError, "mask must be boolean .*, got list, not an array; .*bias", {"mask": [True]}),
    ("mask_transposed", ValueError, rf"mask must {PLANE}, got \(2, 1, 7, 5\)",
     {"mask": ones(B, 1, S, T, dtype=bool)}),
    ("mask_square", ValueError, rf"mask must {PLANE}, got \(7, 7\)",
     {"mask": ones(S, S, dtype=bool)}),
    ("mask_rank", ValueError, rf"mask must {PLANE}, got \(3, 2, 6, 5, 7\)",
     {"mask": ones(3, B, N, T, S, dtype=bool)}),
    ("mask_key_heads", ValueError, rf"mask must {PLANE}, got \(2, 3, 5, 7\)",
     {"mask": ones(B, K, T, S, dtype=bool)}),
    ("bias_boolean", TypeError, "bias must be a floating-point array, got dtype bool",
     {"bias": ones(T, S, dtype=bool)}),
    ("bias_shape", ValueError, rf"bias must {PLANE}, got \(2, 6, 7, 5\)",
     {"bias": ones(B, N, S, T)}),
    ("sink_shape", ValueError, r"sink must have shape \[N\] = \(6,\), got \(3,\)",
     {"sink": ones(K)}),
    ("sink_scalar", ValueError, r"sink must have shape \[N\] = \(6,\), got \(\)",
     {"sink": np.float32(1)}),
    ("sink_integer", TypeError, "sink must be a floating-point array, got dtype int32",
     {"sink": ones(N, dtype=int32)}),
    # lengths, segments, positions
    ("query_lengths_shape", ValueError,
     r"query_seq_lengths must broadcast to \[\.\.\.\] = \(2,\), got \(3,\)",
     {"query_seq_lengths": ones(3, dtype=int32)}),
    ("key_lengths_shape", ValueError,
     r"key_value_seq_lengths must broadcast to \[\.\.\.\] = \(2,\), got \(2, 1\)",
     {"key_value_seq_lengths": ones(B, 1, dtype=int32)}),
    ("query_lengths_float", TypeError, "query_seq_lengths must be integers, got dtype float32",
     {"query_seq_lengths": ones(B)}),
    ("key_lengths_float", TypeError, "key_value_seq_lengths must be integers, got dtype float32",
     {"key_value_seq_lengths": ones(B)}),
    ("key_lengths_boolean", TypeError, "key_value_seq_lengths must be integers, got dtype bool",
     {"key_value_seq_lengths": ones(B, dtype=bool)}),
    ("query_lengths_long", ValueError, r"query_seq_lengths must lie in \[0, 5\], got 2 to 6",
     {"query_seq_lengths": np.array([6, 2])}),
    ("query_lengths_negative", ValueError, r"query_seq_lengths must lie in \[0, 5\], got -1 to -1",
     {"query_seq_lengths": -1}),
    ("key_lengths_long", ValueError, r"key_value_seq_lengths must lie in \[0, 7\], got 0 to 8",
     {"key_value_seq_lengths": [0, 8]}),
    ("key_lengths_negative", ValueError, r"key_value_seq_lengths must lie in \[0, 7\], got -5 to 7",
     {"key_value_seq_lengths": lambda: jnp.asarray([-5, 7])}),
    ("query_segments_shape", ValueError,
     r"query_segment_ids must broadcast to \[\.\.\., T\] = \(2, 5\), got \(2, 7\)",
     {"query_segment_ids": ones(B, S, dtype=int32),
      "key_value_segment_ids": ones(B, S, dtype=int32)}),
    ("key_segments_shape", ValueError,
     r"key_value_segment_ids must broadcast to \[\.\.\., S\] = \(2, 7\), got \(2, 5\)",
     {"query_segment_ids": ones(B, T, dtype=int32),
      "key_value_segment_ids": ones(B, T, dtype=int32)}),
    ("segments_float", TypeError, "query_segment_ids must be integers, got dtype float32",
     {"query_segment_ids": ones(B, T), "key_value_segment_ids": ones(B, S)}),
    ("only_query_segments", ValueError,
     "key_value_segment_ids must be given together with query_segment_ids, got None",
     {"query_segment_ids": ones(B, T, dtype=int32)}),
    ("only_key_segments", ValueError,
     "query_segment_ids must be given together with key_value_segment_ids, got None",
     {"key_value_segment_ids": ones(B, S, dtype=int32)}),
    ("query_positions_shape", ValueError,
     r"query_positions must broadcast to \[\.\.\., T\] = \(2, 5\), got \(7,\)",
     {"query_positions": ones(S, dtype=int32)}),
    ("key_positions_shape", ValueError,
     r"key_value_positions must broadcast to \[\.\.\., S\] = \(2, 7\), got \(3, 7\)",
     {"key_value_positions": ones(3, S, dtype=int32)}),
    ("positions_float", TypeError, "query_positions must be integers, got dtype float32",
     {"query_positions": ones(T)}),
    # numbers and flags
    ("scale_array", ValueError, r"scale must be one number, got shape \(6,\); multiply query",
     {"scale": ones(N)}),
    ("scale_complex", TypeError, "scale must be a Python float, got complex", {"scale": np.asarray(1j)}),
    ("scale_array_nan", ValueError, "scale must be finite, got nan", {"scale": lambda: jnp.asarray(np.nan)}),
    ("scale_string", TypeError, "scale must be a Python float, got str", {"scale": "0.5"}),
    ("scale_boolean", TypeError, "scale must be a Python float, got bool", {"scale": True}),
    ("scale_nan", ValueError, "scale must be finite, got nan", {"scale": float("nan")}),
    ("scale_infinite", ValueError, "scale must be finite, got inf", {"scale": float("inf")}),
    ("cap_zero", ValueError, r"logits_soft_cap must be positive, got 0\.0",
     {"logits_soft_cap": 0.0}),
    ("cap_negative", ValueError, r"logits_soft_cap must be positive, got -2\.0",
     {"logits_soft_cap": -2.0}),
    ("cap_nan", ValueError, "logits_soft_cap must be finite, got nan",
     {"logits_soft_cap": float("nan")}),
    ("cap_array", TypeError, "logits_soft_cap must be a Python float",
     {"logits_soft_cap": ones(1)}),
    ("window_negative", ValueError,
     "local_window_size must be a non-negative int or a pair .*, got -1",
     {"local_window_size": -1}),
    ("window_negative_side", ValueError, r"local_window_size must .*, got \(1, -2\)",
     {"local_window_size": (1, -2)}),
    ("window_of_three", ValueError, r"local_window_size must .* pair .*, got \(1, 2, 3\)",
     {"local_window_size": (1, 2, 3)}),
    ("window_float", (TypeError, ValueError), r"local_window_size must .* int .*, got 2\.0",
     {"local_window_size": 2.0}),
    ("window_array", (TypeError, ValueError), "local_window_size must .* int",
     {"local_window_size": ones(2)}),
    ("causal_integer", TypeError, "is_causal must be a Python bool, got int", {"is_causal": 1}),
    ("causal_array", TypeError, "is_causal must be a Python bool, got ",
     {"is_causal": jnp.asarray(True)}),
    ("deterministic_sums_integer", TypeError, "deterministic_sums must be None or a Python bool, got int",
     {"deterministic_sums": 1}),
    ("precision_unknown", ValueError, "precision must .*, got 'exact'", {"precision": "exact"}),
    ("precision_dict", ValueError, r"precision must .*, got \{\}", {"precision": {}}),
    ("positions_far", ValueError, r"query_positions must lie in \[-1073741824, 1073741824\], got 0 to 21",
     {"query_positions": np.array([0] * (T - 1) + [2**31 - 1])}),
    ("scale_too_large", ValueError, r"scale must be finite in float32, got 1e\+39", {"scale": 1e39}),
    ("scale_huge_int", ValueError, "scale must be finite in float32, got an int of 333 bits",
     {"scale": 10**100}),
    ("cap_too_large", ValueError, r"logits_soft_cap must be finite in float32, got 1e\+39",
     {"logits_soft_cap": 1e39}),
    # dropout
    ("no_dropout_key", ValueError,
     r"dropout_key must be given when dropout_rate = 0\.5 > 0, got None; pass jax\.random\.key",
     {"dropout_rate": 0.5}),
    ("rate_above_one", ValueError, r"dropout_rate must lie in \[0, 1\], got 1\.5",
     {"dropout_rate": 1.5}),
    ("rate_negative", ValueError, r"dropout_rate must lie in \[0, 1\], got -0\.1",
     {"dropout_rate": -0.1}),
    ("rate_nan", ValueError, "dropout_rate must be finite, got nan",
     {"dropout_rate": float("nan")}),
    ("rate_array", TypeError, r"dropout_rate must be a Python float, got .*; pass float\(dropout_rate\)$",
     {"dropout_rate": jnp.asarray(0.1)}),
    ("batch_of_keys", TypeError, r"dropout_key .*, got key<fry>\[.\]; pass one of them, or .* jax\.vmap",
     {"dropout_rate": 0.5, "dropout_key": two_keys}),
    ("key_of_three_words", TypeError, r"dropout_key must be one JAX random key, got uint32\[3\]",
     {"dropout_rate": 0.5, "dropout_key": ones(3, dtype=np.uint32)}),
    ("batch_of_raw_keys", TypeError, r"dropout_key .*, got uint32\[3, 2\]; pass one of them, or",
     {"dropout_rate": 0.5, "dropout_key": ones(3, 2, dtype=np.uint32)}),
    ("key_is_a_seed", TypeError, r"dropout_key must be one JAX random key, got int; pass jax\.random",
     {"dropout_rate": 0.5, "dropout_key": 17}),
    ("key_without_rate", TypeError, "dropout_key must be one JAX random key, got str; pass jax",
     {"dropout_key": "nonsense"}),
    ("offset_without_rate", ValueError, "dropout_offset batch must lie in .*, got -1 to -1",
     {"dropout_offset": (-1, 0, 0, 0)}),
    ("broadcast_integer", TypeError, "broadcast_dropout must be a Python bool, got int",
     {"broadcast_dropout": 1}),
    ("offset_of_three", ValueError,
     r"dropout_offset must be \(batch, head, row, column\), got \(0, 0, 0\)",
     {"dropout_rate": 0.5, "dropout_key": ones(2, dtype=np.uint32), "dropout_offset": (0, 0, 0)}),
    ("offset_negative", ValueError, r"dropout_offset row must lie in \[0, 2147483647\], got -3 to -3",
     {"dropout_rate": 0.5, "dropout_key": ones(2, dtype=np.uint32),
      "dropout_offset": (0, 0, -3, 0)}),
    ("offset_scalar", ValueError, r"dropout_offset must be \(batch, head, row, column\), got 4",
     {"dropout_rate": 0.5, "dropout_key": ones(2, dtype=np.uint32), "dropout_offset": 4}),
    ("offset_float", TypeError, "dropout_offset head must be integers, got dtype float",
     {"dropout_rate": 0.5, "dropout_key": ones(2, dtype=np.uint32),
      "dropout_offset": (0, 0.5, 0, 0)}),
    ("offset_batch_array", ValueError, r"dropout_offset batch must be a scalar, got \(2,\)",
     {"dropout_rate": 0.5, "dropout_key": ones(2, dtype=np.uint32),
      "dropout_offset": (ones(B, dtype=int32), 0, 0, 0)}),
    ("offset_row_shape", ValueError,
     r"dropout_offset row must be a scalar or of shape \(5,\), got \(7,\)",
     {"dropout_rate": 0.5, "dropout_key": ones(2, dtype=np.uint32),
      "dropout_offset": (0, 0, ones(S, dtype=int32), 0)}),
    ("offset_column_shape", ValueError,
     r"dropout_offset column must be a scalar or of shape \(7,\), got \(5,\)",
     {"dropout_rate": 0.5, "dropout_key": ones(2, dtype=np.uint32),
      "dropout_offset": (0, 0, 0, ones(T, dtype=int32))}),
    # implementations
    ("implementation_unknown", ValueError,
     r"implementation must be None or one of \('mosaic_tpu', .*'xla'\), got 'triton'",
     {"implementation": "triton"}),
    ("implementation_elsewhere", NotImplementedError,
     "implementation='mosaic_tpu' cannot run this call: .*; implementation=None picks",
     {"implementation": "mosaic_tpu"}),
)  # fmt: skip


@pytest.mark.parametrize(("exception", "words", "arguments"), ATTENTION)
def test_dot_product_attention(exception, words, arguments):
    check(attention, "dot_product_attention", exception, words, arguments)


@pytest.mark.parametrize(("exception", "words", "arguments"), ATTENTION)
def test_dot_product_attention_bwd_as_the_forward(exception, words, arguments):
    check(attention_bwd, "dot_product_attention_bwd", exception, words, arguments)


def test_dot_product_attention_return_residual():
    words = "return_residual must be a Python bool, got int"
    check(attention, "dot_product_attention", TypeError, words, {"return_residual": 1})


BACKWARD = rows(
    ("wrt_unknown", ValueError, r"wrt must name some of \('query', 'key'.*, got 'mask'",
     {"wrt": ("query", "mask")}),
    ("wrt_misspelt_string", ValueError, "wrt must name some of .*, got 'keys'", {"wrt": "keys"}),
    ("wrt_not_given", ValueError, "wrt must name arguments that were given, got 'bias'.* None",
     {"wrt": ("bias",)}),
    ("dout_shape", ValueError,
     r"dout must have shape \[\.\.\., T, N, Hv\] = \(2, 5, 6, 8\), got \(2, 5, 6, 4\)",
     {"dout": ones(B, T, N, H)}),
    ("out_shape", ValueError,
     r"out must have shape \[\.\.\., T, N, Hv\] = \(2, 5, 6, 8\), got \(2, 6, 5, 8\)",
     {"out": ones(B, N, T, HV)}),
    ("lse_shape", ValueError,
     r"lse must have shape \[\.\.\., T, N\] = \(2, 5, 6\), got \(2, 6, 5\)",
     {"lse": ones(B, N, T)}),
    ("dlse_shape", ValueError, r"dlse must have shape .* = \(2, 5, 6\), got \(2, 5, 6, 1\)",
     {"dlse": ones(B, T, N, 1)}),
    ("dout_integer", TypeError, "dout must be a floating-point array, got dtype int32",
     {"dout": ones(B, T, N, HV, dtype=int32)}),
    ("lse_integer", TypeError, "lse must be a floating-point array, got dtype int32",
     {"lse": ones(B, T, N, dtype=int32)}),
    ("dout_dtype", TypeError, "query, dout, out must have one dtype, .* dout float16.*; cast",
     {"dout": ones(B, T, N, HV, dtype=np.float16)}),
)  # fmt: skip


@pytest.mark.parametrize(("exception", "words", "arguments"), BACKWARD)
def test_dot_product_attention_bwd(exception, words, arguments):
    check(attention_bwd, "dot_product_attention_bwd", exception, words, arguments)
