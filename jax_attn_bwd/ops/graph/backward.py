"""Backward of the graph attentions: derivation, then the portable code.

The forward, for edge e from j to i, with Z the dropout factors; score s and message x are by kind:

    p_e   = exp(s_e - lse_i) = exp(s_e - m_i) / l_i,   lse_i = log sum_e exp(s_e)
            = m_i + log l_i,   m_i = max_e s_e               over the edges into i       (1)
    w_e   = Z_e p_e                                                                      (2)
    out_i = sum_e w_e x_e,   x_e the message: h_src, or v (+ edge)                       (3)

Given cotangents dout of (3), dw of the returned weights (2), dlse of (1):

    dx_e    = w_e dout_i                                              from (3)           (4)
    c_e     = <dout_i, x_e> + dw_e                                    from (3), (2)
    ds_e    = p_e (Z_e c_e - sum_f w_f c_f) + p_e dlse_i              from (2), (1)

The sum over f, the other edges into i, needs no pass of its own, since sum_f w_f x_f = out_i:

    delta_i = <dout_i, out_i> + sum_f w_f dw_f - dlse_i                                  (5)
    ds_e    = p_e (Z_e c_e - delta_i),   dbias = ds                                      (6)

What ds and dx give to the operands is by kind too: (7) and (8) are in `kinds/gat.py`, (9) and (10) in
`kinds/gatv2.py`, (11) in `kinds/transformer.py`.

Everything that the edges out of a source need is the source's own rows and those of the destinations,
so one pass over the edges sorted by source gives (1) to (6) and the gradients of sources and edges. Where
a scatter adds in order (on a CPU) and no destination has so many edges that their sum is taken in runs,
it gives those of the destinations too. Elsewhere a pass over the edges sorted by destination follows, to
which it hands one number per edge and head (dz for gat, else ds): for gat the gradient is a sum of such
numbers; the others read the sources' rows once more.

References:
  Dao et al., FlashAttention, 2022, arXiv:2205.14135: (5) for dense attention.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import fusion
from jax_attn_bwd._core.sharding import all_gathered, full_like_operands, match_type
from jax_attn_bwd.ops.graph import edge_loops, edge_pieces, kinds, row_terms
from jax_attn_bwd.ops.graph.edge_loops import Chunk, has_edges, own_rows, rows, sum_of_group, take
from jax_attn_bwd.ops.graph.edge_pieces import Home
from jax_attn_bwd.ops.graph.edge_ties import tied_rows
from jax_attn_bwd.ops.graph.forward import shown, visible, with_bias
from jax_attn_bwd.ops.graph.kinds.kind import Edges, Kind, Rows, Sums, Tables, products, total
from jax_attn_bwd.ops.graph.plan import Loops, Plan
from jax_attn_bwd.ops.graph.row_terms import Saved
from jax_attn_bwd.ops.graph.spec import Cotangents, Operands, Residuals
from jax_attn_bwd.ops.graph.structure import BipartiteCSC
from jax_attn_bwd.ops.graph.tables import edges_of, factors, for_rows, gathered, tables, walked, whole


@partial(jax.jit, static_argnums=0)
def backward(plan: Plan, residuals: Residuals, cotangents: Cotangents) -> dict[str, jax.Array]:
    """Gradients of the operands in `residuals.wanted`, by name, of one entry of a batch."""
    graph, given = edges_of(plan, residuals.operands), residuals.operands
    if plan.on_every_device:
        result, cotangents = all_gathered((residuals.result, cotangents))
        residuals = Residuals(gathered(residuals.operands), result, residuals.wanted)
    operands, wanted = residuals.operands, residuals.wanted.names
    options, kind = plan.options, kinds.of(plan.options)
    t = tables(kind, operands)
    need = kind.needs(t, wanted)
    two_passes = need.dst and not plan.one_pass
    in_parts = two_passes and plan.loops.led and not need.handed
    if two_passes:
        need = need._replace(handed=True)
    of_sources = need._replace(dst=need.dst and not two_passes)
    if plan.pieces:
        saved = row_terms.saved(options, residuals, cotangents)
        sums = _sums_over_pieces(plan, kind, t, saved, operands, need, of_sources)
    else:
        result = residuals.result
        row: Any = result.lse if result.m is None else result.m
        sums = _zeros(kind, need, t, row, graph, (operands, result, cotangents))
        if in_parts:
            sums = sums._replace(handed=())
        if has_edges(operands.graph):
            saved = _walked(plan.loops, row_terms.saved(options, residuals, cotangents))
            t = walked(plan.loops, t)
            sums = _source_pass(plan, kind, t, saved, graph, sums, of_sources)
            if two_passes:
                sums = sums._replace(dst=_destination_pass(plan, kind, t, graph, sums))
    grads = kind.gradients(operands, sums, wanted)
    grads = {name: match_type(grad, getattr(operands, name)) for name, grad in grads.items()}
    if not plan.on_every_device:
        return grads
    alone = "attention_weights"  # heads may be sharded; it has no axis of nodes or edges
    grads = {name: x if name == alone else all_gathered(x) for name, x in grads.items()}
    nodes = {"src", "dst", "value"} & set(grads) if plan.tied > 1 else ()
    return grads | {name: tied_rows(grads[name], getattr(given, name)) for name in nodes}


def _walked(loops: Loops, found: Saved) -> Saved:
    """`found` as `edge_loops.rows` reads it; where an index past the end finds a row of its own, p is 0."""
    fills = {"dout": 0, "delta": 0, "m": jnp.inf, "l": 1}
    rows = {n: for_rows(loops, getattr(found, n), fill) for n, fill in fills.items()}
    return found._replace(**rows)


def _zeros(
    kind: Kind, need: Sums[bool], t: Tables, row: jax.Array, graph: BipartiteCSC, operands: Any
) -> Sums[Any]:
    """Zeros for the sums that are needed; `row` `[num_dst, H]` tells their dtype."""
    by_edge = (graph.capacity, kind.options.num_heads)

    def zeros(needed, like, shape=None):
        return full_like_operands(like, shape or like.shape, 0, row.dtype, operands) if needed else None

    return Sums(
        message=zeros(need.message, t.message),
        src=zeros(need.src, t.src),
        dst=zeros(need.dst, t.dst),
        edge=zeros(need.edge, t.edge),
        a=zeros(need.a, t.a),
        handed=zeros(need.handed, row, by_edge),
    )


def _sums_over_pieces(
    plan: Plan,
    kind: Kind,
    t: Tables,
    saved: Saved,
    operands: Operands,
    need: Sums[bool],
    of_sources: Sums[bool],
) -> Sums[Any]:
    """The sums where nodes lie on several devices, by pieces of the edges; each sum lies as its operand.

    What the pass by source hands on is summed, and whole on every device, before the pass by destination.
    """
    pieces, graph = plan.pieces, operands.graph
    assert pieces is not None  # else there are no pieces
    value = operands.src if operands.value is None else operands.value
    like = {"message": value, "src": operands.src, "dst": operands.dst}
    t, saved = whole(t, saved)

    def source_pass(graph, shared):
        t, saved = shared
        sums = _zeros(kind, of_sources, t, saved.m, graph, (graph, shared))
        t, saved = walked(plan.loops, t), _walked(plan.loops, saved)
        return _source_pass(plan, kind, t, saved, graph, sums, of_sources)._asdict()

    def destination_pass(graph, shared):
        t, handed, row = shared
        only_dst = Sums(*(False for _ in need))._replace(dst=True)
        sums = _zeros(kind, only_dst, t, row, graph, (graph, shared))
        sums = sums._replace(handed=handed)
        return {"dst": _destination_pass(plan, kind, walked(plan.loops, t), graph, sums)}

    needed = [name for name, is_needed in of_sources._asdict().items() if is_needed]
    homes = {name: Home(like.get(name)) for name in needed}
    found = edge_pieces.by_source(pieces, graph, source_pass, (t, saved), homes)
    if need.dst and not of_sources.dst:
        home = {"dst": Home(operands.dst)}
        shared = t, found["handed"], saved.m
        found |= edge_pieces.by_destination(pieces, graph, destination_pass, shared, home)
    return Sums(**dict.fromkeys(Sums._fields) | found)


def _source_pass(
    plan: Plan, kind: Kind, t: Tables, saved: Saved, graph: Any, sums: Sums[Any], need: Sums[bool]
) -> Sums[Any]:
    """Adds the share of every edge to the sums that are needed; the groups are of sources."""
    if not any(need):
        return sums

    def hand_on(handed, new, chunk):
        if isinstance(handed, tuple):
            return (*handed, (chunk.number, new))
        return edge_loops.put(handed, chunk.number, new)

    def fold(sums, new, chunk):
        return Sums(
            a=sums.a + new.a if need.a else None,
            handed=hand_on(sums.handed, new.handed, chunk) if need.handed else None,
            dst=sums.dst.at[chunk.other].add(new.dst, mode="drop") if need.dst else sums.dst,
            edge=edge_loops.put(sums.edge, chunk.number, new.edge) if need.edge else None,
            message=edge_loops.add(sums.message, chunk, new.message) if need.message else None,
            src=edge_loops.add(sums.src, chunk, new.src) if need.src else None,
        )

    share = partial(_share, kind, t, saved, need)
    return edge_loops.scan(share, fold, sums, graph.by_source, graph.capacity, plan.loops.sources)


def _share(kind: Kind, t: Tables, saved: Saved, need: Sums[bool], chunk: Chunk) -> Sums[Any]:
    """The shares of a chunk's edges in the sums that are needed."""
    read = _read(kind, t, saved, chunk)
    s = with_bias(kind.score(t, read.ends), t, chunk, read.seen)
    p = jnp.exp(s - rows(saved.m, chunk.other, jnp.inf)) / rows(saved.l, chunk.other, 1)  # (1)
    z = factors(kind.options, t, chunk)
    w = p if z is None else p * z  # (2)
    if not any(need._replace(message=False)):
        message = kind.from_heads(sum_of_group(w[..., None] * read.dout, chunk)) if need.message else None
        return Sums(None, None, None, None, message, None)

    ds = _of_scores(kind, t, saved, chunk, read, p, z)
    if kind.reads_twice and not edge_loops.adds_in_order():
        ds, w, chunk = fusion.barrier((ds, w, chunk))
        read = _read(kind, t, saved, chunk)
    dx: Any = None
    if need.message or (need.src and kind.message_is_src):
        dx = sum_of_group(w[..., None] * read.dout, chunk)  # (4)
    found = kind.shares(t, need, Edges(ds, w, read.dout, dx, read.ends, chunk))
    dst = None
    if need.dst:
        dst = kind.to_dst(t, found.handed, read.ends._replace(src=shown(read.own, read.seen)))
    found = found._replace(message=kind.from_heads(dx) if need.message else None, dst=dst)
    return Sums(*(x if needed else None for x, needed in zip(found, need, strict=True)))


class _Read(NamedTuple):
    """What a chunk, in groups by source, reads of the nodes and edges."""

    own: jax.Array  # [(W,) R, H, D], of the sources
    ends: Rows
    dout: jax.Array  # [(W,) R, H, Dv]
    seen: jax.Array | None  # [(W,) R, H]


def _read(kind: Kind, t: Tables, saved: Saved, chunk: Chunk) -> _Read:
    dtype, seen = saved.m.dtype, visible(t, chunk)
    own = kind.to_heads(own_rows(t.src, chunk).astype(dtype))
    dout = shown(rows(saved.dout, chunk.other).astype(dtype), seen)
    return _Read(own, _ends(kind, t, own, None, chunk, seen), dout, seen)


def _of_scores(
    kind: Kind, t: Tables, saved: Saved, chunk: Chunk, read: _Read, p: jax.Array, z: jax.Array | None
) -> jax.Array:
    """The gradients ds of the scores (6)."""
    x = kind.to_heads(own_rows(t.message, chunk).astype(p.dtype))
    c = products(read.dout, total(x, read.ends.edge) if kind.edge_in_message else x)
    if saved.dweights is not None:
        c = c + take(saved.dweights, chunk.number)
    c, delta = c if z is None else z * c, rows(saved.delta, chunk.other)
    if read.seen is not None:
        c, delta = jnp.where(read.seen, c, 0), jnp.where(read.seen, delta, 0)
    return p * (c - delta)


def _ends(kind: Kind, t: Tables, src: Any, dst: Any, chunk: Chunk, seen: Any) -> Rows:
    """The rows that the scores of a chunk read; the rows of one end, src or dst, are given."""
    dtype = (dst if src is None else src).dtype
    edge = None
    if t.edge is not None:
        edge = shown(kind.to_heads(take(t.edge, chunk.number).astype(dtype)), seen)
    if src is None:
        src = shown(kind.to_heads(rows(t.src, chunk.other).astype(dtype)), seen)
    if dst is None:
        dst = shown(rows(t.dst, chunk.other).astype(dtype), seen)
    return Rows(src, dst, edge)


def _destination_pass(plan: Plan, kind: Kind, t: Tables, graph: Any, sums: Sums[Any]) -> jax.Array:
    """Sums for each destination what its edges handed on in the pass by source."""
    dtype = sums.dst.dtype
    handed: Any = partial(take, sums.handed)
    if isinstance(sums.handed, tuple):
        handed = edge_loops.by_number(sums.handed, graph.capacity)
    runs, count = edge_loops.in_runs(graph)

    def share(chunk):
        own = own_rows(t.dst, edge_loops.to_nodes(graph, chunk)).astype(dtype)
        ends = _ends(kind, t, None, own, chunk, visible(t, chunk))
        return sum_of_group(kind.to_dst(t, handed(chunk.number), ends), chunk)

    add = lambda dst, new, chunk: edge_loops.add(dst, chunk, new)
    extra = ((0, count - graph.num_dst), *((0, 0) for _ in sums.dst.shape[1:]))
    of_runs = jnp.pad(sums.dst, extra)
    of_runs = edge_loops.scan(share, add, of_runs, runs, graph.capacity, plan.loops.scores)
    return edge_loops.add_runs(sums.dst, graph, of_runs)
