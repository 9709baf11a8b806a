"""cuDNN's two primitives in jnp: the same algebra, rounded where cuDNN rounds; see `kernels/cudnn.py`.

Where cuDNN promises nothing, and where it is wrong, this answers NaN.
"""

import jax
import jax.numpy as jnp

from jax_attn_bwd.ops.dot_product.kernels.cudnn import Arrays, Call


def forward(call: Call, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """Computes (out `[B, T, N, H]`, stat float32 `[B, N, T]`), as `cudnn.run_forward`."""
    logits, seen = _logits(call, arrays)
    top = logits.max(-1, keepdims=True)
    p = jnp.exp(logits - top)
    total = p.sum(-1, keepdims=True)
    out = _einsum("bnts,bsnh->btnh", _narrow(p, arrays), _repeat_heads(arrays.v, arrays))
    stat = jnp.where(seen.any(-1), (top + jnp.log(total))[..., 0], jnp.nan)
    out = out / jnp.swapaxes(total, 1, 2)
    return _narrow(jnp.where(jnp.swapaxes(jnp.isnan(stat), 1, 2)[..., None], jnp.nan, out), arrays), stat


def backward(
    call: Call, arrays: Arrays, stat: jax.Array, out: jax.Array, dout: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Computes (dq, dk, dv, dbias) as `cudnn.run_backward`, dbias of the shape of the bias."""
    # P from the stat, delta from the output
    logits, seen = _logits(call, arrays)
    p = jnp.where(seen, jnp.exp(logits - stat[..., None]), 0)
    delta = jnp.swapaxes((_wide(dout) * _wide(out)).sum(-1), 1, 2)[..., None]
    dp = _einsum("btnh,bsnh->bnts", dout, _repeat_heads(arrays.v, arrays))
    dlogits = p * (dp - delta)
    # products of what is rounded to the dtype of the operands
    narrow = _narrow(dlogits, arrays)
    dq = call.scale * _einsum("bnts,bsnh->btnh", narrow, _repeat_heads(arrays.k, arrays))
    dk = call.scale * _einsum("bnts,btnh->bsnh", narrow, arrays.q)
    dv = _einsum("bnts,btnh->bsnh", _narrow(p, arrays), dout)
    # nothing is promised beyond the ends
    if arrays.rows_end is not None and arrays.columns_end is not None:
        dq = jnp.where(_beyond(arrays.rows_end, dq), jnp.nan, dq)
        dk, dv = (jnp.where(_beyond(arrays.columns_end, x), jnp.nan, x) for x in (dk, dv))
    # of each group of query heads
    B, S, K, _ = arrays.k.shape
    dk, dv = (x.reshape(B, S, K, -1, x.shape[3]).sum(3) for x in (dk, dv))
    dbias = None
    if arrays.bias is not None:
        shared = tuple(i for i, n in enumerate(arrays.bias.shape) if n == 1 != dlogits.shape[i])
        dbias = dlogits.sum(shared, keepdims=True).astype(arrays.bias.dtype)
    return _narrow(dq, arrays), _narrow(dk, arrays), _narrow(dv, arrays), dbias


def _logits(call: Call, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """Returns (float32 logits, which of them are seen), `[B, N, T, S]`."""
    logits = call.scale * _einsum("btnh,bsnh->bnts", arrays.q, _repeat_heads(arrays.k, arrays))
    if arrays.bias is not None:
        logits = logits + _wide(arrays.bias)
    row, column = (jnp.arange(n, dtype=jnp.int32) for n in logits.shape[-2:])
    row, column = row[None, None, :, None], column[None, None, None]
    seen = jnp.ones((1, 1, *logits.shape[-2:]), bool)
    if call.is_causal:
        seen = seen & (column <= row)
        if call.window is not None:
            seen = seen & (column > row - call.window)
    if arrays.rows_end is not None and arrays.columns_end is not None:
        rows, columns = (x[:, None, None, None] for x in (arrays.rows_end, arrays.columns_end))
        seen = seen & (row < rows) & (column < columns)
    seen = jnp.broadcast_to(seen, logits.shape)
    return jnp.where(seen, logits, -jnp.finfo(jnp.float32).max), seen


def _beyond(end: jax.Array, x: jax.Array) -> jax.Array:
    return (jnp.arange(x.shape[1], dtype=jnp.int32)[None] >= end[:, None])[..., None, None]


def _repeat_heads(x: jax.Array, arrays: Arrays) -> jax.Array:
    """Repeats keys or values for the query heads of each."""
    return jnp.repeat(x, arrays.q.shape[2] // x.shape[2], axis=2)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _narrow(x: jax.Array, arrays: Arrays) -> jax.Array:
    return x.astype(arrays.q.dtype)


def _einsum(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, _wide(x), _wide(y), precision="highest")
