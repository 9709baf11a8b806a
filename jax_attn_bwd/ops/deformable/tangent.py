"""Tangent rule of multi-scale deformable attention: derivation, then a loop over the sampling points.

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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import fusion
from jax_attn_bwd._core.sharding import full_like_operands, unsharded
from jax_attn_bwd.ops.deformable import all_points, cpu, loops, sampling
from jax_attn_bwd.ops.deformable.sampling import Place
from jax_attn_bwd.ops.deformable.spec import Operands, Options


def tangent(options: Options, operands: Operands, tangents: Operands) -> jax.Array:
    """`dout [B, Q, M * D]`, in the dtype of the value; None in `tangents` is zero."""
    whole: Any = lambda x: None if x is None else unsharded(x, 1)
    operands, tangents = (x._replace(value=whole(x.value)) for x in (operands, tangents))
    return _tangent(options, loops.chosen(options, operands), operands, tangents)


@partial(jax.jit, static_argnums=(0, 1))
def _tangent(options, loops, operands, tangents):
    value, dtype, heads_first = operands.value, sampling.compute_dtype(operands), loops.heads_first
    (B, Q, M, _), D = operands.attention_weights.shape, value.shape[3]

    if loops.all_points:
        dout = _at_all_points(options, operands, tangents, dtype)
        return dout.reshape(B, Q, M * D).astype(value.dtype)

    def add_point(dout, point):
        level, (x, y, weight), (dx, dy, da) = point
        at = sampling.place(options, cpu.on_all_cores(level) if loops.on_all_cores else level, x, y)
        factors, scales = _factors(at, weight, dx, dy, da), sampling.scales(at, weight)
        pixels, factors, scales = fusion.barrier((at.pixels, factors, scales))
        for pixel, factor, scale in zip(pixels, factors, scales, strict=True):
            if tangents.sampling_locations is not None or tangents.attention_weights is not None:
                dout += factor[..., None] * sampling.read(value, pixel, heads_first).astype(dtype)
            if tangents.value is not None:
                dout += scale[..., None] * sampling.read(tangents.value, pixel, heads_first).astype(dtype)
        return dout, None  # (14)

    axes = (3, 0, 2, 1) if heads_first else (3, 0, 1, 2)
    along = [x.transpose(axes) for x in _of_points(options, operands, tangents, dtype)]
    like, shape = operands.attention_weights, (B, Q, M, D)
    if heads_first:
        like, shape = like.transpose(0, 2, 1, 3), (B, M, Q, D)
    zeros = full_like_operands(like, shape, 0, dtype, (operands, tangents))
    points = (options.levels(), sampling.samples(options, operands, heads_first), along)
    dout, _ = lax.scan(jax.checkpoint(add_point, prevent_cse=False), zeros, points)
    dout = dout.transpose(0, 2, 1, 3) if heads_first else dout
    return dout.reshape(B, Q, M * D).astype(value.dtype)


def _at_all_points(options, operands, tangents, dtype):
    """`dout [B, Q, M, D]` by (14), without a loop."""
    at, samples = all_points.places(options, operands)
    dout = 0
    if tangents.sampling_locations is not None or tangents.attention_weights is not None:
        factors = _factors(at, samples.weight, *_of_points(options, operands, tangents, dtype))
        dout += all_points.weighted_sum(operands.value, at.pixels, factors)
    if tangents.value is not None:
        scales = sampling.scales(at, samples.weight)
        dout += all_points.weighted_sum(tangents.value, at.pixels, scales)
    return dout


def _of_points(options, operands, tangents, dtype):
    """dloc_x, dloc_y and da of all points, [B, Q, M, K]."""
    logits = operands.attention_weights.astype(dtype)
    da = dx = dy = jnp.zeros_like(logits)
    if tangents.sampling_locations is not None:
        dx, dy = jnp.moveaxis(tangents.sampling_locations.astype(dtype), -1, 0)
    if tangents.attention_weights is not None:
        da = tangents.attention_weights.astype(dtype)
        if options.normalize == "softmax":
            a, dz = sampling.probabilities(logits), jnp.where(logits == -jnp.inf, 0, da)
            da = a * (dz - (a * dz).sum(-1, keepdims=True))  # (15)
    return dx, dy, da


def _factors(at: Place, weight: jax.Array, dx: jax.Array, dy: jax.Array, da: jax.Array) -> tuple:
    """Da share + a dshare of each corner, 0 where the point is skipped."""
    weight, da = (jnp.where(at.counts, x, 0) for x in (weight, da))
    shares = sampling.shares(at)
    if len(shares) == 1:
        return (da,)
    dr, db = (weight * jnp.where(at.counts, step * x, 0) for step, x in ((at.dx, dx), (at.dy, dy)))  # (12)
    r, b = at.right, at.below
    dshares = (
        -(1 - b) * dr - (1 - r) * db,
        (1 - b) * dr - r * db,
        -b * dr + (1 - r) * db,
        b * dr + r * db,
    )  # (13), times the weight
    return tuple(da * share + dshare for share, dshare in zip(shares, dshares, strict=True))
