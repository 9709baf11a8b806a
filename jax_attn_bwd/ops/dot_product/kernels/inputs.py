"""Prepares, in XLA, what the kernels of dense attention read on any platform.

Batch axes are merged, sequences and head sizes padded to whole tiles, unseen keys zeroed. For a backward also
what is known of each query: its lse and its delta.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_attn_bwd._core import float_leaves, fusion, sharding
from jax_attn_bwd._core.numerics import reduce_to, to_rank
from jax_attn_bwd.ops.dot_product import layout, mod_functions, row_terms, visibility
from jax_attn_bwd.ops.dot_product.block import dropout_counters
from jax_attn_bwd.ops.dot_product.kernels import functions
from jax_attn_bwd.ops.dot_product.spec import (
    DotProductAttentionGrads,
    KernelOptions,
    Operands,
    Residuals,
    Result,
)

LOG2_E, LN_2 = math.log2(math.e), math.log(2.0)


class Padding(NamedTuple):
    """Multiples that axes are padded to."""

    queries: int
    keys: int
    head: int


class Inputs(NamedTuple):
    """What a kernel reads; None = not given. T, S, H and Hv are padded, axes of 1 broadcast."""

    q: Any  # [B, T, N, H]
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, Hv]
    bounds: Any  # which tiles are visited, in the form that a kernel reads; None = all, and all full
    rows_end: Any  # int32 [B|1]: queries from here on see nothing
    columns_end: Any  # int32 [B|1]: keys from here on are not seen
    row_position: Any  # int32 [B|1, T]; None = the index
    column_position: Any  # int32 [B|1, S]
    row_segment: Any  # int32 [B|1, T]
    column_segment: Any  # int32 [B|1, S]
    bias: Any  # [B|1, N|1, T|1, S|1]
    mask: Any  # int8, likewise
    sink: Any  # float32 [N]
    dropout_keys: Any  # uint32 [B|1, N|1, 2]
    row_counter: Any  # uint32 [T]
    column_counter: Any  # uint32 [S]
    batch_number: Any  # int32 [B], of each batch entry; with `mask_mod` or `score_mod`
    head_number: Any  # int32 [N], of each query head
    mask_values: tuple = ()  # what `mask_mod` reads of arrays, see `hoisting.values`
    score_values: tuple = ()  # and `score_mod`
    mod_args: tuple = ()  # where bounds of tiles are taken of these: kernels are handed none


def sharded_sequence(operands: Operands) -> str | None:
    """Why kernels cannot run it where a sequence is sharded on an Explicit mesh; None where none is."""
    for name in ("query", "key", "value"):
        if (axis := sharding.explicit_spec(getattr(operands, name))[-3]) is not None:
            return (
                f"the sequence of {name} is sharded over {axis!r}, and a kernel reads whole sequences; call "
                f"jax_attn_bwd.parallel.ring_attention inside jax.shard_map"
            )
    return None


def whole(n: int, multiple: int) -> int:
    """`n` rounded up to a multiple."""
    return -(-n // multiple) * multiple


def dropout_keys(options: KernelOptions, operands: Operands) -> jax.Array | None:
    """The key of each batch entry and head, uint32 `[..., N|1, 2]`: to be called before the operands are cut
    into shards, which do not know where they lie.
    """
    if not options.dropout_rate:
        return None
    words = dropout_counters(options, operands, 1, 1).keys
    keys = jnp.stack([x.reshape(*x.shape[:-2], -1) for x in words], -1)
    batch = range(operands.query.ndim - 3)
    return sharding.reshard_like(keys, operands.query, (*batch, -2, None))


def inputs(options: KernelOptions, operands: Operands, keys: jax.Array | None, padding: Padding) -> Inputs:
    """What the kernels read, but for the bounds; `keys` are the `dropout_keys`."""
    if operands.mask.elements is not None:  # reductions of a constant XLA would fold, for minutes
        operands = operands.with_arrays({"elements": fusion.barrier(operands.mask.elements)})
    T, S, mask = operands.query.shape[-3], operands.key.shape[-3], operands.mask
    positions: tuple[Any, Any] = (None, None)
    if options.is_causal or options.window is not None or functions.any_given(options):
        positions = (mask.query_positions, mask.key_value_positions)
    segments = (mask.query_segment_ids, mask.key_value_segment_ids)
    (row_position, row_segment), (column_position, column_segment) = (
        tuple(None if x is None else _tokens(operands, x, n, multiple) for x in side)
        for n, multiple, side in zip((T, S), padding[:2], zip(positions, segments, strict=True), strict=True)
    )
    _, seen = visibility.live_and_seen_of(operands)
    key, value, bias = _zero_unseen(operands, seen)
    planes = (bias, -jnp.inf), (mask.elements, False)
    bias, elements = (None if x is None else _plane(operands, x, padding, fill) for x, fill in planes)
    row_counter = column_counter = None
    if keys is not None:
        counters = dropout_counters(options, operands, padding.queries, padding.keys)
        row_counter, column_counter = counters.rows, counters.columns
    ends = (
        _end(operands, mask.query_seq_lengths, T, padding.queries),
        _end(operands, mask.key_value_seq_lengths, S, padding.keys),
    )
    numbers, values, mod_args = None, ((), ()), ()
    if functions.any_given(options):
        numbers = _batched(operands, mask.batch_number, 0)
        values = functions.values(options, operands, places(operands, padding))
        mod_args = functions.for_bounds(options, operands)
    q, k, v = (
        pad(_batched(operands, x, 3), {-3: multiple, -1: padding.head})
        for x, multiple in zip(
            (operands.query, key, value), (padding.queries, padding.keys, padding.keys), strict=True
        )
    )
    return Inputs(
        q,
        k,
        v,
        None,
        *ends,
        row_position,
        column_position,
        row_segment,
        column_segment,
        bias,
        None if elements is None else elements.astype(jnp.int8),
        None if operands.sink is None else operands.sink.astype(jnp.float32),
        None if keys is None else _batched(operands, keys, 2),
        row_counter,
        column_counter,
        numbers,
        mask.head_number,
        *values,
        mod_args,
    )


def places(operands: Operands, padding: Padding) -> tuple[jax.Array, ...]:
    """Where functions stand: the numbers of batch entries and heads, rows and columns `[B|1, T]`, `[B|1, S]`.

    What lies beyond the end stands where the last one does.
    """
    mask, (_, T, S, *_) = operands.mask, operands.sizes
    sides = (
        (mask.query_positions, mask.query_seq_lengths, T, padding.queries),
        (mask.key_value_positions, mask.key_value_seq_lengths, S, padding.keys),
    )
    tokens = []
    for position, lengths, n, multiple in sides:
        if position is not None:
            tokens.append(_tokens(operands, position, n, multiple))
            continue
        index, end = (
            jnp.arange(whole(n, multiple), dtype=jnp.int32)[None],
            _end(operands, lengths, n, multiple),
        )
        last = None if end is None else jnp.maximum(jnp.asarray(end)[:, None] - 1, 0)
        tokens.append(index if last is None else jnp.minimum(index, last))
    return _batched(operands, mask.batch_number, 0), mask.head_number, *tokens


def mod_args_gradient(options: KernelOptions, operands: Operands, padding: Padding, dvalues: Any) -> Any:
    """The gradients of the floats in `mod_args`, from those of the floats in `score_values`.

    Each `[B, N, T|1, S|1]`, or `[B, N, T + S]`.
    """
    numbers = float_leaves.floats(operands.mod_args)
    if not dvalues:
        return jax.tree.map(jnp.zeros_like, numbers)
    place = places(operands, padding)

    def read(numbers):
        args = float_leaves.filled(operands.mod_args, numbers)
        found = functions.values(
            options, operands._replace(mask=operands.mask.replace(mod_args=args)), place
        )[1]
        return [x for x in found if x.dtype == jnp.float32]

    def cotangents(found):
        pairs = zip(dvalues, found, strict=True)
        return [sharding.match_type(reduce_to(d, x.shape), x) for d, x in pairs]

    return mod_functions.pulled_back_to(numbers, read, cotangents)


def _end(operands: Operands, lengths: jax.Array | None, n: int, multiple: int) -> Any:
    """A NumPy array where no lengths are given, so that the tiles are known at trace time."""
    if lengths is not None:
        return jnp.minimum(_batched(operands, lengths, 0), n)
    return np.full((1,), n, np.int32) if n % multiple else None


def _batched(operands: Operands, x: jax.Array, tail: int) -> jax.Array:
    """`x` with its batch axes merged into one, of size 1 if it broadcasts over all of them."""
    batch = operands.query.shape[:-3]
    x = to_rank(x, len(batch) + tail)
    if any(n != 1 for n in x.shape[: len(batch)]):
        x = jnp.broadcast_to(x, (*batch, *x.shape[len(batch) :]))
    return x.reshape(math.prod(x.shape[: len(batch)]), *x.shape[len(batch) :])


def pad(x: jax.Array, multiples: dict[int, int], **how: Any) -> jax.Array:
    """`x` with the axes `multiples` (axis: multiple) made whole."""
    widths = [(0, 0)] * x.ndim
    for axis, multiple in multiples.items():
        widths[axis] = (0, whole(x.shape[axis], multiple) - x.shape[axis])
    return jnp.pad(x, widths, **how) if any(any(w) for w in widths) else x


def _plane(operands: Operands, x: jax.Array, padding: Padding, fill: Any) -> jax.Array:
    """A mask or bias `[B|1, N|1, T|1, S|1]`, with what hides in the places of padding."""
    x = _batched(operands, x, 3)
    multiples = {-2: padding.queries, -1: padding.keys}
    return pad(x, {axis: n for axis, n in multiples.items() if x.shape[axis] != 1}, constant_values=fill)


def _tokens(operands: Operands, x: jax.Array, n: int, multiple: int) -> jax.Array:
    x = _batched(operands, x, 1)
    return pad(jnp.broadcast_to(x, (x.shape[0], n)), {-1: multiple}, mode="edge")


def _zero_unseen(operands: Operands, seen: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Key, value and bias with zeros where no query looks: what lies there, NaN too, meets only p = 0.

    A bias of many rows is left as it is. One that all rows share is also added in the rows of padding, to
    which causality may show more keys than to any other; -inf hides from these too.
    """
    k, v, bias = operands.key, operands.value, operands.bias
    if seen is None:
        return k, v, bias
    columns = to_rank(jnp.swapaxes(seen, -1, -2)[..., None], k.ndim)  # [..., S, K|1, 1]
    k, v = (jnp.where(columns, x, 0) for x in (k, v))
    if bias is None or bias.shape[-1] == 1 or (bias.ndim > 1 and bias.shape[-2] != 1):
        return k, v, bias
    heads = 1 if seen.shape[-2] == 1 else operands.query.shape[-2] // k.shape[-2]
    read = to_rank(jnp.repeat(seen, heads, axis=-2)[..., None, :], k.ndim)  # [..., N|1, 1, S]
    rank = max(bias.ndim, read.ndim)
    shared = tuple(i for i, n in enumerate((1,) * (rank - bias.ndim) + bias.shape) if n == 1)
    read = to_rank(read, rank).any(shared, keepdims=True)
    return k, v, jnp.where(read.reshape(read.shape[rank - bias.ndim :]) | (bias == -jnp.inf), bias, 0)


def is_plain(options: KernelOptions, refs: Inputs) -> bool:
    """Whether logits are products times a positive number, which then goes into the exponent."""
    free = refs.bias is None and options.logits_soft_cap is None and options.score_mod is None
    return free and options.scale > 0


def has_low(options: KernelOptions, given: Any) -> bool:
    """Whether lse keeps what rounding took from it: logits may be huge; `given` has the bias."""
    return given.bias is not None or options.score_mod is not None


def result_specs(options: KernelOptions, keeps_low: bool, operands: Any, keys: Any = None) -> Any:
    """The specs of a forward's result, from those of the operands."""
    out: Any = operands.query
    row: Any = PartitionSpec(*out[:-1])
    return Result(out, row, row if has_low(options, operands) else None, out if keeps_low else None)


def at(ref: Any, axis: int, index: Any) -> Any:
    """`index` of an axis, 0 where it broadcasts."""
    return 0 if ref.shape[axis] == 1 else index


def merged(x: jax.Array, tail: int) -> jax.Array:
    """`x` with all but its last `tail` axes merged into one."""
    lead = x.shape[: x.ndim - tail]
    return x.reshape(math.prod(lead), *x.shape[len(lead) :])


def bias_gradient(dbias: jax.Array, operands: Operands) -> jax.Array:
    """`[B|1, N|1, T|1, S|1]` summed to the shape of the bias."""
    assert operands.bias is not None  # its gradient is asked for
    batch = operands.query.shape[:-3]
    lead = batch if dbias.shape[0] != 1 or math.prod(batch) == 1 else (1,) * len(batch)
    return reduce_to(dbias.reshape(*lead, *dbias.shape[1:]), operands.bias.shape)


class RowValues(NamedTuple):
    """What the backward kernels read of each query; equation numbers are those of `backward.py`."""

    query: jax.Array  # [..., T, N, H], 0 in rows that see nothing
    dout: jax.Array  # [..., T, N, Hv], likewise
    lse: jax.Array  # [..., T, N], inf in rows that see nothing: their p is 0
    low: jax.Array  # [..., T, N]
    delta: jax.Array  # [..., T, N]
    dsink: jax.Array | None  # the gradient of the sink (9), if it is wanted


def row_values(options: KernelOptions, residuals: Residuals, dout: Any, dlse: Any) -> RowValues:
    """`RowValues` from what the forward left, and the cotangents."""
    operands, (out, lse, low, _) = residuals.operands, residuals.result
    query = operands.query
    dout = whole = jnp.zeros_like(out) if dout is None else dout
    empty = None
    if _rows_may_be_empty(options, operands):
        # A row that attends to nothing may hold anything in q and dout. If out = 0 it has no key elsewhere.
        empty = lse == -jnp.inf
        if operands.sink is not None:
            empty = _sees_nothing(options, operands, lse)
        whole = jnp.where((empty & (out == 0).all(-1))[..., None], 0, dout)
        dout, query = (jnp.where(empty[..., None], 0, x) for x in (dout, query))
    delta, dsink = row_terms.delta(options, operands, residuals.result, whole, dlse), None
    if "sink" in residuals.wanted.names:
        assert operands.sink is not None  # its gradient is asked for
        dsink = row_terms.gradient_of_sink(operands.sink, residuals.result, delta)
    low = jnp.zeros_like(lse) if low is None else low
    lse = lse if empty is None else jnp.where(empty, jnp.inf, lse)
    return RowValues(query, dout, lse, low, delta, dsink)


def out_specs(residuals: Residuals) -> Callable[..., DotProductAttentionGrads]:
    """From the specs of residuals like these, and of what else is given, to those of the gradients."""

    def of(specs: Residuals, *_: Any) -> DotProductAttentionGrads:
        found = {name: getattr(specs.operands, name) for name in residuals.wanted.names}
        if "mod_args" in found:
            numbers = float_leaves.floats(residuals.operands.mod_args)
            found["mod_args"] = float_leaves.over_floats(lambda _, spec: spec, numbers, found["mod_args"])
        return DotProductAttentionGrads(**found)

    return of


def empty_rows(options: KernelOptions, operands: Operands, lse: jax.Array) -> jax.Array | None:
    """Which queries see no key, `[..., T, N]`; None where none can be without one."""
    return _sees_nothing(options, operands, lse) if _rows_may_be_empty(options, operands) else None


def _sees_nothing(options: KernelOptions, operands: Operands, lse: jax.Array) -> jax.Array:
    """Which queries see no key, `[..., T, N]`; lse does not tell: with a large sink it is the sink anyway."""
    live, _ = visibility.live_and_seen_of(operands)
    if live is None:
        return jnp.zeros_like(lse, bool)
    groups = operands.query.shape[-2] // operands.key.shape[-2]
    return ~layout.merge_rows(jnp.broadcast_to(live, layout.split_rows(lse, groups).shape))


def _rows_may_be_empty(options: KernelOptions, operands: Operands) -> bool:
    """Whether a query may see no key: without need, q and dout are not copied."""
    mask = operands.mask
    if operands.bias is not None or options.score_mod is not None:  # which may give -inf
        return True
    if mask.has_positions or mask.has("elements", "query_segment_ids", "window"):
        return True
    if mask.has("query_seq_lengths", "key_value_seq_lengths"):
        return True
    return mask.mask_mod is not None and not visibility.every_query_sees(options, operands)
