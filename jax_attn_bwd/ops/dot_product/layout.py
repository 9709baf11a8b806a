"""Lays operands out, heads in front of the sequence, grouped, padded to tiles, and reads blocks of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core.numerics import moved, to_rank
from jax_attn_bwd.ops.dot_product.plan import count

Parts = dict[int, tuple[Any, int]]  # axis -> (where a part begins, its size)

_FIRST = np.zeros((), np.int32)  # an array: a number would be converted to one by each slice


def pad(x: jax.Array, blocks: dict[int, int]) -> jax.Array:
    """Pads axes with zeros to a multiple of their block; an axis of size 1 (broadcast) stays."""
    is_whole = lambda n, block: n == 1 or (isinstance(n, int) and n % block == 0)
    short = {axis: block for axis, block in blocks.items() if not is_whole(x.shape[axis], block)}
    widths = [(0, 0)] * x.ndim
    for axis, block in short.items():
        widths[axis] = (0, count(x.shape[axis], block) * block - x.shape[axis])
    return jnp.pad(x, widths) if short else x


def extend(x: jax.Array, block: int) -> jax.Array:
    """Repeats the last entry of `x` up to a multiple of `block`; an axis of size 1 stays.

    Not `jnp.pad(mode="edge")`, which slices every axis, the batch as well, and that may be sharded.
    """
    n = x.shape[-1]
    if n == 1 or (isinstance(n, int) and n % block == 0):
        return x
    more = (*x.shape[:-1], count(n, block) * block - n)
    last = lax.slice_in_dim(x, n - 1, n, axis=-1)
    return jnp.concatenate([x, jnp.broadcast_to(last, more)], axis=-1)


def split_heads(x: jax.Array, groups: int) -> jax.Array:
    """Turns `[..., T, N, H]` into `[..., K, G, T, H]`."""
    *batch, T, N, H = x.shape
    return moved(x.reshape(*batch, T, N // groups, groups, H), -4, -2)


def merge_heads(x: jax.Array) -> jax.Array:
    """Turns `[..., K, G, T, H]` into `[..., T, N, H]`."""
    *batch, K, G, T, H = x.shape
    return moved(x, -2, -4).reshape(*batch, T, K * G, H)


def as_given(grads: dict[str, Any]) -> dict[str, Any]:
    """Turns gradients of query, key and value from the layout of tiles into the caller's."""
    turn = {"query": merge_heads} | dict.fromkeys(("key", "value"), lambda x: moved(x, -2, -3))
    return {name: turn[name](x) if name in turn else x for name, x in grads.items()}


def split_rows(x: jax.Array, groups: int) -> jax.Array:
    """Turns `[..., T, N]` into `[..., K, G, T]`."""
    *batch, T, N = x.shape
    return moved(x.reshape(*batch, T, N // groups, groups), -3, -1)


def merge_rows(x: jax.Array) -> jax.Array:
    """Turns `[..., K, G, T]` into `[..., T, N]`."""
    *batch, K, G, T = x.shape
    return moved(x, -1, -3).reshape(*batch, T, K * G)


def plane(x: jax.Array, batch_rank: int, groups: int) -> jax.Array:
    """Turns a mask or bias that broadcasts to `[..., N, T, S]` into `[..., K|1, G|1, T|1, S|1]`."""
    *batch, N, T, S = (x := to_rank(x, batch_rank + 3)).shape
    heads = (1, 1) if N == 1 else (N // groups, groups)
    return x.reshape(*batch, *heads, T, S)


def _starts(x: jax.Array, parts: Parts) -> list[Any]:
    starts: list[Any] = [_FIRST] * x.ndim
    for axis, (first, _) in parts.items():
        starts[axis] = _FIRST if x.shape[axis] == 1 else first
    return starts


def take_part(x: jax.Array, parts: Parts) -> jax.Array:
    """Takes the given part of each given axis; an axis that broadcasts is taken whole."""
    if not parts:
        return x
    sizes = list(x.shape)
    for axis, (_, size) in parts.items():
        sizes[axis] = 1 if x.shape[axis] == 1 else size
    return lax.dynamic_slice(x, _starts(x, parts), sizes, allow_negative_indices=False)


def put_part(x: jax.Array, update: jax.Array, parts: Parts) -> jax.Array:
    """Returns `x` with `update` where `take_part` reads."""
    if not parts:
        return update
    return lax.dynamic_update_slice(x, update, _starts(x, parts), allow_negative_indices=False)
