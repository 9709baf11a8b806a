"""`attention_fn`, which layers of Flax call between their projections, and its configured form."""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Never, Unpack

import jax
import numpy as np

from jax_attn_bwd._core import checks, dropout, keywords, masks
from jax_attn_bwd._core.rotary import Rotary, checked
from jax_attn_bwd._core.types import Implementation
from jax_attn_bwd.layers.multi_head import (
    LayerAttentionKeywords,
    Tokens,
    flax_mask,
    is_unset,
    nan_if_additive,
    promote,
    rotated,
)
from jax_attn_bwd.ops.dot_product import arguments, blockwise, dot_product_attention

_NAME, _CONFIGURED = "attention_fn", "configured_attention_fn"


# Each name is spelled out: linen reads the signature, and hands nothing to **kwargs.
@keywords.known
def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    *,
    force_fp32_for_softmax: bool = False,
    is_causal: bool = False,
    input_positions: jax.Array | None = None,
    rope: Callable[[jax.Array, jax.Array | None], jax.Array] | None = None,
    rotary: Rotary | None = None,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    query_segment_ids: jax.Array | None = None,
    key_value_segment_ids: jax.Array | None = None,
    query_positions: jax.Array | None = None,
    key_value_positions: jax.Array | None = None,
    logits_soft_cap: float | None = None,
    mask_mod: Callable[..., Any] | None = None,
    score_mod: Callable[..., Any] | None = None,
    mod_args: tuple[Any, ...] = (),
    deterministic_sums: bool | None = None,
    forward_mode: bool = False,
    implementation: Implementation | None = None,
    promote_dtype: Callable[..., Any] | None = None,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
) -> jax.Array:
    """`dot_product_attention` for `attention_fn=` of Flax's layers, linen and NNX.

        nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=jax_attn_bwd.attention_fn)
        nnx.MultiHeadAttention(8, 64, attention_fn=jax_attn_bwd.attention_fn, decode=False, rngs=rngs)

    What these layers do not pass on, configure: `configured_attention_fn(bias=bias, is_causal=True)`. (NNX
    passes `is_causal=False` unless its call asks for causality, which undoes what `functools.partial` binds.)

    Differs from the attention of Flax in that a query which sees nothing gives 0, not a mean over hidden
    keys, that queries, keys and values must be real, and that no T x S array is formed or kept, unless
    weights are sown.

    Shapes: ... batch, T query length, S key length, N heads, K key heads (N a multiple of K), H, Hv sizes.

    Args:
      query: `[..., T, N, H]`.
      key: `[..., S, K, H]`.
      value: `[..., S, K, Hv]`.
      bias: broadcasts to `[..., N, T, S]`, floating; added to the logits.
      mask: broadcasts to `[..., N, T, S]`, True = attend; numbers are taken as Flax takes them, not 0 =
        attend, so that what its mask helpers make will do. Floating values other than 0 and 1, which are
        meant to be added to the logits, are an error that names `bias`. Where they are traced, one that is
        negative makes the output NaN.
      broadcast_dropout: one dropout mask for batch and heads, Flax's default.
      dropout_rng: random key, required with dropout.
      dropout_rate: probability of dropping an attention probability.
      deterministic: True = no dropout. That sums repeat is `deterministic_sums`.
      dtype: of the computation and the output; None = what query, key and value promote to.
      precision: of the matrix products.
      module: the layer that sows the weights `[..., N, T, S]` before dropout: to "intermediates" from linen,
        to `nnx.Intermediate` from NNX. None = not sown.
      force_fp32_for_softmax: either way the softmax is computed in float32, or float64 for float64; True sows
        the weights so, where False sows them in the dtype of the computation.
      is_causal: a query sees keys up to its own index. In a step of decoding of linen the mask says so
        already; NNX leaves it out there (that of Flax 0.12.8 does not, with its own attention either).
      input_positions: positions that are handed to `rope`.
      rope: rotary embedding of queries and keys, `(x [..., L, H], input_positions) -> x`: an `nnx.RoPE`,
        which does not know the index of the query in a step of decoding.
      rotary: `jax_attn_bwd.Rotary`, which turns queries and keys by `query_positions` and
        `key_value_positions`, or their indices. With one query and more keys, which may be a step of
        decoding, `query_positions` must be given; the layers of `jax_attn_bwd.layers` do.
      local_window_size: as in `dot_product_attention`; without `query_positions` an error with one query,
        more keys and a mask of numbers, for that may be a step of decoding, where the index of the query is
        not known here: the layers of `jax_attn_bwd.layers` know it and take the same argument.
      query_seq_lengths, key_value_seq_lengths, query_segment_ids, key_value_segment_ids, query_positions,
        key_value_positions, scale, logits_soft_cap, mask_mod, score_mod, mod_args: as in
        `dot_product_attention`; in a step of decoding the keys are those of the cache, and functions are an
        error as windows are.
        Positions are what causality, windows and functions read; `rope` is handed `input_positions` alone.
      deterministic_sums: as in `dot_product_attention`.
      forward_mode: also differentiable by `jax.jvp`, `jax.jacfwd` and `jax.linearize`, as in
        `dot_product_attention`. For Flax's layers: `configured_attention_fn(forward_mode=True)`.
      implementation: as in `dot_product_attention`.
      promote_dtype: replaces the promotion: `promote_dtype((query, key, value), dtype=dtype)`.
      einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: must be None.

    Returns:
      `[..., T, N, Hv]`.

    Gradients:
      query, key, value, bias, mod_args: as in `dot_product_attention`. Sown weights are differentiable.

    Raises:
      TypeError: a mask of additive values, or another argument of the wrong kind.
      ValueError: shapes disagree, dropout without a key, positions without `rope`, or a window or function in
        decoding.
      NotImplementedError: an einsum of the caller's.

    Example:
      >>> import jax
      >>> from flax import linen as nn
      >>> from jax_attn_bwd import attention_fn
      >>> layer = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=attention_fn)
      >>> x = jax.random.normal(jax.random.key(0), (1, 5, 8), "float32")
      >>> mask = nn.make_causal_mask(x[..., 0])
      >>> out, variables = layer.init_with_output(jax.random.key(1), x, mask=mask)
      >>> out.shape
      (1, 5, 8)
    """
    forward_mode = checks.flag(_NAME, "forward_mode", forward_mode)
    attend = partial(dot_product_attention, forward_mode=forward_mode)
    return attention_by(
        attend, query, key, value, bias, mask, broadcast_dropout=broadcast_dropout, dropout_rng=dropout_rng,
        dropout_rate=dropout_rate, deterministic=deterministic, dtype=dtype, precision=precision,
        module=module, force_fp32_for_softmax=force_fp32_for_softmax, is_causal=is_causal,
        input_positions=input_positions, rope=rope, rotary=rotary, scale=scale,
        local_window_size=local_window_size,
        query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths,
        query_segment_ids=query_segment_ids, key_value_segment_ids=key_value_segment_ids,
        query_positions=query_positions, key_value_positions=key_value_positions,
        logits_soft_cap=logits_soft_cap, mask_mod=mask_mod, score_mod=score_mod, mod_args=mod_args,
        deterministic_sums=deterministic_sums, implementation=implementation, promote_dtype=promote_dtype,
        einsum_dot_general=einsum_dot_general, qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
    )  # fmt: skip


_NO_DROPOUT: dict[str, Any] = dict(dropout_rate=0.0, dropout_key=None)
_EINSUMS = ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum")


def attention_by(
    attend: Callable[..., jax.Array], query, key, value, bias, mask, *, dropout_rng, dropout_rate,
    deterministic, dtype, module, force_fp32_for_softmax, is_causal, input_positions, rope, rotary,
    local_window_size, mask_mod, score_mod, implementation, promote_dtype, **options: Any,
) -> jax.Array:  # fmt: skip
    """Computes `attention_fn` by another `attend`, which takes the arguments of `dot_product_attention`."""
    for name in _EINSUMS:
        if (einsum := options.pop(name)) is not None:
            remedy = "the weights it would multiply are never formed; use Flax's own attention"
            got = getattr(einsum, "__name__", type(einsum).__name__)
            raise NotImplementedError(checks.message(_NAME, name, "be None", got, remedy))
    # One dtype, and queries and keys that are turned by their positions.
    if promote_dtype is None:
        query, key, value = promote(dtype, query, key, value)
    else:
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
    positions = options["query_positions"], options["key_value_positions"]
    query, key = _by_rope(rope, input_positions, query, key)
    query, key = _by_rotary(rotary, rope, query, key, *positions)
    numbers, mask = mask, flax_mask(_NAME, mask)
    # Dropout, which a call for training alone has.
    checks.flag(_NAME, "force_fp32_for_softmax", force_fp32_for_softmax)
    drops = not checks.flag(_NAME, "deterministic", deterministic)
    drops = checks.rate(_NAME, "dropout_rate", dropout_rate) > 0 and drops
    if drops and dropout_rng is None:
        expected = f"be given for dropout_rate = {dropout_rate} with deterministic=False"
        raise ValueError(checks.message(_NAME, "dropout_rng", expected, None))
    if drops:
        dropout.check_key(_NAME, dropout_rng, "dropout_rng")  # an error names this argument
    # Causality and windows, unless the mask of a step of decoding stands in their place.
    band: dict[str, Any] = dict(is_causal=is_causal, local_window_size=local_window_size)
    if _may_decode(query, key, numbers) and positions[0] is None:
        band = _band_of_step(**band, mask_mod=mask_mod, score_mod=score_mod)
    options |= dict(**band, mask_mod=mask_mod, score_mod=score_mod)
    options["deterministic_sums"] = checks.repeatable_sums(_NAME, options["deterministic_sums"])
    drop = dict(dropout_rate=dropout_rate, dropout_key=dropout_rng) if drops else _NO_DROPOUT
    out = attend(query, key, value, bias, mask, **options, **drop, implementation=implementation)
    out = nan_if_additive(out, numbers)
    # Weights [..., N, T, S] are formed for a module that asks for them.
    if module is not None:
        weights = nan_if_additive(attention_weights(query, key, value, bias, mask, **options), numbers)
        _sow(module, weights if force_fp32_for_softmax else weights.astype(query.dtype))
    return out


def _by_rope(rope: Any, positions: Any, query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Turns `[..., L, N, H]` by a function of the caller's, head by head."""
    if rope is None:
        if positions is not None:
            expected = "be given together with rope, which turns queries and keys by them"
            remedy = "configure it: configured_attention_fn(rope=nnx.RoPE())"
            got = f"shape {np.shape(positions)} and rope=None"
            raise ValueError(checks.message(_NAME, "input_positions", expected, got, remedy))
        return query, key
    rotate = jax.vmap(lambda x: rope(x, positions), in_axes=-2, out_axes=-2)
    return rotate(query).astype(query.dtype), rotate(key).astype(key.dtype)


def _by_rotary(rotary: Any, rope: Any, query, key, *positions: Any) -> tuple[jax.Array, jax.Array]:
    """Turns queries and keys by `rotary`, whose positions must be known."""
    if rotary is None:
        return query, key
    rotary = checked(_NAME, rotary, query.shape[-1])
    if rope is not None:
        expected = "be None beside rope: both turn queries and keys"
        raise ValueError(checks.message(_NAME, "rotary", expected, rotary, "leave out one"))
    if positions[0] is None and _is_one_of_more(query, key):
        expected = "be given with rotary in what may be a step of decoding"
        remedy = "the layers of jax_attn_bwd.layers tell the index in the cache; here pass where the query is"
        raise ValueError(checks.message(_NAME, "query_positions", expected, None, remedy))
    # Positions are integers, one for each query and each key.
    found: list[jax.Array | None] = [None, None]
    names = ("query_positions", "key_value_positions")
    for i, (name, x, given) in enumerate(zip(names, (query, key), positions, strict=True)):
        if given is not None:
            found[i] = place = checks.integers(_NAME, name, given)
            checks.broadcasts(_NAME, name, place, "[..., L]", x.shape[:-2])
    return rotated(_NAME, rotary, query, key, *found)


def _is_one_of_more(query: jax.Array, key: jax.Array) -> bool:
    """Tells whether one query meets more keys, as it does in a step of decoding."""
    return query.ndim > 2 and query.shape[-3] == 1 < key.shape[-3]


def _may_decode(query: jax.Array, key: jax.Array, mask: Any = None, **others: Any) -> bool:
    """Tells whether a call looks like a step of decoding in Flax, whose mask says what the cache holds."""
    return checks.is_array(mask) and mask.dtype != np.bool_ and _is_one_of_more(query, key)


def _band_of_step(is_causal: bool, local_window_size: Any, **functions: Any) -> dict[str, Any]:
    """Returns the band of one query with a mask of numbers, as decoding in Flax makes them."""
    for name, x in {"local_window_size": masks.window(_NAME, local_window_size), **functions}.items():
        if x is None:
            continue
        expected = "be None in what may be a step of decoding, where the index of the query is not known"
        remedy = (
            "give it to the layer of jax_attn_bwd.layers.flax_linen or flax_nnx in place of Flax's; "
            "elsewhere write mask != 0"
        )
        raise ValueError(checks.message(_NAME, name, expected, x, remedy))
    is_causal = checks.flag(_NAME, "is_causal", is_causal) and not _linen_decodes()
    return dict(is_causal=is_causal, local_window_size=None)


def _linen_decodes() -> bool:
    """Tells whether a layer of linen calls that decodes: its mask hides the keys that are still to come."""
    linen = sys.modules.get("flax.linen")
    stack = [None] if linen is None else linen.module._context.module_stack
    return bool(getattr(stack[-1], "decode", False))


def attention_weights(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: Any, mask: Any, **given: Any
) -> jax.Array:
    """Returns `[..., N, T, S]`, float32 or wider."""
    given |= dict(sink=None, dropout_offset=None, **_NO_DROPOUT)
    options, operands = arguments.prepare(_NAME, query, key, value, bias, mask, **given)
    p = blockwise.probabilities(blockwise.plane(options, operands), None)  # [..., K, G, T, S]
    return p.reshape(*query.shape[:-3], query.shape[-2], *p.shape[-2:])


def _sow(module: Any, weights: jax.Array) -> None:
    """Stores `weights` as Flax's own attention does; a module of a framework shows that it is imported."""
    linen, nnx = (sys.modules.get(f"flax.{api}") for api in ("linen", "nnx"))
    if linen is not None and isinstance(module, linen.Module):
        module.sow("intermediates", "attention_weights", weights)
    elif nnx is not None and isinstance(module, nnx.Module):
        module.sow(nnx.Intermediate, "attention_weights", weights)
    else:
        expected = "be the Flax module that sows the weights, of linen or NNX"
        raise TypeError(checks.message(_NAME, "module", expected, type(module).__name__))


class ConfiguredKeywords(LayerAttentionKeywords, Tokens, total=False):
    """Lists what `configured_attention_fn` may be given; None leaves it to the layer."""

    bias: jax.Array | None
    is_causal: bool | None
    input_positions: jax.Array | None
    rope: Callable[[jax.Array, jax.Array | None], jax.Array] | None
    deterministic_sums: bool | None
    forward_mode: bool | None
    implementation: Implementation | None


def configured_attention_fn(
    attention_fn: Callable[..., jax.Array] = attention_fn,
    *heads: Never,
    **options: Unpack[ConfiguredKeywords],
) -> Callable[..., jax.Array]:
    """`attention_fn` for Flax's layers with options that hold, whatever the layer passes.

        causal = configured_attention_fn(is_causal=True)
        nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=causal)
        nnx.MultiHeadAttention(8, 64, attention_fn=causal, decode=False, rngs=rngs)

    The layer of NNX passes `is_causal=False` with every call in which it is not asked for causality, and so
    undoes what `functools.partial(attention_fn, is_causal=True)` binds: the model sees the future, and no
    error says so. Here False, None and `()` from a layer leave an option alone, and any other value that is
    not the configured one is an error.

    Where causality may be asked for:

        Flax NNX         layer(x, is_causal=True), or attention_fn=configured_attention_fn(is_causal=True)
        Flax linen       attention_fn=configured_attention_fn(is_causal=True)
        our layers       is_causal=True at construction or in the call: Flax, Haiku, Equinox
        Keras            layer(x, x, use_causal_mask=True)
        all of them      mask=, with T x T booleans

    A step of decoding (one query, more keys and a mask of numbers, which says what the cache holds) is left
    to that mask: causality is not applied to the index of its only query.

    Args:
      attention_fn: what is configured: `jax_attn_bwd.attention_fn`, or what
        `jax_attn_bwd.parallel.attention_fn` returned.
      bias, is_causal, input_positions, rope, rotary, scale, local_window_size, query_seq_lengths,
        key_value_seq_lengths, query_segment_ids, key_value_segment_ids, query_positions, key_value_positions,
        logits_soft_cap, mask_mod, score_mod, mod_args, deterministic_sums, forward_mode,
        implementation: as in `jax_attn_bwd.attention_fn`; None (of `mod_args` an empty tuple) leaves it to
        the layer.

    Returns:
      A function with the arguments of `attention_fn`, each by its own name. Two that are made alike are equal
      unless they hold arrays: layers with equal ones are traced once.

    Gradients:
      As of `attention_fn`; arrays that are configured may be traced ones, and have gradients.

    Raises:
      TypeError, ValueError: an option is of the wrong kind, or `attention_fn` does not take it; when called,
        the layer passes another value of it; and as `attention_fn`.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from jax_attn_bwd import configured_attention_fn
      >>> causal = configured_attention_fn(is_causal=True)
      >>> layer = nnx.MultiHeadAttention(2, 8, attention_fn=causal, decode=False, rngs=nnx.Rngs(0))
      >>> x = jax.random.normal(jax.random.key(0), (1, 5, 8), "float32")
      >>> bool((layer(x)[:, :3] == layer(x.at[:, 3:].set(0.0))[:, :3]).all())
      True
    """
    if heads or checks.is_array(attention_fn):  # by a layer, which was handed this function itself
        expected = "be called when the layer is made, and not by it"
        remedy = f"write attention_fn={_CONFIGURED}(is_causal=True), with what it is told in parentheses"
        raise TypeError(checks.message(_CONFIGURED, "the function", expected, "queries and keys", remedy))
    known = ConfiguredKeywords.__optional_keys__
    if wrong := [name for name in options if name not in known]:
        raise keywords.unexpected(_CONFIGURED, wrong[0], known)
    given: dict[str, Any] = {name: x for name, x in options.items() if not is_unset(x)}
    check_callable(_CONFIGURED, attention_fn)
    for name in {"is_causal", "forward_mode"} & given.keys():
        given[name] = checks.flag(_CONFIGURED, name, given[name])
    checks.repeatable_sums(_CONFIGURED, given.get("deterministic_sums"))
    masks.window(_CONFIGURED, given.get("local_window_size"))
    for name in given.keys() - inspect.signature(attention_fn).parameters.keys():
        expected, remedy = "be left out: attention_fn does not take it", "configure jax_attn_bwd.attention_fn"
        raise TypeError(checks.message(_CONFIGURED, name, expected, repr(given[name]), remedy))
    return _Configured(attention_fn, given)


def check_callable(operator: str, attention_fn: Any) -> None:
    """Raises where something else stands in the place of an attention function."""
    if not callable(attention_fn):
        expected = "be a function like jax_attn_bwd.attention_fn"
        raise TypeError(checks.message(operator, "attention_fn", expected, type(attention_fn).__name__))


class AttentionFn:
    """Marks an attention function that is an object of this package."""


@dataclass(frozen=True, eq=False)
class _Configured(AttentionFn):
    """Calls an attention function with options of its own; layers hold it as a static attribute."""

    attention_fn: Callable[..., jax.Array]
    options: Mapping[str, Any]

    @property
    def __signature__(self) -> inspect.Signature:  # linen hands over what it names
        return inspect.signature(self.attention_fn)

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        given = self.__signature__.bind(*args, **kwargs).arguments
        options = dict(self.options)
        for name, x in options.items():
            passed = given.get(name)
            if passed is not False and not is_unset(passed) and not _is_same(passed, x):
                expected = "be what the function was configured with, or left out"
                values: tuple[Any, ...] = x, passed
                shown = [f"an array of shape {v.shape}" if checks.is_array(v) else repr(v) for v in values]
                got = f"{shown[1]} from the layer where {shown[0]} is configured"
                raise ValueError(checks.message("attention_fn", name, expected, got))
        if options.get("is_causal") and given.get("is_causal") is False and _may_decode(**given):
            del options["is_causal"]
        return self.attention_fn(**{**given, **options})

    def _value(self) -> Any:
        """Returns what equal functions share; one that holds arrays equals itself alone."""
        try:
            value = (self.attention_fn, frozenset(self.options.items()))
            hash(value)
        except TypeError:
            return id(self)
        return value

    def __eq__(self, other: Any) -> bool:
        return self._value() == other._value() if isinstance(other, _Configured) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._value())


def _is_same(passed: Any, configured: Any) -> bool:
    """Tells whether a layer passes the configured value; arrays are the same where they are one object."""
    if passed is configured:
        return True
    holds_arrays = any(checks.is_array(x) for x in jax.tree.leaves((passed, configured)))
    return not holds_arrays and type(passed) is type(configured) and bool(passed == configured)


def is_ours(attention: Any) -> bool:
    """Tells whether a function is `attention_fn`, a configured one, or one over a mesh."""
    return attention is attention_fn or isinstance(attention, AttentionFn)
