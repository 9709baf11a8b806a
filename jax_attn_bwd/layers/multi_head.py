"""What the four `MultiHeadAttention` share.

Each is the framework's own layer with another inside: same arguments, same parameters under the same names,
same initial values for the same key. The call runs `jax_attn_bwd.multi_head_attention`, one rule over the
whole layer, which keeps the inputs (`save`) and nothing of size T x S. What stands between projection and
attention (a norm of queries and keys, rotary embeddings, a decoding cache) or replaces a part of it (another
`attention_fn`, einsum or dot_general) runs as projection, `dot_product_attention`, projection.

One difference: a query that sees nothing gives the output bias, where the frameworks give a mean over keys
that the mask hides.

Shapes: ... batch, T queries, S keys, N heads, K key heads, H and Hv their sizes, Eq Ek Ev Eo widths.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks, masks
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams, multi_head_attention


def attend(
    params: MultiHeadAttentionParams,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    dtype: Any = None,
    **options: Any,
) -> jax.Array:
    """`multi_head_attention` in one dtype: `dtype`, or what inputs and parameters promote to."""
    arrays = promote(dtype, query, key, value, *params)
    params = MultiHeadAttentionParams(*arrays[3:])
    # An array given twice is kept once.
    k = None if key is query else arrays[1]
    v = None if value is key else arrays[2]
    return multi_head_attention(params, arrays[0], k, v, **options)


def promote(dtype: Any, *arrays: Any) -> list[Any]:
    """`arrays` in `dtype`, or in the floating dtype that they promote to; None stays None."""
    if dtype is None:
        dtype = jnp.result_type(*(x for x in arrays if x is not None))
        if not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(dtype, jnp.float32)
    return [None if x is None else jnp.asarray(x, dtype) for x in arrays]


_NUMBERS = "write mask != 0 of zeros and ones; pass additive values as bias"
FLAX_NUMBERS = (
    "write mask != 0 of zeros and ones (dtype=bool in the mask helpers of Flax); additive "
    "values are a bias: in Flax functools.partial(jax_attn_bwd.attention_fn, bias=bias)"
)


def boolean_mask(layer: str, mask: Any, remedy: str = _NUMBERS) -> jax.Array | None:
    """`mask`, which must be boolean or None; `remedy` says where numbers go."""
    if mask is None or (checks.is_array(mask) and mask.dtype == bool):
        return mask
    got = f"dtype {mask.dtype}" if checks.is_array(mask) else f"{type(mask).__name__}, not an array"
    expected = "be boolean (True = attend)"
    raise TypeError(checks.message(layer, "mask", expected, got, remedy))


def within_window(
    layer: str, mask: Any, row: Any, batch: int, length: int, local_window_size: Any
) -> Any:
    """`mask`, and keys within the window of the queries at `row [T]`, with `batch + 3` axes."""
    window = masks.window(layer, local_window_size)
    column = jnp.arange(length, dtype=jnp.int32)
    band = masks.in_band(row[:, None], column[None], False, window)
    return masks.conjunction(mask, None if band is None else band[(None,) * (batch + 1)])
