"""The operands as the loops over the edges read them, and the dropout factors of a chunk."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.numerics import accumulator_dtype, to_rank
from jax_attn_bwd._core.sharding import all_gathered, auto_devices
from jax_attn_bwd._core.sharding import gathered as gathered_along
from jax_attn_bwd.ops.graph import edge_groups, edge_pieces
from jax_attn_bwd.ops.graph.edge_loops import Chunk, take
from jax_attn_bwd.ops.graph.edge_ties import tied_edges
from jax_attn_bwd.ops.graph.kinds.kind import Kind, Tables, heads_of, split_heads
from jax_attn_bwd.ops.graph.plan import Loops, Plan
from jax_attn_bwd.ops.graph.spec import Operands, Options
from jax_attn_bwd.ops.graph.structure import BipartiteCSC


def tables(kind: Kind, operands: Operands) -> Tables:
    """The tables of a call: features by head, and what the score of the kind reads."""
    H, dtype = kind.options.num_heads, accumulator_dtype(operands.src.dtype)
    src, dst, edge, a = kind.score_tables(operands)
    message = src  # one array, which the loops hold once
    if not kind.message_is_src:
        value = operands.src if operands.value is None else operands.value
        message = split_heads(value, kind.options.num_kv_heads)
    E, bias = operands.graph.capacity, operands.score_bias
    if bias is not None:
        bias = jnp.broadcast_to(bias.astype(dtype), (E, H))
    mask = None if operands.dropout_mask is None else operands.dropout_mask.astype(dtype).T
    return Tables(src, dst, message, edge, a, bias, mask, *_counters(operands, H))


def along(kind: Kind, operands: Operands, tangents: Operands, t: Tables) -> Tables:
    """The tangents of the tables `t`, None for zero; what tells which edges are seen is that of `t`."""
    src, dst, edge, a = kind.along(operands, tangents)
    message = src
    if not kind.message_is_src:
        value = tangents.src if operands.value is None else tangents.value
        message = heads_of(value, kind.options.num_kv_heads)
    return t._replace(src=src, dst=dst, message=message, edge=edge, a=a)


def edges_of(plan: Plan, operands: Operands) -> BipartiteCSC:
    """The graph as the passes walk over it."""
    graph = operands.graph
    if plan.tied > 1:
        return tied_edges(operands, plan.tied)
    if not plan.loops.led:
        return graph
    by_destination = edge_groups.led(graph.by_destination, graph.num_dst)
    by_source = edge_groups.led(graph.by_source, graph.num_src)
    return replace(graph, by_destination=by_destination, by_source=by_source)


def gathered(operands: Operands) -> Operands:
    """`operands` with all nodes and edges on every device of an Auto mesh; under `jax.jit`.

    Any edge may ask for any node: were nodes on several devices, each chunk of a loop would gather its own.
    """
    a, mask = operands.attention_weights, operands.dropout_mask
    others = all_gathered(operands._replace(attention_weights=None, dropout_mask=None))
    mask = None if mask is None else gathered_along(mask, 1, operands)
    return others._replace(attention_weights=a, dropout_mask=mask)


def whole(t: Tables, others: Any = None) -> tuple[Tables, Any]:
    """Tables, and other arrays, with all nodes and edges on every device of an Explicit mesh."""
    by_row = {name: getattr(t, name) for name in ("src", "dst", "message", "edge", "bias", "mask")}
    found, others = edge_pieces.whole((by_row, others))
    return t._replace(**found), others


def on_every_device(function: Callable[..., jax.Array], *operands: Any) -> jax.Array:
    """`function(graph, array, ...)`; on an Auto mesh every device gets all edges, see `gathered`."""
    spread = auto_devices(operands[1]) > 1
    return _on_every_device(function, *operands) if spread else function(*operands)


@partial(jax.jit, static_argnums=0)
def _on_every_device(function, *operands):
    return all_gathered(function(*all_gathered(operands)))


def walked(loops: Loops, t: Tables) -> Tables:
    """The tables of nodes as `edge_loops.rows` reads them."""
    padded: Any = lambda x: None if x is None else for_rows(loops, x)
    src, dst = padded(t.src), padded(t.dst)
    message = src if t.message is t.src else padded(t.message)
    return t._replace(src=src, dst=dst, message=message)


def for_rows(loops: Loops, x: jax.Array, fill: float = 0) -> jax.Array:
    """`x`, by node, with a row of `fill` at its end, if `edge_loops.rows` is to find one there."""
    if not loops.end_row:
        return x
    return jnp.pad(x, ((0, 1), *((0, 0) for _ in x.shape[1:])), constant_values=fill)


def _counters(operands, H):
    """The keys and counters of dropout by key; counters of each edge, or of the first."""
    if operands.dropout_words is None:
        return None, None
    batch, head, row = (jnp.uint32(0),) * 3
    if operands.dropout_offset is not None:
        batch, head, row, _ = operands.dropout_offset
    keys = dropout.head_keys(operands.dropout_words, batch, head + jnp.arange(H, dtype=jnp.uint32))
    return keys, row


def factors(options: Options, t: Tables, chunk: Chunk) -> jax.Array | None:
    """Dropout factors of a chunk, `[(W,) R, H]`; None = all 1."""
    if t.mask is not None:
        return take(t.mask, chunk.number)
    if t.keys is None or t.counters is None:
        return None
    number = chunk.number.astype(jnp.uint32)
    row = (take(t.counters, chunk.number) if t.counters.ndim else t.counters + number)[..., None]
    first, second = (to_rank(x, row.ndim) for x in t.keys)
    dtype = accumulator_dtype(t.message.dtype)
    return dropout.factors((first, second), row, jnp.zeros_like(row), options.dropout_rate, dtype)
