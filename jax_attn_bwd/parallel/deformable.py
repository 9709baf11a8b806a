"""Multi-scale deformable attention with the queries split over devices."""

from collections.abc import Sequence
from typing import Unpack

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_attn_bwd._core import checks, keywords
from jax_attn_bwd._core.types import Array
from jax_attn_bwd.ops.deformable import multi_scale_deformable_attention
from jax_attn_bwd.ops.deformable.arguments import level_shapes
from jax_attn_bwd.ops.deformable.spec import MultiScaleDeformableAttentionKeywords
from jax_attn_bwd.parallel.arguments import Axes, check_axis, run_on_parts

_NAME = "sharded_multi_scale_deformable_attention"


@keywords.known
def sharded_multi_scale_deformable_attention(
    value: Array | Sequence[Array],
    spatial_shapes: Sequence[Sequence[int]] | np.ndarray,
    sampling_locations: Array,
    attention_weights: Array,
    *,
    mesh: Mesh,
    axis: Axes,
    gather_value: bool = False,
    forward_mode: bool = False,
    **options: Unpack[MultiScaleDeformableAttentionKeywords],
) -> jax.Array:
    """`multi_scale_deformable_attention` with each device's share of the queries.

    The numbers are those of the operator on one device, to rounding. It wraps itself in `jax.shard_map`, on
    meshes of Auto and of Explicit axes. Batch or heads may lie along another Auto axis; other Explicit axes
    hold copies. Call it under `jax.jit`: outside, each call compiles anew.

    Shapes: as in `multi_scale_deformable_attention`; n devices along `axis`, n divides Q.

    Args:
      value: `[B, S, M, D]`, or a sequence of feature maps `[B, H_l, W_l, M, D]`: whole on every device.
        With `gather_value` `[B, S', M, D]`, split along its pixels: S' is S or more and a multiple of n,
        and what lies past S is not read.
      spatial_shapes: ((H_1, W_1), ..., (H_L, W_L)), known at trace time.
      sampling_locations: `[B, Q, M, L, P, 2]` (or ragged), split along Q.
      attention_weights: `[B, Q, M, L, P]` (or ragged), split along Q.
      mesh: the devices.
      axis: the mesh axis (or axes) that the queries lie along.
      gather_value: whether `value` comes split along its pixels, and is gathered.
      forward_mode: also differentiable by `jax.jvp`, `jax.jacfwd` and `jax.linearize`, by a written rule;
        with `gather_value` the tangent of `value` is gathered, too.
      options: `MultiScaleDeformableAttentionKeywords`, as in `multi_scale_deformable_attention`.

    Returns:
      out: `[B, Q, M * D]`, split along Q.

    Gradients:
      Those of the operator, to second order and beyond. `value` takes part in one exchange: the devices'
      shares of its gradient are summed by one all-reduce; with `gather_value`, one all-gather in the
      forward and one reduce-scatter in the backward.

    Raises:
      ValueError: the axis is not in the mesh, n does not divide the queries or the pixels; as the operator.
      TypeError: an argument is of the wrong kind; `gather_value` with a sequence of feature maps.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd.parallel import sharded_multi_scale_deformable_attention
      >>> mesh = jax.make_mesh((1,), ("queries",), devices=jax.devices()[:1])
      >>> value = jnp.arange(6.0).reshape(1, 6, 1, 1)  # 2 rows of 3 pixels
      >>> centre, weights = jnp.full((1, 1, 1, 1, 1, 2), 0.5), jnp.ones((1, 1, 1, 1, 1))
      >>> sharded_multi_scale_deformable_attention(
      ...     value, ((2, 3),), centre, weights, mesh=mesh, axis="queries"
      ... ).tolist()
      [[[2.5]]]
    """
    # queries are cut evenly: n divides Q
    n = check_axis(_NAME, mesh, axis)
    locations = checks.floating(_NAME, "sampling_locations", sampling_locations)
    weights = checks.floating(_NAME, "attention_weights", attention_weights)
    shapes = level_shapes(_NAME, "spatial_shapes", spatial_shapes)
    queries = {"sampling_locations": locations, "attention_weights": weights}
    for argument, x in queries.items():
        if x.ndim < 2 or x.shape[1] % n:
            expected = f"have shape [B, Q, ...] with Q a multiple of the {n} devices along mesh axis {axis!r}"
            raise ValueError(checks.message(_NAME, argument, expected, x.shape, "pad the queries"))
    # pixels that come in parts are padded to a multiple of n
    pixels = sum(height * width for height, width in shapes)
    if checks.flag(_NAME, "gather_value", gather_value):
        value = checks.floating(_NAME, "value", value)
        if value.ndim != 4 or value.shape[1] < pixels or value.shape[1] % n:
            expected = f"have shape [B, S', M, D] with S' at least {pixels} and a multiple of {n}"
            raise ValueError(checks.message(_NAME, "value", expected, value.shape, "pad the pixels"))

    # each device samples for its own queries, of all pixels
    def local(value, locations, weights):
        if gather_value:
            value = lax.all_gather(value, axis, axis=1, tiled=True)[:, :pixels]
        return multi_scale_deformable_attention(
            value, shapes, locations, weights, forward_mode=forward_mode, **options
        )

    split = P(None, axis)
    specs = (split if gather_value else P(), split, split)
    return run_on_parts(local, mesh, axis, specs, split, (value, locations, weights))
