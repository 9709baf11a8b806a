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

    delta_i = sum_f w_f c_f - dlse_i = <dout_i, out_i> + sum_f w_f dw_f - dlse_i         (5)
    ds_e    = p_e (Z_e c_e - delta_i),   dbias = ds                                      (6)

What ds and dx give to the operands is by kind too: (7) and (8) are in `kinds/gat.py`, (9) and (10) in
`kinds/gatv2.py`, (11) in `kinds/transformer.py`.

Everything that the edges out of a source need is the source's own rows and those of the destinations,
so one pass over the edges sorted by source gives (1) to (6) and the gradients of sources and edges. Where
a scatter adds in order (on a CPU) and no destination has so many edges that their sum is taken in runs,
it gives those of the destinations too. Elsewhere a pass over the edges sorted by destination follows, to
which it hands one number per edge and head (dz for gat, else ds): for gat the gradient is a sum of such
numbers; the others read the sources' rows once more.

Small graphs on a CPU take one pass in the order of the forward, without a loop. It gives all gradients, delta
by the first form of (5) too, and where both are one program XLA reads rows of nodes and computes the scores
of the edges once.

References:
  Dao et al., FlashAttention, 2022, arXiv:2205.14135: (5) for dense attention.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import fusion, split
from jax_attn_bwd._core.numerics import total
from jax_attn_bwd._core.sharding import all_gathered, full_like_operands, match_type
from jax_attn_bwd.ops.graph import loops, placement
from jax_attn_bwd.ops.graph.forward import ends, shown, visible, with_bias
from jax_attn_bwd.ops.graph.kinds.kind import Edges, Kind, Rows, Sums, Tables, products
from jax_attn_bwd.ops.graph.loops import Chunk, has_edges, own_rows, rows, sum_of_group, take
from jax_attn_bwd.ops.graph.plan import Plan
from jax_attn_bwd.ops.graph.softmax import DestinationRows, destination_rows
from jax_attn_bwd.ops.graph.spec import Cotangents, Residuals


@partial(jax.jit, static_argnums=0)
def backward(plan: Plan, residuals: Residuals, cotangents: Cotangents) -> dict[str, jax.Array]:
    """Computes the gradients of the operands in `residuals.wanted`, by name, of one entry of a batch."""
    # the edges as the passes walk over them, and the tables that they read
    given = residuals.operands
    graph = plan.edges_of(given)
    if plan.on_every_device:
        result, cotangents = all_gathered((residuals.result, cotangents))
        residuals = Residuals(placement.gathered_operands(given), result, residuals.wanted)
    operands, wanted = residuals.operands, residuals.wanted.names
    t = plan.kind.tables(operands)

    # the sums over the edges: a pass by source and, where it is needed, one by destination
    passes = _SumsByPass.of(plan, plan.kind.needs(t, wanted))
    if plan.pieces:
        sums = _sums_over_pieces(plan, passes, t, residuals, cotangents, graph)
    else:
        result = residuals.result
        row: Any = result.lse if result.m is None else result.m
        sums = _zeros(passes.need, t, row, graph, (operands, result, cotangents))
        if passes.in_parts:
            sums = sums._replace(handed=())
        if has_edges(operands.graph):
            saved = _with_end_rows(plan, _destination_rows(plan, residuals, cotangents))
            t = plan.loops.with_end_rows(t)
            if any(passes.by_source):
                sums = _source_pass(plan, t, saved, passes.by_source, graph, sums)
            if passes.second:
                sums = sums._replace(dst=_destination_pass(plan, t, graph, sums))

    # from the sums to the operands; what is one gradient for all nodes is already on every device
    grads = plan.kind.gradients(operands, sums, wanted)
    grads = {name: match_type(grad, getattr(operands, name)) for name, grad in grads.items()}
    if not plan.on_every_device:
        return grads
    alone = "attention_weights"  # heads may be sharded; it has no axis of nodes or edges
    grads = {name: x if name == alone else all_gathered(x) for name, x in grads.items()}
    if plan.tied:
        like = {name: getattr(given, name) for name in ("src", "dst", "value") if name in grads}
        grads |= {name: placement.rows_sharded_like(grads[name], x) for name, x in like.items()}
    return grads


class _SumsByPass(NamedTuple):
    """Which sums are needed, and which pass gives them."""

    need: Sums
    by_source: Sums  # what the pass by source gives: all, but for dst where a second pass follows
    second: bool  # whether a pass by destination follows
    in_parts: bool  # whether what is handed to it stays in the order of the groups

    @classmethod
    def of(cls, plan: Plan, need: Sums) -> "_SumsByPass":
        """Decides by what the gradients need."""
        second = need.dst and not plan.one_pass
        in_parts = second and plan.loops.by_order and not need.handed
        need = need._replace(handed=True) if second else need
        return cls(need, need._replace(dst=need.dst and not second), second, in_parts)


def _destination_rows(plan: Plan, residuals: Residuals, cotangents: Cotangents) -> DestinationRows:
    return destination_rows(plan.options, residuals, cotangents, plan.loops.in_order, not plan.delta_by_edge)


def _with_end_rows(plan: Plan, saved: DestinationRows) -> DestinationRows:
    """Returns `saved` as `loops.rows` reads it; where an index past the end finds its own row, p is 0."""
    fills = {"dout": 0, "delta": 0, "m": jnp.inf, "l": 1}
    rows = {n: plan.loops.with_end_row(getattr(saved, n), fill) for n, fill in fills.items()}
    return saved._replace(**rows)


def _zeros(need: Sums, t: Tables, row: jax.Array, graph: Any, operands: Any) -> Sums:
    """Returns zeros for the sums that are needed; `row` `[num_dst, H]` tells their dtype."""

    def zeros(name):
        if name == "handed":
            return full_like_operands(row, (graph.capacity, row.shape[1]), 0, row.dtype, operands)
        like = getattr(t, name)
        return full_like_operands(like, like.shape, 0, row.dtype, operands)

    return Sums(**{name: zeros(name) for name, is_needed in need._asdict().items() if is_needed})


def _sums_over_pieces(
    plan: Plan, passes: _SumsByPass, t: Tables, residuals: Residuals, cotangents: Cotangents, graph: Any
) -> Sums:
    """Sums over the edges, by pieces, where nodes lie on several devices; each sum lies as its operand.

    What the pass by source hands on is summed, and whole on every device, before the pass by destination.
    """
    pieces, operands = plan.pieces, residuals.operands
    assert pieces is not None  # else there are no pieces
    t, saved = t.unsharded(_destination_rows(plan, residuals, cotangents))

    def source_pass(graph, shared):
        t, saved = shared
        sums = _zeros(passes.by_source, t, saved.m, graph, (graph, shared))
        t, saved = plan.loops.with_end_rows(t), _with_end_rows(plan, saved)
        return _source_pass(plan, t, saved, passes.by_source, graph, sums)

    def destination_pass(graph, shared):
        t, handed, row = shared
        sums = _zeros(Sums(dst=True), t, row, graph, (graph, shared))._replace(handed=handed)
        return _destination_pass(plan, plan.loops.with_end_rows(t), graph, sums)

    # each sum of a pass goes to the devices of its operand; those without one to every device
    value = operands.src if operands.value is None else operands.value
    like = {"message": value, "src": operands.src, "dst": operands.dst}
    spec = lambda name: split.out_spec(like[name], None) if name in like else split.SUM
    needed = passes.by_source._asdict().items()
    specs = Sums(**{name: spec(name) for name, is_needed in needed if is_needed})
    sums = placement.over_pieces(pieces, graph, "by_source", source_pass, (t, saved), specs)
    if passes.second:
        shared = t, sums.handed, saved.m
        found = placement.over_pieces(pieces, graph, "by_destination", destination_pass, shared, spec("dst"))
        sums = sums._replace(dst=found)
    return sums


def _source_pass(plan: Plan, t: Tables, saved: DestinationRows, need: Sums, graph: Any, sums: Sums) -> Sums:
    """Adds every edge to the sums that are needed: by source, or in the order of the forward."""
    edges, zeros = graph.by_source, sums.dst
    to_source: Any = loops.add
    to_destination = lambda x, chunk, new: loops.add_in_turn(x, chunk.other, new)
    delta = None
    if plan.like_forward:
        # single edges, of which each destination's are summed as in the forward, into runs first
        runs, _ = loops.in_runs(graph)
        delta = partial(_delta_of_edges, plan, graph, saved) if plan.delta_by_edge else None
        edges = loops.turned(graph.by_destination)
        to_source = lambda x, chunk, new: loops.add_in_turn(x, chunk.node, new)
        to_destination = lambda x, chunk, new: loops.add_in_turn(x, runs.node, new, is_sorted=True)
        sums = sums._replace(dst=loops.room_for_runs(zeros, graph)) if need.dst else sums

    # by number of the edge; or in the order of the groups, with the numbers, which the second pass looks up
    def hand_on(handed, new, chunk):
        if isinstance(handed, tuple):
            return (*handed, (chunk.number, new))
        return loops.put(handed, chunk.number, new)

    def fold(sums, new, chunk):
        return Sums(
            a=sums.a + new.a if need.a else None,
            handed=hand_on(sums.handed, new.handed, chunk) if need.handed else None,
            dst=to_destination(sums.dst, chunk, new.dst) if need.dst else sums.dst,
            edge=loops.put(sums.edge, chunk.number, new.edge) if need.edge else None,
            message=to_source(sums.message, chunk, new.message) if need.message else None,
            src=to_source(sums.src, chunk, new.src) if need.src else None,
        )

    share = partial(_share, plan, t, saved, delta, need)
    sums = loops.scan(share, fold, sums, edges, graph.capacity, plan.loops.sources)
    if plan.like_forward and need.dst:
        sums = sums._replace(dst=loops.add_runs(zeros, graph, sums.dst, in_order=True))
    return sums


def _delta_of_edges(plan: Plan, graph: Any, saved: DestinationRows, terms: jax.Array) -> jax.Array:
    """Adds to delta (5), of which `saved` has the rest, the `terms` w c of all edges, as the forward sums."""
    rest, runs = saved.delta[: graph.num_dst], loops.in_runs(graph)[0]
    if graph.run_owners is None:
        found = loops.add_in_turn(rest, runs.node, terms, is_sorted=True)
    else:
        zeros = full_like_operands(rest, rest.shape, 0, rest.dtype, (rest, terms, graph))
        of_runs = loops.room_for_runs(zeros, graph)
        of_runs = loops.add_in_turn(of_runs, runs.node, terms, is_sorted=True)
        found = loops.add_runs(rest, graph, of_runs, in_order=True)
    return plan.loops.with_end_row(found)


def _share(
    plan: Plan,
    t: Tables,
    saved: DestinationRows,
    delta: Callable[[jax.Array], jax.Array] | None,
    need: Sums,
    chunk: Chunk,
) -> Sums:
    """Computes the shares of a chunk's edges, in groups by source, in the sums that are needed.

    `delta` makes delta (5) by destination of the terms w c of all edges, which are one chunk; None: saved.
    """
    # the weights again, [(W,) R, H]
    kind = plan.kind
    read = _read(kind, t, saved, chunk)
    s = with_bias(kind.score(t, read.ends), t, chunk, read.seen)
    p = jnp.exp(s - rows(saved.m, chunk, jnp.inf)) / rows(saved.l, chunk, 1)  # (1)
    z = kind.dropout_factors(t, chunk)
    w = p if z is None else p * z  # (2)
    if not any(need._replace(message=False)):  # nothing goes through the scores
        message = kind.from_heads(sum_of_group(w[..., None] * read.dout, chunk)) if need.message else None
        return Sums(message=message)

    # ds, [(W,) R, H]; behind it the rows are read once more where slopes by edge and feature would be kept
    ds = _gradient_of_scores(kind, t, saved, delta, chunk, read, p, z)
    if plan.reads_twice:
        ds, w, chunk = fusion.barrier((ds, w, chunk))
        read = _read(kind, t, saved, chunk)

    # what w and ds give, by kind: rows of the sources [R, H, D], of the edges and destinations [(W,) R, H, D]
    dx: Any = None
    if need.message or (need.src and kind.message_is_src):
        dx = sum_of_group(w[..., None] * read.dout, chunk)  # (4)
    found = kind.shares(t, need, Edges(ds, w, read.dout, dx, read.ends, chunk))
    dst = None
    if need.dst:
        src = shown(read.ends.src, read.seen)
        dst = kind.to_dst(t, found.handed, read.ends._replace(src=src))
    found = found._replace(message=kind.from_heads(dx) if need.message else None, dst=dst)
    return Sums(*(x if needed else None for x, needed in zip(found, need, strict=True)))


class _SourceRows(NamedTuple):
    """The rows of nodes and edges that a chunk, in groups by source, reads."""

    ends: Rows  # [(W,) R, H, D]; those of the sources are not hidden
    dout: jax.Array  # [(W,) R, H, Dv]
    seen: jax.Array | None  # [(W,) R, H]


def _read(kind: Kind, t: Tables, saved: DestinationRows, chunk: Chunk) -> _SourceRows:
    dtype, seen = saved.m.dtype, visible(t, chunk)
    own = kind.to_heads(own_rows(t.src, chunk).astype(dtype))
    dout = shown(rows(saved.dout, chunk).astype(dtype), seen)
    edge = None if t.edge is None else kind.to_heads(take(t.edge, chunk.number).astype(dtype))
    edge = None if edge is None else shown(edge, seen)
    dst = shown(rows(t.dst, chunk).astype(dtype), seen)
    return _SourceRows(Rows(own, dst, edge), dout, seen)


def _gradient_of_scores(
    kind: Kind,
    t: Tables,
    saved: DestinationRows,
    delta: Callable[[jax.Array], jax.Array] | None,
    chunk: Chunk,
    read: _SourceRows,
    p: jax.Array,
    z: jax.Array | None,
) -> jax.Array:
    """Computes the gradients ds of the scores (6), `[(W,) R, H]`."""
    x = kind.to_heads(own_rows(kind.messages(t), chunk).astype(p.dtype))
    c = products(read.dout, total(x, read.ends.edge) if kind.edge_in_message else x)
    if saved.dweights is not None:
        c = c + take(saved.dweights, chunk.number)
    c = c if z is None else z * c
    if read.seen is not None:
        c = jnp.where(read.seen, c, 0)
    own = rows(saved.delta if delta is None else delta(p * c), chunk)
    return p * (c - (own if read.seen is None else jnp.where(read.seen, own, 0)))


def _destination_pass(plan: Plan, t: Tables, graph: Any, sums: Sums) -> jax.Array:
    """Sums for each destination what its edges handed on in the pass by source, `[num_dst, H, D]`."""
    kind, dtype = plan.kind, sums.dst.dtype
    handed: Any = partial(take, sums.handed)
    if isinstance(sums.handed, tuple):
        handed = loops.by_number(sums.handed, graph.capacity)

    def share(chunk):
        own = own_rows(t.dst, loops.to_nodes(graph, chunk)).astype(dtype)
        found = ends(kind, t._replace(dst=None), chunk, visible(t, chunk), dtype)._replace(dst=own)
        return sum_of_group(kind.to_dst(t, handed(chunk.number), found), chunk)

    return loops.sum_in_runs(sums.dst, graph, share, plan.loops.scores)
