"""Edges in groups: the order in which the passes walk over them.

Edges are handled in **groups**: up to W edges of one node, so that the sums over a group are dense and
only one row a group is scattered. A hub is many groups, a node without edges is none. Groups of the
destinations hold the edges that come in, groups of the sources those that go out.

On a CPU each edge is a group of its own: there a scatter takes less time than a group's empty places.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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


class Led(Groups):
    """Groups in another order: one of each node, in the nodes' order; then the others, as they were.

    `node` is of the others alone.
    """


def led(groups: Groups, nodes: int) -> Led:
    """All groups of a graph, led by one of each of its `nodes`."""
    node, count = groups.node, groups.node.shape[0]
    row = np.arange(count, dtype=np.int32)
    leads = jnp.concatenate([jnp.ones(1, bool), node[1:] != node[:-1]])
    place = jnp.where(node == nodes, row, jnp.where(leads, node, nodes + row - node - 1))
    order = jnp.zeros(count, jnp.int32).at[place].set(row, unique_indices=True)
    return Led(node[order[nodes:]], groups.other[order], groups.number[order])


def grouped(operator, node, other, number, nodes, others, room, exact) -> Groups:
    """Groups of edges sorted by `node`: as many as needed with `exact`, else as many as `room` may need."""
    width = group_width(room, nodes)
    degree = np.bincount(node, minlength=nodes)
    count = np.maximum(ceil_div(degree, width), 1 if width > 1 else 0)
    needed, bound = int(count.sum()), most_groups(operator, room, nodes, width)
    total = needed if exact else bound
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


def most_groups(operator: str, room: int, nodes: int, width: int) -> int:
    """The number of groups that `room` edges of `nodes` nodes may need."""
    bound = room if width == 1 else nodes and nodes + max(ceil_div(room, width) - 1, 0)
    if bound * width > LIMIT:
        expected = f"need at most {LIMIT} slots, which int32 can count"
        remedy = "split the graph by destinations"
        got = f"{bound * width} for {room} edges of {nodes} nodes"
        raise ValueError(checks.message(operator, "the graph", expected, got, remedy))
    return bound


def group_width(edges: int, nodes: int) -> int:
    """Edges of a group, by the mean degree: wide groups are faster, but emptier where degrees are low.

    At most 16: a longer axis XLA:GPU sums in another way, for which it writes what is summed.
    """
    if targets.platform() == "cpu":
        return 1
    mean = edges / max(nodes, 1)
    return next((width for width, least in ((16, 10), (8, 6), (4, 2)) if mean >= least), 2)


def may_have_runs(room: int) -> bool:
    """Whether edges of a graph of that capacity are summed in runs."""
    return room > 16 * RUN


def run_owners(node, nodes, room, exact) -> jax.Array | None:
    """The node of each run of single edges sorted by `node`: edge k is in run node + k // RUN.

    None if the groups are wider, or if no node has several runs (with a capacity: if it is small).
    """
    short = exact and bool((np.bincount(node) <= RUN).all())
    if short or group_width(room, nodes) > 1 or not (exact or may_have_runs(room)):
        return None
    owner = np.zeros(nodes + room // RUN + 1, np.int32)
    run = node + np.arange(len(node)) // RUN
    owner[run] = node
    owner = np.maximum.accumulate(owner)
    owner[run[-1] + 1 if len(run) else 0 :] = nodes
    return jnp.asarray(owner)
