"""The gradients that follow from <dout, value> at the corners: equations (5) to (7) and (9) of `backward`."""

from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp

from jax_attn_bwd.ops.deformable import sampling
from jax_attn_bwd.ops.deformable.sampling import Place
from jax_attn_bwd.ops.deformable.spec import Operands, Options


def gradients(
    wanted: Collection[str], at: Place, weight: jax.Array, d: Sequence[jax.Array]
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """(dloc_x, dloc_y, da), of the shape of the sampling points; None where not asked.

    `d` holds <dout, value> at each pixel of `at`; where the point does not count it may be anything.
    """
    da = dx = dy = None
    weight = jnp.where(at.counts, weight, 0)
    if "attention_weights" in wanted:
        da = jnp.where(at.counts, sampling.weighted_sum(d, sampling.shares(at)), 0)  # (5)
    if "sampling_locations" in wanted:
        dx = dy = jnp.zeros_like(weight)
        if len(d) == 4:
            r, b = at.right, at.below
            dx = at.dx * weight * ((1 - b) * (d[1] - d[0]) + b * (d[3] - d[2]))  # (6)
            dy = at.dy * weight * ((1 - r) * (d[2] - d[0]) + r * (d[3] - d[1]))  # (7)
            dx, dy = jnp.where(at.counts, dx, 0), jnp.where(at.counts, dy, 0)
    return dx, dy, da


def by_name(
    options: Options, operands: Operands, dx: jax.Array | None, dy: jax.Array | None, da: jax.Array | None
) -> dict[str, jax.Array]:
    """The operands' gradients by name, from (dloc_x, dloc_y, da) `[B, Q, M, K]`; None has no entry."""
    grads = {}
    if dx is not None and dy is not None:
        grads["sampling_locations"] = jnp.stack((dx, dy), -1)
    if da is not None:
        if options.normalize == "softmax":
            a = sampling.probabilities(operands.attention_weights.astype(da.dtype))
            da = a * (da - (a * da).sum(-1, keepdims=True))  # (9)
        grads["attention_weights"] = da
    return grads
