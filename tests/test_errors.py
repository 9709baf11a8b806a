"""Every error a public function can raise: its type, and the words that help whoever reads it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_attn_bwd
from jax_attn_bwd.compat import cann

B, T, S, N, K, H, HV = 2, 5, 7, 6, 3, 4, 8


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


QUERY, KEY, VALUE = ones(B, T, N, H), ones(B, S, K, H), ones(B, S, K, HV)
DOUT, LSE = ones(B, T, N, HV), ones(B, T, N)


def attention(**changes):
    arguments = {"query": QUERY, "key": KEY, "value": VALUE} | changes
    return jax_attn_bwd.dot_product_attention(**arguments)


def attention_bwd(**changes):
    arguments = {"query": QUERY, "key": KEY, "value": VALUE}
    arguments |= {"dout": DOUT, "out": DOUT, "lse": LSE} | changes
    return jax_attn_bwd.dot_product_attention_bwd(**arguments)


def softmax(**changes):
    return jax_attn_bwd.scaled_masked_softmax(**({"x": ones(2, 3, 5, 7)} | changes))


def softmax_bwd(**changes):
    arguments = {"dy": ones(2, 3, 5, 7), "y": ones(2, 3, 5, 7)} | changes
    return jax_attn_bwd.scaled_masked_softmax_bwd(**arguments)


def cann_forward(**changes):
    return cann.scaled_masked_softmax(**({"x": ones(2, 3, 5, 7), "mask": None} | changes))


def cann_backward(**changes):
    arguments = {"grad_output": ones(2, 3, 5, 7), "y": ones(2, 3, 5, 7), "mask": None} | changes
    return cann.scaled_masked_softmax_backward(**arguments)


def graph_attention(**options):
    graph = jax_attn_bwd.BipartiteCSC.from_coo([0, 2, 1], [1, 0, 1], 3, 2)
    return jax_attn_bwd.graph_attention(graph, ones(3, 4), None, ones(8), **options)


def multi_head_attention(**options):
    params = jax_attn_bwd.MultiHeadAttentionParams()
    return jax_attn_bwd.multi_head_attention(params, ones(B, T, H), **options)


def check(call, operator, exception, words, arguments):
    """The message starts with the operator's name and holds `words` in their order.

    `exception` is a pair where "wrong kind" and "out of range" fit equally well.
    """
    allowed = exception if isinstance(exception, tuple) else (exception,)
    with pytest.raises(allowed) as caught:
        call(**{name: x() if callable(x) else x for name, x in arguments.items()})
    assert type(caught.value) in allowed  # not a subclass from deep inside JAX
    text = str(caught.value)
    assert re.match(rf"{re.escape(operator)}: ", text), text
    assert re.search(words, text), text
    assert "\n" not in text


def rows(*entries):
    """(id, exception, words, arguments) as parameters; ids are unique."""
    names = [entry[0] for entry in entries]
    assert len(set(names)) == len(names)
    return [pytest.param(*entry[1:], id=entry[0]) for entry in entries]


PLANE = r"broadcast to \[\.\.\., N, T, S\] = \(2, 6, 5, 7\)"
STATIC = "under jax.jit name it in static_argnames"
FLOAT_MASK = r"mask must be boolean \(True = attend\), got dtype float32; pass additive .* as bias"
INTEGER_MASK = r"mask must be boolean .*, got dtype int32; write mask != 0"
int32 = np.int32


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
    ("scale_array", TypeError, "scale must be a Python float, got .*; multiply query",
     {"scale": jnp.asarray(0.5)}),
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
    ("deterministic_none", TypeError, "deterministic must be a Python bool, got NoneType",
     {"deterministic": None}),
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
    ("rate_array", TypeError, "dropout_rate must be a Python float, got .*; a traced rate",
     {"dropout_rate": jnp.asarray(0.1)}),
    ("batch_of_keys", TypeError, "dropout_key must be one JAX random key, got key<fry>",
     {"dropout_rate": 0.5, "dropout_key": two_keys}),
    ("key_of_three_words", TypeError, r"dropout_key must be one JAX random key, got uint32\[3\]",
     {"dropout_rate": 0.5, "dropout_key": ones(3, dtype=np.uint32)}),
    ("batch_of_raw_keys", TypeError, r"dropout_key must be one JAX random key, got uint32\[3, 2\]",
     {"dropout_rate": 0.5, "dropout_key": ones(3, 2, dtype=np.uint32)}),
    ("key_is_a_seed", TypeError, r"dropout_key must be one JAX random key, got int; jax\.random",
     {"dropout_rate": 0.5, "dropout_key": 17}),
    ("key_without_rate", TypeError, "dropout_key must be one JAX random key, got str; jax",
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
     r"implementation must be None or one of \('mosaic_tpu', 'mosaic_gpu', 'xla'\), got 'cudnn'",
     {"implementation": "cudnn"}),
    ("implementation_elsewhere", NotImplementedError,
     "implementation='mosaic_tpu' cannot run this call: .*; implementation=None picks",
     {"implementation": "mosaic_tpu"}),
    ("implementation_absent", NotImplementedError,
     "implementation='triton' cannot run this call: .*; implementation=None picks",
     {"implementation": "triton"}),
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


def test_dot_product_attention_traced_options():
    """A traced rate, scale or flag is refused by name, not by a tracer error of JAX."""
    for argument, words in (
        ("dropout_rate", "dropout_rate must be a Python float, .*; a traced rate"),
        ("scale", "scale must be a Python float, .*; multiply query"),
        ("is_causal", "is_causal must be a Python bool"),
        ("local_window_size", "local_window_size must be a non-negative int"),
    ):
        traced = jax.jit(lambda x, argument=argument: attention(**{argument: x}))
        words = f"{words}.*{STATIC}"
        check(lambda f=traced: f(jnp.float32(0.5)), "dot_product_attention", TypeError, words, {})
    for name, exception, call in (
        ("scaled_masked_softmax", TypeError, lambda n: softmax(axis=n)),
        ("graph_attention", TypeError, lambda n: graph_attention(num_heads=n)),
        ("multi_head_attention", ValueError, lambda n: multi_head_attention(num_heads=n)),
    ):
        traced = jax.jit(call)
        check(lambda f=traced: f(2), name, exception, STATIC, {})


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


def test_explain_of_a_function_without_operator():
    with pytest.raises(ValueError, match=r"explain: .* calls no operator of jax_attn_bwd"):
        jax_attn_bwd.explain(jnp.sin, jnp.ones(3))


@pytest.fixture
def explicit_mesh():
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


def on_mesh(specs: dict, **sizes):
    """Query, key and value of a batch of 4, sharded."""
    n, k = sizes.get("N", 8), sizes.get("K", 4)
    shapes = {"query": (4, 12, n, 5), "key": (4, 16, k, 5), "value": (4, 16, k, 3)}
    return {name: jax.device_put(ones(*shapes[name]), specs[name]) for name in shapes}


def alike(spec):
    return dict.fromkeys(("query", "key", "value"), spec)


@pytest.mark.parametrize("argument", ["query", "key", "value"])
def test_explicit_mesh_with_a_sharded_sequence(explicit_mesh, argument):
    arrays = on_mesh(alike(P("b")) | {argument: P("b", "h")})
    words = rf"{argument} must not be sharded along its sequence.*, got .*'h'.*; .*shard_map"
    check(attention, "dot_product_attention", ValueError, words, arrays)


def test_explicit_mesh_with_a_sharded_head_size(explicit_mesh):
    arrays = on_mesh(alike(P("b")))
    arrays["query"] = jax.device_put(ones(4, 12, 8, 8), P("b", None, None, "h"))
    arrays["key"] = jax.device_put(ones(4, 16, 4, 8), P("b"))
    words = "query must not be sharded along .* head size, got .*'h'.*; reshard it"
    check(attention, "dot_product_attention", ValueError, words, arrays)


def test_explicit_mesh_with_operands_sharded_differently(explicit_mesh):
    arrays = on_mesh(alike(P("b")) | {"value": P(None)})
    words = "value must be sharded like query, .*'b'.*, in batch and heads, got .*; reshard it"
    check(attention, "dot_product_attention", ValueError, words, arrays)


def test_explicit_mesh_whose_head_axis_does_not_divide_the_key_heads(explicit_mesh):
    """8 query heads split over 4, 2 key heads: "reshard it" would be advice nobody can follow."""
    arrays = on_mesh(alike(P("b")) | {"query": P("b", None, "h")}, K=2)
    words = "key heads K must be a multiple of the size 4 of mesh axis 'h', got 2; .*repeat key"
    check(attention, "dot_product_attention", ValueError, words, arrays)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ({"query_kernel": P(None, "b")}, r"params\.query_kernel .* along N over 'b', which shards the batch"),
        ({"value_bias": P(("h", "b"))}, r"params\.value_bias .* along K over 'b', which shards the batch"),
        ({"out_kernel": P(None, None, "b")}, r"params\.out_kernel .* along Eo over 'b', which shards the"),
        (
            {n: P(None, "h") for n in ("query_kernel", "key_kernel", "value_kernel")}
            | {"out_kernel": P("h"), "out_bias": P("h")},
            r"params\.out_bias .* along Eo over 'h', which shards heads",
        ),
    ],
    ids=["heads", "pair", "width", "heads_and_width"],
)  # fmt: skip
def test_explicit_mesh_with_one_axis_for_two_things(explicit_mesh, place, words):
    """Once it is resharded the layer runs, forward and backward."""
    kernels = dict.fromkeys(("query_kernel", "key_kernel", "value_kernel"), ones(8, 8, 4))
    rest = {"value_bias": ones(8, 4), "out_kernel": ones(8, 4, 16), "out_bias": ones(16)}
    query = jax.device_put(ones(4, 6, 8), P("b"))

    def gradients(specs):
        arrays = {n: jax.device_put(x, specs.get(n, P())) for n, x in (kernels | rest).items()}
        params = jax_attn_bwd.MultiHeadAttentionParams(**arrays)
        loss = lambda params: jnp.sin(jax_attn_bwd.multi_head_attention(params, query)).sum()  # noqa: E731
        return jax.grad(loss)(params)

    with pytest.raises(ValueError, match=rf"{words}.*, got .*; reshard it .*two axes of the mesh"):
        gradients(place)
    *_, last = place
    assert getattr(gradients(place | {last: P()}), last).sharding.is_fully_replicated
