"""Ascend CANN's masked softmax and multi-scale deformable attention, forward and gradient, in JAX terms.

`aclnnScaledMaskedSoftmax` and `aclnnScaledMaskedSoftmaxBackward`

Kept from the source: `mask` True means *masked*; masked logits are filled with -10000 before the softmax,
so a row that is masked whole gives the uniform 1 / S, and a masked logit can win over real ones below
-10000; the backward zeroes masked positions, so such a row has gradient 0.

Not kept: its limits (rank 4, width up to 4096, equal last two axes of mask and input, a mask that must be
given), and its float16 arithmetic before the softmax (here scale and fill are computed in float32).

`aclnnMultiScaleDeformableAttnFunction` and `aclnnMultiScaleDeformableAttentionGrad`

Kept from the source: the names and order of the arguments; `spatial_shape` holds (height, width), but the
last axis of `location` is (x, y) (one page of the source says "y, x"; the script beside it reads x
first); `level_start_index` is given although it follows from `spatial_shape` (it is checked; None will
do); `attn_weight` is taken as it is, not normalised; the forward returns heads and channels on one axis
but `grad_output` has them on two; sums are taken in float32 and rounded once, to each argument's dtype; at an
integer pixel the derivative by the location is the right-hand one, under `jax.jit` too.

Not kept: its limits (channels a multiple of 8 and at most 256, channels + num_points + num_levels <= 512,
32 <= num_queries < 500000, num_levels < 10, bs <= 32), one dtype for all arguments (float32 locations
for a bfloat16 value lose nothing), and sums of `grad_value` in an order of the moment (here on GPUs alone;
elsewhere every run gives the same bits). `spatial_shape` and `level_start_index`, arrays on the device there,
must be known at trace time here. A NaN or infinite location, of which the source says nothing, is skipped.

Left out of all four, for it has no meaning in JAX: the two phases of a call (`...GetWorkspaceSize`, then the
call), `workspace`, `workspaceSize`, `executor`, `stream`, and the status code: results are returned, errors
raised. Added: defaults for `scale` (1) and `fix_triu_mask` (False), and None for `mask` and
`level_start_index`.

References:
  CANN operator library: aclnnScaledMaskedSoftmax, aclnnScaledMaskedSoftmaxBackward,
  aclnnMultiScaleDeformableAttnFunction, aclnnMultiScaleDeformableAttentionGrad.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import accumulator_dtype, to_rank
from jax_attn_bwd._core.trees import exportable_tuple
from jax_attn_bwd.ops.deformable import arguments
from jax_attn_bwd.ops.deformable import multi_scale_deformable_attention as _deformable
from jax_attn_bwd.ops.deformable import multi_scale_deformable_attention_bwd as _deformable_bwd
from jax_attn_bwd.ops.softmax import scaled_masked_softmax as _softmax
from jax_attn_bwd.ops.softmax import scaled_masked_softmax_bwd as _softmax_bwd

_FILL = -10000.0


def scaled_masked_softmax(
    x: jax.Array, mask: jax.Array | None, scale: float = 1.0, fix_triu_mask: bool = False
) -> jax.Array:
    """Softmax of `scale * x` over the last axis, with -10000 where masked.

    The source's names: x -> x, mask -> mask, scale -> scale, fixTriuMask -> fix_triu_mask; y is returned.

    Args:
      x: any rank, floating.
      mask: broadcasts to `x`, bool, True = masked; None masks nothing.
      scale: Python float.
      fix_triu_mask: also mask the strict upper triangle of the last two axes (the source declares this
        argument and supports False only).

    Returns:
      y: shape and dtype of `x`, computed in float32 or wider.

    Gradients:
      x, to any order; 0 where masked.

    Raises:
      TypeError: `mask` is not boolean. ValueError: shapes disagree.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import cann
      >>> cann.scaled_masked_softmax(jnp.zeros((1, 1, 1, 4)), jnp.ones((1, 1, 1, 4), bool)).tolist()
      [[[[0.25, 0.25, 0.25, 0.25]]]]
    """
    name = "cann.scaled_masked_softmax"
    x = checks.floating_rows(name, "x", x)
    masked = _masked(name, mask, x, fix_triu_mask)
    z = checks.scale(name, scale, x.dtype) * x.astype(accumulator_dtype(x.dtype))
    if masked is not None:
        z = jnp.where(masked, _FILL, z)
    return _softmax(z).astype(x.dtype)


def scaled_masked_softmax_backward(
    grad_output: jax.Array,
    y: jax.Array,
    mask: jax.Array | None,
    scale: float = 1.0,
    fix_triu_mask: bool = False,
) -> jax.Array:
    """The gradient of `scaled_masked_softmax`: `scale * y * (g - sum(g * y))`, 0 where masked.

    The source's names: gradOutput -> grad_output, y -> y, mask -> mask, scale -> scale,
    fixTriuMask -> fix_triu_mask; out (the gradient of x) is returned.

    Args:
      grad_output: cotangent of `y`, its shape and dtype.
      y: what the forward returned.
      mask, scale, fix_triu_mask: as in the forward.

    Returns:
      The gradient of `x`: shape and dtype of `y`.

    Raises:
      ValueError, TypeError: under the conditions of the forward.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import cann
      >>> y = jnp.array([[0.25, 0.75]])
      >>> cann.scaled_masked_softmax_backward(jnp.array([[1.0, 0.0]]), y, None, 2.0).tolist()
      [[0.375, -0.375]]
    """
    name = "cann.scaled_masked_softmax_backward"
    y = checks.floating_rows(name, "y", y)
    grad_output = checks.floating(name, "grad_output", grad_output)
    checks.shape(name, "grad_output", grad_output, "the shape of y", y.shape)
    checks.same_dtype(name, y=y, grad_output=grad_output)
    masked = _masked(name, mask, y, fix_triu_mask)
    scale = checks.scale(name, scale, y.dtype)
    return _softmax_bwd(grad_output, y, None if masked is None else ~masked, scale=scale)


def _masked(operator: str, mask: Any, x: jax.Array, fix_triu_mask: bool) -> jax.Array | None:
    """Returns where `x` is masked, of the rank of `x`; None if nowhere."""
    if mask is not None:
        numbers = "write mask != 0 if non-zero means masked; nothing is added to the logits here"
        mask = checks.boolean_mask(operator, mask, "masked", numbers)
        checks.broadcasts(operator, "mask", mask, "the shape of x", x.shape)
        mask = to_rank(mask, x.ndim)
    if checks.flag(operator, "fix_triu_mask", fix_triu_mask):
        if x.ndim < 2:
            expected = "have rows on axis -2 with fix_triu_mask"
            raise ValueError(checks.message(operator, "x", expected, x.shape))
        triangle = to_rank(jnp.triu(jnp.ones(x.shape[-2:], bool), 1), x.ndim)
        mask = triangle if mask is None else mask | triangle
    return mask


def multi_scale_deformable_attention(
    value: jax.Array, spatial_shape: Any, level_start_index: Any, location: jax.Array, attn_weight: jax.Array
) -> jax.Array:
    """Weighted sum of feature maps at sampling points, for each query and head.

    The source's names: value -> value, spatialShape -> spatial_shape, levelStartIndex -> level_start_index,
    location -> location, attnWeight -> attn_weight; output is returned.

    Args:
      value: `[bs, spatial_size, num_heads, channels]`, floating: the levels one after the other.
      spatial_shape: `[num_levels, 2]` integers, (height, width) of each level, known at trace time.
      level_start_index: `[num_levels]`, where each level starts: the running sum of height * width.
      location: `[bs, num_queries, num_heads, num_levels, num_points, 2]`, floating, last axis (x, y), 0 to
        1 from edge to edge of the level.
      attn_weight: `[bs, num_queries, num_heads, num_levels, num_points]`, floating.

    Returns:
      out: `[bs, num_queries, num_heads * channels]`, dtype of `value`.

    Gradients:
      value, location and attn_weight, to any order.

    Raises:
      TypeError: an array is not floating, a table is traced or not of integers.
      ValueError: shapes disagree, or level_start_index is not the running sum.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import cann
      >>> value = jnp.arange(6.0).reshape(1, 6, 1, 1)  # 2 rows of 3 pixels
      >>> at, weight = jnp.full((1, 1, 1, 1, 1, 2), 0.5), jnp.ones((1, 1, 1, 1, 1))
      >>> cann.multi_scale_deformable_attention(value, ((2, 3),), (0,), at, weight).tolist()
      [[[2.5]]]
    """
    name = "cann.multi_scale_deformable_attention"
    return _deformable(*_sampling(name, value, spatial_shape, level_start_index, location, attn_weight))


@exportable_tuple
class MultiScaleDeformableAttentionGrad(NamedTuple):
    """Holds the gradients of `multi_scale_deformable_attention`, each with its argument's shape and dtype."""

    grad_value: jax.Array
    grad_location: jax.Array
    grad_attn_weight: jax.Array


def multi_scale_deformable_attention_grad(
    value: jax.Array,
    spatial_shape: Any,
    level_start_index: Any,
    location: jax.Array,
    attn_weight: jax.Array,
    grad_output: jax.Array,
) -> MultiScaleDeformableAttentionGrad:
    """The gradients of `multi_scale_deformable_attention`.

    The source's names: as in the forward, and gradOutput -> grad_output; gradValue, gradLocation and
    gradAttnWeight are returned.

    Args:
      grad_output: cotangent of the output, `[bs, num_queries, num_heads, channels]` or, as the forward
        returns it, `[bs, num_queries, num_heads * channels]`; dtype of `value`.
      value, spatial_shape, level_start_index, location, attn_weight: as in the forward.

    Returns:
      MultiScaleDeformableAttentionGrad(grad_value, grad_location, grad_attn_weight), each with the shape and
      dtype of its argument.

    Raises:
      ValueError, TypeError: under the conditions of the forward.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import cann
      >>> value = jnp.arange(6.0).reshape(1, 6, 1, 1)
      >>> at, weight = jnp.full((1, 1, 1, 1, 1, 2), 0.5), jnp.ones((1, 1, 1, 1, 1))
      >>> grads = cann.multi_scale_deformable_attention_grad(
      ...     value, ((2, 3),), (0,), at, weight, jnp.ones((1, 1, 1, 1)))
      >>> grads.grad_location.ravel().tolist()
      [3.0, 6.0]
    """
    name = "cann.multi_scale_deformable_attention_grad"
    operands = _sampling(name, value, spatial_shape, level_start_index, location, attn_weight)
    value, _, _, attn_weight = operands
    grad_output = checks.floating(name, "grad_output", grad_output)
    checks.same_dtype(name, value=value, grad_output=grad_output)
    bs, num_queries, num_heads, *_ = attn_weight.shape
    merged = (bs, num_queries, num_heads * value.shape[3])
    if grad_output.shape != merged:
        letters = "[bs, num_queries, num_heads, channels]"
        apart = (bs, num_queries, num_heads, value.shape[3])
        checks.shape(name, "grad_output", grad_output, letters, apart)
    grads = _deformable_bwd(grad_output.reshape(merged), *operands)
    return MultiScaleDeformableAttentionGrad(*grads)  # type: ignore[arg-type] # one value, one gradient


def _sampling(
    operator: str, value: Any, spatial_shape: Any, level_start_index: Any, location: Any, attn_weight: Any
) -> tuple[jax.Array, tuple[tuple[int, int], ...], jax.Array, jax.Array]:
    """Returns (value, ((H, W), ...), location, attn_weight), checked under the source's names."""
    # Tables, which are known, and floating arrays of the right ranks.
    shapes = arguments.level_shapes(operator, "spatial_shape", spatial_shape)
    arguments.check_level_starts(operator, level_start_index, shapes)
    value = checks.floating(operator, "value", value)
    location = checks.floating(operator, "location", location)
    attn_weight = checks.floating(operator, "attn_weight", attn_weight)
    pixels = "[bs, spatial_size, num_heads, channels]"
    points = "[bs, num_queries, num_heads, num_levels, num_points]"
    for argument, x, letters in (("value", value, pixels), ("attn_weight", attn_weight, points)):
        checks.rank(operator, argument, x, letters, len(letters.split(",")))
    # All sizes follow from the value, the weights and the levels.
    bs, _, num_heads, channels = value.shape
    spatial_size = sum(height * width for height, width in shapes)
    checks.shape(operator, "value", value, pixels, (bs, spatial_size, num_heads, channels))
    expected = (bs, attn_weight.shape[1], num_heads, len(shapes), attn_weight.shape[4])
    checks.shape(operator, "attn_weight", attn_weight, points, expected)
    checks.shape(operator, "location", location, f"{points[:-1]}, 2]", (*expected, 2))
    return value, shapes, location, attn_weight
