"""Every error of `compat.bnns`."""

import numpy as np
import pytest
from compat.bnns.calls import B, Triple, backward, inputs, layer

from jax_attn_bwd.compat import bnns

F, (Q, K, V, DOUT) = layer(), inputs()


ERRORS = {
    "layer": (dict(F=(1, 2)), TypeError, "F must be a BNNSLayer"),
    "triple": (dict(F=F._replace(key=None)), TypeError, "F.key must be a BNNSMHAProjectionParameters"),
    "no_weights": (dict(F=F._replace(key=Triple())), TypeError, "F.key.weights must be a floating-point"),
    "weights": (
        dict(F=F._replace(key=F.key._replace(weights=F.key.weights[:, 1:]))),
        ValueError,
        r"F.key.weights must have shape \(d_model, d_key, num_heads\) = \(6, 4, 2\)",
    ),
    "bias": (dict(F=F._replace(value=F.value._replace(bias=np.zeros(6)))), ValueError, "F.value.bias must"),
    "output": (
        dict(F=F._replace(output=F.output._replace(weights=np.zeros((7, 6))))),
        ValueError,
        r"F.output.weights must have shape \(num_heads \* d_value, d_model\)",
    ),
    "one_row": (dict(F=F._replace(key_attn_bias=np.zeros((4, 2)))), ValueError, "F.value_attn_bias must be"),
    "target": (
        dict(F=F._replace(query=F.query._replace(target_desc=(9, 6)))),
        ValueError,
        r"F.query.target_desc must be None or of shape \(3, 6\), got \(9, 6\)",
    ),
    "batch_size": (dict(batch_size=3), ValueError, "batch_size must be 2, that of query, got 3"),
    "rank": (dict(query=np.zeros(6)), ValueError, "query must have shape"),
    "key_rank": (dict(key=np.zeros((5, 6))), ValueError, "key must have the rank 3 of query"),
    "length": (dict(value=np.zeros((2, 4, 6))), ValueError, r"shape \(batch_size, S, d_model\)"),
    "mask_kind": (dict(key_mask=np.zeros(5)), TypeError, r"key_mask must be boolean"),
    "mask_shape": (dict(key_mask=np.zeros((3, 5), bool)), ValueError, r"shape \(batch_size, S\)"),
    "added_kind": (dict(add_to_attention=np.zeros((3, 5), int)), TypeError, "add_to_attention must be"),
    "added_rank": (dict(add_to_attention=np.zeros(5)), ValueError, "add_to_attention must have shape"),
    "added_heads": (dict(add_to_attention=np.zeros((3, 3, 5))), ValueError, r"shape \(num_heads, L, S\)"),
    "dtypes": (dict(key=K.astype(np.float32)), TypeError, "must have one dtype"),
    "zero": (dict(F=F._replace(add_zero_attn=1)), TypeError, "F.add_zero_attn must be a Python bool"),
    "seed": (dict(F=F._replace(dropout=0.5, seed=0.5)), TypeError, "F.seed must be an int"),
    "negative_seed": (dict(F=F._replace(seed=-1)), ValueError, "F.seed must be an int, 0 or more"),
    "long_seed": (dict(F=F._replace(dropout=0.5, seed=2**32)), ValueError, "F.seed must fit 32 bits"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input_gets_one_clear_error(name):
    wrong, error, words = ERRORS[name]
    given = dict(F=F, batch_size=B, query=Q, key=K, key_mask=None, value=V, add_to_attention=None) | wrong
    with pytest.raises(error, match=f"^bnns.apply_multihead_attention: .*{words}"):
        bnns.apply_multihead_attention(**given)


BACKWARD_ERRORS = {
    "delta": (dict(query_param_delta=True), TypeError, "query_param_delta must be a BNNSMHA"),
    "none": (dict(output_param_delta=None), TypeError, "output_param_delta must be a BNNSMHA"),
    "no_cotangent": (dict(output_param_delta=Triple()), TypeError, "target_desc must be a floating"),
    "cotangent": (dict(output_param_delta=Triple(Q[:, 1:])), ValueError, "target_desc must have shape"),
    "slot": (dict(key_param_delta=Triple(K[:1])), ValueError, "key_param_delta.target_desc must have shape"),
    "slot_dtype": (
        dict(key_param_delta=Triple(K.astype(np.float32))),
        TypeError,
        "key_param_delta.target_desc must have dtype float64, got float32",
    ),
    "row": (dict(key_attn_bias_delta=1), TypeError, "key_attn_bias_delta must be None or False to refuse"),
    "sum": (dict(sum_aliased=1), TypeError, "sum_aliased must be a Python bool"),
    "result": (dict(output=Q[:1]), ValueError, "output must have shape"),
    "cache": (dict(backprop_cache=(Q,)), TypeError, "backprop_cache must be None or the cache"),
    "cache_of_another": (
        dict(backprop_cache=bnns.apply_multihead_attention(F, 1, Q[:1], K[:1], None, V[:1], None, True)[1]),
        ValueError,
        "^bnns.apply_multihead_attention_backward: backprop_cache must be None or the cache that .* for the "
        "same arguments, got another's, with 1 where 2 is needed",
    ),
}


@pytest.mark.parametrize("name", BACKWARD_ERRORS)
def test_bad_input_of_the_backward_gets_one_clear_error(name):
    wrong, error, words = BACKWARD_ERRORS[name]
    with pytest.raises(error, match=words):
        backward(F, Q, K, None, V, None, DOUT, **wrong)
