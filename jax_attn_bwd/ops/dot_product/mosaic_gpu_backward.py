"""Hopper backward of dense attention (Pallas Mosaic GPU); the equations are those of `backward.py`.

XLA computes delta (7) and the gradient of the sink (9); the rest are kernels:

    mosaic_gpu_query_gradients.py   dq; row sums of dlogits; the gradient of a full bias
    mosaic_gpu_key_gradients.py     dk and dv; column sums of dlogits; the fused kernel

The pair dq; dk, dv needs seven products a tile and no workspace beyond two row values, adds in one order,
and gives the same bits every time. With `deterministic=False` the fused kernel needs five. A bias gradient is
summed in the kernels over what the bias broadcasts: never more than the gradient itself is stored.

References:
  Shah et al., FlashAttention-3, 2024, arXiv:2407.08608.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import mosaic_gpu, pallas
from jax_attn_bwd._core.numerics import reduce_to, to_rank
from jax_attn_bwd._core.sharding import match_type
from jax_attn_bwd.ops.dot_product import mosaic_gpu_key_gradients as by_key
from jax_attn_bwd.ops.dot_product import mosaic_gpu_query_gradients as by_query
from jax_attn_bwd.ops.dot_product import mosaic_gpu_tiles as tiles
from jax_attn_bwd.ops.dot_product.mosaic_gpu_gradients import Saved
from jax_attn_bwd.ops.dot_product.mosaic_gpu_tiles import LOG2_E
from jax_attn_bwd.ops.dot_product.spec import (
    DotProductAttentionGrads,
    Operands,
    Options,
    Residuals,
)


def backward(
    options: Options, residuals: Residuals, dout: jax.Array | None, dlse: jax.Array | None
) -> DotProductAttentionGrads:
    """Gradients of the operands in `residuals.wanted`; a cotangent that is None is zero."""
    run = partial(_backward, options, pallas.is_interpreted(mosaic_gpu.NAME))
    keys = tiles.dropout_keys(options, residuals.operands)
    return pallas.on_local_shards(run, _out_specs, (residuals, dout, dlse, keys))


def _out_specs(residuals: Residuals, *_: Any) -> DotProductAttentionGrads:
    specs = residuals.operands._asdict()
    return DotProductAttentionGrads(**{name: specs[name] for name in residuals.wanted.names})


@partial(jax.jit, static_argnums=(0, 1))
def _backward(options, interpret, residuals, dout, dlse, keys):
    operands, wanted = residuals.operands, residuals.wanted.names
    (*batch, T, N, H), (S, K, _) = operands.query.shape, operands.key.shape[-3:]
    Hv = operands.value.shape[-1]
    saved, dsink = _prepare(options, residuals, dout, dlse, keys)
    made = {}
    qkv = wanted & {"query", "key", "value"}
    if not options.deterministic and len(qkv) == 3 and by_key.can_fuse(options, saved):
        made = by_key.keys(options, interpret, saved, qkv)
    else:
        if "query" in qkv:
            made["query"] = by_query.queries(options, interpret, saved)["query"]
        rest = qkv - {"query"}
        # the accumulators of dk and dv fit the registers together up to H = 128
        for names in [rest] if saved.head <= 128 else [frozenset({name}) for name in rest]:
            made |= by_key.keys(options, interpret, saved, names) if names else {}

    grads = {}
    shapes = {"query": (T, N, H), "key": (S, K, H), "value": (S, K, Hv)}
    for name, x in made.items():
        n, heads, h = shapes[name]
        grads[name] = x[:, :n, :, :h].reshape(*batch, n, heads, h)
    if "bias" in wanted:
        grads["bias"] = _bias_gradient(options, interpret, saved, operands)
    if "sink" in wanted:
        grads["sink"] = dsink
    return DotProductAttentionGrads(
        **{name: match_type(grad, getattr(operands, name)) for name, grad in grads.items()}
    )


def _prepare(options, residuals, dout, dlse, keys) -> tuple[Saved, jax.Array | None]:
    """The inputs of the kernels, and the gradient of the sink."""
    operands, (out, lse, low) = residuals.operands, residuals.result
    batch, dtype = operands.query.shape[:-3], lse.dtype
    dout = jnp.zeros_like(out) if dout is None else dout
    floor = jnp.full((1,) * lse.ndim, -jnp.inf, dtype)
    if operands.sink is not None:
        floor = to_rank(operands.sink.astype(dtype), lse.ndim)
    empty = None
    if _rows_may_be_empty(options, operands):
        # A row that attends to nothing has lse = sink and out = 0; q and dout may hold anything there.
        empty = (lse == floor) & (out == 0).all(-1)
        dout = jnp.where(empty[..., None], 0, dout)
        operands = operands._replace(query=jnp.where(empty[..., None], 0, operands.query))
    delta = (dout.astype(dtype) * out.astype(dtype)).sum(-1)  # (7)
    if dlse is not None:
        delta = delta - jnp.where(lse == -jnp.inf, 0, dlse)
    low = jnp.zeros_like(lse) if low is None else low
    dsink = None
    if "sink" in residuals.wanted.names:
        p_sink = jnp.exp((floor - jnp.where(lse == -jnp.inf, jnp.inf, lse)) - low)
        dsink = reduce_to(-p_sink * delta, operands.sink.shape)  # (9)

    def merged(x):
        return x.reshape(math.prod(batch), *x.shape[len(batch) :])

    def row(x, fill=0.0):
        return tiles.pad(jnp.swapaxes(merged(x), -1, -2), {-1: tiles.LENGTH}, constant_values=fill)

    refs = tiles.inputs(options, operands, keys)
    plain = tiles.is_plain(options, refs)
    lse = lse * LOG2_E if plain else lse
    lse = lse if empty is None else jnp.where(empty, jnp.inf, lse)
    rows = [row(lse, jnp.inf), row(delta)] + ([] if refs.bias is None else [row(low)])
    return Saved(refs, tiles.pad_heads(merged(dout)), jnp.stack(rows, -2)), dsink


def _rows_may_be_empty(options: Options, operands: Operands) -> bool:
    """Whether a query may see no key: without need, q and dout are not copied."""
    conditions = (
        operands.bias, operands.mask, operands.query_seq_lengths, operands.key_value_seq_lengths,
        operands.query_segment_ids, operands.query_positions, operands.key_value_positions,
    )  # fmt: skip
    return options.window is not None or any(x is not None for x in conditions)


def _bias_gradient(options, interpret, saved: Saved, operands: Operands) -> jax.Array:
    """float32, of the shape of the bias: never more than that is stored."""
    assert operands.bias is not None  # its gradient is asked for
    (*batch, T, N, _), S = operands.query.shape, operands.key.shape[-3]
    shape = (1,) * (len(batch) + 3 - operands.bias.ndim) + operands.bias.shape
    if shape[-2] != 1 and shape[-1] != 1:
        dbias = by_query.plane_bias(options, interpret, saved)[..., :T, :S]
        heads = dbias.shape[1]
    elif shape[-1] != 1:
        dbias = by_key.keys(options, interpret, saved, frozenset({"bias"}))["bias"][..., None, :S]
        heads = N
    else:
        dbias = by_query.queries(options, interpret, saved, bias=True)["bias"][..., :T, None]
        heads = N
    lead = batch if dbias.shape[0] != 1 or math.prod(batch) == 1 else (1,) * len(batch)
    return reduce_to(dbias.reshape(*lead, heads, *dbias.shape[-2:]), operands.bias.shape)
