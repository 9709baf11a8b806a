"""Builds the order in which the loops walk over edges with JAX, so that the edges may be traced.

It makes the same arrays as `build_numpy.py` and `edge_groups.py` make with NumPy, and sorts the edges twice.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd.ops.graph.edge_groups import RUN, Groups, group_width, may_have_runs, most_groups


def arrays(operator: str, src: jax.Array, dst: jax.Array, num_src: int, num_dst: int) -> dict[str, Any]:
    """The fields of a `BipartiteCSC` by name; an edge with an end out of range does not exist."""
    exists = (src >= 0) & (src < num_src) & (dst >= 0) & (dst < num_dst)
    src, dst = jnp.where(exists, src, num_src), jnp.where(exists, dst, num_dst)
    room = src.shape[0]
    position = jnp.arange(room, dtype=jnp.int32)
    node, number = lax.sort_key_val(dst.astype(jnp.int32), position)
    indices = src.astype(jnp.int32)[number]
    source, order = lax.sort_key_val(indices, position)
    return {
        "offsets": _starts(node, num_dst),
        "indices": indices,
        "map_csc_to_coo": number,
        "by_destination": _grouped(operator, node, indices, number, num_dst, num_src),
        "by_source": _grouped(operator, source, node[order], number[order], num_src, num_dst),
        "run_owners": _run_owners(node, num_dst),
    }


def ends(graph: Any) -> tuple[jax.Array, jax.Array]:
    """(sources, destinations) of the edges in the caller's order; past their ends where there is none."""
    room = graph.capacity
    position = jnp.arange(room, dtype=jnp.int32)
    node = jnp.searchsorted(graph.offsets, position, side="right").astype(jnp.int32) - 1
    node = jnp.where(position < graph.offsets[-1], node, graph.num_dst)
    by_number = lambda x: jnp.zeros_like(x).at[graph.map_csc_to_coo].set(x, unique_indices=True)
    return by_number(graph.indices), by_number(node)


def _starts(node: jax.Array, nodes: int) -> jax.Array:
    """Where the edges of each node start, and behind them where the last node's end."""
    return jnp.searchsorted(node, jnp.arange(nodes + 1, dtype=jnp.int32)).astype(jnp.int32)


def _grouped(operator, node, other, number, nodes, others) -> Groups:
    """Groups of edges that are sorted by `node`."""
    room = node.shape[0]
    width = group_width(room, nodes)
    number = jnp.where(node < nodes, number, room)
    if width == 1:
        return Groups(node, other[:, None], number[:, None])
    start = _starts(node, nodes)
    count = jnp.maximum((start[1:] - start[:-1] + width - 1) // width, 1)
    ends = jnp.cumsum(count, dtype=jnp.int32)
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    total = most_groups(operator, room, nodes, width)
    rank = jnp.arange(room, dtype=jnp.int32) - start[node]
    slot = (first[node] + rank // width) * width + rank % width
    slot = jnp.where(node < nodes, slot, total * width)

    def fill(values, none):
        slots = jnp.full(total * width, none, jnp.int32)
        return slots.at[slot].set(values, mode="drop").reshape(total, width)

    owner = jnp.searchsorted(ends, jnp.arange(total, dtype=jnp.int32), side="right").astype(jnp.int32)
    return Groups(owner, fill(other, others), fill(number, room))


def _run_owners(node: jax.Array, nodes: int) -> jax.Array | None:
    """Computes what `edge_groups.run_owners` computes."""
    room = node.shape[0]
    if group_width(room, nodes) > 1 or not may_have_runs(room):
        return None
    run = jnp.where(node < nodes, node + jnp.arange(room, dtype=jnp.int32) // RUN, -1)
    count = nodes + room // RUN + 1
    owner = jnp.zeros(count, jnp.int32).at[jnp.where(run < 0, count, run)].set(node, mode="drop")
    past = jnp.arange(count, dtype=jnp.int32) > run.max()
    return jnp.where(past, nodes, lax.cummax(owner))
