"""Backward of multi-scale deformable attention: derivation, then the portable code.

The forward, for one query and head, with samples k on their levels of H x W pixels:

    x = loc_x W - 1/2,  y = loc_y H - 1/2,  r = x - floor(x),  b = y - floor(y)         (1)
    s_k = (1-b) (1-r) v_0 + (1-b) r v_1 + b (1-r) v_2 + b r v_3                         (2)
    out = sum_k a_k s_k                                                                 (3)

v_0 to v_3 are the corners (left above, right above, left below, right below), 0 outside the level. With
a cotangent dout of out, four products tell everything about a sample:

    d_c  = <dout, v_c>                                                                  (4)
    da_k = sum_c share_c d_c                                     from (2), (3)          (5)
    dloc_x = W a_k ((1-b) (d_1 - d_0) + b (d_3 - d_2))           from (1), (2), (3)     (6)
    dloc_y = H a_k ((1-r) (d_2 - d_0) + r (d_3 - d_1))                                  (7)
    dv_c += share_c a_k dout                                     from (2), (3)          (8)

A sample that does not count (outside by a pixel or more, NaN, infinite) has gradient 0 throughout; at an
integer x or y the floor makes (6) and (7) the right-hand derivatives. A coordinate clamped to the border,
or rounded (`method="discrete"`), has derivative 0. With normalize="softmax" the weights a are
probabilities of logits z:

    dz_k = a_k (da_k - sum_j a_j da_j)                                                  (9)

References:
  Zhu et al., Deformable DETR, arXiv:2010.04159, 2021: (1) to (3).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import fusion
from jax_attn_bwd._core.sharding import full_like_operands, match_type
from jax_attn_bwd.ops.deformable import all_points, cpu, loops, pairs, products, runs, sampling, scatter
from jax_attn_bwd.ops.deformable.spec import MultiScaleDeformableAttentionGrads, Options, Residuals


def backward(options: Options, residuals: Residuals, dout: jax.Array) -> MultiScaleDeformableAttentionGrads:
    """The gradients in `residuals.wanted`."""
    return _matched_gradients(options, loops.chosen(options, residuals.operands), residuals, dout)


def gradients(options: Options, residuals: Residuals, dout: jax.Array) -> dict[str, jax.Array]:
    """The gradients by name, accumulated in float32 or wider, that these queries alone give."""
    return _by_operand(options, loops.chosen(options, residuals.operands), residuals, dout)


@partial(jax.jit, static_argnums=(0, 1))
def _matched_gradients(options, loops, residuals, dout):
    grads = _by_operand(options, loops, residuals, dout)
    return MultiScaleDeformableAttentionGrads(
        **{name: match_type(grad, getattr(residuals.operands, name)) for name, grad in grads.items()}
    )


def _by_operand(options, loops, residuals, dout):
    operands, wanted = residuals.operands, residuals.wanted.names
    dtype = sampling.compute_dtype(operands)
    B, Q, M, _ = operands.attention_weights.shape
    dout = dout.reshape(B, Q, M, operands.value.shape[3]).astype(dtype)
    grads = {}
    if "value" in wanted:
        if loops.in_order:
            grads["value"] = runs.value_gradient(options, operands, dout)
        elif loops.all_points:
            grads["value"] = all_points.value_gradient(options, operands, dout)
        elif loops.paired_queries:
            grads["value"] = pairs.value_gradient(options, loops.paired_queries, operands, dout)
        else:
            grads["value"] = _value_gradient(options, operands, dout)
    if wanted & {"sampling_locations", "attention_weights"}:
        if loops.all_points:  # what the points' gradients form lies where the value's did
            grads, operands, dout = fusion.barrier((grads, operands, dout))
            points = all_points.point_gradients(options, wanted, operands, dout)
        else:
            points = _point_gradients(options, wanted, loops.by_channel, operands, dout)
        grads |= products.by_name(options, operands, *points)  # (9)
    return grads


def _value_gradient(options, operands, dout):
    """`dvalue [B, S, M, D]`: a loop over the points, each added to its pixels."""

    def add_point(dvalue, point):
        level, (x, y, weight) = point
        at = sampling.place(options, level, x, y)
        at, scales = fusion.barrier((at, sampling.scales(at, weight)))
        return scatter.add(dvalue, at, scales, dout), None  # (8)

    value = operands.value
    zeros = full_like_operands(value, value.shape, 0, dout.dtype, (operands, dout))
    points = (options.levels(), sampling.samples(options, operands))
    return lax.scan(jax.checkpoint(add_point, prevent_cse=False), zeros, points)[0]


def _point_gradients(options, wanted, by_channel, operands, dout):
    """dloc_x, dloc_y, da, [B, Q, M, K] each; None where not asked."""
    value, rows = operands.value, dout
    if by_channel:
        value, rows = cpu.by_channel(value), cpu.by_channel(dout)

    def gradients(_, point):
        level, (x, y, weight) = point
        at = sampling.place(options, cpu.on_all_cores(level) if by_channel else level, x, y)
        if by_channel:
            zeros = full_like_operands(weight, weight.shape, 0, dout.dtype, (value, rows, weight))
            d = cpu.products(value, rows, at.pixels, zeros)  # (4)
        else:
            d = [_products(value, pixel, rows) for pixel in at.pixels]  # (4)
        return None, products.gradients(wanted, at, weight, d)  # (5) to (7)

    points = (options.levels(), sampling.samples(options, operands, heads_first=by_channel))
    gradients = jax.checkpoint(gradients, prevent_cse=False)
    axes = (1, 3, 2, 0) if by_channel else (1, 2, 3, 0)
    return jax.tree.map(lambda x: x.transpose(axes), lax.scan(gradients, None, points)[1])


def _products(value, pixel, dout):
    """<dout, value> at each pixel [B, Q, M]; value [B, S, M, D], dout [B, Q, M, D]."""
    rows = sampling.read(value, pixel).astype(dout.dtype)
    return jnp.einsum("bqmd,bqmd->bqm", dout, rows, precision=lax.Precision.HIGHEST)
