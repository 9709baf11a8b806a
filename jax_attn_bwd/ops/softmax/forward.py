"""Portable forward of the scaled masked softmax.

    y = exp(z - top) / sum exp(z - top),   z = scale * x + bias,   top = max of z over what is visible

Without a bias the scale is applied after the maximum of x is subtracted (the minimum, for a
negative scale): exp(scale * (x - max x)) is exact where scale * x alone has already been rounded. With one,
z is computed in a unit in which it does not overflow.

The common case has neither selects nor comparisons: XLA:CPU hands the chain of maximum, exponential, sum
and quotient, its backward and its neighbours to one library loop, but only if all of it is arithmetic.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import masks
from jax_attn_bwd._core.numerics import accumulator_dtype, to_rank
from jax_attn_bwd.ops.softmax.plan import Plan
from jax_attn_bwd.ops.softmax.spec import Operands, Result

# Differences to the maximum that overflow are -inf; from this scale on exp(scale * difference) is 0 anyway.
_OVERFLOW_IS_ZERO = 2.0**-100


@partial(jax.jit, static_argnums=0)
def forward(plan: Plan, operands: Operands) -> Result:
    """Returns the softmax and the row values that its backward may need."""
    result = _forward(plan, *operands)
    return result._replace(y=result.y.astype(operands.x.dtype))


def _forward(plan, x, scale, mask, bias, sink) -> Result:
    """Returns the result in the accumulator's dtype."""
    # what is visible: by the mask, a bias of -inf, causality and the window
    options = plan.options
    axis, dtype = options.axis, accumulator_dtype(x.dtype)
    given, x = x, x.astype(dtype)
    visible = masks.conjunction(mask, None if bias is None else bias != -jnp.inf)
    if options.hides:
        row, column = (jnp.arange(n, dtype=jnp.int32) for n in x.shape[-2:])
        band = masks.in_band(row[:, None], column[None], options.is_causal, options.window)
        visible = masks.conjunction(visible, to_rank(band, x.ndim))
    if scale is not None and visible is not None:
        x = jnp.where(visible, x, 0)  # NaN where nothing is seen must not reach the gradient of scale

    # z, the logits, before or after the scale: exact where differences to the maximum are
    after = 1.0  # what the differences to the maximum are multiplied with
    shared_scale = scale is None or scale.shape[axis] == 1
    if bias is None and scale is None and abs(options.scale) >= _OVERFLOW_IS_ZERO:
        after = abs(options.scale)
        given, z = (given, x) if options.scale > 0 else (-given, -x)
        if visible is not None:  # before the cast, which then needs no array of its own
            z, visible = jnp.where(visible, given, -jnp.inf).astype(dtype), None
    elif bias is None and shared_scale:
        return _from_halves(plan, x, scale, visible, sink)
    else:
        after = 1.0 if bias is None else options.unit
        z = (options.scale / after if scale is None else scale.astype(dtype)) * x
        if bias is not None:
            z = z + bias.astype(dtype) / after
        else:  # a scale for each entry: the product must not be contracted with the difference to its maximum
            z = jnp.minimum(z, jnp.where(jnp.isnan(scale), jnp.nan, jnp.inf).astype(dtype))

    # the differences to the greatest, scaled
    z = z if visible is None else jnp.where(visible, z, -jnp.inf)
    top, live = _top(plan, z, sink)
    if after == 1:
        z = z - top
    else:
        # The sign sets the factor apart from the backward's: of one that library loops share XLA:CPU makes
        # an array as large as x.
        z, top = -after * (top - z), after * top
    return _normalised(options, z, top, live, sink)


def _from_halves(plan, x, scale, visible, sink) -> Result:
    """Computes `_forward` for any scale: differences to the maximum, halved, do not overflow."""
    options = plan.options
    # the differences, halved; of -x where the scale is negative
    if scale is None:
        scale = options.scale
        sign: Any = -1 if scale < 0 else 1
    else:
        scale = scale.astype(x.dtype)
        sign = jnp.where(scale < 0, -1, 1).astype(x.dtype)
    scale, half, hiding = sign * scale, sign / 2 * x, None
    if plan.hidden_by_a_sum:
        scale, half, hiding = _hidden_by_a_sum(scale, half, visible)
        visible = None
    top, live = _top(plan, half if visible is None else jnp.where(visible, half, -jnp.inf), sink)
    top = top if live is None else jnp.where(live, top, 0)
    half = half - top

    # scaled and doubled; a product that is subtracted is not rounded before
    if options.scale is None:  # 2 * scale could overflow
        z, top = scale * half, scale * (top + top)
        z = z + z
    else:  # scale could be too small for a normal number
        z, top = 2 * scale * half, 2 * scale * top
    z = z if visible is None else jnp.where(visible, z, -jnp.inf)
    z = z if hiding is None else z + hiding
    return _normalised(options, z, top, live, sink)


def _hidden_by_a_sum(scale, half, visible) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the two to compute with, and what is added to hide: a second select would part a library loop.

    What is hidden counts as the least number until then: of -inf the product with a scale of 0 is NaN. For
    what a scale that is not finite would make NaN of it, each visible entry is NaN in place of that scale.
    """
    is_finite, dtype = jnp.isfinite(scale), half.dtype
    half = jnp.where(visible, jnp.where(is_finite, half, jnp.nan), jnp.finfo(dtype).min / 2)
    return jnp.where(is_finite, scale, 0), half, jnp.where(visible, 0, -jnp.inf).astype(dtype)


def _top(plan, z, sink) -> tuple[jax.Array, jax.Array | None]:
    """Returns the maximum of `z`, at least the least finite number; with a sink also where it is not -inf.

    Without a sink, each entry is raised to that number in front of the maximum: with an operation between
    maximum and exponential, XLA:CPU computes `z` twice.
    """
    axis, z = plan.options.axis % z.ndim, lax.stop_gradient(z)
    least = jnp.asarray(jnp.finfo(z.dtype).min, z.dtype)
    if sink is None:
        return jnp.expand_dims(lax.reduce(jnp.maximum(z, least), -jnp.inf, lax.max, (axis,)), axis), None
    top = z.max(axis, keepdims=True, initial=-jnp.inf)
    return jnp.maximum(top, least), top != -jnp.inf


def _normalised(options, z, top, live, sink) -> Result:
    """Normalises `z`, the logits less `top`, the greatest of the row; -inf where nothing is seen."""
    # the sink is one more logit of the row
    axis, dtype = options.axis, z.dtype
    if sink is not None:  # as seen from the maximum of z, which it may exceed
        # Of differences that overflow. A select would part the library loop of XLA:CPU.
        sink = sink.astype(dtype) - top
        z, sink = z - jnp.maximum(sink, 0), jnp.minimum(sink, 0)

    # the sum of the row
    e = jnp.exp(z)
    total = e.sum(axis, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink)
    elif options.fully_masked != "zero":
        live = total != 0  # the greatest term is 1
    total = jnp.maximum(total, 0.5)  # less is a row that sees nothing, whose e are 0

    # rows that see nothing are filled
    y = e / total
    if options.fully_masked != "zero":
        filler = 1 / max(z.shape[axis], 1) if options.fully_masked == "uniform" else jnp.nan
        y = jnp.where(live, y, filler)
    sink_prob = None if sink is None else jnp.where(live, jnp.exp(sink) / total, 0)
    return Result(y, sink_prob, None if options.fully_masked == "zero" else live)
