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
from jax_attn_bwd.ops.linear_attention.kernels import tpu_forward
from jax_attn_bwd.ops.linear_attention.kernels.tpu_chunks import (
    CHUNK,
    Chunks,
    Decays,
    Head,
    KeyHead,
    Stages,
    product,
)
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
        found = {"log_decay": tokens, "beta": tokens}
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
    has_rows = bool(wanted & {"log_decay", "beta"})
    names = [name for name in made if name in wanted or (name == "rows" and has_rows)]
    found = mosaic_tpu.launch(
        partial(_kernel, chunks, wanted, tuple(names), dfinal is not None),
        "linear_attention_backward",
        interpret=interpret,
        grid=(B, parts, count),
        parallel=2,
        in_specs=[
            of_keys, of_keys, of_values, of_values, of_rows, chunks.of_states(last_first),
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
    result = {name: chunks.unlay(grads[name], *unlaid[name]) for name in unlaid.keys() & grads.keys()}
    if "initial_state" in grads:
        result["initial_state"] = chunks.unlay_state(grads["initial_state"])
    if "beta" in wanted:
        result["beta"] = chunks.unlay_rows(jnp.where(known.seen, rows[..., _Rows.beta, :], 0))
    if "log_decay" in wanted:
        result["log_decay"] = chunks.unlay_rows(_of_decays(known, rows))
    return result


class _Rows:
    """What is a number a token in the result: the rows of a tile."""

    start, end, passed, beta, pairs = range(5)


def _of_decays(known: Decays, rows: jax.Array) -> jax.Array:
    """Computes (18) of the sums that the kernel made, `[B, N, chunks, C]`."""
    start, end, passed, pairs = (rows[..., i, :] for i in (_Rows.start, _Rows.end, _Rows.passed, _Rows.pairs))
    before = jnp.concatenate([jnp.zeros_like(end[..., :1]), end[..., :-1]], 3)
    dg = lax.cumsum(start, 3, reverse=True) + lax.cumsum(before, 3) + pairs + passed
    return jnp.where(known.seen & ~known.restarts, dg, 0)


def _kernel(
    chunks: Chunks, wanted: Collection[str], names: tuple[str, ...], has_dfinal: bool, query: Any, key: Any,
    value: Any, dout: Any, rows: Any, states: Any, *refs: Any,
) -> None:  # fmt: skip
    """Passes one chunk of each head of a step."""
    *results, dstate = refs[has_dfinal:]
    outputs = dict(zip(names, results, strict=True))

    @pl.when(pl.program_id(2) == 0)
    def _():
        dstate[...] = refs[0][...] if has_dfinal else jnp.zeros_like(dstate)

    heads = [Head.of(rows[n]) for n in range(chunks.value_heads)]
    keys = []
    for k in range(chunks.key_heads):
        head, of = heads[k * chunks.groups], slice(k * chunks.width, (k + 1) * chunks.width)
        keys.append(KeyHead.of(chunks, *(tpu.seen(chunks, head, x[:, of]) for x in (query, key))))

    def of_value_head(n: int) -> Stages[_OfKeys]:
        of = slice(n * chunks.value_width, (n + 1) * chunks.value_width)
        v, do = (tpu.seen(chunks, heads[n], x[:, of]) for x in (value, dout))
        given = heads[n], keys[n // chunks.groups], v, do, states[n], dstate[n]
        found = yield from _of_head(chunks, wanted, *given)
        dstate[n] = found.state
        if "value" in outputs:
            outputs["value"][:, of] = found.value.astype(outputs["value"].dtype)
        if "rows" in outputs:
            outputs["rows"][n] = found.rows
        return found.keys

    shares = tpu.in_lockstep([of_value_head(n) for n in range(chunks.value_heads)])

    # what the value heads of a key head add up to
    def of_key_head(k: int) -> Stages[None]:
        own = shares[k * chunks.groups : (k + 1) * chunks.groups]
        summed = _OfKeys(*(total(*parts) for parts in zip(*own, strict=True)))
        of = slice(k * chunks.width, (k + 1) * chunks.width)
        found = yield from _of_keys(chunks, wanted, keys[k], summed)
        for name, x in found.items():
            outputs[name][:, of] = x.astype(outputs[name].dtype)

    tpu.in_lockstep([of_key_head(k) for k in range(chunks.key_heads)])

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        if "initial_state" in outputs:
            outputs["initial_state"][...] = dstate[...]


class _OfKeys(NamedTuple):
    """What a value head gives its key head; None = not asked."""

    query: Any  # f (dO S0^T), [C, H]
    key: Any  # what keys get through the states, [C, H]
    reads: Any  # dP with the decays, [C, C]
    overlaps: Any  # b dA with the decays, [C, C]; None without a delta rule, too


class _OfHead(NamedTuple):
    """What a chunk gives of one value head."""

    state: jax.Array  # dS0, [H, Hv]
    value: jax.Array  # [C, Hv]
    rows: Any  # of `_Rows`, [8, C]
    keys: _OfKeys


def _of_head(
    chunks: Chunks, wanted: Collection[str], head: Head, keys: KeyHead, value: jax.Array, dout: jax.Array,
    before: jax.Array, dafter: jax.Array,
) -> Stages[_OfHead]:  # fmt: skip
    """Computes (7) to (11), (18), and what the key head needs of this value head."""
    options, column = chunks.options, head.column
    of = partial(product, chunks)
    is_delta, of_decays = options.is_delta, "log_decay" in wanted
    of_query = options.scale * column.from_start * keys.query_norm
    of_start, of_end = column.from_start * keys.key_norm, column.to_end * keys.key_norm

    # the chunk again
    u, reads = value, keys.reads * head.plane
    if is_delta:
        solved, rest, u = yield from tpu.corrections(chunks, head, keys, value, before)

    # (7), (8)
    du = of(reads, dout, (0, 0)) + of(keys.key, dafter) * of_end
    yield
    dstate = column.whole[:1] * dafter + of(keys.query, of_query * dout, (0, 0))
    dv, dr = du, None
    if is_delta:
        dr = of(solved, du, (0, 0))
        yield
        dv = column.beta * dr
        dstate = dstate - of(keys.key, of_start * dv, (0, 0))
    yield

    # (9), with the decays between the tokens
    dreads = of(dout, u, (1, 1)) * head.plane
    doverlaps = None
    if is_delta:
        is_before = tpu.number(dreads.shape, 0) > tpu.number(dreads.shape, 1)
        da = jnp.where(is_before, of(dr, u, (1, 1)), 0) * -head.plane
        doverlaps = column.beta * da
    yield

    # (10) with its factors, of normalized queries and keys
    dq = of(dout, before, (1, 1)) * column.from_start
    read = of(u, dafter, (1, 1)) * column.to_end
    reader = None
    if is_delta:
        reader = of(dv, before, (1, 1)) * -column.from_start
    yield

    # (11), (18): numbers of tokens
    rows = None
    if of_decays or "beta" in wanted:
        zero = jnp.zeros((CHUNK, 1), jnp.float32)
        start = end = passed = dbeta = zero
        pairs = jnp.zeros((1, CHUNK), jnp.float32)
        if is_delta:
            dbeta = (dr * rest).sum(1, keepdims=True) + (da * keys.overlaps).sum(1, keepdims=True)
        if of_decays:
            start = (keys.query * dq).sum(1, keepdims=True) * (options.scale * keys.query_norm)
            if is_delta:
                start += (keys.key * reader).sum(1, keepdims=True) * keys.key_norm
            end = (keys.key * read).sum(1, keepdims=True) * keys.key_norm
            share = (before * dafter).sum(1, keepdims=True).sum(0, keepdims=True)
            passed = column.whole * share
            of_pairs = dreads * keys.reads
            of_pairs = of_pairs if doverlaps is None else of_pairs + doverlaps * keys.overlaps
            pairs = _across_token(chunks, of_pairs)
        tile = tpu.as_rows(start, end, passed, dbeta)
        rows = jnp.where(tpu.number(tile.shape, 0) == _Rows.pairs, pairs, tile)
    yield
    of_key = read if reader is None else read + reader
    return _OfHead(dstate, dv, rows, _OfKeys(dq, of_key, dreads, doverlaps))


def _across_token(chunks: Chunks, plane: jax.Array) -> jax.Array:
    """Returns the sums of `plane` over pairs j < t <= i, for each t, `[1, C]`."""
    row, column = tpu.number(plane.shape, 0), tpu.number(plane.shape, 1)
    after = (row < column).astype(jnp.bfloat16)
    found = product(chunks, plane, after, is_exact=True)  # of i, t: over j < t
    return jnp.where(row >= column, found, 0).sum(0, keepdims=True)


def _of_keys(
    chunks: Chunks, wanted: Collection[str], keys: KeyHead, share: _OfKeys
) -> Stages[dict[str, jax.Array]]:
    """Computes (12) to (14), and passes the norm: the gradients of queries and keys."""
    options, found, of = chunks.options, {}, partial(product, chunks)
    if "query" in wanted:
        dq = share.query + of(share.reads * keys.key_norm_row, keys.key)
        found["query"] = _through_norm(chunks, keys.query, keys.query_norm, dq, options.scale)
    yield
    if "key" in wanted:
        dk = share.key + of(share.reads * (options.scale * keys.query_norm), keys.query, (0, 0))
        yield
        if share.overlaps is not None:
            dk += of((share.overlaps + share.overlaps.T) * keys.key_norm_row, keys.key)
        found["key"] = _through_norm(chunks, keys.key, keys.key_norm, dk)
    return found


def _through_norm(chunks: Chunks, x: jax.Array, norm: Any, d: jax.Array, scale: float = 1.0) -> jax.Array:
    """Returns `scale` times the gradient of rows `x` that `norm` multiplies, from that of their product."""
    if chunks.options.l2_norm_epsilon is not None:
        normed = norm * x
        d = d - normed * (normed * d).sum(1, keepdims=True)
    return (scale * norm) * d
