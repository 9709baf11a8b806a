"""Dense attention on whole T x S planes: where they are small, and where their arrays are asked for.

A plane that fits a cache is computed as the formula is written, with no loop: it compiles faster than a walk
over tiles, fuses with what stands around it, and where forward and backward are one program XLA computes the
logits once for both. Equation numbers are those of `backward.py`.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import float_leaves
from jax_attn_bwd._core.numerics import accumulator_dtype, finite, reduce_to, to_rank
from jax_attn_bwd._core.sharding import einsum, unsharded
from jax_attn_bwd.ops.dot_product import dropping, layout, masking, mod_functions, row_terms
from jax_attn_bwd.ops.dot_product.logits import soft_capped
from jax_attn_bwd.ops.dot_product.spec import DotProductAttentionGrads, Operands, Options, Result
from jax_attn_bwd.ops.dot_product.tile_operands import unpoisoned
from jax_attn_bwd.ops.dot_product.tiling import Tiling, product_dtype


class _Plane(NamedTuple):
    """The factors of the products; queries that see nothing, and keys that nothing sees, are 0."""

    q: jax.Array  # [..., K, G, T, H]
    k: jax.Array  # [..., K, S, H]
    v: jax.Array  # [..., K, S, Hv]
    sees: jax.Array | None  # [..., K|1, G|1, T|1, S|1]; None = all
    live: jax.Array | None  # [..., K|1, G|1, T], queries that see something; None = all
    bias: jax.Array | None  # [..., K|1, G|1, T|1, S|1]
    places: mod_functions.Places | None  # with a function of them
    at: mod_functions.Tile | None  # with `score_mod`


def _plane(options: Options, operands: Operands) -> _Plane:
    keys: Any = {name: unsharded(getattr(operands, name), -3) for name in ("key", "value")}
    operands = operands._replace(**keys)
    (*batch, T, N, _), (S, K, _) = operands.query.shape, operands.key.shape[-3:]
    q, k, v, live = unpoisoned(options, operands)
    q, k, v = (x.astype(product_dtype(x.dtype)) for x in (q, k, v))
    sees = masking.of_plane(options, operands, T, S, len(batch), N // K)
    bias = None if operands.bias is None else layout.plane(operands.bias, len(batch), N // K)
    places, at = mod_functions.places(operands, len(batch), N // K), None
    if options.score_mod is not None:
        found = masking.conditions(operands, T, S, len(batch), N // K)
        rows_and_columns = masking.positions(found, None, None, (T, S), len(batch) + 4)
        assert places is not None  # prepared with the function
        at = mod_functions.Tile(places.batch, places.head, *rows_and_columns, sees)
    return _Plane(q, k, v, sees, live, bias, places, at)


def _before_score(options: Options, plane: _Plane, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """(c of (1), `[..., K, G, T, S]`; tanh of the soft cap)."""
    q, in_q = plane.q, plane.q.dtype == dtype  # wide factors: see `logits.scaled_product`
    q = q * options.scale if in_q else q
    logits = einsum("...kgth,...ksh->...kgts", q, plane.k, **_product(options, dtype))
    logits, tanh = soft_capped(options, logits if in_q else options.scale * logits)
    if plane.bias is not None:
        logits = logits + plane.bias.astype(dtype)
    return logits, tanh


def _logits(options: Options, plane: _Plane, dtype: Any) -> jax.Array:
    """(1): `[..., K, G, T, S]`, -inf where unseen."""
    logits, _ = _before_score(options, plane, dtype)
    if plane.at is not None and plane.places is not None:
        logits = mod_functions.scored(options, logits, plane.at, plane.places.args)
    return logits if plane.sees is None else jnp.where(plane.sees, logits, -jnp.inf)


def _product(options: Options, dtype: Any) -> dict[str, Any]:
    return {"precision": options.precision, "preferred_element_type": dtype}


class _Rows(NamedTuple):
    """The softmax of the block's own keys, and the sink, `[..., K, G, T|1, S|1]`."""

    e: jax.Array  # exp(logits - m)
    m: jax.Array  # greatest logit; 0 of a row that sees nothing
    l: jax.Array  # sum of e; 1 of a row that attends to nothing
    empty: jax.Array | None  # rows that attend to nothing; None = there are none


def _softmax(operands: Operands, plane: _Plane, logits: jax.Array) -> _Rows:
    # Written as `jax.nn.softmax` is: XLA:CPU hands maximum, difference and exponential to one library loop
    # where nothing else reads the maximum.
    m, sink = logits.max(-1, keepdims=True), None
    if operands.sink is not None:
        sink = operands.sink.astype(m.dtype).reshape(*plane.q.shape[-4:-2], 1, 1)
        sink = to_rank(sink, m.ndim)
        m = jnp.maximum(m, sink)
    m = lax.stop_gradient(m if plane.live is None else finite(m))
    e = jnp.exp(logits - m)
    l = e.sum(-1, keepdims=True)
    if sink is not None:
        l = l + jnp.exp(sink - m)
    if plane.live is None:
        return _Rows(e, m, l, None)
    return _Rows(e, m, jnp.where(l == 0, 1, l), l == 0)


def forward(options: Options, tiling: Tiling, operands: Operands) -> Result:
    """Attention over all keys, with its row values."""
    plane, dtype = _plane(options, operands), accumulator_dtype(operands.query.dtype)
    e, m, l, empty = _softmax(operands, plane, _logits(options, plane, dtype))
    log_l = jnp.log(l)
    lse = m + log_l
    low = lax.stop_gradient((m - lse) + log_l)
    if empty is not None:
        lse, low = jnp.where(empty, -jnp.inf, lse), jnp.where(empty, 0, low)
    z = dropping.of_columns(options, operands)
    e = (e if z is None else z * e).astype(plane.v.dtype)
    out = einsum("...kgts,...ksh->...kgth", e, plane.v, **_product(options, dtype)) / l
    lse, low = (layout.merge_rows(x[..., 0]) for x in (lse, low))
    out, out_low = row_terms.in_two(options, operands, layout.merge_heads(out))
    return Result(out, lse, low, out_low)


def backward(
    options: Options,
    wanted: Iterable[str],
    operands: Operands,
    result: Result,
    dout: jax.Array,
    delta: jax.Array,
) -> dict[str, Any]:
    """(5), (8), (10), (11): the gradients of query, key, value and bias that are `wanted`.

    In the accumulator's dtype, as everything here.

    Args:
      result: of all keys that the queries attend to.
      dout: `[..., K, G, T, Hv]`, cotangent of the output.
      delta: `[..., K, G, T]` of (7).
    """
    dout, live = _from_live_rows(options, operands, dout)
    delta = delta if live is None else jnp.where(live, delta, 0)
    dp = through_values(options, operands, dout) if set(wanted) - {"value"} else None
    p = probabilities(options, operands, result)
    return _gradients(options, operands, wanted, p, dout, dp, delta[..., None])


def backward_alone(
    options: Options, wanted: Iterable[str], operands: Operands, dout: jax.Array, dlse: jax.Array | None
) -> tuple[dict[str, Any], jax.Array | None]:
    """(what `backward` gives, delta) where the queries attend to no other keys; delta is None if not formed.

    Then the softmax is formed as in the forward, and delta as sum_s p_ts dp_ts: of the forward nothing else
    is needed.
    """
    dout, _ = _from_live_rows(options, operands, dout)
    p, delta = probabilities(options, operands, None), None
    if not set(wanted) <= {"value"}:
        dp = through_values(options, operands, dout)
        delta = (p * dp).sum(-1)
        delta = delta if dlse is None else delta - dlse
        return _gradients(options, operands, wanted, p, dout, dp, delta[..., None]), delta
    return _gradients(options, operands, wanted, p, dout, None, None), None


def _from_live_rows(options: Options, operands: Operands, dout: jax.Array) -> tuple[jax.Array, Any]:
    """(dout, 0 in rows that see nothing, where it may be anything; those that see something, None = all)."""
    live = _plane(options, operands).live
    if live is None:
        return dout, None
    return jnp.where(live[..., None], dout, 0), live


def _gradients(
    options: Options,
    operands: Operands,
    wanted: Iterable[str],
    p: jax.Array,
    dout: jax.Array,
    dp: Any,
    delta: Any,
) -> dict[str, Any]:
    """For no more than "value", `dp` and `delta` may be None."""
    plane, dtype = _plane(options, operands), p.dtype
    product = _product(options, dtype)

    def over_queries(x, y):  # [..., S, K, H]; in that order at once XLA:CPU would write column by column
        return jnp.swapaxes(einsum("...kgts,...kgth->...ksh", x, y, **product), -2, -3)

    grads: dict[str, Any] = {}
    if "value" in wanted:
        z = dropping.of_columns(options, operands)
        zp = (p if z is None else z * p).astype(plane.v.dtype)
        grads["value"] = over_queries(zp, dout.astype(zp.dtype))  # (5)
    if not set(wanted) - {"value"}:
        return grads
    dlogits = p * (dp - delta)  # (8)
    before, tanh = None, None
    if options.logits_soft_cap is not None or plane.at is not None:
        before, tanh = _before_score(options, plane, dtype)
    if plane.at is not None and before is not None:  # (8a)
        assert plane.places is not None  # with the function
        to_args, args = "mod_args" in wanted, plane.places.args
        dlogits, dargs = mod_functions.pulled_back(options, before, plane.at, args, dlogits, to_args)
        if to_args:
            grads["mod_args"] = dargs
    elif "mod_args" in wanted:
        grads["mod_args"] = jax.tree.map(jnp.zeros_like, float_leaves.floats(operands.mod_args))
    if plane.bias is not None and "bias" in wanted:
        assert operands.bias is not None  # of the plane
        grads["bias"] = reduce_to(dlogits, plane.bias.shape).reshape(operands.bias.shape)
    if tanh is not None:
        dlogits = dlogits * (1 - tanh * tanh)  # (10)
    dx = dlogits.astype(plane.q.dtype)
    if "query" in wanted:
        dq = options.scale * einsum("...kgts,...ksh->...kgth", dx, plane.k, **product)
        grads["query"] = layout.merge_heads(dq)  # (11)
    if "key" in wanted:
        grads["key"] = options.scale * over_queries(dx, plane.q)  # (11)
    return grads


def probabilities(options: Options, operands: Operands, result: Result | None) -> jax.Array:
    """(2): `[..., K, G, T, S]` before dropout, by the row values of all keys that a query attends to.

    None = these are all.
    """
    plane, dtype = _plane(options, operands), accumulator_dtype(operands.query.dtype)
    logits = _logits(options, plane, dtype)
    if result is None:
        rows = _softmax(operands, plane, logits)
        return rows.e / rows.l
    groups = plane.q.shape[-3]
    lse = layout.split_rows(result.lse, groups)[..., None]
    p = logits - (lse if plane.live is None else finite(lse))
    if result.lse_low is not None:
        p = p - layout.split_rows(result.lse_low, groups)[..., None]
    return jnp.exp(p)


def where_seen(options: Options, operands: Operands, plane: jax.Array) -> jax.Array:
    """`plane [..., K, G, T, S]`, 0 where a query does not see a key."""
    sees = _plane(options, operands).sees
    return plane if sees is None else jnp.where(sees, plane, 0)


def through_values(options: Options, operands: Operands, dout: jax.Array) -> jax.Array:
    """(6): what the output's cotangent `[..., K, G, T, Hv]` gives to that of the probabilities."""
    v, z = _plane(options, operands).v, dropping.of_columns(options, operands)
    dtype = accumulator_dtype(operands.query.dtype)
    dp = einsum("...kgth,...ksh->...kgts", dout.astype(v.dtype), v, **_product(options, dtype))
    return dp if z is None else z * dp


def gradients(
    options: Options,
    operands: Operands,
    wanted: Iterable[str],
    p: jax.Array,
    dout: jax.Array,
    dp: jax.Array,
    delta: jax.Array,
) -> DotProductAttentionGrads:
    """(5), (8), (10), (11): those of query, key, value and bias that are `wanted`.

    Args:
      p: `[..., K, G, T, S]`, the probabilities.
      dout: `[..., K, G, T, Hv]`, cotangent of the output.
      dp: `[..., K, G, T, S]`, cotangent of the probabilities.
      delta: `[..., K, G, T, 1]`, what the rows' products p dp sum to, over all keys of the row.
    """
    p = p.astype(accumulator_dtype(operands.query.dtype))
    found = _gradients(options, operands, wanted, p, dout, dp, delta)
    return DotProductAttentionGrads(**found)
