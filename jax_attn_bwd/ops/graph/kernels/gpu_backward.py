"""Mosaic GPU kernels of the backward; the equations are those of `backward.py` and `kinds/`.

* `graph_dsrc` walks over the edges sorted by source. It reads the destinations' rows, recomputes p (1), and
  sums what the source gets, (4) with (7), (9) or (11); what an edge gets is written to its row, and what its
  destination will get is handed on as a number of each head.
* `graph_ddst` walks over the edges sorted by destination and sums (9) or (11) of the numbers handed to it and
  the sources' rows. For gat those numbers are the gradient's terms themselves.

Bytes of an edge, counted as in `gpu_forward`, of both kernels together:

    gat 4 x 64: 1,112 (its row of dout, four numbers, two indices, the number handed on), XLA 4,880
    gatv2, transformer: 2,120 and 1,048, XLA 11,725 and 10,856
    8 x 8: gat 424, XLA 1,984; the others 648 and 296, XLA 3,465 and 3,335

Destinations first would hand on w and ds, two numbers, and spare the sources the scores, but read the rows
of messages by edge: gat 2,144 in place of 1,112, gatv2 3,152 of 3,168, transformer 4,176 of 3,168 (4 x 64).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_attn_bwd._core import mosaic_gpu, pallas
from jax_attn_bwd._core.sharding import match_type
from jax_attn_bwd.ops.graph.kernels import gpu_body, gpu_kinds, gpu_walk
from jax_attn_bwd.ops.graph.kernels.gpu_body import Body, Walked, inputs_of, segments_of, settled, spread
from jax_attn_bwd.ops.graph.kinds.kind import Sums, Tables
from jax_attn_bwd.ops.graph.plan import Plan
from jax_attn_bwd.ops.graph.segments import Segments
from jax_attn_bwd.ops.graph.softmax import DestinationRows, destination_rows
from jax_attn_bwd.ops.graph.spec import Cotangents, Options, Residuals


def backward(plan: Plan, residuals: Residuals, cotangents: Cotangents) -> dict[str, jax.Array]:
    """Computes the gradients of the operands in `residuals.wanted`, by name, of one entry of a batch."""
    return _gradients(plan, pallas.is_interpreted(mosaic_gpu.NAME), residuals, cotangents)


@partial(jax.jit, static_argnums=(0, 1))
def _gradients(plan, interpret, residuals, cotangents):
    # which sums the gradients are made of; destinations take theirs from what edges hand on
    operands, wanted = residuals.operands, residuals.wanted.names
    graph, options, kind = operands.graph, plan.options, plan.kind
    t = kind.tables(operands)
    need = kind.needs(t, wanted)
    need = need._replace(handed=need.handed or need.dst)
    if not any(need):
        return {}

    # the kernels, on each device its heads
    saved = destination_rows(options, residuals, cotangents, plan.loops.in_order)
    z = gpu_body.factors_by_edge(kind, t, graph.capacity)
    run = partial(_sums, plan, need, interpret)

    def specs(graph, t, z, saved):
        heads = kind.messages(t)[1]
        row, number = PartitionSpec(None, heads, None), PartitionSpec(None, heads)
        nodes = number if options.kind == "gat" else row
        all_of_them = Sums(PartitionSpec(heads, None), number, nodes, row, row, nodes)
        return Sums(*(s if needed else None for s, needed in zip(all_of_them, need, strict=True)))

    sums = pallas.on_local_shards(run, specs, (graph, gpu_body.without_keys(t), z, saved))

    grads = kind.gradients(operands, sums, wanted)
    return {name: match_type(grad, getattr(operands, name)) for name, grad in grads.items()}


def _sums(
    plan: Plan, need: Sums, interpret: bool, graph: Any, t: Tables, z: Any, saved: DestinationRows
) -> Sums:
    """Computes the sums that are needed, of the heads of one device."""
    options, E = plan.options, graph.capacity
    _, H, D = plan.kind.messages(t).shape
    # the pass by source, which leaves junk where there is no edge
    at = segments_of(graph, "by_source")
    own = {"src": t.src} | ({} if t.message is None else {"message": t.message})
    other = {"dst": t.dst, "dout": saved.dout, "delta": saved.delta, "m": saved.m, "l": saved.l}
    given = inputs_of(at, graph.by_source, own, other, {"factor": z, "dw": saved.dweights}, t)
    body = _source_body(options, need, None if t.edge is None else t.edge.dtype)
    found = gpu_walk.walk(body, given, graph.num_src, E, (H, D), interpret)

    exists = graph.exists[:, None]
    handed: Any = found.edges.get("handed")
    sums = _by_node(found, at)
    dst = edge = a = None
    if need.a:
        a = jnp.where((at.node < graph.num_src)[:, None, None], found.segments["a"], 0).sum(0)

    # the destinations, in a pass of their own over what was handed on
    if need.dst:
        at = segments_of(graph, "by_destination")
        given = inputs_of(at, graph.by_destination, {"dst": t.dst}, {"src": t.src}, {"handed": handed}, t)
        if options.kind == "gat":
            given = given._replace(own={}, other={}, edge={"handed": handed}, shared={})
        body = _destination_body(options)
        dst = _by_node(gpu_walk.walk(body, given, graph.num_dst, E, (H, D), interpret), at)["dst"]

    # by edge, 0 where there is none
    if need.edge:
        edge = jnp.where(exists[..., None], found.edges["edge"], 0)
    handed = jnp.where(exists, handed, 0) if need.handed else None
    return Sums(a, handed, dst, edge, sums.get("message"), sums.get("src"))


def _by_node(found: Walked, at: Segments) -> dict[str, jax.Array]:
    """Returns the sums by node, those of nodes of several segments put together."""
    parts = found.spills
    return {name: settled(x, at, parts[name]) if parts else x for name, x in found.nodes.items()}


def _source_body(options: Options, need: Sums, edge_dtype: Any) -> Body:
    """Returns what an edge gives to its source, and to its own row."""
    through_score = any(need._replace(message=False))
    is_gat, is_v2 = options.kind == "gat", options.kind == "gatv2"

    def of_edge(own, edge):
        """Computes what an edge gives: to the sums, and to its row."""
        # the weights again, and what goes through the message
        seen = gpu_kinds.seen_by(edge)
        ends = gpu_kinds.Ends.of(own | edge, seen)
        s = gpu_kinds.score(options, ends, own.get("a"), edge, seen)
        p = jnp.exp(s - edge["m"]) / edge["l"]  # (1)
        w = p * edge["factor"] if "factor" in edge else p  # (2)
        dout = gpu_kinds.shown(edge["dout"], seen)
        dx = spread(w, dout) * dout  # (4)
        if not through_score:
            return {"message": dx}, {}

        # what goes through the score, added to it where one row takes both
        c = jnp.sum(dout * gpu_kinds.message(options, ends, own, seen), axis=-1)
        if "dw" in edge:
            c = c + gpu_kinds.shown(edge["dw"], seen)
        c = c * edge["factor"] if "factor" in edge else c
        ds = p * (c - gpu_kinds.shown(edge["delta"], seen))  # (6)
        pulled = gpu_kinds.pull(options, ends, own.get("a"), ds)
        shares = {"message": dx, "src": pulled.src + dx if is_v2 else pulled.src, "a": pulled.a}
        row = pulled.edge + dx if options.kind == "transformer" else pulled.edge
        return shares, {"handed": pulled.handed, "edge": row}

    def step(own, edges, exists, carry):
        written = []
        for edge, one in zip(edges, exists, strict=True):
            shares, rows = of_edge(own, edge)
            carry = {name: x + spread(one, x) * shares[name] for name, x in carry.items()}
            written.append({name: rows[name] for name in kept})
        return carry, written

    # what is carried by node, what is written by edge
    kept: dict[str, tuple[Any, bool]] = {}
    if need.handed:
        kept["handed"] = (jnp.float32, False)
    if need.edge:
        kept["edge"] = (edge_dtype, True)
    numbers = ["src"] if need.src and is_gat else []
    rows = [n for n in ("message", "src", "a") if getattr(need, n) and n not in numbers]
    return Body(
        "graph_dsrc",
        step,
        numbers=dict.fromkeys(numbers, 0.0),
        rows=dict.fromkeys(rows, 0.0),
        written=kept,
        by_segment=("a",) if need.a else (),
    )


def _destination_body(options: Options) -> Body:
    """Returns what an edge gives to its destination, of what was handed on."""
    is_gat = options.kind == "gat"

    def step(own, edges, exists, carry):
        total = carry["dst"]
        for edge, one in zip(edges, exists, strict=True):
            share = edge["handed"]
            if not is_gat:
                ends = gpu_kinds.Ends.of(own | edge, gpu_kinds.seen_by(edge))
                share = gpu_kinds.pull(options, ends, own.get("a"), share).dst
            total = total + spread(one, total) * share
        return {"dst": total}, [{}] * len(edges)

    start = {"dst": 0.0}
    return Body("graph_ddst", step, numbers=start if is_gat else {}, rows={} if is_gat else start)
