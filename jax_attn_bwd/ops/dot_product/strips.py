"""Dense attention strip by strip, for GPUs: rows against all keys they see, keys against all rows that do.

The portable tiles read and write their sums once a tile. XLA:GPU keeps a product's result in memory unless
what follows is elementwise and read once, so bytes decide, and a strip has fewer of them:

* Forward: a strip of rows holds all its keys, so its softmax needs no sums from elsewhere.
* Backward: a strip of keys holds all its rows, so dk and dv are whole. dq alone is summed over strips.
* Backward: p = exp(logits - lse) is rounded to the dtype of the operands at once, so it ends the product that
  its logits come from, and no wide logits reach memory. (dlogits rounds p and itself, as a product of narrow
  factors would end that of dp too: 6 bytes an element less, and gradients more than twice as wrong.)
* Which elements are seen is an array of one strip without batch and heads, not a comparison: XLA takes an
  array into the end of a product, and no comparison of indices.
* Batch and heads are one axis where no device can have a share of them: XLA:GPU computes products over one
  batch axis, and a reshape in between parts a product from what ends it.

Equation numbers are those of `backward.py`. Strips have sizes of their own, known at trace time, so this is
for masks that shapes alone decide: causality and windows over plain indices.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import fusion, masks
from jax_attn_bwd._core.numerics import accumulator_dtype, finite, to_rank
from jax_attn_bwd._core.pallas import vary_alike
from jax_attn_bwd._core.sharding import full_like_operands
from jax_attn_bwd.ops.dot_product import layout, masking, row_terms, tile_schedule
from jax_attn_bwd.ops.dot_product import online_softmax as online
from jax_attn_bwd.ops.dot_product.logits import soft_capped
from jax_attn_bwd.ops.dot_product.plan import Plan
from jax_attn_bwd.ops.dot_product.spec import Operands, Options, Result
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
    given = masking.tile_mask(operands.mask, None, T, S, len(batch), groups)
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
    operands = vary_alike(operands)
    q, k, v, live = unpoisoned(plan.options, operands)
    *batch, K, G, _, _ = q.shape
    q, k, v = (_merged(plan, x, len(batch)) for x in (q, k, v))
    dtype, sink = accumulator_dtype(q.dtype), None
    found: list[Result] = []
    if operands.sink is not None:
        sink = jnp.broadcast_to(operands.sink.astype(dtype).reshape(K, G, 1), (*batch, K, G, 1))
        sink = _merged(plan, sink, len(batch))
    step = jax.checkpoint(partial(_attended, plan.options))
    for strip in strips(plan, operands, 0):
        rows = _part(q, -2, strip.rows)
        state = online.initial(rows, v.shape[-1], sink, operands)
        state = online.State(*(_flat(x, axis) for x, axis in zip(state, (-2, -1, -1), strict=True)))
        if strip.columns[0] < strip.columns[1]:
            rows, found[-1:] = fusion.barrier((rows, found[-1:]))  # else all strips run at once
            keys = (_part(x, -2, strip.columns) for x in (k, v))
            state = step(state.m, state.l, _flat(rows, -2), *keys, _seen(operands, strip, G, q.ndim - 1))
        out, lse, low = online.finished(state, live is not None)
        out = layout.merge_heads(out.reshape(*batch, K, G, -1, out.shape[-1]))
        narrow, out_low = row_terms.in_two(plan.options, operands, out)
        lse, low = (layout.merge_rows(x.reshape(*batch, K, G, -1)) for x in (lse, low))
        found.append(Result(narrow, lse, low, out_low))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, len(batch)), *found)


def _attended(options: Options, m: Any, l: Any, q: Any, k: Any, v: Any, seen: Any) -> online.State:
    """What rows that have seen no key yet take from the keys of their strip."""
    logits, _ = soft_capped(options, _product(options, q, k, l.dtype))
    if seen is not None:
        logits = jnp.where(seen, logits, -jnp.inf)
    m, decay, p = online.weights(m, logits)
    product = {"precision": options.precision, "preferred_element_type": l.dtype}
    acc = jnp.einsum("...ts,...sh->...th", p.astype(v.dtype), v, **product)
    return online.State(acc, m, l * decay + p.sum(-1))


def gradients(
    plan: Plan, wanted: frozenset[str], operands: Operands, result: Result, dout: jax.Array, delta: jax.Array
) -> dict[str, Any]:
    """What `materialized.backward` gives of query, key and value, a strip of keys after the other."""
    operands = vary_alike(operands)
    q, k, v, live = unpoisoned(plan.options, operands)
    *batch, K, G, _, _ = q.shape
    if live is not None:
        dout, delta = jnp.where(live[..., None], dout, 0), jnp.where(live, delta, 0)
    lse = finite(result.lse)
    low = jnp.zeros_like(lse) if result.lse_low is None else result.lse_low
    whole = (q, k, v, dout, *(layout.split_rows(x, G) for x in (lse, low)), delta)
    q, k, v, dout, *rows = (_merged(plan, x, len(batch)) for x in whole)
    dq = None
    if "query" in wanted:
        dq = full_like_operands(q, q.shape, 0, lse.dtype, (operands, dout, delta))
    columns: dict[str, list[jax.Array]] = {name: [] for name in ("key", "value") if name in wanted}
    step = jax.checkpoint(partial(_share, plan.options, wanted))
    for strip in strips(plan, operands, 1):
        keys = {"key": _part(k, -2, strip.columns), "value": _part(v, -2, strip.columns)}
        if strip.rows[0] == strip.rows[1]:
            share = {name: jnp.zeros_like(x, lse.dtype) for name, x in keys.items()}
        else:
            of_rows = [_flat(_part(x, -2, strip.rows), -2) for x in (q, dout)]
            of_rows += [_flat(_part(x, -1, strip.rows), -1) for x in rows]
            last = {name: parts[-1:] for name, parts in columns.items()}
            # Else all strips run at once; and a slice of a row vector would part a product from what ends it.
            keys, of_rows, dq, last = fusion.barrier((keys, of_rows, dq, last))
            for name, x in last.items():
                columns[name][-1:] = x
            share = step(keys["key"], keys["value"], *of_rows, _seen(operands, strip, G, q.ndim - 1))
        for name, parts in columns.items():
            parts.append(share[name])
        if dq is not None and "query" in share:
            old = _part(dq, -2, strip.rows)
            dq = lax.dynamic_update_slice_in_dim(
                dq, old + share["query"].reshape(old.shape), strip.rows[0], -2
            )
    found = {name: jnp.concatenate(parts, -2) for name, parts in columns.items()}
    found = {name: jnp.swapaxes(x.reshape(*batch, K, *x.shape[-2:]), -2, -3) for name, x in found.items()}
    if dq is None:
        return found
    return found | {"query": layout.merge_heads(dq.reshape(*batch, K, *dq.shape[-3:]))}


def _share(
    options: Options, wanted: frozenset[str],
    k: Any, v: Any, q: Any, dout: Any, lse: Any, low: Any, delta: Any, seen: Any,
) -> dict[str, jax.Array]:  # fmt: skip
    """What a strip gives to each gradient that is wanted."""
    matmul = partial(jnp.einsum, precision=options.precision, preferred_element_type=lse.dtype)
    logits, tanh = soft_capped(options, _product(options, q, k, lse.dtype))  # (1)
    p = (logits - lse[..., None]) - low[..., None]
    if seen is not None:
        p = jnp.where(seen, p, -jnp.inf)
    p = lax.optimization_barrier(jnp.exp(p).astype(v.dtype))  # (2)
    dout, share = dout.astype(v.dtype), {}
    if "value" in wanted:
        share["value"] = matmul("...ts,...th->...sh", p, dout)  # (5)
    if wanted == {"value"}:
        return share
    dp = matmul("...th,...sh->...ts", dout, v)  # (6)
    dx = p.astype(dp.dtype) * (dp - delta[..., None])  # (8)
    if tanh is not None:
        dx = dx * (1 - tanh * tanh)  # (10)
    dx = dx.astype(q.dtype)
    if "query" in wanted:
        share["query"] = options.scale * matmul("...ts,...sh->...th", dx, k)  # (11)
    if "key" in wanted:
        share["key"] = options.scale * matmul("...ts,...th->...sh", dx, q)  # (11)
    return share


def _product(options: Options, q: jax.Array, k: jax.Array, dtype: Any) -> jax.Array:
    """`logits.scaled_product` of rows in one axis: a reshape would part the product from what ends it."""
    in_q = q.dtype == dtype
    q = q * options.scale if in_q else q
    product = {"precision": options.precision, "preferred_element_type": dtype}
    logits = jnp.einsum("...th,...sh->...ts", q, k, **product)
    return logits if in_q else options.scale * logits


def _merged(plan: Plan, x: jax.Array, batch_rank: int) -> jax.Array:
    """`x [*batch, K, ...]` with the axes of batch and heads in one, where no device has a share of them."""
    return x.reshape(-1, *x.shape[batch_rank + 1 :]) if plan.tiling.merges_heads else x


def _flat(x: jax.Array, axis: int) -> jax.Array:
    """`x [..., G, T, ...]`, T its `axis`, with the rows of all groups in one axis."""
    lead, rest = x.shape[: axis - 1], x.shape[x.ndim + axis :]
    return x.reshape(*lead, -1, *rest[1:])


def _part(x: jax.Array, axis: int, along: tuple[int, int]) -> jax.Array:
    return lax.slice_in_dim(x, *along, axis=axis)


def _seen(operands: Operands, strip: Strip, groups: int, rank: int) -> jax.Array | None:
    """Which elements are seen, `[groups * rows, columns]` with axes in front; None if all are."""
    if not strip.mixed:
        return None
    row, column = (jnp.arange(*along, dtype=jnp.int32) for along in (strip.rows, strip.columns))
    row = jnp.tile(row, groups)
    seen = masks.in_band(row[:, None], column[None], operands.mask.is_causal, operands.mask.window)
    if seen is None:  # mixed for being shorter than a block
        return None
    return to_rank(lax.optimization_barrier(seen), rank)
