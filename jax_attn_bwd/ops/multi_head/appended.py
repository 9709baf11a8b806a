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

from jax_attn_bwd._core.numerics import accumulator_dtype, fast_two_sum
from jax_attn_bwd._core.products import einsum
from jax_attn_bwd._core.sharding import reshard_like
from jax_attn_bwd.ops.dot_product import blockwise
from jax_attn_bwd.ops.dot_product import spec as dot_product
from jax_attn_bwd.ops.multi_head.projections import matmul_over_rows
from jax_attn_bwd.ops.multi_head.spec import Operands, Options


class AppendedRows(NamedTuple):
    """The appended rows, and the queries that see them, float32 or wider."""

    query: jax.Array  # [..., K, G, T, H]
    keys: jax.Array  # [R, K, H]
    values: jax.Array  # [R, K, Hv]
    factors: jax.Array | None  # [..., K, G, T, R], of dropout; None = 1

    def dropped(self, x: jax.Array) -> jax.Array:
        """Returns `x [..., K, G, T, R]` times the factors of dropout."""
        return x if self.factors is None else self.factors * x

    def split_rows(self, x: jax.Array) -> jax.Array:
        """Splits row values `[..., T, N]` as the queries are: `[..., K, G, T]`."""
        return blockwise.split_rows(x, self.query.shape[-3])


def rows(options: Options, operands: Operands, inner: dot_product.Operands) -> AppendedRows | None:
    """Returns the appended rows; None if there are none."""
    R, sizes = options.appended_rows(operands), inner.sizes
    if R == 0:
        return None
    keys = _stacked(options, inner.key, operands.bias_k)
    values = _stacked(options, inner.value, operands.bias_v)
    query = blockwise.split_heads(inner.query, sizes.G).astype(keys.dtype)

    # their columns of dropout follow those of the keys
    offset = operands.dropout_offset
    column = jnp.arange(R, dtype=jnp.uint32) + jnp.asarray(sizes.S, jnp.uint32)
    if offset is not None:
        column = offset.column[sizes.S :] if offset.column.ndim else offset.column + column
    return AppendedRows(query, keys, values, blockwise.dropout_factors(options.attention, inner, column))


def _stacked(options: Options, x: jax.Array, given: Any) -> jax.Array:
    """Returns `[R, K, H]`: `given`, and a row of zeros, to be appended to `x`."""
    dtype, appended = accumulator_dtype(x.dtype), []
    if given is not None:
        given = jnp.broadcast_to(given, x.shape[-2:])
        appended.append(reshard_like(given, x, (-2, None))[None].astype(dtype))
    if options.add_zero_attn:
        appended.append(reshard_like(jnp.zeros(x.shape[-2:], dtype), x, (-2, None))[None])
    return jnp.concatenate(appended)


def _logits(options: Options, rows: AppendedRows) -> tuple[jax.Array, jax.Array | None]:
    """Returns (`[..., K, G, T, R]`, the tanh of a soft cap)."""
    x = _with_keys(options, rows.query * options.attention.scale, rows.keys)
    cap = options.attention.logits_soft_cap
    if cap is None:
        return x, None
    tanh = jnp.tanh(x / cap)
    return cap * tanh, tanh


def _with_keys(options: Options, x: jax.Array, keys: jax.Array) -> jax.Array:
    """Multiplies `[..., K, G, T, H]` with keys or values `[R, K, H]`: `[..., K, G, T, R]`."""
    return einsum("...kgth,rkh->...kgtr", x, keys, precision=options.precision)


def _over_rows(options: Options, p: jax.Array, values: jax.Array) -> jax.Array:
    """Sums keys or values `[R, K, H]`, weighted by `[..., K, G, T, R]`: `[..., K, G, T, H]`."""
    return einsum("...kgtr,rkh->...kgth", p, values, precision=options.precision)


def attend(
    options: Options, inner: dot_product.Operands, rows: AppendedRows, result: dot_product.Result
) -> dot_product.Result:
    """Adds the appended rows to `result`, which is that of the S keys alone."""
    # the logarithm of the sum over S' keys, [..., K, G, T], and its rounding
    x, _ = _logits(options, rows)
    lse = rows.split_rows(result.lse)
    rounding = 0 if result.lse_rounding is None else rows.split_rows(result.lse_rounding)
    m = lax.stop_gradient(jnp.maximum(lse, x.max(-1)))
    log_l = jnp.log(jnp.exp((lse - m) + rounding) + jnp.exp(x - m[..., None]).sum(-1))
    total, total_rounding = fast_two_sum(m, log_l)

    # the keys' share of the output, and the rows' own, [..., K, G, T, Hv]
    p = jnp.exp((x - total[..., None]) - total_rounding[..., None])
    factor = jnp.exp(((lse - total) - total_rounding) + rounding)[..., None]
    out = factor * blockwise.split_heads(result.widest_out(), rows.query.shape[-3]).astype(rows.keys.dtype)
    out = out + _over_rows(options, rows.dropped(p), rows.values)
    out, is_kept = blockwise.merge_heads(out), result.wide_out is not None
    wide = out if is_kept or blockwise.rounding_matters(options.attention, inner) else None
    lse, rounding = blockwise.merge_rows(total), blockwise.merge_rows(total_rounding)
    return dot_product.Result(out.astype(inner.query.dtype), lse, rounding, wide)


def probabilities(options: Options, rows: AppendedRows, result: dot_product.Result) -> jax.Array:
    """Returns the rows' probabilities `[..., K, G, T, R]`; `result` is that with the appended rows."""
    x, _ = _logits(options, rows)
    rounding = 0 if result.lse_rounding is None else rows.split_rows(result.lse_rounding)[..., None]
    return jnp.exp((x - rows.split_rows(result.lse)[..., None]) - rounding)


def through_values(options: Options, rows: AppendedRows, dout: jax.Array) -> jax.Array:
    """Returns the cotangent of the probabilities that the output's gives, z <dout, v> `[..., K, G, T, R]`."""
    return rows.dropped(_with_keys(options, dout, rows.values))


def gradients(
    options: Options,
    rows: AppendedRows,
    wanted: frozenset[str],
    p: jax.Array,
    dout: jax.Array,
    dp: jax.Array,
    delta: jax.Array,
) -> dict[str, jax.Array]:
    """Returns those gradients that are in `wanted`, by name; of "query" a share, `[..., T, N, H]`.

    `p` and `dp`, `[..., K, G, T, R]`, are the rows' probabilities and their cotangent, `dout`
    `[..., K, G, T, Hv]` that of the attention's output, and `delta` is `[..., K, G, T, 1]`.
    """
    # (9): the cotangent of the logits
    dx = options.attention.scale * p * (dp - delta)
    _, tanh = _logits(options, rows)
    if tanh is not None:
        dx = dx * (1 - tanh * tanh)

    # of the first row, which is the given one, and of all queries
    found = {}
    if "bias_k" in wanted:
        found["bias_k"] = matmul_over_rows("kgtr", "kgth", "rkh", dx, rows.query, options.precision)[0]
    if "bias_v" in wanted:
        found["bias_v"] = matmul_over_rows("kgtr", "kgth", "rkh", rows.dropped(p), dout, options.precision)[0]
    if "query" in wanted:
        found["query"] = blockwise.merge_heads(_over_rows(options, dx, rows.keys))
    return found


def tangent_sums(
    options: Options,
    inner: dot_product.Operands,
    rows: AppendedRows,
    result: dot_product.Result,
    dq: jax.Array | None,
    along: Operands,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes what the rows add to the sums of the tangent, by (16), (17) of `tangent.py`.

    `result` is that with the appended rows; `dq [..., T, N, H]`, the tangent of the projected queries, may be
    None for 0, as those of `along`. Returns (dx `[..., K, G, T, R]`, the share of total `[..., T, N, Hv]`,
    that of mu `[..., T, N]`).
    """
    # (16)
    p, scale, terms = probabilities(options, rows, result), options.attention.scale, []
    if dq is not None:
        dq = blockwise.split_heads(dq, rows.query.shape[-3]).astype(rows.keys.dtype) * scale
        terms.append(_with_keys(options, dq, rows.keys))
    if along.bias_k is not None:
        dkeys = _stacked(options, inner.key, along.bias_k)
        terms.append(_with_keys(options, rows.query * scale, dkeys))
    dx = sum(terms[1:], start=terms[0]) if terms else jnp.zeros_like(p)
    _, tanh = _logits(options, rows)
    dx = dx if tanh is None else dx * (1 - tanh * tanh)

    # (17)
    zp = rows.dropped(p)
    total = _over_rows(options, zp * dx, rows.values)
    if along.bias_v is not None:
        total = total + _over_rows(options, zp, _stacked(options, inner.value, along.bias_v))
    return dx, blockwise.merge_heads(total), blockwise.merge_rows((p * dx).sum(-1))
