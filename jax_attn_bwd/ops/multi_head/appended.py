"""The appended rows, `bias_k/bias_v` and zero: keys that every query sees, beside those it attends to.

Attention over S keys left (out, lse). With the logits x_r = soft_cap(scale <q, k_r>) of R more keys

    lse' = log(exp(lse) + sum_r exp(x_r)),   p_r = exp(x_r - lse')
    out' = exp(lse - lse') out + sum_r z_r p_r v_r                    (z: dropout factors)

so no key array grows by a row, and no mask by a column. Derivatives: see backward.py and tangent.py.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.sharding import einsum, reshard_like
from jax_attn_bwd.ops.dot_product import engine
from jax_attn_bwd.ops.dot_product import spec as dot_product
from jax_attn_bwd.ops.multi_head import dropping
from jax_attn_bwd.ops.multi_head.projections import matmul_over_rows
from jax_attn_bwd.ops.multi_head.spec import Operands, Options


class Rows(NamedTuple):
    """Keys and values of the appended rows, float32 or wider."""

    keys: jax.Array  # [R, K, H]
    values: jax.Array  # [R, K, Hv]


class RowGrads(NamedTuple):
    """What the appended rows give; None = not asked."""

    bias_k: jax.Array | None  # [K, H]
    bias_v: jax.Array | None  # [K, Hv]
    query: jax.Array | None  # [..., T, N, H], a share of the projected queries' gradient


def rows(options: Options, operands: Operands, inner: dot_product.Operands) -> Rows | None:
    """The appended rows; None if there are none."""
    found = []
    for x, given in ((inner.key, operands.bias_k), (inner.value, operands.bias_v)):
        appended = _stacked(options, x, given)
        if appended is None:
            return None
        found.append(appended)
    return Rows(*found)


def _stacked(options: Options, x: jax.Array, given: Any) -> jax.Array | None:
    """`[R, K, H]`: `given`, and a row of zeros, to be appended to `x`."""
    dtype, appended = accumulator_dtype(x.dtype), []
    if given is not None:
        given = jnp.broadcast_to(given, x.shape[-2:])
        appended.append(reshard_like(given, x, (-2, None))[None].astype(dtype))
    if options.add_zero_attn:
        appended.append(reshard_like(jnp.zeros(x.shape[-2:], dtype), x, (-2, None))[None])
    return jnp.concatenate(appended) if appended else None


def _logits(options: Options, q: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array | None]:
    """(`[..., K, G, T, R]` for q `[..., K, G, T, H]`, the tanh of a soft cap)."""
    x = _einsum(options, "...kgth,rkh->...kgtr", q * options.attention.scale, rows.keys)
    cap = options.attention.logits_soft_cap
    if cap is None:
        return x, None
    tanh = jnp.tanh(x / cap)
    return cap * tanh, tanh


def _einsum(options: Options, subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return einsum(subscripts, x, y, precision=options.precision)


def attend(
    options: Options, operands: Operands, inner: dot_product.Operands, rows: Rows, result: dot_product.Result
) -> dot_product.Result:
    """`result`, of the S keys alone, with the appended rows."""
    G = inner.query.shape[-2] // inner.key.shape[-2]
    dtype = rows.keys.dtype
    x, _ = _logits(options, engine.split_heads(inner.query, G).astype(dtype), rows)
    lse = engine.split_rows(result.lse, G)
    low = 0 if result.lse_low is None else engine.split_rows(result.lse_low, G)
    m = lax.stop_gradient(jnp.maximum(lse, x.max(-1)))
    log_l = jnp.log(jnp.exp((lse - m) + low) + jnp.exp(x - m[..., None]).sum(-1))
    total = m + log_l
    total_low = lax.stop_gradient((m - total) + log_l)
    p = jnp.exp((x - total[..., None]) - total_low[..., None])
    z = dropping.of_rows(options, operands, inner, x.shape[-1])
    share = jnp.exp(((lse - total) - total_low) + low)[..., None]
    out = share * engine.split_heads(result.wide_out(), G).astype(dtype)
    out = out + _einsum(options, "...kgtr,rkh->...kgth", p if z is None else z * p, rows.values)
    low_matters = engine.low_matters(options.attention, inner)
    out, out_low = engine.split_rounding(engine.merge_heads(out), inner.query.dtype, low_matters)
    return dot_product.Result(out, engine.merge_rows(total), engine.merge_rows(total_low), out_low)


def probabilities(
    options: Options, inner: dot_product.Operands, rows: Rows, result: dot_product.Result
) -> jax.Array:
    """The rows' probabilities `[..., K, G, T, R]`; `result` is that with the appended rows."""
    G = inner.query.shape[-2] // inner.key.shape[-2]
    x, _ = _logits(options, engine.split_heads(inner.query, G).astype(rows.keys.dtype), rows)
    low = 0 if result.lse_low is None else engine.split_rows(result.lse_low, G)[..., None]
    return jnp.exp((x - engine.split_rows(result.lse, G)[..., None]) - low)


def through_values(
    options: Options, operands: Operands, inner: dot_product.Operands, rows: Rows, dout: jax.Array
) -> jax.Array:
    """What the output's cotangent gives to that of the probabilities, z <dout, v> `[..., K, G, T, R]`."""
    dp = _einsum(options, "...kgth,rkh->...kgtr", dout, rows.values)
    z = dropping.of_rows(options, operands, inner, dp.shape[-1])
    return dp if z is None else z * dp


def gradients(
    options: Options,
    operands: Operands,
    inner: dot_product.Operands,
    rows: Rows,
    wanted: frozenset[str],
    p: jax.Array,
    dout: jax.Array,
    dp: jax.Array,
    delta: jax.Array,
) -> RowGrads:
    """What the rows give to those gradients that are in `wanted`.

    Args:
      p: `[..., K, G, T, R]`, the rows' probabilities.
      dout: `[..., K, G, T, Hv]`, cotangent of the attention's output.
      dp: `[..., K, G, T, R]`, cotangent of the probabilities.
      delta: `[..., K, G, T, 1]`.
    """
    q = engine.split_heads(inner.query, inner.query.shape[-2] // inner.key.shape[-2]).astype(p.dtype)
    z = dropping.of_rows(options, operands, inner, p.shape[-1])
    dx = options.attention.scale * p * (dp - delta)  # (9)
    _, tanh = _logits(options, q, rows)
    if tanh is not None:
        dx = dx * (1 - tanh * tanh)
    bias_k = bias_v = query = None
    if "bias_k" in wanted:
        bias_k = matmul_over_rows("kgtr", "kgth", "rkh", dx, q, options.precision)[0]
    if "bias_v" in wanted:
        zp = p if z is None else z * p
        bias_v = matmul_over_rows("kgtr", "kgth", "rkh", zp, dout, options.precision)[0]
    if "query" in wanted:
        query = engine.merge_heads(_einsum(options, "...kgtr,rkh->...kgth", dx, rows.keys))
    return RowGrads(bias_k, bias_v, query)


def tangent_sums(
    options: Options,
    operands: Operands,
    inner: dot_product.Operands,
    rows: Rows,
    result: dot_product.Result,
    dq: jax.Array | None,
    along: Operands,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(16), (17) of `tangent.py`: (dx `[..., K, G, T, R]`, shares of total `[..., T, N, Hv]` and of mu).

    Args:
      result: that with the appended rows.
      dq: `[..., T, N, H]`, tangent of the projected queries; None = 0, as in `along`.
    """
    G = inner.query.shape[-2] // inner.key.shape[-2]
    heads = lambda x: engine.split_heads(x, G).astype(rows.keys.dtype) * options.attention.scale
    p = probabilities(options, inner, rows, result)
    z = dropping.of_rows(options, operands, inner, p.shape[-1])
    zp = p if z is None else z * p
    terms = []
    if dq is not None:
        terms.append(_einsum(options, "...kgth,rkh->...kgtr", heads(dq), rows.keys))
    if along.bias_k is not None:
        moved: Any = _stacked(options, inner.key, along.bias_k)
        terms.append(_einsum(options, "...kgth,rkh->...kgtr", heads(inner.query), moved))
    dx = sum(terms[1:], start=terms[0]) if terms else jnp.zeros_like(p)
    _, tanh = _logits(options, engine.split_heads(inner.query, G).astype(rows.keys.dtype), rows)
    dx = dx if tanh is None else dx * (1 - tanh * tanh)
    total = _einsum(options, "...kgtr,rkh->...kgth", zp * dx, rows.values)
    if along.bias_v is not None:
        moved = _stacked(options, inner.value, along.bias_v)
        total = total + _einsum(options, "...kgtr,rkh->...kgth", zp, moved)
    return dx, engine.merge_heads(total), engine.merge_rows((p * dx).sum(-1))
