"""What the four `MultiHeadAttention` share.

Each is the framework's own layer with another inside: same arguments, same parameters under the same names,
same initial values for the same key. The call runs `jax_attn_bwd.multi_head_attention`, one rule over the
whole layer, which keeps the inputs (`save`) and nothing of size T x S. What stands between projection and
attention (a norm of queries and keys, rotary embeddings, a decoding cache) or replaces a part of it (another
`attention_fn`, einsum or dot_general) runs as projection, `dot_product_attention`, projection.

One difference: a query that sees nothing gives the output bias, where the frameworks give a mean over keys
that the mask hides.

What is told of the tokens (lengths, segments, positions, the arrays that masks and scores read) is told at
the call, the rest at construction. In layers `deterministic` is the frameworks' word for "without dropout",
so the flag that allows sums in any order is `deterministic_sums`, as in the operators.

Shapes: ... batch, T queries, S keys, N heads, K key heads, H and Hv their sizes, Eq Ek Ev Eo widths.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
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


def boolean_mask(layer: str, mask: Any) -> jax.Array | None:
    """`mask`, which must be boolean or None."""
    if mask is None or (checks.is_array(mask) and mask.dtype == bool):
        return mask
    got = f"dtype {mask.dtype}" if checks.is_array(mask) else f"{type(mask).__name__}, not an array"
    remedy = "write mask != 0 of zeros and ones; pass additive values as bias"
    raise TypeError(checks.message(layer, "mask", "be boolean (True = attend)", got, remedy))


def flax_mask(
    layer: str, mask: Any, bias: str = "jax_attn_bwd.configured_attention_fn(bias=bias)"
) -> jax.Array | None:
    """`mask` as Flax takes it: what is not 0 attends.

    Known floating values other than 0 and 1 are an error: they are meant to be added, which `bias` says how.
    """
    if not (checks.is_array(mask) and jnp.issubdtype(mask.dtype, jnp.number)):
        return boolean_mask(layer, mask)
    values = checks.known(mask) if jnp.issubdtype(mask.dtype, jnp.floating) else None
    if values is not None:  # a mask that is known is known under jit, too
        other = (values != 0) & (values != 1)
        if other.any():
            found = values[other][0]
            expected = "be boolean, or of zeros and ones (what is not 0 attends)"
            remedy = f"additive values are a bias: {bias}"
            raise TypeError(checks.message(layer, "mask", expected, f"{float(found):g} in it", remedy))
    return jnp.asarray(mask != 0)


def told(layer: str, attention: Callable[..., Any], tokens: Mapping[str, Any]) -> Callable[..., Any]:
    """`attention`, handed those of `tokens` that are neither None nor an empty tuple by their names."""
    empty = lambda x: x is None or (isinstance(x, tuple) and not x)
    tokens = {name: x for name, x in tokens.items() if not empty(x)}
    if not tokens:
        return attention
    parameters = inspect.signature(attention).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name, x in tokens.items():
        if not (takes_all or name in parameters):
            expected = "be left out with an attention_fn that has no argument of this name"
            got = f"shape {jnp.shape(x)}" if checks.is_array(x) else f"a {type(x).__name__}"
            raise TypeError(checks.message(layer, name, expected, got, "use jax_attn_bwd.attention_fn"))
    return partial(attention, **tokens)


def check_room(layer: str, length: int, taken: Any, new: int = 1) -> None:
    """Raises where a cache of `length` tokens has no room for `new` more, as far as `taken` is known."""
    values = checks.known(taken)
    if length < new or (values is not None and int(values) + new > length):
        got = f"{length}" if values is None else f"{length}, of which {int(values)} are taken"
        raise ValueError(
            checks.message(layer, "the cache", f"have room for {new} token{'s' * (new != 1)} more", got)
        )


def within_room(out: jax.Array, length: int, end: Any) -> jax.Array:
    """`out`, or NaN where a traced count of tokens passed the end: nothing is overwritten in silence."""
    return jnp.where(end <= length, out, jnp.nan)
