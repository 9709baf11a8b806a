"""`MultiHeadAttention` in every framework: options, what is told of tokens, masks, the call, decoding.

Each layer is the framework's own with another inside: same arguments, same parameters under the same names,
same initial values for the same key. The call runs `jax_attn_bwd.multi_head_attention`, one rule over the
whole layer, which keeps the inputs (`save`) and nothing of size T x S. What stands between projection and
attention (a norm of queries and keys, rotary embeddings, a decoding cache) or replaces a part of it (another
`attention_fn`, einsum or dot_general) runs as projection, `dot_product_attention`, projection; so does Keras'
layer always, whose projections are layers themselves, and it has no `save`.

One difference: a query that sees nothing gives the output bias, where the frameworks give a mean over keys
that the mask hides.

What is told of the tokens (lengths, segments, positions, the arrays that masks and scores read) is told at
the call, the rest at construction. In layers `deterministic` is the frameworks' word for "without dropout",
so the flag that allows sums in any order is `deterministic_sums`, as in the operators.

For frameworks that have no cache of their own (Haiku, Equinox) `decode` does a step with one:

    keys, values of the cache at n ... n + T - 1  =  those of the T new tokens, where n are in it
    out  =  attention of the new queries to the first n + T of them, each to those up to its own

That cache holds keys before the rotation: rows that begin at different places tell positions at each call.

Layers are built from the arguments of their framework's, and `Keywords`:
  * `local_window_size`: int or (left, right): a query at t sees keys from t - left to t + right; in decoding
    t is the index in the cache;
  * `scale`: a number that logits are multiplied by; None = `1 / sqrt(H)`;
  * `logits_soft_cap`: c > 0; the scaled logits become `c * tanh(logits / c)`;
  * `mask_mod`, `score_mod`: masks and scores as functions, as in `jax_attn_bwd.dot_product_attention`
    (`jax_attn_bwd.mods` has named ones); what they read is told at the call; in decoding a row is an index in
    the cache;
  * `rotary`: a `jax_attn_bwd.Rotary`, which turns projected queries and keys by their positions,
    `query_positions` and `key_value_positions` of the call or the indices; in decoding the index in the
    cache;
  * `deterministic_sums` (None): that of `jax_attn_bwd.dot_product_attention`;
  * `implementation`: that of `jax_attn_bwd.dot_product_attention`;
  * `forward_mode` (False): also differentiable by `jax.jvp`, `jax.jacfwd` and `jax.linearize`, by a written
    rule; an `attention_fn` of the caller's is asked itself: `configured_attention_fn(forward_mode=True)`;
  * `is_causal` (False): a query sees keys up to its own index; no mask is formed. A call may tell it, too;
    False in the call of a layer that was made causal is an error. Keras' layer is told at the call alone, by
    `use_causal_mask`;
  * `save` ("inputs"): what the backward keeps beside the inputs, "inputs" (nothing), "qkv" or "probs", as in
    `jax_attn_bwd.multi_head_attention`, where that runs.

Calls take the arguments of their framework's, and `Tokens`, as in `jax_attn_bwd.dot_product_attention`:
  * `query_seq_lengths`, `key_value_seq_lengths`: `[...]`;
  * `query_segment_ids`, `key_value_segment_ids`, `query_positions`, `key_value_positions`: `[..., T]`,
    `[..., S]`. In decoding the keys are those of the cache, and a query's position is its index there, unless
    it is given. An `attention_fn` of the caller's is handed those that are given;
  * `mod_args`: a tuple of what the functions read, with gradients to the floats that `score_mod` reads.

Of a mask True attends; where it may be of numbers, what is not 0 attends, and floating values other than 0
and 1, which are meant to be added, are an error. Shapes that disagree are a ValueError, as a full cache is;
arguments of the wrong kind, as an additive mask, a TypeError. Where the numbers of a mask or a cache are
traced, a negative one in the mask, and a full cache, give NaN.

The names of parameters stand in each framework's own file. A layer of another framework (the
shortest to follow is Haiku's) makes `MultiHeadAttentionParams`, and hands them to `attend` with `Keywords`
and `Tokens`.

Shapes: ... batch, T queries, S keys, N heads, K key heads, H and Hv their sizes, Eq Ek Ev Eo widths, L tokens
that a cache has room for.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import checks, products
from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd._core.rotary import Rotary, checked, rotate
from jax_attn_bwd._core.types import Implementation
from jax_attn_bwd.ops.dot_product import dot_product_attention
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams, multi_head_attention


class LayerAttentionKeywords(TypedDict, total=False):
    """Lists what a layer, or the attention function of one, may be given; None leaves it out."""

    scale: float | None
    local_window_size: int | tuple[int, int] | None
    logits_soft_cap: float | None
    mask_mod: Callable[..., Any] | None
    score_mod: Callable[..., Any] | None
    rotary: Rotary | None


def number_of_heads(operator: str, num_heads: Any, width: Any) -> int:
    """Returns `num_heads`; raises where the width that they share stands in its place, as in torch."""
    num_heads = checks.integer(operator, "num_heads", num_heads, least=1)
    if isinstance(width, int) and 0 < width < num_heads and num_heads % width == 0:
        remedy = f"the number of heads comes first, then the width: write ({width}, {num_heads})"
        raise ValueError(
            checks.message(operator, "num_heads", f"divide the width, {width}", num_heads, remedy)
        )
    return num_heads


class Keywords(LayerAttentionKeywords, total=False):
    """Lists what every layer may be given beside what its framework has; `attention_fn` takes all these."""

    deterministic_sums: bool | None
    implementation: Implementation | None
    forward_mode: bool


class CacheTokens(TypedDict, total=False):
    """Lists what a step of decoding may tell of the new tokens, and of those in the cache."""

    key_value_seq_lengths: jax.Array | None
    query_segment_ids: jax.Array | None
    key_value_segment_ids: jax.Array | None
    query_positions: jax.Array | None
    key_value_positions: jax.Array | None
    mod_args: tuple[Any, ...]


class Tokens(CacheTokens, total=False):
    """Lists what a call may tell of its tokens, in every framework by these names; None and () = nothing."""

    query_seq_lengths: jax.Array | None


def complete(call: str, allowed: Any, given: Any) -> Any:
    """Returns the keywords that a `call` was given, and the defaults of the others that are `allowed`."""
    return checks.complete(call, multi_head_attention, allowed, given)


_DEFAULTS = complete("", Keywords, {})
OPTIONS: dict[str, Any] = {name: _DEFAULTS[name] for name in Keywords.__annotations__}


def options_of(layer: Any, *more: str) -> dict[str, Any]:
    """Returns the `OPTIONS` that a layer holds as attributes, and `more` of these."""
    return {name: getattr(layer, name) for name in (*OPTIONS, *more)}


def attend(
    params: MultiHeadAttentionParams,
    inputs: tuple[jax.Array, jax.Array, jax.Array],
    *,
    dtype: Any = None,
    dropout_rate: float,
    dropout_key: jax.Array | None,
    **options: Any,
) -> jax.Array:
    """Calls `multi_head_attention` in one dtype: `dtype`, or what inputs and parameters promote to.

    `inputs` are query, key and value; `dropout_key` None means no dropout. Where a tool has replaced
    `jax.lax.dot_general`, the projections are such products around `dot_product_attention`.
    """
    (query, key, value), arrays = inputs, promote(dtype, *inputs, *params)
    # An array given twice is kept once.
    k = None if key is query else arrays[1]
    v = None if value is key else arrays[2]
    params = MultiHeadAttentionParams(*arrays[3:])
    options |= dict(dropout_rate=0.0 if dropout_key is None else dropout_rate, dropout_key=dropout_key)
    if products.are_replaced():
        return _attend_between_products(params, arrays[:3], **options)
    return multi_head_attention(params, arrays[0], k, v, **options)


def _attend_between_products(
    params: MultiHeadAttentionParams, inputs: list[jax.Array], *, rotary: Rotary | None, save: Any = None,
    precision: Any = None, **options: Any,
) -> jax.Array:  # fmt: skip
    """Computes what `multi_head_attention` does, each projection a `lax.dot_general` of this function."""
    q, k, v = _projected(params, inputs, precision)
    q, k = rotated("attend", rotary, q, k, options["query_positions"], options["key_value_positions"])
    return _joined(params, dot_product_attention(q, k, v, precision=precision, **options), precision)


def is_causal(layer: str, built: bool, called: Any) -> bool:
    """Tells whether a call is causal: its own word, None where it has none, or that of the constructor."""
    if called is None:
        return built
    called = checks.flag(layer, "is_causal", called)
    if built and not called:
        remedy = "leave it out, or make the layer without is_causal=True"
        raise ValueError(
            checks.message(layer, "is_causal", "agree with the layer's own, True", False, remedy)
        )
    return called


def check_values(layer: str, query: jax.Array, key: jax.Array | None, value: jax.Array | None) -> None:
    """Raises for a mask that is handed over by position, after the query, and warns where it may be one."""
    remedy = "a mask is given by name: mask=mask"
    for name, x in (("inputs_k", key), ("inputs_v", value)):
        if x is not None and x is not query and jnp.issubdtype(jnp.result_type(x), jnp.bool_):
            raise TypeError(checks.message(layer, name, "be numbers", "dtype bool", remedy))
    if value is None or value is query or value is key:
        return
    if (shape := np.shape(value))[-2:-1] == shape[-1:]:
        checks.warn(f"{layer}: inputs_v of shape {shape} may be meant for a mask; {remedy}")


def check_widths(
    layer: str, names: tuple[str, ...], inputs: tuple[jax.Array, ...], params: MultiHeadAttentionParams
) -> None:
    """Raises unless query, key and value, by their names in the layer, are as wide as it was built for."""
    for name, x, kernel in zip(names, inputs, params[0:6:2], strict=True):
        if kernel is not None and x.shape[-1] != kernel.shape[0]:
            expected = f"have the width {kernel.shape[0]} that the layer was built for"
            raise ValueError(checks.message(layer, name, expected, f"shape {x.shape}"))


def inputs_of(
    query: jax.Array, key: jax.Array | None, value: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns query, key and value; None stands for the one before."""
    key = query if key is None else key
    return query, key, key if value is None else value


def promote(dtype: Any, *arrays: Any) -> list[Any]:
    """Returns `arrays` in `dtype`, or in the floating dtype that they promote to; None stays None."""
    if dtype is None:
        dtype = jnp.result_type(*(x for x in arrays if x is not None))
        if not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(dtype, jnp.float32)
    return [None if x is None else jnp.asarray(x, dtype) for x in arrays]


def boolean_mask(layer: str, mask: Any) -> jax.Array | None:
    """Returns `mask`, which must be boolean or None."""
    if mask is None or (checks.is_array(mask) and mask.dtype == bool):
        return mask
    got = f"dtype {mask.dtype}" if checks.is_array(mask) else f"{type(mask).__name__}, not an array"
    remedy = "write mask != 0 of zeros and ones; pass additive values as bias"
    raise TypeError(checks.message(layer, "mask", "be boolean (True = attend)", got, remedy))


def flax_mask(
    layer: str, mask: Any, bias: str = "jax_attn_bwd.configured_attention_fn(bias=bias)"
) -> jax.Array | None:
    """Returns `mask` as Flax takes it: what is not 0 attends.

    Known floating values other than 0 and 1 are an error: they are meant to be added, which `bias` says how.
    Of traced ones `nan_if_additive` tells, behind the layer.
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


def nan_if_additive(out: jax.Array, mask: Any) -> jax.Array:
    """Returns `out` of a layer, or NaN, which reaches gradients too, where a traced `mask` is to be added."""
    is_traced = isinstance(mask, jax.Array) and jnp.issubdtype(mask.dtype, jnp.floating)
    if not is_traced or checks.known(mask) is not None:
        return out
    return out * jnp.where((mask < 0).any(), jnp.nan, 1.0).astype(out.dtype)


def is_unset(x: Any) -> bool:
    """Tells whether an argument is left out: None, or an empty tuple of `mod_args`."""
    return x is None or (isinstance(x, tuple) and not x)


def with_token_arguments(layer: str, attention: Callable[..., Any], tokens: Tokens) -> Callable[..., Any]:
    """Binds those of `tokens` that are given to an attention function, which must take them."""
    given = {name: x for name, x in tokens.items() if not is_unset(x)}
    if not given:
        return attention
    parameters = inspect.signature(attention).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    x: Any
    for name, x in given.items():
        if not (takes_all or name in parameters):
            expected = "be left out with an attention_fn that has no argument of this name"
            got = f"shape {np.shape(x)}" if checks.is_array(x) else f"a {type(x).__name__}"
            raise TypeError(checks.message(layer, name, expected, got, "use jax_attn_bwd.attention_fn"))
    return partial(attention, **given)


def with_index(tokens: Tokens, options: Mapping[str, Any], index: jax.Array) -> Tokens:
    """Returns `tokens` of a step of decoding, at `index` of the cache where an option reads positions."""
    readers = ("local_window_size", "mask_mod", "score_mod", "rotary")
    if tokens["query_positions"] is not None or all(options.get(name) is None for name in readers):
        return tokens
    return Tokens(**{**tokens, "query_positions": index[None]})


def rotated(
    layer: str, rotary: Rotary | None, q: jax.Array, k: jax.Array, q_positions: Any, k_positions: Any
) -> tuple[jax.Array, jax.Array]:
    """Turns queries and keys by their positions, None = their indices; without `rotary` they stay."""
    if (rotary := checked(layer, rotary, q.shape[-1])) is None:
        return q, k
    return rotate(rotary, q, q_positions).astype(q.dtype), rotate(rotary, k, k_positions).astype(k.dtype)


def check_room(layer: str, length: int, taken: Any, new: int = 1) -> None:
    """Raises where a cache of `length` tokens has no room for `new` more, as far as `taken` is known."""
    values = checks.known(taken)
    if length < new or (values is not None and int(values) + new > length):
        got = f"{length}" if values is None else f"{length}, of which {int(values)} are taken"
        expected = f"have room for {new} token{'s' * (new != 1)} more"
        raise ValueError(checks.message(layer, "the cache", expected, got))


def within_room(out: jax.Array, length: int, end: Any) -> jax.Array:
    """Returns `out`, or NaN where a traced count passed the end: nothing is overwritten in silence."""
    return jnp.where(end <= length, out, jnp.nan)


class KeyValueCache(NamedTuple):
    """Projected keys and values of the tokens so far, with room for L of them.

    Attributes:
      key: `[..., L, N, H]`, not turned by `rotary`.
      value: `[..., L, N, Hv]`.
      tokens: int32 `[]`, how many there are.
    """

    key: jax.Array
    value: jax.Array
    tokens: jax.Array


def decode(
    layer: str,
    params: MultiHeadAttentionParams,
    cache: KeyValueCache,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    rotary: Rotary | None = None,
    precision: Any = None,
    query_positions: jax.Array | None = None,
    key_value_positions: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    **options: Any,
) -> tuple[jax.Array, KeyValueCache]:
    """Returns (out `[..., T, Eo]`, the cache with T tokens more); NaN where it has no room for them.

    Masks, and what is told of keys, are of the cache, `[..., L]`; a query's position is its index there
    unless it is given.
    """
    T, length = query.shape[-2], cache.key.shape[-3]
    for name, x in (("key", key), ("value", value)):
        if x.shape[-2] != T:
            expected = f"have the {T} tokens of query, which are new to the cache"
            raise ValueError(checks.message(layer, name, expected, x.shape))
    check_room(layer, length, cache.tokens, T)
    # The new tokens are projected, and their keys and values written behind those in the cache.
    q, *new = _projected(params, (query, key, value), precision)
    for name, x, held in zip(("key", "value"), new, cache[:2], strict=True):
        size = (*held.shape[:-3], T, *held.shape[-2:])
        if x.shape != size:
            expected = f"have heads {size}, as the cache has"
            raise ValueError(checks.message(layer, name, expected, x.shape))
    end = cache.tokens + T
    k, v = (_written(x, held, cache.tokens) for x, held in zip(new, cache[:2], strict=True))
    filled = KeyValueCache(k, v, jnp.asarray(end, jnp.int32))
    at = cache.tokens + jnp.arange(T, dtype=jnp.int32)
    # A query sees what stands in the cache up to itself.
    if query_positions is None and key_value_positions is None:
        options |= {"is_causal": True}
    elif T > 1:  # by index: positions may be told in any order
        seen = jnp.arange(length, dtype=jnp.int32)[None] <= at[:, None]
        mask = seen if mask is None else mask & to_rank(seen, mask.ndim)
    query_positions = at if query_positions is None else query_positions
    limit = end if key_value_seq_lengths is None else jnp.minimum(key_value_seq_lengths, end)
    q, *_ = promote(None, q, *new)  # a narrower cache does not narrow what is computed
    k, v = (x.astype(q.dtype) for x in filled[:2])
    q, k = rotated(layer, rotary, q, k, query_positions, key_value_positions)
    options |= dict(query_positions=query_positions, key_value_positions=key_value_positions)
    options |= dict(key_value_seq_lengths=jnp.minimum(limit, length), precision=precision)
    out = dot_product_attention(q, k, v, mask=mask, **options)
    return within_room(_joined(params, out, precision), length, end), filled


def _projected(params: MultiHeadAttentionParams, inputs: Sequence[jax.Array], precision: Any) -> list[Any]:
    """Projects query, key and value, `[..., T, E]` each, to heads `[..., T, N, H]`."""
    pairs = zip(params[0:6:2], params[1:6:2], strict=True)  # (kernel, bias)
    return [_mapped(x, *pair, 1, precision) for x, pair in zip(inputs, pairs, strict=True)]


def _joined(params: MultiHeadAttentionParams, heads: jax.Array, precision: Any) -> jax.Array:
    """Projects heads `[..., T, N, Hv]` to the output `[..., T, Eo]`."""
    return _mapped(heads, params.out_kernel, params.out_bias, 2, precision)


def _mapped(x: jax.Array, kernel: Any, bias: Any, summed: int, precision: Any) -> jax.Array:
    """Multiplies with a kernel, over so many of the last axes of `x`, and adds the bias."""
    x, kernel, bias = promote(None, x, kernel, bias)
    axes = tuple(range(x.ndim - summed, x.ndim)), tuple(range(summed))
    y = lax.dot_general(x, kernel, (axes, ((), ())), precision)
    return y if bias is None else y + to_rank(bias, y.ndim)


def _written(x: jax.Array, to: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the cache `to [..., L, N, H]` with the rows `x` from `index` on."""
    return lax.dynamic_update_slice_in_dim(to, x.astype(to.dtype), index, axis=to.ndim - 3)
