"""Segments: how the kernels cut the edges of a graph, which depends on the graph alone.

A segment is what one program walks over: up to 256 edges of one node. A node of many edges is several of
them, so that a hub takes no longer than its edges would take elsewhere. What its segments find goes to spills
in an array of its own and is summed there, in order: no atomics, and the same bits in every run. A node
without edges is one segment of none, which writes the node's zeros.

The longest segments come first: those that programs walk over together then end together.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core.trees import exportable_tuple
from jax_attn_bwd.ops.graph.levels import SumLevel, levels_of, most_together

LENGTH = 256  # edges of a segment, at most


@exportable_tuple
class Segments(NamedTuple):
    """The edges of a graph, sorted by the nodes at one end; S segments, X spills."""

    # int32 [S], the node of which these are all edges; of a part of a node's edges, whose sums go to spill k,
    # -1 - k; past the end: there is no such segment
    node: Any
    begin: Any  # int32 [S], the first of its slots: places of the edges in the groups, row by row
    length: Any  # int16 [S], how many slots
    owner: Any  # int32 [X], the node of each spill, not decreasing; past the end: none
    hubs: Any  # int32 [K], the nodes that have spills, increasing; None where `jit` cut them
    levels: Any  # a list of `SumLevel`, by which the spills of each hub are put together


class Cut(NamedTuple):
    """The edges of each of `n` nodes, which lie in slots one after the other, to be cut into segments."""

    first: Any  # int32 [n], the first slot of each
    degree: Any  # int32 [n], how many there are
    edges: int  # of all nodes, at most
    parts: Any  # int32 [n], the segments of a node that has several; else 0
    spill: Any  # int32 [n + 1], the first spill of each; behind them where the last node's end
    owner: Any  # int32 [X], as in `Segments`


def parts_of(xp: Any, degree: Any) -> Any:
    """Counts the segments of nodes that have several."""
    count = (degree + LENGTH - 1) // LENGTH
    return xp.where(count > 1, count, 0)


def most_spills(edges: int) -> int:
    """Bounds the spills of so many edges."""
    return 2 * (edges // LENGTH) if edges > LENGTH else 0  # at most 2 floor(d / 256) for d > 256 edges


def segments(xp: Any, cuts: Sequence[Cut], exact: bool) -> list[Segments]:
    """Cuts the edges of each side: as few segments as there are if `exact`, with NumPy; else S is a bound.

    A segment for each node comes first, then one for each spill; from these they are put in order, the
    longest first, what is no segment last. With JAX both sides are sorted as one.
    """
    size = [len(cut.first) + len(cut.owner) for cut in cuts]
    number = [xp.arange(n, dtype=np.int32) for n in size]
    shorter = []
    for cut, n in zip(cuts, number, strict=True):
        node, _, length = _segment(xp, cut, n)
        shorter.append(xp.where(node < len(cut.first), -length, 1))
    orders: list[Any]
    if xp is np:
        orders = [np.argsort(x, kind="stable") for x in shorter]
        orders = [x[: (y <= 0).sum()] if exact else x for x, y in zip(orders, shorter, strict=True)]
    else:  # pairs, which a library sorts by radix
        keys = [x + 2 * LENGTH * side for side, x in enumerate(shorter)]
        _, order = lax.sort_key_val(jnp.concatenate(keys), jnp.concatenate(number))
        orders = [order[end - n : end] for end, n in zip(np.cumsum(size), size, strict=True)]

    found = []
    for cut, order in zip(cuts, orders, strict=True):
        node, begin, length = _segment(xp, cut, order)
        spills = len(cut.owner)
        hubs, levels = None, list[SumLevel]()
        if xp is np and spills:
            hubs, levels = levels_of_hubs(cut.parts, spills, cut.edges, exact)
        found.append(Segments(node, begin, length.astype(np.int16), cut.owner, hubs, levels))
    return found


def _segment(xp: Any, cut: Cut, number: Any) -> tuple[Any, Any, Any]:
    """Returns (node, begin, length) of the segments of these numbers, as they are in `Segments`."""
    nodes, spills = len(cut.first), len(cut.owner)
    spill = xp.maximum(number - nodes, -1)
    node, rank = number, 0
    if spills:
        node = xp.where(spill < 0, number, cut.owner[xp.maximum(spill, 0)])
    known = xp.minimum(node, nodes - 1)
    if spills:
        rank = xp.where(spill < 0, 0, spill - cut.spill[known])
        node = xp.where((spill < 0) & (cut.parts[known] > 0), nodes, node)
    begin, length = cut.first[known] + rank * LENGTH, xp.minimum(cut.degree[known] - rank * LENGTH, LENGTH)
    begin, length = (xp.where(node < nodes, x, 0) for x in (begin, length))
    return xp.where((spill < 0) | (node == nodes), node, -1 - spill), begin, length


def levels_of_hubs(
    parts: np.ndarray, spills: int, edges: int, exact: bool
) -> tuple[np.ndarray, list[SumLevel]]:
    """Finds in which order the `parts` of each node are put together: (the nodes that have some, levels).

    Steps of few launches then put them together, where a running sum over the spills takes some for each
    power of two.
    """
    hubs = np.flatnonzero(parts)
    count = parts[hubs]
    if not exact:  # more than 256 edges each
        room = edges // LENGTH - len(hubs)
        hubs, count = np.append(hubs, len(parts) + np.arange(room)), np.pad(count, (0, room))
    return hubs, levels_of(count, spills, exact, most_together(len(hubs)))


def last_not_above(xp: Any, ends: Any, position: Any, in_loop: bool = False) -> Any:
    """Finds how many of the increasing `ends` are at or below each `position`, int32.

    `in_loop` is for CPUs, where XLA takes half a minute to compile all steps of 500,000 edges one by one; on
    a GPU a loop is two launches or more for each of them.
    """
    if xp is np:
        return np.searchsorted(ends, position, side="right").astype(np.int32)
    method = "scan" if in_loop else "scan_unrolled"
    return jnp.searchsorted(ends, position, side="right", method=method).astype(jnp.int32)


def owners_of(
    xp: Any, counts: Sequence[Any], rooms: Sequence[int | None], in_loop: bool = False
) -> list[tuple[Any, Any]]:
    """Finds, for each of `counts`, int32 `[n]`, of rows that lie one after the other, (first, owner).

    They are int32 `[n + 1]`, where the rows of each begin, and `[room]`, whose each row is; n where there is
    none. A room of None is as many rows as there are. One running sum and one search serve all.
    """
    ends = xp.concatenate([xp.zeros(1, np.int32), xp.cumsum(xp.concatenate(counts), dtype=np.int32)])
    stop = np.cumsum([len(x) for x in counts])
    bases = [(int(end) - len(x), len(x)) for end, x in zip(stop, counts, strict=True)]
    first = [ends[base : base + n + 1] - ends[base] for base, n in bases]
    room = [int(x[-1]) if size is None else size for x, size in zip(first, rooms, strict=True)]
    rows = [xp.arange(n, dtype=np.int32) + ends[base] for n, (base, _) in zip(room, bases, strict=True)]
    owner = last_not_above(xp, ends[1:], xp.concatenate(rows), in_loop)
    owner = [owner[end - n : end] for end, n in zip(np.cumsum(room), room, strict=True)]
    owner = [xp.minimum(x - base, n) for x, (base, n) in zip(owner, bases, strict=True)]
    return list(zip(first, owner, strict=True))
