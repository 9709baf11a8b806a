"""One small call in NumPy arrays, and its first and second order, for the tests beside this file."""

import jax
import jax.numpy as jnp
import numpy as np
from ops.deformable.calls import QUICK, operator, program

from jax_attn_bwd.ops.deformable.cases import locations

LEVELS = ((3, 4), (2, 1))
B, Q, M, D, POINTS = 2, 6, 3, 4, 2


def sample(seed=0):
    rng = np.random.default_rng(seed)
    at = locations(rng, (B, Q, M), LEVELS, (POINTS,) * len(LEVELS))
    return {
        "value": rng.standard_normal((B, 14, M, D)),
        "sampling_locations": at.reshape(B, Q, M, len(LEVELS), POINTS, 2),
        "attention_weights": rng.standard_normal((B, Q, M, len(LEVELS), POINTS)),
    }


def first_order(options):
    """`(arrays, dout) -> output and gradients by name`."""
    return program(operator.call, options, QUICK)


def second_order(options):
    """`(arrays, dout) -> gradients of a random form of the gradients, by name, and of dout`."""
    first = program(operator.call, options)  # compiler options are for whole programs alone

    def form(arrays, dout):
        rng, gradients = np.random.default_rng(1), first(arrays, dout)
        return sum(
            (jnp.sin(gradients[name]) * rng.standard_normal(x.shape)).sum() for name, x in arrays.items()
        )

    @jax.jit
    def run(arrays, dout):
        by_array, by_dout = jax.grad(form, (0, 1))(arrays, dout)
        return by_array | {"dout": by_dout}

    return run


def on_row(levels, x, y, **options):
    """(value [H, W], out, dloc_x, dloc_y, dvalue) of samples at pixels (x, y) of one level, weight 1."""
    ((H, W),) = levels
    x, y = np.broadcast_arrays(np.asarray(x, float), np.asarray(y, float))
    at = np.stack([(x + 0.5) / W, (y + 0.5) / H], -1).reshape(1, x.size, 1, 1, 1, 2)
    arrays = {
        "value": np.random.default_rng(0).standard_normal((1, H * W, 1, 1)),
        "sampling_locations": at,
        "attention_weights": np.ones((1, x.size, 1, 1, 1)),
    }
    run = first_order({"spatial_shapes": levels, **options})
    got = {n: np.asarray(g) for n, g in run(arrays, np.ones((1, x.size, 1))).items()}
    slope = got["sampling_locations"].reshape(-1, 2)
    plane = arrays["value"].reshape(H, W)
    return plane, got["out"].ravel(), slope[:, 0], slope[:, 1], got["value"].reshape(H, W)
