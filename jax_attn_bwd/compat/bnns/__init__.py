"""Apple BNNS's multi-head attention layer, `BNNSApplyMultiheadAttention` and its `...Backward`, in JAX terms.

`BNNSFilterCreateLayerMultiheadAttention` makes an object of the layer's parameters `F`, which the calls take;
here they take `F` itself.

Kept from the source:
  * names and order of the arguments; a layer is three input projections and one output projection, each a
    triple `(target_desc, weights, bias)`; weights are `d_model x d_key x num_heads`, the output's are
    `(num_heads * d_value) x d_model`, biases `d_key x num_heads` and `d_model`;
  * `F` is the layer; logits are divided by sqrt(d_key), there is no other scale;
  * `key_mask` is True where a key is ignored; `add_to_attention` is added to the scaled logits, or boolean,
    True = -inf: `L x S` for all, `H x L x S` per head, or `B x H x L x S`;
  * `key_attn_bias`, `value_attn_bias` `d_key x num_heads`, `d_value x num_heads`: one more key and value of
    each head, then with `add_zero_attn` a row of zeros; no mask reaches them;
  * dropout acts on the softmax, in the forward as in the backward, from `seed`; outside (0, 1) is none;
  * in the backward each `..._delta` is a triple too: deltas of the input, the weights and the bias. None
    instead of a triple, or None or False in it, is a delta that is not asked for: it is not computed, and
    None comes back. `output_param_delta.target_desc` is the cotangent of the output;
  * with `sum_aliased`, deltas of query, key and value that go to one destination are each the sum of those
    that are asked for. One destination means one Python object: under `jax.jit`, pass it once;
  * `backprop_cache` is optional; without one the backward runs the forward again.

Changed:
  * results are returned: the forward returns the output, and the cache if `backprop_cache` is True; in the
    backward, True in a triple asks for that delta, and so does an array of its shape, which is not written;
  * without `sum_aliased`, the default, each delta is its own, be the inputs one array or not, so that their
    sum is the gradient of that array;
  * `add_to_attention` may have any of its shapes in the backward too (the source documents 2-D), and has no
    delta, as in the source; `jax.vjp` of the forward gives one;
  * widths of query, key, value and output may differ; `batch_size` is checked, None will do; without it
    input may be unbatched; `output` in the backward is checked, not read; None will do;
  * the `target_desc` of a layer, a shape that follows from the input, is checked, None will do;
  * a query that may see nothing gets 0 from the attention, and gradient 0; the source does not say.

Left out, for it has no meaning in JAX:
  * every `..._stride`: an array knows its layout;
  * `backprop_cache_size`, `workspace`, `workspace_size`: XLA allocates;
  * the filter parameters and the status code: errors are raised.

References:
  Apple Accelerate, BNNS, BNNSApplyMultiheadAttention, BNNSApplyMultiheadAttentionBackward.
"""

from jax_attn_bwd.compat.bnns.call import apply_multihead_attention, apply_multihead_attention_backward
from jax_attn_bwd.compat.bnns.layer import (
    BNNSLayerParametersMultiheadAttention,
    BNNSMHAProjectionParameters,
    BNNSMultiheadAttentionDeltas,
)

__all__ = [
    "BNNSLayerParametersMultiheadAttention",
    "BNNSMHAProjectionParameters",
    "BNNSMultiheadAttentionDeltas",
    "apply_multihead_attention",
    "apply_multihead_attention_backward",
]
