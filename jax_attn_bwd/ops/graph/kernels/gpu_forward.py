"""Mosaic GPU kernel of the forward: one read of each edge's rows, softmax and sum online in registers.

Of the edges e into i seen so far, with Z the dropout factors:

    m = max s_e,   l = sum exp(s_e - m),   acc = sum Z_e exp(s_e - m) message_e

A hub's segments leave theirs in spills, which are combined in order:

    m = max m_k,   l = sum l_k exp(m_k - m),   acc = sum acc_k exp(m_k - m)

Bytes read of an edge, float32, beside what XLA's program of the portable path reads and writes, counted from
its HLO for 100,000 nodes and 2,000,000 edges (fusions by their operands and results, gathers by what they
take); a node's own rows add 5% to the kernel's:

    gat 4 x 64: 1,044 (a row, the source's share of the score, an index), XLA 2,756;   8 x 8: 292, XLA 878
    gatv2:      1,028, XLA 4,474;   8 x 8: 260, XLA 1,419
    transformer (key and value are two rows): 2,052, XLA 4,576;   8 x 8: 516, XLA 1,444
"""

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_attn_bwd._core import mosaic_gpu, pallas
from jax_attn_bwd._core.sharding import explicit_spec, full_like_operands
from jax_attn_bwd.ops.graph import kinds, loops
from jax_attn_bwd.ops.graph.kernels import gpu_body, gpu_kinds, gpu_walk
from jax_attn_bwd.ops.graph.kernels.gpu_body import (
    WIDTHS,
    Body,
    highest_of_spills,
    inputs_of,
    segments_of,
    spread,
    sums_of_spills,
)
from jax_attn_bwd.ops.graph.kinds.kind import Tables
from jax_attn_bwd.ops.graph.loops import has_edges, own_rows, put, take
from jax_attn_bwd.ops.graph.placement import pieces_of_edges
from jax_attn_bwd.ops.graph.plan import Plan
from jax_attn_bwd.ops.graph.segments import Segments
from jax_attn_bwd.ops.graph.softmax import result_of_sums
from jax_attn_bwd.ops.graph.spec import Operands, Options, Result

DTYPES = ("float32", "bfloat16", "float16")
LOWEST = float(jnp.finfo(jnp.float32).min)  # not -inf: all scores of a node may be hidden


def supports(options: Options, operands: Operands) -> str | None:
    """Returns why the kernels cannot run this call on any device; None if they can."""
    # what this JAX, the shapes and the dtypes allow
    if not mosaic_gpu.can_interpret():  # nor has it the layouts
        return f"its kernels need JAX 0.12 or later, not {jax.__version__}"
    graph, src, edge = operands.graph, operands.src, operands.edge
    if not all(isinstance(n, int) for x in (src, operands.dst, graph.indices) for n in x.shape):
        return "its shapes must be known, not symbolic"
    for name, x in (("src", src), ("edge", edge)):
        if x is not None and x.dtype not in DTYPES:
            return f"features must be of one of {DTYPES}, got {name} of {x.dtype}"
    if not has_edges(graph):
        return "the graph has no room for edges"
    # where the arrays may lie
    if any(explicit_spec(nodes := operands.leader)[: nodes.ndim - 2]):
        return "batch axes must not lie on several devices of an Explicit mesh; call it inside jax.shard_map"
    if pieces_of_edges(operands) is not None:
        return "nodes must not lie on several devices of an Explicit mesh; the portable path cuts the edges"
    # which heads a warpgroup can hold
    if options.sharing > 1:
        return f"every head must have a key of its own, got {options.sharing} heads that share one"
    if operands.value is not None and operands.value.shape[-1] != src.shape[-1]:
        return f"values must be as wide as keys, got {operands.value.shape[-1]} and {src.shape[-1]}"
    D = src.shape[-1] // options.num_heads
    if D not in WIDTHS:
        return f"the width of a head must be one of {WIDTHS}, got {D}"
    return None


def forward(plan: Plan, operands: Operands) -> Result:
    """Computes the outputs and row values of one entry of a batch."""
    return _results(plan.options, pallas.is_interpreted(mosaic_gpu.NAME), operands)


@partial(jax.jit, static_argnums=(0, 1))
def _results(options, interpret, operands):
    # the kernel, on each device its heads: out [num_dst, H, D], m and l [num_dst, H]
    graph, kind = operands.graph, kinds.of(options)
    t = kind.tables(operands)
    z = gpu_body.factors_by_edge(kind, t, graph.capacity)
    run = partial(_attend, options, interpret)

    def specs(graph, t, z):
        heads = kind.messages(t)[1]
        row, number = PartitionSpec(None, heads, None), PartitionSpec(None, heads)
        return {"out": row, "m": number, "l": number} | ({"s": number} if options.return_weights else {})

    found = pallas.on_local_shards(run, specs, (graph, gpu_body.without_keys(t), z))
    out, m, l = found["out"], found["m"], found["l"]

    # what is returned and saved
    weights = _weights(kind, t, graph, found["s"], m, l, operands) if options.return_weights else None
    return result_of_sums(options, operands, out, m, l, weights)


def _attend(options: Options, interpret: bool, graph: Any, t: Tables, z: Any) -> dict:
    """Computes out `[num_dst, H, D]`, m, l `[num_dst, H]`, and scores `[E, H]` if weights are asked for."""
    _, H, D = kinds.of(options).messages(t).shape
    at, own, other = segments_of(graph, "by_destination"), {"dst": t.dst}, {"src": t.src}
    inputs = inputs_of(at, graph.by_destination, own, other, {"factor": z}, t)
    if t.message is not None:
        inputs.other["message"] = t.message
    found = gpu_walk.walk(_body(options), inputs, graph.num_dst, graph.capacity, (H, D), interpret)
    rows = found.nodes
    if found.spills:
        rows = _combined(at, rows, **found.spills)
    return rows | found.edges


def _body(options: Options) -> Body:
    """Returns the softmax online, four edges a step."""
    zero, hidden = np.float32(0.0), np.float32(-jnp.inf)

    def step(own, edges, exists, carry):
        # scores and messages of the edges; those past the end are hidden
        scores, messages, written = [], [], []
        for edge, one in zip(edges, exists, strict=True):
            seen = gpu_kinds.seen_by(edge)
            ends = gpu_kinds.Ends.of(own | edge, seen)
            s = gpu_kinds.score(options, ends, own.get("a"), edge, seen)
            written.append({"s": s} if options.return_weights else {})
            scores.append(s + jnp.where(one > 0, zero, hidden))
            messages.append(gpu_kinds.message(options, ends, edge, seen))

        # the sums so far shrink to the new maximum, before the edges join them
        m = functools.reduce(jnp.maximum, scores, carry["m"])
        decay = jnp.exp(carry["m"] - m)
        l, acc = carry["l"] * decay, carry["acc"] * spread(decay, carry["acc"])
        for s, x, edge in zip(scores, messages, edges, strict=True):
            e = jnp.exp(s - m)
            l = l + e
            acc = acc + spread(e * edge["factor"] if "factor" in edge else e, acc) * x
        return {"m": m, "l": l, "acc": acc}, written

    def finish(carry):
        m, l, acc = carry["m"], carry["l"], carry["acc"]
        return {"out": acc / spread(jnp.where(l == 0, 1.0, l), acc), "m": m, "l": l}

    return Body(
        "graph_forward",
        step,
        numbers={"m": LOWEST, "l": 0.0},
        rows={"acc": 0.0},
        finish=finish,
        out={"out": (jnp.float32, True), "m": (jnp.float32, False), "l": (jnp.float32, False)},
        written={"s": (jnp.float32, False)} if options.return_weights else {},
    )


def _combined(at: Segments, rows: dict, m: jax.Array, l: jax.Array, acc: jax.Array) -> dict:
    """Puts in `rows` those of nodes of several segments, whose m, l and acc are in spills."""
    top = highest_of_spills(rows["m"], at, m)
    decay = jnp.exp(m - top[jnp.minimum(at.owner, top.shape[0] - 1)])[..., None]
    nodes, sums = sums_of_spills(at, jnp.concatenate([acc, l[..., None]], -1) * decay)
    acc, l = sums[..., :-1], sums[..., -1:]
    out = put(rows["out"], nodes, acc / jnp.where(l == 0, 1, l))
    return {"out": out, "m": top, "l": put(rows["l"], nodes, l[..., 0])}


def _weights(kind, t, graph, scores, m, l, operands):
    """Computes the weights `[E, H]`, before they are narrowed, from the scores by edge."""
    chunk = loops.one_chunk(graph.by_destination, graph.capacity, in_order=False)
    s = take(scores, chunk.number)
    w = jnp.exp(s - own_rows(m, chunk)) / own_rows(jnp.where(l == 0, 1, l), chunk, 1)
    z = kind.dropout_factors(t, chunk)
    weights = full_like_operands(l, scores.shape, 0, l.dtype, operands)
    return loops.put(weights, chunk.number, w if z is None else w * z)
