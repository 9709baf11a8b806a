"""Draws deformable attention: an encoder, which asks once for every pixel, or a decoder."""

from typing import Any

import jax
import jax.numpy as jnp

from bench.plain import gather_form
from bench.race.call import Budget, Call, Input, Lot, activation, normal, uniform
from jax_attn_bwd import multi_scale_deformable_attention


def deformable(lot: Lot, budget: Budget) -> Call:
    """Draws a call of deformable attention; its plain formula holds all samples, four times in all."""
    heads, width = lot.one_of(((4, 32), (8, 16), (8, 32), (8, 32), (8, 64), (16, 16)))
    levels, points, B = lot.one_of((1, 2, 3, 4, 5)), lot.one_of((1, 2, 4, 4, 8)), lot.one_of((1, 1, 2, 4))
    side, aspect = lot.size(8, 128), lot.one_of((0.75, 1.0, 1.5))
    asked = lot.one_of((50, 100, 300, 900, lot.size(50, 20_000)))
    encoder, normalized = lot.chance(0.3), lot.chance(0.3)
    # batch, then queries, then pixels; of corners, which are of many arrays, there may be more
    samples, elements = heads * width * levels * points, budget.elements
    pyramid = lambda: [(max(side >> i, 1), max(round(side * aspect) >> i, 1)) for i in range(levels)]
    pixels = lambda: sum(H * W for H, W in pyramid())
    while B > 1 and B * max(samples * (pixels() if encoder else asked), heads * width * pixels()) > elements:
        B //= 2
    while asked > 1 and not encoder and samples * asked > elements:
        asked = -(-asked // 2)
    while side > 1 and max(samples * encoder, heads * width) * pixels() > elements:
        side //= 2
    shapes, Q = tuple(pyramid()), pixels() if encoder else asked
    sampled = (B, Q, heads, levels, points)
    flags: dict[str, Any] = {"normalize": "softmax"} if normalized else {}

    def ours(data, a):
        return multi_scale_deformable_attention(a["value"], shapes, a["locations"], a["weights"], **flags)

    def formula(data, a):
        value, weights = (a[name].astype(jnp.float32) for name in ("value", "weights"))
        if normalized:
            weights = jax.nn.softmax(weights.reshape(*sampled[:3], -1)).reshape(sampled)
        return gather_form(shapes, value, a["locations"], weights).astype(a["value"].dtype)

    drawn = "encoder" if encoder else "decoder"
    name = f"{drawn} B{B} Q{Q} {heads}x{width} P{points}, levels {' '.join(f'{H}x{W}' for H, W in shapes)}"
    inputs = {
        "value": activation(B, pixels(), heads, width),
        "locations": Input((*sampled, 2), uniform, dtype="float32"),
        "weights": Input(sampled, normal if normalized else uniform),
    }
    return Call(name + ", normalized" * normalized, inputs, (B, Q, heads * width), ours, formula)
