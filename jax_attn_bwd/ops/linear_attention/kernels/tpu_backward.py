"""Backward of linear attention on TPUs: the last chunk first, with the cotangents of states in vector memory.

Equations (7) to (18) of `backward.py`, by the chunks of `tpu_chunks.py`, from the state before each chunk.
Where states are saved before groups of several chunks, the kernel of the forward makes the others again. Of
the gradient of the decays a chunk gives the sums over its pairs and those of single tokens; XLA adds them up.
"""

from collections.abc import Collection
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from jax_attn_bwd._core import mosaic_tpu, pallas
from jax_attn_bwd._core.numerics import total
from jax_attn_bwd._core.sharding import match_type
from jax_attn_bwd.ops.linear_attention.kernels import tpu_chunks as tpu
from jax_attn_bwd.ops.linear_attention.kernels import tpu_decays as chunk
from jax_attn_bwd.ops.linear_attention.kernels import tpu_erasing, tpu_forward
from jax_attn_bwd.ops.linear_attention.kernels.tpu_chunks import CHUNK, Chunks, Stages, TokenNumbers, product
from jax_attn_bwd.ops.linear_attention.kernels.tpu_decays import ChunkOfHead, DecaysOfChannels, KeyHead
from jax_attn_bwd.ops.linear_attention.plan import Plan
from jax_attn_bwd.ops.linear_attention.spec import Operands, Options, Residuals


def backward(
    plan: Plan, residuals: Residuals, wanted: frozenset[str], dout: jax.Array | None, dfinal: jax.Array | None
) -> dict[str, jax.Array]:
    """Returns the gradients of the operands in `wanted`, by name; a cotangent that is None is zero."""
    static = plan.options, plan.side_by_side, pallas.is_interpreted(mosaic_tpu.NAME), wanted
    return _backward(*static, residuals, dout, dfinal)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _backward(options, between, interpret, wanted, residuals, dout, dfinal):
    """Runs the kernel where the operands lie."""
    operands, states = residuals.operands, residuals.states
    dout = jnp.zeros_like(operands.value) if dout is None else dout
    names = [n for n in Operands._fields if n in wanted]

    def specs(specs: Operands, states: Any, *_):
        *batch, _, heads, _ = specs.value
        tokens = PartitionSpec(*specs.value[:-1])
        found = {"beta": tokens}
        if operands.log_decay is not None and operands.log_decay.ndim == 1:
            found["log_decay"] = tokens
        found["initial_state"] = PartitionSpec(*batch, heads, None, None)
        return {name: found.get(name, getattr(specs, name)) for name in names}

    run = partial(_of_shard, options, between, interpret, frozenset(names))
    call = mosaic_tpu.entry_by_entry(lambda *given: pallas.on_local_shards(run, specs, given))
    grads = call(operands, states, dout, dfinal)
    if "log_decay" in grads and operands.log_decay.ndim == 1:
        grads["log_decay"] = grads["log_decay"].sum((*range(operands.value.ndim - 2),))
    return {name: match_type(x, getattr(operands, name)) for name, x in grads.items()}


def _of_shard(
    options: Options, between: int, interpret: bool, wanted: frozenset[str], operands: Operands,
    states: jax.Array, dout: jax.Array, dfinal: jax.Array | None,
) -> dict[str, jax.Array]:  # fmt: skip
    """Returns the gradients on one device."""
    chunks, dtype = Chunks.of(options, operands), operands.value.dtype
    _, K, N, H, Hv = chunks.sizes
    (B, parts, count), width, value_width = chunks.grid, chunks.width, chunks.value_width
    known = tpu.decays(chunks, operands)
    if between > 1:  # the states before the other chunks, again
        first = operands._replace(initial_state=states[0].reshape(*chunks.batch, N, H, Hv))
        states = tpu_forward.of_shard(options, 1, interpret, first).states

    # what is read, the last chunk first
    last_first = lambda c: count - 1 - c
    of_keys = chunks.of_tokens(chunks.key_heads * width, last_first)
    of_values = chunks.of_tokens(chunks.value_heads * value_width, last_first)
    of_rows, of_state = chunks.of_rows(last_first), chunks.of_state()
    merged = states.reshape(*states.shape[:-4], N, H, Hv)
    arrays = [
        chunks.lay(operands.query),
        chunks.lay(operands.key),
        chunks.lay_values(operands.value),
        chunks.lay_values(dout),
        known.rows,
        chunks.lay_states(merged),
    ]
    of_channels, of_decays = (
        DecaysOfChannels.arrays(chunks, operands),
        DecaysOfChannels.specs(chunks, last_first),
    )
    arrays += of_channels or ()
    of_erasing = chunks.of_tokens(chunks.value_heads * width, last_first)
    arrays += (erasing := chunks.of_what_erases(operands))
    if dfinal is not None:
        arrays.append(chunks.lay_state(dfinal))
    arrays = pallas.vary_alike(arrays)

    # what is written, by name: shape, dtype and spec
    made = {
        "query": ((B, arrays[0].shape[1], K * width), dtype, of_keys),
        "key": ((B, arrays[0].shape[1], K * width), dtype, of_keys),
        "value": (arrays[2].shape, dtype, of_values),
        "rows": ((B, N, count, tpu.TILE, CHUNK), jnp.float32, of_rows),
        "initial_state": ((B, N, width, value_width), jnp.float32, of_state),
    }
    asked = wanted | {"rows"} if wanted & {"log_decay", "beta"} else wanted
    if of_channels is not None:
        made["log_decay"] = of_channels.logs.shape, of_channels.logs.dtype, of_decays.logs
        asked = wanted | {"rows"} if "beta" in wanted else wanted
    for name, x in zip(("erase_key", "erase_query"), erasing, strict=False):
        made[name] = x.shape, dtype, of_erasing
    names = [name for name in made if name in asked]
    found = mosaic_tpu.launch(
        partial(_kernel, chunks, wanted, tuple(names), dfinal is not None),
        "linear_attention_backward",
        interpret=interpret,
        grid=(B, parts, count),
        parallel=2,
        in_specs=[
            of_keys, of_keys, of_values, of_values, of_rows, chunks.of_states(last_first),
            *(of_decays if of_channels else ()), *[of_erasing] * len(erasing),
            *[of_state] * (dfinal is not None),
        ],
        out_specs=[made[name][2] for name in names],
        out_type=[pallas.out_type(made[name][0], made[name][1], arrays) for name in names],
        scratch=[pltpu.VMEM((chunks.value_heads, width, value_width), jnp.float32)],
    )(*arrays)  # fmt: skip

    # in the shapes of the operands
    grads = dict(zip(names, found, strict=True))
    rows = grads.pop("rows", None)
    unlaid = {"query": (K, H), "key": (K, H), "value": (N, Hv)}
    unlaid |= dict.fromkeys(("log_decay", "erase_key", "erase_query"), (N, H))
    result = {name: chunks.unlay(grads[name], *unlaid[name]) for name in unlaid.keys() & grads.keys()}
    for name in ("erase_key", "erase_query") & result.keys():
        result[name] = chunks.summed_over_groups(result[name], getattr(operands, name))
    if "initial_state" in grads:
        result["initial_state"] = chunks.unlay_state(grads["initial_state"])
    if "beta" in wanted:
        result["beta"] = chunks.unlay_rows(jnp.where(known.seen, rows[..., _SumRow.beta, :], 0))
    if "log_decay" in wanted and not chunks.of_channels:
        dg = chunks.unlay_rows(_of_decays(known, rows))
        has_axis = operands.log_decay is not None and operands.log_decay.ndim == operands.value.ndim
        result["log_decay"] = dg[..., None] if has_axis else dg
    return result


class _SumRow:
    """What is a number a token in the result: the rows of a tile."""

    start, end, passed, beta, pairs = range(5)


def _of_decays(known: TokenNumbers, rows: jax.Array) -> jax.Array:
    """Computes (18) of the sums that the kernel made, `[B, N, chunks, C]`."""
    start, end, passed, pairs = (
        rows[..., i, :] for i in (_SumRow.start, _SumRow.end, _SumRow.passed, _SumRow.pairs)
    )
    before = jnp.concatenate([jnp.zeros_like(end[..., :1]), end[..., :-1]], 3)
    dg = lax.cumsum(start, 3, reverse=True) + lax.cumsum(before, 3) + pairs + passed
    return jnp.where(known.seen & ~known.restarts, dg, 0)


def _kernel(
    chunks: Chunks, wanted: Collection[str], names: tuple[str, ...], has_dfinal: bool, query: Any, key: Any,
    value: Any, dout: Any, rows: Any, states: Any, *refs: Any,
) -> None:  # fmt: skip
    """Passes one chunk of each head of a step."""
    given = list(refs)
    decays = DecaysOfChannels(given.pop(0), given.pop(0)) if chunks.of_channels else None
    erasing = (given.pop(0), given.pop(0)) if chunks.options.is_erasing else None
    dfinal = given.pop(0) if has_dfinal else None
    *results, dstate = given
    outputs = dict(zip(names, results, strict=True))

    @pl.when(pl.program_id(2) == 0)
    def _():
        dstate[...] = jnp.zeros_like(dstate) if dfinal is None else dfinal[...]

    numbers, keys = chunk.read_keys(chunks, query, key, rows)

    def pass_head(n: int) -> Stages[_OfKeys]:
        (of, v), (_, do) = (chunk.read_value(chunks, numbers[n], x, n) for x in (value, dout))
        of_channels, own = slice(n * chunks.width, (n + 1) * chunks.width), keys[n // chunks.groups]
        of_head = None if decays is None else decays.of_head(chunks, n)
        within = yield from chunk.inside(chunks, own, numbers[n], of_head)
        if erasing is None:
            found = yield from _of_head(chunks, wanted, within, own, v, do, states[n], dstate[n])
        else:
            erased = tpu_erasing.read(chunks, within.column, erasing, n)
            found = yield from _of_erasing_head(
                chunks, wanted, within, own, erased, v, do, states[n], dstate[n]
            )
        dstate[n] = found.state
        if "value" in outputs:
            outputs["value"][:, of] = found.value.astype(outputs["value"].dtype)
        if "rows" in outputs:
            outputs["rows"][n] = found.rows
        if "log_decay" in outputs:
            outputs["log_decay"][:, of_channels] = found.log_decay.astype(outputs["log_decay"].dtype)
        for name in ("erase_key", "erase_query"):
            if name in outputs:
                outputs[name][:, of_channels] = found.erasing[name].astype(outputs[name].dtype)
        return found.keys

    shares = tpu.in_lockstep([pass_head(n) for n in range(chunks.value_heads)])

    # what the value heads of a key head add up to
    def pass_keys(k: int) -> Stages[None]:
        own = shares[k * chunks.groups : (k + 1) * chunks.groups]
        summed = _OfKeys(*(total(*parts) for parts in zip(*own, strict=True)))
        of = slice(k * chunks.width, (k + 1) * chunks.width)
        found = yield from _of_keys(chunks, wanted, keys[k], summed)
        for name, x in found.items():
            outputs[name][:, of] = x.astype(outputs[name].dtype)

    tpu.in_lockstep([pass_keys(k) for k in range(chunks.key_heads)])

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        if "initial_state" in outputs:
            outputs["initial_state"][...] = dstate[...]


class _OfKeys(NamedTuple):
    """What a value head gives its key head; None = not asked."""

    query: jax.Array  # of normalized, scaled queries, without what follows by the planes, [C, H]
    key: jax.Array  # of normalized keys, likewise
    reads: Any  # dP with the decays, [C, C]; None with decays of channels, as the next
    overlaps: Any  # b dA with the decays, [C, C]; None without a delta rule


class _OfHead(NamedTuple):
    """What a chunk gives of one value head."""

    state: jax.Array  # dS0, [H, Hv]
    value: jax.Array  # [C, Hv]
    rows: Any  # of `_SumRow`, [8, C]
    log_decay: Any  # of channels, [C, H]
    keys: _OfKeys
    erasing: dict[str, jax.Array]  # of erase keys and queries, by name, [C, H]


class _PairCotangents(NamedTuple):
    """The cotangents of the planes of a chunk, `[C, C]`, and what goes through the states, `[C, H]`."""

    reads: jax.Array  # dP, all of it
    overlaps: Any  # b dA, 0 but for j < i; None without a delta rule
    query: jax.Array  # f (dO S0^T)
    read: jax.Array  # what keys get that later tokens read
    reader: Any  # what they get as readers; None without a delta rule
    passed: jax.Array  # exp(c_C) sum_v S0 dS1, [1 or H, 1]


def _of_head(
    chunks: Chunks, wanted: Collection[str], within: ChunkOfHead, keys: KeyHead, value: jax.Array,
    dout: jax.Array, before: jax.Array, dafter: jax.Array,
) -> Stages[_OfHead]:  # fmt: skip
    """Computes (7) to (11), and what the gradients of decays, queries and keys need of this value head."""
    of, is_delta, beta = partial(product, chunks), chunks.options.is_delta, within.column.beta

    # the chunk again
    u = value
    if is_delta:
        solved, rest, u = yield from chunk.corrections(chunks, within, value, before)

    # (7), (8)
    du = of(within.reads, dout, (0, 0)) + within.at_end.times(chunks, dafter)
    yield
    dstate = within.whole * dafter + within.reader.transposed_times(chunks, dout)
    dv, dr = du, du
    if is_delta:
        dr = of(solved, du, (0, 0))
        yield
        dv = beta * dr
        dstate = dstate - within.at_start.transposed_times(chunks, dv)
    yield

    # (9) to (11)
    dreads, da, doverlaps, reader = of(dout, u, (1, 1)), None, None, None
    query = of(dout, before, (1, 1)) * within.from_start
    read = of(u, dafter, (1, 1)) * within.to_end
    if is_delta:
        da = chunk.strictly_lower(-of(dr, u, (1, 1)))
        doverlaps = beta * da
        reader = of(dv, before, (1, 1)) * -within.from_start
    passed = within.whole * (before * dafter).sum(1, keepdims=True)
    pairs = _PairCotangents(dreads, doverlaps, query, read, reader, passed)
    yield
    column = {}
    if is_delta and "beta" in wanted:
        column["beta"] = (dr * rest).sum(1, keepdims=True) + (da * within.overlaps).sum(1, keepdims=True)

    # through the decays
    if within.channels is not None:
        share, dg = yield from _through_channels(chunks, wanted, within, keys, pairs, dout, u)
        rows = _rows(column) if column else None
        return _OfHead(dstate, dv, rows, dg, share, {})
    share = _OfKeys(
        query,
        read if reader is None else read + reader,
        dreads * within.plane,
        None if doverlaps is None else doverlaps * within.plane,
    )
    across = None
    if "log_decay" in wanted:
        across = _of_shared_decays(chunks, within, keys, pairs, column)
    yield
    rows = _rows(column, across) if column else None
    return _OfHead(dstate, dv, rows, None, share, {})


def _of_erasing_head(
    chunks: Chunks, wanted: Collection[str], within: ChunkOfHead, keys: KeyHead,
    given: tuple[jax.Array, jax.Array], value: jax.Array, dout: jax.Array, before: jax.Array,
    dafter: jax.Array,
) -> Stages[_OfHead]:  # fmt: skip
    """Does what `_of_head` does where erase keys and queries, `given`, stand apart."""
    erasing = yield from tpu_erasing.inside(chunks, keys, within, given)
    found = yield from tpu_erasing.backward(
        chunks, wanted, within, erasing, keys, value, dout, before, dafter
    )
    rows, across = None, None
    if found.sums:
        column = {name: found.sums[name].sum(1, keepdims=True) for name in ("start", "end")}
        column["passed"] = jnp.broadcast_to(found.sums["passed"].sum(0, keepdims=True), (CHUNK, 1))
        across = _across_token(chunks, found.sums["pairs"])
        rows = _rows(column, across)
    of_keys = _OfKeys(found.rows["query"], found.rows["key"], None, None)
    return _OfHead(found.state, found.value, rows, found.log_decay, of_keys, found.rows)


def _rows(columns: dict[str, jax.Array], across: jax.Array | None = None) -> jax.Array:
    """Returns the tile of `_SumRow`, `[8, C]`."""
    zero = jnp.zeros((CHUNK, 1), jnp.float32)
    tile = tpu.as_rows(*(columns.get(name, zero) for name in ("start", "end", "passed", "beta")))
    return tile if across is None else jnp.where(tpu.number(tile.shape, 0) == _SumRow.pairs, across, tile)


def _of_shared_decays(
    chunks: Chunks, within: ChunkOfHead, keys: KeyHead, pairs: _PairCotangents, column: dict[str, jax.Array]
) -> jax.Array:
    """Puts the sums of (18) for single tokens in `column`; returns those over pairs, `[1, C]`."""
    query, key = keys.units
    start = (query * pairs.query).sum(1, keepdims=True)
    of_pairs = pairs.reads * within.reads
    if pairs.overlaps is not None:
        start += (key * pairs.reader).sum(1, keepdims=True)
        of_pairs += pairs.overlaps * within.overlaps
    end = (key * pairs.read).sum(1, keepdims=True)
    passed = jnp.broadcast_to(pairs.passed.sum(0, keepdims=True), (CHUNK, 1))
    column |= {"start": start, "end": end, "passed": passed}
    return _across_token(chunks, of_pairs)


def _through_channels(
    chunks: Chunks, wanted: Collection[str], within: ChunkOfHead, keys: KeyHead, pairs: _PairCotangents,
    dout: jax.Array, u: jax.Array,
) -> Stages[tuple[_OfKeys, Any]]:  # fmt: skip
    """Computes (12) to (14) and (18) where channels have decays of their own."""
    (query, key), channels = keys.units, within.channels
    assert channels is not None
    sums: list[Any] = [0.0] * chunk.HALVINGS if "log_decay" in wanted else []
    of_query, of_key = chunk.MovedByDecays(query, sums), chunk.MovedByDecays(key, sums)
    dq = pairs.query + (yield from channels.earlier(chunks, pairs.reads, key, of_query))
    dk = pairs.read + (yield from channels.later(chunks, pairs.reads, query, of_key))
    if pairs.overlaps is not None:
        dk += yield from channels.later(chunks, pairs.overlaps, key, of_key)
        dk += pairs.reader + (yield from channels.earlier(chunks, pairs.overlaps, key, of_key))
    dg = None
    if "log_decay" in wanted:
        start, end = query * pairs.query, key * pairs.read
        start = start if pairs.reader is None else start + key * pairs.reader
        dg = channels.of_decays(chunks, within.column, pairs.passed, [start, end, *sums])
    yield
    own = (chunk.wide(dout) * chunk.wide(u)).sum(1, keepdims=True)
    return _OfKeys(dq + own * key, dk + own * query, None, None), dg


def _across_token(chunks: Chunks, plane: jax.Array) -> jax.Array:
    """Returns the sums of `plane` over pairs j < t <= i, for each t, `[1, C]`."""
    row, column = tpu.number(plane.shape, 0), tpu.number(plane.shape, 1)
    after = (row < column).astype(jnp.bfloat16)
    found = product(chunks, plane, after, is_exact=True)  # of i, t: over j < t
    return jnp.where(row >= column, found, 0).sum(0, keepdims=True)


def _of_keys(
    chunks: Chunks, wanted: Collection[str], keys: KeyHead, share: _OfKeys
) -> Stages[dict[str, jax.Array]]:
    """Adds what (12) to (14) have of planes, and passes the norm: the gradients of queries and keys."""
    found, of, (dq, dk, reads, overlaps) = {}, partial(product, chunks), share
    if "query" in wanted:
        dq = dq if reads is None else dq + of(reads * keys.key_norm_row, keys.key)
        found["query"] = _through_norm(chunks, keys.query, keys.query_norm, dq, chunks.options.scale)
    yield
    if "key" in wanted:
        dk = dk if reads is None else dk + of(reads * keys.query_norm, keys.query, (0, 0))
        yield
        if overlaps is not None:
            dk += of((overlaps + overlaps.T) * keys.key_norm_row, keys.key)
        found["key"] = _through_norm(chunks, keys.key, keys.key_norm, dk)
    return found


def _through_norm(chunks: Chunks, x: jax.Array, norm: Any, d: jax.Array, scale: float = 1.0) -> jax.Array:
    """Returns the gradient of rows `x` from that of `norm` times them, of length `scale` where normalized."""
    if chunks.options.l2_norm_epsilon is not None and scale != 0:
        normed = (norm / scale) * chunk.wide(x)
        d = d - normed * (normed * d).sum(1, keepdims=True)
    return norm * d
