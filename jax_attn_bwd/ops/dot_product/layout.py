"""The working layout of the operands: heads in front of the sequence, grouped, padded to whole tiles."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd.ops.dot_product.spec import Operands, Options
from jax_attn_bwd.ops.dot_product.tiling import Tiling, count


class Tokens(NamedTuple):
    """What is known of each query (or key) position; None = not given. Leading axes broadcast to B."""

    length: Any  # T or S: positions beyond it are padding
    position: jax.Array | None  # [..., n] int32; None = the index
    segment: jax.Array | None  # [..., n] int32
    valid_length: jax.Array | None  # [...] int32


class Counters(NamedTuple):
    """What the dropout bits of an element are a function of."""

    keys: dropout.Words  # each [..., K, G]
    rows: jax.Array  # [T] uint32
    columns: jax.Array  # [S] uint32


class Working(NamedTuple):
    """The operands in working layout, sequences padded to whole tiles."""

    q: jax.Array  # [..., K, G, T, H]
    k: jax.Array  # [..., K, S, H]
    v: jax.Array  # [..., K, S, Hv]
    bias: jax.Array | None  # [..., K|1, G|1, T|1, S|1]
    mask: jax.Array | None  # likewise
    rows: Tokens
    columns: Tokens
    counters: Counters | None  # with dropout


def pad(x: jax.Array, axis: int, block: int) -> jax.Array:
    """Pads `axis` with zeros to a multiple of `block`; an axis of size 1 (broadcast) stays."""
    n = x.shape[axis]
    if n == 1 or (isinstance(n, int) and n % block == 0):
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, count(n, block) * block - n)
    return jnp.pad(x, widths)


def _extend(x: jax.Array, block: int) -> jax.Array:
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


def working(options: Options, operands: Operands, tiling: Tiling) -> Working:
    """Brings the operands into working layout."""
    q, k, v = operands.query, operands.key, operands.value
    (*batch, T, N, _), (S, K, _) = q.shape, k.shape[-3:]
    groups = N // K
    block_q, block_k = tiling.block_q, tiling.block_k

    def padded_plane(x):
        if x is None:
            return None
        return pad(pad(plane(x, len(batch), groups), -2, block_q), -1, block_k)

    def tokens(length, block, position, segment, valid_length):
        if position is None and not isinstance(length, int):
            position = to_rank(jnp.arange(length, dtype=jnp.int32), len(batch) + 1)
        position, segment = (None if x is None else _extend(x, block) for x in (position, segment))
        return Tokens(length, position, segment, valid_length)

    return Working(
        q=pad(split_heads(q, groups), -2, block_q),
        k=pad(jnp.swapaxes(k, -2, -3), -2, block_k),
        v=pad(jnp.swapaxes(v, -2, -3), -2, block_k),
        bias=padded_plane(operands.bias),
        mask=padded_plane(operands.mask),
        rows=tokens(
            T, block_q, operands.query_positions, operands.query_segment_ids,
            operands.query_seq_lengths,
        ),
        columns=tokens(
            S, block_k, operands.key_value_positions, operands.key_value_segment_ids,
            operands.key_value_seq_lengths,
        ),
        counters=counters(options, operands, block_q, block_k) if options.dropout_rate else None,
    )  # fmt: skip


def counters(options: Options, operands: Operands, block_q: int, block_k: int) -> Counters:
    """What the dropout bits are drawn from, rows and columns padded to whole blocks."""
    *batch, T, N, _ = operands.query.shape
    S, K, _ = operands.key.shape[-3:]
    groups = N // K
    zero = jnp.uint32(0)
    offset = operands.dropout_offset or dropout.Offset(zero, zero, zero, zero)

    def index(n, start):
        return start if start.ndim else start + jnp.arange(n, dtype=jnp.uint32)

    if options.broadcast_dropout:
        batch_index = head_index = jnp.zeros((1,) * (len(batch) + 2), jnp.uint32)
    else:
        batch_index = jnp.arange(math.prod(batch), dtype=jnp.uint32).reshape(*batch, 1, 1)
        batch_index = batch_index + offset.batch
        head_index = index(N, offset.head).reshape(N // groups, groups)
        head_index = to_rank(head_index, batch_index.ndim)
    assert operands.dropout_words is not None  # checked with the arguments
    return Counters(
        dropout.head_keys(operands.dropout_words, batch_index, head_index),
        pad(index(T, offset.row), 0, block_q),
        pad(index(S, offset.column), 0, block_k),
    )
