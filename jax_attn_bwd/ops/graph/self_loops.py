"""Self-loops: an edge from each node to itself, as PyTorch Geometric's layers add them by default."""

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.types import Fill
from jax_attn_bwd.ops.graph import reductions
from jax_attn_bwd.ops.graph.groups import ends_of_edges
from jax_attn_bwd.ops.graph.plan import EdgePlan

FILLS = get_args(Fill)
_OPERATOR = "BipartiteCSC.with_self_loops"


def edges(operator: str, graph: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (sources, destinations, numbers) of the edges of a graph, in the caller's order."""
    if is_traced(graph):
        remedy = "build it outside jit and hand it in as an argument"
        raise TypeError(checks.message(operator, "the graph", "be known", "a traced one", remedy))
    _check_one(operator, graph)
    offsets, number = np.asarray(graph.offsets), np.asarray(graph.map_csc_to_coo)[: graph.num_edges]
    order = np.argsort(number)
    dst = np.repeat(np.arange(graph.num_dst), np.diff(offsets))
    return np.asarray(graph.indices, np.int64)[order], dst[order], number[order]


def is_traced(graph: Any) -> bool:
    """Tells whether the edges of the graph are traced, and so not known."""
    return any(isinstance(x, jax.core.Tracer) for x in (graph.offsets, graph.indices))


def with_loops(graph: Any, edge: Any, fill_value: Any, capacity: int | None) -> tuple[Any, jax.Array | None]:
    """Returns the graph with a loop for each node, and its edge data; see `BipartiteCSC.with_self_loops`."""
    # a graph whose destinations are its first sources
    _check_one(_OPERATOR, graph)
    if not graph.aligned:
        expected = "hold as its first sources the destinations"
        got = "several graphs side by side, each with sources of its own before the next one's"
        remedy = "add the loops to each graph before batch_graphs"
        raise ValueError(checks.message(_OPERATOR, "the graph", expected, got, remedy))
    if isinstance(fill_value, str):
        checks.choice(_OPERATOR, "fill_value", fill_value, FILLS)
    elif not checks.is_array(fill_value) and type(fill_value) not in (int, float):
        expected, got = f"be a number, an array or one of {FILLS}", type(fill_value).__name__
        raise TypeError(checks.message(_OPERATOR, "fill_value", expected, got))

    # edge data, and those given for the loops, one row for each
    if edge is not None:
        edge = checks.floating(_OPERATOR, "edge", edge)
        if edge.ndim == 0 or edge.shape[0] != graph.capacity:
            expected = f"have shape [nnz, ...], nnz = {graph.capacity}"
            raise ValueError(checks.message(_OPERATOR, "edge", expected, edge.shape))
        if not isinstance(fill_value, str):
            shape = (min(graph.num_src, graph.num_dst), *edge.shape[1:])
            fill_value = jnp.asarray(fill_value, edge.dtype)
            checks.broadcasts(_OPERATOR, "fill_value", fill_value, "[nodes, ...] as edge", shape)
            fill_value = jnp.broadcast_to(fill_value, shape)

    run = _on_device if is_traced(graph) else _on_host
    return run(graph, edge, fill_value, capacity)


def _on_host(graph, edge, fill_value, capacity):
    # the edges that stay, then the loops
    src, dst, number = edges(_OPERATOR, graph)
    kept, nodes = np.flatnonzero(src != dst), min(graph.num_src, graph.num_dst)
    loops = np.arange(nodes)
    ends = (np.concatenate([x[kept], loops]) for x in (src, dst))
    found = type(graph).from_coo(*ends, graph.num_src, graph.num_dst, capacity=capacity)
    if edge is None:
        return found, None
    given, filled = edge[number[kept]], _filled(graph, edge, fill_value)
    room = jnp.zeros((found.capacity - len(kept) - nodes, *edge.shape[1:]), edge.dtype)
    return found, jnp.concatenate([given, filled, room])


def _on_device(graph, edge, fill_value, capacity):
    """Does what `_on_host` does for a traced graph, whose number of edges is not known."""
    nodes = min(graph.num_src, graph.num_dst)
    least = graph.capacity + nodes
    room = least if capacity is None else checks.integer(_OPERATOR, "capacity", capacity)
    if room < least:
        expected = f"be at least {least}, that of the traced graph and a loop for each node"
        raise ValueError(checks.message(_OPERATOR, "capacity", expected, capacity))

    # the edges that stay keep their order; the loops follow the last of them
    src, dst = ends_of_edges(graph)
    kept = (dst < graph.num_dst) & (src != dst)
    loops = jnp.arange(nodes, dtype=jnp.int32)
    position = jnp.where(kept, jnp.cumsum(kept, dtype=jnp.int32) - 1, room)
    last = kept.sum(dtype=jnp.int32) + loops

    def joined(given, own, none):
        both = jnp.full((room, *given.shape[1:]), none, given.dtype).at[position].set(given, mode="drop")
        return both.at[last].set(own, unique_indices=True)

    ends = (joined(x, loops, -1) for x in (src, dst))
    found = type(graph).from_traced(*ends, graph.num_src, graph.num_dst)
    if edge is None:
        return found, None
    return found, joined(edge, _filled(graph, edge, fill_value), 0)


def _check_one(operator: str, graph: Any) -> None:
    if np.ndim(graph.offsets) != 1:
        expected = "be one graph"
        raise ValueError(checks.message(operator, "the graph", expected, "a stack of them"))


def _filled(graph: Any, edge: jax.Array, fill_value: Any) -> jax.Array:
    """Returns the data of the loops: `fill_value`, or what it makes of the edges into each node, 0 without.

    Loops that are replaced do not count.
    """
    if not isinstance(fill_value, str):
        return fill_value
    # what the edges into each node hold, without the loops that are replaced
    src, dst = ends_of_edges(graph)
    replaced = (src == dst) & (dst < graph.num_dst)
    count = (graph.offsets[1:] - graph.offsets[:-1]).at[dst].add(-replaced.astype(jnp.int32), mode="drop")
    spread = lambda x: jnp.expand_dims(x, tuple(range(1, edge.ndim)))
    neutral, sign = (0, 1) if fill_value in ("mean", "add") else (-jnp.inf, -1 if fill_value == "min" else 1)
    given = jnp.where(spread(replaced), neutral, sign * edge.astype(accumulator_dtype(edge.dtype)))

    # the minimum is the negative of a maximum; the mean divides the sum by what is counted
    plan = EdgePlan.of("xla", "edge_sum" if neutral == 0 else "edge_max", (graph, given))
    found = sign * reductions.forward(plan, graph, given)
    if fill_value == "mean":
        found = found / spread(jnp.maximum(count, 1)).astype(found.dtype)
    found = jnp.where(spread(count > 0), found, 0).astype(edge.dtype)
    return found[: min(graph.num_src, graph.num_dst)]
