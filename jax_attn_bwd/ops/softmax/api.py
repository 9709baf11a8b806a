"""Scaled masked softmax: the public functions, their checks, and the rules."""

from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import backend, checks, keywords, masks
from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd._core.operation import Operation
from jax_attn_bwd._core.sharding import reshard_like
from jax_attn_bwd._core.types import Array, FullyMasked, Implementation
from jax_attn_bwd.ops.softmax import backward as portable_backward
from jax_attn_bwd.ops.softmax import forward as portable_forward
from jax_attn_bwd.ops.softmax import tangent as written_tangent
from jax_attn_bwd.ops.softmax.plan import Plan
from jax_attn_bwd.ops.softmax.plan import plan as planned
from jax_attn_bwd.ops.softmax.spec import DIFFERENTIABLE, Operands, Options, Residuals, Wanted

_NAME = "scaled_masked_softmax"


@keywords.known
def scaled_masked_softmax(
    x: Array,
    mask: Array | None = None,
    *,
    scale: float | Array = 1.0,
    bias: Array | None = None,
    sink: Array | None = None,
    axis: int = -1,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    fully_masked: FullyMasked = "zero",
    forward_mode: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Softmax of scaled logits over what is visible.

        y = softmax(scale * x + bias) over `axis` where visible, 0 elsewhere

    Shapes: x may have any rank; a row is what the softmax runs over. T = `x.shape[-2]`, S = `x.shape[-1]`.

    Args:
      x: logits, any shape, floating.
      mask: broadcasts to `x` in any dimension, bool; True attends.
      scale: a Python float, or an array that broadcasts to `x` and then has a gradient.
      bias: broadcasts to `x` in any dimension, floating; added after scaling. -inf counts as masked.
      sink: broadcasts to `x` without `axis`, floating: one more logit per row (not scaled) that takes
        probability and returns none, so that a row sums to less than 1.
      axis: the axis to normalise over.
      is_causal: row t (axis -2) sees columns (axis -1) up to t. Needs `axis=-1`.
      local_window_size: int or (left, right): row t sees columns t - left to t + right. Needs `axis=-1`.
      fully_masked: what a row that sees nothing gives: "zero", "uniform" (1 / row length), or "nan".
      forward_mode: also differentiable by `jax.jvp`, `jax.jacfwd` and `jax.linearize`, by a written rule.
      implementation: None picks the fastest that is proven on the device (`python -m jax_attn_bwd.check
        --enable`), else "xla"; a name runs that one or raises.

    Returns:
      y: shape and dtype of `x`, computed in float32 or wider. Exact at any magnitude of `x`; with a bias,
        where float32 holds scale * x + bias for |scale| <= 1 or an array, or |scale| < 2^79.

    Gradients:
      x, bias, sink, and scale if it is an array: exact, in the dtype and shape of the argument, reduced
      over what it broadcasts. A row that sees nothing has gradient 0 in all three modes. To second order
      and beyond. Saves y; also x, if the gradient of scale is asked for, and one value a row with a sink
      or with "uniform" and "nan".

    Raises:
      ValueError: shapes disagree, or an option is out of range.
      TypeError: an argument is of the wrong kind (a float mask).
      NotImplementedError: the named implementation cannot run this call.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd import scaled_masked_softmax
      >>> x = jnp.log(jnp.array([1.0, 2.0, 5.0, 1.0]))
      >>> scaled_masked_softmax(x, jnp.array([True, True, True, False])).round(3).tolist()
      [0.125, 0.25, 0.625, 0.0]

    References:
      Bridle, Probabilistic interpretation of feedforward classification network outputs, 1990.
    """
    # which rows, and what hides entries of them
    x = checks.floating_rows(_NAME, "x", x)
    given, axis = axis, _axis(_NAME, x, axis)
    window = masks.window(_NAME, local_window_size)
    is_causal = checks.flag(_NAME, "is_causal", is_causal)
    if (is_causal or window is not None) and (axis != -1 or x.ndim < 2):
        expected = "be -1, and x have rows on axis -2, with is_causal or local_window_size"
        raise ValueError(checks.message(_NAME, "axis", expected, f"{given} for rank {x.ndim}"))

    # arrays of the rank of x, sharded as x is
    if mask is not None:
        mask = _plane(_NAME, "mask", checks.boolean_mask(_NAME, mask), x)
    if bias is not None:
        bias = _plane(_NAME, "bias", checks.floating(_NAME, "bias", bias), x)
    if sink is not None:
        sink = checks.floating(_NAME, "sink", sink)
        rows = x.shape[: axis % x.ndim] + x.shape[axis % x.ndim :][1:]
        checks.broadcasts(_NAME, "sink", sink, "the shape of x without axis", rows)
        sink = _plane(_NAME, "sink", jnp.expand_dims(to_rank(sink, len(rows)), axis), x)
    static_scale, scale_array = _scale(_NAME, scale, x)
    fully_masked = checks.choice(_NAME, "fully_masked", fully_masked, get_args(FullyMasked))

    options = Options(static_scale, axis, is_causal, window, fully_masked)
    operands = Operands(x, scale_array, mask, bias, sink)
    plan = backend.planned(_NAME, IMPLEMENTATIONS, implementation, options, operands, planned)
    return _OPERATION.runner(_NAME, forward_mode)(plan, operands)


@keywords.known
def scaled_masked_softmax_bwd(
    dy: Array, y: Array, mask: Array | None = None, *, scale: float | Array = 1.0, axis: int = -1
) -> jax.Array:
    """Computes the gradient of `scaled_masked_softmax` with respect to `x`, by its result.

        dx = scale * y * (dy - sum over axis of dy * y) where mask, 0 elsewhere

    A composition of differentiable operations, in either mode; errors are those of the forward call.

    Args:
      dy: cotangent of `y`, its shape and dtype.
      y: what `scaled_masked_softmax` returned.
      mask: as in the forward; needed only for rows that saw nothing and were filled with "uniform" or
        "nan", since elsewhere y = 0 tells what was masked.

    Returns:
      dx: shape and dtype of `y`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd import scaled_masked_softmax_bwd
      >>> scaled_masked_softmax_bwd(jnp.array([1.0, 0.0]), jnp.array([0.25, 0.75])).tolist()
      [0.1875, -0.1875]
    """
    name = f"{_NAME}_bwd"
    # the call: what a forward of y's shape was asked for
    y, dy = checks.floating_rows(name, "y", y), checks.floating_rows(name, "dy", dy)
    checks.shape(name, "dy", dy, "the shape of y", y.shape)
    checks.same_dtype(name, y=y, dy=dy)
    dy = reshard_like(dy, y, tuple(range(y.ndim)))
    axis = _axis(name, y, axis)
    static_scale, scale_array = _scale(name, scale, y)
    options, operands = Options(scale=static_scale, axis=axis), Operands(y, scale_array)
    plan = backend.planned(name, IMPLEMENTATIONS, None, options, operands, planned)

    # y alone tells what was masked, but in rows that were filled
    if mask is not None:
        mask = _plane(name, "mask", checks.boolean_mask(name, mask), y, "the shape of y")
        y = jnp.where(~mask & jnp.isnan(y), 0, y)  # a row filled with NaN
    residuals = Residuals(y, Wanted((("x", jax.typeof(y)),)), scale_array)
    dx = _implementation(plan).backward(plan, residuals, dy)["x"]
    return dx if mask is None else jnp.where(mask, dx, 0)


def _axis(operator: str, x: jax.Array, axis: Any) -> int:
    """Returns `axis` counted from the end."""
    axis = checks.integer(operator, "axis", axis)
    if not -x.ndim <= axis < x.ndim:
        expected = f"lie in [{-x.ndim}, {x.ndim})"
        raise ValueError(checks.message(operator, "axis", expected, axis))
    return axis % x.ndim - x.ndim


def _plane(
    operator: str, argument: str, array: jax.Array, x: jax.Array, shape: str = "the shape of x"
) -> jax.Array:
    """Returns what broadcasts to `x` in the rank of `x`, sharded as that is."""
    checks.broadcasts(operator, argument, array, shape, x.shape)
    return reshard_like(to_rank(array, x.ndim), x, tuple(range(x.ndim)))


def _scale(operator: str, scale: Any, x: jax.Array) -> tuple[float | None, jax.Array | None]:
    """Returns (Python float, None) or (None, array of the rank of x)."""
    if not checks.is_array(scale):
        return checks.scale(operator, scale, x.dtype), None
    return None, _plane(operator, "scale", checks.floating(operator, "scale", scale), x)


PORTABLE = backend.Implementation("xla", portable_forward.forward, portable_backward.backward)
IMPLEMENTATIONS = (
    backend.kernel("mosaic_tpu", __package__, PORTABLE, ("tpu",), in_one_file=True),
    backend.kernel("mosaic_gpu", __package__, PORTABLE, ("hopper",), in_one_file=True),
    PORTABLE,
)


def _implementation(plan: Plan) -> backend.Implementation:
    """Returns the implementation that runs the plan."""
    return backend.named(IMPLEMENTATIONS, plan.implementation)


def _primal(plan: Plan, operands: Operands) -> jax.Array:
    return _implementation(plan).forward(plan, operands).y


def _forward(plan, operands, wanted):
    y, sink_prob, live = _implementation(plan).forward(plan, operands)
    # what the backward reads of the operands: their types, and x for the gradient of a scale
    present = [name for name in DIFFERENTIABLE if getattr(operands, name) is not None]
    types = tuple((name, jax.typeof(getattr(operands, name))) for name in present)
    hidden = plan.options.hides or not (operands.mask is None is operands.bias)
    x = None
    if operands.scale is not None:  # a leaf in either case: see `encode_flags`
        x = operands.x if "scale" in wanted else jnp.zeros((0,), operands.x.dtype)
    return y, Residuals(y, Wanted(types, hidden), operands.scale, x, sink_prob, live)


def _backward(plan, saved, wanted, dy):
    types = tuple((name, x) for name, x in saved.wanted.types if name in wanted)
    saved = saved._replace(
        wanted=replace(saved.wanted, types=types), x=saved.x if "scale" in wanted else None
    )
    return Operands(None)._replace(**_implementation(plan).backward(plan, saved, dy))


_OPERATION = Operation(DIFFERENTIABLE, _primal, _forward, _backward, written_tangent.tangent)
