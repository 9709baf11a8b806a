"""Tangent rule of the graph attentions: derivation, then one pass over the edges sorted by destination.

The letters and equations (1) to (3) are those of `backward.py`. With dh, da, dq, dk, dv, dedge and dbias the
tangents of the operands, the score s and the message x of an edge have, by kind,

    gat          ds_e = act'(z_e) dz_e,   dz_e = sum of <dh, a> + <h, da> over its three shares      (12)
    gatv2        ds_e = <a, act'(u_e) du_e> + <da, act(u_e)>,   du_e = dh_src + dh_dst + dedge       (13)
                 dx_e = dh_src   in both
    transformer  ds_e = scale (<dq, k + edge> + <q, dk + dedge>) + dbias,   dx_e = dv + dedge        (14)

Of lse, and of the weights, whose dropout factors Z are constant,

    mu_i   = dlse_i = sum_e p_e ds_e                                  from (1)                       (15)
    dp_e   = p_e (ds_e - mu_i),   dw_e = w_e (ds_e - mu_i)            from (1), (2)                  (16)
    dout_i = sum_e dw_e x_e + w_e dx_e                                from (3)

and since sum_e w_e x_e = out_i, mu need not be known before the sum over the edges:

    dout_i = sum_e w_e (ds_e x_e + dx_e) - mu_i out_i                 from (16), (3)                 (17)

p is formed again from the m and l that the forward left. A destination without edges has p = 0 and out = 0,
and tangent 0. Tangents of nodes that no edge refers to, and of hidden edges, are not read.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import split
from jax_attn_bwd._core.sharding import all_gathered, full_like_operands, unsharded
from jax_attn_bwd.ops.graph import loops, placement
from jax_attn_bwd.ops.graph.forward import ends, visible, weighted_messages, with_bias
from jax_attn_bwd.ops.graph.kinds.kind import Kind, Tables, merge_heads, split_heads
from jax_attn_bwd.ops.graph.loops import Chunk, has_edges, own_rows, sum_of_group, take
from jax_attn_bwd.ops.graph.plan import Plan
from jax_attn_bwd.ops.graph.spec import Operands, Result
from jax_attn_bwd.ops.graph.structure import BipartiteCSC


@partial(jax.jit, static_argnums=0)
def tangent(plan: Plan, operands: Operands, result: Result, tangents: Operands) -> Result:
    """Computes the tangents of what one entry of a batch returns; None in `tangents` is zero."""
    # the edges as the passes walk over them, and what every chunk reads
    graph = plan.edges_of(operands)
    if plan.on_every_device:
        operands, tangents = map(placement.gathered_operands, (operands, tangents))
        result = all_gathered(result)
    assert result.m is not None is not result.l  # the forward left them
    options = plan.options
    t, out = plan.kind.tables(operands), result.out if result.wide_out is None else result.wide_out
    out = split_heads(out.astype(result.m.dtype), options.num_heads)
    saved = _saved(plan.kind, t, operands, result, tangents)

    # the sums over the edges, [num_dst, H, D] and [num_dst, H], and ds by edge
    if plan.pieces:
        dout, mu, ds = _sums_over_pieces(plan, graph, (saved, out))
    else:
        dout, mu, ds = _sums(plan, graph, (saved, out))
    dout = dout - mu[..., None] * out  # (17)

    # from accumulated sums to the tangents of what is returned
    dtype, dweights = operands.src.dtype, None
    if ds is not None:
        mu_whole = unsharded(mu, 0)
        dweights = _tangent_of_weights(plan, operands.graph, result.weights, ds, mu_whole).astype(dtype)
    mean = None if options.concat_heads else dout.mean(1).astype(dtype)
    moved = Result(merge_heads(dout).astype(dtype), mean, dweights, mu, None, None)
    return all_gathered(moved) if plan.on_every_device else moved


def _sums(plan: Plan, graph: BipartiteCSC, read: tuple["_Linearized", jax.Array]) -> "_TangentSums":
    """Sums over all edges of `graph`, by what is saved in `read`, sharded like its `out` `[.., H, Dv]`."""
    # zeros, which stay where there is no edge
    (saved, out), operands = read, (graph, read)
    m = saved.m
    zeros = lambda like, *shape: full_like_operands(like, shape, 0, m.dtype, operands)
    dout, mu = zeros(out, graph.num_dst, *out.shape[1:]), zeros(m, *m.shape)
    ds = zeros(m, graph.capacity, plan.options.num_heads) if plan.options.return_weights else None
    if not has_edges(graph):
        return _TangentSums(dout, mu, ds)

    # into runs, and from these into nodes
    of_runs, (runs, _) = loops.room_for_runs(dout, graph), loops.in_runs(graph)
    sums = _TangentSums(of_runs, of_runs.sum(-1), ds)
    sums = sums if saved.scores_move else _TangentSums(of_runs, None, None)
    saved = saved.with_end_rows(plan)
    share, in_order = partial(_share, plan.kind, graph, saved), plan.loops.in_order
    sums = loops.scan(share, _fold, sums, runs, graph.capacity, plan.loops.messages)
    dout = loops.add_runs(dout, graph, sums.dout, in_order)
    if saved.scores_move:
        mu, ds = loops.add_runs(mu, graph, sums.mu, in_order), sums.ds
    return _TangentSums(dout, mu, ds)


def _sums_over_pieces(
    plan: Plan, graph: BipartiteCSC, read: tuple["_Linearized", jax.Array]
) -> "_TangentSums":
    """Sums over the edges, by pieces, where nodes lie on several devices; each sum lies as `out`."""
    (saved, out), pieces = read, plan.pieces
    assert pieces is not None  # else there are no pieces
    shared = saved.unsharded(), out.sum(0, keepdims=True)
    by_node = split.out_spec(out, None)
    specs = _TangentSums(by_node, by_node, split.SUM if plan.options.return_weights else None)
    return placement.over_pieces(pieces, graph, "by_destination", partial(_sums, plan), shared, specs)


class _TangentSums(NamedTuple):
    """The sums over the edges, by destination or run, and ds by edge; None = not needed."""

    dout: Any  # [num_dst, H, Dv]
    mu: Any  # [num_dst, H]
    ds: Any  # [E, H], or [(W,) R, H] of a chunk


class _Linearized(NamedTuple):
    """The arrays that every chunk reads."""

    t: Tables
    dt: Tables  # their tangents
    dbias: jax.Array | None  # [E, H]
    m: jax.Array  # [num_dst, H]
    l: jax.Array  # [num_dst, H], 1 instead of 0

    @property
    def scores_move(self) -> bool:
        """Tells whether any score has a tangent: else there is no mu."""
        dt = self.dt
        return any(x is not None for x in (dt.src, dt.dst, dt.edge, dt.a, self.dbias))

    def unsharded(self) -> "_Linearized":
        """Puts all nodes and edges on every device."""
        t, others = self.t.unsharded((self.dbias, self.m, self.l))
        return _Linearized(t, self.dt.unsharded()[0], *others)

    def with_end_rows(self, plan: Plan) -> "_Linearized":
        """Returns the tables as `loops.rows` reads them; an index past the end finds p = 0."""
        t, dt = (plan.loops.with_end_rows(x) for x in (self.t, self.dt))
        m, l = (plan.loops.with_end_row(x, fill) for x, fill in ((self.m, jnp.inf), (self.l, 1)))
        return _Linearized(t, dt, self.dbias, m, l)


def _saved(kind: Kind, t: Tables, operands: Operands, result: Any, tangents: Operands) -> _Linearized:
    dbias = tangents.score_bias
    if dbias is not None:
        shape = (operands.graph.capacity, kind.options.num_heads)
        dbias = jnp.broadcast_to(dbias.astype(result.m.dtype), shape)
    l = jnp.where(result.l == 0, 1, result.l)
    return _Linearized(t, kind.tables_tangent(operands, tangents, t), dbias, result.m, l)


def _share(kind: Kind, graph: Any, saved: _Linearized, chunk: Chunk) -> _TangentSums:
    """Computes what a chunk, in groups by destination, gives to the sums of (15) and (17)."""
    t, dt, dtype = saved.t, saved.dt, saved.m.dtype
    chunk = loops.to_nodes(graph, chunk)
    seen = visible(t, chunk)

    # the weights again, [(W,) R, H]
    read = ends(kind, t, chunk, seen, dtype)
    s = with_bias(kind.score(t, read), t, chunk, seen)
    m, l = (own_rows(x, chunk, fill) for x, fill in ((saved.m, jnp.inf), (saved.l, 1)))
    p = jnp.exp(s - m) / l  # (1)
    z = kind.dropout_factors(t, chunk)
    w = p if z is None else p * z  # (2)

    # ds, [(W,) R, H], if the scores move, beside the messages that do
    dout = weighted_messages(kind, dt, chunk, w)
    ds = kind.score_tangent(t, dt.a, read, ends(kind, dt, chunk, seen, dtype))  # (12) to (14)
    if saved.dbias is not None:
        given = take(saved.dbias, chunk.number)
        ds = given if ds is None else ds + given
    if ds is None:
        return _TangentSums(dout, None, None)
    if seen is not None:
        ds = jnp.where(seen, ds, 0)
    dout = dout + weighted_messages(kind, t, chunk, w * ds)
    return _TangentSums(dout, sum_of_group(p * ds, chunk), ds)


def _fold(sums: _TangentSums, new: _TangentSums, chunk: Chunk) -> _TangentSums:
    add = lambda x, rows: None if x is None else loops.add(x, chunk, rows)
    ds = None if sums.ds is None else loops.put(sums.ds, chunk.number, new.ds)
    return _TangentSums(add(sums.dout, new.dout), add(sums.mu, new.mu), ds)


def _tangent_of_weights(plan: Plan, graph: Any, weights: Any, ds: jax.Array, mu: jax.Array) -> jax.Array:
    """Computes the tangents dw (16), in the caller's order."""
    edges = loops.one_chunk(graph.by_destination, graph.capacity, plan.loops.in_order)
    w = take(weights, edges.number).astype(mu.dtype)
    dw = w * (take(ds, edges.number) - own_rows(mu, edges))
    return loops.put(jnp.zeros_like(ds), edges.number, dw)
