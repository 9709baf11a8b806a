"""Portable passes of the sums, means and maxima over the edges into each destination.

With x the data of the edges and dout the cotangent, for edge e into i, where n_i edges lead:

    sum    out_i = sum_e x_e          dx_e = dout_i                                       (1)
    mean   out_i = sum_e x_e / n_i    dx_e = dout_i / n_i                                 (2)
    max    out_i = max_e x_e          dx_e = dout_i / t_i where x_e = out_i, else 0,      (3)
                                      t_i the number of such e

Sum and mean are linear: with dx a tangent of x, dout is the sum or mean of dx. The maximum moves with the
edges that hold it, in equal parts:

    max    dout_i = sum_e dx_e / t_i   over e with x_e = out_i                            (4)
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.sharding import full_like_operands, tie
from jax_attn_bwd.ops.graph import loops
from jax_attn_bwd.ops.graph.groups import Groups
from jax_attn_bwd.ops.graph.loops import Chunk, has_edges, sum_of_group, take
from jax_attn_bwd.ops.graph.plan import EdgePlan


def _sums(plan: EdgePlan, graph: Any, x: jax.Array, terms: Callable[[Chunk], jax.Array]) -> jax.Array:
    """Sums `terms(chunk)`, `[(W,) R, ...]`, over the edges into each destination, `[num_dst, ...]`."""
    dtype = accumulator_dtype(x.dtype)
    out = full_like_operands(x, (graph.num_dst, *x.shape[1:]), 0, dtype, (graph, x))
    if not has_edges(graph):
        return out
    share = lambda chunk: sum_of_group(terms(chunk).astype(dtype), chunk)
    return loops.sum_in_runs(out, graph, share, plan.sums)


def _total(plan: EdgePlan, graph: Any, x: jax.Array) -> jax.Array:
    """Sums `x` over the edges into each destination."""
    if not plan.one_scatter or not has_edges(graph):
        return _sums(plan, graph, x, lambda chunk: take(x, chunk.number))
    out = full_like_operands(x, (graph.num_dst, *x.shape[1:]), 0, x.dtype, (graph, x))
    at = _node_by_number(graph, *loops.in_runs(graph))
    of_runs = loops.room_for_runs(out, graph).at[at].add(x, mode="drop")
    return loops.add_runs(out, graph, of_runs, plan.in_order)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _maximum(plan: EdgePlan, graph: Any, x: jax.Array) -> jax.Array:
    """Takes the maximum of `x` over the edges into each destination; 0 without edges."""
    out = full_like_operands(x, (graph.num_dst, *x.shape[1:]), -jnp.inf, x.dtype, (graph, x))
    if has_edges(graph) and plan.one_scatter:
        out = out.at[_node_by_number(graph, graph.by_destination, graph.num_dst)].max(x, mode="drop")
    elif has_edges(graph):
        of_edges = lambda chunk: take(x, chunk.number, -jnp.inf)
        share = lambda chunk: of_edges(chunk) if chunk.exists is None else of_edges(chunk).max(0)
        fold = lambda top, new, chunk: loops.highest(top, chunk, new)
        out = loops.scan(share, fold, out, graph.by_destination, graph.capacity, plan.sums)
    return jnp.where(_spread(graph.offsets[1:] > graph.offsets[:-1], out), out, 0)


@_maximum.defjvp
def _maximum_jvp(plan, primals, tangents):
    (graph, x), (_, dx) = primals, tangents
    out = _maximum(plan, graph, x)
    return out, _maximum_tangent(plan, graph, x, out, dx)


def _maximum_tangent(plan: EdgePlan, graph: Any, x: jax.Array, out: jax.Array, dx: jax.Array) -> jax.Array:
    """Computes the tangent of the maximum (4)."""
    share = lambda chunk: jnp.where(_is_top(graph, x, out, chunk), take(dx, chunk.number), 0)
    return (_sums(plan, graph, x, share) / _count_of_top(plan, graph, x, out)).astype(x.dtype)


def _is_top(graph: Any, x: jax.Array, out: jax.Array, chunk: Chunk) -> jax.Array:
    """Tells which edges of a chunk of `loops.in_runs` hold their destination's maximum."""
    of_node = loops.own_rows(out, loops.to_nodes(graph, chunk))
    return take(x, chunk.number, jnp.nan) == of_node


def _node_by_number(graph: Any, found: Groups, none: int) -> jax.Array:
    """Returns the `node` of each edge in the caller's order, `[E]`; `none`, past the end, in the padding."""
    chunk = loops.one_chunk(found, graph.capacity, in_order=False)  # reads no rows
    node = jnp.broadcast_to(chunk.node, chunk.number.shape)
    all_none = full_like_operands(graph.map_csc_to_coo, (graph.capacity,), none, node.dtype, graph)
    return loops.put(all_none, chunk.number, node)


def _count_of_top(plan: EdgePlan, graph: Any, x: jax.Array, out: jax.Array) -> jax.Array:
    """Counts the edges that hold the maximum, `[num_dst, ...]`; 1 where there is none."""
    return jnp.maximum(_sums(plan, graph, x, partial(_is_top, graph, x, out)), 1)


def _degree(graph: Any, like: jax.Array) -> jax.Array:
    """Counts the edges into each destination, in the rank and dtype of `like`; 1 where there is none."""
    return _spread(jnp.maximum(graph.offsets[1:] - graph.offsets[:-1], 1), like).astype(like.dtype)


def _spread(x: jax.Array, like: jax.Array) -> jax.Array:
    """Gives `[num_dst]` the axes of `like`."""
    return jnp.expand_dims(x, tuple(range(1, like.ndim)))


@partial(jax.jit, static_argnums=0)
def forward(plan: EdgePlan, graph: Any, edge: jax.Array) -> jax.Array:
    """Computes the sum (1), mean (2) or maximum (3)."""
    if plan.name == "edge_max":
        return tie(_maximum(plan, graph, edge), (graph, edge))
    out = _total(plan, graph, edge)
    out = out / _degree(graph, out) if plan.name == "edge_mean" else out
    return tie(out.astype(edge.dtype), (graph, edge))


@partial(jax.jit, static_argnums=0)
def tangent(plan: EdgePlan, graph: Any, dedge: jax.Array, *saved: jax.Array) -> jax.Array:
    """Computes the tangent of what `forward` returns; `saved` are edge and out of `edge_max`."""
    if plan.name != "edge_max":
        return forward(plan, graph, dedge)
    edge, out = saved
    return _maximum_tangent(plan, graph, edge, out, dedge)  # (4)


@partial(jax.jit, static_argnums=0)
def backward(plan: EdgePlan, graph: Any, dout: jax.Array, *saved: jax.Array) -> jax.Array:
    """Computes the gradient, accumulated; `saved` are edge and out of `edge_max`."""
    x = dout.astype(accumulator_dtype(dout.dtype))
    if not has_edges(graph):
        shape = (graph.capacity, *dout.shape[1:])
        return full_like_operands(dout, shape, 0, x.dtype, (graph, dout))
    at = _node_by_number(graph, graph.by_destination, graph.num_dst)
    if plan.name == "edge_sum":
        return take(x, at)  # (1)
    if plan.name == "edge_mean":
        return take(x / _degree(graph, x), at)  # (2)
    edge, out = saved
    return jnp.where(
        edge == take(out, at, jnp.nan), take(x / _count_of_top(plan, graph, edge, out), at), 0
    )  # (3)
