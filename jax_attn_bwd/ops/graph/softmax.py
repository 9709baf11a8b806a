"""Softmax of scores over the edges into each destination, by whole arrays of edges x heads.

m_i = max_e s_e,   l_i = sum_e exp(s_e - m_i),   p_e = exp(s_e - m_i) / l_i,   e the edges into i
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd.ops.graph.edge_loops import (
    Chunk,
    add,
    add_runs,
    by_edge,
    in_runs,
    rows,
    sum_of_group,
    whole,
)
from jax_attn_bwd.ops.graph.structure import BipartiteCSC


class Softmax(NamedTuple):
    """The softmax by edge, in groups by destination, and its row values; l = 0 where no edge is seen."""

    p: jax.Array  # [(W,) R, H], past the end anything finite; exp(s_e - m_i) of edges in pieces
    m: jax.Array  # [num_dst, H], finite
    l: jax.Array  # [num_dst, H]


def softmax(s: jax.Array, graph: BipartiteCSC, zeros: jax.Array, mesh_axes: tuple[str, ...] = ()) -> Softmax:
    """Softmax of the scores `[(W,) R, H]` of all groups; `zeros` is `[num_dst, H]`.

    One more row of m and l takes what is past the end. Where devices have a piece of the edges each, along
    `mesh_axes`, m is that of all pieces, and l the share of one.
    """
    n, chunk = graph.num_dst, whole(graph.by_destination, graph.capacity)
    sums = jnp.pad(zeros, ((0, 1), (0, 0)))
    top = lax.stop_gradient(s)
    top = top if chunk.exists is None else top.max(0)
    lowest = sums + jnp.finfo(sums.dtype).min  # no -inf: all scores of a destination may be hidden
    m = lowest.at[chunk.node].max(top, mode="drop", indices_are_sorted=True)
    if mesh_axes:
        m = lax.pmax(m, mesh_axes)
    e = jnp.exp(s - by_edge(rows(m, chunk.node), chunk))
    runs, count = in_runs(graph)
    of_runs = jnp.pad(zeros, ((0, max(count - n, 1)), (0, 0)))
    l = add_runs(sums, graph, add(of_runs, runs.node, sum_of_group(e, chunk)))
    p = e if mesh_axes else e / by_edge(rows(jnp.where(l == 0, 1, l), chunk.node), chunk)
    return Softmax(p, m[:n], l[:n])


def present(x: jax.Array, chunk: Chunk) -> jax.Array:
    """Scores `[(W,) R, H]`, -inf where there is no edge; those past the end may be anything."""
    return x if chunk.exists is None else jnp.where(chunk.exists[..., None], x, -jnp.inf)
