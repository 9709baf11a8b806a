"""Portable forward of the graph attentions: one pass over the edges, sorted by destination.

With s_e the score of edge e from node j(e) to node i, Z its dropout factor, and m the running maximum of
the scores of i, as in an online softmax:

    l_i   = sum_e exp(s_e - m_i)
    acc_i = sum_e Z_e exp(s_e - m_i) message_e
    at the end   out_i = acc_i / l_i,   lse_i = m_i + log l_i

The edges of a node follow one another, so of the nodes of a chunk only the first can have sums from
before, and it alone is rescaled when m grows. A group of W edges adds one row to each sum. Nothing as
large as edges x heads is kept, unless the weights are asked for.

Where all scores of a node are huge and alike, log l is lost when lse is rounded, so the remainder
lse_low = (m - lse) + log l is kept beside it for the backward.

References:
  Velickovic et al., Graph attention networks, 2018, arXiv:1710.10903.
  Milakov and Gimelshein, Online normalizer calculation for softmax, 2018, arXiv:1805.02867.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.sharding import full_like_operands, tie
from jax_attn_bwd.ops.graph import groups, scores
from jax_attn_bwd.ops.graph.groups import Chunk, take
from jax_attn_bwd.ops.graph.scores import Rows, Tables
from jax_attn_bwd.ops.graph.spec import Operands, Options, Result


class State(NamedTuple):
    """Running state of every destination, and the scores by edge if the weights are asked for."""

    acc: jax.Array  # [num_dst, H, D]
    m: jax.Array  # [num_dst, H]
    l: jax.Array  # [num_dst, H]
    scores: jax.Array | None  # [E, H]


def forward(options: Options, operands: Operands) -> Result:
    """The outputs and row values."""
    return _forward(options, operands)


@partial(jax.jit, static_argnums=0)
def _forward(options, operands):
    graph, dtype = operands.graph, accumulator_dtype(operands.src.dtype)
    t = scores.tables(options, operands)
    state = _initial(options, operands, t, dtype)
    if has_edges(graph):
        _, H, D = t.message.shape
        elements = H * -(-D // 4)  # few arrays are as large as edges x dim: measured
        body = partial(_fold, options, t)
        state = groups.scan(body, state, graph.by_destination, graph.capacity, elements)

    empty = state.l == 0
    l = jnp.where(empty, 1, state.l)
    m, log_l = finite(state.m), jnp.log(l)
    lse = jnp.where(empty, -jnp.inf, m + log_l)
    lse_low = lax.stop_gradient(jnp.where(empty, 0, (m - lse) + log_l))
    out = state.acc / l[..., None]
    mean = None if options.concat_heads else out.mean(1).astype(operands.src.dtype)
    weights = None
    if state.scores is not None:
        weights = state.scores
        if has_edges(graph):
            weights = _weights(options, t, operands, state.scores, finite(lse), lse_low)
        weights = weights.astype(operands.src.dtype)
    out = out.reshape(operands.dst.shape).astype(operands.src.dtype)
    return tie(Result(out, mean, weights, lse, lse_low), operands)


def has_edges(graph: Any) -> bool:
    """Whether there can be any edge, by the shapes."""
    return bool(graph.capacity and graph.num_src and graph.num_dst)


def finite(m: jax.Array) -> jax.Array:
    """`m`, with 0 for the -inf of a node that no edge reaches, so that exp(-inf - m) is 0, not NaN."""
    return jnp.where(m == -jnp.inf, 0, m)


def _initial(options, operands, t, dtype) -> State:
    num_dst, (_, H, D) = operands.graph.num_dst, t.message.shape
    acc = full_like_operands(t.message, (num_dst, H, D), 0, dtype, operands)
    row = acc.sum(-1)  # zeros
    by_edge = None
    if options.return_weights:
        by_edge = full_like_operands(row, (operands.graph.capacity, H), 0, dtype, operands)
    return State(acc, row - jnp.inf, row, by_edge)


def _fold(options: Options, t: Tables, state: State, chunk: Chunk) -> State:
    """Folds the edges of a chunk into the rows of their destinations."""
    s = jax.checkpoint(partial(_scores, options, t), prevent_cse=False)(chunk)
    m = state.m.at[chunk.node].max(lax.stop_gradient(s).max(0), mode="drop")
    first = jnp.minimum(chunk.node[0], m.shape[0] - 1)
    old, new = (lax.dynamic_index_in_dim(x, first, 0) for x in (state.m, m))
    decay = jnp.exp(old - finite(new))  # [1, H]
    acc = _scale_row(state.acc, first, decay[..., None])
    l = _scale_row(state.l, first, decay)

    p = jnp.exp(s - finite(take(m, chunk.node))[None])
    l = groups.add(l, chunk.node, p.sum(0))
    add = jax.checkpoint(partial(_weighted_messages, options, t), prevent_cse=False)
    acc = groups.add(acc, chunk.node, add(p, chunk))
    by_edge = None if state.scores is None else groups.put(state.scores, chunk.edge, s)
    return State(acc, m, l, by_edge)


def _scale_row(x: jax.Array, i: jax.Array, factor: jax.Array) -> jax.Array:
    row = lax.dynamic_index_in_dim(x, i, 0)
    return lax.dynamic_update_index_in_dim(x, row * factor, i, 0)


def _scores(options: Options, t: Tables, chunk: Chunk) -> jax.Array:
    dtype, seen = accumulator_dtype(t.message.dtype), visible(t, chunk)
    dst = take(t.dst, chunk.node).astype(dtype)
    src = shown(take(t.src, chunk.other).astype(dtype), seen)
    edge = None if t.edge is None else shown(take(t.edge, chunk.edge).astype(dtype), seen)
    s = scores.score(options, Rows(src, dst, edge), t)
    return with_bias(s, t, chunk, seen)


def visible(t: Tables, chunk: Chunk) -> jax.Array | None:
    """Where there is an edge and its bias is not -inf, `[W, R, H]`; None without a bias."""
    if t.bias is None:
        return None
    return chunk.exists[..., None] & (take(t.bias, chunk.edge) != -jnp.inf)


def shown(rows: jax.Array, seen: jax.Array | None) -> jax.Array:
    """`rows` `[..., H, D]` of a chunk, 0 where `seen` `[..., H]` is false."""
    return rows if seen is None else jnp.where(seen[..., None], rows, 0)


def with_bias(s: jax.Array, t: Tables, chunk: Chunk, seen: jax.Array | None) -> jax.Array:
    """Scores plus bias; -inf where it is, and where there is no edge."""
    if t.bias is None or seen is None:
        return jnp.where(chunk.exists[..., None], s, -jnp.inf)
    return jnp.where(seen, s + jnp.where(seen, take(t.bias, chunk.edge), 0), -jnp.inf)


def _weighted_messages(options: Options, t: Tables, p: jax.Array, chunk: Chunk) -> jax.Array:
    """Sum over each group of Z p message, `[R, H, D]`.

    Edge by edge of a group, so that the rows are read where they are multiplied.
    """
    z = scores.factors(options, t, chunk)
    p = p if z is None else p * z
    seen: Any = visible(t, chunk)
    result: Any = 0
    for k in range(p.shape[0]):
        rows = take(t.message, chunk.other[k]).astype(p.dtype)
        if t.edge is not None and options.kind == "transformer":
            rows = rows + take(t.edge, chunk.edge[k]).astype(p.dtype)
        result = result + p[k][..., None] * shown(rows, None if seen is None else seen[k])
    return result


def _weights(options, t, operands, by_edge, lse, low):
    """Z exp(score - lse) of every edge, `[E, H]`; 0 in the padding."""
    graph = operands.graph

    def body(weights, chunk):
        s = jnp.where(chunk.exists[..., None], take(by_edge, chunk.edge), -jnp.inf)
        p = jnp.exp((s - take(lse, chunk.node)[None]) - take(low, chunk.node)[None])
        z = scores.factors(options, t, chunk)
        return groups.put(weights, chunk.edge, p if z is None else p * z)

    zeros = full_like_operands(by_edge, by_edge.shape, 0, by_edge.dtype, operands)
    return groups.scan(body, zeros, graph.by_destination, graph.capacity, options.num_heads)
