"""The T x S plane cut into tiles: which tiles are visited, and what each of them sees.

The portable forward and backward scan one list of (i, j) tile pairs. Causality and windows over plain
indices drop dead pairs from the list at trace time, and split the rest into full tiles (no comparison)
and mixed ones (element by element). Lengths, segments and positions are known at run time only: they
give each pair a live flag, and `lax.cond` skips dead ones. No loop has a traced trip count, so the
scans have a reverse mode.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import masks
from jax_attn_bwd._core.blocks import take_at
from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd.ops.dot_product.layout import Tokens, Working
from jax_attn_bwd.ops.dot_product.spec import Options
from jax_attn_bwd.ops.dot_product.tiling import Tiling, count


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
        blocks = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
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
