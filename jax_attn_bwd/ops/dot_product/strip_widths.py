"""Dense attention strip by strip, for GPUs, where arrays tell what is seen: segments, lengths, positions.

A strip of `strips.py` has a size that is known at trace time. Here a block of rows (in the backward, of keys)
meets the blocks of keys (of rows) from the first to the last in which something may be seen, and their number
is known at run time only. So `lax.switch` has a branch for each of a few widths, 1, 2, 3, 4, 6, 8, 12 ...
blocks, and the narrowest that holds them all is taken, within the plane. Its elements are compared one by
one: a strip that is too wide is never wrong, and segments need not be sorted.

* Strips are a `lax.scan` of a length known at trace time, so a program has each width once. Masks that shapes
  alone decide come here, too, where `strips.py` would have too many of them to compile.
* Where segments and the like differ between batch entries, these are taken in turn, each with widths of its
  own: one width for all would be that of the widest. Entries are taken together where they are small, where
  they share segments, and on Auto meshes, where a trace does not tell which device has them.
* Heads of a wide strip are computed a few at a time, so memory is that of `strips.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from jax_attn_bwd._core import fusion
from jax_attn_bwd._core.numerics import accumulator_dtype, finite
from jax_attn_bwd._core.pallas import vary_alike
from jax_attn_bwd._core.sharding import full_like_operands, varying
from jax_attn_bwd._core.slicing import put_part, take_part
from jax_attn_bwd.ops.dot_product import layout, masking
from jax_attn_bwd.ops.dot_product.plan import Plan
from jax_attn_bwd.ops.dot_product.spec import Operands, Result
from jax_attn_bwd.ops.dot_product.strip_plane import Along, Plane
from jax_attn_bwd.ops.dot_product.strip_products import attended, few_heads_at_a_time, shares
from jax_attn_bwd.ops.dot_product.tiling import SLICE_LOGITS, count, slices_of


class Extents(NamedTuple):
    """What strips meet: `[turns, strips]` int32, NumPy arrays where shapes alone tell."""

    first: Any  # block
    width: Any  # which of these:
    widths: list[int]  # in blocks


def extents(plane: Plane, axis: int) -> Extents:
    """Those of the strips of rows (`axis` 0) or of keys (1)."""
    given, turns, blocks = plane.mask, plane.tiling.head_slices, (plane.tiling.block_q, plane.tiling.block_k)
    live, _ = masking.of_tiles(given.rules, given.rows, given.columns, *blocks)
    if turns > 1:
        live = live.reshape(turns, -1, *live.shape[-2:]).any(1)
    else:
        live = live.any(tuple(range(live.ndim - 2)))[None]
    is_known, others = isinstance(live, np.ndarray), live.shape[2 - axis]
    first, end = _met(live if is_known else _of_all(live), axis)
    least, most = _met(masking.known_tiles(given, *blocks)[0][None], axis)  # by shapes alone
    widths = _widths(others, most - least, is_known)
    sizes, xp = np.asarray(widths, np.int32)[None, None], np if is_known else jnp
    is_less = sizes < (end - first)[..., None]
    size = xp.where(is_less, others, sizes).min(-1)
    return Extents(xp.clip(first, 0, others - size), is_less.sum(-1, dtype=np.int32), widths)


def _met(live: Any, axis: int) -> tuple[Any, Any]:
    """(first, end) of the blocks that each strip meets, of `live [turns, query tiles, key tiles]`."""
    live, xp = live if axis == 0 else live.swapaxes(1, 2), np if isinstance(live, np.ndarray) else jnp
    number = np.arange(live.shape[-1], dtype=np.int32)[None, None]
    end = xp.where(live, number + 1, 0).max(-1)
    return xp.minimum(xp.where(live, number, live.shape[-1]).min(-1), end), end


def _widths(blocks: int, most: np.ndarray, is_known: bool) -> list[int]:
    """How many of so many blocks strips may meet, which meet at `most` these: at most half more than that.

    Where it `is_known` that they do meet them, others are left out: each is a branch to compile.
    """
    some = {n for i in range(blocks.bit_length()) for n in (1 << i, 3 << i) if n < blocks} | {blocks}
    rounded = {min(n for n in some if n >= number) for number in most.flat}
    return sorted(rounded if is_known else {n for n in some if n <= max(rounded)})


@custom_vmap
def _of_all(live: jax.Array) -> jax.Array:
    """`live`; under `vmap` where any is: branches taken apart for each would all be computed."""
    return live


@_of_all.def_vmap
def _of_all_of_batch(size: int, in_batched: list[bool], live: jax.Array) -> tuple[jax.Array, bool]:
    return _of_all(live.any(0) if in_batched[0] else live), False


def _walk(plane: Plane, axis: int, run: Callable[..., Any], sums: Any, found: Any) -> tuple[Any, Any]:
    """`(sums, found)` after all strips of rows (`axis` 0) or of keys (1), one after the other.

    `run(turn, own, met, sums)` computes one of them, its own tokens and those that it meets `Along` the
    sequences. It gives new sums, and what lies in `found`, arrays `[..., n, heads, h]`, at its own tokens.
    """
    first, width, widths = extents(plane, axis)
    (turns, strips), (own, other) = first.shape, (plane.tiling.block_q, plane.tiling.block_k)[:: 1 - 2 * axis]
    at = lambda x, i: take_part(jnp.asarray(x, jnp.int32).reshape(-1), {0: (i, 1)}).reshape(())

    def place(i):
        turn = i // strips if turns > 1 else jnp.zeros_like(i)
        return turn, Along((i - turn * strips) * own, own)

    def meeting(blocks, i, sums):  # finds its place itself: outside, that would be kernels of their own
        return run(*place(i), Along(at(first, i) * other, blocks * other), sums)

    @partial(jax.checkpoint, prevent_cse=False)
    def narrowest(i, sums):
        branches = [jax.checkpoint(partial(meeting, blocks)) for blocks in widths]
        return lax.switch(at(width, i), branches, i, sums)

    def step(carry, i):
        sums, part = narrowest(i, carry[0])
        groups = plane.heads[1] if axis == 0 else 1
        put = lambda x, part: put_part(x, plane.as_given(part, groups), plane.parts(x, *place(i)))
        return (sums, jax.tree.map(put, carry[1], part)), None

    return lax.scan(step, (sums, found), np.arange(turns * strips, dtype=np.int32))[0]


def forward(plan: Plan, operands: Operands) -> Result:
    """The output and its row values, a strip of rows after the other."""
    operands = vary_alike(operands)
    plane, (_, T, _, _, G) = Plane.of(plan.tiling, operands), operands.sizes
    q, k, v = plane.given(operands.query, 0), plane.given(operands.key, 1), plane.given(operands.value, 1)
    wide = accumulator_dtype(q.dtype)

    def run(turn, own, met, _):
        rows = plane.rows(q, turn, own)
        sink = None if operands.sink is None else plane.of_rows(operands.sink.astype(wide), rows)
        arrays = rows, plane.columns(k, turn, met), plane.columns(v, turn, met), sink
        return None, _of_heads(plane, partial(attended, plan.options), arrays, turn, own, met)

    heads = operands.query.shape[-2] if plane.merges else 1
    like = ((operands.value.shape[-1], q.dtype), (1, wide), (1, wide))
    empty = tuple(full_like_operands(q, (*q.shape[:-1], heads * n), 0, dtype, operands) for n, dtype in like)
    _, found = _walk(plane, 0, run, None, empty)
    out, lse, low = (plane.returned(x, T, G) for x in found)
    return Result(out, lse[..., 0], low[..., 0])


def _of_heads(
    plane: Plane, run: Callable[..., Any], arrays: Any, turn: jax.Array, rows: Along, columns: Along
) -> Any:
    """`run(*arrays, seen)`, of so many heads at a time as have room."""
    arrays, seen = fusion.barrier(arrays), plane.where_seen(turn, rows, columns)
    if not plane.merges:
        return run(*arrays, seen)
    heads = jax.tree.leaves(arrays)[0].shape[0]
    slices = slices_of(heads, count(heads * plane.heads[1] * rows.size * columns.size, SLICE_LOGITS))
    if seen is None or len(seen) == 1:
        return few_heads_at_a_time(slices, lambda few: run(*few, seen), arrays)
    return few_heads_at_a_time(slices, lambda few: run(*few), (*arrays, seen))


def gradients(
    plan: Plan, wanted: frozenset[str], operands: Operands, result: Result, dout: jax.Array, delta: jax.Array
) -> dict[str, Any]:
    """What `materialized.backward` gives of query, key and value, a strip of keys after the other."""
    alike = vary_alike(operands)
    is_alike = all(varying(x) == varying(y) for x, y in zip(operands[:3], alike[:3], strict=True))
    wide = accumulator_dtype(operands.query.dtype)
    dtype = operands.query.dtype if is_alike else wide  # else there are sums over devices to come
    operands, plane, (_, T, S, _, G) = alike, Plane.of(plan.tiling, alike), operands.sizes
    q, k, v = plane.given(operands.query, 0), plane.given(operands.key, 1), plane.given(operands.value, 1)
    lse = finite(result.lse)
    low = jnp.zeros_like(lse) if result.lse_low is None else result.lse_low
    values = (x[..., None] for x in (lse, low, layout.merge_rows(delta)))
    rows = [plane.given(x, 0) for x in (layout.merge_heads(dout).astype(v.dtype), *values)]

    def run(turn, own, met, dq):
        keys = (plane.columns(x, turn, own) for x in (k, v))
        arrays = *keys, *(plane.rows(x, turn, met) for x in (q, *rows))
        share = _of_heads(plane, partial(shares, plan.options, wanted), arrays, turn, met, own)
        if dq is not None:
            # Behind barriers: else the rows of dq are copied to the product that gives their share.
            share["query"] = plane.as_given(fusion.barrier(share["query"]), G)
            parts = plane.parts(dq, turn, Along(fusion.barrier(met.first), met.size))
            dq = put_part(dq, take_part(dq, parts) + share["query"], parts)
        return dq, {name: share[name].astype(dtype) for name in columns}

    zeros = lambda x, dtype: full_like_operands(x, x.shape, 0, dtype, operands)
    columns = {name: zeros(x, dtype) for name, x in (("key", k), ("value", v)) if name in wanted}
    dq, found = _walk(plane, 1, run, zeros(q, wide) if "query" in wanted else None, columns)
    grads = {name: plane.returned(x, S, 1) for name, x in found.items()}
    return grads if dq is None else grads | {"query": plane.returned(dq.astype(dtype), T, G)}
