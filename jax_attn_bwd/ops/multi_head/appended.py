"""The appended rows, `bias_k/bias_v` and zero: keys that every query sees, beside those it attends to.

Attention over S keys left (out, lse). With the logits x_r = scale <q, k_r> of R more keys

    lse' = log(exp(lse) + sum_r exp(x_r)),   p_r = exp(x_r - lse')
    out' = exp(lse - lse') out + sum_r z_r p_r v_r                    (z: dropout factors)

so no key array grows by a row, and no mask by a column. Backward: see backward.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.sharding import einsum, reshard_like
from jax_attn_bwd.ops.dot_product import layout
from jax_attn_bwd.ops.dot_product import spec as dot_product
from jax_attn_bwd.ops.multi_head import dropping
from jax_attn_bwd.ops.multi_head.projections import matmul_over_rows
from jax_attn_bwd.ops.multi_head.spec import Operands, Options


class Rows(NamedTuple):
    """Keys and values of the appended rows, float32 or wider."""

    keys: jax.Array  # [R, K, H]
    values: jax.Array  # [R, K, Hv]


def rows(options: Options, operands: Operands, inner: dot_product.Operands) -> Rows | None:
    """The appended rows; None if there are none."""
    found = []
    for x, given in ((inner.key, operands.bias_k), (inner.value, operands.bias_v)):
        dtype = accumulator_dtype(x.dtype)
        parts = []
        if given is not None:
            given = jnp.broadcast_to(given, x.shape[-2:])
            parts.append(reshard_like(given, x, (-2, None))[None].astype(dtype))
        if options.add_zero_attn:
            parts.append(reshard_like(jnp.zeros(x.shape[-2:], dtype), x, (-2, None))[None])
        if not parts:
            return None
        found.append(jnp.concatenate(parts))
    return Rows(*found)


def _logits(options: Options, q: jax.Array, rows: Rows) -> jax.Array:
    """`[..., K, G, T, R]` for q `[..., K, G, T, H]`."""
    return einsum("...kgth,rkh->...kgtr", q * options.attention.scale, rows.keys)


def attend(
    options: Options, operands: Operands, inner: dot_product.Operands, rows: Rows,
    result: dot_product.Result,
) -> dot_product.Result:  # fmt: skip
    """`result`, of the S keys alone, with the appended rows."""
    G = inner.query.shape[-2] // inner.key.shape[-2]
    dtype = rows.keys.dtype
    x = _logits(options, layout.split_heads(inner.query, G).astype(dtype), rows)
    lse = layout.split_rows(result.lse, G)
    low = 0 if result.lse_low is None else layout.split_rows(result.lse_low, G)
    m = lax.stop_gradient(jnp.maximum(lse, x.max(-1)))
    log_l = jnp.log(jnp.exp((lse - m) + low) + jnp.exp(x - m[..., None]).sum(-1))
    total = m + log_l
    total_low = lax.stop_gradient((m - total) + log_l)
    p = jnp.exp((x - total[..., None]) - total_low[..., None])
    z = dropping.of_rows(options, operands, inner, x.shape[-1])
    share = jnp.exp(((lse - total) - total_low) + low)[..., None]
    out = share * layout.split_heads(result.out, G).astype(dtype)
    out = out + einsum("...kgtr,rkh->...kgth", p if z is None else z * p, rows.values)
    return dot_product.Result(
        layout.merge_heads(out).astype(result.out.dtype),
        layout.merge_rows(total), layout.merge_rows(total_low),
    )  # fmt: skip


def probabilities(
    options: Options, inner: dot_product.Operands, rows: Rows, result: dot_product.Result
) -> jax.Array:
    """The rows' probabilities `[..., K, G, T, R]`; `result` is that with the appended rows."""
    G = inner.query.shape[-2] // inner.key.shape[-2]
    x = _logits(options, layout.split_heads(inner.query, G).astype(rows.keys.dtype), rows)
    low = 0 if result.lse_low is None else layout.split_rows(result.lse_low, G)[..., None]
    return jnp.exp((x - layout.split_rows(result.lse, G)[..., None]) - low)


def through_values(
    options: Options, operands: Operands, inner: dot_product.Operands, rows: Rows, dout: jax.Array
) -> jax.Array:
    """What the output's cotangent gives to that of the probabilities, z <dout, v> `[..., K, G, T, R]`."""
    dp = einsum("...kgth,rkh->...kgtr", dout, rows.values)
    z = dropping.of_rows(options, operands, inner, dp.shape[-1])
    return dp if z is None else z * dp


def gradients(
    options: Options, operands: Operands, inner: dot_product.Operands, rows: Rows,
    wanted: frozenset[str], p: jax.Array, dout: jax.Array, dp: jax.Array, delta: jax.Array,
) -> dict[str, jax.Array]:  # fmt: skip
    """Those in `wanted` of bias_k `[K, H]`, bias_v `[K, Hv]`, query `[..., T, N, H]` (what the rows give).

    Args:
      p: `[..., K, G, T, R]`, the rows' probabilities.
      dout: `[..., K, G, T, Hv]`, cotangent of the attention's output.
      dp: `[..., K, G, T, R]`, cotangent of the probabilities.
      delta: `[..., K, G, T, 1]`.
    """
    q = layout.split_heads(inner.query, inner.query.shape[-2] // inner.key.shape[-2]).astype(
        p.dtype
    )
    z = dropping.of_rows(options, operands, inner, p.shape[-1])
    dx = options.attention.scale * p * (dp - delta)  # (9)
    grads = {}
    if "bias_k" in wanted:
        grads["bias_k"] = matmul_over_rows("kgtr", "kgth", "rkh", dx, q)[0]
    if "bias_v" in wanted:
        zp = p if z is None else z * p
        grads["bias_v"] = matmul_over_rows("kgtr", "kgth", "rkh", zp, dout)[0]
    if "query" in wanted:
        grads["query"] = layout.merge_heads(einsum("...kgtr,rkh->...kgth", dx, rows.keys))
    return grads
