"""Edges in groups: the order in which the passes walk over them, and how a graph's arrays are built.

Edges are handled in **groups**: up to W edges of one node, so that the sums over a group are dense and
only one row a group is scattered. A hub is many groups, a node without edges is none. Groups of the
destinations hold the edges that come in, groups of the sources those that go out.

On a CPU each edge is a group of its own: there a scatter takes less time than a group's empty places.

`arrays_of_known` builds them with NumPy; `arrays_of_traced` builds the same with JAX, so that the edges
may be traced, and sorts the edges twice.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import checks, targets
from jax_attn_bwd._core.numerics import ceil_div
from jax_attn_bwd._core.serialization import exportable_tuple

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


class FirstGroupPerNode(Groups):
    """Groups in another order: the first of each node, in the nodes' order; then the others, as they were.

    `node` is of the others alone.
    """


def first_group_per_node(groups: Groups, nodes: int) -> FirstGroupPerNode:
    """Puts the first group of each of the graph's `nodes` in front of all others."""
    node, count = groups.node, groups.node.shape[0]
    row = np.arange(count, dtype=np.int32)
    is_first = jnp.concatenate([jnp.ones(1, bool), node[1:] != node[:-1]])
    place = jnp.where(node == nodes, row, jnp.where(is_first, node, nodes + row - node - 1))
    order = jnp.zeros(count, jnp.int32).at[place].set(row, unique_indices=True)
    return FirstGroupPerNode(node[order[nodes:]], groups.other[order], groups.number[order])


def group_width(edges: int, nodes: int) -> int:
    """Chooses the edges of a group by the mean degree: wide groups are faster, but emptier where it is low.

    At most 16: a longer axis XLA:GPU sums in another way, for which it writes what is summed.
    """
    if targets.platform() == "cpu":
        return 1
    mean = edges / max(nodes, 1)
    return next((width for width, least in ((16, 10), (8, 6), (4, 2)) if mean >= least), 2)


def most_groups(operator: str, room: int, nodes: int, width: int) -> int:
    """Returns the number of groups that `room` edges of `nodes` nodes may need."""
    bound = room if width == 1 else nodes and nodes + max(ceil_div(room, width) - 1, 0)
    if bound * width > LIMIT:
        expected = f"need at most {LIMIT} slots, which int32 can count"
        remedy = "split the graph by destinations"
        got = f"{bound * width} for {room} edges of {nodes} nodes"
        raise ValueError(checks.message(operator, "the graph", expected, got, remedy))
    return bound


def _may_have_runs(room: int) -> bool:
    """Tells whether edges of a graph of that capacity are summed in runs."""
    return room > 16 * RUN


# Built with NumPy, from known edges.


def arrays_of_known(
    operator: str, offsets: Any, indices: Any, number: Any, num_src: int, num_dst: int, room: int, exact: bool
) -> dict[str, Any]:
    """Builds the fields of a `BipartiteCSC` that depend on its edges, by name, from checked NumPy arrays.

    Args:
      operator: whom an error names.
      offsets, indices: of the edges by destination.
      number: each edge's number for the caller.
      num_src, num_dst: node counts.
      room: edges that there is room for.
      exact: whether there are as many.
    """
    # the edges by destination, and the runs in which hubs are summed
    destination = np.repeat(np.arange(num_dst), np.diff(offsets))
    owners = _run_owners(destination, num_dst, room, exact)
    incoming = _grouped(operator, destination, indices, number, num_dst, num_src, room, exact)

    # the same edges by source
    by_source = stable_order(indices)
    source, destination, number_out = indices[by_source], destination[by_source], number[by_source]
    outgoing = _grouped(operator, source, destination, number_out, num_src, num_dst, room, exact)

    nnz = len(indices)
    return dict(
        offsets=_int32(offsets),
        indices=_int32(np.pad(indices, (0, room - nnz), constant_values=num_src)),
        map_csc_to_coo=_int32(np.concatenate([number, np.arange(nnz, room)])),
        by_destination=incoming,
        by_source=outgoing,
        run_owners=owners,
        exact=exact and incoming.number.shape[1] == 1,
    )


def stable_order(x: np.ndarray) -> np.ndarray:
    """Does `argsort(x, stable)` of numbers below 2**31 in a tenth of the time: sorts (number, position)."""
    keys = (x.astype(np.int64) << 32) | np.arange(len(x))
    keys.sort()
    return keys & (2**32 - 1)


def _grouped(operator, node, other, number, nodes, others, room, exact) -> Groups:
    """Groups edges sorted by `node`: as few groups as needed if `exact`, else as many as `room` may need."""
    # how many groups each node has, and how many there are
    width = group_width(room, nodes)
    degree = np.bincount(node, minlength=nodes)
    count = np.maximum(ceil_div(degree, width), 1 if width > 1 else 0)
    needed, bound = int(count.sum()), most_groups(operator, room, nodes, width)
    total = needed if exact else bound

    # the slot of each edge: its node's first group, and its place among the node's edges
    first, start = np.cumsum(count) - count, np.cumsum(degree) - degree
    rank = np.arange(len(node)) - start[node]
    slot = (first[node] + rank // width) * width + rank % width

    def fill(values, none):
        slots = np.full(total * width, none, np.int32)
        slots[slot] = values
        return jnp.asarray(slots.reshape(total, width))

    owner = np.full(total, nodes, np.int32)
    owner[:needed] = np.repeat(np.arange(nodes), count)
    return Groups(jnp.asarray(owner), fill(other, others), fill(number, room))


def _run_owners(node, nodes, room, exact) -> jax.Array | None:
    """Finds the node of each run of single edges sorted by `node`: edge k is in run node + k // RUN.

    None if the groups are wider, or if no node has several runs (with a capacity: if it is small).
    """
    short = exact and bool((np.bincount(node) <= RUN).all())
    if short or group_width(room, nodes) > 1 or not (exact or _may_have_runs(room)):
        return None
    owner = np.zeros(nodes + room // RUN + 1, np.int32)
    run = node + np.arange(len(node)) // RUN
    owner[run] = node
    owner = np.maximum.accumulate(owner)
    owner[run[-1] + 1 if len(run) else 0 :] = nodes
    return jnp.asarray(owner)


def _int32(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x.astype(np.int32))


# Built with JAX, from edges that may be traced.


def arrays_of_traced(
    operator: str, src: jax.Array, dst: jax.Array, num_src: int, num_dst: int
) -> dict[str, Any]:
    """Builds the fields of a `BipartiteCSC` by name; an edge with an end out of range does not exist."""
    exists = (src >= 0) & (src < num_src) & (dst >= 0) & (dst < num_dst)
    src, dst = jnp.where(exists, src, num_src), jnp.where(exists, dst, num_dst)

    # sorted by destination, then those by source; edges that do not exist come last
    position = jnp.arange(src.shape[0], dtype=jnp.int32)
    node, number = lax.sort_key_val(dst.astype(jnp.int32), position)
    indices = src.astype(jnp.int32)[number]
    source, order = lax.sort_key_val(indices, position)
    return {
        "offsets": _starts(node, num_dst),
        "indices": indices,
        "map_csc_to_coo": number,
        "by_destination": _grouped_traced(operator, node, indices, number, num_dst, num_src),
        "by_source": _grouped_traced(operator, source, node[order], number[order], num_src, num_dst),
        "run_owners": _run_owners_traced(node, num_dst),
    }


def ends_of_edges(graph: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (sources, destinations) of the edges in the caller's order; past their ends where none is."""
    position = jnp.arange(graph.capacity, dtype=jnp.int32)
    node = jnp.searchsorted(graph.offsets, position, side="right").astype(jnp.int32) - 1
    node = jnp.where(position < graph.offsets[-1], node, graph.num_dst)
    by_number = lambda x: jnp.zeros_like(x).at[graph.map_csc_to_coo].set(x, unique_indices=True)
    return by_number(graph.indices), by_number(node)


def _starts(node: jax.Array, nodes: int) -> jax.Array:
    """Finds where the edges of each node start, and behind them where the last node's end."""
    return jnp.searchsorted(node, jnp.arange(nodes + 1, dtype=jnp.int32)).astype(jnp.int32)


def _grouped_traced(operator, node, other, number, nodes, others) -> Groups:
    """Does what `_grouped` does, with as many groups as the shapes allow."""
    room = node.shape[0]
    width = group_width(room, nodes)
    number = jnp.where(node < nodes, number, room)
    if width == 1:
        return Groups(node, other[:, None], number[:, None])

    # where the groups of each node begin
    start = _starts(node, nodes)
    count = jnp.maximum((start[1:] - start[:-1] + width - 1) // width, 1)
    ends = jnp.cumsum(count, dtype=jnp.int32)
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    total = most_groups(operator, room, nodes, width)

    # the slot of each edge; that of an edge that does not exist is past the end
    rank = jnp.arange(room, dtype=jnp.int32) - start[node]
    slot = (first[node] + rank // width) * width + rank % width
    slot = jnp.where(node < nodes, slot, total * width)

    def fill(values, none):
        slots = jnp.full(total * width, none, jnp.int32)
        return slots.at[slot].set(values, mode="drop").reshape(total, width)

    owner = jnp.searchsorted(ends, jnp.arange(total, dtype=jnp.int32), side="right").astype(jnp.int32)
    return Groups(owner, fill(other, others), fill(number, room))


def _run_owners_traced(node: jax.Array, nodes: int) -> jax.Array | None:
    """Finds what `_run_owners` finds."""
    room = node.shape[0]
    if group_width(room, nodes) > 1 or not _may_have_runs(room):
        return None
    run = jnp.where(node < nodes, node + jnp.arange(room, dtype=jnp.int32) // RUN, -1)
    count = nodes + room // RUN + 1
    owner = jnp.zeros(count, jnp.int32).at[jnp.where(run < 0, count, run)].set(node, mode="drop")
    past = jnp.arange(count, dtype=jnp.int32) > run.max()
    return jnp.where(past, nodes, lax.cummax(owner))
