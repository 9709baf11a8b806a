"""PyTorch's `torch.nn.functional.multi_head_attention_forward`, in JAX terms; torch itself is not imported.

Kept from the source:
  * names, order and defaults of the arguments; sequence first, `(L, N, E)`, or without a batch, `(L, E)`;
    weights are `(out, in)`: `y = x W^T + b`; the heads divide `E` for queries, keys and values alike;
  * a boolean mask is True where attention is *not* allowed, a floating one is added to the logits; both
    kinds may meet, and add up;
  * `bias_k`/`bias_v`, then a row of zeros (`add_zero_attn`), follow the projected keys; masks do not reach
    them;
  * `is_causal` is a hint that `attn_mask` is causal, and an error without one. Where
    `key_padding_mask is None` and not `need_weights`, the values of `attn_mask` are dropped and query t sees
    columns 0 to t alone, of all: the appended rows, which come last, are then hidden from most queries.
    Elsewhere the hint is ignored;
  * `static_k`, `static_v` `(N * num_heads, S, E / num_heads)` replace the projected keys or values; what they
    replace has gradient 0; they refuse `bias_k`/`bias_v`;
  * the weights are returned after dropout, as they multiply the values, and averaged over heads by default;
  * `in_proj_weight` counts only without `use_separate_proj_weight`, the three weights only with it.

Changed:
  * a query that may attend to nothing gets 0 from the attention, weights 0 and gradient 0, where the source
    gives NaN (with `need_weights`; without, it gives 0 as well);
  * `need_weights` changes no number of the output;
  * dropout draws from `dropout_key`, and must have one if `training` and `dropout_p > 0`;
  * masks of different kinds raise no warning; floating masks have a gradient of any dtype;
  * one dtype for inputs and weights; errors are `ValueError` and `TypeError`.

References:
  PyTorch 2.13, torch.nn.functional.multi_head_attention_forward, torch.nn.MultiheadAttention.
"""

from jax_attn_bwd.compat.torch.call import multi_head_attention_forward

__all__ = ["multi_head_attention_forward"]
