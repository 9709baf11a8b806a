"""Portable forward of the graph attentions, over the edges sorted by destination.

With s_e the score of edge e from node j(e) to node i, p its softmax over the edges into i, and Z its
dropout factor:

    w_e   = Z_e p_e
    out_i = sum_e w_e message_e,   lse_i = m_i + log l_i,   m and l as in `softmax.py`

Arrays of edges x heads are formed whole. Arrays of edges x heads x features are formed whole where they are
small, else a chunk at a time (`loops.py`).

Where all scores of a node are huge and alike, rounding lse loses log l. So m and l are kept for the
backward.

References:
  Velickovic et al., Graph attention networks, 2018, arXiv:1710.10903.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import split
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.sharding import all_gathered, full_like_operands, reshard_like
from jax_attn_bwd.ops.graph import loops, placement
from jax_attn_bwd.ops.graph.kinds.kind import Kind, Rows, Tables, split_heads
from jax_attn_bwd.ops.graph.loops import Chunk, has_edges, own_rows, rows, take
from jax_attn_bwd.ops.graph.plan import Plan
from jax_attn_bwd.ops.graph.softmax import highest_score, present, result_of_sums, softmax
from jax_attn_bwd.ops.graph.spec import Operands, Result
from jax_attn_bwd.ops.graph.structure import BipartiteCSC


@partial(jax.jit, static_argnums=0)
def forward(plan: Plan, operands: Operands) -> Result:
    """Computes the outputs and row values of one entry of a batch."""
    # the edges as the passes walk over them, and the tables that they read
    options, graph = plan.options, plan.edges_of(operands)
    operands = placement.gathered_operands(operands) if plan.on_every_device else operands
    read = plan.kind.tables(operands), split_heads(operands.dst, options.num_heads)

    sums_of_edges = _sums_over_pieces if plan.pieces else _sums
    out, m, l, weights = sums_of_edges(plan, graph, read)  # [num_dst, H, D], [num_dst, H] twice

    result = result_of_sums(options, operands, out, m, l, weights)
    return all_gathered(result) if plan.on_every_device else result


class _EdgeSums(NamedTuple):
    """The sums over the edges, accumulated."""

    out: jax.Array  # [num_dst, H, D]
    m: jax.Array  # [num_dst, H]
    l: jax.Array  # [num_dst, H]
    weights: jax.Array | None  # [E, H]


def _sums(
    plan: Plan, graph: BipartiteCSC, read: tuple[Tables, jax.Array], mesh_axes: tuple[str, ...] = ()
) -> _EdgeSums:
    """Sums over all edges of `graph`, by the tables in `read`, sharded like its array `[.., H, D]`.

    Of edges in pieces along `mesh_axes`, `out` is not divided by l yet.
    """
    # zeros, which stay where there is no edge
    (t, like), operands = read, (graph, read)
    kind, options = plan.kind, plan.options
    messages, H = kind.messages(t), options.num_heads
    dtype, D = accumulator_dtype(messages.dtype), messages.shape[2]
    out = full_like_operands(like, (graph.num_dst, H, D), 0, dtype, operands)
    m = l = out.sum(-1)
    weights = None
    if options.return_weights:
        weights = full_like_operands(l, (graph.capacity, H), 0, dtype, operands)
    if not has_edges(graph):
        return _EdgeSums(out, m, l, weights)

    # scores and their softmax, whole: [(W,) R, H] of each part of the groups
    t, groups = plan.loops.with_end_rows(t), graph.by_destination
    grid = plan.loops.scores
    parts = loops.parts(groups, graph.capacity, grid.in_order)
    if grid.count == 1:
        s = [scores(kind, t, chunk) for chunk in parts]
    else:
        s = [loops.each(partial(scores, kind, t), groups, graph.capacity, grid)]
    if plan.sums_in_one:
        return _sums_in_one(plan, t, graph, parts, s, out, l)
    p, m, l = softmax(s, parts, graph, l, mesh_axes)

    # w, with dropout
    z = [kind.dropout_factors(t, chunk) for chunk in parts]
    w = [p_k if z_k is None else p_k * z_k for p_k, z_k in zip(p, z, strict=True)]

    # w times the messages, a chunk of edges at a time; `loops.add` keeps the order of every sum, also where a
    # scatter has none (`loops.add_in_fixed_order`)
    out = loops.sum_in_runs(out, graph, partial(weighted_messages, kind, t), plan.loops.messages, w)

    # w in the caller's order
    if weights is not None:
        for chunk, w_k in zip(parts, w, strict=True):
            weights = loops.put(weights, chunk.number, w_k)
    return _EdgeSums(out, m, l, weights)


def _sums_in_one(
    plan: Plan, t: Tables, graph: BipartiteCSC, parts: list[Chunk], s: list[jax.Array], out: Any, l: Any
) -> _EdgeSums:
    """Sums the messages and l as one row, and divides behind the sum; `out` and `l` are zeros."""
    m = highest_score(s, parts, graph, l)
    e = [jnp.exp(s_k - own_rows(m, chunk)) for s_k, chunk in zip(s, parts, strict=True)]

    def share(chunk, e_k):
        z = plan.kind.dropout_factors(t, chunk)
        rows = weighted_messages(plan.kind, t, chunk, e_k if z is None else e_k * z)
        return jnp.concatenate([rows, loops.sum_of_group(e_k, chunk)[..., None]], -1)

    zeros = jnp.concatenate([out, l[..., None]], -1)
    sums = loops.sum_in_runs(zeros, graph, share, plan.loops.messages, e)
    out, l = sums[..., :-1], sums[..., -1]
    return _EdgeSums(out / jnp.where(l == 0, 1, l)[..., None], m[: graph.num_dst], l, None)


def _sums_over_pieces(plan: Plan, graph: BipartiteCSC, read: tuple[Tables, jax.Array]) -> _EdgeSums:
    """Sums over the edges, by pieces, where nodes lie on several devices.

    The pieces agree on m, then sum exp(s - m) and its products with the messages, and divide what they have
    summed. The weights need l of all pieces: they take a pass of their own.
    """
    (t, like), pieces = read, plan.pieces
    assert pieces is not None  # else there are no pieces
    heads, (t, _) = like.sum(0, keepdims=True), t.unsharded()
    part = replace(plan, options=replace(plan.options, return_weights=False))

    # out and l, shares of each piece, go to the devices of their nodes; m is alike on all
    sums, by_node = partial(_sums, part, mesh_axes=pieces.names), split.out_spec(like, None)
    specs: Any = {"out": by_node, "m": split.ALIKE, "l": by_node, "weights": None}
    out, m, l, _ = placement.over_pieces(
        pieces, graph, "by_destination", sums, (t, heads), _EdgeSums(**specs)
    )
    positive = jnp.where(l == 0, 1, l)
    out, like_rows = out / positive[..., None], reshard_like(m, l, (0, 1))
    if not plan.options.return_weights:
        return _EdgeSums(out, like_rows, l, None)

    # the weights, of each piece's edges, are put together on every device
    shared = t, m, placement.unsharded_rows(positive)
    run, spec = partial(_weights, plan), split.OutSpec(0)
    found = placement.over_pieces(pieces, graph, "by_destination", run, shared, spec)
    zeros = full_like_operands(heads.sum(-1), (graph.capacity, plan.options.num_heads), 0, l.dtype, ())
    weights = loops.put(zeros, *map(placement.unsharded_rows, found))
    return _EdgeSums(out, like_rows, l, weights)


def _weights(plan: Plan, graph: BipartiteCSC, saved: tuple) -> tuple[jax.Array, jax.Array]:
    """Computes the numbers and weights, `[1, (W,) R, H]`, of edges by destination: of tables, m and l."""
    (t, m, l), kind, grid, walk = saved, plan.kind, plan.loops.scores, (graph.by_destination, graph.capacity)
    edges, run = loops.one_chunk(*walk, grid.in_order), partial(scores, kind, plan.loops.with_end_rows(t))
    s = run(edges) if grid.count == 1 else loops.each(run, *walk, grid)
    m, l = (own_rows(x, edges, fill) for x, fill in ((m, 0), (l, 1)))
    p, z = jnp.exp(s - m) / l, kind.dropout_factors(t, edges)
    return edges.number[None], (p if z is None else p * z)[None]


def scores(kind: Kind, t: Tables, chunk: Chunk) -> jax.Array:
    """Computes the scores of a chunk by destination, `[(W,) R, H]`; `t` comes from `Loops.with_end_rows`."""
    dtype, seen = accumulator_dtype(kind.messages(t).dtype), visible(t, chunk)
    s = kind.score(t, ends(kind, t, chunk, seen, dtype))
    return with_bias(s, t, chunk, seen)


def ends(kind: Kind, t: Tables, chunk: Chunk, seen: jax.Array | None, dtype: Any) -> Rows:
    """Reads the rows that the scores of a chunk by destination are made of; None where `t` has none."""
    dst = None if t.dst is None else own_rows(t.dst, chunk).astype(dtype)
    src = None if t.src is None else rows(t.src, chunk).astype(dtype)
    edge = None if t.edge is None else take(t.edge, chunk.number).astype(dtype)
    to_heads: Any = lambda x: None if x is None else shown(kind.to_heads(x), seen)
    return Rows(to_heads(src), dst, to_heads(edge))


def visible(t: Tables, chunk: Chunk) -> jax.Array | None:
    """Tells which edges exist and have a bias above -inf, `[(W,) R, H]`; None without a bias."""
    if t.bias is None:
        return None
    seen = take(t.bias, chunk.number) != -jnp.inf
    return seen if chunk.exists is None else chunk.exists[..., None] & seen


def shown(rows: jax.Array, seen: jax.Array | None) -> jax.Array:
    """Returns the `rows` `[..., H, D]` of a chunk, 0 where `seen` `[..., H]` is false."""
    return rows if seen is None else jnp.where(seen[..., None], rows, 0)


def with_bias(s: jax.Array, t: Tables, chunk: Chunk, seen: jax.Array | None) -> jax.Array:
    """Adds the bias to scores; -inf where the bias is -inf, and where there is no edge."""
    if t.bias is None or seen is None:
        return present(s, chunk)
    return jnp.where(seen, s + jnp.where(seen, take(t.bias, chunk.number), 0), -jnp.inf)


def weighted_messages(kind: Kind, t: Tables, chunk: Chunk, w: jax.Array) -> Any:
    """Sums w message over each group, `[R, H, D]`; 0 where `t` has no messages.

    It goes edge by edge, so that the rows are read where they are multiplied.
    """
    result, messages = 0, kind.messages(t)
    if messages is None and (t.edge is None or not kind.edge_in_message):
        return result
    x: Any = 0 if messages is None else rows(messages, chunk).astype(w.dtype)
    if t.edge is not None and kind.edge_in_message:
        x = x + take(t.edge, chunk.number).astype(w.dtype)
    return loops.sum_of_group(w[..., None] * shown(kind.to_heads(x), visible(t, chunk)), chunk)
