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

from jax_attn_bwd._core import fusion, split
from jax_attn_bwd.ops.deformable import point_gradients, sampling, value_gradient
from jax_attn_bwd.ops.deformable.plan import QUERY_AXES, Plan, with_all_pixels
from jax_attn_bwd.ops.deformable.spec import MultiScaleDeformableAttentionGrads, Operands, Residuals


@partial(jax.jit, static_argnums=0)
def backward(plan: Plan, residuals: Residuals, dout: jax.Array) -> MultiScaleDeformableAttentionGrads:
    """Returns the gradients in `residuals.wanted`, wherever queries and pixels lie."""
    operands = with_all_pixels(plan, residuals.operands)
    of_queries = partial(_of_queries, plan, residuals.wanted.names)

    # pieces of the queries have rows of their own, and each a share of the value's gradient
    if plan.pieces is None:
        grads = of_queries(operands, dout)
    else:
        spec = lambda name: split.out_spec(getattr(operands, name), QUERY_AXES[name])
        specs, axes = {name: spec(name) for name in residuals.wanted.in_order}, (Operands(**QUERY_AXES), 1)
        grads = split.over(plan.pieces, of_queries, (operands, dout), axes, specs)()
    return residuals.gradients(grads)


def _of_queries(
    plan: Plan, wanted: frozenset[str], operands: Operands, dout: jax.Array
) -> dict[str, jax.Array]:
    """Returns the gradients that some queries give, by name, accumulated in float32 or wider."""
    options, loops = plan.options, plan.loops
    B, Q, M, _ = operands.attention_weights.shape
    dout = dout.reshape(B, Q, M, operands.value.shape[3]).astype(sampling.compute_dtype(operands))

    # (8)
    grads = {}
    corners = sampling.corners(options, operands) if loops.dpoints == "row for each corner" else None
    if "value" in wanted:
        if loops.dvalue == "sorted runs":
            grads["value"] = value_gradient.in_runs(options, operands, dout)
        elif loops.dvalue == "all points at once":
            grads["value"] = value_gradient.in_any_order(options, operands, dout)
        elif loops.dvalue == "level by level":
            grads["value"] = value_gradient.level_by_level(options, loops.merged, operands, dout)
        elif loops.dvalue == "pairs of pixels":
            grads["value"] = value_gradient.in_pairs(options, loops.paired_queries, operands, dout)
        elif corners is not None:
            grads["value"] = value_gradient.at_corners(corners, operands, dout, loops.by_pixel)
        else:
            grads["value"] = value_gradient.point_by_point(options, operands, dout)

    # (4) to (7), then (9)
    if wanted & {"sampling_locations", "attention_weights"}:
        if loops.dpoints == "all points at once":  # what these form lies where the value's did
            grads, operands, dout = fusion.barrier((grads, operands, dout))
            points = point_gradients.at_all_points(options, wanted, operands, dout)
        elif loops.dpoints == "level by level":
            points = point_gradients.level_by_level(options, wanted, loops.merged, operands, dout)
        elif corners is not None:
            points = point_gradients.at_corners(options, wanted, corners, operands, dout)
        else:
            by_channel = loops.dpoints == "by channel"
            points = point_gradients.point_by_point(options, wanted, by_channel, operands, dout)
        grads |= point_gradients.by_name(options, operands, *points)
    return grads
