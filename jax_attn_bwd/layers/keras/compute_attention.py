"""What stands between the projections of a Keras layer: rotation, attention, dropout, weights."""

import math
from typing import Any

import jax.numpy as jnp

from jax_attn_bwd.layers import multi_head
from jax_attn_bwd.layers.attention_fn import attention_weights
from jax_attn_bwd.layers.multi_head import Tokens
from jax_attn_bwd.ops.dot_product import dot_product_attention

_REMEDY = "Keras' layers have no bias: jax_attn_bwd.dot_product_attention(bias=) has"


class Seen(dict[str, Any]):
    """Holds who sees whom, as arguments of `dot_product_attention`."""


def compute_attention(
    layer: Any, query, key, value, attention_mask, training, return_attention_scores, use_causal_mask,
    **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Returns what `_compute_attention` of a Keras layer does: the heads' outputs, and weights or None."""
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
    options |= attention_mask
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
