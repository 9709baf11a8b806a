"""Softmax over the edges into each destination, and the rows of the destinations that its gradient needs.

m_i = max_e s_e,   l_i = sum_e exp(s_e - m_i),   p_e = exp(s_e - m_i) / l_i,   e the edges into i

    ds_e = p_e (dp_e - sum_f p_f dp_f),   f the edges into the same i                     (1)

The Jacobian is symmetric: with ds a tangent of the scores and dp that of the weights, (1) holds the other
way round.

The forward takes it by whole arrays of edges x heads. The backward reads m, l and delta, equation (5) of
`backward.py`, of each destination.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core.numerics import accumulator_dtype, finite, narrowed
from jax_attn_bwd._core.products import sum_of_products
from jax_attn_bwd._core.sharding import full_like_operands, match_type, reshard_like, tie, unsharded
from jax_attn_bwd.ops.graph import loops
from jax_attn_bwd.ops.graph.kinds.kind import merge_heads
from jax_attn_bwd.ops.graph.loops import (
    Chunk,
    add_runs,
    has_edges,
    highest,
    own_rows,
    sum_of_group,
    take,
    to_runs,
)
from jax_attn_bwd.ops.graph.plan import EdgePlan
from jax_attn_bwd.ops.graph.spec import Cotangents, Operands, Options, Result


class Softmax(NamedTuple):
    """The softmax by edge, in groups by destination, and its row values; l = 0 where no edge is seen."""

    p: list[jax.Array]  # [(W,) R, H], past the end anything finite; exp(s_e - m_i) of edges in pieces
    m: jax.Array  # [num_dst, H], finite
    l: jax.Array  # [num_dst, H]


def softmax(
    s: list[jax.Array], parts: list[Chunk], graph: Any, zeros: jax.Array, mesh_axes: tuple[str, ...] = ()
) -> Softmax:
    """Computes the softmax of the scores `[(W,) R, H]` of all groups, in parts; `zeros` is `[num_dst, H]`.

    One more row of m and l takes what is past the end, where anything may be. Where devices have a piece of
    the edges each, along `mesh_axes`, m is that of all pieces, and l the share of one.
    """
    n, m = graph.num_dst, highest_score(s, parts, graph, zeros)
    if mesh_axes:
        m = lax.pmax(m, mesh_axes)

    # l, summed in runs first: [num_dst (+ 1), H]
    sums = _with_end(zeros, graph)
    e = [jnp.exp(part - own_rows(m, chunk)) for part, chunk in zip(s, parts, strict=True)]
    of_runs = sums if graph.run_owners is None else loops.room_for_runs(zeros, graph)
    for part, chunk in zip(e, parts, strict=True):
        of_runs = loops.add(of_runs, to_runs(graph, chunk), sum_of_group(part, chunk))
    l = add_runs(sums, graph, of_runs, parts[0].in_order)
    if mesh_axes:
        return Softmax(e, m[:n], l[:n])

    # p, by edge
    positive = jnp.where(l == 0, 1, l)
    p = [part / own_rows(positive, chunk, 1) for part, chunk in zip(e, parts, strict=True)]
    return Softmax(p, m[:n], l[:n])


def highest_score(s: list[jax.Array], parts: list[Chunk], graph: Any, zeros: jax.Array) -> jax.Array:
    """Finds m, the highest score of each destination, [num_dst (+ 1), H]."""
    sums = _with_end(zeros, graph)
    m = sums + jnp.finfo(sums.dtype).min  # no -inf: all scores of a destination may be hidden
    for part, chunk in zip(s, parts, strict=True):
        top = lax.stop_gradient(part)
        top = top if chunk.exists is None else top.max(0)
        m = highest(m, chunk, top)
    return m


def _with_end(zeros: jax.Array, graph: Any) -> jax.Array:
    return zeros if graph.exact else jnp.pad(zeros, ((0, 1), (0, 0)))


def result_of_sums(
    options: Options, operands: Operands, out: jax.Array, m: jax.Array, l: jax.Array, weights: Any
) -> Result:
    """Returns what is returned and saved, of accumulated sums: out `[num_dst, H, D]`, and weights or None."""
    dtype, wide_weights = operands.src.dtype, None
    lse = jnp.where(l == 0, -jnp.inf, m + jnp.log(jnp.where(l == 0, 1, l)))
    mean = None if options.concat_heads else out.mean(1).astype(dtype)
    out, wide_out = narrowed(merge_heads(out), dtype)
    # Narrowed last: a scatter of narrow numbers behind dropout's generator takes XLA:CPU minutes to compile.
    if weights is not None:
        weights, wide_weights = narrowed(weights, dtype)
    return tie(Result(out, mean, weights, lse, m, l, wide_out, wide_weights), operands)


def present(x: jax.Array, chunk: Chunk) -> jax.Array:
    """Returns the scores `[(W,) R, H]`, -inf where there is no edge; those past the end may be anything."""
    return x if chunk.exists is None else jnp.where(chunk.exists[..., None], x, -jnp.inf)


@partial(jax.jit, static_argnums=0)
def weights_of(plan: EdgePlan, graph: Any, scores: jax.Array) -> jax.Array:
    """Computes the softmax of scores by edge, `[nnz, H]`."""
    dtype, like = accumulator_dtype(scores.dtype), (graph, scores)
    edges = loops.one_chunk(graph.by_destination, graph.capacity, plan.in_order)
    weights = full_like_operands(scores, scores.shape, 0, scores.dtype, like)
    if has_edges(graph):
        zeros = full_like_operands(scores, (graph.num_dst, scores.shape[1]), 0, dtype, like)
        s = present(take(scores, edges.number).astype(dtype), edges)
        ((p,), *_) = softmax([s], [edges], graph, zeros)
        weights = loops.put(weights, edges.number, p)
    return tie(weights, like)


@partial(jax.jit, static_argnums=0)
def through_weights(plan: EdgePlan, graph: Any, dweights: jax.Array, weights: jax.Array) -> jax.Array:
    """Computes the gradient of the scores (1), or with their tangent for `dweights` that of the weights."""
    dtype, like = accumulator_dtype(weights.dtype), (graph, weights, dweights)
    edges = loops.one_chunk(graph.by_destination, graph.capacity, plan.in_order)
    dscores = full_like_operands(weights, weights.shape, 0, dtype, like)
    if has_edges(graph):
        w = take(weights, edges.number).astype(dtype)
        dw = jnp.where(w == 0, 0, take(dweights, edges.number).astype(dtype))
        zeros = full_like_operands(weights, (graph.num_dst, weights.shape[1]), 0, dtype, like)
        sums = loops.add(zeros, edges, sum_of_group(w * dw, edges))
        ds = w * (dw - own_rows(sums, edges))  # (1)
        dscores = loops.put(dscores, edges.number, ds)
    return match_type(dscores, weights)


class DestinationRows(NamedTuple):
    """Rows of the destinations that the pass over the sources reads, and dw by edge."""

    dout: jax.Array  # [num_dst, H, D]
    delta: jax.Array  # [num_dst, H]
    m: jax.Array  # [num_dst, H], finite
    l: jax.Array  # [num_dst, H], 1 instead of 0
    dweights: jax.Array | None  # [E, H]


def destination_rows(
    options: Options, residuals: Any, cotangents: Cotangents, in_order: bool, has_products: bool = True
) -> DestinationRows:
    """Computes the rows of the destinations; of delta (5) without `has_products` only the share of lse."""
    # m and l, finite; lse stands for both where the forward's are not known
    operands = residuals.operands
    out, _, weights, lse, m, l, wide_out, wide_weights = residuals.result
    if m is None:
        m, l = finite(lse), jnp.where(lse == -jnp.inf, 0, jnp.ones_like(lse))
    dtype, H, empty = m.dtype, options.num_heads, l == 0

    # out and its cotangent per head, [num_dst, H, D]; of a mean every head has its share
    heads = lambda x: x.reshape(x.shape[0], H, x.shape[1] // H)
    out, dout = heads((out if wide_out is None else wide_out).astype(dtype)), cotangents.out
    if dout is None:
        dout = jnp.zeros_like(out, operands.src.dtype)
    elif options.concat_heads:
        dout = heads(dout)
    else:
        dout = jnp.broadcast_to((dout.astype(dtype) / H)[:, None], out.shape)
        dout = reshard_like(dout, out, (0, 1, 2))

    # delta (5), [num_dst, H]
    delta = sum_of_products(dout.astype(dtype), out) if has_products else jnp.zeros_like(m)
    if cotangents.weights is not None and has_products:
        weights = (weights if wide_weights is None else wide_weights).astype(dtype)
        like = unsharded(delta, 0)
        of_weights = sum_by_destination(operands.graph, weights, cotangents.weights, like, in_order)
        delta = delta + reshard_like(of_weights, delta, (0, 1))
    if cotangents.lse is not None:
        delta = delta - jnp.where(empty, 0, cotangents.lse)
    dweights = None if cotangents.weights is None else cotangents.weights.astype(dtype)
    return DestinationRows(dout, delta, m, jnp.where(empty, 1, l), dweights)


def sum_by_destination(
    graph: Any, x: jax.Array, y: jax.Array | None, like: jax.Array, in_order: bool
) -> jax.Array:
    """Sums x y over the edges into each destination, `[num_dst, H]`, dtype of `like`; None: y = 1."""
    edges = loops.one_chunk(graph.by_destination, graph.capacity, in_order)
    terms = take(x, edges.number).astype(like.dtype)
    if y is not None:  # where x is 0 the edge may be hidden, and y there anything
        terms = terms * jnp.where(terms == 0, 0, take(y, edges.number).astype(like.dtype))
    zeros = full_like_operands(like, like.shape, 0, like.dtype, (x, y, graph))
    return loops.add(zeros, edges, sum_of_group(terms, edges))
