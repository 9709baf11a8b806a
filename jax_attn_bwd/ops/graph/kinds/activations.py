"""The activations of gat and gatv2, and their slopes."""

import jax
import jax.numpy as jnp

from jax_attn_bwd.ops.graph.spec import Options


def activate(options: Options, z: jax.Array) -> jax.Array:
    """Computes act(z)."""
    alpha = options.alpha
    match options.activation:
        case "relu":
            return jnp.where(z > 0, z, 0)
        case "sigmoid":
            return jax.nn.sigmoid(z)
        case "tanh":
            return jnp.tanh(z)
        case "elu":
            return jnp.where(z > 0, z, jnp.expm1(jnp.where(z > 0, 0, z)))
        case "scalar":
            return alpha * z
        case "leaky_relu":
            return jnp.where(z > 0, z, alpha * z)
    return z


def slope(options: Options, z: jax.Array) -> jax.Array:
    """Computes act'(z); at the kinks as in `jax.nn`."""
    one = jnp.ones((), z.dtype)
    match options.activation:
        case "relu":
            return jnp.where(z > 0, one, 0)
        case "sigmoid":
            y = jax.nn.sigmoid(z)
            return y * (1 - y)
        case "tanh":
            return 1 - jnp.tanh(z) ** 2
        case "elu":
            return jnp.where(z > 0, 1, jnp.exp(jnp.where(z > 0, 0, z)))
        case "scalar":
            return options.alpha * one
        case "leaky_relu":
            return jnp.where(z >= 0, one, options.alpha)
    return one
