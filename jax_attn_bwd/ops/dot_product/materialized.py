"""Dense attention on materialized T x S planes: where they are small, and where their arrays are asked for.

A plane that fits a cache is computed as the formula is written, with no loop: it compiles faster than a walk
over tiles, fuses with what stands around it, and where forward and backward are one program XLA computes the
logits once for both. Equation numbers are those of `backward.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import float_leaves
from jax_attn_bwd._core.numerics import accumulator_dtype, finite, lost_to, reduce_to, split_rounding, to_rank
from jax_attn_bwd._core.sharding import einsum
from jax_attn_bwd.ops.dot_product import layout, mod_functions, row_terms, visibility
from jax_attn_bwd.ops.dot_product.block import dropout_factors, soft_capped
from jax_attn_bwd.ops.dot_product.devices import with_whole_keys
from jax_attn_bwd.ops.dot_product.online_softmax import log_sum
from jax_attn_bwd.ops.dot_product.plan import Materialized, Plan, product_dtype
from jax_attn_bwd.ops.dot_product.spec import Operands, Options, Result, Wanted
from jax_attn_bwd.ops.dot_product.tiles import unpoisoned


@dataclass(eq=False)
class Plane:
    """The factors of the products; queries that see nothing, and keys that nothing sees, are 0."""

    options: Options
    operands: Operands
    q: jax.Array  # [..., K, G, T, H]
    k: jax.Array  # [..., K, S, H]
    v: jax.Array  # [..., K, S, Hv]
    seen: jax.Array | None  # [..., K|1, G|1, T|1, S|1]; None = all
    live: jax.Array | None  # [..., K|1, G|1, T], queries that see something; None = all
    bias: jax.Array | None  # [..., K|1, G|1, T|1, S|1]
    places: mod_functions.Tile | None  # where the elements stand, with a `score_mod`

    @cached_property
    def z(self) -> jax.Array | None:
        """The dropout factors `[..., K, G, T, S]`, drawn when first asked for; None = no dropout."""
        return dropout_factors(self.options, self.operands)

    @cached_property
    def scaled_q(self) -> jax.Array:
        """`scale * q`, scaled before its axes move.

        In this order XLA rewrites the logits of the forward and those of the backward alike, though `q` has
        other readers in the backward, and computes them once where both are one program.
        """
        query = self.operands.query.astype(self.q.dtype) * self.options.scale
        q = layout.split_heads(query, self.q.shape[-3])
        return q if self.live is None else jnp.where(self.live[..., None], q, 0)

    @property
    def dtype(self) -> Any:
        """The accumulator's dtype."""
        return accumulator_dtype(self.operands.query.dtype)

    @property
    def product(self) -> dict[str, Any]:
        """Keywords by which products are taken."""
        return {"precision": self.options.precision, "preferred_element_type": self.dtype}

    def dropped(self, x: jax.Array) -> jax.Array:
        """Multiplies `x` with the dropout factors."""
        return x if self.z is None else self.z * x


def plane(options: Options, operands: Operands) -> Plane:
    """Brings the operands into the layout of a plane, once for all that is computed of it."""
    # The factors, without poison; those who ask for a plane alone may have their keys on several devices.
    operands = with_whole_keys(operands)
    q, k, v, live = unpoisoned(options, operands)
    q, k, v = (x.astype(product_dtype(x.dtype)) for x in (q, k, v))

    # What is seen, and where the elements stand if a score reads it.
    sizes, places = operands.sizes, None
    given = visibility.tile_mask(operands.mask, operands.bias, sizes)
    seen = visibility.of_whole(given, len(sizes.batch))
    if options.score_mod is not None:
        assert given.places is not None  # prepared with the function
        at = visibility.positions(given, None, None, (sizes.T, sizes.S), q.ndim)
        places = mod_functions.Tile(given.places.batch, given.places.head, *at, seen)
    return Plane(options, operands, q, k, v, seen, live, given.bias, places)


def _logits(plane: Plane) -> jax.Array:
    """Computes (1), `[..., K, G, T, S]`, -inf where unseen."""
    logits, _ = _before_score(plane)
    if plane.places is not None:
        logits = mod_functions.scored(plane.options, logits, plane.places, plane.operands.mod_args or ())
    return logits if plane.seen is None else jnp.where(plane.seen, logits, -jnp.inf)


def _before_score(plane: Plane) -> tuple[jax.Array, jax.Array | None]:
    """Computes (c of (1), `[..., K, G, T, S]`; tanh of the soft cap)."""
    options, in_q = plane.options, plane.q.dtype == plane.dtype  # see `block.scaled_product`
    q = plane.scaled_q if in_q else plane.q
    logits = einsum("...kgth,...ksh->...kgts", q, plane.k, **plane.product)
    logits, tanh = soft_capped(options, logits if in_q else options.scale * logits)
    return logits if plane.bias is None else logits + plane.bias.astype(plane.dtype), tanh


class _Rows(NamedTuple):
    """The softmax over the plane's own keys, and the sink, `[..., K, G, T|1, S|1]`."""

    e: jax.Array  # exp(logits - m)
    m: jax.Array  # greatest logit; 0 of a row that sees nothing
    l: jax.Array  # sum of e; 1 of a row that attends to nothing
    empty: jax.Array | None  # rows that attend to nothing; None = there are none


def _softmax(plane: Plane, logits: jax.Array) -> _Rows:
    """Computes the softmax of the rows, and the sink."""
    # Written as `jax.nn.softmax` is: XLA:CPU hands maximum, difference and exponential to one library loop
    # where nothing else reads the maximum.
    m, sink = logits.max(-1, keepdims=True), None
    if plane.operands.sink is not None:
        sink = plane.operands.sink.astype(m.dtype).reshape(*plane.q.shape[-4:-2], 1, 1)
        sink = to_rank(sink, m.ndim)
        m = jnp.maximum(m, sink)
    m = lax.stop_gradient(m if plane.live is None else finite(m))
    e = jnp.exp(logits - m)
    l = e.sum(-1, keepdims=True)
    if sink is not None:
        l = l + jnp.exp(sink - m)

    # Rows that attend to nothing: l is 0.
    if plane.live is None:
        return _Rows(e, m, l, None)
    return _Rows(e, m, jnp.where(l == 0, 1, l), l == 0)


def forward(plan: Plan, _: Materialized, operands: Operands) -> Result:
    """Computes attention over all keys, with its row values."""
    # The softmax, and lse with what rounding takes from it.
    whole = plane(plan.options, operands)
    e, m, l, empty = _softmax(whole, _logits(whole))
    lse, low = log_sum(m, l)
    if empty is not None:
        lse, low = jnp.where(empty, -jnp.inf, lse), jnp.where(empty, 0, low)

    # The output (4), divided by l after the product, and what rounding its factor takes where that matters.
    e, v, lost = whole.dropped(e), whole.v, None
    times_v = lambda e: einsum("...kgts,...ksh->...kgth", e, v, **whole.product) / l
    out = times_v(e.astype(v.dtype))
    if v.dtype != e.dtype and plan.low_matters:
        lost = layout.merge_heads(times_v(lost_to(v.dtype, e)))

    lse, low = (layout.merge_rows(x[..., 0]) for x in (lse, low))  # [..., T, N]
    out = layout.merge_heads(out)  # [..., T, N, Hv]
    out, out_low = split_rounding(out, operands.query.dtype, lost=lost, kept=plan.splits_out)
    return Result(out, lse, low, out_low)


def backward(
    plan: Plan, _: Materialized, wanted: Wanted, operands: Operands, result: Result, dout: Any, dlse: Any
) -> dict[str, Any]:
    """Computes the gradients named in `wanted`, in the accumulator's dtype.

    Where these keys are all that the queries attend to, the softmax is formed as in the forward, and delta as
    sum_s p_ts dp_ts: nothing else is needed of the forward.
    """
    options, names = plan.options, wanted.names
    if wanted.alone:
        # The cotangents of the rows, [..., K, G, T, Hv] and [..., K, G, T].
        groups = operands.sizes.G
        dout = layout.split_heads(jnp.zeros_like(result.out) if dout is None else dout, groups)
        if dlse is not None:
            dlse = layout.split_rows(row_terms.finite_rows(options, operands, result.lse, dlse), groups)

        # Probabilities [..., K, G, T, S] from a softmax of their own; dv needs no more.
        whole = plane(options, operands)
        dout = dout if whole.live is None else jnp.where(whole.live[..., None], dout, 0)
        p = probabilities(whole, None)
        if names <= {"value"}:
            return gradients(whole, names, p, dout, None, None)
        dp: Any = through_values(whole, dout)
        delta = (p * dp).sum(-1)  # (7)
        delta = delta if dlse is None else delta - dlse
        grads = gradients(whole, names, p, dout, dp, delta[..., None])
    else:
        # Probabilities [..., K, G, T, S] by the lse of all keys, and delta by their output.
        dout, delta = row_terms.of_backward(options, operands, result, dout, dlse)
        whole = plane(options, operands)
        live_dout, live_delta = row_terms.in_live_rows(whole.live, dout, delta)
        names = names - {"sink"}
        dp = through_values(whole, live_dout) if names - {"value"} else None
        p = probabilities(whole, result)
        grads = gradients(whole, names, p, live_dout, dp, live_delta[..., None])

    if "sink" in wanted.names:
        grads["sink"] = row_terms.gradient_of_sink(operands.sink, result, layout.merge_rows(delta))
    return grads


def gradients(
    plane: Plane, wanted: Iterable[str], p: jax.Array, dout: jax.Array, dp: Any, delta: Any
) -> dict[str, Any]:
    """Computes (5), (8), (10), (11): the gradients that are `wanted`, by name, in the accumulator's dtype.

    Args:
      p: `[..., K, G, T, S]`, the probabilities.
      dout: `[..., K, G, T, Hv]`, cotangent of the output.
      dp: `[..., K, G, T, S]`, cotangent of the probabilities; for no more than "value" it may be None.
      delta: `[..., K, G, T, 1]`, what the rows' products p dp sum to, over all keys of the row; likewise.
    """
    options, operands, product, p = plane.options, plane.operands, plane.product, p.astype(plane.dtype)

    def over_queries(x, y):  # [..., S, K, H]; in that order at once XLA:CPU would write column by column
        return jnp.swapaxes(einsum("...kgts,...kgth->...ksh", x, y, **product), -2, -3)

    # Through the product with the values.
    grads: dict[str, Any] = {}
    if "value" in wanted:
        zp = plane.dropped(p).astype(plane.v.dtype)
        grads["value"] = over_queries(zp, dout.astype(zp.dtype))  # (5)
    if not set(wanted) - {"value"}:
        return grads
    dlogits = p * (dp - delta)  # (8)

    # Through the score, the bias and the soft cap, in the reverse order of the forward.
    before, tanh = None, None
    if options.logits_soft_cap is not None or plane.places is not None:
        before, tanh = _before_score(plane)
    if plane.places is not None and before is not None:  # (8a)
        args, to_args = operands.mod_args or (), "mod_args" in wanted
        dlogits, dargs = mod_functions.pulled_back(options, before, plane.places, args, dlogits, to_args)
        if to_args:
            grads["mod_args"] = dargs
    elif "mod_args" in wanted:
        grads["mod_args"] = jax.tree.map(jnp.zeros_like, float_leaves.floats(operands.mod_args))
    if plane.bias is not None and "bias" in wanted:
        assert operands.bias is not None  # the plane's
        grads["bias"] = reduce_to(dlogits, plane.bias.shape).reshape(operands.bias.shape)
    if tanh is not None:
        dlogits = dlogits * (1 - tanh * tanh)  # (10)

    # Back to queries and keys.
    dx = dlogits.astype(plane.q.dtype)
    if "query" in wanted:
        dq = options.scale * einsum("...kgts,...ksh->...kgth", dx, plane.k, **product)
        grads["query"] = layout.merge_heads(dq)  # (11)
    if "key" in wanted:
        grads["key"] = options.scale * over_queries(dx, plane.q)  # (11)
    return grads


def probabilities(plane: Plane, result: Result | None) -> jax.Array:
    """Computes (2), `[..., K, G, T, S]` before dropout, by the row values of all keys of a query.

    None = the keys of the plane are all.
    """
    if result is None:
        rows = _softmax(plane, _logits(plane))
        return rows.e / rows.l
    groups = plane.q.shape[-3]
    lse = layout.split_rows(result.lse, groups)[..., None]
    p = _logits(plane) - (lse if plane.live is None else finite(lse))
    if result.lse_low is not None:
        p = p - layout.split_rows(result.lse_low, groups)[..., None]
    return jnp.exp(p)


def tangent_of_logits(whole: Plane, tangents: Operands) -> jax.Array:
    """Computes (14) of `tangent.py`, `[..., K, G, T, S]`, 0 where unseen; None in `tangents` is zero."""
    # (12): the products with the tangents of queries and keys, which are cleaned as the operands are.
    options, given = whole.options, whole.operands
    filled = {name: getattr(tangents, name) for name in ("query", "key")}
    moved = plane(options, given._replace(**{name: x for name, x in filled.items() if x is not None}))
    logits, tanh = _before_score(whole)
    product = lambda q, k: einsum("...kgth,...ksh->...kgts", q, k, **whole.product)
    dlogits = jnp.zeros_like(logits)
    if tangents.query is not None:
        dlogits += options.scale * product(moved.q, whole.k)
    if tangents.key is not None:
        dlogits += options.scale * product(whole.q, moved.k)

    # (13), (14): through the soft cap, the bias and the score.
    if tanh is not None:
        dlogits = dlogits * (1 - tanh * tanh)
    if tangents.bias is not None:
        bias = layout.plane(tangents.bias, given.query.ndim - 3, given.sizes.G)
        dlogits = dlogits + bias.astype(whole.dtype)
    if whole.places is not None:
        args = mod_functions.tangents_of_args(given.mod_args, tangents.mod_args)
        _, dlogits = mod_functions.pushed_forward(
            options, logits, whole.places, given.mod_args or (), dlogits, args
        )
    return where_seen(whole, dlogits)


def where_seen(plane: Plane, x: jax.Array) -> jax.Array:
    """Returns `x [..., K, G, T, S]`, 0 where a query does not see a key."""
    return x if plane.seen is None else jnp.where(plane.seen, x, 0)


def through_values(plane: Plane, dout: jax.Array) -> jax.Array:
    """Computes (6): what the output's cotangent `[..., K, G, T, Hv]` gives to that of the probabilities."""
    v = plane.v
    return plane.dropped(einsum("...kgth,...ksh->...kgts", dout.astype(v.dtype), v, **plane.product))
