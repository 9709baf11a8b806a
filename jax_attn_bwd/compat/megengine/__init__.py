"""MegEngine's `megengine.functional.nn.multi_head_attention` and the layer around it, in JAX terms.

Kept from the source:
  * names, order and defaults of the arguments; batch first, `(N, L, embed_dim)`;
  * one array of weights, `io_weight_bias`: query, key, value and output weight, then their biases, flat,
    row by row, of any shape with the right number of elements (the module has `(1, length)`); `y = x W + b`;
    what a size of 0 or a flag turns off takes no room. Projection sizes are totals over the heads, head h
    owns columns h * d to (h + 1) * d; None means `embed_dim`;
  * a projection of size 0 hands the tensor itself to every head, whose gradient is the sum over heads; a
    head is then as wide as the tensor, and the sizes must fit: embed_dim = k_size if neither query nor key
    is projected, kproj_size = embed_dim * num_heads or qproj_size = k_size * num_heads if one is, equal
    sizes if both are. Without an output projection the heads' outputs lie side by side;
  * the logits are divided by the square root of `embed_dim // num_heads`, or of `embed_dim` if
    `qproj_size == 0`; it is the heads' real width only if `qproj_size` is `embed_dim` or 0;
  * a boolean mask is True where masked, a floating one is added to the logits; both kinds may meet. What is
    masked is decided in this order: `is_causal` without masks is causal, from the top left; `is_causal` with
    `attn_mask` alone is a hint, the mask counts; cudnn-style masks; `attn_mask`, `key_padding_mask`, or both
    added up; beside a `key_padding_mask`, `is_causal` is ignored. Entry n * num_heads + h of a 3-D
    `attn_mask` is that of head h of batch entry n;
  * cudnn-style masks are integers and both must be given: `attn_mask (2, L)`, the first key that each query
    sees and the one after its last; `key_padding_mask (2, N)`, how many queries and how many keys count;
  * in training the weights are returned after dropout; `(N * num_heads, L, S)`, or `(N, L, S)` averaged. Of
    `average_attn_weights` the source says "Default: False (i.e. average weights across heads)", which
    contradicts itself: False, the default, is by head here, as its code has it;
  * `out_drop` drops elements of the output after its bias; dropout needs `training`.

Changed:
  * what the source refuses works: `bias_k` and `bias_v` `(1, 1, kproj_size or k_size)` and
    `(1, 1, vproj_size or v_size)`, one row after the projected keys and values; `add_zero_attn`, a row of
    zeros after it; no mask reaches these rows. `reslink` adds the query to the output, after `out_drop`.
    So do causality without a mask and gradients outside training, on which the source's CPU path fails, and
    cudnn-style masks, which that path ignores;
  * a query that sees nothing gets 0 from the attention (the output is its bias), weights 0 and gradient 0,
    where the source gives NaN;
  * unbatched input, which the source documents and fails on: `query (L, embed_dim)` gives an output
    `(L, oproj_size)` and weights `(num_heads, L, S)` or `(L, S)`; `attn_mask` is `(L, S)` or
    `(num_heads, L, S)`, `key_padding_mask` `(S,)`, in cudnn style `(2, 1)`;
  * returned weights and floating masks are differentiable, which they are not in the source;
  * `io_weight_bias` may be None where nothing is projected; dropout draws from `dropout_key`; the two
    reserve spaces do not exist; errors are `ValueError` and `TypeError`.

Added: `multi_head_attention_backward`, whose place the source's automatic differentiation takes, with the
gradients to choose. A checkpoint goes over as arrays::

    np.savez("layer.npz", **module.state_dict())  # there
    params = dict(np.load("layer.npz"))  # here
    out, _ = megengine.MultiHeadAttn(embed_dim, num_heads)(params, x, x, x)

and `unpack_io_weight_bias` gives the matrices to a layer of another kind.

References:
  MegEngine 1.13, megengine.functional.nn.multi_head_attention, megengine.module.MultiHeadAttention.
"""

from jax_attn_bwd.compat.megengine.call import (
    MultiHeadAttnGrads,
    multi_head_attention,
    multi_head_attention_backward,
)
from jax_attn_bwd.compat.megengine.layer import MultiHeadAttn
from jax_attn_bwd.compat.megengine.packing import IOWeightBias, pack_io_weight_bias, unpack_io_weight_bias

__all__ = [
    "IOWeightBias",
    "MultiHeadAttn",
    "MultiHeadAttnGrads",
    "multi_head_attention",
    "multi_head_attention_backward",
    "pack_io_weight_bias",
    "unpack_io_weight_bias",
]
