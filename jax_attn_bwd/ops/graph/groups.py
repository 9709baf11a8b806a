"""Edges in groups: the order in which the passes walk over them, and how a graph's arrays are built.

Edges are handled in **groups**: up to W edges of one node, so that the sums over a group are dense and
only one row a group is scattered. A hub is many groups, a node without edges is none. Groups of the
destinations hold the edges that come in, groups of the sources those that go out.

`arrays_of_known` builds them with NumPy; `arrays_of_traced` builds the same with JAX, so that the edges
may be traced, and sorts the edges twice. Off CPUs the groups carry their order, too, and on a GPU a graph
carries its schedules: what passes and kernels would otherwise compute of it again in every call, where each
step of that is a launch.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import ceil_div
from jax_attn_bwd._core.trees import exportable_tuple
from jax_attn_bwd.ops.graph.levels import levels_of
from jax_attn_bwd.ops.graph.segments import (
    Cut,
    Segments,
    last_not_above,
    most_spills,
    owners_of,
    parts_of,
    segments,
)

LIMIT = 2**31 - 1  # the most that an int32 counts
RUN = 256  # edges that one sum adds up in turn: its error grows with their number


@exportable_tuple
class Groups(NamedTuple):
    """Every edge once, in groups of W of one node, by increasing node; "none" is one past the end.

    Where W > 1 every node has a group, if need be one of no edge.
    """

    node: jax.Array  # int32 [V], whose edges these are
    other: jax.Array  # int32 [V, W], the nodes at their other ends
    number: jax.Array  # int32 [V, W], of these edges in the caller's order
    order: Any = None  # an `Order`; None: what nodes have of their groups is found in each call


@exportable_tuple
class Order(NamedTuple):
    """How the sums of groups become those of their nodes.

    Where the first group of each node is taken apart, the others are summed and added to it. Of 3 nodes and
    a group of none:

        groups 0 1 2 3 4 5 6    their nodes 0 0 1 2 2 2 3    `first` 0 2 3    `others` 1 4 5 6
    """

    first: Any  # int32 [nodes], the first group of each node, if it is taken apart
    others: Any  # int32 [G], the groups that are left, in order; past the end: none
    levels: (
        Any  # a list of `SumLevel`, by which they are summed, or else all groups; None where `jit` cut them
    )


@exportable_tuple
class Schedules(NamedTuple):
    """What depends on a graph alone, beside its groups."""

    by_destination: Segments
    by_source: Segments
    used: Any  # bool [num_src], which sources have an edge


class Side(NamedTuple):
    """The nodes at one end of the edges, and how the edges are grouped by them."""

    nodes: int
    width: int  # the most edges of a group
    together: int  # the most rows of groups that one step of a sum joins


class Grouping(NamedTuple):
    """What is known of a graph before its edges."""

    operator: str  # whom an error names
    src: Side
    dst: Side
    room: int  # edges that there is room for
    exact: bool  # whether there are as many
    in_runs: bool  # whether the edges of a hub are summed in runs
    in_segments: bool  # whether the graph carries the segments of kernels
    in_order: bool  # whether a scatter adds in order: no groups then have an `Order`
    first_apart: bool  # whether the first group of each node is taken apart


def _most_groups(cut: Grouping, side: Side) -> int:
    """Returns the number of groups that the edges may need."""
    room, nodes, width = cut.room, side.nodes, side.width
    bound = room if width == 1 else nodes and nodes + max(ceil_div(room, width) - 1, 0)
    if bound * width > LIMIT:
        expected = f"need at most {LIMIT} slots, which int32 can count"
        remedy = "split the graph by destinations"
        got = f"{bound * width} for {room} edges of {nodes} nodes"
        raise ValueError(checks.message(cut.operator, "the graph", expected, got, remedy))
    return bound


def arrays_of_known(cut: Grouping, offsets: Any, indices: Any, number: Any) -> dict[str, Any]:
    """Builds the fields of a `BipartiteCSC` that depend on its edges, by name, from checked NumPy arrays.

    They are those of the edges by destination; `number` is each edge's for the caller.
    """
    for side in (cut.dst, cut.src):  # before anything of that size is made
        _most_groups(cut, side)

    # sorted by destination, then those by source; in the padding there is no edge
    nnz, num_src, num_dst = len(indices), cut.src.nodes, cut.dst.nodes
    pad = lambda x, none: np.pad(x, (0, cut.room - nnz), constant_values=none)
    node, indices = pad(np.repeat(np.arange(num_dst), np.diff(offsets)), num_dst), pad(indices, num_src)
    number, order = np.concatenate([number, np.arange(nnz, cut.room)]), stable_order(indices)
    is_needed = cut.in_segments or cut.src.width > 1
    starts = offsets, _starts(np, indices[order], num_src) if is_needed else None
    return _arrays(np, cut, starts, node, indices, number, (indices[order], order))


def arrays_of_traced(cut: Grouping, src: jax.Array, dst: jax.Array) -> dict[str, Any]:
    """Builds the same from edges that may be traced; an edge with an end out of range does not exist."""
    num_src, num_dst = cut.src.nodes, cut.dst.nodes
    exists = (src >= 0) & (src < num_src) & (dst >= 0) & (dst < num_dst)
    src, dst = jnp.where(exists, src, num_src), jnp.where(exists, dst, num_dst)

    # sorted by destination, then those by source; edges that do not exist come last
    position = jnp.arange(src.shape[0], dtype=jnp.int32)
    node, number = lax.sort_key_val(dst.astype(jnp.int32), position)
    indices = src.astype(jnp.int32)[number]
    source, order = lax.sort_key_val(indices, position)
    return _arrays(jnp, cut, _both_starts(cut, node, source), node, indices, number, (source, order))


def stable_order(x: np.ndarray) -> np.ndarray:
    """Does `argsort(x, stable)` of numbers below 2**31 in a tenth of the time: sorts (number, position)."""
    keys = (x.astype(np.int64) << 32) | np.arange(len(x))
    keys.sort()
    return keys & (2**32 - 1)


def ends_of_edges(graph: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (sources, destinations) of the edges in the caller's order; past their ends where none is."""
    position = jnp.arange(graph.capacity, dtype=jnp.int32)
    node = last_not_above(jnp, graph.offsets, position, in_loop=graph.schedules is None) - 1
    node = jnp.where(position < graph.offsets[-1], node, graph.num_dst)
    by_number = lambda x: jnp.zeros_like(x).at[graph.map_csc_to_coo].set(x, unique_indices=True)
    return by_number(graph.indices), by_number(node)


def without_order(graph: Any) -> Any:
    """Returns the graph, whose groups a loop takes in chunks."""
    sides = {name: getattr(graph, name)._replace(order=None) for name in ("by_destination", "by_source")}
    return replace(graph, **sides)


def belong_together(graph: Any) -> bool:
    """Tells whether the groups, runs and segments of a graph of NumPy arrays are those of its edges."""
    # the ends of each edge, by number; past their ends where there is none
    room, offsets, number = graph.capacity, graph.offsets, graph.map_csc_to_coo
    count = np.diff(offsets)
    if len(count) != graph.num_dst or (count < 0).any() or not 0 == offsets[0] <= offsets[-1] <= room:
        return False
    if not graph.indices.shape == number.shape == (room,) or (np.sort(number) != np.arange(room)).any():
        return False
    node = np.pad(np.repeat(np.arange(graph.num_dst), count), (0, room - offsets[-1]), constant_values=-1)
    src, dst = np.full(room + 1, -1), np.full(room + 1, -1)
    src[number], dst[number] = np.where(node < 0, -1, graph.indices), node

    # each edge is once in the groups of either side, and its ends are theirs
    for groups, nodes, own, far in (
        (graph.by_destination, graph.num_dst, dst, src),
        (graph.by_source, graph.num_src, src, dst),
    ):
        slots = groups.number.shape
        if len(slots) != 2 or groups.other.shape != slots or groups.node.shape != slots[:1]:
            return False
        if (groups.number < 0).any():
            return False
        held = groups.number[groups.number < room]
        if (np.bincount(held, minlength=room) != (own[:room] >= 0)).any():
            return False
        exists = groups.number < room
        owner = np.broadcast_to(groups.node[:, None], exists.shape)
        if (np.diff(groups.node) < 0).any() or (own[held] != owner[exists]).any():
            return False
        if (far[held] != groups.other[exists]).any() or (own[held] >= nodes).any():
            return False

    # the order of the groups, runs and segments, which these decide
    for groups, nodes in ((graph.by_destination, graph.num_dst), (graph.by_source, graph.num_src)):
        if not _is_their_order(groups, nodes):
            return False
    owners, exists = graph.run_owners, node >= 0
    run = node + np.arange(room) // RUN
    if owners is not None and (owners[np.minimum(run, len(owners) - 1)] != node)[exists].any():
        return False
    return graph.schedules is None or any(
        _alike(graph.schedules, _schedules_of(graph, exact)) for exact in (True, False)
    )


def _schedules_of(graph: Any, exact: bool) -> Schedules:
    sides = ((graph.by_destination, graph.num_dst), (graph.by_source, graph.num_src))
    into, out_of = (segments_of_groups(np, *side, graph.capacity, exact) for side in sides)
    used = np.bincount(graph.indices, minlength=graph.num_src)[: graph.num_src] > 0
    return Schedules(into, out_of, used)


def _is_their_order(groups: Groups, nodes: int) -> bool:
    """Tells whether the `Order` of groups is theirs, if they have one."""
    if groups.order is None:
        return True
    first, is_traced = _starts(np, groups.node, nodes), groups.order.levels is None
    together = groups.order.levels[0].steps.shape[0] if groups.order.levels else 1
    for exact in (True, False):
        expected = _order(np, first, groups.node, exact, groups.order.first is not None, together)
        expected = expected._replace(levels=None) if expected and is_traced else expected
        if _alike(groups.order, expected):
            return True
    return False


def _alike(one: Any, other: Any) -> bool:
    structures: list[Any] = [jax.tree.structure(x) for x in (one, other)]
    return structures[0] == structures[1] and all(
        map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other))
    )


# The same with NumPy and with JAX, `xp`, of edges sorted by node; those that do not exist are past the ends.


def _arrays(
    xp: Any,
    cut: Grouping,
    starts: tuple[Any, Any],
    node: Any,
    indices: Any,
    number: Any,
    by_source: tuple[Any, Any],
) -> dict[str, Any]:
    """Builds the fields from the edges by destination, and from (their sources sorted, the order of that).

    `starts` are where the edges of each destination start in the one order, of each source in the other.
    """
    source, order = by_source
    sides = ((cut.dst, node, indices, number), (cut.src, source, node[order], number[order]))
    pair: list[Segments] = []
    if cut.dst.width == cut.src.width == 1:
        incoming, outgoing = (_singly(xp, cut, *side) for side in sides)
        if cut.in_segments and cut.dst.nodes and cut.src.nodes and cut.room:
            both = ((incoming, cut.dst.nodes), (outgoing, cut.src.nodes))
            pair = [segments_of_groups(xp, *x, cut.room, cut.exact) for x in both]
    else:
        (incoming, outgoing), cuts = _grouped(xp, cut, starts, [x[2:] for x in sides])
        pair = segments(xp, cuts, cut.exact) if cuts else []
    found = {
        "offsets": starts[0],
        "indices": indices,
        "map_csc_to_coo": number,
        "by_destination": incoming,
        "by_source": outgoing,
        "run_owners": _run_owners(xp, cut, node),
        "schedules": None,
    }
    if pair:
        found["schedules"] = Schedules(pair[0], pair[1], starts[1][1:] > starts[1][:-1])
    int32 = lambda x: jnp.asarray(x, x.dtype if x.dtype in (bool, np.int16) else jnp.int32)
    return jax.tree.map(int32, found) | {"exact": cut.exact and incoming.number.shape[1] == 1}


def _starts(xp: Any, node: Any, nodes: int, in_loop: bool = False) -> Any:
    """Finds where the edges of each node start, and behind them where the last node's end."""
    return last_not_above(xp, node, xp.arange(-1, nodes, dtype=np.int32), in_loop)


def _both_starts(cut: Grouping, node: jax.Array, source: jax.Array) -> tuple[Any, Any]:
    """Finds where the edges of each destination and source start: in one search, if it is no loop."""
    num_dst, num_src = cut.dst.nodes, cut.src.nodes
    if not cut.in_segments:
        into = _starts(jnp, node, num_dst, in_loop=True)
        return into, None if cut.src.width == 1 else _starts(jnp, source, num_src, in_loop=True)
    both = jnp.concatenate([node, source + (num_dst + 1)])  # behind the edges that do not exist
    found = _starts(jnp, both, num_dst + 1 + num_src)
    return found[: num_dst + 1], found[num_dst + 1 :] - node.shape[0]


def _singly(xp: Any, cut: Grouping, side: Side, node: Any, other: Any, number: Any) -> Groups:
    """Makes a group of each edge."""
    return Groups(node, other[:, None], xp.where(node < side.nodes, number, cut.room)[:, None])


def _grouped(
    xp: Any, cut: Grouping, starts: Sequence[Any], edges: Sequence[tuple[Any, Any]]
) -> tuple[list[Groups], list[Cut]]:
    """Groups edges sorted by node, (other, number) of each side: as few groups as needed if exact.

    Else as many as that may need. What kernels need is cut into segments, if the graph is to carry them.
    """
    # whose each group, and each spill of a segment, is
    sides, exact = (cut.dst, cut.src), cut.exact
    in_segments = bool(cut.in_segments and cut.dst.nodes and cut.src.nodes and cut.room)
    degrees = [start[1:] - start[:-1] for start in starts]
    counts = [xp.maximum(-(-x // side.width), 1) for x, side in zip(degrees, sides, strict=True)]
    rooms = [_most_groups(cut, side) for side in sides]
    parts = [parts_of(xp, x) for x in degrees] if in_segments else []
    rows = [None if exact else x for x in (*rooms, *[most_spills(cut.room)] * len(parts))]
    owned = owners_of(xp, [*counts, *parts], rows, in_loop=not cut.in_segments)

    groups, cuts = [], []
    others = (cut.src.nodes, cut.dst.nodes)
    for k, (side, start, (other, number)) in enumerate(zip(sides, starts, edges, strict=True)):
        # the edge in each slot: those of a node one after the other
        (first, owner), nodes, width = owned[k], side.nodes, side.width
        total = len(owner)
        known = xp.minimum(owner, max(nodes - 1, 0))
        if nodes and cut.room:
            rank = xp.arange(total, dtype=np.int32) - first[known]
            end = xp.where(owner < nodes, start[known + 1], 0)
            edge = (start[known] + rank * width)[:, None] + xp.arange(width, dtype=np.int32)[None]
            at, exists = xp.minimum(edge, cut.room - 1), edge < end[:, None]
            fill = lambda x, none, at=at, exists=exists: xp.where(exists, x[at], none)
            other, number = fill(other, others[k]), fill(number, cut.room)
        else:
            other, number = (xp.full((total, width), none, np.int32) for none in (others[k], cut.room))
        is_ordered = nodes and not cut.in_order
        order = _order(xp, first, owner, exact, cut.first_apart, side.together) if is_ordered else None
        groups.append(Groups(owner, other, number, order))
        if in_segments:
            cuts.append(Cut(first[:-1] * width, degrees[k], cut.room, parts[k], *owned[2 + k]))
    return groups, cuts


def _order(xp: Any, first: Any, owner: Any, exact: bool, first_apart: bool, together: int) -> Order | None:
    """Finds the `Order` of groups of the nodes `owner`, those of each node from `first` `[nodes + 1]` on."""
    total, nodes = len(owner), len(first) - 1
    others = leading = None
    if first_apart:
        group, leading = xp.arange(total, dtype=np.int32), first[:-1]
        is_other = (owner < nodes) & (group != first[xp.minimum(owner, nodes - 1)])
        at = xp.where(is_other, group - owner - 1, total)
        others = _put(xp.full(total - nodes, total, np.int32), at, group)
    if xp is not np:
        return Order(leading, others, None) if first_apart else None
    count = np.diff(first) - first_apart
    return Order(leading, others, levels_of(count, total - first_apart * nodes, exact, together))


def segments_of_groups(xp: Any, groups: Groups, nodes: int, capacity: int, exact: bool = False) -> Segments:
    """Cuts edges, in groups by node, into segments; see `segments`."""
    width = groups.other.shape[1]
    first = _starts(xp, groups.node, nodes)
    empty = (groups.number >= capacity).sum(1, dtype=np.int32)  # slots of a group, all at its end
    last = xp.where(first[1:] > first[:-1], empty[xp.maximum(first[1:] - 1, 0)], 0)
    degree = (first[1:] - first[:-1]) * width - last
    parts = parts_of(xp, degree)
    (owned,) = owners_of(xp, [parts], [None if exact else most_spills(capacity)])
    return segments(xp, [Cut(first[:-1] * width, degree, capacity, parts, *owned)], exact)[0]


def _run_owners(xp: Any, cut: Grouping, node: Any) -> Any:
    """Finds the node of each run of single edges sorted by `node`: edge k is in run node + k // RUN.

    None if no node has several runs (with a capacity: if it is small). Were RUN 2, of 3 nodes:

        edges 0 1 2 3 4 5    their nodes  0 0 0 1 1 2    their runs  0 0 1 2 3 4
        runs  0 1 2 3 4      found        0 0 1 1 2, and 3 past the last run
    """
    room, nodes = cut.room, cut.dst.nodes
    if not cut.in_runs or not ((np.bincount(node) > RUN).any() if cut.exact else room > 16 * RUN):
        return None
    run = xp.where(node < nodes, node + xp.arange(room, dtype=np.int32) // RUN, -1)
    count = nodes + room // RUN + 1
    owner = _put(xp.zeros(count, np.int32), xp.where(run < 0, count, run), node)
    past = xp.arange(count, dtype=np.int32) > run.max()
    return xp.where(past, nodes, np.maximum.accumulate(owner) if xp is np else lax.cummax(owner))


def _put(x: Any, index: Any, values: Any) -> Any:
    """Puts `values` at `index` of `x`; those past the end are dropped."""
    if isinstance(x, jax.Array):
        return x.at[index].set(values, mode="drop")
    is_kept = index < len(x)
    x[index[is_kept]] = values[is_kept]
    return x
