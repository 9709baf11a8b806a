"""Segments: up to 256 edges of one node, what one program of a kernel walks over.

A node of many edges is several segments, so that a hub takes no longer than its edges would take elsewhere.
What its segments find goes to places in an array of its own and is summed there, in order: no atomics, and
the same bits in every run. A node without edges is one segment of none, which writes the node's zeros.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core.numerics import segment_sums
from jax_attn_bwd.ops.graph.groups import Groups

LENGTH = 256  # edges of a segment, at most


class Segments(NamedTuple):
    """The edges of a graph, sorted by the nodes at one end; S segments, P slots of edges, X places."""

    node: jax.Array  # int32 [S], whose edges these are; past the end: there is no such segment
    begin: jax.Array  # int32 [S], the first of its slots
    end: jax.Array  # int32 [S], past the last of them
    place: jax.Array  # int32 [S], where the sums of a part of a node's edges go; -1: these are all of them
    owner: Any  # int32 [X], the node of each place, not decreasing; past the end: none. No kernel reads it
    other: jax.Array  # int32 [P], the node at the other end
    number: jax.Array  # int32 [P], of the edge in the caller's order


def segments(groups: Groups, nodes: int, capacity: int) -> Segments:
    """Cuts edges, in groups by node, into segments. S and X are bounds by the shapes, so every graph fits."""
    # the slots of each node, `start` to `stop`, without the empty ones behind them: [nodes]
    total, width = groups.other.shape
    slots = total * width
    first = jnp.searchsorted(groups.node, jnp.arange(nodes + 1, dtype=jnp.int32)).astype(jnp.int32)
    empty = (groups.number >= capacity).sum(1, dtype=jnp.int32)  # slots of a group, all at its end
    last = empty[jnp.maximum(first[1:] - 1, 0)]
    start, stop = first[:-1] * width, first[1:] * width
    stop = jnp.where(stop > start, stop - last, stop)
    count = jnp.maximum((stop - start + LENGTH - 1) // LENGTH, 1)

    # segments follow the nodes: which node each is of, and which of the node's it is, [S]
    before = jnp.cumsum(count, dtype=jnp.int32) - count
    position = jnp.arange(nodes + slots // LENGTH, dtype=jnp.int32)
    node = jnp.searchsorted(before, position, side="right").astype(jnp.int32) - 1
    rank = position - before[node]
    exists = rank < count[node]  # the last node is found past its end, too
    begin = start[node] + rank * LENGTH
    end = jnp.minimum(begin + LENGTH, stop[node])

    # parts of a node's edges have places, in order, [X]
    parts = jnp.where(count > 1, count, 0)
    at = (jnp.cumsum(parts, dtype=jnp.int32) - parts)[node] + rank
    shared = exists & (parts[node] > 0)
    places = 2 * (slots // LENGTH) if slots > LENGTH else 0  # at most 2 d / 256 for d > 256 edges
    past = places + position
    owner = jnp.full(places, nodes, jnp.int32)
    owner = owner.at[jnp.where(shared, at, past)].set(node, mode="drop", unique_indices=True)
    return Segments(
        jnp.where(exists, node, nodes),
        begin,
        end,
        jnp.where(shared, at, -1),
        owner,
        groups.other.reshape(-1),
        groups.number.reshape(-1),
    )


def settled(x: jax.Array, owner: jax.Array, parts: jax.Array) -> jax.Array:
    """Puts the sum of each owner's `parts`, added in order, in its row of `x`, by node."""
    first, last = _ends(owner)
    sums = segment_sums(parts, jnp.expand_dims(first, tuple(range(1, parts.ndim))), axis=0)
    past = x.shape[0] + 1 + jnp.arange(owner.shape[0], dtype=jnp.int32)  # distinct, and all dropped
    rows = jnp.where(last, owner, past)
    return x.at[rows].set(sums.astype(x.dtype), mode="drop", unique_indices=True)


def _ends(owner: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tells which places are the first, and the last, of their owners."""
    differs, one = owner[1:] != owner[:-1], jnp.ones(1, bool)
    return jnp.concatenate([one, differs]), jnp.concatenate([differs, one])
