"""The T x S plane cut into tiles: which tiles are visited, and what each of them sees.

The portable forward and backward scan one list of (i, j) tile pairs. Causality and windows over plain
indices drop dead pairs from the list at trace time, and split the rest into full tiles (no comparison)
and mixed ones (element by element). Lengths, segments and positions are known at run time only: they
give each pair a live flag, and `lax.cond` skips dead ones. No loop has a traced trip count, so the
scans have a reverse mode.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import backend, dropout, masks
from jax_attn_bwd._core.blocks import take_at
from jax_attn_bwd._core.numerics import accumulator_dtype, to_rank
from jax_attn_bwd.ops.dot_product.spec import Operands, Options


@dataclass(frozen=True)
class Tiling:
    """How the plane is cut and its products taken: changes speed and rounding, never the meaning."""

    block_q: int
    block_k: int
    product_dtype: str  # of the factors of matrix products

    @classmethod
    def default_for(cls, options: Options, operands: Operands) -> "Tiling":
        """Measured tiles for the target platform; see bench/results."""
        (*batch, T, N, _), S = operands.query.shape, operands.key.shape[-3]
        dtype, on_cpu = operands.query.dtype, backend.target_platform() == "cpu"
        heads = math.prod(batch) * N
        if not on_cpu:
            block_q, block_k = 1024, 1024  # tiles that can fill the chip (not measured)
        elif isinstance(heads, int) and heads >= 64:
            block_q, block_k = 128, 128  # 64 heads: 4 MiB of logits, which the L3 cache still holds
        else:
            block_q, block_k = (
                256,
                512,
            )  # 8 heads: likewise; wide key blocks for the matrix products
        if options.window is not None:
            left, right = options.window
            if left + (0 if options.is_causal else right) < block_k:
                block_k = block_q  # a narrow band crosses fewer elements of narrow tiles
        # XLA:CPU computes bfloat16 products in float32 anyway, and refuses some of them.
        product_dtype = accumulator_dtype(dtype) if on_cpu else dtype
        return cls(_even_block(T, block_q), _even_block(S, block_k), str(product_dtype))


def _even_block(length: Any, limit: int) -> int:
    """A multiple of 8 up to `limit` whose blocks cover `length` with no padding, or else with little."""
    if not isinstance(length, int):  # symbolic
        return limit
    if length <= 1:
        return 1
    for block in range(limit, limit // 2, -8):
        if length % block == 0:
            return block
    blocks = -(-length // limit)
    return -(-length // (8 * blocks)) * 8


def count(length: Any, block: int) -> Any:
    """Number of blocks that cover `length` (an int or a symbolic dimension)."""
    return -(-length // block)


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


def pad(x: jax.Array, axis: int, block: int, mode: str = "constant") -> jax.Array:
    """Pads `axis` to a multiple of `block`; an axis of size 1 (broadcast) stays."""
    n = x.shape[axis]
    if n == 1 or (isinstance(n, int) and n % block == 0):
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, count(n, block) * block - n)
    return jnp.pad(x, widths, mode=mode)


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
        position, segment = (
            None if x is None else pad(x, -1, block, "edge") for x in (position, segment)
        )
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


def take(x: jax.Array, i: Any, block: int, axis: int) -> jax.Array:
    """Block `i` of one axis."""
    return take_at(x, {axis: (i, block)})


def take_plane(x: jax.Array | None, i: Any, j: Any, tiling: Tiling) -> jax.Array | None:
    """Tile (i, j) of a mask or bias in working layout."""
    if x is None:
        return None
    return take_at(x, {-2: (i, tiling.block_q), -1: (j, tiling.block_k)})


def visible(
    options: Options, w: Working, i: Any, j: Any, mixed: bool, tiling: Tiling
) -> jax.Array | None:
    """Which elements of tile (i, j) are seen, `[..., K|1, G|1, block_q, block_k]`; None if all are."""
    terms: list[Any] = []
    mask, bias = take_plane(w.mask, i, j, tiling), take_plane(w.bias, i, j, tiling)
    terms.append(mask)
    if bias is not None:
        terms.append(bias != -jnp.inf)
    if mixed:
        sides = ((w.rows, i, tiling.block_q), (w.columns, j, tiling.block_k))
        row, column = (
            _tile_tokens(*side, axis, w.q.ndim) for side, axis in zip(sides, (-2, -1), strict=True)
        )
        terms.append(
            masks.in_band(row.position, column.position, options.is_causal, options.window)
        )
        terms += [row.valid, column.valid]
        if row.segment is not None:
            terms.append(row.segment == column.segment)
    return masks.conjunction(*terms)


class _TileTokens(NamedTuple):
    position: jax.Array
    segment: jax.Array | None
    valid: jax.Array | None


def _tile_tokens(tokens: Tokens, i: Any, block: int, axis: int, rank: int) -> _TileTokens:
    """The tokens of block `i`, laid along `axis` of a tile `[..., K, G, block_q, block_k]`."""

    def lay(x):  # [..., block] -> [..., 1, 1, block, 1] or [..., 1, 1, 1, block]
        return to_rank(jnp.expand_dims(x, (-4, -3, -1) if axis == -2 else (-4, -3, -2)), rank)

    index = i * block + jnp.arange(block, dtype=jnp.int32)
    position = index if tokens.position is None else take(tokens.position, i, block, -1)
    segment = None if tokens.segment is None else lay(take(tokens.segment, i, block, -1))
    valid = None
    if tokens.valid_length is not None:
        length = tokens.valid_length[..., None]
        valid = lay(to_rank(index, length.ndim) < length)
    if not isinstance(tokens.length, int) or tokens.length % block:
        valid = masks.conjunction(valid, lay(index < tokens.length))
    return _TileTokens(lay(position), segment, valid)


def live_tiles(options: Options, w: Working, tiling: Tiling) -> jax.Array | None:
    """Whether any batch entry sees anything of each tile, `[n_q, n_k]`; None if all is static."""
    if all(x is None for tokens in (w.rows, w.columns) for x in tokens[1:]):
        return None
    rank = w.q.ndim - 2
    as_row, as_column = (..., slice(None), None), (..., None, slice(None))
    row, row_segment, row_some = _block_bounds(w.rows, tiling.block_q, as_row, rank - 1)
    column, column_segment, column_some = _block_bounds(
        w.columns, tiling.block_k, as_column, rank - 1
    )
    some, _ = masks.tile_in_band(row, column, options.is_causal, options.window)
    terms = [None if some is True else some, row_some, column_some]
    if row_segment is not None:
        terms += [row_segment[0] <= column_segment[1], column_segment[0] <= row_segment[1]]
    shape = (count(w.rows.length, tiling.block_q), count(w.columns.length, tiling.block_k))
    terms = [None if x is None else to_rank(x, rank) for x in terms]
    live = masks.conjunction(jnp.ones((1,) * (rank - 2) + shape, bool), *terms)
    return live.any(tuple(range(live.ndim - 2)))


def _block_bounds(tokens: Tokens, block: int, lay: tuple, rank: int):
    """((min, max) position, (min, max) segment, starts before the valid length) of each block."""
    starts = block * jnp.arange(count(tokens.length, block), dtype=jnp.int32)

    def bounds(x):
        if x.shape[-1] == 1:
            return x[lay], x[lay]
        blocks = x.reshape(*x.shape[:-1], -1, block)
        return blocks.min(-1)[lay], blocks.max(-1)[lay]

    if tokens.position is None:
        starts = to_rank(starts, rank)
        position = (starts[lay], starts[lay] + block - 1)
    else:
        position = bounds(tokens.position)
    segment = None if tokens.segment is None else bounds(tokens.segment)
    some = None
    if tokens.valid_length is not None:
        some = (to_rank(starts, rank) < tokens.valid_length[..., None])[lay]
    return position, segment, some


def static_pairs(
    options: Options, T: int, S: int, has_positions: bool, tiling: Tiling
) -> tuple[np.ndarray, np.ndarray]:
    """(full, mixed): the tiles to visit, each `[n, 2]` of (i, j), as far as shapes alone tell."""
    i, j = np.indices((count(T, tiling.block_q), count(S, tiling.block_k)), np.int32)
    row = (i * tiling.block_q, np.minimum((i + 1) * tiling.block_q, T) - 1)
    column = (j * tiling.block_k, np.minimum((j + 1) * tiling.block_k, S) - 1)
    some, every = np.ones(i.shape, bool), np.ones(i.shape, bool)
    if not has_positions:
        band = masks.tile_in_band(row, column, options.is_causal, options.window)
        some, every = some & band[0], every & band[1]
    elif options.is_causal or options.window is not None:
        every[:] = False
    every &= ((j + 1) * tiling.block_k <= S) & ((i + 1) * tiling.block_q <= T)
    pairs = np.stack([i, j], -1)
    return pairs[some & every], pairs[some & ~every]


def scan_tiles(
    step: Callable[..., Any], carry: Any, options: Options, w: Working, tiling: Tiling
) -> Any:
    """Runs `carry = step(carry, i, j, mixed, live)` over the tiles that may be seen.

    `live` is None, or a traced bool: the step skips its work where it is False.
    """
    T, S = w.rows.length, w.columns.length
    live = live_tiles(options, w, tiling)
    if not (isinstance(T, int) and isinstance(S, int)):
        n_k = count(S, tiling.block_k)
        pair = jnp.arange(count(T, tiling.block_q) * n_k, dtype=jnp.int32)
        runs = [(True, pair // n_k, pair % n_k)]
    else:
        has_positions = w.rows.position is not None or w.columns.position is not None
        full, mixed = static_pairs(options, T, S, has_positions, tiling)
        if live is not None:
            full, mixed = full[:0], np.concatenate([full, mixed])
        runs = [(m, p[:, 0], p[:, 1]) for m, p in ((False, full), (True, mixed)) if len(p)]
    for is_mixed, i, j in runs:

        def body(carry, x, is_mixed=is_mixed):
            i, j, live = x
            return step(carry, i, j, is_mixed, live), None

        carry, _ = lax.scan(body, carry, (i, j, None if live is None else live[i, j]))
    return carry
