"""Edges that an Auto mesh cuts if it cuts the nodes, though a trace does not tell how these lie.

The edges of a pass are tied to the rows of the nodes, part by part: an addition of what is always 0 makes the
partitioner shard both alike. If nodes are sharded, each device has a part of the edges, and what a pass sums
by node is one all-reduce. If they are not, but heads are, or nothing is, nothing changes.

A loop over chunks of edges would hold an exchange at every step, and so would running sums of sorted edges:
ties are for passes without a loop, where a scatter adds in order.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jax_attn_bwd._core.numerics import ceil_div
from jax_attn_bwd.ops.graph.edge_groups import Groups
from jax_attn_bwd.ops.graph.spec import Operands
from jax_attn_bwd.ops.graph.structure import BipartiteCSC


def tied_edges(operands: Operands, devices: int) -> BipartiteCSC:
    """The graph of `operands`, its groups in as many parts as devices can share the nodes, tied to these."""
    graph, nodes = operands.graph, (operands.dst, operands.src)
    parts = max(math.gcd(x.shape[0], devices) for x in nodes)
    if parts == 1:
        return graph
    rows = [lax.stop_gradient(x).reshape(parts, -1).sum(1) for x in nodes if x.shape[0] % parts == 0]

    def tied(groups, node, other):
        ends = (node, other, graph.capacity)
        found = (_tied(_cut(x, parts, none), rows) for x, none in zip(groups, ends, strict=True))
        return Groups(*(x.reshape(-1, *x.shape[2:]) for x in found))

    by_destination = tied(graph.by_destination, graph.num_dst, graph.num_src)
    by_source = tied(graph.by_source, graph.num_src, graph.num_dst)
    return replace(graph, by_destination=by_destination, by_source=by_source, exact=False)


def tied_rows(x: Any, nodes: jax.Array) -> Any:
    """`x` `[nodes, ...]`, or None, whose rows are to lie like those of `nodes`."""
    if x is None:
        return None
    rows = nodes.sum(tuple(range(1, nodes.ndim))).astype(x.dtype)
    return jnp.where(jnp.zeros((), bool), rows.reshape(-1, *(1,) * (x.ndim - 1)), x)


def _cut(x: jax.Array, parts: int, none: int) -> jax.Array:
    """`[V, ...]` -> `[parts, V / parts, ...]`, no edge in the padding."""
    size = ceil_div(x.shape[0], parts)
    pad = ((0, parts * size - x.shape[0]), *((0, 0) for _ in x.shape[1:]))
    return jnp.pad(x, pad, constant_values=none).reshape(parts, size, *x.shape[1:])


@custom_vmap
def _tied(x: jax.Array, rows: list[jax.Array]) -> jax.Array:
    """`x` `[parts, ...]` of integers, sharded like `rows` `[parts]`; under `vmap` as it is."""
    for row in rows:
        zero = jnp.where(jnp.zeros((), bool), row.astype(x.dtype), 0)
        x = x + zero.reshape(-1, *(1,) * (x.ndim - 1))
    return x


@_tied.def_vmap
def _tied_of_batch(size, in_batched, x, rows):
    return x, in_batched[0]
