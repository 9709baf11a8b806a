"""Dense attention strip by strip, for GPUs: rows against all keys they see, keys against all rows that do.

The portable tiles read and write their sums once a tile. XLA:GPU keeps a product's result in memory unless
what follows is elementwise and read once, so bytes decide, and a strip has fewer of them:

* Forward: a strip of rows holds all its keys, so its softmax needs no sums from elsewhere. Logits of narrow
  factors are formed twice: for the rows' maxima and sums, in one kernel, and again to end in the
  probabilities, rounded. That is 12 bytes an element with what reads them; read back, it would be 16.
* Backward: a strip of keys holds all its rows, so dk and dv are whole. dq alone is summed over strips.
* Backward: p = exp(logits - lse) ends the product that its logits come from, and dlogits that of dp. There p
  is taken as it stands in memory: XLA widens nothing at the end of a product. So p stays wide, and is rounded
  by the product that gives dv.
* Which elements are seen is an array of one strip, not a comparison, and values of rows stand behind
  barriers: XLA takes arrays into the end of a product, but not what computes them. What a band hides is an
  array without batch and heads, what arrays of the call tell is another one.
* Batch and heads of a device are one axis: XLA:GPU computes products over one batch axis, and a reshape in
  between parts a product from what ends it. On an Explicit mesh each device runs strips of its own; how the
  arrays lie on an Auto mesh a trace does not tell, and there they stay two axes. The one axis is cut, too: a
  strip of a few heads that holds all rows and keys reads their operands once, and has no sums.

Strips of static extent have sizes of their own, known at trace time: for masks that shapes alone decide,
causality and windows over indices, and for planes of at most one tile, where arrays skip nothing.

Where arrays tell what is seen (segments, lengths, positions), a block of rows (in the backward, of keys)
meets the blocks of keys (of rows) from the first to the last in which something may be seen, and their number
is known at run time only. So `lax.switch` has a branch for each of a few widths, 1, 2, 3, 4, 6, 8, 12 ...
blocks, and the narrowest that holds them all is taken, within the plane. Its elements are compared one by
one: a strip that is too wide is never wrong, and segments need not be sorted.

* Such strips are a `lax.scan` of a length known at trace time, so a program has each width once. Masks that
  shapes alone decide take them, too, where strips of static extent would be too many to compile.
* Where segments and the like differ between batch entries, these are taken in turn, each with widths of its
  own: one width for all would be that of the widest. Entries are taken together where they are small, where
  they share segments, and on Auto meshes, where a trace does not tell which device has them.
* Heads of a wide strip are computed a few at a time, so memory is that of static strips.
* Arrays stay in the caller's layout: what cuts a strip out of them brings its heads to the front, too, and
  zeroes what no one sees, in the one pass that it takes anyway.

What one strip computes: `portable/strip_products.py`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jax_attn_bwd._core import fusion, masks
from jax_attn_bwd._core.numerics import accumulator_dtype, any_of_batch, to_rank
from jax_attn_bwd._core.pallas import on_local_shards, vary_alike
from jax_attn_bwd._core.sharding import explicit_spec, full_like_operands, match_type, varying
from jax_attn_bwd.ops.dot_product import layout, row_terms, visibility
from jax_attn_bwd.ops.dot_product.clean_operands import unpoisoned
from jax_attn_bwd.ops.dot_product.layout import Parts, put_part, take_part
from jax_attn_bwd.ops.dot_product.mask import AXES, Mask
from jax_attn_bwd.ops.dot_product.plan import SLICE_LOGITS, Plan, Strips, count, slices_of
from jax_attn_bwd.ops.dot_product.portable.strip_products import (
    after,
    attended,
    flat,
    merged,
    over_heads,
    shares,
)
from jax_attn_bwd.ops.dot_product.portable.tiles import static_pairs
from jax_attn_bwd.ops.dot_product.spec import Operands, Options, Result, Wanted
from jax_attn_bwd.ops.dot_product.visibility import TileMask, Tokens


def forward(plan: Plan, schedule: Strips, operands: Operands) -> Result:
    """Computes the output and its row values, a strip of rows after the other."""
    by = _forward_by_widths if schedule.runtime_extent else _forward_by_extents
    run = partial(by, plan.options, schedule)
    if not schedule.head_slices:
        return run(operands)
    rows: Any = PartitionSpec(*explicit_spec(operands.query)[:-1])
    return on_local_shards(run, lambda _: Result(rows, rows, rows), (operands,))


def backward(
    plan: Plan, schedule: Strips, wanted: Wanted, operands: Operands, result: Result, dout: Any, dlse: Any
) -> dict[str, Any]:
    """Computes the gradients named in `wanted`, a strip of keys after the other."""
    dout, delta = row_terms.of_backward(plan.options, operands, result, dout, dlse)
    names = wanted.names - {"sink"}
    by = _gradients_by_widths if schedule.runtime_extent else _gradients_by_extents
    run = partial(by, plan.options, schedule, names)
    given = operands, (result, dout, delta)
    if schedule.head_slices:
        specs = {name: PartitionSpec(*explicit_spec(operands.array(name))) for name in names}

        def on_a_device(operands, rows):
            return {name: match_type(x, operands.array(name)) for name, x in run(operands, rows).items()}

        grads = on_local_shards(on_a_device, lambda *_: specs, given)
    else:
        grads = run(*given)
    if "sink" in wanted.names:
        grads["sink"] = row_terms.gradient_of_sink(operands.sink, result, layout.merge_rows(delta))
    return grads


def _dtype_of_gradients(operands: Operands, alike: Operands) -> Any:
    """Returns that of the operands, or the accumulator's where there are sums over devices to come."""
    pairs = [(x, y) for x, y in zip(operands[:4], alike[:4], strict=True) if x is not None]
    is_alike = all(varying(x) == varying(y) for x, y in pairs)
    return operands.query.dtype if is_alike else accumulator_dtype(operands.query.dtype)


# Strips whose extent is known at trace time.


class Strip(NamedTuple):
    """Rows and columns of the plane, `(first, end)` each; whether some of its elements are hidden."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    mixed: bool


def strips(schedule: Strips, operands: Operands, axis: int) -> list[Strip]:
    """Lists the strips of the plane: one for each block of rows (`axis` 0) or columns (1), even if empty."""
    # Which tiles of these blocks bands over indices leave.
    blocks, ends = schedule.blocks, (operands.sizes.T, operands.sizes.S)
    rules = Mask() if operands.mask.has_positions else operands.mask.rules
    full, mixed, _ = static_pairs(visibility.tile_mask(rules, None, operands.sizes), *blocks)

    # A strip goes from the first to the last of them.
    pairs, found = np.concatenate([full, mixed]), []
    for number, start in enumerate(range(0, ends[axis], blocks[axis])):
        others = pairs[pairs[:, axis] == number][:, 1 - axis]
        block, end = blocks[1 - axis], ends[1 - axis]
        other = (
            (int(others.min()) * block, min((int(others.max()) + 1) * block, end)) if len(others) else (0, 0)
        )
        own = (start, min(start + blocks[axis], ends[axis]))
        rows, columns = (own, other) if axis == 0 else (other, own)
        found.append(Strip(rows, columns, bool((mixed[:, axis] == number).any())))
    return found


def _forward_by_extents(options: Options, schedule: Strips, operands: Operands) -> Result:
    """Computes the result of one device, some of its heads after the other."""
    # Operands with batch and heads in one axis, if these are those of one device: [..., K, G, T, H].
    operands = vary_alike(operands)
    q, k, v, _ = unpoisoned(options, operands)
    *batch, K, G, _, _ = q.shape
    sink = None
    if operands.sink is not None:
        sink = operands.sink.astype(accumulator_dtype(q.dtype)).reshape(K, G, 1, 1)
        sink = jnp.broadcast_to(sink, (*batch, K, G, 1, 1))
    given = jax.tree.map(lambda x: merged(schedule, x, len(batch)), (q, k, v, sink))

    # The rows of some heads, and those of all as the caller has them.
    run = partial(_rows, options, operands, strips(schedule, operands, 0))
    found = over_heads(schedule.head_slices, run, *given, mask_arrays(schedule, operands))
    as_given = lambda x: layout.merge_heads(x.reshape(*batch, K, G, *x.shape[-2:]))
    out, lse, rounding = map(as_given, found)
    return Result(out, lse[..., 0], rounding[..., 0])


def _rows(
    options: Options, operands: Operands, cut: list[Strip], q: Any, k: Any, v: Any, sink: Any, arrays: Any
) -> list[jax.Array]:
    """Computes (out `[..., K, G, T, Hv]`, lse, lse_rounding `[..., K, G, T, 1]`) of some heads."""
    found: list[Any] = []
    step = jax.checkpoint(partial(attended, options))
    for strip in cut:
        # Rows and keys of the strip, which wait for the strip before.
        shape = (*q.shape[:-2], strip.rows[1] - strip.rows[0])
        rows = lax.slice_in_dim(q, *strip.rows, axis=-2)
        rows, *keys = after((rows, k, v), found[-1:])
        rows, keys = flat(rows), [lax.slice_in_dim(x, *strip.columns, axis=-2) for x in keys]

        extra = None if sink is None else flat(jnp.broadcast_to(sink, (*shape, 1)))
        seen = _seen(operands, strip, arrays, q.shape[-3], q.ndim - 1)
        parts = step(rows, *keys, extra, seen)
        found.append([x.reshape(*shape, x.shape[-1]) for x in parts])
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, -2), *found)


def _gradients_by_extents(
    options: Options, schedule: Strips, wanted: frozenset[str], operands: Operands, rows: Any
) -> dict[str, Any]:
    """Computes the gradients of query, key and value of one device, some heads after the other."""
    # Operands and rows with batch and heads in one axis, if these are those of one device.
    (result, dout, delta), alike = rows, vary_alike(operands)
    dtype, operands = _dtype_of_gradients(operands, alike), alike
    q, k, v, live = unpoisoned(options, operands)
    *batch, K, G, _, _ = q.shape
    dout, *rows = row_terms.in_rows(result, live, dout, delta)
    whole = (q, k, v, dout.astype(v.dtype), *(x[..., None] for x in rows))
    given = *(merged(schedule, x, len(batch)) for x in whole), mask_arrays(schedule, operands)

    # The gradients of some heads, and those of all as the caller has them.
    run = partial(_gradients_of_heads, options, wanted, dtype, operands, strips(schedule, operands, 1))
    found = over_heads(schedule.head_slices, run, *given)
    own = {"query": 3, "key": 2, "value": 2}
    return layout.as_given({n: x.reshape(*batch, K, *x.shape[-own[n] :]) for n, x in found.items()})


def _gradients_of_heads(
    options: Options, wanted: frozenset[str], dtype: Any, operands: Operands, cut: list[Strip], *given: Any
) -> dict[str, Any]:
    """Computes those of query `[..., K, G, T, H]`, of key and value `[..., K, S, H]`, of some heads."""
    q, k, v, dout, lse, rounding, delta, arrays = given
    columns: dict[str, list[jax.Array]] = {name: [] for name in ("key", "value") if name in wanted}
    dq, step = None, jax.checkpoint(partial(shares, options, wanted))
    for strip in cut:
        # Keys and rows of the strip, which wait for the strip before.
        keys = [lax.slice_in_dim(x, *strip.columns, axis=-2) for x in (k, v)]
        rows = [flat(lax.slice_in_dim(x, *strip.rows, axis=-2)) for x in (q, dout, lse, rounding, delta)]
        keys, rows, dq = after((keys, rows, dq), (dq, [parts[-1:] for parts in columns.values()]))

        # dk and dv of its keys are whole, dq of its rows is a share.
        seen = _seen(operands, strip, arrays, q.shape[-3], q.ndim - 1)
        share = step(*keys, *rows, seen)
        for name, parts in columns.items():
            parts.append(share[name].astype(dtype))
        if "query" in wanted:
            dq = _added(dq, share["query"], strip, q, (operands, *given))
    found = {name: jnp.concatenate(parts, -2) for name, parts in columns.items()}
    return found if dq is None else found | {"query": dq.astype(dtype)}


def _added(dq: jax.Array | None, share: jax.Array, strip: Strip, q: jax.Array, operands: Any) -> jax.Array:
    """Adds to the sum what a strip gives to dq of its rows; None = nothing yet."""
    first, end = strip.rows
    share = share.reshape(*q.shape[:-2], end - first, q.shape[-1])
    if dq is None and end - first == q.shape[-2]:
        return share
    if dq is None:
        dq = full_like_operands(q, q.shape, 0, share.dtype, operands)
    return lax.dynamic_update_slice_in_dim(dq, lax.slice_in_dim(dq, *strip.rows, axis=-2) + share, first, -2)


def mask_arrays(schedule: Strips, operands: Operands) -> list[jax.Array]:
    """Lists the arrays that tell who sees whom, each `[*batch|1, K|1, G|1, T|1, S|1]`, `merged`."""
    # The array of the call, and what tokens tell; a band over indices is each strip's own.
    sizes, mask, found = operands.sizes, operands.mask, []
    if mask.elements is not None:
        found.append(layout.plane(mask.elements, len(sizes.batch), sizes.G))
    if mask.has(*AXES.keys() - {"elements"}):
        tokens = mask.replace(elements=None)
        if not mask.has_positions:
            tokens = tokens.replace(is_causal=False, window=None)
        seen = visibility.of_plane(tokens, None, sizes)
        found += [] if seen is None else [seen]

    # With batch and heads in one axis: whole, or of size 1.
    if schedule.head_slices:
        is_shared = lambda x: math.prod(x.shape[:-3]) == 1
        whole = lambda x: jnp.broadcast_to(x, (*sizes.batch, sizes.K, *x.shape[-3:]))
        found = [x if is_shared(x) else whole(x) for x in found]
    return [merged(schedule, x, len(sizes.batch)) for x in found]


def _seen(
    operands: Operands, strip: Strip, arrays: list[jax.Array], groups: int, rank: int
) -> list[jax.Array]:
    """Lists what tells the elements that are seen, `[..., groups * rows|1, columns|1]`; none if all are."""
    # What the band hides of this strip.
    seen, mask = [], operands.mask
    if strip.mixed and not mask.has_positions:
        row, column = (jnp.arange(*bounds, dtype=jnp.int32) for bounds in (strip.rows, strip.columns))
        row = jnp.tile(row, groups)
        band = masks.in_band(row[:, None], column[None], mask.is_causal, mask.window)
        if band is not None:  # else mixed for being shorter than a block
            seen.append(to_rank(band, rank))

    # What the arrays hide of it, rows of all groups in one axis.
    for x in arrays:
        for axis, bounds in ((-2, strip.rows), (-1, strip.columns)):
            x = x if x.shape[axis] == 1 else lax.slice_in_dim(x, *bounds, axis=axis)
        if x.shape[-3:-1] != (1, 1):
            x = jnp.broadcast_to(x, (*x.shape[:-3], groups, strip.rows[1] - strip.rows[0], x.shape[-1]))
        seen.append(flat(x))
    return fusion.barrier(seen) if seen else []


# Strips whose extent is told at run time: what they are cut from, and the walk over them.


class Stretch(NamedTuple):
    """A part of a sequence."""

    first: jax.Array
    size: int


class StripSource(NamedTuple):
    """The plane that strips are cut from, padded to whole blocks.

    Its arrays have the axes of the batch, or one of batch and heads. `lead` are the axes of batch and key
    heads, or the one of both.
    """

    schedule: Strips
    batch: tuple[int, ...]
    heads: tuple[int, int]  # of keys; of queries for each of these
    mask: TileMask
    live: jax.Array | None  # [..., T], which queries see something; None = all
    seen: jax.Array | None  # [..., S], which keys are seen

    @classmethod
    def of(cls, schedule: Strips, operands: Operands) -> "StripSource":
        """Lays out a call without functions, whose mask array, if there is one, hides keys alone."""
        sizes, blocks = operands.sizes, schedule.blocks
        given = visibility.tile_mask(operands.mask.with_segments_of_keys(), None, sizes, *blocks)
        source = cls(schedule, sizes.batch, (sizes.K, sizes.G), given, None, None)

        def tokens(x, block):
            length = x.valid_length
            if x.length % block:  # what lies beyond is padding
                length = jnp.minimum(jnp.int32(x.length), x.length if length is None else length)
            position, segment = (None if y is None else source.laid(y, 1) for y in (x.position, x.segment))
            return Tokens(x.length, position, segment, None if length is None else source.laid(length, 0))

        rows, columns = tokens(given.rows, blocks[0]), tokens(given.columns, blocks[1])
        # Which queries and keys are used is the same for all heads.
        found = visibility.used_queries_and_keys(operands.mask, operands.bias, sizes)
        live, seen = (
            None
            if x is None
            else source.laid(layout.pad(x.reshape(*x.shape[: len(sizes.batch)], -1), {-1: block}), 1)
            for x, block in zip(found, blocks, strict=True)
        )
        return source._replace(mask=TileMask(given.rules, rows, columns, None, None), live=live, seen=seen)

    @property
    def merges(self) -> bool:
        """Tells whether the axes of batch and heads are one."""
        return self.schedule.head_slices > 0

    def laid(self, x: jax.Array, own: int) -> jax.Array:
        """Puts the axes of the batch in one if they are to be; `x` has `own` axes behind them."""
        x = to_rank(x, len(self.batch) + own)
        if not self.merges:
            return x
        lead, sizes = x.shape[: len(self.batch)], x.shape[len(self.batch) :]
        return (x if math.prod(lead) == 1 else jnp.broadcast_to(x, (*self.batch, *sizes))).reshape(-1, *sizes)

    def given(self, x: jax.Array, axis: int) -> jax.Array:
        """Pads `x [..., n, heads, h]` of queries (`axis` 0) or of keys (1): strips are cut from it.

        With heads and what each has in one axis, if no device has a share of them: else XLA brings heads to
        the front of the whole array, one more pass over it.
        """
        x = self.laid(layout.pad(x, {-3: self.schedule.blocks[axis]}), 3)
        return x.reshape(*x.shape[:-2], -1) if self.merges else x

    def returned(self, x: jax.Array, length: int, groups: int) -> jax.Array:
        """Turns an array from the layout of `given` into `[*batch, length, heads, h]`."""
        heads = self.heads[0] * groups
        h = x.shape[-1] // heads if self.merges else x.shape[-1]
        return x.reshape(*self.batch, -1, heads, h)[..., :length, :, :]

    def parts(self, x: jax.Array, turn: jax.Array, stretch: Stretch, axis: int | None = None) -> Parts:
        """Tells where in `x`, laid like `given`, that stretch lies of the batch entries whose turn it is."""
        turns = self.schedule.head_slices
        entries = {0: (turn * (x.shape[0] // turns), x.shape[0] // turns)} if turns > 1 else {}
        axis = (-2 if self.merges else -3) if axis is None else axis
        return {**entries, x.ndim + axis: stretch}

    def rows(self, x: jax.Array, turn: jax.Array, stretch: Stretch) -> jax.Array:
        """Cuts `[*lead, G * n, h]` out of `x` of queries, 0 where these see nothing."""
        return self._cut(x, turn, stretch, self.live, self.heads[1])

    def columns(self, x: jax.Array, turn: jax.Array, stretch: Stretch) -> jax.Array:
        """Cuts `[*lead, n, h]` out of `x` of keys, 0 where these are not seen."""
        return self._cut(x, turn, stretch, self.seen, 1)

    def _cut(self, x: jax.Array, turn: jax.Array, stretch: Stretch, used: Any, groups: int) -> jax.Array:
        x = take_part(x, self.parts(x, turn, stretch))
        if self.merges:
            heads = self.heads[0] * groups
            x = x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)
        if used is not None:
            used = take_part(used, self.parts(used, turn, stretch, -1))
            x = jnp.where(used[..., None, None], x, 0)
        x = layout.split_heads(x, groups)
        *batch, K, _, n, h = x.shape
        lead = (math.prod(batch) * K,) if self.merges else (*batch, K)
        return x.reshape(*lead, groups * n, h)

    def for_rows(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """Repeats `x [N]` of each query head for rows like `[*lead, G * n, h]`: `[*lead, G * n, 1]`."""
        K, G = self.heads
        x = jnp.repeat(x.reshape(K, G), like.shape[-2] // G, 1)[..., None]
        entries = (like.shape[0] // K,) if self.merges else like.shape[:-3]
        return jnp.broadcast_to(x, (*entries, *x.shape)).reshape(*like.shape[:-1], 1)

    def as_given(self, x: jax.Array, groups: int) -> jax.Array:
        """Turns `x [*lead, groups * n, h]` into the layout of `given`."""
        *lead, n, h = x.shape
        lead = [lead[0] // self.heads[0], self.heads[0]] if self.merges else lead
        x = layout.merge_heads(x.reshape(*lead, groups, n // groups, h))
        return x.reshape(*x.shape[:-2], x.shape[-2] * h) if self.merges else x

    def where_seen(self, turn: jax.Array, rows: Stretch, columns: Stretch) -> jax.Array | None:
        """Tells which elements are seen, `[*lead|1, G * rows, columns]`; None = all."""

        # The strip's own tokens, compared as those of a plane.
        def window(tokens, stretch):
            take = lambda x: None if x is None else take_part(x, self.parts(x, turn, stretch, -1))
            length = tokens.valid_length
            length = None if length is None else take(length[..., None])[..., 0]
            return Tokens(
                stretch.size, take(tokens.position), take(tokens.segment), length, stretch.first[None]
            )

        sides, rank = (window(self.mask.rows, rows), window(self.mask.columns, columns)), len(self.batch)
        given = TileMask(self.mask.rules, *sides, None, None)
        seen = visibility.of_whole(given, 1 if self.merges else rank)
        if seen is None:
            return None

        # The same for all heads, and rows of all groups in one axis.
        seen = jnp.broadcast_to(seen[..., 0, :, :], (*seen.shape[:-3], rows.size, columns.size))
        seen = jnp.tile(seen, (1,) * (seen.ndim - 2) + (self.heads[1], 1))  # [..., 1, G * rows, columns]
        if self.merges:
            seen = seen[:, 0] if len(seen) == 1 else jnp.repeat(seen[:, 0], self.heads[0], 0)
        return fusion.barrier(seen)

    def of_heads(
        self, run: Callable[..., Any], arrays: Any, turn: Any, rows: Stretch, columns: Stretch
    ) -> Any:
        """Computes `run(*arrays, seen)`, of so many heads at a time as have room."""
        arrays, seen = fusion.barrier(arrays), self.where_seen(turn, rows, columns)
        heads = jax.tree.leaves(arrays)[0].shape[0]
        logits = heads * self.heads[1] * rows.size * columns.size
        slices = slices_of(heads, count(logits, SLICE_LOGITS)) if self.merges else 1
        if seen is None or len(seen) == 1:
            return over_heads(slices, lambda *some: run(*some, seen), *arrays)
        return over_heads(slices, run, *arrays, seen)


class Extents(NamedTuple):
    """The blocks that strips meet: `[turns, strips]` int32, NumPy arrays where shapes alone tell."""

    first: Any  # block
    width: Any  # which of these:
    widths: list[int]  # in blocks


def extents(source: StripSource, axis: int) -> Extents:
    """Finds those of the strips of rows (`axis` 0) or of keys (1).

    Four strips that meet blocks 0, 0 to 1, 1 to 2 and 2 to 3 have first 0 0 1 2 and, as widths are [1, 2],
    width 0 1 1 1.
    """
    # Which tiles any entry of a turn may see something of, [turns, query tiles, key tiles].
    given, turns, blocks = source.mask, source.schedule.head_slices, source.schedule.blocks
    live, _ = visibility.of_tiles(given.rules, given.rows, given.columns, *blocks)
    if turns > 1:
        live = live.reshape(turns, -1, *live.shape[-2:]).any(1)
    else:
        live = live.any(tuple(range(live.ndim - 2)))[None]

    # Each strip goes from the first to the last of them, in the narrowest of a few widths that holds all.
    is_known, others = isinstance(live, np.ndarray), live.shape[2 - axis]
    first, end = _met(live if is_known else any_of_batch(live), axis)
    least, most = _met(visibility.known_tiles(given, *blocks)[0][None], axis)  # by shapes alone
    widths = _widths(others, most - least, is_known)
    sizes, xp = np.asarray(widths, np.int32)[None, None], np if is_known else jnp
    is_less = sizes < (end - first)[..., None]
    size = xp.where(is_less, others, sizes).min(-1)
    return Extents(xp.clip(first, 0, others - size), is_less.sum(-1, dtype=np.int32), widths)


def _met(live: Any, axis: int) -> tuple[Any, Any]:
    """Returns (first, end) of the blocks that each strip meets, of `live [turns, query tiles, key tiles]`."""
    live, xp = live if axis == 0 else live.swapaxes(1, 2), np if isinstance(live, np.ndarray) else jnp
    number = np.arange(live.shape[-1], dtype=np.int32)[None, None]
    end = xp.where(live, number + 1, 0).max(-1)
    return xp.minimum(xp.where(live, number, live.shape[-1]).min(-1), end), end


def _widths(blocks: int, most: np.ndarray, is_known: bool) -> list[int]:
    """Lists how many of so many blocks strips take, which meet at `most` these: at most half more than that.

    Where it `is_known` that they do meet them, others are left out: each is a branch to compile.
    """
    some = {n for i in range(blocks.bit_length()) for n in (1 << i, 3 << i) if n < blocks} | {blocks}
    rounded = {min(n for n in some if n >= number) for number in most.flat}
    return sorted(rounded if is_known else {n for n in some if n <= max(rounded)})


def _walk(source: StripSource, axis: int, run: Callable[..., Any], sums: Any, found: Any) -> tuple[Any, Any]:
    """Returns `(sums, found)` after all strips of rows (`axis` 0) or of keys (1), one after the other.

    `run(turn, own, met, sums)` computes one of them; its own tokens and those that it meets are each a
    `Stretch`. It gives new sums, and what lies in `found`, arrays `[..., n, heads, h]`, at its own tokens.
    """
    # Strip i is one of the blocks of its side, in one of the turns of batch entries.
    first, width, widths = extents(source, axis)
    (turns, strips), blocks = first.shape, source.schedule.blocks
    own, other = blocks[axis], blocks[1 - axis]
    at = lambda x, i: take_part(jnp.asarray(x, jnp.int32).reshape(-1), {0: (i, 1)}).reshape(())

    def place(i):
        turn = i // strips if turns > 1 else jnp.zeros_like(i)
        return turn, Stretch((i - turn * strips) * own, own)

    # The narrowest width that holds all that strip i meets; each is a branch.
    def meeting(blocks, i, sums):  # finds its place itself: outside, that would be kernels of their own
        return run(*place(i), Stretch(at(first, i) * other, blocks * other), sums)

    @partial(jax.checkpoint, prevent_cse=False)
    def narrowest(i, sums):
        branches = [jax.checkpoint(partial(meeting, blocks)) for blocks in widths]
        return lax.switch(at(width, i), branches, i, sums)

    # What it computes is written at its own tokens.
    def step(carry, i):
        sums, part = narrowest(i, carry[0])
        groups = source.heads[1] if axis == 0 else 1
        put = lambda x, part: put_part(x, source.as_given(part, groups), source.parts(x, *place(i)))
        return (sums, jax.tree.map(put, carry[1], part)), None

    return lax.scan(step, (sums, found), np.arange(turns * strips, dtype=np.int32))[0]


def _forward_by_widths(options: Options, schedule: Strips, operands: Operands) -> Result:
    """Computes the result of one device."""
    # What strips are cut from.
    operands = vary_alike(operands)
    source, (_, T, _, _, G) = StripSource.of(schedule, operands), operands.sizes
    q, k, v = source.given(operands.query, 0), source.given(operands.key, 1), source.given(operands.value, 1)
    wide = accumulator_dtype(q.dtype)

    def run(turn, own, met, _):
        rows = source.rows(q, turn, own)
        sink = None if operands.sink is None else source.for_rows(operands.sink.astype(wide), rows)
        arrays = rows, source.columns(k, turn, met), source.columns(v, turn, met), sink
        return None, source.of_heads(partial(attended, options), arrays, turn, own, met)

    # Every strip writes its rows of the results, which begin empty.
    heads = operands.query.shape[-2] if source.merges else 1
    like = ((operands.value.shape[-1], q.dtype), (1, wide), (1, wide))
    empty = tuple(full_like_operands(q, (*q.shape[:-1], heads * n), 0, dtype, operands) for n, dtype in like)
    _, found = _walk(source, 0, run, None, empty)
    out, lse, rounding = (source.returned(x, T, G) for x in found)
    return Result(out, lse[..., 0], rounding[..., 0])


def _gradients_by_widths(
    options: Options, schedule: Strips, wanted: frozenset[str], operands: Operands, rows: Any
) -> dict[str, Any]:
    """Computes the gradients of query, key and value of one device."""
    # What strips are cut from: operands, and values of the rows.
    (result, dout, delta), alike = rows, vary_alike(operands)
    wide, dtype = accumulator_dtype(operands.query.dtype), _dtype_of_gradients(operands, alike)
    operands, source, (_, T, S, _, G) = alike, StripSource.of(schedule, alike), operands.sizes
    q, k, v = source.given(operands.query, 0), source.given(operands.key, 1), source.given(operands.value, 1)
    values = (x[..., None] for x in (*row_terms.finite_lse(result), layout.merge_rows(delta)))
    of_rows = [source.given(x, 0) for x in (layout.merge_heads(dout).astype(v.dtype), *values)]

    def run(turn, own, met, dq):
        keys = (source.columns(x, turn, own) for x in (k, v))
        arrays = *keys, *(source.rows(x, turn, met) for x in (q, *of_rows))
        share = source.of_heads(partial(shares, options, wanted), arrays, turn, met, own)
        if dq is not None:
            # Behind barriers: else the rows of dq are copied to the product that gives their share.
            share["query"] = source.as_given(fusion.barrier(share["query"]), G)
            parts = source.parts(dq, turn, Stretch(fusion.barrier(met.first), met.size))
            dq = put_part(dq, take_part(dq, parts) + share["query"], parts)
        return dq, {name: share[name].astype(dtype) for name in columns}

    # dk and dv of a strip's keys are whole, dq of its rows is added to.
    zeros = lambda x, dtype: full_like_operands(x, x.shape, 0, dtype, operands)
    columns = {name: zeros(x, dtype) for name, x in (("key", k), ("value", v)) if name in wanted}
    dq, found = _walk(source, 1, run, zeros(q, wide) if "query" in wanted else None, columns)
    grads = {name: source.returned(x, S, 1) for name, x in found.items()}
    return grads if dq is None else grads | {"query": source.returned(dq.astype(dtype), T, G)}
