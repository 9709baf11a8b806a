"""Reads a `Mask`: what is seen of a tile or of the plane, and which queries and keys are used at all.

NaN in a query that sees nothing, or in a key that nothing sees, must reach nothing, so what is told of these
is exact; it takes memory linear in T and S. What bounds tell of whole tiles may call one live that is not.

On the portable path this module reads the conditions, but for the bands that `strips.py` cuts by and what
`plan.py` decides from them. Kernels visit the tiles that it names, and compare the elements of mixed ones
themselves. A further condition of a call takes, in this order:

* `api.py`, `spec.AttentionKeywords` and `arguments.mask_of`: the argument and its checks;
* `mask.Mask` and `mask.AXES`: the field, and its axes, by which slices, parts, rings and shardings cut it; a
  rule that is static stands in `mask.RULES` and `spec.KernelOptions`, too, and in the bands of `strips.py`;
* here `_elements`, `of_tiles` if ranges of tokens tell something of it, and `tells_by_index`, whether rows
  and keys have a closed form under it;
* `kernels/inputs.py` and what kernels compare, `seen` of `kernels/tile_flags.py`, or a refusal in their
  `unsupported`;
* the layer's `arguments.py`, `parallel/arguments.py` and what `parallel/ring.py` may skip by it, and
  `layers/multi_head.Tokens` if it tells of tokens;
* `reference.py`, and cases that name it.
"""

import functools
import math
import operator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import fusion, masks
from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd._core.sharding import full_like_operands
from jax_attn_bwd.ops.dot_product import layout, mod_functions
from jax_attn_bwd.ops.dot_product.layout import put_part, take_part
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.plan import count, tile_sizes
from jax_attn_bwd.ops.dot_product.spec import Operands, Options, Sizes

BLOCK_ELEMENTS = 1 << 22  # 4 MiB of booleans at a time


class Tokens(NamedTuple):
    """Values known of each query (or key); None = not given. Leading axes broadcast to the batch."""

    length: Any  # T or S: what lies beyond it is padding
    position: Any = None  # [..., n] int32; None = the index
    segment: Any = None  # [..., n] int32
    valid_length: Any = None  # [...] int32
    origin: Any = None  # int32 [n]: where n equal stretches of them begin in the whole; None = at 0

    def in_whole(self, local: Any) -> Any:
        """Returns the index in the whole sequence of the tokens that are here at the indices `local`."""
        if self.origin is None:
            return local
        index, size = self.origin[0] + local, self.length // self.origin.shape[0]
        for n in range(1, self.origin.shape[0]):
            jump = self.origin[n] - self.origin[n - 1] - size
            index = index + (local >= n * size).astype(np.int32) * jump
        return index


class TileMask(NamedTuple):
    """A mask in the layout of tiles, axes padded to whole tiles; None = not given."""

    rules: Mask  # the static conditions
    rows: Tokens
    columns: Tokens
    elements: jax.Array | None  # [..., K|1, G|1, T|1, S|1]
    bias: jax.Array | None  # likewise
    places: mod_functions.Places | None = None  # what functions read beside row and column


def tile_mask(mask: Mask, bias: Any, sizes: Sizes, block_q: int = 1, block_k: int = 1) -> TileMask:
    """Lays the mask and the bias of a call out in tiles of that size."""
    _, T, S, _, groups = sizes
    batch_rank = len(sizes.batch)

    def plane(x):  # broadcasts to [..., N, T, S] -> [..., K|1, G|1, T|1, S|1], padded
        if x is None:
            return None
        return layout.pad(layout.plane(x, batch_rank, groups), {-2: block_q, -1: block_k})

    def tokens(length, block, position, segment, valid_length, origin=None):  # padding repeats the last one
        if position is None and not isinstance(length, int):
            position = to_rank(jnp.arange(length, dtype=jnp.int32), batch_rank + 1)
        position, segment = (None if x is None else layout.extend(x, block) for x in (position, segment))
        return Tokens(length, position, segment, valid_length, origin)

    # What is known of both sides, and the planes.
    queries = mask.query_positions, mask.query_segment_ids, mask.query_seq_lengths
    keys = mask.key_value_positions, mask.key_value_segment_ids, mask.key_value_seq_lengths
    return TileMask(
        mask.rules,
        tokens(T, block_q, *queries, mask.query_origin),
        tokens(S, block_k, *keys),
        plane(mask.elements),
        plane(bias),
        mod_functions.places(mask, batch_rank, groups),
    )


class _Laid(NamedTuple):
    """The tokens of a tile along one axis of `[..., K, G, rows, columns]`."""

    position: jax.Array
    segment: jax.Array | None
    valid: jax.Array | None


def _lay(tokens: Tokens, first: Any, size: Any, axis: int, rank: int) -> _Laid:
    """Lays `size` tokens from `first` on, None where they are all, along `axis` of a tile of that rank."""

    def lay(x):  # [..., size] -> [..., 1, 1, size, 1] or [..., 1, 1, 1, size]
        return to_rank(jnp.expand_dims(x, (-4, -3, -1) if axis == -2 else (-4, -3, -2)), rank)

    def take(x):
        return x if first is None else take_part(x, {-1: (first, size)})

    # Where each token stands: its index in the whole, or the position that it was given.
    local = jnp.arange(size, dtype=jnp.int32)
    local = local if first is None else first + local
    index = tokens.in_whole(local)
    position = index if tokens.position is None else take(tokens.position)
    segment = None if tokens.segment is None else lay(take(tokens.segment))

    # Which of them are within their length, and no padding of the last block.
    valid = None
    if tokens.valid_length is not None:
        length = tokens.valid_length[..., None]
        valid = lay(to_rank(index, length.ndim) < length)
    if first is not None and not (isinstance(tokens.length, int) and tokens.length % size == 0):
        valid = masks.conjunction(valid, lay(local < tokens.length))
    return _Laid(lay(position), segment, valid)


def positions(
    given: TileMask, row: Any, column: Any, blocks: tuple[Any, Any], rank: int
) -> tuple[jax.Array, jax.Array]:
    """Returns (rows, columns) of a tile as functions are handed them; padding repeats the last ones.

    `[..., 1, 1, rows, 1]` and `[..., 1, 1, 1, columns]`. It begins at `row` and `column`; with None for both
    those of the whole plane.
    """
    found = []
    sides = (given.rows, row, blocks[0], -2), (given.columns, column, blocks[1], -1)
    for tokens, at, block, axis in sides:
        position = _lay(tokens._replace(segment=None, valid_length=None), at, block, axis, rank).position
        if tokens.position is None and at is not None and tokens.length % block != 0:
            position = jnp.minimum(position, tokens.in_whole(jnp.int32(tokens.length - 1)))
        found.append(position)
    return found[0], found[1]


def _by_function(given: TileMask, row: Any, column: Any, blocks: tuple[Any, Any], rank: int) -> Any:
    """Returns what `mask_mod` lets a tile see, as `positions` tells it; None = all."""
    mask_mod = given.rules.mask_mod
    if mask_mod is None:
        return None
    return mod_functions.seen(mask_mod, given.places, *positions(given, row, column, blocks, rank))


def _elements(rules: Mask, mask: Any, bias: Any, row: _Laid | None, column: _Laid | None) -> Any:
    """Joins all conditions; None if all is seen. `row` and `column` are None in a full tile."""
    terms = [mask, None if bias is None else bias != -jnp.inf]
    if row is not None and column is not None:
        terms.append(masks.in_band(row.position, column.position, rules.is_causal, rules.window))
        terms += [row.valid, column.valid]
        if row.segment is not None:
            terms.append(row.segment == column.segment)
    return masks.conjunction(*terms)


def of_tile(
    given: TileMask, row: Any, column: Any, mixed: bool, blocks: tuple[int, int], rank: int
) -> jax.Array | None:
    """Tells which elements of a tile are seen, `[..., K|1, G|1, rows, columns]`; None if all.

    It begins at `row` and `column`, and has `rank` axes. Unless it is `mixed`, tokens see one another, and
    masks and biases alone decide.
    """
    at = {-2: (row, blocks[0]), -1: (column, blocks[1])}
    mask, bias = (None if x is None else take_part(x, at) for x in (given.elements, given.bias))
    rows = columns = None
    if mixed:
        rows = _lay(given.rows, row, blocks[0], -2, rank)
        columns = _lay(given.columns, column, blocks[1], -1, rank)
        mask = masks.conjunction(mask, _by_function(given, row, column, blocks, rank))
    return _elements(given.rules, mask, bias, rows, columns)


def of_plane(mask: Mask, bias: Any, sizes: Sizes) -> jax.Array | None:
    """Tells which elements of the whole plane are seen, `[..., K|1, G|1, T|1, S|1]`; None if all are.

    It is for those who hold arrays of that size anyway.
    """
    return of_whole(tile_mask(mask, bias, sizes), len(sizes.batch))


def of_whole(given: TileMask, batch_rank: int) -> jax.Array | None:
    """Does what `of_plane` does, of a mask in the layout of tiles that is not padded."""
    T, S, rank = given.rows.length, given.columns.length, batch_rank + 4
    row, column = _lay(given.rows, None, T, -2, rank), _lay(given.columns, None, S, -1, rank)
    mask = masks.conjunction(given.elements, _by_function(given, None, None, (T, S), rank))
    return _elements(given.rules, mask, given.bias, row, column)


def of_tiles(
    rules: Mask, rows: Tokens, columns: Tokens, block_q: int, block_k: int, places: Any = None
) -> tuple[Any, Any]:
    """Tells whether (some, every) element of each tile is seen, `[..., query tiles, key tiles]`, by tokens.

    NumPy arrays if shapes alone decide. `some` is never False for a tile in which something is seen, and
    exact for bands over indices; `every` is never True for one in which something is hidden but queries
    beyond their length, whose results are thrown away. A `mask_mod` reads its `mod_functions.Places`.
    """
    # What each block of rows and of columns ranges over: positions, segments, indices.
    (row, row_segment, row_range), (column, column_segment, column_range) = (
        _ranges(tokens, block, axis) for tokens, block, axis in ((rows, block_q, -1), (columns, block_k, -2))
    )
    known = [x for tokens in (rows, columns) for x in (tokens.position, tokens.segment) if x is not None]
    lengths = [x for x in (rows.valid_length, columns.valid_length) if x is not None]
    rank = max((2, *(x.ndim + 1 for x in known), *(x.ndim + 2 for x in lengths)))

    def to(pair):
        return to_rank(pair[0], rank), to_rank(pair[1], rank)

    # Bands compare positions: exact for indices.
    row, column, row_range, column_range = to(row), to(column), to(row_range), to(column_range)
    some, every = masks.tile_in_band(row, column, rules.is_causal, rules.window)
    grid = [count(tokens.length, block) for tokens, block in ((rows, block_q), (columns, block_k))]
    ones = (np if all(isinstance(n, int) for n in grid) else jnp).ones((*(1,) * (rank - 2), *grid), bool)
    some, every, by_function = some & ones, every & ones, None
    if rules.mask_mod is not None and places is not None:
        by_function = mod_functions.of_tiles(rules.mask_mod, places, row, column)

    # Lengths compare indices. A query beyond its length hides nothing: its result is thrown away.
    if rows.valid_length is not None:
        some = some & (row_range[0] < to_rank(rows.valid_length[..., None, None], rank))
    if columns.valid_length is not None:
        end = to_rank(columns.valid_length[..., None, None], rank)
        some, every = some & (column_range[0] < end), every & (column_range[1] < end)

    # Segments of two blocks may meet where their ranges do, and are one where both ranges are one number.
    if row_segment is not None and column_segment is not None:
        row, column = to(row_segment), to(column_segment)
        some = some & (row[0] <= column[1]) & (column[0] <= row[1])
        every = every & (row[0] == column[1]) & (column[0] == row[1])
    if by_function is not None:
        rank = max(rank, by_function.some.ndim)
        pairs = (some, by_function.some), (every, by_function.every)
        some, every = (to_rank(x, rank) & to_rank(y, rank) for x, y in pairs)
    return some, every & some


def live_elements(elements: jax.Array, block_q: int, block_k: int) -> jax.Array:
    """Tells whether any head of any batch entry sees an element of each tile, `[query tiles|1, key tiles|1]`.

    `elements [..., T|1, S|1]` are padded to whole tiles, and nothing of the padding is seen.
    """
    plane = elements.any(tuple(range(elements.ndim - 2)))
    for axis, block in ((0, block_q), (1, block_k)):
        if plane.shape[axis] != 1:
            shape = (*plane.shape[:axis], plane.shape[axis] // block, block, *plane.shape[axis + 1 :])
            plane = plane.reshape(shape).any(axis + 1)
    return plane


def known_tiles(given: TileMask, block_q: int, block_k: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """Returns (some, every) of `of_tiles` as far as shapes tell, and whether nothing more is known later."""
    rules, rows, columns = given.rules, given.rows, given.columns
    T, S = rows.length, columns.length
    some, every = of_tiles(rules, Tokens(T), Tokens(S), block_q, block_k)
    final = all(x is None for tokens in (rows, columns) for x in tokens[1:])
    by_index = all(x is None for x in (rows.position, rows.origin, columns.position))
    if not by_index:
        some = np.ones_like(some)
        every = np.full_like(every, not rules.is_banded)
    if rules.mask_mod is not None and given.places is not None:
        found = mod_functions.known_tiles(rules.mask_mod, given.places, (T, S), (block_q, block_k), by_index)
        some, every, final = some & found.some, every & found.every, final and found.final
    return some, every & some, final


def _ranges(tokens: Tokens, block: int, axis: int) -> tuple[Any, Any, Any]:
    """Returns (least, greatest) position, segment and index of each block, an axis of size 1 at `axis`."""
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

    index = tokens.in_whole(start)[lay], tokens.in_whole(last)[lay]
    segment = None if tokens.segment is None else ranges(tokens.segment)
    return index if tokens.position is None else ranges(tokens.position), segment, index


def used_queries_and_keys(mask: Mask, bias: Any, sizes: Sizes) -> tuple[Any, Any]:
    """Tells (which queries see a key, `[..., K|1, G|1, T]`; which keys a query sees, `[..., K|1, S]`).

    None = all. Both are exact, and in memory linear in T and S: block after block of queries is held against
    all keys, unless causality, windows and lengths alone decide, or an array that is reduced as it lies; with
    a `mask_mod`, tile after tile of those that are neither empty nor full.
    """
    _, T, S, _, _ = sizes
    # Indices, lengths and the diagonal have closed forms.
    if tells_by_index(mask, bias) or 0 in (T, S):
        live, seen = _by_index(mask, T, S, len(sizes.batch))
        return _unless_all(live), _unless_all(seen)
    if _tells_by_diagonal(mask, bias, T, S) and T == S:
        return None, None

    # An array that is there already, and a small plane, are reduced whole.
    plane: Any = partial(of_plane, mask, bias, sizes)
    sees = jax.eval_shape(plane)
    if sees is None:
        return None, None
    batch = math.prod(sees.shape[:-2])
    if _is_array(mask, bias):
        return _reduced(plane(), T, S)

    # Others are formed part by part.
    if all(isinstance(n, int) for n in (batch, T, S)) and batch * T * S > BLOCK_ELEMENTS:
        if mask.mask_mod is not None:
            return _tile_after_tile(mask, bias, sizes)
        return _block_after_block(mask, bias, sizes, max(1, BLOCK_ELEMENTS // (batch * S)))
    return _reduced(plane(), T, S)


def every_query_sees(options: Options, operands: Operands) -> bool:
    """Tells whether shapes alone say that each query sees a key."""
    batch, T, S, _, _ = operands.sizes
    mask, bias = operands.mask, operands.bias
    if options.score_mod is not None:  # which may give -inf
        return False
    if _tells_by_diagonal(mask, bias, T, S):
        return T <= S
    if not tells_by_index(mask, bias):
        return False
    live, _ = _by_index(mask, T, S, len(batch))
    return isinstance(live, np.ndarray) and bool(live.all())


def tells_by_index(mask: Mask, bias: Any) -> bool:
    """Tells whether who sees whom is a matter of indices and lengths alone."""
    others = bias is not None or mask.has("elements", "query_segment_ids", "mask_mod")
    return not others and not (mask.is_banded and mask.has_positions)


def _tells_by_diagonal(mask: Mask, bias: Any, T: Any, S: Any) -> bool:
    """Tells whether with a `mask_mod` each query certainly sees the key of its own index, if there is one."""
    if mask.mask_mod is None or bias is not None or not (isinstance(T, int) and isinstance(S, int)):
        return False
    if mask.has_positions or mask.has("elements", "query_origin", "query_segment_ids"):
        return False
    return not mask.has("query_seq_lengths", "key_value_seq_lengths") and mod_functions.sees_diagonal(mask)


def _is_array(mask: Mask, bias: Any) -> bool:
    """Tells whether an array alone decides: it is there already, its reductions take no memory."""
    others = "query_segment_ids", "mask_mod", "query_seq_lengths", "key_value_seq_lengths"
    alone = bias is None or not mask.has("elements")
    return alone and not mask.is_banded and not mask.has(*others)


def _by_index(mask: Mask, T: Any, S: Any, batch_rank: int) -> tuple[Any, Any]:
    """Tells who is used where a query sees an interval of keys, and a key is seen by one of queries.

    `used_queries_and_keys` by indices and lengths: is the interval empty?
    """
    far = 2**30
    left, right = mask.window or (far, far)
    left, right = min(left, far), 0 if mask.is_causal else min(right, far)

    def meets(index, others, before, after, end, other_end, other_first=0):
        """Tells whether each index finds one of the others in [index - before, index + after]."""
        known = all(isinstance(x, int | np.ndarray) for x in (index, others, other_first))
        least, greatest = (np if known else jnp).maximum(index - before, other_first), index + after
        greatest = (np if known else jnp).minimum(greatest, other_first + (others - 1))
        if other_end is not None:
            other_end = other_end[..., None]
            least, greatest = (to_rank(x, other_end.ndim) for x in (least, greatest))
            greatest = jnp.minimum(greatest, other_end - 1)
        found = least <= greatest
        if end is not None:
            end = end[..., None]
            found = to_rank(found, end.ndim) & (to_rank(index, end.ndim) < end)
        return to_rank(found, batch_rank + 1)

    # Queries may be stretches of the whole, keys never are: a key is seen if a query of any stretch sees it.
    q_end, k_end = mask.query_seq_lengths, mask.key_value_seq_lengths
    range_of = lambda n: (np if isinstance(n, int) else jnp).arange(n, dtype=np.int32)
    rows, columns = Tokens(T, origin=mask.query_origin).in_whole(range_of(T)), range_of(S)
    live = meets(rows, S, left, right, q_end, k_end)
    firsts = [0] if mask.query_origin is None else list(mask.query_origin)
    seen_of = lambda first: meets(columns, T // len(firsts), right, left, k_end, q_end, other_first=first)
    seen = functools.reduce(operator.or_, map(seen_of, firsts))
    return live[..., None, None, :], seen[..., None, :]


def _unless_all(x: Any) -> jax.Array | None:
    """Returns None in place of `x` if shapes alone tell that all is used.

    What lengths tell is compared once: XLA:CPU would compare anew for each number of a row that is selected.
    """
    if isinstance(x, np.ndarray):
        return None if x.all() else jnp.asarray(x)
    return fusion.kept_whole(x, may_be_gathered=True)


def _block_after_block(mask: Mask, bias: Any, sizes: Sizes, block: int) -> tuple[jax.Array, jax.Array]:
    """Tells what `used_queries_and_keys` does, `block` queries at a time."""
    _, T, S, _, _ = sizes
    origin = np.int32(0)
    found = tile_mask(mask, bias, sizes, block)

    def held(i):  # block i of the queries against all keys
        return _reduced(of_tile(found, i * block, origin, True, (block, S), len(sizes.batch) + 4), block, S)

    def step(seen, i):
        live, more = held(i)
        return seen | more, live

    # Which queries are live is told block by block; which keys are seen is the union.
    first, seen = held(origin)
    seen, others = lax.scan(step, seen, np.arange(1, count(T, block), dtype=np.int32))
    live = jnp.moveaxis(jnp.concatenate([first[None], others]), 0, -2)
    return live.reshape(*live.shape[:-2], -1)[..., :T], seen


def _tile_after_tile(mask: Mask, bias: Any, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """Tells what `used_queries_and_keys` does; empty tiles are passed over, full ones not looked into."""
    _, T, S, _, _ = sizes
    block_q, block_k = tile_sizes(mask.mask_mod, min(T, 256), min(S, 512))
    rank = len(sizes.batch) + 4
    found = tile_mask(mask, bias, sizes, block_q, block_k)

    # What bounds tell of each tile, of all batch entries together: 0 empty, 1 mixed, 2 full.
    some, every, final = known_tiles(found, block_q, block_k)
    pairs: Any = np.argwhere(some).astype(np.int32)
    if not final:
        lives, fulls = of_tiles(found.rules, found.rows, found.columns, block_q, block_k, found.places)
        batch = tuple(range(lives.ndim - 2))
        some, every = lives.any(batch), fulls.all(batch)
    if not all(x is None for x in (found.elements, found.bias, found.rows.valid_length)):
        every = every & False
    empty_mixed_full = some.astype(np.int32) + (some & every).astype(np.int32)

    # Both answers begin with False, padded to whole tiles.
    def held(row, column):
        return _reduced(of_tile(found, row, column, True, (block_q, block_k), rank), block_q, block_k)

    first = held(np.int32(0), np.int32(0))
    lengths = (count(T, block_q) * block_q, count(S, block_k) * block_k)
    none = tuple(
        full_like_operands(x, (*x.shape[:-1], n), False, bool, (mask, bias))
        for x, n in zip(first, lengths, strict=True)
    )

    # Tile (i, j) adds what it tells to block i of the queries and block j of the keys.
    def step(carry, x):
        i, j, kind = x
        row, column = i * block_q, j * block_k
        parts = {-1: (row, block_q)}, {-1: (column, block_k)}
        old = tuple(map(take_part, carry, parts))
        empty = lambda old: old
        mixed = lambda old: tuple(a | b for a, b in zip(old, held(row, column), strict=True))
        full = lambda old: tuple(x | True for x in old)
        new = lax.switch(kind, (empty, mixed, full), old)
        return tuple(map(put_part, carry, new, parts)), None

    i, j = pairs.T
    live, seen = lax.scan(step, none, (i, j, empty_mixed_full[i, j]))[0]
    return live[..., :T], seen[..., :S]


def _reduced(sees: jax.Array, T: Any, S: Any) -> tuple[jax.Array, jax.Array]:
    """Reduces `sees [..., K|1, G|1, T|1, S|1]` to (live queries, seen keys)."""
    live, seen = sees.any(-1), sees.any((-3, -2))
    return jnp.broadcast_to(live, (*live.shape[:-1], T)), jnp.broadcast_to(seen, (*seen.shape[:-1], S))
