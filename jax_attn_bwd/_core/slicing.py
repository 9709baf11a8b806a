"""Reads and writes blocks of arrays."""

from typing import Any

import jax
import numpy as np
from jax import lax

Parts = dict[int, tuple[Any, int]]  # axis -> (where a part begins, its size)
Blocks = dict[int, tuple[Any, int]]  # axis -> (index of a block, its size)


def _starts(x: jax.Array, parts: Parts) -> list[Any]:
    starts: list[Any] = [np.int32(0)] * x.ndim
    for axis, (first, _) in parts.items():
        starts[axis] = np.int32(0) if x.shape[axis] == 1 else first
    return starts


def _parts(blocks: Blocks) -> Parts:
    return {axis: (i * block, block) for axis, (i, block) in blocks.items()}


def take_part(x: jax.Array, parts: Parts) -> jax.Array:
    """Takes the given part of each given axis; an axis that broadcasts is taken whole."""
    sizes = list(x.shape)
    for axis, (_, size) in parts.items():
        sizes[axis] = 1 if x.shape[axis] == 1 else size
    return lax.dynamic_slice(x, _starts(x, parts), sizes, allow_negative_indices=False)


def put_part(x: jax.Array, update: jax.Array, parts: Parts) -> jax.Array:
    """Returns `x` with `update` where `take_part` reads."""
    return lax.dynamic_update_slice(x, update, _starts(x, parts), allow_negative_indices=False)


def take_at(x: jax.Array, blocks: Blocks) -> jax.Array:
    """Takes the given block of each given axis; an axis that broadcasts is taken whole."""
    return take_part(x, _parts(blocks))


def put_at(x: jax.Array, update: jax.Array, blocks: Blocks) -> jax.Array:
    """Returns `x` with `update` where `take_at` reads."""
    return put_part(x, update, _parts(blocks))
