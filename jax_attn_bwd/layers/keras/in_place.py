"""Attention of this package in place of Keras' own, in models as they are."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src import backend

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.types import Implementation
from jax_attn_bwd.layers import multi_head
from jax_attn_bwd.layers.keras.multi_head import compute_attention
from jax_attn_bwd.ops.dot_product import dot_product_attention

_NAME = "use_attention"

_SEAMS: list[tuple[Any, str]] = [
    (keras.layers.MultiHeadAttention, "_compute_attention"),
    (keras.layers.GroupQueryAttention, "_compute_attention"),
    (backend.nn, "dot_product_attention"),
]
# What may stand at the seams, the last of it does: Keras' own, and that of each context which lasts.
_stack: list[list[Any]] = []
_lock = threading.Lock()


@contextmanager
def use_attention(
    *,
    implementation: Implementation | None = None,
    deterministic_sums: bool = True,
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

    def in_layer(
        self, query, key, value, attention_mask=None, training=None, return_attention_scores=None,
        use_causal_mask=False,
    ):  # fmt: skip
        called = attention_mask, training, return_attention_scores, use_causal_mask
        return compute_attention(self, query, key, value, *called, **options)

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
        return multi_head.nan_if_additive(
            dot_product_attention(query, key, value, bias, mask, **given), numbers
        )

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
