"""Segments: how the kernels cut the edges of a graph, which depends on the graph alone.

A segment is what one program walks over: up to 256 edges of one node. A node of many edges is several of
them, so that a hub takes no longer than its edges would take elsewhere. What its segments find goes to spills
in an array of its own and is summed there, in order: no atomics, and the same bits in every run. A node
without edges is one segment of none, which writes the node's zeros.

The longest segments come first: those that programs walk over together then end together.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core.trees import exportable_tuple

LENGTH = 256  # edges of a segment, at most
_TOGETHER = 16  # spills that one step puts together: XLA:GPU writes what it sums along a longer axis


@exportable_tuple
class Segments(NamedTuple):
    """The edges of a graph, sorted by the nodes at one end; S segments, X spills."""

    node: Any  # int32 [S], whose edges these are; past the end: there is no such segment
    begin: Any  # int32 [S], the first of its slots: places of the edges in the groups, row by row
    end: Any  # int32 [S], past the last of them
    # int32 [S], where the sums of a part of a node's edges go; -1: these are all of them; None: all are
    spill: Any
    owner: Any  # int32 [X], the node of each spill, not decreasing; past the end: none
    hubs: Any  # int32 [K], the nodes that have spills, increasing; None where `jit` cut them
    tables: Any  # of int32 [n, 16]; see `tables_of`


def segments(xp: Any, first: Any, degree: Any, slots: int, exact: bool) -> Segments:
    """Cuts the `degree` edges of each node, which lie in `slots` slots from `first` on, both int32 `[nodes]`.

    As few segments as there are if `exact`, with NumPy; else S and X are bounds by the shapes, so that every
    graph fits.
    """
    # nodes of several segments, and where the spills of each end
    nodes = len(first)
    count = (degree + LENGTH - 1) // LENGTH
    parts = xp.where(count > 1, count, 0)
    ends = xp.cumsum(parts, dtype=np.int32)
    most = 2 * (slots // LENGTH) if slots > LENGTH else 0  # at most 2 d / 256 for d > 256 edges
    spills = int(parts.sum()) if exact else most

    # a segment for each node, and one for each spill
    spill, number = xp.arange(spills, dtype=np.int32), xp.arange(nodes, dtype=np.int32)
    owner = last_not_above(xp, ends, spill)
    known = xp.minimum(owner, nodes - 1)
    begin = first[known] + (spill - (ends - parts)[known]) * LENGTH
    end = xp.minimum(begin + LENGTH, (first + degree)[known])
    node = xp.concatenate([xp.where(count > 1, nodes, number), owner])
    begin, end = xp.concatenate([first, begin]), xp.concatenate([first + degree, end])
    begin, end = (xp.where(node < nodes, x, 0) for x in (begin, end))
    spill = xp.concatenate([xp.full(nodes, -1, np.int32), spill])

    # the longest first, what is no segment last
    shorter = xp.where(node < nodes, begin - end, 1)
    fields = (node, begin, end, spill)
    if xp is np:
        order = np.argsort(shorter, kind="stable")
        order = order[: (node < nodes).sum()] if exact else order
        node, begin, end, spill = (x[order] for x in fields)
    else:
        _, node, begin, end, spill = lax.sort((shorter, *fields), num_keys=1)
    found = (None, ()) if xp is not np or not spills else tables_of(parts, spills, slots, exact)
    return Segments(node, begin, end, spill if spills else None, owner, *found)


def tables_of(parts: np.ndarray, spills: int, slots: int, exact: bool) -> tuple[np.ndarray, list[np.ndarray]]:
    """Finds in which order the `parts` of each node are put together: (the nodes that have some, tables).

    A row of the first table names up to 16 spills of one node, a row of the next up to 16 rows of the one
    before, until each node has one; past their number there is none. A step of few launches then puts
    together what each row names, where a running sum over the spills takes some for each power of two.
    """
    hubs, nodes = np.flatnonzero(parts), len(parts)
    count, most = parts[hubs], slots // LENGTH + 1
    if not exact:  # more than 256 edges each
        room = slots // LENGTH - len(hubs)
        hubs, count = np.append(hubs, nodes + np.arange(room)), np.pad(count, (0, room))
    start, total, tables = np.cumsum(count) - count, spills, []
    most = int(count.max()) if exact else most
    while most > 1:
        rows = -(-count // _TOGETHER)
        owner, first = np.repeat(np.arange(len(hubs)), rows), np.cumsum(rows) - rows
        begin = start[owner] + (np.arange(len(owner)) - first[owner]) * _TOGETHER
        table = begin[:, None] + np.arange(_TOGETHER)
        table = np.where(table < (start + count)[owner][:, None], table, total)
        room = 0 if exact else total // _TOGETHER + len(hubs) - len(table)
        tables.append(np.pad(table, ((0, room), (0, 0)), constant_values=total))
        start, count, total, most = first, rows, len(tables[-1]), -(-most // _TOGETHER)
    return hubs, tables


def last_not_above(xp: Any, ends: Any, position: Any, in_loop: bool = False) -> Any:
    """Finds how many of the increasing `ends` are at or below each `position`, int32.

    `in_loop` is for CPUs, where XLA takes half a minute to compile all steps of 500,000 edges one by one; on
    a GPU a loop is two launches or more for each of them.
    """
    if xp is np:
        return np.searchsorted(ends, position, side="right").astype(np.int32)
    method = "scan" if in_loop else "scan_unrolled"
    return jnp.searchsorted(ends, position, side="right", method=method).astype(jnp.int32)
