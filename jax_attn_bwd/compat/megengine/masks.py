"""Which keys a query sees: the source's rules for merging its masks, in their order."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks, numerics
from jax_attn_bwd.compat.multi_head import mask, merged

_STYLE = "maybe_cudnn_style_mask=True"


def mask_options(
    operator: str,
    batched: bool,
    shape: tuple[int, int, int, int],
    key_padding_mask: Any,
    attn_mask: Any,
    is_causal: Any,
    maybe_cudnn_style_mask: Any,
) -> dict[str, Any]:
    """The layer's `mask`, `bias` and `is_causal`; `shape` is (N, L, S, num_heads)."""
    is_causal = checks.flag(operator, "is_causal", is_causal)
    if checks.flag(operator, "maybe_cudnn_style_mask", maybe_cudnn_style_mask):
        seen = _cudnn_style(operator, shape, key_padding_mask, attn_mask)
        return {"mask": seen, "bias": None, "is_causal": False}
    if attn_mask is None and key_padding_mask is None:
        return {"mask": None, "bias": None, "is_causal": is_causal}
    N, L, S, H = shape
    padding = allowed = None
    if key_padding_mask is not None:
        padding = mask(operator, "key_padding_mask", key_padding_mask)
        letters, expected = ("(N, S)", (N, S)) if batched else ("(S,)", (S,))
        _check(operator, "key_padding_mask", padding, letters, expected)
        padding = padding.reshape(N, 1, 1, S)
    if attn_mask is not None:
        allowed = mask(operator, "attn_mask", attn_mask)
        if allowed.ndim == 3:
            letters = "(N * num_heads, L, S)" if batched else "(num_heads, L, S)"
            _check(operator, "attn_mask", allowed, letters, (N * H, L, S))
        else:
            _check(operator, "attn_mask", allowed, "(L, S)", (L, S))
        allowed = allowed.reshape(*((N, H) if allowed.ndim == 3 else (1, 1)), L, S)
    return {**merged(padding, allowed), "is_causal": False}


def _check(operator: str, argument: str, x: jax.Array, letters: str, expected: tuple) -> None:
    if x.shape != expected:
        remedy = f"a mask in cudnn style needs {_STYLE}"
        wanted = f"have shape {letters} = {expected}"
        raise ValueError(checks.message(operator, argument, wanted, x.shape, remedy))


def _cudnn_style(
    operator: str, shape: tuple[int, int, int, int], key_padding_mask: Any, attn_mask: Any
) -> jax.Array:
    """`(N, 1, L, S)`: key s counts in the window of query l, and both lie within their lengths."""
    N, L, S, _ = shape
    given = {"attn_mask": ("(2, L)", (2, L)), "key_padding_mask": ("(2, N)", (2, N))}
    tables = []
    for (argument, (letters, expected)), x in zip(given.items(), (attn_mask, key_padding_mask), strict=True):
        if x is None:
            raise ValueError(checks.message(operator, argument, f"be given with {_STYLE}", None))
        x = checks.integers(operator, argument, x)
        checks.shape(operator, argument, x, f"{letters}, with {_STYLE},", expected)
        tables.append(numerics.saturated(x))  # a narrow one cannot hold every index
    (first, last), (queries, keys) = tables
    row, column = jnp.arange(L, dtype=jnp.int32), jnp.arange(S, dtype=jnp.int32)
    window = (first[:, None] <= column[None]) & (column[None] < last[:, None])  # (L, S)
    live = row[None] < queries[:, None]  # (N, L)
    seen = column[None] < keys[:, None]  # (N, S)
    return (window[None] & live[:, :, None] & seen[:, None])[:, None]
