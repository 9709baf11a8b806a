"""Self-loops: an edge from each node to itself, as PyTorch Geometric's layers add them by default."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks

FILLS = ("mean", "add", "min", "max")
_OPERATOR = "BipartiteCSC.with_self_loops"


def edges(operator: str, graph: Any) -> tuple[np.ndarray, np.ndarray]:
    """(sources, destinations) of the edges of a graph, in the caller's order."""
    if any(isinstance(x, jax.core.Tracer) for x in (graph.offsets, graph.indices)):
        remedy = "build it outside jit and hand it in as an argument"
        raise TypeError(checks.message(operator, "the graph", "be known", "a traced one", remedy))
    if np.ndim(graph.offsets) != 1:
        expected = "be one graph"
        raise ValueError(checks.message(operator, "the graph", expected, "a stack of them"))
    offsets, number = np.asarray(graph.offsets), np.asarray(graph.map_csc_to_coo)[: graph.num_edges]
    src, dst = np.empty(len(number), np.int64), np.empty(len(number), np.int64)
    src[number] = np.asarray(graph.indices)[: len(number)]
    dst[number] = np.repeat(np.arange(graph.num_dst), np.diff(offsets))
    return src, dst


def with_loops(graph: Any, edge: Any, fill_value: Any, capacity: int | None) -> tuple[Any, jax.Array | None]:
    """The graph with one loop for each node, and its edge data; see `BipartiteCSC.with_self_loops`."""
    src, dst = edges(_OPERATOR, graph)
    kept, nodes = np.flatnonzero(src != dst), min(graph.num_src, graph.num_dst)
    loops = np.arange(nodes)
    ends = (np.concatenate([x[kept], loops]) for x in (src, dst))
    found = type(graph).from_coo(*ends, graph.num_src, graph.num_dst, capacity=capacity)
    if edge is None:
        return found, None
    edge = checks.floating(_OPERATOR, "edge", edge)
    if edge.ndim == 0 or edge.shape[0] != graph.capacity:
        expected = f"have shape [nnz, ...], nnz = {graph.capacity}"
        raise ValueError(checks.message(_OPERATOR, "edge", expected, edge.shape))
    given, of_loops = edge[kept], (nodes, *edge.shape[1:])
    if isinstance(fill_value, str):
        checks.choice(_OPERATOR, "fill_value", fill_value, FILLS)
        filled = _by_destination(given, dst[kept], graph.num_dst, fill_value)[:nodes]
    else:
        filled = jnp.broadcast_to(jnp.asarray(fill_value, edge.dtype), of_loops)
    room = jnp.zeros((found.capacity - len(kept) - nodes, *edge.shape[1:]), edge.dtype)
    return found, jnp.concatenate([given, filled, room])


def _by_destination(edge: jax.Array, dst: np.ndarray, nodes: int, how: str) -> jax.Array:
    """What the edges into each node hold, taken together; 0 for a node without any."""
    reduce = {"min": jax.ops.segment_min, "max": jax.ops.segment_max}.get(how, jax.ops.segment_sum)
    count = np.bincount(dst, minlength=nodes).reshape(-1, *(1,) * (edge.ndim - 1))
    found = jnp.where(jnp.asarray(count > 0), reduce(edge, dst, nodes), 0)
    return found / jnp.asarray(np.maximum(count, 1), edge.dtype) if how == "mean" else found
