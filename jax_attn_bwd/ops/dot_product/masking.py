"""Who sees whom: the conditions of dense attention, by element, by tile, and by row and key.

A query t sees a key s if every condition that is given holds:

    mask_ts,   bias_ts > -inf,   t < its length,   s < its length,   segment_t = segment_s,
    -right <= position_t - position_s <= left,   position_s <= position_t (causal),
    mask_mod(batch, head, position_t, position_s, *mod_args)

This module alone reads the conditions; kernels visit the tiles that it names. A further condition goes into
`_elements`, and into `of_tiles` if ranges of tokens tell something of it; `fully_masked._tell_by_index` says
whether rows and keys have a closed form under it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import masks
from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd._core.slicing import take_at
from jax_attn_bwd.ops.dot_product import layout, mod_functions
from jax_attn_bwd.ops.dot_product.spec import Options
from jax_attn_bwd.ops.dot_product.tiling import Tiling, count


class Given(NamedTuple):
    """The arguments that conditions are read from; `Operands` has the same fields."""

    mask: Any = None  # broadcasts to [..., N, T, S]
    bias: Any = None
    query_seq_lengths: Any = None  # [...]
    key_value_seq_lengths: Any = None
    query_segment_ids: Any = None  # [..., T]
    key_value_segment_ids: Any = None  # [..., S]
    query_positions: Any = None
    key_value_positions: Any = None
    mod_args: Any = None  # any
    mod_batch: Any = None  # [...]
    mod_heads: Any = None  # [N]
    query_origin: Any = None  # index of the first query; None = 0


class Tokens(NamedTuple):
    """What is known of each query (or key); None = not given. Leading axes broadcast to the batch."""

    length: Any  # T or S: what lies beyond it is padding
    position: Any = None  # [..., n] int32; None = the index
    segment: Any = None  # [..., n] int32
    valid_length: Any = None  # [...] int32
    origin: Any = None  # index of the first one; None = 0


class Conditions(NamedTuple):
    """What decides who sees whom, axes padded to whole tiles; None = not given."""

    rows: Tokens
    columns: Tokens
    mask: jax.Array | None  # [..., K|1, G|1, T|1, S|1]
    bias: jax.Array | None  # likewise
    places: mod_functions.Places | None = None  # with a function of them


def conditions(
    given: Any, T: Any, S: Any, batch_rank: int, groups: int, block_q: int = 1, block_k: int = 1
) -> Conditions:
    """The conditions of T queries and S keys; `given` has the fields of `Given`."""

    def plane(x):
        if x is None:
            return None
        return layout.pad(layout.pad(layout.plane(x, batch_rank, groups), -2, block_q), -1, block_k)

    def tokens(length, block, position, segment, valid_length, origin=None):
        if position is None and not isinstance(length, int):
            position = to_rank(jnp.arange(length, dtype=jnp.int32), batch_rank + 1)
        position, segment = (None if x is None else layout.extend(x, block) for x in (position, segment))
        return Tokens(length, position, segment, valid_length, origin)

    queries = given.query_positions, given.query_segment_ids, given.query_seq_lengths
    keys = given.key_value_positions, given.key_value_segment_ids, given.key_value_seq_lengths
    return Conditions(
        tokens(T, block_q, *queries, _origin(given)),
        tokens(S, block_k, *keys),
        plane(given.mask),
        plane(given.bias),
        mod_functions.places(given, batch_rank, groups),
    )


def _origin(given: Any) -> Any:
    """Of the queries; only the operands of dense attention may be a part of a call's."""
    return getattr(given, "query_origin", None)


class _Laid(NamedTuple):
    """The tokens of a tile, laid along one axis of `[..., K, G, rows, columns]`."""

    position: jax.Array
    segment: jax.Array | None
    valid: jax.Array | None


def _lay(tokens: Tokens, i: Any, block: Any, axis: int, rank: int) -> _Laid:
    """Block `i`, or None: all of them, along `axis` of a tile of that rank."""

    def lay(x):  # [..., block] -> [..., 1, 1, block, 1] or [..., 1, 1, 1, block]
        return to_rank(jnp.expand_dims(x, (-4, -3, -1) if axis == -2 else (-4, -3, -2)), rank)

    def take(x):
        return x if i is None else take_at(x, {-1: (i, block)})

    start = 0 if i is None else i * block
    local = start + jnp.arange(block, dtype=jnp.int32)
    index = local if tokens.origin is None else tokens.origin + local
    position = index if tokens.position is None else take(tokens.position)
    segment = None if tokens.segment is None else lay(take(tokens.segment))
    valid = None
    if tokens.valid_length is not None:
        length = tokens.valid_length[..., None]
        valid = lay(to_rank(index, length.ndim) < length)
    if i is not None and not (isinstance(tokens.length, int) and tokens.length % block == 0):
        valid = masks.conjunction(valid, lay(local < tokens.length))
    return _Laid(lay(position), segment, valid)


def positions(
    given: Conditions, i: Any, j: Any, blocks: tuple[Any, Any], rank: int
) -> tuple[jax.Array, jax.Array]:
    """(rows, columns) of tile (i, j) as functions are handed them; those of padding are the last ones.

    `[..., 1, 1, rows, 1]` and `[..., 1, 1, 1, columns]`; with i and j None those of the whole plane.
    """
    found = []
    for tokens, at, block, axis in ((given.rows, i, blocks[0], -2), (given.columns, j, blocks[1], -1)):
        position = _lay(tokens._replace(segment=None, valid_length=None), at, block, axis, rank).position
        if tokens.position is None and at is not None and tokens.length % block != 0:
            last = tokens.length - 1
            position = jnp.minimum(position, last if tokens.origin is None else tokens.origin + last)
        found.append(position)
    return found[0], found[1]


def _elements(options: Options, mask: Any, bias: Any, row: _Laid | None, column: _Laid | None) -> Any:
    """The conjunction of all conditions; None if all is seen. `row` and `column` are None in a full tile."""
    terms = [mask, None if bias is None else bias != -jnp.inf]
    if row is not None and column is not None:
        terms.append(masks.in_band(row.position, column.position, options.is_causal, options.window))
        terms += [row.valid, column.valid]
        if row.segment is not None:
            terms.append(row.segment == column.segment)
    return masks.conjunction(*terms)


def of_tile(
    options: Options, given: Conditions, i: Any, j: Any, mixed: bool, tiling: Tiling, rank: int
) -> jax.Array | None:
    """Which elements of tile (i, j) are seen, `[..., K|1, G|1, rows, columns]` of `rank` axes; None if all.

    Unless the tile is `mixed`, tokens see one another, and masks and biases alone decide.
    """
    blocks = {-2: (i, tiling.block_q), -1: (j, tiling.block_k)}
    mask, bias = (None if x is None else take_at(x, blocks) for x in (given.mask, given.bias))
    row = column = None
    if mixed:
        row = _lay(given.rows, i, tiling.block_q, -2, rank)
        column = _lay(given.columns, j, tiling.block_k, -1, rank)
        at = positions(given, i, j, (tiling.block_q, tiling.block_k), rank)
        mask = masks.conjunction(mask, mod_functions.seen(options, given.places, *at))
    return _elements(options, mask, bias, row, column)


def of_plane(options: Options, given: Any, T: Any, S: Any, batch_rank: int, groups: int) -> jax.Array | None:
    """Which elements of the whole plane are seen, `[..., K|1, G|1, T|1, S|1]`; None if all are.

    For those who hold arrays of that size anyway.
    """
    found = conditions(given, T, S, batch_rank, groups)
    rank = batch_rank + 4
    row, column = _lay(found.rows, None, T, -2, rank), _lay(found.columns, None, S, -1, rank)
    by_function = mod_functions.seen(options, found.places, *positions(found, None, None, (T, S), rank))
    return _elements(options, masks.conjunction(found.mask, by_function), found.bias, row, column)


def of_tiles(
    options: Options, rows: Tokens, columns: Tokens, block_q: int, block_k: int, places: Any = None
) -> tuple[Any, Any]:
    """(some, every) element of each tile is seen, `[..., query tiles, key tiles]`, for all that tokens tell.

    NumPy arrays if shapes alone decide. `some` is never False for a tile in which something is seen, and
    exact for bands over indices; `every` is never True for one in which something is hidden but queries
    beyond their length, whose results are thrown away. A `mask_mod` reads its `modifiers.Places`.
    """
    (row, row_segment, row_range), (column, column_segment, column_range) = (
        _ranges(tokens, block, axis) for tokens, block, axis in ((rows, block_q, -1), (columns, block_k, -2))
    )
    known = [x for tokens in (rows, columns) for x in (tokens.position, tokens.segment) if x is not None]
    lengths = [x for x in (rows.valid_length, columns.valid_length) if x is not None]
    rank = max((2, *(x.ndim + 1 for x in known), *(x.ndim + 2 for x in lengths)))

    def to(pair):
        return to_rank(pair[0], rank), to_rank(pair[1], rank)

    row, column, row_range, column_range = to(row), to(column), to(row_range), to(column_range)
    some, every = masks.tile_in_band(row, column, options.is_causal, options.window)
    grid = [count(tokens.length, block) for tokens, block in ((rows, block_q), (columns, block_k))]
    ones = (np if all(isinstance(n, int) for n in grid) else jnp).ones((*(1,) * (rank - 2), *grid), bool)
    some, every, told = some & ones, every & ones, None
    if options.mask_mod is not None and places is not None:
        told = mod_functions.of_tiles(options.mask_mod, places, row, column)
    if rows.valid_length is not None:
        some = some & (row_range[0] < to_rank(rows.valid_length[..., None, None], rank))
    if columns.valid_length is not None:
        end = to_rank(columns.valid_length[..., None, None], rank)
        some, every = some & (column_range[0] < end), every & (column_range[1] < end)
    if row_segment is not None and column_segment is not None:
        row, column = to(row_segment), to(column_segment)
        some = some & (row[0] <= column[1]) & (column[0] <= row[1])
        every = every & (row[0] == column[1]) & (column[0] == row[1])
    if told is not None:
        rank = max(rank, told.some.ndim)
        pairs = (some, told.some), (every, told.every)
        some, every = (to_rank(x, rank) & to_rank(y, rank) for x, y in pairs)
    return some, every & some


def known_tiles(
    options: Options, given: Conditions, block_q: int, block_k: int
) -> tuple[np.ndarray, np.ndarray, bool]:
    """(some, every) of `of_tiles` as far as shapes tell, `[query tiles, key tiles]`; whether that is all."""
    rows, columns = given.rows, given.columns
    T, S = rows.length, columns.length
    some, every = of_tiles(options, Tokens(T), Tokens(S), block_q, block_k)
    final = all(x is None for tokens in (rows, columns) for x in tokens[1:])
    by_index = all(x is None for x in (rows.position, rows.origin, columns.position))
    if not by_index:
        some = np.ones_like(some)
        every = np.full_like(every, not (options.is_causal or options.window is not None))
    if options.mask_mod is not None and given.places is not None:
        told = mod_functions.known_tiles(options.mask_mod, given.places, (T, S), (block_q, block_k), by_index)
        some, every, final = some & told.some, every & told.every, final and told.final
    return some, every & some, final


def _ranges(tokens: Tokens, block: int, axis: int) -> tuple[Any, Any, Any]:
    """(least, greatest) position, segment and index of each block, with an axis of size 1 at `axis`."""
    n, known = count(tokens.length, block), isinstance(tokens.length, int)
    start = block * (np if known else jnp).arange(n, dtype=np.int32)
    last = start + np.int32(block - 1)
    last = np.minimum(last, np.int32(tokens.length - 1)) if known else jnp.minimum(last, tokens.length - 1)
    lay = (..., None, slice(None)) if axis == -2 else (..., slice(None), None)

    def ranges(x):
        if x.shape[-1] == 1:
            return x[lay], x[lay]
        blocks = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
        return blocks.min(-1)[lay], blocks.max(-1)[lay]

    if tokens.origin is not None:
        start, last = tokens.origin + start, tokens.origin + last
    index = start[lay], last[lay]
    segment = None if tokens.segment is None else ranges(tokens.segment)
    return index if tokens.position is None else ranges(tokens.position), segment, index
