"""The scale of logits: a number is an option of a call; what is traced multiplies the queries before it.

So no kernel reads an array for it, and its gradient is that of a product: `times` in front of the rule gives
it, and `times` behind a written backward takes the gradient of the queries back through it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import accumulator_dtype


def is_traced(scale: Any) -> bool:
    """Tells whether `scale` is an array whose value is not known."""
    return isinstance(scale, jax.Array) and checks.known(scale) is None


def static(operator: str, scale: Any, size: Any, dtype: Any) -> float:
    """Returns `scale` as an option, as `number` takes it, or 1 where `times` multiplies."""
    is_real = is_traced(scale) and any(jnp.issubdtype(scale.dtype, x) for x in (jnp.floating, jnp.integer))
    if is_real and not scale.ndim:
        return 1.0
    return number(operator, scale, size, dtype, "multiply query by what is not one number")


def number(operator: str, scale: Any, size: Any, dtype: Any, remedy: str) -> float:
    """Returns `scale`, a number of any kind that is known; None is 1 / sqrt(size) for heads of that size."""
    if checks.is_array(scale) and scale.ndim:
        raise ValueError(checks.message(operator, "scale", "be one number", f"shape {scale.shape}", remedy))
    if checks.is_array(scale) and (value := checks.known(scale)) is not None:
        scale = value.item()
    if scale is not None:
        return checks.scale(operator, scale, dtype, remedy)
    if not isinstance(size, int):
        expected = "be given where the size of a head is symbolic"
        raise ValueError(checks.message(operator, "scale", expected, f"None and the size {size}"))
    return size**-0.5 if size else 1.0


def times(x: jax.Array, scale: Any) -> jax.Array:
    """Multiplies queries, or their gradient, by a traced `scale`, in the accumulator's dtype.

    Anything else was an option of the call. What is not finite stays as it is: in the padding it must not
    reach the gradient of the scale.
    """
    if not is_traced(scale):
        return x
    wide = accumulator_dtype(x.dtype)
    finite = jnp.isfinite(x)
    scaled = jnp.where(finite, x, 0).astype(wide) * scale.astype(wide)
    return jnp.where(finite, scaled.astype(x.dtype), x)
