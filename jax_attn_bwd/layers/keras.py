"""Layers for Keras 3 on its JAX backend, which they choose where nothing has chosen one before Keras."""

import dataclasses
import inspect
import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Unpack

import jax.numpy as jnp

if "keras" not in sys.modules:
    os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from keras.src import backend

from jax_attn_bwd._core import checks, keywords, masks
from jax_attn_bwd._core.rotary import Rotary
from jax_attn_bwd._core.types import Implementation
from jax_attn_bwd.layers import multi_head
from jax_attn_bwd.layers.attention_fn import attention_weights
from jax_attn_bwd.layers.multi_head import Tokens
from jax_attn_bwd.ops.dot_product import dot_product_attention

if keras.backend.backend() != "jax":
    raise ImportError(
        f"jax_attn_bwd.layers.keras needs the JAX backend of Keras, got {keras.backend.backend()!r}; set the "
        "environment variable KERAS_BACKEND=jax before Keras is imported"
    )

__all__ = ["GroupedQueryAttention", "MultiHeadAttention", "use_attention"]

_REMEDY = "Keras' layers have no bias: jax_attn_bwd.dot_product_attention(bias=) has"
_PADDED_QUERY, _PADDED_KEY = -(2**31), 1 - 2**31  # segments of what Keras' masks leave out


class Seen(dict[str, Any]):
    """Holds who sees whom, as arguments of `dot_product_attention`."""


class _Layer(keras.layers.Layer):
    """Replaces the attention inside a Keras layer, before which it stands among the bases.

    Keras' `call` hands what `_compute_attention_mask` returns on to `_compute_attention` and does not look at
    it. Both are replaced here, and `Seen` takes the place of a mask of T x S between them.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        _check_names(self, kwargs)
        options = {name: kwargs.pop(name, default) for name, default in multi_head.OPTIONS.items()}
        super().__init__(*args, **kwargs)
        name = type(self).__name__
        window = masks.window(name, options["local_window_size"])
        if window is not None and _sliding_window(self) is not None:
            expected = "be left out beside sliding_window"
            raise ValueError(checks.message(name, "local_window_size", expected, window))
        for option, x in {**options, "local_window_size": window}.items():
            if isinstance(x, dict):  # from a file
                x = Rotary(**x) if option == "rotary" else keras.saving.deserialize_keras_object(x)
            setattr(self, option, x)

    def get_config(self) -> dict[str, Any]:
        """Returns Keras' configuration, and those options that differ from the defaults."""
        own = {n: x for n, x in multi_head.options_of(self).items() if x != multi_head.OPTIONS[n]}
        if "rotary" in own:
            own["rotary"] = dataclasses.asdict(own["rotary"])
        return {**super().get_config(), **own}

    @keywords.known
    def call(
        self, query, value, key=None, query_mask=None, value_mask=None, key_mask=None, attention_mask=None,
        return_attention_scores=False, training=None, use_causal_mask=False, **tokens: Unpack[Tokens],
    ):  # fmt: skip
        """Attends like Keras' layer.

        Args:
          query, value, key: `[B, T, Eq]`, `[B, S, Ev]`, `[B, S, Ek]`; key None = value.
          query_mask, value_mask, key_mask: `[B, T]`, `[B, S]`, True = a token; Keras fills them in by itself,
            and `MultiHeadAttention` heeds no other query_mask.
          attention_mask: broadcasts to `[B, T, S]` or `[B, N, T, S]`; True, or a number that is not 0,
            attends.
          return_attention_scores: also return the weights `[B, N, T, S]` before dropout.
          training: True = with dropout; None = as the caller's layer.
          use_causal_mask: a query sees keys up to its own index.
          tokens: see `jax_attn_bwd.layers.multi_head`.

        Returns:
          `[B, T, E]`, or a pair of it and the weights.
        """
        name = type(self).__name__
        seen: Any = Seen(multi_head.complete(f"{name}.call", Tokens, tokens), mask=attention_mask)
        if self._is_overridden():
            given = [token for token, x in tokens.items() if not multi_head.is_unset(x)]
            if given:
                expected = "be left out with a _compute_attention of the caller's"
                raise TypeError(checks.message(name, ", ".join(given), expected, "arrays"))
            seen = attention_mask
        padding = query_mask, value_mask, key_mask
        return super().call(
            query, value, key, *padding, seen, return_attention_scores, training, use_causal_mask
        )

    def _is_overridden(self) -> bool:
        """Tells whether a class of the caller's has a `_compute_attention`, which expects Keras' arrays."""
        return type(self)._compute_attention is not _Layer._compute_attention

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """Returns shapes and dtypes of what a call returns, of which tokens tell nothing."""
        known = {name: x for name, x in kwargs.items() if name not in Tokens.__optional_keys__}
        return super().compute_output_spec(*args, **known)

    def _compute_attention_mask(
        self, query, value, query_mask=None, value_mask=None, key_mask=None, attention_mask=None,
        use_causal_mask=False,
    ) -> Any:  # fmt: skip
        """Returns `Seen` for what this layer's `call` hands over, else Keras' mask of T x S."""
        padding = query_mask, value_mask, key_mask
        if not isinstance(attention_mask, Seen):
            return super()._compute_attention_mask(query, value, *padding, attention_mask, use_causal_mask)
        seen = Seen(attention_mask, is_causal=bool(use_causal_mask))
        if (window := _sliding_window(self)) is not None:
            seen["local_window_size"] = (window - 1, window - 1)
        if any(x is not None for x in padding):
            _leave_out(type(self).__name__, seen, query, value, *padding)
        return seen

    def _compute_attention(self, *called: Any, **named: Any) -> Any:
        return _attend(self, multi_head.options_of(self), *called, **named)


@keras.saving.register_keras_serializable("jax_attn_bwd")
class MultiHeadAttention(_Layer, keras.layers.MultiHeadAttention):
    """`keras.layers.MultiHeadAttention` with `jax_attn_bwd.dot_product_attention` between its projections.

    Every argument of Keras', the same weights under the same paths, and initial values: change the import,
    and a file of weights loads, either way. A configuration of Keras' is one of this layer, and one without
    the options below is one of Keras'. LoRA, quantization, regularizers and dtype policies are those of
    Keras' projections, which stay. Causality, `sliding_window` and the masks that Keras carries along form no
    array of T x S, nor does dropout; weights are formed where they are returned.

    Differs from Keras' in that a query which sees nothing, as padding, gives the output bias, not a mean over
    hidden keys, and that an error is raised, where Keras logs it and computes otherwise. Dropout draws other
    masks than Keras' for the same seed. With `flash_attention` weights are not returned, as in Keras;
    otherwise it changes nothing.

    Args:
      num_heads, key_dim, ...: all of `keras.layers.MultiHeadAttention`, by position or by name.
      scale, local_window_size, logits_soft_cap, mask_mod, score_mod, rotary, deterministic_sums,
        implementation, forward_mode: see `jax_attn_bwd.layers.multi_head`, which also tells what a call
        takes. A model saves them, functions by the names under which they are registered with Keras: one of
        `jax_attn_bwd.mods` is saved within a function of yours.

    Raises:
      ValueError: `local_window_size` beside `sliding_window`.
      TypeError: a call with floating values in `attention_mask` other than 0 and 1; where they are traced, a
        negative one gives NaN.
      NotImplementedError: a call with masks that Keras carries along, for inputs that are not `[B, T, E]`.

    Example:
      >>> from jax_attn_bwd.layers.keras import MultiHeadAttention
      >>> import keras  # after it, or with KERAS_BACKEND=jax
      >>> layer = MultiHeadAttention(num_heads=2, key_dim=4)
      >>> x = keras.random.normal((1, 5, 8), seed=0)
      >>> layer(x, x, use_causal_mask=True).shape
      (1, 5, 8)
    """


@keras.saving.register_keras_serializable("jax_attn_bwd")
class GroupedQueryAttention(_Layer, keras.layers.GroupQueryAttention):
    """`keras.layers.GroupQueryAttention` with `jax_attn_bwd.dot_product_attention` between its projections.

    As `MultiHeadAttention`, with the arguments of `keras.layers.GroupQueryAttention`. Key heads are not
    repeated: each is read by its queries.

    Example:
      >>> from jax_attn_bwd.layers.keras import GroupedQueryAttention
      >>> import keras  # after it, or with KERAS_BACKEND=jax
      >>> layer = GroupedQueryAttention(head_dim=4, num_query_heads=4, num_key_value_heads=2)
      >>> x = keras.random.normal((1, 5, 8), seed=0)
      >>> layer(x, x, use_causal_mask=True).shape
      (1, 5, 8)
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if not self._is_overridden():
            self.num_repeats = 1


def _sliding_window(layer: Any) -> int | None:
    """Returns Keras' `sliding_window`, which its layers keep under two names."""
    return getattr(layer, "_sliding_window", getattr(layer, "sliding_window", None))


def _leave_out(layer: str, seen: Seen, query, value, query_mask, value_mask, key_mask) -> None:
    """Puts padding into segments of its own."""
    if query.ndim != 3:
        expected, remedy = "be [B, T, E] where it or value carries a mask of Keras", "give attention_mask"
        raise NotImplementedError(checks.message(layer, "query", expected, query.shape, remedy))
    names = "query_segment_ids", "key_value_segment_ids"
    if all(seen[name] is None for name in names):
        for name, x in zip(names, (query, value), strict=True):
            seen[name] = jnp.zeros(x.shape[1], jnp.int32)
    padding = (0, query_mask, _PADDED_QUERY), (1, value_mask, _PADDED_KEY), (1, key_mask, _PADDED_KEY)
    for side, mask, segment in padding:
        if mask is not None and seen[names[side]] is not None:
            seen[names[side]] = jnp.where(jnp.asarray(mask, bool), seen[names[side]], segment)


def _check_names(layer: Any, given: Mapping[str, Any]) -> None:
    """Answers a word of another library; what nobody knows Keras refuses itself."""
    base = next(c for c in type(layer).__mro__ if c.__module__.startswith("keras."))
    names = {*inspect.signature(base).parameters, *multi_head.OPTIONS}
    others = keywords.names_of(_Layer.call)
    for name in given.keys() - names:
        if keywords.remedy(name, names) or name in others or keywords.remedy(name, others):
            raise keywords.unexpected(f"{type(layer).__name__}.__init__", name, names, others)


def _attend(
    layer: Any, options: dict[str, Any], query, key, value, attention_mask=None, training=None,
    return_attention_scores=None, use_causal_mask=False,
) -> tuple[Any, Any]:  # fmt: skip
    """Computes what stands between the projections of Keras: the heads' outputs, and weights or None."""
    name = type(layer).__name__
    if return_attention_scores is None:
        return_attention_scores = getattr(layer, "_return_attention_scores", False)
    if layer._flash_attention and return_attention_scores:
        # in Keras' own words
        raise ValueError(
            "Returning attention scores is not supported when flash attention is enabled. Please disable "
            "flash attention to access attention scores."
        )
    # Who sees whom: what our layers say, or the mask that Keras made.
    if not isinstance(attention_mask, Seen):
        told = multi_head.complete(name, Tokens, {})
        attention_mask = Seen(told, mask=attention_mask, is_causal=bool(use_causal_mask))
    options = {**options, **attention_mask}
    # Axes that are attended over become one, before those of heads.
    axes = getattr(layer, "_attention_axes", (1,))
    rows, columns = ([x.shape[axis] for axis in axes] for x in (query, key))
    others = [axis for axis in range(query.ndim - 2) if axis not in axes]
    order = (*others, *axes, query.ndim - 2, query.ndim - 1)
    flat = (x.transpose(order) for x in (query, key, value))
    flat = (x.reshape(*x.shape[: len(others)], -1, *x.shape[-2:]) for x in flat)
    q, k, v = multi_head.promote(None, *flat)
    numbers = options.pop("mask")
    mask = multi_head.flax_mask(name, numbers, _REMEDY)
    if mask is not None:
        mask = _plane(mask, len(others) + 1, rows, columns)
    # Rotation, attention, and where they are returned the weights.
    positions = options["query_positions"], options["key_value_positions"]
    q, k = multi_head.rotated(name, options.pop("rotary"), q, k, *positions)
    drop = {}
    if layer.dropout > 0 and training:
        drop = dict(dropout_rate=layer.dropout, dropout_key=layer._dropout_layer.seed_generator.next())
    out = multi_head.nan_if_additive(dot_product_attention(q, k, v, mask=mask, **options, **drop), numbers)
    out = out.reshape(*(query.shape[axis] for axis in (*others, *axes)), *out.shape[-2:])
    out = out.transpose([order.index(axis) for axis in range(query.ndim)])
    if not return_attention_scores:
        return out, None
    for option in ("implementation", "forward_mode"):
        del options[option]
    scores = attention_weights(q, k, v, None, mask, **options, broadcast_dropout=False, precision=None)
    scores = multi_head.nan_if_additive(scores, numbers).astype(out.dtype)
    return out, scores.reshape(*scores.shape[:-2], *rows, *columns)


def _plane(mask: Any, lead: int, rows: list[int], columns: list[int]) -> Any:
    """Returns a mask that broadcasts to `[..., N, T, S]`, with `lead` axes before those of tokens.

    Axes that it lacks are added just before those of tokens, as in Keras.
    """
    tokens = len(rows) + len(columns)
    own = max(mask.ndim - tokens, 0)
    ones = (1,) * (lead + tokens - mask.ndim)
    mask = mask.reshape(*mask.shape[:own], *ones, *mask.shape[own:])
    if len(rows) == 1:
        return mask
    mask = jnp.broadcast_to(mask, (*mask.shape[:lead], *rows, *columns))
    return mask.reshape(*mask.shape[:lead], math.prod(rows), math.prod(columns))


_NAME = "use_attention"

_SEAMS: list[tuple[Any, str]] = [
    (keras.layers.MultiHeadAttention, "_compute_attention"),
    (keras.layers.GroupQueryAttention, "_compute_attention"),
    (backend.nn, "dot_product_attention"),
]
# What may stand at the seams, the last of it does: Keras' own, and that of each context which lasts.
_stack: list[list[Any]] = []
_lock = threading.Lock()


@keywords.known
@contextmanager
def use_attention(
    *,
    implementation: Implementation | None = None,
    deterministic_sums: bool | None = None,
    forward_mode: bool = False,
) -> Iterator[None]:
    """Puts this package's attention in place of Keras' own, for models as they are.

        with use_attention():
            model.fit(x, y)

    Within the context `keras.layers.MultiHeadAttention`, `keras.layers.GroupQueryAttention` and the classes
    built on them attend as the layers of `jax_attn_bwd.layers.keras` do, with dropout and returned weights
    too, and `keras.ops.dot_product_attention` is `jax_attn_bwd.dot_product_attention`. Errors are raised,
    where Keras logs them and computes otherwise. Heads of a query that sees nothing are 0. In the layers
    `sliding_window` and masks that Keras carries along are masks of T x S; those of
    `jax_attn_bwd.layers.keras` need none.

    It holds for every thread of the process while the context lasts; where several last, the one that was
    entered last counts. What was compiled stays as it was compiled: enter it before the first step of a
    model, or call its `make_train_function(force=True)`.

    Args:
      implementation, deterministic_sums, forward_mode: as in `jax_attn_bwd.dot_product_attention`.

    Raises:
      TypeError: `keras.ops.dot_product_attention` with floating values other than 0 and 1 in `mask`; where
        they are traced, a negative one gives NaN. (Keras' layers make booleans of theirs: not 0 attends.)
      NotImplementedError: `keras.ops.dot_product_attention` with `attn_logits_soft_cap`.

    Example:
      >>> from jax_attn_bwd.layers.keras import use_attention
      >>> import keras  # after it, or with KERAS_BACKEND=jax
      >>> layer = keras.layers.MultiHeadAttention(num_heads=2, key_dim=4)
      >>> x = keras.random.normal((1, 5, 8), seed=0)
      >>> with use_attention():
      ...     layer(x, x, use_causal_mask=True).shape
      (1, 5, 8)
    """
    own: dict[str, Any] = dict(
        implementation=implementation, deterministic_sums=deterministic_sums, forward_mode=forward_mode
    )
    options = {**multi_head.OPTIONS, **own}

    def in_layer(self, *called: Any, **named: Any) -> Any:
        return _attend(self, options, *called, **named)

    def in_op(
        query, key, value, bias=None, mask=None, scale=None, is_causal=False, flash_attention=None,
        attn_logits_soft_cap=None,
    ):  # fmt: skip
        """Computes `keras.ops.dot_product_attention`."""
        if attn_logits_soft_cap is not None:
            expected, remedy = "be None", "use jax_attn_bwd.dot_product_attention(logits_soft_cap=)"
            raise NotImplementedError(
                checks.message(_NAME, "attn_logits_soft_cap", expected, attn_logits_soft_cap, remedy)
            )
        query, key, value, bias = multi_head.promote(None, query, key, value, bias)
        numbers, mask = mask, multi_head.flax_mask(_NAME, mask, "pass them as bias=")
        given = dict(scale=scale, is_causal=bool(is_causal), **own)
        out = dot_product_attention(query, key, value, bias, mask, **given)
        return multi_head.nan_if_additive(out, numbers)

    ours = [in_layer, in_layer, in_op]
    with _lock:
        if not _stack:
            _stack.append([getattr(place, name) for place, name in _SEAMS])
        _stack.append(ours)
        _put_last()
    try:
        yield
    finally:
        with _lock:
            _stack.remove(ours)
            _put_last()
            if len(_stack) == 1:
                _stack.clear()


def _put_last() -> None:
    for (place, name), function in zip(_SEAMS, _stack[-1], strict=True):
        setattr(place, name, function)
