"""Erase keys a and queries b of a value head, within a TPU kernel.

Equations (24) to (29) of `forward.py` and `backward.py`, beside what `tpu_decays.py` has of the same chunk.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core.numerics import total
from jax_attn_bwd.ops.linear_attention.kernels import tpu_chunks as tpu
from jax_attn_bwd.ops.linear_attention.kernels import tpu_decays as chunk
from jax_attn_bwd.ops.linear_attention.kernels.tpu_chunks import Chunks, PerToken, Stages, product
from jax_attn_bwd.ops.linear_attention.kernels.tpu_decays import (
    ChunkOfHead,
    KeyHead,
    ScaledRows,
    strictly_lower,
)


class Erasing(NamedTuple):
    """What erases, and what it is to the tokens of a chunk and to the states around it."""

    key: jax.Array  # a, [C, H]
    query: jax.Array  # b
    at_start: ScaledRows  # b^
    at_end: ScaledRows  # a~
    overlaps: jax.Array  # A_ij = <b_i, a_j>_G for j < i, else 0, [C, C]
    writes: jax.Array  # L_ij = <b_i, k_j>_G, likewise
    reads: jax.Array  # P^a_ij = <q_i, a_j>_G for j <= i


def read(chunks: Chunks, column: PerToken, refs: tuple[Any, Any], n: int) -> tuple[jax.Array, jax.Array]:
    """Returns a and b of a value head of a step, 0 where they are not seen."""
    of = slice(n * chunks.width, (n + 1) * chunks.width)
    key, query = (tpu.seen(chunks, column, ref[:, of]) for ref in refs)
    return key, query


def inside(
    chunks: Chunks, keys: KeyHead, within: ChunkOfHead, given: tuple[jax.Array, jax.Array]
) -> Stages[Erasing]:
    """Returns what the chunk of one value head has of a and b beside `within`."""
    a, b = given
    if within.channels is None:
        scaled = lambda x, factor: ScaledRows(x, factor)
        reads = product(chunks, keys.query, a, (1, 1)) * keys.query_norm * within.plane
        overlaps = product(chunks, b, a, (1, 1)) * within.plane
        writes = product(chunks, b, keys.key, (1, 1)) * keys.key_norm_row * within.plane
        yield
    else:
        scaled = lambda x, factor: ScaledRows(x * factor, None)
        (query, key), a, b = keys.units, chunk.wide(a), chunk.wide(b)
        (writes,) = yield from within.channels.products(chunks, [b], key)
        reads, overlaps = yield from within.channels.products(chunks, [query, b], a)
        is_own = tpu.number(reads.shape, 0) == tpu.number(reads.shape, 1)
        reads = jnp.where(is_own, (query * a).sum(1, keepdims=True), reads)
    at_start, at_end = scaled(b, within.from_start), scaled(a, within.to_end)
    return Erasing(a, b, at_start, at_end, strictly_lower(overlaps), strictly_lower(writes), reads)


def corrections(
    chunks: Chunks, erasing: Erasing, value: jax.Array, before: jax.Array
) -> Stages[tuple[jax.Array, jax.Array]]:
    """Returns M = (I + A)^-1 `[C, C]`, and U `[C, Hv]`, by (24)."""
    rest = product(chunks, erasing.writes, value) + erasing.at_start.times(chunks, before)
    solved = yield from tpu.inverse(chunks, erasing.overlaps)
    return solved, -product(chunks, solved, rest)


def forward(
    chunks: Chunks, within: ChunkOfHead, erasing: Erasing, value: jax.Array, before: jax.Array
) -> Stages[tuple[jax.Array, jax.Array]]:
    """Returns the output `[C, Hv]`, and the state behind the chunk from that before it, `[H, Hv]`."""
    _, u = yield from corrections(chunks, erasing, value, before)
    yield
    out = product(chunks, within.reads, value) + product(chunks, erasing.reads, u)
    yield
    written = within.at_end.transposed_times(chunks, value) + erasing.at_end.transposed_times(chunks, u)
    return within.reader.times(chunks, before) + out, within.whole * before + written


class OfErasingHead(NamedTuple):
    """What a chunk gives of one value head that erases."""

    state: jax.Array  # dS0, [H, Hv]
    value: jax.Array  # [C, Hv]
    sums: dict[str, jax.Array]  # of (18), where channels share their decay
    log_decay: Any  # of channels, [C, H]
    rows: dict[str, jax.Array]  # of normalized queries and keys, and of what erases, [C, H]


def backward(
    chunks: Chunks, wanted: Collection[str], within: ChunkOfHead, erasing: Erasing, keys: KeyHead,
    value: jax.Array, dout: jax.Array, before: jax.Array, dafter: jax.Array,
) -> Stages[OfErasingHead]:  # fmt: skip
    """Computes (26) to (29), and with them (12) to (14) and (18)."""
    times = lambda x, y, axes=(1, 0): product(chunks, x, y, axes)
    solved, u = yield from corrections(chunks, erasing, value, before)

    # (26), (27)
    du = times(erasing.reads, dout, (0, 0)) + erasing.at_end.times(chunks, dafter)
    yield
    dr = times(solved, du, (0, 0))
    yield
    dstate = within.whole * dafter + within.reader.transposed_times(chunks, dout)
    dstate -= erasing.at_start.transposed_times(chunks, dr)
    dvalue = times(within.reads, dout, (0, 0)) + within.at_end.times(chunks, dafter)
    dvalue -= times(erasing.writes, dr, (0, 0))
    yield

    # (28), (29)
    planes = {
        ("query", "key"): times(dout, value, (1, 1)),
        ("query", "erase_key"): times(dout, u, (1, 1)),
        ("erase_query", "erase_key"): strictly_lower(-times(dr, u, (1, 1))),
        ("erase_query", "key"): strictly_lower(-times(dr, value, (1, 1))),
    }
    yield
    of_states = {
        "query": times(dout, before, (1, 1)) * within.from_start,
        "erase_query": times(dr, before, (1, 1)) * -within.from_start,
        "key": times(value, dafter, (1, 1)) * within.to_end,
        "erase_key": times(u, dafter, (1, 1)) * within.to_end,
    }
    passed = within.whole * (before * dafter).sum(1, keepdims=True)
    yield

    # each plane gives to the rows of both its sides
    (query, key), found = keys.units, dict(of_states)
    sides = {
        "query": query,
        "key": key,
        "erase_key": chunk.wide(erasing.key),
        "erase_query": chunk.wide(erasing.query),
    }
    moved: list[Any] = [0.0] * chunk.HALVINGS if "log_decay" in wanted else []
    for (later, earlier), plane in planes.items():
        if within.channels is None:
            decayed = plane * within.plane
            found[later] += times(decayed, sides[earlier])
            found[earlier] += times(decayed, sides[later], (0, 0))
            yield
            continue
        for to, over, of in (
            (later, within.channels.earlier, earlier),
            (earlier, within.channels.later, later),
        ):
            found[to] += yield from over(chunks, plane, sides[of], chunk.MovedByDecays(sides[to], moved))
    if within.channels is not None:
        of_own, of_erased = ((chunk.wide(dout) * chunk.wide(x)).sum(1, keepdims=True) for x in (value, u))
        found["query"] += of_own * key + of_erased * sides["erase_key"]
        found["key"] += of_own * query
        found["erase_key"] += of_erased * query

    # (18)
    sums, dg = {}, None
    if "log_decay" in wanted:
        by_side = {name: sides[name] * of_states[name] for name in sides}
        start, end = by_side["query"] + by_side["erase_query"], by_side["key"] + by_side["erase_key"]
        if within.channels is None:
            values = within.reads, erasing.reads, erasing.overlaps, erasing.writes
            of_pairs = total(*(d * x for d, x in zip(planes.values(), values, strict=True)))
            sums = {"start": start, "end": end, "passed": passed, "pairs": of_pairs}
        else:
            dg = within.channels.of_decays(chunks, within.column, passed, [start, end, *moved])
    yield
    return OfErasingHead(dstate, dvalue, sums, dg, found)
