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

What one strip computes: `strip_products.py`. Strips have sizes of their own here, known at trace time: this
is for masks that shapes alone decide, causality and windows over indices, and for planes of at most one tile,
where arrays skip nothing. Others: `strip_widths.py`.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jax_attn_bwd._core import fusion, masks
from jax_attn_bwd._core.numerics import accumulator_dtype, finite, to_rank
from jax_attn_bwd._core.pallas import on_local_shards, vary_alike
from jax_attn_bwd._core.sharding import explicit_spec, full_like_operands, match_type, varying
from jax_attn_bwd.ops.dot_product import layout, masking, strip_widths, tile_schedule
from jax_attn_bwd.ops.dot_product.mask import AXES, Mask
from jax_attn_bwd.ops.dot_product.plan import Plan
from jax_attn_bwd.ops.dot_product.spec import Operands, Result
from jax_attn_bwd.ops.dot_product.strip_products import (
    after,
    attended,
    few_heads_at_a_time,
    flat,
    merged,
    shares,
)
from jax_attn_bwd.ops.dot_product.tile_operands import unpoisoned


class Strip(NamedTuple):
    """Rows and columns of the plane, `(first, end)` each; whether some of its elements are hidden."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    mixed: bool


def strips(plan: Plan, operands: Operands, axis: int) -> list[Strip]:
    """The strips of the plane: one for each block of rows (`axis` 0) or of columns (1), even if empty."""
    batch, T, S, _, groups = operands.sizes
    blocks, ends = (plan.tiling.block_q, plan.tiling.block_k), (T, S)
    rules = Mask() if operands.mask.has_positions else operands.mask.rules
    given = masking.tile_mask(rules, None, T, S, len(batch), groups)
    full, mixed, _ = tile_schedule.static_pairs(given, plan.tiling)
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


def forward(plan: Plan, operands: Operands) -> Result:
    """The output and its row values, a strip of rows after the other."""
    run = partial(strip_widths.forward if plan.tiling.has_widths else _forward, plan)
    if not plan.tiling.head_slices:
        return run(operands)
    rows: Any = PartitionSpec(*explicit_spec(operands.query)[:-1])
    return on_local_shards(run, lambda _: Result(rows, rows, rows), (operands,))


def _forward(plan: Plan, operands: Operands) -> Result:
    operands = vary_alike(operands)
    q, k, v, _ = unpoisoned(plan.options, operands)
    *batch, K, G, _, _ = q.shape
    sink = None
    if operands.sink is not None:
        sink = operands.sink.astype(accumulator_dtype(q.dtype)).reshape(K, G, 1, 1)
        sink = jnp.broadcast_to(sink, (*batch, K, G, 1, 1))
    given = jax.tree.map(lambda x: merged(plan.tiling, x, len(batch)), (q, k, v, sink))
    given = *given, _told(plan, operands)
    found = few_heads_at_a_time(plan.tiling.head_slices, partial(_rows, plan, operands), given)
    out, lse, low = jax.tree.map(lambda x: layout.merge_heads(x.reshape(*batch, K, G, *x.shape[-2:])), found)
    return Result(out, lse[..., 0], low[..., 0])


def _rows(plan: Plan, operands: Operands, given: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(out `[..., K, G, T, Hv]`, lse, lse_low `[..., K, G, T, 1]`) of some heads."""
    q, k, v, sink, told = given
    found: list[Any] = []
    step = jax.checkpoint(partial(attended, plan.options))
    for strip in strips(plan, operands, 0):
        rows, shape = _part(q, -2, strip.rows), (*q.shape[:-2], strip.rows[1] - strip.rows[0])
        rows, *keys = after((rows, k, v), found[-1:])
        rows, keys = flat(rows), [_part(x, -2, strip.columns) for x in keys]
        extra = None if sink is None else flat(jnp.broadcast_to(sink, (*shape, 1)))
        parts = step(rows, *keys, extra, _seen(operands, strip, told, q.shape[-3], q.ndim - 1))
        found.append([x.reshape(*shape, x.shape[-1]) for x in parts])
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, -2), *found)


def gradients(
    plan: Plan, wanted: frozenset[str], operands: Operands, result: Result, dout: jax.Array, delta: jax.Array
) -> dict[str, Any]:
    """What `materialized.backward` gives of query, key and value, a strip of keys after the other."""
    run = partial(strip_widths.gradients if plan.tiling.has_widths else _gradients, plan, wanted)
    given = operands, result, dout, delta
    if not plan.tiling.head_slices:
        return run(*given)
    specs = {name: PartitionSpec(*explicit_spec(operands.array(name))) for name in wanted}

    def on_a_device(operands, *rows):
        return {name: match_type(x, operands.array(name)) for name, x in run(operands, *rows).items()}

    return on_local_shards(on_a_device, lambda *_: specs, given)


def _gradients(
    plan: Plan, wanted: frozenset[str], operands: Operands, result: Result, dout: jax.Array, delta: jax.Array
) -> dict[str, Any]:
    alike = vary_alike(operands)
    if any(varying(x) != varying(y) for x, y in zip(operands[:3], alike[:3], strict=True)):
        dtype = accumulator_dtype(operands.query.dtype)  # there are sums over devices to come
    else:
        dtype = operands.query.dtype
    q, k, v, live = unpoisoned(plan.options, operands := alike)
    *batch, K, G, _, _ = q.shape
    if live is not None:
        dout, delta = jnp.where(live[..., None], dout, 0), jnp.where(live, delta, 0)
    lse = finite(result.lse)
    low = jnp.zeros_like(lse) if result.lse_low is None else result.lse_low
    rows = (*(layout.split_rows(x, G) for x in (lse, low)), delta)
    whole = (q, k, v, dout.astype(v.dtype), *(x[..., None] for x in rows))
    given = *(merged(plan.tiling, x, len(batch)) for x in whole), _told(plan, operands)
    found = few_heads_at_a_time(
        plan.tiling.head_slices, partial(_gradients_of_heads, plan, wanted, dtype, operands), given
    )
    own = {"query": 3, "key": 2, "value": 2}
    found = {name: x.reshape(*batch, K, *x.shape[-own[name] :]) for name, x in found.items()}
    return {
        name: layout.merge_heads(x) if name == "query" else jnp.swapaxes(x, -2, -3)
        for name, x in found.items()
    }


def _gradients_of_heads(
    plan: Plan, wanted: frozenset[str], dtype: Any, operands: Operands, given: Any
) -> dict[str, Any]:
    """Those of query `[..., K, G, T, H]`, of key and value `[..., K, S, H]`, of some heads."""
    q, k, v, dout, lse, low, delta, told = given
    columns: dict[str, list[jax.Array]] = {name: [] for name in ("key", "value") if name in wanted}
    dq, step = None, jax.checkpoint(partial(shares, plan.options, wanted))
    for strip in strips(plan, operands, 1):
        keys = [_part(x, -2, strip.columns) for x in (k, v)]
        rows = [flat(_part(x, -2, strip.rows)) for x in (q, dout, lse, low, delta)]
        keys, rows, dq = after((keys, rows, dq), (dq, [parts[-1:] for parts in columns.values()]))
        share = step(*keys, *rows, _seen(operands, strip, told, q.shape[-3], q.ndim - 1))
        for name, parts in columns.items():
            parts.append(share[name].astype(dtype))
        if "query" in wanted:
            dq = _added(dq, share["query"], strip, q, (operands, *given))
    found = {name: jnp.concatenate(parts, -2) for name, parts in columns.items()}
    return found if dq is None else found | {"query": dq.astype(dtype)}


def _added(dq: jax.Array | None, share: jax.Array, strip: Strip, q: jax.Array, operands: Any) -> jax.Array:
    """The sum with what a strip gives to dq of its rows; None = nothing yet."""
    first, end = strip.rows
    share = share.reshape(*q.shape[:-2], end - first, q.shape[-1])
    if dq is None and end - first == q.shape[-2]:
        return share
    if dq is None:
        dq = full_like_operands(q, q.shape, 0, share.dtype, operands)
    return lax.dynamic_update_slice_in_dim(dq, _part(dq, -2, strip.rows) + share, first, -2)


def _part(x: jax.Array, axis: int, along: tuple[int, int]) -> jax.Array:
    return lax.slice_in_dim(x, *along, axis=axis)


def _told(plan: Plan, operands: Operands) -> list[jax.Array]:
    """What arrays tell of who sees whom, each `[*batch|1, K|1, G|1, T|1, S|1]`, batch and heads `merged`."""
    batch, T, S, K, groups = operands.sizes
    mask, found = operands.mask, []
    if mask.elements is not None:
        found.append(layout.plane(mask.elements, len(batch), groups))
    if mask.has(*AXES.keys() - {"elements"}):
        tokens = mask.replace(elements=None)
        if not mask.has_positions:  # the band is one of indices
            tokens = tokens.replace(is_causal=False, window=None)
        seen = masking.of_plane(tokens, None, T, S, len(batch), groups)
        found += [] if seen is None else [seen]
    if plan.tiling.head_slices:
        alone = lambda x: math.prod(x.shape[:-3]) == 1
        found = [x if alone(x) else jnp.broadcast_to(x, (*batch, K, *x.shape[-3:])) for x in found]
    return [merged(plan.tiling, x, len(batch)) for x in found]


def _seen(operands: Operands, strip: Strip, told: list[jax.Array], groups: int, rank: int) -> list[jax.Array]:
    """Which elements are seen, arrays `[groups * rows|1, columns|1]` with axes in front; none if all are."""
    seen, mask = [], operands.mask
    if strip.mixed and not mask.has_positions:
        row, column = (jnp.arange(*along, dtype=jnp.int32) for along in (strip.rows, strip.columns))
        row = jnp.tile(row, groups)
        band = masks.in_band(row[:, None], column[None], mask.is_causal, mask.window)
        if band is not None:  # else mixed for being shorter than a block
            seen.append(to_rank(band, rank))
    for x in told:
        for axis, along in ((-2, strip.rows), (-1, strip.columns)):
            x = x if x.shape[axis] == 1 else _part(x, axis, along)
        if x.shape[-3:-1] != (1, 1):
            x = jnp.broadcast_to(x, (*x.shape[:-3], groups, strip.rows[1] - strip.rows[0], x.shape[-1]))
        seen.append(flat(x))
    return fusion.barrier(seen) if seen else []
