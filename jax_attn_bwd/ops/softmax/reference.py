"""THE DEFINITION of the scaled masked softmax: plain jnp, any dtype. Every test measures against it."""

import jax.numpy as jnp
from jax import lax


def scaled_masked_softmax(
    x,
    mask=None,
    *,
    scale=1.0,
    bias=None,
    sink=None,
    axis=-1,
    is_causal=False,
    local_window_size=None,
    fully_masked="zero",
):
    """softmax(scale * x + bias) over `axis` where visible, 0 elsewhere."""
    logits, visible = scale * x, jnp.ones(x.shape, bool)
    if mask is not None:
        visible &= mask
    if bias is not None:
        logits, visible = logits + bias, visible & (bias != -jnp.inf)
    row, column = jnp.arange(x.shape[-2])[:, None] if x.ndim > 1 else 0, jnp.arange(x.shape[-1])
    if is_causal:
        visible &= column <= row
    if local_window_size is not None:
        left, right = jnp.broadcast_to(jnp.asarray(local_window_size), (2,))
        visible &= (row - column <= left) & (column - row <= right)
    terms = jnp.where(visible, logits, -jnp.inf)
    rows = x.shape[: axis % x.ndim] + x.shape[axis % x.ndim :][1:]
    sink = jnp.asarray(-jnp.inf, x.dtype) if sink is None else sink
    extra = jnp.expand_dims(jnp.broadcast_to(sink, rows), axis)
    top = jnp.maximum(terms.max(axis, keepdims=True, initial=-jnp.inf), extra)
    top = lax.stop_gradient(top)  # nothing depends on it
    top = jnp.where(top == -jnp.inf, 0, top)
    total = jnp.exp(terms - top).sum(axis, keepdims=True) + jnp.exp(extra - top)
    y = jnp.exp(terms - top) / jnp.where(total == 0, 1, total)
    filler = {"zero": 0, "uniform": 1 / max(x.shape[axis], 1), "nan": jnp.nan}[fully_masked]
    return jnp.where(visible.any(axis, keepdims=True), y, filler)
