"""Tangent rule of multi-scale deformable attention: derivation, then the sum over the points.

The letters and equations (1) to (3) are those of `backward.py`. With tangents dloc, da and dv, of one sample

    dr = W dloc_x,   db = H dloc_y                                   from (1)           (12)
    dshare_0 = -(1-b) dr - (1-r) db,   dshare_1 = (1-b) dr - r db
    dshare_2 = -b dr + (1-r) db,       dshare_3 = b dr + r db        from (2)           (13)
    dout = sum_k sum_c (da_k share_c + a_k dshare_c) v_c + a_k share_c dv_c   from (3)  (14)

so that a pixel is read once, with one factor for itself and one for its tangent. A sample that does not
count has no tangent, whatever lies there; where a coordinate is clamped or rounded, dr and db are 0. With
normalize="softmax" the weights a are probabilities of logits z:

    da_k = a_k (dz_k - sum_j a_j dz_j)                                                  (15)

and what a logit of -inf hides is not read.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jax_attn_bwd._core.products import sum_of_products
from jax_attn_bwd.ops.deformable import forward, sampling
from jax_attn_bwd.ops.deformable.plan import Plan, with_all_pixels
from jax_attn_bwd.ops.deformable.sampling import Pixels
from jax_attn_bwd.ops.deformable.spec import Operands, Options


@partial(jax.jit, static_argnums=0)
def tangent(plan: Plan, operands: Operands, tangents: Operands) -> jax.Array:
    """Returns `dout [B, Q, M * D]`, in the dtype of the value, wherever queries and pixels lie.

    None in `tangents` is zero.
    """
    operands = with_all_pixels(plan, operands)
    if tangents.value is not None:
        tangents = with_all_pixels(plan, tangents)
    return forward.over_queries(plan, partial(_of_queries, plan), operands, tangents)()


def _of_queries(plan: Plan, operands: Operands, tangents: Operands) -> jax.Array:
    """Returns the tangent of some queries' output."""
    points_move = not (tangents.sampling_locations is tangents.attention_weights is None)

    def terms(at, weight, *along):
        """Returns the terms of (14): a pixel times its factor's tangent, its tangent times the factor."""
        found = []
        if points_move:
            found.append((operands.value, _factors(at, weight, *along)))
        if tangents.value is not None:
            found.append((tangents.value, sampling.scales(at, weight)))
        return found

    along = _of_points(plan.options, operands, tangents) if points_move else ()
    return forward.sum_over_points(plan, operands, terms, (operands, tangents), along)


def _of_points(options: Options, operands: Operands, tangents: Operands) -> tuple[jax.Array, ...]:
    """Returns dloc_x, dloc_y and da of all points, [B, Q, M, K]."""
    logits = operands.attention_weights.astype(sampling.compute_dtype(operands))
    da = dx = dy = jnp.zeros_like(logits)
    if tangents.sampling_locations is not None:
        dx, dy = jnp.moveaxis(tangents.sampling_locations.astype(logits.dtype), -1, 0)
    if tangents.attention_weights is not None:
        da = tangents.attention_weights.astype(logits.dtype)
        if options.normalize == "softmax":
            a, dz = sampling.probabilities(logits), jnp.where(logits == -jnp.inf, 0, da)
            da = a * (dz - sum_of_products(a, dz, keepdims=True))  # (15)
    return dx, dy, da


def _factors(
    at: Pixels, weight: jax.Array, dx: jax.Array, dy: jax.Array, da: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns da fraction + a dfraction of each corner, 0 where the point is skipped."""
    weight, da = (jnp.where(at.counts, x, 0) for x in (weight, da))
    fractions = sampling.fractions(at)
    if len(fractions) == 1:
        return (da,)
    dr, db = (weight * jnp.where(at.counts, step * x, 0) for step, x in ((at.dx, dx), (at.dy, dy)))  # (12)
    r, b = at.right, at.below
    dfractions = (
        -(1 - b) * dr - (1 - r) * db,
        (1 - b) * dr - r * db,
        -b * dr + (1 - r) * db,
        b * dr + r * db,
    )  # (13), times the weight
    return tuple(da * fraction + dfraction for fraction, dfraction in zip(fractions, dfractions, strict=True))
