"""Draws a softmax of any rank, with its options."""

import math
from typing import Any

import jax.numpy as jnp

from bench import plain
from bench.race.call import Budget, Call, Input, Lot, activation, given, normal, parameter, seen
from bench.race.dense import tokens
from jax_attn_bwd import scaled_masked_softmax


def softmax(lot: Lot, budget: Budget) -> Call:
    """Draws a call of the softmax."""
    shape = _shape(lot, budget.elements / 4)  # a call does little to each element
    rank, axis = len(shape), -1
    if lot.chance(0.2):
        axis = lot.one_of(range(-rank, 0))
    kept = lambda axes: tuple(n if i - rank in axes else 1 for i, n in enumerate(shape))
    plane = lambda: kept(lot.one_of((range(-rank, 0), (-rank, -1), (-2, -1))))
    # options, those of arrays among the inputs
    inputs, flags, hides = {"x": activation(*shape)}, dict[str, Any](), dict[str, Any]()
    if lot.chance(0.4):
        flags["scale"] = 0.125
    elif lot.chance(0.15):
        inputs["scale"] = parameter(*kept(()), spread=0.1, mean=1.0)
    if axis == -1 and lot.chance(0.35):
        inputs["mask"] = given(plane(), seen)
    if lot.chance(0.3):
        inputs["bias"] = Input(plane(), normal, wanted=lot.chance(0.5), mapped=False)
    if axis == -1 and rank > 1 and lot.chance(0.3):
        # a window of no mask, and of as many columns: elsewhere rows may see nothing
        window = lot.chance(0.3) and shape[-2] <= shape[-1] and "mask" not in inputs
        hides = {"local_window_size": (lot.size(1, shape[-1]), 0)} if window else {"is_causal": True}
    if lot.chance(0.1):
        rows = [n if i - rank == -3 else 1 for i, n in enumerate(shape) if i - rank != axis]
        inputs["sink"] = Input(tuple(rows), normal, mapped=False)

    def ours(data, a):
        return scaled_masked_softmax(**a, **flags, **hides, axis=axis)

    def formula(data, a):
        x = a["x"].astype(jnp.float32) * flags.get("scale", 1.0) * a.get("scale", jnp.float32(1))
        if "bias" in a:
            x = x + a["bias"].astype(jnp.float32)
        where = plain.visible(shape[-2], shape[-1], a.get("mask"), **hides) if hides else a.get("mask")
        sink = jnp.expand_dims(a["sink"].astype(jnp.float32), axis) if "sink" in a else None
        return plain.softmax(x, where, sink, axis).astype(a["x"].dtype)

    told = [
        f"{name} {list(x.shape)}{' with gradient' * x.wanted}" for name, x in inputs.items() if name != "x"
    ]
    name = ", ".join([str(list(shape)), *[f"axis {axis}"] * (axis != -1), *flags, *hides, *told])
    return Call(name, inputs, shape, ours, formula)


def _shape(lot: Lot, elements: float) -> tuple[int, ...]:
    T, batch, heads = tokens(lot), lot.one_of((1, 2, 4, 8, 16, 32)), lot.one_of((1, 4, 8, 12, 16))
    S = T if lot.chance(0.65) else tokens(lot)
    wide = lot.one_of((10, 128, 257, 1000, 4096, 32_000))
    shape = lot.one_of(
        (
            (lot.size(8, 100_000),),
            *((lot.size(1, 4096), wide),) * 2,
            (batch, T, S),
            *((batch, heads, T, S),) * 2,
            (batch, 2, heads, T, S),
        )
    )
    while math.prod(shape) > elements:
        first = next(axis for axis, n in enumerate(shape) if n > 1)
        shape = tuple(-(-n // 2) if axis == first else n for axis, n in enumerate(shape))
    return shape
