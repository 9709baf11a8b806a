"""`MultiHeadAttention`: cases, inputs, and ours beside theirs."""

from functools import partial

import jax.numpy as jnp
import numpy as np
from layers.frameworks import HEADS as N
from layers.frameworks import arrays, jitted, lenient, multi_head, random_params, values_and_gradients

T, S, E = 6, 9, 12

# Widths other than the defaults, under the names of each framework.
WIDTHS = {
    "flax_linen": {"qkv_features": 8, "out_features": 5},
    "flax_nnx": {"qkv_features": 8, "out_features": 5},
    "haiku": {"key_size": 2, "value_size": 3, "model_size": 5},
    "equinox": {"qk_size": 2, "vo_size": 3, "output_size": 5},
}


def some_mask(*shape):
    """Every query sees a key: what one that sees none gives is where the layers differ."""
    mask = np.random.default_rng(5).random(shape) < 0.6
    mask[..., 0] = True
    return jnp.asarray(mask)


def inputs_of(case, framework):
    """(query, key, value), mask"""
    width = {"flax_nnx": 7}.get(framework, 5)  # NNX has one width for keys and values
    if case == "self":
        (x,) = arrays((2, T, E))
        return (x, x, x), None
    if case == "causal":
        (x,) = arrays((2, T, E))
        return (x, x, x), jnp.tril(jnp.ones((1, 1, T, T), bool))
    batch = {"unbatched": (), "batch_axes": (2, 3)}.get(case, (2,))
    inputs = arrays((*batch, T, E), (*batch, S, 7), (*batch, S, width))
    shape = {"unbatched": (1, T, S), "batch_axes": (2, 1, 1, T, S), "head_mask": (2, N, T, S)}
    return tuple(inputs), some_mask(*shape.get(case, (2, 1, T, S)))


def compared(framework, case, options, own_options=None):
    """Output and gradients, (theirs, ours), on the same parameters."""
    inputs, mask = inputs_of(case, framework)
    own_mask = mask if own_options is None else None
    theirs = multi_head(framework, False, **options)
    ours = multi_head(framework, True, **options, **(own_options or {}))
    params = random_params(theirs, inputs)
    with lenient():
        run = jitted(partial(values_and_gradients, partial(theirs.call, mask=mask)))
        expected = run(params, *inputs)
    run = jitted(partial(values_and_gradients, partial(ours.call, mask=own_mask)))
    return expected, run(params, *inputs)
