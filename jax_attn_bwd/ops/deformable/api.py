"""Multi-scale deformable attention: the public functions and the rules."""

from collections.abc import Sequence
from typing import Unpack

import jax
import numpy as np

from jax_attn_bwd._core import backend, checks, fusion, keywords
from jax_attn_bwd._core.operation import Operation
from jax_attn_bwd._core.sharding import reshard_like
from jax_attn_bwd._core.types import Array, Implementation, Normalize, PaddingMode, SamplingMethod
from jax_attn_bwd.ops.deformable import backward as portable_backward
from jax_attn_bwd.ops.deformable import forward as portable_forward
from jax_attn_bwd.ops.deformable import tangent as written_tangent
from jax_attn_bwd.ops.deformable.arguments import per_level, prepare
from jax_attn_bwd.ops.deformable.plan import Plan
from jax_attn_bwd.ops.deformable.plan import plan as planned
from jax_attn_bwd.ops.deformable.spec import (
    DIFFERENTIABLE,
    MultiScaleDeformableAttentionGrads,
    MultiScaleDeformableAttentionKeywords,
    Operands,
    Residuals,
    Wanted,
)

_NAME = "multi_scale_deformable_attention"


@keywords.known
def multi_scale_deformable_attention(
    value: Array | Sequence[Array],
    spatial_shapes: Sequence[Sequence[int]] | np.ndarray,
    sampling_locations: Array,
    attention_weights: Array,
    *,
    level_start_index: Sequence[int] | Array | None = None,
    num_points: Sequence[int] | None = None,
    padding_mode: PaddingMode = "zeros",
    method: SamplingMethod = "bilinear",
    normalize: Normalize | None = None,
    deterministic_sums: bool | None = None,
    forward_mode: bool = False,
    implementation: Implementation | None = None,
    deterministic: bool | None = None,
) -> jax.Array:
    """Weighted sum of feature maps at sampling points, for each query and head.

        x = loc_x W_l - 1/2,   y = loc_y H_l - 1/2          pixel centres lie at integers
        out[b, q, m] = sum over levels l and points p of weight * value_l at (x, y), bilinear

    Shapes: B batch, Q queries, M heads, D channels of a head, L levels of H_l x W_l pixels,
    S = sum of H_l W_l, P points of a query and head on each level.

    A point counts if -1 < x < W_l and -1 < y < H_l; pixels outside the level are 0. Any other point, a
    NaN and an infinite one among them, is skipped: it adds 0 and has gradient 0.

    Over several devices batch, heads and queries may be sharded; the gradient of the value is summed once. On
    Auto axes, unless the batch is a multiple of the devices, the backward holds it once for each device until
    it is summed. A value split along its pixels is gathered.

    Args:
      value: `[B, S, M, D]`, floating: the levels one after the other, each row by row. Or a sequence
        of feature maps `[B, H_l, W_l, M, D]`, one for each level.
      spatial_shapes: ((H_1, W_1), ..., (H_L, W_L)), known at trace time: height before width.
      sampling_locations: `[B, Q, M, L, P, 2]`, floating, last axis (x, y), 0 to 1 from edge to edge of
        the level; beyond is allowed. Keep it float32 also for a bfloat16 value: bfloat16 locations are
        wrong by up to W / 512 pixels before they arrive here.
      attention_weights: `[B, Q, M, L, P]`, floating; they need not sum to 1.
      level_start_index: accepted for compatibility; must equal the running sum of H_l W_l.
      num_points: (P_1, ..., P_L) for levels with different numbers of points; then
        `sampling_locations` is `[B, Q, M, sum P, 2]` and `attention_weights` `[B, Q, M, sum P]`.
      padding_mode: "zeros", or "border": coordinates are clamped to the level (gradient 0 where they are).
      method: "bilinear", or "discrete" (RT-DETRv2): the pixel floor(loc * size + 1/2), clamped to the
        level; no gradient of the locations.
      normalize: "softmax" takes `attention_weights` for logits, normalised over all L * P points;
        -inf masks a point.
      deterministic_sums: True gives the same bits in every run everywhere; None (the default) and False let
        a GPU add in any order (on an H100 a step of 300 queries took 0.107 ms instead of 0.369), and export
        the backward for a symbolic number of queries.
      forward_mode: also differentiable by `jax.jvp`, `jax.jacfwd` and `jax.linearize`, by a written rule.
      implementation: None picks the fastest that is proven on the device (`python -m jax_attn_bwd.check
        --enable`), else "xla"; a name runs that one or raises.
        "mosaic_tpu" takes levels to some 20,000 pixels; what a pixel, cotangent or weight that is not finite
        touches is NaN. "mosaic_gpu" has kernels of the backward, and the portable forward.
      deterministic: the former name of `deterministic_sums`, deprecated: in layers it is about dropout.

    Returns:
      out: `[B, Q, M * D]`, dtype of `value`. Coordinates, weights and sums are float32 or wider.

    Gradients:
      value, sampling_locations, attention_weights, each in its argument's dtype (and a sequence of
      feature maps as a tuple); to second order and beyond. At an integer x or y the derivative is the
      right-hand one. Saves the inputs alone.

    Raises:
      ValueError: shapes disagree, or an option is unknown.
      TypeError: an argument is of the wrong kind (traced spatial_shapes).
      NotImplementedError: the named implementation cannot run this call.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd import multi_scale_deformable_attention
      >>> value = jnp.arange(6.0).reshape(1, 6, 1, 1)  # 2 rows of 3 pixels
      >>> centre = jnp.full((1, 1, 1, 1, 1, 2), 0.5)
      >>> weights = jnp.ones((1, 1, 1, 1, 1))
      >>> multi_scale_deformable_attention(value, ((2, 3),), centre, weights).tolist()
      [[[2.5]]]

    References:
      Zhu et al., Deformable DETR, arXiv:2010.04159, 2021. Lv et al., RT-DETRv2, arXiv:2407.17140, 2024.
    """
    # the arguments in one form, and how they are computed
    options, operands = prepare(
        _NAME, value, spatial_shapes, sampling_locations, attention_weights,
        level_start_index=level_start_index, num_points=num_points, padding_mode=padding_mode, method=method,
        normalize=normalize, deterministic_sums=deterministic_sums, deterministic=deterministic,
    )  # fmt: skip
    plan = backend.planned(_NAME, IMPLEMENTATIONS, implementation, options, operands, planned)
    return _OPERATION.runner(_NAME, forward_mode)(plan, operands)


@keywords.known
def multi_scale_deformable_attention_bwd(
    dout: Array,
    value: Array | Sequence[Array],
    spatial_shapes: Sequence[Sequence[int]] | np.ndarray,
    sampling_locations: Array,
    attention_weights: Array,
    *,
    wrt: Sequence[str] = DIFFERENTIABLE,
    **options: Unpack[MultiScaleDeformableAttentionKeywords],
) -> MultiScaleDeformableAttentionGrads:
    """Computes the gradients of `multi_scale_deformable_attention`, by the same arguments.

    A composition of differentiable operations, in either mode; errors are those of the forward call.

    Args:
      dout: `[B, Q, M * D]`, cotangent of the output, dtype of `value`.
      wrt: which of "value", "sampling_locations", "attention_weights" to compute.

    Returns:
      MultiScaleDeformableAttentionGrads(value, sampling_locations, attention_weights), each with its
      argument's shape and dtype (a tuple of feature maps for a sequence of them); None where not asked.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd import multi_scale_deformable_attention_bwd
      >>> value = jnp.arange(6.0).reshape(1, 6, 1, 1)
      >>> centre, weights = jnp.full((1, 1, 1, 1, 1, 2), 0.5), jnp.ones((1, 1, 1, 1, 1))
      >>> grads = multi_scale_deformable_attention_bwd(weights[0, 0], value, ((2, 3),), centre, weights)
      >>> grads.sampling_locations.ravel().tolist()
      [3.0, 6.0]
    """
    # the call, checked as the forward is
    name, keywords = f"{_NAME}_bwd", MultiScaleDeformableAttentionKeywords
    given = checks.complete(name, multi_scale_deformable_attention, keywords, options)
    implementation = given.pop("implementation")
    queries = {"sampling_locations": sampling_locations, "attention_weights": attention_weights}
    static, operands = prepare(name, value, spatial_shapes, *queries.values(), **given)

    # the cotangent, [B, Q, M * D], sharded as the queries are
    dout = checks.floating(name, "dout", dout)
    B, Q, M, _ = operands.attention_weights.shape
    checks.shape(name, "dout", dout, "[B, Q, M * D]", (B, Q, M * operands.value.shape[3]))
    checks.same_dtype(name, value=operands.value, dout=dout)
    dout = reshard_like(dout, operands.attention_weights, (0, 1, 2))
    wanted = checks.wanted(name, wrt, DIFFERENTIABLE, DIFFERENTIABLE)
    plan = backend.planned(name, IMPLEMENTATIONS, implementation, static, operands, planned)
    residuals = Residuals(operands, Wanted(frozenset(wanted)))
    grads = backend.named(IMPLEMENTATIONS, plan.implementation).backward(plan, residuals, dout)

    # in the form of the arguments
    if "value" in wanted and isinstance(value, list | tuple):
        grads = grads._replace(value=per_level(static.spatial_shapes, grads.value))
    return grads._replace(
        **{name: getattr(grads, name).reshape(x.shape) for name, x in queries.items() if name in wanted}
    )


_PORTABLE = backend.Implementation("xla", portable_forward.forward, portable_backward.backward)
IMPLEMENTATIONS = (
    backend.kernel("mosaic_tpu", __package__, _PORTABLE, ("tpu",)),
    backend.kernel("mosaic_gpu", __package__, _PORTABLE, ("gpu",), forward=False),
    _PORTABLE,
)


def _primal(plan: Plan, operands: Operands) -> jax.Array:
    return backend.named(IMPLEMENTATIONS, plan.implementation).forward(plan, operands)


def _forward(plan, operands, wanted):
    return _primal(plan, fusion.computed_once(operands, DIFFERENTIABLE)), operands


def _backward(plan, operands, wanted, dout):
    residuals = Residuals(fusion.computed_once(operands, DIFFERENTIABLE), Wanted(wanted))
    dout = fusion.kept_whole(dout, may_be_gathered=True)
    grads = backend.named(IMPLEMENTATIONS, plan.implementation).backward(plan, residuals, dout)
    return Operands(*grads)


_OPERATION = Operation(DIFFERENTIABLE, _primal, _forward, _backward, written_tangent.tangent)
