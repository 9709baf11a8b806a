"""Axes of the operands: heads in front of the sequence, grouped, padded to whole tiles."""

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd.ops.dot_product.plan import count


def pad(x: jax.Array, blocks: dict[int, int]) -> jax.Array:
    """Pads axes with zeros to a multiple of their block; an axis of size 1 (broadcast) stays."""
    is_whole = lambda n, block: n == 1 or (isinstance(n, int) and n % block == 0)
    short = {axis: block for axis, block in blocks.items() if not is_whole(x.shape[axis], block)}
    widths = [(0, 0)] * x.ndim
    for axis, block in short.items():
        widths[axis] = (0, count(x.shape[axis], block) * block - x.shape[axis])
    return jnp.pad(x, widths) if short else x


def extend(x: jax.Array, block: int) -> jax.Array:
    """`x` with its last entry repeated up to a multiple of `block`; an axis of size 1 stays.

    Not `jnp.pad(mode="edge")`, which slices every axis, the batch as well, and that may be sharded.
    """
    n = x.shape[-1]
    if n == 1 or (isinstance(n, int) and n % block == 0):
        return x
    more = (*x.shape[:-1], count(n, block) * block - n)
    last = lax.slice_in_dim(x, n - 1, n, axis=-1)
    return jnp.concatenate([x, jnp.broadcast_to(last, more)], axis=-1)


def split_heads(x: jax.Array, groups: int) -> jax.Array:
    """`[..., T, N, H]` -> `[..., K, G, T, H]`."""
    *batch, T, N, H = x.shape
    return jnp.moveaxis(x.reshape(*batch, T, N // groups, groups, H), -4, -2)


def merge_heads(x: jax.Array) -> jax.Array:
    """`[..., K, G, T, H]` -> `[..., T, N, H]`."""
    *batch, K, G, T, H = x.shape
    return jnp.moveaxis(x, -2, -4).reshape(*batch, T, K * G, H)


def split_rows(x: jax.Array, groups: int) -> jax.Array:
    """`[..., T, N]` -> `[..., K, G, T]`."""
    return split_heads(x[..., None], groups)[..., 0]


def merge_rows(x: jax.Array) -> jax.Array:
    """`[..., K, G, T]` -> `[..., T, N]`."""
    return merge_heads(x[..., None])[..., 0]


def plane(x: jax.Array, batch_rank: int, groups: int) -> jax.Array:
    """A mask or bias that broadcasts to `[..., N, T, S]` -> `[..., K|1, G|1, T|1, S|1]`."""
    *batch, N, T, S = (x := to_rank(x, batch_rank + 3)).shape
    heads = (1, 1) if N == 1 else (N // groups, groups)
    return x.reshape(*batch, *heads, T, S)
