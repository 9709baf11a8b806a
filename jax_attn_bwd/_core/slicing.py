"""Reads and writes blocks of arrays."""

from typing import Any

import jax
import numpy as np
from jax import lax

Blocks = dict[int, tuple[Any, int]]  # axis -> (index of a block, its size)


def _starts(x: jax.Array, blocks: Blocks) -> list[Any]:
    starts: list[Any] = [np.int32(0)] * x.ndim
    for axis, (i, block) in blocks.items():
        starts[axis] = np.int32(0) if x.shape[axis] == 1 else i * block
    return starts


def take_at(x: jax.Array, blocks: Blocks) -> jax.Array:
    """The given block of each given axis; an axis that broadcasts is taken whole."""
    sizes = list(x.shape)
    for axis, (_, block) in blocks.items():
        sizes[axis] = 1 if x.shape[axis] == 1 else block
    return lax.dynamic_slice(x, _starts(x, blocks), sizes, allow_negative_indices=False)


def put_at(x: jax.Array, update: jax.Array, blocks: Blocks) -> jax.Array:
    """`x` with `update` where `take_at` reads."""
    return lax.dynamic_update_slice(x, update, _starts(x, blocks), allow_negative_indices=False)
