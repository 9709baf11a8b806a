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
from jax import lax
from jax.sharding import PartitionSpec

from jax_attn_bwd._core import fusion, sharding, trees
from jax_attn_bwd._core.numerics import reduce_to, to_rank
from jax_attn_bwd.ops.dot_product import layout, mod_functions, row_terms, visibility
from jax_attn_bwd.ops.dot_product.block import dropout_counters
from jax_attn_bwd.ops.dot_product.kernels import functions
from jax_attn_bwd.ops.dot_product.spec import (
    DotProductAttentionGrads,
    KernelOptions,
    Operands,
    Options,
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
    """The arrays that a kernel reads; None = not given. T, S, H and Hv are padded, axes of 1 broadcast."""

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


def unsupported(
    call: Options,
    operands: Operands,
    own: Callable[[KernelOptions, Operands], str | None],
    dtypes: tuple[str, ...],
    units: str,
    lowers: frozenset[str],
    distances: bool = False,
) -> str | None:
    """Returns why the kernels of a chip cannot run a call; None if they can.

    Args:
      call, operands: of the call.
      own: `(options, operands) -> reason` of that chip alone.
      dtypes, units: what it multiplies, and on which units.
      lowers: the operations that functions may be made of.
      distances: whether its kernels take values for each distance.
    """
    # what it multiplies, and what it can lower
    options = KernelOptions.of(call, operands.mask)
    q, v = operands.query, operands.value
    if not all(isinstance(n, int) for x in jax.tree.leaves(operands) for n in x.shape):
        return "it needs static shapes"
    if q.dtype not in dtypes:
        return f"it multiplies {' and '.join(dtypes)}{units}, not {q.dtype}"
    if (reason := functions.unsupported(options, operands, lowers, distances)) is not None:
        return reason
    # sizes, those that the chip bounds last
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"head sizes go up to 256, got H = {q.shape[-1]} and Hv = {v.shape[-1]}"
    if 0 in (*q.shape, *v.shape):
        return "there is nothing to compute"
    if (reason := own(options, operands)) is not None:
        return reason
    # what it does not compute
    if operands.bias is not None and operands.bias.dtype == jnp.float64:
        return "a float64 bias asks for float64 arithmetic"
    if not isinstance(options.precision, lax.Precision | None):
        return f"it has one product algorithm, got precision={options.precision}"
    return sharded_sequence(operands)


def sharded_sequence(operands: Operands) -> str | None:
    """Returns why kernels cannot run where a sequence is sharded on an Explicit mesh; None where none is."""
    for name in ("query", "key", "value"):
        if (axis := sharding.explicit_spec(getattr(operands, name))[-3]) is not None:
            return (
                f"the sequence of {name} is sharded over {axis!r}, and a kernel reads whole sequences; call "
                f"jax_attn_bwd.parallel.ring_attention inside jax.shard_map"
            )
    return None


def whole(n: int, multiple: int) -> int:
    """Rounds `n` up to a multiple."""
    return -(-n // multiple) * multiple


def dropout_keys(options: KernelOptions, operands: Operands) -> jax.Array | None:
    """Returns the key of each batch entry and head, uint32 `[..., N|1, 2]`.

    To be called before the operands are cut into shards, which do not know where they lie.
    """
    if not options.dropout_rate:
        return None
    words = dropout_counters(options, operands, 1, 1).keys
    keys = jnp.stack([x.reshape(*x.shape[:-2], -1) for x in words], -1)
    batch = range(operands.query.ndim - 3)
    return sharding.reshard_like(keys, operands.query, (*batch, -2, None))


def inputs(options: KernelOptions, operands: Operands, keys: jax.Array | None, padding: Padding) -> Inputs:
    """Prepares what the kernels read, but for the bounds; `keys` are the `dropout_keys`."""
    if operands.mask.elements is not None:  # reductions of a constant XLA would fold, for minutes
        operands = operands.with_arrays({"elements": fusion.barrier(operands.mask.elements)})
    # positions, where something reads them, and segments: one number a token, [B|1, T] and [B|1, S]
    T, S, mask = operands.query.shape[-3], operands.key.shape[-3], operands.mask
    positions: tuple[Any, Any] = (None, None)
    if options.is_causal or options.window is not None or functions.any_given(options):
        positions = (mask.query_positions, mask.key_value_positions)
    segments = (mask.query_segment_ids, mask.key_value_segment_ids)
    (row_position, row_segment), (column_position, column_segment) = (
        tuple(None if x is None else _pad_tokens(operands, x, n, multiple) for x in side)
        for n, multiple, side in zip((T, S), padding[:2], zip(positions, segments, strict=True), strict=True)
    )
    # keys, values and a bias that no query sees are 0; planes hide the places of padding
    _, seen = visibility.used_queries_and_keys(operands.mask, operands.bias, operands.sizes)
    key, value, bias = _zero_unseen(operands, seen)
    planes = (bias, -jnp.inf), (mask.elements, False)
    bias, elements = (None if x is None else _pad_plane(operands, x, padding, fill) for x, fill in planes)
    # what dropout draws from beside the keys, and where tokens end: lengths, or a size that is not whole
    row_counter = column_counter = None
    if keys is not None:
        counters = dropout_counters(options, operands, padding.queries, padding.keys)
        row_counter, column_counter = counters.rows, counters.columns
    ends = (
        _ends(operands, mask.query_seq_lengths, T, padding.queries),
        _ends(operands, mask.key_value_seq_lengths, S, padding.keys),
    )
    # for functions: the numbers of batch entries, and what XLA reads of arrays for them
    numbers, values, mod_args = None, ((), ()), ()
    if functions.any_given(options):
        numbers = merge_batch(operands, mask.batch_number, 0)
        values = functions.values(options, operands, places(operands, padding))
        mod_args = functions.args_for_bounds(options, operands)
    # [B, T, N, H], [B, S, K, H] and [B, S, K, Hv], whole
    q, k, v = (
        pad(merge_batch(operands, x, 3), {-3: multiple, -1: padding.head})
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
        None if keys is None else merge_batch(operands, keys, 2),
        row_counter,
        column_counter,
        numbers,
        mask.head_number,
        *values,
        mod_args,
    )


def places(operands: Operands, padding: Padding) -> tuple[jax.Array, ...]:
    """Returns where functions stand: numbers of batch entries and heads, rows `[B|1, T]`, columns `[B|1, S]`.

    What lies beyond the end stands where the last one does.
    """
    mask, (_, T, S, *_) = operands.mask, operands.sizes
    sides = (
        (mask.query_positions, mask.query_seq_lengths, T, padding.queries),
        (mask.key_value_positions, mask.key_value_seq_lengths, S, padding.keys),
    )
    # positions where they are given, else indices up to the last token
    tokens = []
    for position, lengths, n, multiple in sides:
        if position is not None:
            tokens.append(_pad_tokens(operands, position, n, multiple))
            continue
        index, end = (
            jnp.arange(whole(n, multiple), dtype=jnp.int32)[None],
            _ends(operands, lengths, n, multiple),
        )
        last = None if end is None else jnp.maximum(jnp.asarray(end)[:, None] - 1, 0)
        tokens.append(index if last is None else jnp.minimum(index, last))
    return merge_batch(operands, mask.batch_number, 0), mask.head_number, *tokens


def mod_args_gradient(options: KernelOptions, operands: Operands, padding: Padding, dvalues: Any) -> Any:
    """Computes the gradients of the floats in `mod_args` from those of the floats in `score_values`.

    The latter are `[B, N, T|1, S|1]` each, or `[B, N, T + S]`.
    """
    numbers = trees.floats(operands.mod_args)
    if not dvalues:
        return jax.tree.map(jnp.zeros_like, numbers)
    place = places(operands, padding)

    # values are read of the floats in `mod_args`; the derivative of reading takes cotangents back to these
    def read(numbers):
        args = trees.filled(operands.mod_args, numbers)
        found = functions.values(
            options, operands._replace(mask=operands.mask.replace(mod_args=args)), place
        )[1]
        return [x for x in found if x.dtype == jnp.float32]

    def cotangents(found):
        pairs = zip(dvalues, found, strict=True)
        return [sharding.match_type(reduce_to(d, x.shape), x) for d, x in pairs]

    return mod_functions.pulled_back_to(numbers, read, cotangents)


def _ends(operands: Operands, lengths: jax.Array | None, n: int, multiple: int) -> Any:
    """Returns where tokens end, `[B|1]`; None where they fill whole tiles.

    A NumPy array where no lengths are given, so that the tiles are known at trace time.
    """
    if lengths is not None:
        return jnp.minimum(merge_batch(operands, lengths, 0), n)
    return np.full((1,), n, np.int32) if n % multiple else None


def merge_batch(operands: Operands, x: jax.Array, tail: int) -> jax.Array:
    """Merges the batch axes of `x` into one, of size 1 if it broadcasts over all of them."""
    batch = operands.query.shape[:-3]
    x = to_rank(x, len(batch) + tail)
    if any(n != 1 for n in x.shape[: len(batch)]):
        x = jnp.broadcast_to(x, (*batch, *x.shape[len(batch) :]))
    return x.reshape(math.prod(x.shape[: len(batch)]), *x.shape[len(batch) :])


def pad(x: jax.Array, multiples: dict[int, int], **how: Any) -> jax.Array:
    """Pads the axes of `x` in `multiples` (axis: multiple) to whole multiples."""
    widths = [(0, 0)] * x.ndim
    for axis, multiple in multiples.items():
        widths[axis] = (0, whole(x.shape[axis], multiple) - x.shape[axis])
    return jnp.pad(x, widths, **how) if any(any(w) for w in widths) else x


def _pad_plane(operands: Operands, x: jax.Array, padding: Padding, fill: Any) -> jax.Array:
    """Pads a mask or bias `[B|1, N|1, T|1, S|1]`, with what hides in the places of padding."""
    x = merge_batch(operands, x, 3)
    multiples = {-2: padding.queries, -1: padding.keys}
    return pad(x, {axis: n for axis, n in multiples.items() if x.shape[axis] != 1}, constant_values=fill)


def _pad_tokens(operands: Operands, x: jax.Array, n: int, multiple: int) -> jax.Array:
    """Lays a number a token as `[B|1, n]`, padded with that of the last one."""
    x = merge_batch(operands, x, 1)
    return pad(jnp.broadcast_to(x, (x.shape[0], n)), {-1: multiple}, mode="edge")


def _zero_unseen(operands: Operands, seen: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Zeroes key, value and bias where no query looks: what lies there, NaN too, meets only p = 0.

    A bias of many rows is left as it is. One that all rows share is also added in the rows of padding, to
    which causality may show more keys than to any other; -inf hides from these too.
    """
    k, v, bias = operands.key, operands.value, operands.bias
    if seen is None:
        return k, v, bias
    # keys and values, for each key head where masks differ between heads
    columns = to_rank(jnp.swapaxes(seen, -1, -2)[..., None], k.ndim)  # [..., S, K|1, 1]
    k, v = (jnp.where(columns, x, 0) for x in (k, v))
    if bias is None or bias.shape[-1] == 1 or (bias.ndim > 1 and bias.shape[-2] != 1):
        return k, v, bias
    # a bias that all rows share: 0 where none of those that it broadcasts over sees the key
    heads = 1 if seen.shape[-2] == 1 else operands.query.shape[-2] // k.shape[-2]
    read = to_rank(jnp.repeat(seen, heads, axis=-2)[..., None, :], k.ndim)  # [..., N|1, 1, S]
    rank = max(bias.ndim, read.ndim)
    shared = tuple(i for i, n in enumerate((1,) * (rank - bias.ndim) + bias.shape) if n == 1)
    read = to_rank(read, rank).any(shared, keepdims=True)
    return k, v, jnp.where(read.reshape(read.shape[rank - bias.ndim :]) | (bias == -jnp.inf), bias, 0)


def is_plain(options: KernelOptions, refs: Inputs) -> bool:
    """Tells whether logits are products times a positive number, which then goes into the exponent."""
    free = refs.bias is None and options.logits_soft_cap is None and options.score_mod is None
    return free and options.scale > 0


def has_rounding(options: KernelOptions, given: Any) -> bool:
    """Tells whether lse keeps its rounding: logits may be huge; `given` has the bias."""
    return given.bias is not None or options.score_mod is not None


def result_specs(options: KernelOptions, keeps_rounding: bool, operands: Any, keys: Any = None) -> Any:
    """Returns the specs of a forward's result, from those of the operands."""
    out: Any = operands.query
    row: Any = PartitionSpec(*out[:-1])
    return Result(out, row, row if has_rounding(options, operands) else None, out if keeps_rounding else None)


def at(ref: Any, axis: int, index: Any) -> Any:
    """Returns `index` of an axis, 0 where it broadcasts."""
    return 0 if ref.shape[axis] == 1 else index


def merged(x: jax.Array, tail: int) -> jax.Array:
    """Merges all but the last `tail` axes of `x` into one."""
    lead = x.shape[: x.ndim - tail]
    return x.reshape(math.prod(lead), *x.shape[len(lead) :])


def bias_gradient(dbias: jax.Array, operands: Operands) -> jax.Array:
    """Sums `[B|1, N|1, T|1, S|1]` to the shape of the bias."""
    assert operands.bias is not None  # its gradient is asked for
    batch = operands.query.shape[:-3]
    lead = batch if dbias.shape[0] != 1 or math.prod(batch) == 1 else (1,) * len(batch)
    return reduce_to(dbias.reshape(*lead, *dbias.shape[1:]), operands.bias.shape)


class RowValues(NamedTuple):
    """The numbers that backward kernels read of each query; equation numbers are those of `backward.py`."""

    query: jax.Array  # [..., T, N, H], 0 in rows that see nothing
    dout: jax.Array  # [..., T, N, Hv], likewise
    lse: jax.Array  # [..., T, N], inf in rows that see nothing: their p is 0
    rounding: jax.Array  # [..., T, N]
    delta: jax.Array  # [..., T, N]
    dsink: jax.Array | None  # the gradient of the sink (9), if it is wanted


def row_values(options: KernelOptions, residuals: Residuals, dout: Any, dlse: Any) -> RowValues:
    """Computes `RowValues` from what the forward left, and the cotangents."""
    operands, (out, lse, rounding, _) = residuals.operands, residuals.result
    query = operands.query
    dout = whole = jnp.zeros_like(out) if dout is None else dout
    # A row that attends to nothing may hold anything in q and dout. If out = 0 it has no key elsewhere.
    empty = None
    if _rows_may_be_empty(options, operands):
        empty = lse == -jnp.inf
        if operands.sink is not None:
            empty = _sees_nothing(options, operands, lse)
        whole = jnp.where((empty & (out == 0).all(-1))[..., None], 0, dout)
        dout, query = (jnp.where(empty[..., None], 0, x) for x in (dout, query))
    # delta (7) is of the row wherever its keys are, and so is the gradient of the sink (9)
    delta, dsink = row_terms.delta(options, operands, residuals.result, whole, dlse), None
    if "sink" in residuals.wanted.names:
        assert operands.sink is not None  # its gradient is asked for
        dsink = row_terms.gradient_of_sink(operands.sink, residuals.result, delta)
    rounding = jnp.zeros_like(lse) if rounding is None else rounding
    lse = lse if empty is None else jnp.where(empty, jnp.inf, lse)
    return RowValues(query, dout, lse, rounding, delta, dsink)


def saved_rows(
    options: KernelOptions, refs: Inputs, values: RowValues, padding: Padding
) -> tuple[list[jax.Array], jax.Array]:
    """Returns ([lse, delta, rounding where it is kept], each `[B, N, T]`; dout `[B, T, N, Hv]`), whole.

    lse is in units of the exponent; rows of padding have lse = inf, which makes their p 0.
    """

    def row(x, fill=0.0):
        x = jnp.swapaxes(merged(x, 2), -1, -2)
        return pad(x, {-1: padding.queries}, constant_values=fill)

    lse = values.lse * LOG2_E if is_plain(options, refs) else values.lse
    rows = [row(lse, jnp.inf), row(values.delta)]
    rows += [row(values.rounding)] if has_rounding(options, refs) else []
    return rows, pad(merged(values.dout, 3), {-3: padding.queries, -1: padding.head})


def matched(operands: Operands, grads: dict[str, Any]) -> DotProductAttentionGrads:
    """Gives each gradient the type of its operand, with what it varies over."""
    like = lambda name: trees.floats(getattr(operands, name))
    return DotProductAttentionGrads(
        **{name: jax.tree.map(sharding.match_type, grad, like(name)) for name, grad in grads.items()}
    )


def out_specs(residuals: Residuals) -> Callable[..., DotProductAttentionGrads]:
    """Returns a function from the specs of residuals like these to those of the gradients.

    It is handed those of whatever else is given, too.
    """

    def of(specs: Residuals, *_: Any) -> DotProductAttentionGrads:
        found = {name: getattr(specs.operands, name) for name in residuals.wanted.names}
        if "mod_args" in found:
            numbers = trees.floats(residuals.operands.mod_args)
            found["mod_args"] = trees.over_floats(lambda _, spec: spec, numbers, found["mod_args"])
        return DotProductAttentionGrads(**found)

    return of


def empty_rows(options: KernelOptions, operands: Operands, lse: jax.Array) -> jax.Array | None:
    """Finds which queries see no key, `[..., T, N]`; None where none can be without one."""
    return _sees_nothing(options, operands, lse) if _rows_may_be_empty(options, operands) else None


def _sees_nothing(options: KernelOptions, operands: Operands, lse: jax.Array) -> jax.Array:
    """Finds which queries see no key, `[..., T, N]`.

    Their lse does not tell: with a large sink it is the sink anyway.
    """
    live, _ = visibility.used_queries_and_keys(operands.mask, operands.bias, operands.sizes)
    if live is None:
        return jnp.zeros_like(lse, bool)
    groups = operands.query.shape[-2] // operands.key.shape[-2]
    return ~layout.merge_rows(jnp.broadcast_to(live, layout.split_rows(lse, groups).shape))


def _rows_may_be_empty(options: KernelOptions, operands: Operands) -> bool:
    """Tells whether a query may see no key: without need, q and dout are not copied."""
    mask = operands.mask
    if operands.bias is not None or options.score_mod is not None:  # which may give -inf
        return True
    if mask.has_positions or mask.has("elements", "query_segment_ids", "window"):
        return True
    if mask.has("query_seq_lengths", "key_value_seq_lengths"):
        return True
    return mask.mask_mod is not None and not visibility.every_query_sees(options, operands)
