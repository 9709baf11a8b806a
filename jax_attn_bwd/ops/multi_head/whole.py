"""Where T x S arrays are asked for: the probabilities, and the gradients that use them.

For `return_weights` and `save="probs"` alone; every other call goes tile by tile.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core.numerics import accumulator_dtype, reduce_to
from jax_attn_bwd.ops.dot_product import forward as dot_product_forward
from jax_attn_bwd.ops.dot_product import layout
from jax_attn_bwd.ops.dot_product import spec as dot_product
from jax_attn_bwd.ops.multi_head import dropping
from jax_attn_bwd.ops.multi_head.projections import matmul, visible
from jax_attn_bwd.ops.multi_head.spec import Options


def _plane(x: jax.Array, inner: dot_product.Operands) -> jax.Array:
    """`[..., N|1, T|1, S|1]` -> `[..., K|1, G|1, T|1, S|1]`."""
    return layout.plane(x, inner.query.ndim - 3, inner.query.shape[-2] // inner.key.shape[-2])


def _working(options: Options, inner: dot_product.Operands) -> tuple[Any, ...]:
    """(q `[..., K, G, T, H]`, k `[..., K, S, H]`, v, what each query sees), rows that do not count are 0."""
    q = layout.split_heads(inner.query, inner.query.shape[-2] // inner.key.shape[-2])
    k, v = (jnp.swapaxes(x, -2, -3) for x in (inner.key, inner.value))
    dtype = accumulator_dtype(q.dtype)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    sees = visible(options, inner, inner.query.shape[-3], inner.key.shape[-3])
    if sees is None:
        return q, k, v, None
    sees = _plane(jnp.asarray(sees), inner)
    q = jnp.where(sees.any(-1, keepdims=True), q, 0)
    seen = sees.any((-3, -2))[..., None]
    return q, jnp.where(seen, k, 0), jnp.where(seen, v, 0), sees


def probabilities(
    options: Options, inner: dot_product.Operands, result: dot_product.Result
) -> jax.Array:
    """`[..., K, G, T, S]` of the S keys that are not appended."""
    q, k, _, sees = _working(options, inner)
    logits = dot_product_forward.scaled_product(options.attention, q, k, q.dtype)
    if inner.bias is not None:
        logits = logits + _plane(inner.bias, inner).astype(logits.dtype)
    if sees is not None:
        logits = jnp.where(sees, logits, -jnp.inf)
    G = q.shape[-3]
    lse, low = layout.split_rows(result.lse, G), result.lse_low
    lse = jnp.where(lse == -jnp.inf, 0, lse)
    low = jnp.zeros_like(lse) if low is None else layout.split_rows(low, G)
    return jnp.exp((logits - lse[..., None]) - low[..., None])


def where_seen(options: Options, inner: dot_product.Operands, plane: jax.Array) -> jax.Array:
    """`plane [..., K, G, T, S]`, 0 where a query does not see a key."""
    sees = _working(options, inner)[3]
    return plane if sees is None else jnp.where(sees, plane, 0)


def through_values(options: Options, inner: dot_product.Operands, dout: jax.Array) -> jax.Array:
    """What the output's cotangent gives to that of the probabilities, z <dout, v> `[..., K, G, T, S]`."""
    v, z = _working(options, inner)[2], dropping.of_keys(options, inner)
    dp = matmul("...kgth,...ksh->...kgts", dout, v)
    return dp if z is None else z * dp


def gradients(
    options: Options, inner: dot_product.Operands, wanted: Iterable[str], p: jax.Array,
    dout: jax.Array, dp: jax.Array, delta: jax.Array,
) -> dict[str, jax.Array]:  # fmt: skip
    """Gradients of the dense attention's operands in `wanted`, by (5), (8), (11) of its backward.

    Args:
      p: `[..., K, G, T, S]`, the probabilities.
      dout: `[..., K, G, T, Hv]`, cotangent of the attention's output.
      dp: `[..., K, G, T, S]`, cotangent of the probabilities.
      delta: `[..., K, G, T, 1]`, what the rows' products sum to.
    """
    q, k, _, _ = _working(options, inner)
    p = p.astype(q.dtype)
    grads = {}
    if "value" in wanted:
        z = dropping.of_keys(options, inner)
        grads["value"] = matmul("...kgts,...kgth->...skh", p if z is None else z * p, dout)
    dlogits = p * (dp - delta)
    if "bias" in wanted:
        assert inner.bias is not None
        plane = _plane(inner.bias, inner)
        grads["bias"] = reduce_to(dlogits, plane.shape).reshape(inner.bias.shape)
    scale = options.attention.scale
    if "query" in wanted:
        dq = matmul("...kgts,...ksh->...kgth", dlogits, k)
        grads["query"] = layout.merge_heads(scale * dq)
    if "key" in wanted:
        grads["key"] = scale * matmul("...kgts,...kgth->...skh", dlogits, q)
    return grads
