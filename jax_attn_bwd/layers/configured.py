"""`jax_attn_bwd.configured_attention_fn`: options that hold, whatever a framework passes."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_attn_bwd._core import checks, masks
from jax_attn_bwd._core.rotary import Rotary
from jax_attn_bwd._core.types import Implementation
from jax_attn_bwd.layers.attention_fn import attention_fn as plain_attention_fn

_NAME = "configured_attention_fn"


def configured_attention_fn(
    attention_fn: Callable[..., jax.Array] = plain_attention_fn,
    *,
    bias: jax.Array | None = None,
    is_causal: bool | None = None,
    input_positions: jax.Array | None = None,
    rope: Callable[[jax.Array, jax.Array | None], jax.Array] | None = None,
    rotary: Rotary | None = None,
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
    forward_mode: bool | None = None,
    implementation: Implementation | None = None,
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
        our linen layer  MultiHeadAttention(..., is_causal=True), in place of an attention_fn
        Haiku, Equinox   is_causal=True of the layers in jax_attn_bwd.layers
        all of them      mask=, with T x T booleans

    A step of decoding (one query, more keys and a mask of numbers, which says what the cache holds) is left
    to that mask: causality is not applied to the index of its only query.

    Args:
      attention_fn: what is configured: `jax_attn_bwd.attention_fn`, or what
        `jax_attn_bwd.parallel.attention_fn` returned.
      bias, is_causal, input_positions, rope, rotary, local_window_size, query_seq_lengths,
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
    options = {name: x for name, x in locals().items() if name != "attention_fn" and not _is_unset(x)}
    if not callable(attention_fn):
        expected = "be a function like jax_attn_bwd.attention_fn"
        raise TypeError(checks.message(_NAME, "attention_fn", expected, type(attention_fn).__name__))
    for name in {"is_causal", "deterministic_sums", "forward_mode"} & options.keys():
        options[name] = checks.flag(_NAME, name, options[name])
    masks.window(_NAME, local_window_size)
    for name in options.keys() - inspect.signature(attention_fn).parameters.keys():
        expected, remedy = "be left out: attention_fn does not take it", "configure jax_attn_bwd.attention_fn"
        raise TypeError(checks.message(_NAME, name, expected, repr(options[name]), remedy))
    return _Configured(attention_fn, options)


def _is_unset(x: Any) -> bool:
    return x is None or (isinstance(x, tuple) and not x)


@dataclass(frozen=True, eq=False)
class _Configured:
    """An attention function and the options that it is called with; layers hold it as a static attribute."""

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
            if passed is not False and not _is_unset(passed) and not _is_same(passed, x):
                expected = "be what the function was configured with, or left out"
                values: tuple[Any, ...] = x, passed
                shown = [f"an array of shape {v.shape}" if checks.is_array(v) else repr(v) for v in values]
                got = f"{shown[1]} from the layer where {shown[0]} is configured"
                raise ValueError(checks.message("attention_fn", name, expected, got))
        if options.get("is_causal") and given.get("is_causal") is False and _may_decode(**given):
            del options["is_causal"]
        return self.attention_fn(**{**given, **options})

    def _value(self) -> Any:
        """What equal functions share; one that holds arrays equals itself alone."""
        value = (self.attention_fn, frozenset(self.options.items()))
        hash(value)
        return value

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, _Configured):
            return NotImplemented
        try:
            return self is other or self._value() == other._value()
        except TypeError:
            return False

    def __hash__(self) -> int:
        try:
            return hash(self._value())
        except TypeError:
            return id(self)


def _is_same(passed: Any, configured: Any) -> bool:
    if passed is configured:
        return True
    holds_arrays = any(checks.is_array(x) for x in jax.tree.leaves((passed, configured)))
    return not holds_arrays and type(passed) is type(configured) and bool(passed == configured)


def _may_decode(query: jax.Array, key: jax.Array, mask: Any = None, **others: Any) -> bool:
    """Whether a call looks like a step of decoding in NNX, which lets the mask say what the cache holds."""
    numbers = checks.is_array(mask) and mask.dtype != np.bool_
    return numbers and query.ndim > 2 and query.shape[-3] == 1 < key.shape[-3]
