"""Softmax of scores over the edges into each destination, by whole arrays of edges x heads.

m_i = max_e s_e,   l_i = sum_e exp(s_e - m_i),   p_e = exp(s_e - m_i) / l_i,   e the edges into i
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd.ops.graph.edge_loops import Chunk, add, add_runs, highest, own_rows, sum_of_group, to_runs


class Softmax(NamedTuple):
    """The softmax by edge, in groups by destination, and its row values; l = 0 where no edge is seen."""

    p: list[jax.Array]  # [(W,) R, H], past the end anything finite; exp(s_e - m_i) of edges in pieces
    m: jax.Array  # [num_dst, H], finite
    l: jax.Array  # [num_dst, H]


def softmax(
    s: list[jax.Array], parts: list[Chunk], graph: Any, zeros: jax.Array, mesh_axes: tuple[str, ...] = ()
) -> Softmax:
    """Softmax of the scores `[(W,) R, H]` of all groups, in parts; `zeros` is `[num_dst, H]`.

    One more row of m and l takes what is past the end. Where devices have a piece of the edges each, along
    `mesh_axes`, m is that of all pieces, and l the share of one.
    """
    n = graph.num_dst
    sums = jnp.pad(zeros, ((0, 1), (0, 0)))
    m = sums + jnp.finfo(sums.dtype).min  # no -inf: all scores of a destination may be hidden
    for part, chunk in zip(s, parts, strict=True):
        top = lax.stop_gradient(part)
        top = top if chunk.exists is None else top.max(0)
        m = highest(m, chunk, top)
    if mesh_axes:
        m = lax.pmax(m, mesh_axes)
    e = [jnp.exp(part - own_rows(m, chunk)) for part, chunk in zip(s, parts, strict=True)]
    count = n if graph.run_owners is None else graph.run_owners.shape[0]
    of_runs = jnp.pad(zeros, ((0, max(count - n, 1)), (0, 0)))
    for part, chunk in zip(e, parts, strict=True):
        of_runs = add(of_runs, to_runs(graph, chunk), sum_of_group(part, chunk))
    l = add_runs(sums, graph, of_runs)
    if mesh_axes:
        return Softmax(e, m[:n], l[:n])
    positive = jnp.where(l == 0, 1, l)
    p = [part / own_rows(positive, chunk, 1) for part, chunk in zip(e, parts, strict=True)]
    return Softmax(p, m[:n], l[:n])


def present(x: jax.Array, chunk: Chunk) -> jax.Array:
    """Scores `[(W,) R, H]`, -inf where there is no edge; those past the end may be anything."""
    return x if chunk.exists is None else jnp.where(chunk.exists[..., None], x, -jnp.inf)
