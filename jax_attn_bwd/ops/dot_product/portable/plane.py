"""Dense attention on materialized T x S planes: where they are small, and where their arrays are asked for.

A plane that fits a cache is computed as the formula is written, with no loop: it compiles faster than a walk
over tiles, fuses with what stands around it, and where forward and backward are one program XLA computes the
logits once for both, unless `Materialized.formed_again` is true. Equation numbers are those of `backward.py`.

For a GPU, where `Materialized.whole_rows` is true, the plane has the products and reductions of a plain
softmax and no others. XLA:GPU makes one kernel of all that becomes of a row, if each reduction meets its very
operand again, if nothing stands between a reduction and what reads it, and if the kernel gives one array. So
the probabilities are one array, normalised and rounded as the products read them, and (8) is another that is
made of it. Neither has axes of size 1: what leaves them out would stand between a reduction and its operand.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import fusion, trees
from jax_attn_bwd._core.numerics import fast_two_sum, finite, moved, reduce_to, rounding_of, to_rank
from jax_attn_bwd._core.products import einsum, sum_of_products
from jax_attn_bwd.ops.dot_product import layout, mod_functions, row_terms, visibility
from jax_attn_bwd.ops.dot_product.block import Block, dropout_factors
from jax_attn_bwd.ops.dot_product.clean_operands import places, unpoisoned, with_whole_keys
from jax_attn_bwd.ops.dot_product.plan import Materialized, Plan, product_dtype
from jax_attn_bwd.ops.dot_product.spec import Operands, Options, Result, Wanted


@dataclass(eq=False, kw_only=True)
class Plane(Block):
    """The whole plane, `[..., K, G, T, S]`; queries that see nothing, and keys that nothing sees, are 0."""

    operands: Operands
    live: jax.Array | None  # [..., K|1, G|1, T], queries that see something; None = all

    @cached_property
    def scaled_q(self) -> jax.Array:
        """`scale * q`, scaled before its axes move.

        In this order XLA rewrites the logits of the forward and those of the backward alike, and computes
        them once where both are one program.
        """
        query = self.operands.query.astype(self.q.dtype) * self.options.scale
        q = layout.split_heads(query, self.q.shape[-3])
        return q if self.live is None else jnp.where(self.live[..., None], q, 0)

    def scaled_product(self) -> jax.Array:
        """Computes scale * q k^T; see `block.scaled_product` for where the scale goes."""
        q, scale = self.queries
        logits = self.einsum("...gth,...sh->...gts", q, self.k, **self.product)
        return logits if scale is None else scale * logits

    @property
    def queries(self) -> tuple[jax.Array, float | None]:
        """Those of `Block`, scaled where factors are wide.

        Forward and backward then read the same, which XLA lays out once.
        """
        return (self.scaled_q, None) if self.q.dtype == self.dtype else super().queries


def plane(options: Options, operands: Operands, vector_last: bool = False) -> Plane:
    """Brings the operands into the layout of a plane, once for all that is computed of it."""
    # The factors, without poison; those who ask for a plane alone may have their keys on several devices.
    operands = with_whole_keys(operands)
    q, k, v, live = unpoisoned(options, operands)
    q, k, v = (x.astype(product_dtype(operands)) for x in (q, k, v))

    # What is seen, and where the elements stand if a score reads it.
    sizes, draw = operands.sizes, partial(dropout_factors, options, operands)
    given = visibility.tile_mask(operands.mask, operands.bias, sizes)
    seen = visibility.of_whole(given, len(sizes.batch))
    read = places(options, given, None, None, (sizes.T, sizes.S), seen)
    product = _vector_last if vector_last else einsum
    own: Any = dict(operands=operands, live=live)
    return Plane(options, q, k, v, given.bias, seen, *read, draw, einsum=product, **own)


def _vector_last(subscripts: str, x: jax.Array, y: jax.Array, **options: Any) -> jax.Array:
    """Computes `einsum` of one row, so that all products read keys and values in the same order.

    XLA:CPU turns a matrix for each product that reads it in another.
    """
    terms, out = subscripts.split("->")
    if not out.endswith("gts"):
        return einsum(subscripts, x, y, **options)
    vector, matrix = terms.split(",")
    found = einsum(f"{matrix},{vector}->{out.replace('gts', 'sgt')}", y, x, **options)
    return moved(found, -3, -1)


class _PlaneSoftmax(NamedTuple):
    """The softmax over the plane's own keys, and the sink, `[..., K, G, T|1, S|1]`."""

    e: jax.Array  # exp(logits - m)
    m: jax.Array  # greatest logit; a finite number of a row that sees nothing
    l: jax.Array  # sum of e; 1 of a row that attends to nothing
    empty: jax.Array | None  # rows that attend to nothing; None = there are none


def _softmax(plane: Plane, logits: jax.Array, whole_rows: bool = False) -> _PlaneSoftmax:
    """Computes the softmax of the rows, and the sink; with `whole_rows` l of an empty row is any number."""
    # Written as `jax.nn.softmax` is: XLA:CPU hands maximum, difference and exponential to one library loop
    # where nothing else reads the maximum, and nothing stands behind it.
    if whole_rows and plane.live is not None:  # a finite start: no select behind the maximum
        fixed = lax.stop_gradient(logits)
        least = jnp.asarray(jnp.finfo(fixed.dtype).min, fixed.dtype)
        m = lax.reduce(fixed, least, lax.max, (fixed.ndim - 1,))[..., None]
    else:
        m = logits.max(-1, keepdims=True)
    sink = None
    if plane.operands.sink is not None:
        sink = plane.operands.sink.astype(m.dtype).reshape(*plane.q.shape[-4:-2], 1, 1)
        sink = to_rank(sink, m.ndim)
        m = jnp.maximum(m, sink)
    m = lax.stop_gradient(m if plane.live is None or whole_rows else finite(m))
    e = jnp.exp(logits - m)
    l = e.sum(-1, keepdims=True)
    if sink is not None:
        l = l + jnp.exp(sink - m)

    # Rows that attend to nothing: l is 0.
    if plane.live is None:
        return _PlaneSoftmax(e, m, l, None)
    # In others the greatest term is 1.
    return _PlaneSoftmax(e, m, jnp.maximum(l, 0.5) if whole_rows else jnp.where(l == 0, 1, l), l == 0)


def _of_whole_rows(plane: Plane, p: jax.Array) -> jax.Array:
    """Rounds probabilities as products read them: one array, which all that follows is made of."""
    ones = _axes_of_one(p)
    return lax.expand_dims(fusion.barrier(lax.squeeze(p.astype(plane.v.dtype), ones)), ones)


def _axes_of_one(x: jax.Array) -> tuple[int, ...]:
    return tuple(axis for axis, n in enumerate(x.shape[:-1]) if n == 1)


def _derivatives_of_whole_rows(p: jax.Array, dp: jax.Array, dlse: Any) -> tuple[jax.Array, jax.Array]:
    """Computes ((8), delta `[..., 1]`) by one kernel for each row; dlse `[..., 1]` that is None is zero."""
    ones = _axes_of_one(dp)
    rows = fusion.met_again(lax.squeeze(p, ones).astype(dp.dtype))
    drows = lax.squeeze(dp, ones)
    delta = sum_of_products(rows, drows, keepdims=True)  # (7)
    delta = delta if dlse is None else delta - lax.squeeze(dlse, ones)
    return lax.expand_dims(rows * (drows - delta), ones), lax.expand_dims(delta, ones)


def _derivatives_by_products(
    plane: Plane, p: jax.Array, dout: jax.Array, dlse: Any, result: Result
) -> tuple[jax.Array, jax.Array]:
    """Computes what `_derivatives_of_whole_rows` does, most of it at the end of the product (6).

    XLA:GPU takes arrays, and what repeats a row's value, into the end of a product with one batch axis; it
    takes nothing else that computes them, and no conversion. Where p and `out` are as wide as sums, the
    product ends in (8). Where they are narrow, it subtracts <dout, out>, which lacks what rounding took from
    `out`, and writes the rest of dp, rounded; the kernel of whole rows subtracts what p and that sum to.
    """
    is_wide = p.dtype == plane.dtype and result.is_wide
    out = layout.split_heads(result.widest_out() if is_wide else result.out, dout.shape[-3])
    wide_dout, wide_out = (x.astype(plane.dtype) for x in (dout, out))
    delta = sum_of_products(wide_dout, wide_out, keepdims=True)  # (7)
    if not is_wide:
        delta = lax.stop_gradient(delta)  # (8) does not depend on it: p sums to 1
    elif dlse is not None:
        delta = delta - dlse

    # Batch and heads are one axis, and so are the rows of all groups.
    flat = lambda x: x.reshape(-1, math.prod(x.shape[-3:-1]), x.shape[-1])
    given = flat(dout.astype(plane.v.dtype)), flat(delta), flat(p)
    flat_dout, subtracted, factor = fusion.barrier(given)
    v = plane.v.reshape(-1, *plane.v.shape[-2:])
    rest = einsum("bth,bsh->bts", flat_dout, v, **plane.product) - subtracted
    if is_wide:
        return fusion.barrier(factor * rest).reshape(p.shape), delta
    rest = fusion.barrier(rest.astype(p.dtype)).reshape(p.shape)
    dlogits, left = _derivatives_of_whole_rows(p, rest.astype(plane.dtype), dlse)
    return dlogits, delta + left


def _rounded_for_bias(plane: Plane, wanted: Iterable[str], dlogits: jax.Array) -> jax.Array:
    """Rounds (8) as products read it, so that the gradient of the bias is summed of the same array.

    Else it is formed twice. Not where that sums over the keys of a row, whose (8) add up to 0, nor where the
    narrow dtype lacks the range of the wide one, nor where products read something else.
    """
    bias, narrow = plane.bias, plane.dlogits_dtype
    has_range = jnp.finfo(narrow).maxexp == jnp.finfo(plane.dtype).maxexp
    is_read = plane.options.logits_soft_cap is None and plane.places is None
    if bias is None or "bias" not in wanted or not (has_range and is_read):
        return dlogits
    return fusion.barrier(dlogits.astype(narrow)) if bias.shape[-1] == dlogits.shape[-1] else dlogits


def _in_reach(schedule: Materialized, operands: Operands) -> Operands:
    """Returns the operands without the keys that no query sees whatever the arrays hold."""
    if schedule.keys is None:
        return operands
    of_keys = operands.arrays_with("s").items()
    first = lambda name, axis: lax.slice_in_dim(operands.array(name), 0, schedule.keys, axis=axis)
    return operands.with_arrays({name: first(name, axis) for name, axis in of_keys})


def forward(plan: Plan, schedule: Materialized, operands: Operands) -> Result:
    """Computes attention over all keys, with its row values."""
    # The softmax, and lse with its rounding.
    operands = _in_reach(schedule, operands)
    whole = plane(plan.options, operands, plan.vector_last)
    logits = whole.logits(whole.scaled_product())[0]
    e, m, l, empty = _softmax(whole, logits, schedule.whole_rows)
    lse, rounding = fast_two_sum(m, jnp.log(l))
    if empty is not None:
        lse, rounding = jnp.where(empty, -jnp.inf, lse), jnp.where(empty, 0, rounding)

    # The output (4) of whole rows.
    v, out_rounding = whole.v, None
    if schedule.whole_rows:
        p = whole.dropped(_of_whole_rows(whole, e / l).astype(whole.dtype)).astype(v.dtype)
        out = einsum("...kgts,...ksh->...kgth", p, v, **whole.product)
        return row_terms.of_forward(operands, plan.has_wide_out, out, None, lse[..., 0], rounding[..., 0])

    # The output (4), divided by l after the product, and the rounding of its factor where that matters.
    e = whole.dropped(e)
    times_v = lambda e: einsum("...kgts,...ksh->...kgth", e, v, **whole.product) / l
    out = times_v(e.astype(v.dtype))
    if v.dtype != e.dtype and plan.rounding_matters:
        out_rounding = times_v(rounding_of(e, v.dtype))
    rows = lse[..., 0], rounding[..., 0]
    return row_terms.of_forward(operands, plan.has_wide_out, out, out_rounding, *rows)


def backward(
    plan: Plan, schedule: Materialized, wanted: Wanted, operands: Operands, *rows: Any
) -> dict[str, Any]:
    """Computes the gradients named in `wanted`, in the accumulator's dtype.

    `rows` are the result, dout and dlse.
    """
    grads = _of_reached_keys(plan, schedule, wanted, _in_reach(schedule, operands), *rows)
    if schedule.keys is None:
        return grads

    # Keys that were left out have gradient 0.
    for name, axis in operands.arrays_with("s").items():
        if name in grads:
            widths = [(0, 0)] * grads[name].ndim
            widths[axis] = (0, operands.sizes.S - schedule.keys)
            grads[name] = jnp.pad(grads[name], widths)
    return grads


def _of_reached_keys(
    plan: Plan,
    schedule: Materialized,
    wanted: Wanted,
    operands: Operands,
    result: Result,
    dout: Any,
    dlse: Any,
) -> dict[str, Any]:
    """Computes the gradients of operands of which no key is out of reach.

    Where these keys are all that the queries attend to, the softmax is formed as in the forward, and delta as
    sum_s p_ts dp_ts: nothing else is needed of the forward, but `out` where `Materialized.fused_dp` is true.
    """
    options, names = plan.options, wanted.names
    if wanted.alone:
        # The cotangents of the rows, [..., K, G, T, Hv] and [..., K, G, T].
        groups = operands.sizes.G
        dout = layout.split_heads(jnp.zeros_like(result.out) if dout is None else dout, groups)
        if dlse is not None:
            dlse = layout.split_rows(row_terms.finite_rows(options, operands, result.lse, dlse), groups)

        # Probabilities [..., K, G, T, S] from a softmax of their own; dv needs no more.
        whole = plane(options, operands, plan.vector_last)
        dout = dout if whole.live is None else jnp.where(whole.live[..., None], dout, 0)
        if schedule.formed_again:  # not taken from the forward, which would keep a plane until here
            k, dout = fusion.barrier((whole.k, dout))
            whole = replace(whole, k=k)
        p = probabilities(whole, None, schedule.whole_rows)
        if names <= {"value"}:
            return gradients(whole, names, p, dout, None, None)
        if schedule.whole_rows:
            of_rows = None if dlse is None else dlse[..., None]
            if schedule.fused_dp:
                dlogits, delta = _derivatives_by_products(whole, p, dout, of_rows, result)
            else:
                dlogits, delta = _derivatives_of_whole_rows(p, whole.through_values(dout), of_rows)
            grads = gradients(whole, names & {"value"}, p, dout, None, None)
            grads |= gradients_of_logits(whole, names - {"value"}, _rounded_for_bias(whole, names, dlogits))
            delta = delta[..., 0]
        else:
            dp: Any = whole.through_values(dout)
            delta = sum_of_products(p, dp)  # (7)
            delta = delta if dlse is None else delta - dlse
            grads = gradients(whole, names, p, dout, dp, delta[..., None])
    else:
        # Probabilities [..., K, G, T, S] by the lse of all keys, and delta by their output.
        dout, delta = row_terms.of_backward(options, operands, result, dout, dlse)
        whole = plane(options, operands, plan.vector_last)
        live_dout, live_delta = row_terms.in_live_rows(whole.live, dout, delta)
        names = names - {"sink"}
        dp = whole.through_values(live_dout) if names - {"value"} else None
        p = probabilities(whole, result)
        p = _of_whole_rows(whole, p) if schedule.whole_rows else p
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
    of, p, dout = _scored(plane), p.astype(plane.dtype), dout.astype(plane.v.dtype)
    return _in_shapes_of_operands(plane, wanted, plane.gradients(wanted, p, dout, dp, delta, of))


def gradients_of_logits(plane: Plane, wanted: Iterable[str], dlogits: jax.Array) -> dict[str, Any]:
    """Computes what `gradients` does, but of the values, from (8) `[..., K, G, T, S]`."""
    return _in_shapes_of_operands(plane, wanted, plane.gradients_of_logits(wanted, dlogits, _scored(plane)))


def _scored(plane: Plane) -> Any:
    """Computes (what the score was handed; the tanh of the soft cap), None where there is neither."""
    if plane.options.logits_soft_cap is None and plane.places is None:
        return None, None
    return plane.before_score(plane.scaled_product())


def _in_shapes_of_operands(plane: Plane, wanted: Iterable[str], grads: dict[str, Any]) -> dict[str, Any]:
    """Lays gradients out in the shapes of the operands; arrays that no score reads get nothing."""
    grads = layout.as_given(grads)
    if "mod_args" in wanted and "mod_args" not in grads:
        grads["mod_args"] = jax.tree.map(jnp.zeros_like, trees.floats(plane.operands.mod_args))
    bias = plane.operands.bias
    if plane.bias is not None and bias is not None and "bias" in wanted:
        dbias = grads["bias"].astype(plane.dtype)
        grads["bias"] = reduce_to(dbias, plane.bias.shape).reshape(bias.shape)
    return grads


def probabilities(plane: Plane, result: Result | None, whole_rows: bool = False) -> jax.Array:
    """Computes (2), `[..., K, G, T, S]` before dropout, by the row values of all keys of a query.

    None = the keys of the plane are all; then those of `whole_rows` are rounded.
    """
    if result is None:
        rows = _softmax(plane, plane.logits(plane.scaled_product())[0], whole_rows)
        p = rows.e / rows.l
        return _of_whole_rows(plane, p) if whole_rows else p
    groups = plane.q.shape[-3]
    lse = layout.split_rows(result.lse, groups)[..., None]
    p = plane.logits(plane.scaled_product())[0] - (lse if plane.live is None else finite(lse))
    if result.lse_rounding is not None:
        p = p - layout.split_rows(result.lse_rounding, groups)[..., None]
    return jnp.exp(p)


def tangent_of_logits(whole: Plane, tangents: Operands) -> jax.Array:
    """Computes (14) of `tangent.py`, `[..., K, G, T, S]`, 0 where unseen; None in `tangents` is zero."""
    # (12): the products with the tangents of queries and keys, which are cleaned as the operands are.
    options, given = whole.options, whole.operands
    filled = {name: getattr(tangents, name) for name in ("query", "key")}
    moved = plane(options, given._replace(**{name: x for name, x in filled.items() if x is not None}))
    logits = whole.scaled_product()
    dlogits, product = (
        jnp.zeros_like(logits),
        lambda q, k: einsum("...gth,...sh->...gts", q, k, **whole.product),
    )
    if tangents.query is not None:
        dlogits += options.scale * product(moved.q, whole.k)
    if tangents.key is not None:
        dlogits += options.scale * product(whole.q, moved.k)

    # (13), (14): through the soft cap, the bias and the score.
    bias, args = tangents.bias, mod_functions.tangents_of_args(given.mod_args, tangents.mod_args)
    dbias = None if bias is None else layout.plane(bias, given.query.ndim - 3, given.sizes.G)
    return whole.where_seen(whole.pushed_forward(logits, dlogits, dbias, args)[1])
