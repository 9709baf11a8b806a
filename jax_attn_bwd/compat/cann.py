"""Ascend CANN's `aclnnScaledMaskedSoftmax` and `aclnnScaledMaskedSoftmaxBackward` in JAX terms.

Kept from the source: `mask` True means *masked*; masked logits are filled with -10000 before the softmax,
so a row that is masked whole gives the uniform 1 / S, and a masked logit can win over real ones below
-10000; the backward zeroes masked positions, so such a row has gradient 0.

Not kept: its limits (rank 4, width up to 4096, equal last two axes of mask and input, a mask that must be
given), and its float16 arithmetic before the softmax (here scale and fill are computed in float32).

References:
  CANN operator library, aclnnScaledMaskedSoftmax and aclnnScaledMaskedSoftmaxBackward.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import accumulator_dtype, to_rank
from jax_attn_bwd.ops.softmax import scaled_masked_softmax as _softmax
from jax_attn_bwd.ops.softmax import scaled_masked_softmax_bwd as _softmax_bwd

_FILL = -10000.0


def scaled_masked_softmax(
    x: jax.Array, mask: jax.Array | None, scale: float = 1.0, fix_triu_mask: bool = False
) -> jax.Array:
    """Softmax of `scale * x` over the last axis, with -10000 where masked.

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
    x = checks.floating(name, "x", x)
    masked = _masked(name, mask, x, fix_triu_mask)
    z = checks.python_float(name, "scale", scale) * x.astype(accumulator_dtype(x.dtype))
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

    Args:
      grad_output: cotangent of `y`, its shape and dtype.
      y: what the forward returned.
      mask, scale, fix_triu_mask: as in the forward.

    Returns:
      The gradient of `x`: shape and dtype of `y`.

    Raises:
      As the forward.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import cann
      >>> y = jnp.array([[0.25, 0.75]])
      >>> cann.scaled_masked_softmax_backward(jnp.array([[1.0, 0.0]]), y, None, 2.0).tolist()
      [[0.375, -0.375]]
    """
    name = "cann.scaled_masked_softmax_backward"
    y, grad_output = (
        checks.floating(name, "y", y),
        checks.floating(name, "grad_output", grad_output),
    )
    checks.shape(name, "grad_output", grad_output, "the shape of y", y.shape)
    checks.same_dtype(name, y=y, grad_output=grad_output)
    masked = _masked(name, mask, y, fix_triu_mask)
    scale = checks.python_float(name, "scale", scale)
    return _softmax_bwd(grad_output, y, None if masked is None else ~masked, scale=scale)


def _masked(operator: str, mask: Any, x: jax.Array, fix_triu_mask: bool) -> jax.Array | None:
    """Where `x` is masked, of the rank of `x`; None if nowhere."""
    if mask is not None:
        mask = checks.boolean_mask(operator, mask, "masked")
        checks.broadcasts(operator, "mask", mask, "the shape of x", x.shape)
        mask = to_rank(mask, x.ndim)
    if checks.flag(operator, "fix_triu_mask", fix_triu_mask):
        if x.ndim < 2:
            expected = "have rows on axis -2 with fix_triu_mask"
            raise ValueError(checks.message(operator, "x", expected, x.shape))
        triangle = to_rank(jnp.triu(jnp.ones(x.shape[-2:], bool), 1), x.ndim)
        mask = triangle if mask is None else mask | triangle
    return mask
