"""Shared by the softmax kernels of all chips: calls they refuse, what XLA prepares, what goes into exp2."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import pallas
from jax_attn_bwd._core.numerics import reduce_to
from jax_attn_bwd._core.sharding import explicit_spec, match_type, reshard_like, tie
from jax_attn_bwd.ops.softmax.spec import Operands, Options, Result

Kernel = Callable[..., jax.Array]
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
MAX_WIDTH = 131072
_TINY = 1e-36  # times the largest float32: 340, and exp(-340) is 0


def unsupported(options: Options, operands: Operands, dtypes: tuple[str, ...]) -> str | None:
    """Returns why a kernel for `dtypes` cannot run this call on any device; None if it can."""
    # shapes and dtypes
    x = operands.x
    if not all(isinstance(n, int) for n in x.shape):
        return "its shapes must be known, not symbolic"
    if options.axis != -1:
        return f"it normalises over the last axis, not axis {options.axis}"
    for name, array in (("x", x), ("bias", operands.bias)):
        if array is not None and array.dtype not in dtypes:
            return f"{name} must be one of {dtypes}, got {array.dtype}"
    # what it does not compute
    if operands.scale is not None:
        return "scale must be a Python float, not an array"
    if operands.sink is not None:
        return "it has no sink"
    if options.fully_masked != "zero":
        return f"it gives 0 in rows that see nothing, not {options.fully_masked!r}"
    # sizes, and axes that a block must hold whole
    if x.size == 0:
        return f"x must not be empty, got shape {x.shape}"
    if x.shape[-1] > MAX_WIDTH:
        return f"a row may have at most {MAX_WIDTH} elements, got {x.shape[-1]}"
    banded = options.is_causal or options.window is not None
    if any(explicit_spec(x)[-2 if banded else -1 :]):
        return "the axis it normalises over, and with a band the rows', must not be sharded"
    return None


def read_arrays(x: jax.Array, planes: dict[str, jax.Array]) -> list[jax.Array]:
    """Lists what a kernel reads: x, and each plane for all columns, masks as int8."""
    arrays = [x]
    for name, plane in planes.items():
        plane = plane.astype(jnp.int8) if name == "mask" else plane
        arrays.append(jnp.broadcast_to(plane, (*plane.shape[:-1], x.shape[-1])))
    return arrays


def by_kernels(
    implementation: str, softmax: Kernel, dx: Kernel, batched: Wrapper = lambda call: call
) -> tuple[Callable[..., Result], Callable[..., dict[str, jax.Array]]]:
    """Returns (forward, backward) of an implementation, whose kernels run on each device's shards.

    `softmax(options, interpret, x, planes)` gives y, `dx(scale, interpret, y, dy)` the gradient of x;
    `batched` says how both are batched.
    """

    def of_shards(kernel, *arrays):
        return batched(lambda *given: pallas.on_local_shards(kernel, lambda x, _: x, given))(*arrays)

    @partial(jax.jit, static_argnums=(0, 1))
    def _forward(options, interpret, operands):
        planes = {"mask": operands.mask, "bias": operands.bias}
        given = {name: plane for name, plane in planes.items() if plane is not None}
        y = of_shards(partial(softmax, options, interpret), operands.x, given)
        return tie(Result(y, None, None), operands)

    @partial(jax.jit, static_argnums=(0, 1))
    def _backward(options, interpret, residuals, dy):
        y, types = residuals.y, dict(residuals.wanted.types)
        dy = reshard_like(dy, y, tuple(range(y.ndim)))
        grads = {}
        if "x" in types:
            grads["x"] = of_shards(partial(dx, options.scale, interpret), y, dy)
        if "bias" in types:  # (4), (5) and (8): a reduction that XLA fuses over y and dy
            seen, prob = jnp.where(y == 0, 0, dy.astype(jnp.float32)), y.astype(jnp.float32)
            dot = (prob * seen).sum(-1, keepdims=True)
            grads["bias"] = reduce_to(prob * (seen - dot), types["bias"].shape)
        return {name: match_type(grad, types[name]) for name, grad in grads.items()}

    run = lambda rule: lambda plan, *given: rule(plan.options, pallas.is_interpreted(implementation), *given)
    return run(_forward), run(_backward)


def exponent(options: Options, has_bias: bool) -> tuple[float, float, float]:
    """Picks where the scale goes: returns (factor, slope, weight).

    Probabilities are exp2(slope * (z - max z)) of z = factor * x + weight * bias. Differences to the maximum
    are scaled, not logits, where that is exact: without a bias, with a scale that takes an overflowed
    difference far below zero and leaves none of them NaN. With a bias, logits are in a unit in which they do
    not overflow.
    """
    scale = 1.0 if options.scale is None else options.scale
    slope = math.log2(math.e)
    if has_bias:
        return scale / options.unit, slope * options.unit, 1.0 / options.unit
    if _TINY <= abs(scale) <= 1 / _TINY:
        return math.copysign(1.0, scale), slope * abs(scale), 1.0
    return scale, slope, 1.0
