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
* Which elements are seen is an array of one strip without batch and heads, not a comparison, and values of
  rows stand behind barriers: XLA takes arrays into the end of a product, but not what computes them.
* Batch and heads of a device are one axis: XLA:GPU computes products over one batch axis, and a reshape in
  between parts a product from what ends it. On an Explicit mesh each device runs strips of its own; how the
  arrays lie on an Auto mesh a trace does not tell, and there they stay two axes. The one axis is cut, too: a
  strip of a few heads that holds all rows and keys reads their operands once, and has no sums.

Equation numbers are those of `backward.py`. Strips have sizes of their own, known at trace time, so this is
for masks that shapes alone decide: causality and windows over plain indices.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jax_attn_bwd._core import fusion, masks, targets
from jax_attn_bwd._core.numerics import accumulator_dtype, finite, to_rank
from jax_attn_bwd._core.pallas import on_local_shards, vary_alike
from jax_attn_bwd._core.sharding import explicit_spec, full_like_operands, match_type, varying
from jax_attn_bwd.ops.dot_product import layout, masking, tile_schedule
from jax_attn_bwd.ops.dot_product import online_softmax as online
from jax_attn_bwd.ops.dot_product.logits import soft_capped
from jax_attn_bwd.ops.dot_product.plan import Plan
from jax_attn_bwd.ops.dot_product.spec import Operands, Options, Result
from jax_attn_bwd.ops.dot_product.tile_operands import unpoisoned

_ROUNDED = {  # products whose kernels round wide factors as they read them; TF32 has the mantissa of float16
    "bfloat16": lax.DotAlgorithmPreset.BF16_BF16_F32,
    "float16": lax.DotAlgorithmPreset.TF32_TF32_F32,
}


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
    if not plan.tiling.head_slices:
        return _forward(plan, operands)
    rows: Any = PartitionSpec(*explicit_spec(operands.query)[:-1])
    return on_local_shards(partial(_forward, plan), lambda _: Result(rows, rows, rows), (operands,))


def _forward(plan: Plan, operands: Operands) -> Result:
    operands = vary_alike(operands)
    q, k, v, _ = unpoisoned(plan.options, operands)
    *batch, K, G, _, _ = q.shape
    sink = None
    if operands.sink is not None:
        sink = operands.sink.astype(accumulator_dtype(q.dtype)).reshape(K, G, 1, 1)
        sink = jnp.broadcast_to(sink, (*batch, K, G, 1, 1))
    given = jax.tree.map(lambda x: _merged(plan, x, len(batch)), (q, k, v, sink))
    found = _few_heads_at_a_time(plan, partial(_rows, plan, operands), given)
    out, lse, low = jax.tree.map(lambda x: layout.merge_heads(x.reshape(*batch, K, G, *x.shape[-2:])), found)
    return Result(out, lse[..., 0], low[..., 0])


def _rows(plan: Plan, operands: Operands, given: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(out `[..., K, G, T, Hv]`, lse, lse_low `[..., K, G, T, 1]`) of some heads."""
    q, k, v, sink = given
    found: list[Any] = []
    step = jax.checkpoint(partial(_attended, plan.options))
    for strip in strips(plan, operands, 0):
        rows, shape = _part(q, -2, strip.rows), (*q.shape[:-2], strip.rows[1] - strip.rows[0])
        rows, *keys = _after((rows, k, v), found[-1:])
        rows, keys = _flat(rows), [_part(x, -2, strip.columns) for x in keys]
        extra = None if sink is None else _flat(jnp.broadcast_to(sink, (*shape, 1)))
        parts = step(rows, *keys, extra, _seen(operands, strip, q.shape[-3], q.ndim - 1))
        found.append([x.reshape(*shape, x.shape[-1]) for x in parts])
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, -2), *found)


def _attended(
    options: Options, q: Any, k: Any, v: Any, sink: Any, seen: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(out, lse, lse_low) of rows that see these keys, and a sink, alone."""
    logits = fusion.barrier(_logits(options, q, k, seen))
    m, l = _greatest_and_sum(logits)
    if sink is not None:
        greatest = lax.stop_gradient(jnp.maximum(m, sink))
        shift = finite(greatest)
        m, l = greatest, l * jnp.exp(m - shift) + jnp.exp(sink - shift)
    empty = l == 0
    m, l = finite(m), jnp.where(empty, 1, l)
    lse, low = online.log_sum(m, l)
    lse, low = jnp.where(empty, -jnp.inf, lse), jnp.where(empty, 0, low)
    m, l = map(fusion.barrier, (m, l))
    if q.dtype != l.dtype:
        # Other barriers than of the first product: else XLA takes both at once. Two kernels need not round
        # alike, which counts where one logit of 1e5 takes all, and factors are wide.
        logits = _logits(options, fusion.barrier(q), fusion.barrier(k), seen)
    p = fusion.barrier(jnp.exp(logits - m).astype(v.dtype))
    product = {"precision": options.precision, "preferred_element_type": l.dtype}
    out = jnp.einsum("...ts,...sh->...th", p, v, **product) / l
    return out.astype(q.dtype), lse, low


def _greatest_and_sum(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(m, sum of exp(logits - m)) of each row, `[..., 1]`.

    One kernel of XLA:GPU reads a row once, if all that follows its maximum is one array, and if the maximum
    has no other reader: hence it is formed twice, and m and the sum are one array.
    """
    least = jnp.asarray(jnp.finfo(logits.dtype).min, logits.dtype)
    fixed = lax.stop_gradient(logits)
    greatest = lax.reduce(jnp.maximum(fixed, least), least, lax.max, (logits.ndim - 1,))
    l = jnp.exp(logits - greatest[..., None]).sum(-1, keepdims=True)
    m = -lax.reduce(-fixed, jnp.asarray(jnp.inf, logits.dtype), lax.min, (logits.ndim - 1,))
    is_first = to_rank(jnp.arange(2) == 0, logits.ndim)
    both = fusion.barrier(jnp.where(is_first, m[..., None], l))
    return lax.stop_gradient(both[..., :1]), both[..., 1:]


def gradients(
    plan: Plan, wanted: frozenset[str], operands: Operands, result: Result, dout: jax.Array, delta: jax.Array
) -> dict[str, Any]:
    """What `materialized.backward` gives of query, key and value, a strip of keys after the other."""
    run, given = partial(_gradients, plan, wanted), (operands, result, dout, delta)
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
    given = tuple(_merged(plan, x, len(batch)) for x in whole)
    found = _few_heads_at_a_time(plan, partial(_gradients_of_heads, plan, wanted, dtype, operands), given)
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
    q, k, v, dout, lse, low, delta = given
    columns: dict[str, list[jax.Array]] = {name: [] for name in ("key", "value") if name in wanted}
    dq, step = None, jax.checkpoint(partial(_share, plan.options, wanted))
    for strip in strips(plan, operands, 1):
        keys = [_part(x, -2, strip.columns) for x in (k, v)]
        rows = [_flat(_part(x, -2, strip.rows)) for x in (q, dout, lse, low, delta)]
        keys, rows, dq = _after((keys, rows, dq), (dq, [parts[-1:] for parts in columns.values()]))
        share = step(*keys, *rows, _seen(operands, strip, q.shape[-3], q.ndim - 1))
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


def _share(
    options: Options, wanted: frozenset[str],
    k: Any, v: Any, q: Any, dout: Any, lse: Any, low: Any, delta: Any, seen: Any,
) -> dict[str, jax.Array]:  # fmt: skip
    """What a strip gives to each gradient that is wanted."""
    matmul = partial(jnp.einsum, precision=options.precision, preferred_element_type=lse.dtype)
    logits, tanh = _capped(options, q, k)  # (1)
    p = (logits - lse) - low
    if seen is not None:
        p = jnp.where(seen, p, -jnp.inf)
    p, share = jnp.exp(p), {}  # (2)
    factor = p if tanh is None else p * (1 - tanh * tanh)  # of (10)
    p, factor = map(fusion.barrier, (p, factor))
    if "value" in wanted:
        share["value"] = _rounded_product(options, "...ts,...th->...sh", p, dout)  # (5)
    if wanted == {"value"}:
        return share
    dx = factor * (matmul("...th,...sh->...ts", dout, v) - delta)  # (6), (8), (10)
    dx = dx.astype(q.dtype)
    if "query" in wanted:
        share["query"] = options.scale * matmul("...ts,...sh->...th", dx, k)  # (11)
    if "key" in wanted:
        share["key"] = options.scale * matmul("...ts,...th->...sh", dx, q)  # (11)
    return share


def _rounded_product(options: Options, axes: str, wide: jax.Array, narrow: jax.Array) -> jax.Array:
    """The product with `wide` rounded to the dtype of `narrow`, on a GPU by the kernel that reads it."""
    precision = _ROUNDED.get(str(narrow.dtype)) if targets.platform() == "gpu" else None
    if precision is None or options.precision is not None:
        wide, precision = wide.astype(narrow.dtype), options.precision
    else:
        narrow = narrow.astype(wide.dtype)
    return jnp.einsum(axes, wide, narrow, precision=precision, preferred_element_type=wide.dtype)


def _logits(options: Options, q: jax.Array, k: jax.Array, seen: jax.Array | None) -> jax.Array:
    logits, _ = _capped(options, q, k)
    return logits if seen is None else jnp.where(seen, logits, -jnp.inf)


def _capped(options: Options, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """`logits.scaled_product` of rows in one axis, soft-capped: a reshape would part it from what ends it."""
    dtype = accumulator_dtype(q.dtype)
    in_q = q.dtype == dtype
    q = q * options.scale if in_q else q
    product = {"precision": options.precision, "preferred_element_type": dtype}
    logits = jnp.einsum("...th,...sh->...ts", q, k, **product)
    return soft_capped(options, logits if in_q else options.scale * logits)


def _merged(plan: Plan, x: jax.Array, batch_rank: int) -> jax.Array:
    """`x [*batch, K, ...]` with the axes of batch and heads in one, where they are those of one device."""
    return x.reshape(-1, *x.shape[batch_rank + 1 :]) if plan.tiling.head_slices else x


def _few_heads_at_a_time(plan: Plan, run: Callable[[Any], Any], arrays: Any) -> Any:
    """What `run` gives, of one slice of the first axis of `arrays` after the other."""
    if plan.tiling.head_slices <= 1:
        return run(arrays)
    size = jax.tree.leaves(arrays)[0].shape[0] // plan.tiling.head_slices
    found: list[Any] = []
    for number in range(plan.tiling.head_slices):
        few = jax.tree.map(lambda x, at=number * size: lax.slice_in_dim(x, at, at + size), arrays)
        found.append(run(_after(few, found[-1:])))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)


def _after(arrays: Any, last: Any) -> Any:
    """`arrays`, of which nothing is computed before `last` is: else all strips run at once."""
    return fusion.barrier((arrays, last))[0]


def _flat(x: jax.Array) -> jax.Array:
    """`x [..., G, T, n]` with the rows of all groups in one axis."""
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


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
