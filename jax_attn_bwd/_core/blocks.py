"""Blocks of arrays: reading, writing, and walking over them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jax_attn_bwd._core.sharding import full_like_operands

Blocks = dict[int, tuple[Any, int]]  # axis -> (index of a block, its size)


def _starts(x: jax.Array, blocks: Blocks) -> list[Any]:
    starts: list[Any] = [np.int32(0)] * x.ndim
    for axis, (i, block) in blocks.items():
        starts[axis] = np.int32(0) if x.shape[axis] == 1 else i * block
    return starts


def take_at(x: jax.Array, blocks: Blocks) -> jax.Array:
    """The given block of each given axis; the whole of an axis that broadcasts."""
    sizes = list(x.shape)
    for axis, (_, block) in blocks.items():
        sizes[axis] = 1 if x.shape[axis] == 1 else block
    return lax.dynamic_slice(x, _starts(x, blocks), sizes)


def put_at(x: jax.Array, update: jax.Array, blocks: Blocks) -> jax.Array:
    """`x` with `update` in the place that `take_at` reads."""
    return lax.dynamic_update_slice(x, update, _starts(x, blocks))


def map_rows(
    fn: Callable[..., jax.Array], arrays: Sequence[jax.Array | None], like: jax.Array, block: int
) -> jax.Array:
    """`fn(index, *arrays)`, with axis -2 cut into blocks whose intermediates stay in the cache.

    Args:
      fn: maps `(row_index [block], *blocks)` to rows of the result, each row on its own.
      arrays: broadcast to `like` along axis -2; None is handed through.
      like: has the shape and dtype of the result.
      block: rows of a block.
    """
    rows = like.shape[-2]

    def apply(out, i, size):
        at = {-2: (i, size)}
        index = i * size + np.arange(size, dtype=np.int32)
        taken = [None if x is None else take_at(x, at) for x in arrays]
        return put_at(out, fn(index, *taken).astype(out.dtype), at)

    if rows <= block:
        return fn(np.arange(rows, dtype=np.int32), *arrays).astype(like.dtype)
    out = full_like_operands(like, like.shape, 0, like.dtype, (like, *arrays))
    count = rows // block
    out, _ = lax.scan(
        lambda out, i: (apply(out, i, block), None), out, np.arange(count, dtype=np.int32)
    )
    rest = rows - count * block
    if rest:
        last = [
            x if x is None or x.shape[-2] == 1 else lax.slice_in_dim(x, rows - rest, rows, axis=-2)
            for x in arrays
        ]
        tail = fn(np.arange(rows - rest, rows, dtype=np.int32), *last).astype(like.dtype)
        out = lax.dynamic_update_slice_in_dim(out, tail, np.int32(rows - rest), out.ndim - 2)
    return out
