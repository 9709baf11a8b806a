"""Dense attention tile by tile: the two passes, operands in the layout of tiles, which are visited and when.

Heads stand in front, grouped; sequences are padded to whole tiles.

The portable forward and backward scan one list of (i, j) tile pairs. Causality and windows over plain
indices, and what bounds tell of a `mask_mod` there, drop dead pairs from the list at trace time; where all
others are full nothing is compared, else every tile is mixed: its elements are compared one by one. Lengths,
segments, positions, arrays of a `mask_mod` and mask arrays are known at run time only: they give each pair a
live flag, and `lax.cond` skips dead ones. No loop has a traced trip count, so the scans have a reverse mode.
A bias of -inf gives none here, as it does in kernels: on two cores, at 4,096 tokens, flags took 1.06 of the
forward's time and 1.02 of a step's where a bias hid nothing.

Parts of the queries that are a batch axis walk in step. At each step all have the same query tile i, and each
a key tile j of its own list, or one that it does not see where its list is shorter than that of another. Of
parts that are folded (`_core.split`) each has its own list of pairs (i, j): all are about equally long.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import fusion, split, trees
from jax_attn_bwd._core.numerics import accumulator_dtype, moved, reduce_to, rounding_of
from jax_attn_bwd._core.pallas import vary_alike
from jax_attn_bwd._core.products import product
from jax_attn_bwd._core.remat import checkpoint
from jax_attn_bwd._core.sharding import full_like_operands
from jax_attn_bwd.ops.dot_product import layout, mod_functions, row_terms, visibility
from jax_attn_bwd.ops.dot_product import online_softmax as online
from jax_attn_bwd.ops.dot_product.block import Block, DropoutCounters, dropout_counters, scaled_product
from jax_attn_bwd.ops.dot_product.clean_operands import places, unpoisoned
from jax_attn_bwd.ops.dot_product.layout import put_part, take_part
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.online_softmax import State
from jax_attn_bwd.ops.dot_product.plan import Plan, Tiles, count
from jax_attn_bwd.ops.dot_product.spec import Operands, Options, Result, Wanted
from jax_attn_bwd.ops.dot_product.visibility import TileMask, Tokens

GROUP = 64  # tiles


@dataclass(eq=False)
class TileSource:
    """What tiles are cut from; queries that see nothing, and keys that nothing sees, are 0."""

    options: Options
    schedule: Tiles
    q: jax.Array  # [..., K, G, T, H]
    k: jax.Array  # [..., K, S, H]
    v: jax.Array  # [..., K, S, Hv]
    live: jax.Array | None  # [..., K|1, G|1, T] before padding, which queries see something; None = all
    mask: TileMask  # the bias is part of it
    counters: DropoutCounters | None  # with dropout

    @classmethod
    def of(cls, options: Options, schedule: Tiles, operands: Operands) -> "TileSource":
        """Brings the operands into the layout of tiles.

        Inside `jax.shard_map` all vary alike: a derivative by what is the same on all devices is a sum over
        them, and must not stand in a tile that some of them skip, where they would wait for the others for
        ever.
        """
        operands = vary_alike(operands)
        if operands.mask.elements is not None:
            # XLA would fold the padding and the reductions of a mask that is a constant of the program, which
            # takes it minutes for a few million elements.
            operands = operands.with_arrays({"elements": fusion.barrier(operands.mask.elements)})
        q, k, v, live = padded(options, schedule, operands)
        mask = visibility.tile_mask(operands.mask, operands.bias, operands.sizes, *schedule.blocks)
        if mask.elements is not None:  # padded once: XLA would do so for each of its readers
            mask = mask._replace(elements=fusion.barrier(mask.elements))
        counters = dropout_counters(options, operands, *schedule.blocks) if options.dropout_rate else None
        return cls(options, schedule, q, k, v, live, mask, counters)

    def rows(self, x: jax.Array, row: Any, axis: int = -1) -> jax.Array:
        """Takes the rows of the tiles that begin at `row`; `axis` is theirs."""
        return take_part(x, {axis: (row, self.schedule.block_q)})

    def tile(self, row: Any, column: Any, mixed: bool) -> Block:
        """Cuts out the tile that begins there; unless it is `mixed`, masks and biases alone hide elements."""
        options, schedule, given, dtype = self.options, self.schedule, self.mask, self.schedule.product_dtype
        columns = (column, schedule.block_k)
        q = self.rows(self.q, row, -2).astype(dtype)
        k, v = (take_part(x, {-2: columns}).astype(dtype) for x in (self.k, self.v))
        seen = visibility.of_tile(given, row, column, mixed, schedule.blocks, self.q.ndim)
        bias, at = given.bias, {-2: (row, schedule.block_q), -1: columns}
        bias = None if bias is None else take_part(bias, at)
        read = places(options, given, row, column, schedule.blocks, seen)
        return Block(options, q, k, v, bias, seen, *read, partial(self._factors, row, column))

    def _factors(self, row: Any, column: Any) -> jax.Array | None:
        """Draws the dropout factors of the tile that begins there; None = no dropout."""
        if self.counters is None:
            return None
        _, rows, columns = self.counters
        rows, columns = self.rows(rows, row), take_part(columns, {0: (column, self.schedule.block_k)})
        of_tile = self.counters._replace(rows=rows, columns=columns)
        dtype = accumulator_dtype(self.schedule.product_dtype)
        return of_tile.factors(self.options, dtype, drawn_once=False)

    def scan(
        self,
        run: Callable[..., Any],
        parts: Callable[..., Any],
        skip: Callable[..., Any] = lambda old, row, column: old,
        join: Callable[..., Any] = lambda old, found: found,
    ) -> tuple[Callable[..., Any], tuple[Any, ...] | None]:
        """Returns what `lax.scan` takes to visit the tiles: a body, and what it goes over; None = no tile.

        Where chosen blocks leave few tiles live, these come first, in order, and dead ones are passed over a
        group at a time.

        Args:
          run: `(old, row, column, mixed=)` computes the tile that begins there, with those parts of the sums
            that it adds to. It is computed again by a derivative of the scan.
          parts: `((row, block_q), (column, block_k))` tells which parts these are, a tree of `layout.Parts`.
          skip: does `(old, row, column)` where the tile is dead.
          join: `(old, found)` gives the new parts.
        """
        # One tile: the parts of the sums that it adds to, and what it makes of them.
        visits = tile_visits(self.mask, self.schedule)
        part = checkpoint(partial(run, mixed=visits.mixed), prevent_cse=False)

        def step(sums, visit):
            (i, j, live), (block_q, block_k) = visit, self.schedule.blocks
            row, column = i * block_q, j * block_k
            at = parts((row, block_q), (column, block_k))
            old = jax.tree.map(take_part, sums, at)
            found = part(old, row, column) if live is None else lax.cond(live, part, skip, old, row, column)
            return jax.tree.map(put_part, sums, join(old, found), at), None

        # All in order, or live ones first, in groups of which dead ones are passed over.
        tiles = visits.i, visits.j, visits.live
        if visits.i.shape[0] == 0:
            return step, None
        if not visits.in_groups:
            return step, tiles
        order = jnp.argsort(~visits.live, stable=True).astype(jnp.int32)
        padding = -len(visits.i) % GROUP
        in_groups = lambda x: jnp.pad(jnp.asarray(x)[order], (0, padding)).reshape(-1, GROUP)

        def group(carry, tiles):
            visit = lambda carry: lax.scan(step, carry, tiles)[0]
            return lax.cond(tiles[2][0], visit, lambda carry: carry, carry), None

        return group, tuple(map(in_groups, tiles))


def padded(
    options: Options, schedule: Tiles, operands: Operands
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Returns what `unpoisoned` does, queries, keys and values padded to whole tiles."""
    *arrays, live = unpoisoned(options, operands)
    blocks = (schedule.block_q, schedule.block_k, schedule.block_k)
    q, k, v = (layout.pad(x, {-2: block}) for x, block in zip(arrays, blocks, strict=True))
    return q, k, v, live


# The forward.


def forward(plan: Plan, schedule: Tiles, operands: Operands) -> Result:
    """Computes the result tile by tile."""
    # What each row keeps begins with the sink, if there is one, broadcast to [..., K, G, T].
    w, sink = TileSource.of(plan.options, schedule, operands), operands.sink
    if sink is not None:
        sink = sink.astype(accumulator_dtype(w.q.dtype)).reshape(*w.q.shape[-4:-2], 1)
    state = online.initial(w.q, w.v.shape[-1], sink, operands)
    rounds = schedule.product_dtype != state.acc.dtype and plan.rounding_matters
    sums = _RowSums(state, jnp.zeros_like(state.acc) if rounds else None)

    # Every tile of keys is folded into its rows; a dead one leaves them as they are.
    def parts(q, _):
        return _RowSums(State({-2: q}, {-1: q}, {-1: q}), {-2: q} if rounds else None)

    step, tiles = w.scan(partial(_update, w), parts)
    if tiles is not None:
        sums, _ = lax.scan(step, sums, tiles)

    # The output and its row values.
    state, out_rounding = sums
    T = operands.query.shape[-3]
    may_be_empty = w.live is not None or not isinstance(T, int) or T % schedule.block_q != 0
    out, lse, rounding = online.finished(state, may_be_empty)
    if out_rounding is not None:
        out_rounding = online.finished(state._replace(acc=out_rounding), may_be_empty)[0]
    return row_terms.of_forward(operands, plan.has_wide_out, out, out_rounding, lse, rounding)


class _RowSums(NamedTuple):
    """Sums of each row that the walk carries."""

    state: State
    rounding: jax.Array | None  # of `state.acc`, by rounding p; no one reads it but gradients that ask


def _update(w, sums, row, column, *, mixed):
    """Returns the sums of the rows with the keys of the tile that begins there."""
    # The logits of the tile, [..., K, G, block_q, block_k], -inf where unseen.
    rows, rounding = sums
    block = w.tile(row, column, mixed)
    logits, _ = block.logits(scaled_product(block, block.q, block.k))

    # The sums so far decay to the new maximum, and the tile's weights are added; dropout spares l.
    m, decay, p = online.weights(rows.m, logits)
    l, p, v = rows.l * decay + p.sum(-1), block.dropped(p), block.v
    add = lambda acc, p: acc * decay[..., None] + product("...gts,...sh->...gth", p, v, **block.product)
    if rounding is not None:
        rounding = add(rounding, rounding_of(p, v.dtype))
    return _RowSums(State(add(rows.acc, p.astype(v.dtype)), m, l), rounding)


# The backward.


def backward(
    plan: Plan, schedule: Tiles, wanted: Wanted, operands: Operands, result: Result, dout: Any, dlse: Any
) -> dict[str, Any]:
    """Computes the gradients named in `wanted`, in the accumulator's dtype, tile by tile."""
    # What all tiles read, padded to whole ones; rows that see nothing have a cotangent of 0.
    dout, delta = row_terms.of_backward(plan.options, operands, result, dout, dlse)
    w = TileSource.of(plan.options, schedule, operands)
    rows = row_terms.in_rows(result, w.live, dout, delta)
    rows = rows.map(lambda x, axis: layout.pad(x, {axis: schedule.block_q}))

    # Every tile adds its share to the sums; a dead one gives zeros. A branch that added, or transposed, would
    # make copies of what it is handed: it costs 5% of the time.
    sums = _zeros(wanted.names, w, (operands, rows), accumulator_dtype(operands.query.dtype))
    step, tiles = w.scan(
        partial(_share, w, rows),
        partial(_parts, sums),
        lambda old, row, column: jax.tree.map(jnp.zeros_like, _swapped(old)),
        lambda old, added: jax.tree.map(jnp.add, old, _swapped(added)),
    )
    if tiles is not None:
        sums, _ = lax.scan(step, sums, tiles)
    grads = _in_shapes_of(operands, w, sums)
    if "sink" in wanted.names:
        grads["sink"] = row_terms.gradient_of_sink(operands.sink, result, layout.merge_rows(delta))
    return grads


def _parts(sums: dict[str, Any], q: Any, k: Any) -> dict[str, Any]:
    """Tells which part of each sum a tile adds to, by its rows and columns: of what a score reads all."""
    parts = {"query": {-3: q}, "key": {-3: k}, "value": {-3: k}, "bias": {-2: q, -1: k}}
    whole = lambda x: jax.tree.map(lambda _: {}, x)
    return {name: parts[name] if name in parts else whole(x) for name, x in sums.items()}


def _in_shapes_of(operands: Operands, w: TileSource, sums: dict[str, Any]) -> dict[str, Any]:
    """Cuts the padding off the sums over the tiles, and reduces those of what broadcasts to its shape."""
    _, T, S, _, groups = operands.sizes
    lengths = {"query": T, "key": S, "value": S}
    grads = {name: sums[name][..., :length, :, :] for name, length in lengths.items() if name in sums}
    if "bias" in sums:
        bias = operands.bias
        assert bias is not None  # its gradient is asked for
        *_, t, s = layout.plane(bias, w.q.ndim - 4, groups).shape
        *batch, k, g, _, _ = sums["bias"].shape
        dbias = sums["bias"][..., :t, :s].reshape(*batch, k * g, t, s)
        grads["bias"] = reduce_to(dbias, bias.shape)
    if "mod_args" in sums:
        numbers = trees.floats(operands.mod_args)
        grads["mod_args"] = jax.tree.map(lambda x, like: reduce_to(x, like.shape), sums["mod_args"], numbers)
    return grads


def _zeros(wanted: frozenset[str], w: TileSource, operands: Any, dtype: Any) -> dict[str, jax.Array]:
    """Returns zeros that the tiles are summed into, by operand.

    Those of query, key and value have the caller's layout: they are the gradients then, and no copy is made.
    """
    # Of which array each sum has the sharding, and its shape.
    *batch, K, G, _, _ = w.q.shape
    arrays = layout.merge_heads(w.q), moved(w.k, -2, -3), moved(w.v, -2, -3)
    like = {name: (x, x.shape) for name, x in zip(("query", "key", "value"), arrays, strict=True)}
    if w.mask.bias is not None:
        shape = w.mask.bias.shape
        if 1 in shape[-2:]:  # small: leave the sum over the batch, maybe a collective, to the end
            shape = (*batch, *shape[-4:])
        like["bias"] = (w.q, shape)
    zeros: dict[str, Any] = {
        name: full_like_operands(x, shape, 0, dtype, operands)
        for name, (x, shape) in like.items()
        if name in wanted
    }

    # What a score reads has one for each batch entry and head, where these are small enough.
    if "mod_args" in wanted:
        assert w.mask.places is not None  # differentiated with a function
        lead = (*batch, K, G) if mod_functions.may_lie_apart(w.mask.places, w.q) else ()

        def zero(x):  # apart: the sum over batch and heads, maybe a collective, is left to the end
            like = w.q[..., :1, :1].sum((-2, -1)).reshape(*lead, *(1 for _ in x.shape)) if lead else x
            return full_like_operands(like, (*lead, *x.shape), 0, dtype, operands)

        zeros["mod_args"] = jax.tree.map(zero, trees.floats(w.mask.places.args))
    return zeros


def _swapped(shares):
    """Turns those of keys and values from the layout of tiles, `[..., K, S, H]`, to the caller's, or back."""
    swap = lambda name, x: moved(x, -2, -3) if name in ("key", "value") else x
    return {name: swap(name, x) for name, x in shares.items()}


def _share(w, rows, old, row, column, *, mixed):
    """Computes what a tile gives to each sum named in `old`; keys and values are `_swapped`."""
    # The tile's operands; its elements lie transposed, [..., K, S, G, T].
    block = w.tile(row, column, mixed).transposed()
    dout, lse, rounding, delta = rows.map(lambda x, axis: w.rows(x, row, axis))
    lse, rounding, delta = (x[..., None, :, :] for x in (lse, rounding, delta))

    # The probabilities again, from logits formed as in the forward and the row's lse.
    logits, of = block.logits(scaled_product(block, block.q, block.k))  # (1)
    p = jnp.exp((logits - lse) - rounding)  # (2)

    # What they give to the gradients, in the layout of the sums; arrays that no score reads get nothing.
    dout = dout.astype(block.v.dtype)
    dp = block.through_values(dout) if old.keys() != {"value"} else None
    apart = w.mask.places is not None and mod_functions.may_lie_apart(w.mask.places, w.q)
    share = block.gradients(old, p, dout, dp, delta, of, apart)
    if "mod_args" in old and "mod_args" not in share:
        share["mod_args"] = jax.tree.map(jnp.zeros_like, old["mod_args"])
    if "bias" in old:
        share["bias"] = reduce_to(share["bias"], old["bias"].shape)
    if "query" in old:
        share["query"] = layout.merge_heads(share["query"])
    return share


# Which tiles are visited.


class Visits(NamedTuple):
    """The tiles of a scan, in order.

    If one tile is mixed, all are compared: a second loop for the full ones would save no time, and cost that
    of compiling it.
    """

    i: Any  # int32 [n], tiles of queries
    j: Any  # int32 [n], tiles of keys
    live: Any  # bool [n]: False where the step skips its work; None = nothing is left to run time
    mixed: bool  # whether elements are compared
    in_groups: bool = False  # whether few are expected to be live


def tile_visits(given: TileMask, schedule: Tiles) -> Visits:
    """Lists the tiles in which something may be seen."""
    T, S = given.rows.length, given.columns.length
    if schedule.parts > 1:
        return _in_step(given, schedule)
    if not (isinstance(T, int) and isinstance(S, int)):  # symbolic
        n_k = count(S, schedule.block_k)
        pair = jnp.arange(count(T, schedule.block_q) * n_k, dtype=jnp.int32)
        i, j = pair // n_k, pair % n_k
        live = live_tiles(given, *schedule.blocks)
        assert live is not None  # shapes tell nothing
        return Visits(i, j, live[i, j], True)

    # What shapes tell leaves few pairs; where they do not tell all, each has a flag.
    full, mixed, _ = static_pairs(given, *schedule.blocks)
    i, j = np.concatenate([full, mixed]).T
    live = live_tiles(given, *schedule.blocks) if len(i) else None
    is_mixed, chosen = len(mixed) > 0 or live is not None, getattr(given.rules.mask_mod, "tile", None)
    in_groups = live is not None and chosen is not None and len(i) > GROUP
    return Visits(i, j, None if live is None else live[i, j], is_mixed, in_groups)


def live_tiles(given: TileMask, block_q: int, block_k: int) -> jax.Array | None:
    """Tells whether any batch entry sees anything of each tile, `[n_q, n_k]`; None if all is static."""
    T, S = given.rows.length, given.columns.length
    if isinstance(T, int) and isinstance(S, int) and static_pairs(given, block_q, block_k)[2]:
        return None
    some, _ = visibility.of_tiles(given.rules, given.rows, given.columns, block_q, block_k, given.places)
    some = jnp.asarray(some).any(tuple(range(some.ndim - 2)))
    if given.elements is None or not all(isinstance(n, int) for n in given.elements.shape):  # symbolic
        return some
    return some & visibility.live_elements(given.elements, block_q, block_k)


def static_pairs(given: TileMask, block_q: int, block_k: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """Lists (full, mixed) tiles to visit, each `[n, 2]` of (i, j), by shapes alone; do these tell all?

    Forward and backward ask the same, so what was found is kept.
    """
    is_given = lambda tokens: tuple(x is not None for x in tokens[1:])
    sides = given.rows.length, given.columns.length, is_given(given.rows), is_given(given.columns)
    read: Any = None
    tree = None  # what a `mask_mod` reads: the shapes tell what bounds do
    if given.rules.mask_mod is not None:
        types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given.places)
        read, tree = jax.tree.flatten(types)
        read = tuple(read)
    full, mixed, final = _pairs_of(given.rules, *sides, read, tree, block_q, block_k)
    return full, mixed, final and given.elements is None


@lru_cache(maxsize=256)
def _pairs_of(
    rules: Mask, T: int, S: int, rows: Any, columns: Any, read: Any, tree: Any, block_q: int, block_k: int
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Lists `static_pairs` by what alone they depend on: sizes, rules, and which arrays are given."""
    tokens = lambda length, flags: Tokens(length, *(True if flag else None for flag in flags))
    places = None if read is None else jax.tree.unflatten(tree, read)
    given = TileMask(rules, tokens(T, rows), tokens(S, columns), None, None, places)
    some, every, final = visibility.known_tiles(given, block_q, block_k)

    # A tile with padding is compared.
    i, j = np.indices(some.shape, np.int32)
    every = every & ((j + 1) * block_k <= S) & ((i + 1) * block_q <= T)
    pairs = np.stack([i, j], -1)
    return pairs[some & every], pairs[some & ~every], final


def _in_step(given: TileMask, schedule: Tiles) -> Visits:
    """Lists the tiles of one of the `schedule.parts` of the queries."""
    # What of each tile each part sees, as far as shapes tell, [parts, query tiles, key tiles].
    rows, columns, parts = given.rows, given.columns, schedule.parts
    T, folded = rows.length, rows.origin is not None and rows.origin.shape[0] > 1
    pieces = split.Pieces(parts, folded=folded)
    of_parts = [Tokens(T, origin=pieces.origins(part, T)) for part in range(parts)]
    keys = Tokens(columns.length)
    flags = [visibility.of_tiles(given.rules, tokens, keys, *schedule.blocks) for tokens in of_parts]
    some, every = (np.stack(x) for x in zip(*flags, strict=True))

    # That is a list of pairs for each part: this part's own, where they differ.
    of_part = lambda x: x[0] if (x == x[0]).all() else jnp.asarray(x)[lax.axis_index(split.AXIS)]
    if folded:
        seen = some.reshape(parts, -1)
        order = np.argsort(~seen, axis=-1, kind="stable")[:, : seen.sum(-1).max()].astype(np.int32)
        i, j, mixed = order // some.shape[2], order % some.shape[2], True
    else:
        i, j, mixed = _same_rows(given, some, every, schedule.blocks)
    if not len(j[0]):
        return Visits(j[0], j[0], None, mixed)
    query_tiles, own = of_part(i) if folded else i, of_part(j)

    # What is known at run time only leaves a tile dead where it is dead in all parts.
    given = given._replace(elements=None)  # what it leaves dead the devices would have to tell one another
    by_shapes = all(x is None for tokens in (rows._replace(origin=None), columns) for x in tokens[1:])
    if by_shapes and given.rules.mask_mod is None:
        return Visits(query_tiles, own, None, mixed)  # beside the origin nothing is known at run time only
    live = live_tiles(given, *schedule.blocks)
    if live is not None:
        live, mixed = lax.pmax(live[query_tiles, own].astype(jnp.int32), split.AXIS) > 0, True
    return Visits(query_tiles, own, live, mixed)


def _same_rows(
    given: TileMask, some: np.ndarray, every: np.ndarray, blocks: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Lists (i `[n]`, j `[parts, n]`, is one mixed) of tiles `[parts, query tiles, key tiles]`."""
    # What positions and a `mask_mod` leave is told at run time.
    rules, parts = given.rules, len(some)
    if given.rows.position is not None or given.columns.position is not None:
        some = np.ones_like(some)
        every = np.full_like(every, not rules.is_banded)
    every = every & (rules.mask_mod is None)

    # For each query tile as many key tiles as the part needs that sees most of them.
    lists = []
    for i in range(some.shape[1]):
        seen, longest = some[:, i], some[:, i].sum(-1).max()
        if (all_seen := seen.any(0)).sum() == longest:
            j = np.broadcast_to(np.flatnonzero(all_seen), (parts, longest))
        else:
            j = np.argsort(~seen, axis=-1, kind="stable")[:, :longest]
        lists.append((np.full(longest, i, np.int32), j.astype(np.int32)))
    rows, columns = (np.concatenate(x, -1) for x in zip(*lists, strict=True))

    # A tile with padding is compared.
    every = every & (np.arange(1, some.shape[2] + 1) * blocks[1] <= given.columns.length)
    every = every & (np.arange(1, some.shape[1] + 1)[:, None] * blocks[0] <= given.rows.length)
    return rows, columns, not every[np.arange(parts)[:, None], rows, columns].all()
