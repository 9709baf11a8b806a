"""Small numerical helpers shared by all operators."""

from typing import Any

import jax
import jax.numpy as jnp


def accumulator_dtype(dtype: Any) -> jnp.dtype:
    """float32 for float32 and narrower, float64 for float64."""
    return jnp.dtype("float64" if dtype == "float64" else "float32")


def to_rank(x: jax.Array, rank: int) -> jax.Array:
    """`x` with axes of size 1 in front: ranks are promoted in the open, never implicitly."""
    return x.reshape((1,) * (rank - x.ndim) + x.shape)


def reduce_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sums `x` over the axes that `shape` broadcasts, so that the result has `shape`."""
    extra = x.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(
        extra + i for i, n in enumerate(shape) if n == 1 and x.shape[extra + i] != 1
    )
    return x.sum(axes, keepdims=True).reshape(shape) if axes else x
