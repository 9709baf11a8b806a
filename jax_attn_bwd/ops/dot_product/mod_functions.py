"""`mask_mod` and `score_mod`: the caller's own functions of where an element stands, on tiles of indices.

    visible_ts = mask_mod(batch, head, row, column, *mod_args)
    logits_ts  = score_mod(logits_ts, batch, head, row, column, *mod_args)

Indices are handed over as arrays that broadcast to the tile, so the functions are elementwise. Which tiles a
mask leaves alive is told by interval arithmetic on its jaxpr, without evaluating it on the plane. The
derivative of the caller's function is JAX's, tile by tile; nothing else is differentiated here.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_attn_bwd._core import diagonal, float_leaves, intervals, pallas
from jax_attn_bwd._core.double_where import guarded
from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd._core.sharding import reshard_like
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.spec import Options

APART = 1 << 20  # numbers: 4 MiB


class Places(NamedTuple):
    """What the functions read beside row and column."""

    batch: Any  # int32 [..., 1, 1, 1, 1]
    head: Any  # int32 [1..., K, G, 1, 1]
    args: tuple[Any, ...]


def places(mask: Mask, batch_rank: int, groups: int) -> Places | None:
    """The numbers that a mask tells, in the layout of tiles; None where no function is given."""
    if mask.batch_number is None:
        return None
    head = mask.head_number.reshape(-1, groups)
    batch, head = (to_rank(x, n) for x, n in ((mask.batch_number, batch_rank), (head, batch_rank + 2)))
    return Places(batch[..., None, None, None, None], head[..., None, None], mask.mod_args or ())


def seen(mask_mod: Any, at: Places | None, row: jax.Array, column: jax.Array) -> jax.Array | None:
    """What `mask_mod` lets be seen of a tile, in its rank; None = all."""
    if mask_mod is None:
        return None
    assert at is not None  # prepared with the function
    return to_rank(jnp.asarray(mask_mod(at.batch, at.head, row, column, *at.args)), at.batch.ndim)


def sees_diagonal(mask: Mask) -> bool:
    """Whether `mask_mod` certainly lets each row see the column of its own position."""
    assert mask.mask_mod is not None
    index = jax.ShapeDtypeStruct((), jnp.int32)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), mask.mod_args)
    return diagonal.is_true(mask.mask_mod, (index, index), index, args)


class Tile(NamedTuple):
    """Where the elements of a tile stand, all in one order of axes."""

    batch: jax.Array
    head: jax.Array
    row: jax.Array
    column: jax.Array
    seen: jax.Array | None  # which are; None = all


def scored(options: Options, logits: jax.Array, tile: Tile, args: tuple[Any, ...]) -> jax.Array:
    """`logits` of a tile through `score_mod`; where they are not seen anything, with derivative 0."""
    score, seen = options.score_mod, tile.seen
    if score is None:
        return logits
    elements = (logits, *tile[:4])
    return score(*elements, *args) if seen is None else guarded(score, seen, elements, args)


def pulled_back(
    options: Options, logits: jax.Array, tile: Tile, args: tuple[Any, ...], dlogits: jax.Array, to_args: bool
) -> tuple[jax.Array, Any]:
    """(cotangent of what `scored` was handed; that of the floats in `args`, None unless `to_args`)."""
    numbers = float_leaves.floats(args)
    of = lambda logits, numbers: scored(options, logits, tile, float_leaves.filled(args, numbers))
    if to_args:
        return jax.vjp(of, logits, numbers)[1](dlogits)
    return *jax.vjp(lambda logits: of(logits, numbers), logits)[1](dlogits), None


def pushed_forward(
    options: Options, logits: jax.Array, tile: Tile, args: tuple[Any, ...], dlogits: jax.Array, dargs: Any
) -> tuple[jax.Array, jax.Array]:
    """(what `scored` gives, its tangent) for tangents of the logits and of the floats in `args`; None = 0."""
    numbers = float_leaves.floats(args)
    of = lambda logits, numbers: scored(options, logits, tile, float_leaves.filled(args, numbers))
    if dargs is None:
        return jax.jvp(lambda logits: of(logits, numbers), (logits,), (dlogits,))
    return jax.jvp(of, (logits, numbers), (dlogits, dargs))


def tangents_of_args(args: Any, along: Any) -> Any:
    """Those of the floats in `args`, with zeros in place of None; None if all are zero."""
    if not jax.tree.leaves(along):
        return None
    zero = lambda t, x: t if t is not None or x is None else jnp.zeros_like(x)
    return jax.tree.map(zero, along, float_leaves.floats(args), is_leaf=lambda t: t is None)


def pulled_back_to(numbers: Any, read: Callable[..., Any], cotangents: Callable[..., Any]) -> Any:
    """The cotangent of `numbers` from `cotangents(read(numbers))`, of what the functions `read` of them."""
    found, pull_back = jax.vjp(read, numbers)
    return pull_back(cotangents(found))[0]


def pulled_back_apart(
    options: Options, logits: jax.Array, tile: Tile, args: tuple[Any, ...], dlogits: jax.Array, groups: int
) -> tuple[jax.Array, Any]:
    """`pulled_back` with the cotangent of each batch entry and head apart, `[..., K, G, *shape]`.

    Where these lie on several devices, their sum is the caller's to take once. `groups` is the axis of G.
    """
    axes = [*range(-logits.ndim, -4), -4, groups]

    def apart(*given):
        logits, dlogits, args, *tile = pallas.vary_alike(given)  # else each tile's share would be summed

        def of_head(logits, dlogits, *tile):
            places = Tile(*tile, *(None for _ in Tile._fields[len(tile) :]))
            return pulled_back(options, logits, places, args, dlogits, to_args=True)

        return _over(of_head, axes, (logits, dlogits, *tile))

    def out_specs(spec, dlogits, of_args, *tile):
        lead = [spec[axis] for axis in axes]
        specs = jax.tree.map(
            lambda x: PartitionSpec(*lead, *(None for _ in x.shape)), float_leaves.floats(args)
        )
        return spec, specs

    places = (reshard_like(x, logits, range(logits.ndim)) for x in tile if x is not None)
    return pallas.on_local_shards(apart, out_specs, (logits, dlogits, args, *places))


def _over(f: Callable[..., Any], axes: list[int], arrays: tuple[Any, ...]) -> Any:
    """`f` of each entry along `axes`, of which all arrays but the first two may have size 1."""
    if not axes:
        return f(*arrays)
    axis, *rest = axes
    along = [axis if i < 2 or x.shape[axis] != 1 else None for i, x in enumerate(arrays)]
    arrays = tuple(jnp.squeeze(x, axis) if a is None else x for x, a in zip(arrays, along, strict=True))
    return jax.vmap(lambda *xs: _over(f, rest, xs), tuple(along), (axis, 0))(*arrays)


def may_lie_apart(at: Places, q: jax.Array) -> bool:
    """Whether there is room for the cotangents of each batch entry and head of q `[..., K, G, T, H]`."""
    sizes = [x.size for x in jax.tree.leaves(float_leaves.floats(at.args))]
    known = all(isinstance(n, int) for n in (*q.shape, *sizes))
    return known and math.prod(q.shape[:-2]) * sum(sizes) <= APART


class Tiles(NamedTuple):
    """What bounds tell of each tile, `[..., query tiles, key tiles]`; NumPy where known at trace time."""

    some: Any  # False: nothing is seen
    every: Any  # True: all is seen
    final: bool  # whether nothing more can be known at run time


def of_tiles(mask_mod: Callable[..., Any], at: Places, row: Any, column: Any) -> Tiles:
    """The tiles by (least, greatest) row `[..., query tiles, 1]` and column `[..., 1, key tiles]`."""
    rank = at.batch.ndim

    def laid(pair):
        between = (x.reshape(*x.shape[:-2], 1, 1, *x.shape[-2:]) for x in pair)
        return intervals.Interval(*(to_rank(x, rank) for x in between))

    as_interval = lambda x: x if isinstance(x, intervals.Interval) else intervals.exact(x)
    row, column, exact = laid(row), laid(column), jax.tree.map(as_interval, at)
    found = intervals.bounds(mask_mod, exact.batch, exact.head, row, column, *exact.args)
    return _of_all_heads(found, rank)


def known_tiles(
    mask_mod: Callable[..., Any],
    at: Places,
    lengths: tuple[int, int],
    blocks: tuple[int, int],
    by_index: bool,
) -> Tiles:
    """The same at trace time, where no array is known; nor are positions, unless they are indices."""
    rank = at.batch.ndim
    vague = jax.tree.map(lambda x: intervals.unknown(x.shape, x.dtype, vague=True), at)
    ranges = []
    for n, block, axis in zip(lengths, blocks, (-2, -1), strict=True):
        start = np.arange(0, n, block, dtype=np.int32)
        shape = [1] * rank
        shape[axis] = len(start)
        last = np.minimum(start + np.int32(block), np.int32(n)) - np.int32(1)
        known = intervals.Interval(start.reshape(shape), last.reshape(shape))
        ranges.append(known if by_index else intervals.unknown(shape, np.int32, vague=True))
    found = intervals.bounds(mask_mod, vague.batch, vague.head, *ranges, *vague.args)
    some, every, final = _of_all_heads(found, rank)
    grid = tuple(-(-n // block) for n, block in zip(lengths, blocks, strict=True))
    lead = tuple(range(some.ndim - 2))
    some, every = (np.broadcast_to(x, grid) for x in (some.any(lead), every.all(lead)))
    return Tiles(some, every, final)


def _of_all_heads(found: intervals.Interval, rank: int) -> Tiles:
    least, greatest = (to_rank(x, rank) for x in (found.least, found.greatest))
    return Tiles(greatest.any((-4, -3)), least.all((-4, -3)), not found.vague)
