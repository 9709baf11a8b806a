"""Graph attention over a `PartitionedGraph`: one exchange of source rows, then each device for itself."""

from collections.abc import Sequence
from typing import Any, Literal, Required, Unpack, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_attn_bwd._core import checks, dropout
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.types import Array, GraphKind, GraphMode, Pair, Triple
from jax_attn_bwd.ops.graph import graph_attention, graph_attention_v2, graph_transformer_attention
from jax_attn_bwd.ops.graph.kinds.kind import merge_heads, split_heads
from jax_attn_bwd.ops.graph.spec import GraphAttentionKeywords, GraphTransformerAttentionKeywords
from jax_attn_bwd.parallel.arguments import Axes, check_axis, run_on_parts
from jax_attn_bwd.parallel.partition import PartitionedGraph, rows_at

_OPERATORS = {"gat": graph_attention, "gatv2": graph_attention_v2, "transformer": graph_transformer_attention}
_NAME = "sharded_graph_attention"


class ShardedGraphAttentionKeywords(GraphAttentionKeywords, GraphTransformerAttentionKeywords, total=False):
    """Keywords of `sharded_graph_attention` beside those that change what it returns."""

    mesh: Required[Mesh]
    axis: Required[Axes]
    kind: GraphKind
    mode: GraphMode
    value: Array | None
    forward_mode: bool


# fmt: off
@overload
def sharded_graph_attention(
    partitioned: PartitionedGraph, src: Array, dst: Array | None = None,
    attention_weights: Array | None = None, *, return_attention_weights: Literal[False] = False,
    return_residual: Literal[False] = False,
    **options: Unpack[ShardedGraphAttentionKeywords]) -> jax.Array: ...
@overload
def sharded_graph_attention(
    partitioned: PartitionedGraph, src: Array, dst: Array | None = None,
    attention_weights: Array | None = None, *, return_attention_weights: Literal[True],
    return_residual: Literal[False] = False, **options: Unpack[ShardedGraphAttentionKeywords]) -> Pair: ...
@overload
def sharded_graph_attention(
    partitioned: PartitionedGraph, src: Array, dst: Array | None = None,
    attention_weights: Array | None = None, *, return_attention_weights: Literal[False] = False,
    return_residual: Literal[True], **options: Unpack[ShardedGraphAttentionKeywords]) -> Pair: ...
@overload
def sharded_graph_attention(
    partitioned: PartitionedGraph, src: Array, dst: Array | None = None,
    attention_weights: Array | None = None, *, return_attention_weights: Literal[True],
    return_residual: Literal[True], **options: Unpack[ShardedGraphAttentionKeywords]) -> Triple: ...
@overload
def sharded_graph_attention(
    partitioned: PartitionedGraph, src: Array, dst: Array | None = None,
    attention_weights: Array | None = None, *, return_attention_weights: bool = False,
    return_residual: bool = False,
    **options: Unpack[ShardedGraphAttentionKeywords]) -> jax.Array | Pair | Triple: ...
# fmt: on
def sharded_graph_attention(
    partitioned: PartitionedGraph,
    src: Array,
    dst: Array | None = None,
    attention_weights: Array | None = None,
    *,
    mesh: Mesh,
    axis: Axes,
    num_heads: int,
    kind: GraphKind = "gat",
    mode: GraphMode = "halo",
    value: Array | None = None,
    edge: Array | None = None,
    score_bias: Array | None = None,
    dropout_key: jax.Array | None = None,
    dropout_mask: Array | None = None,
    dropout_offset: Sequence[Any] | None = None,
    **options: Any,
) -> jax.Array | tuple[jax.Array, ...]:
    """`graph_attention`, `graph_attention_v2` or `graph_transformer_attention`, one part on each device.

        table = own source rows, then those of other parts          one exchange
        out   = operator(own part of the graph, table, own destinations)

    The numbers are those of the operator on one device, to rounding, dropout included. It wraps itself in
    `jax.shard_map`, on meshes of Auto and of Explicit axes. Heads may lie along another Auto axis, and a
    batch under `jax.vmap`; other Explicit axes hold copies. Call it under `jax.jit`: outside, each call
    compiles anew.

    Shapes: n parts with room for N_src sources, N_dst destinations and E edges each, in the layouts
    `partitioned.src`, `.dst` and `.edges`.

    Args:
      partitioned: what `partition_graph(graph, n)` returned.
      src: `[n * N_src, dim]`, floating, `partitioned.src.place(x)`; for the transformer the key.
      dst: `[n * N_dst, dim]`; for the transformer the query. None: `src`, where the graph has as many
        sources as destinations.
      attention_weights: as the operator takes it, the same on all devices; the transformer has none.
      mesh: the devices.
      axis: the mesh axis (or axes) of n devices that the parts lie along.
      num_heads: H; divides dim.
      kind: "gat", "gatv2" or "transformer": the operator.
      mode: "halo" sends each part the rows that it has edges from; "all_gather" sends every row to every
        part, in one all-gather. `partitioned.traffic()` compares them.
      value: `[n * N_src, K * Dv]`, for the transformer. None: `src`, which then travels once for both.
      edge: `[n * E, dim_edge]`.
      score_bias: `[n * E, H]`, or what broadcasts to it, for the transformer.
      dropout_key: as the operator takes it.
      dropout_mask: `[H, n * E]`: `partitioned.edges.place(mask.T).T`.
      dropout_offset: as the operator takes it; the edge is a scalar.
      options: the others of the operator: concat_heads, activation, alpha, scale, num_kv_heads, dropout_rate,
        return_attention_weights, return_residual, implementation.

    Returns:
      What the operator returns: out `[n * N_dst, dim]` (and weights `[n * E, H]`, lse `[n * N_dst, H]`),
      sharded along axis 0, in the layouts: `partitioned.dst.collect(out)` takes it out.

    Gradients:
      Those of the operator, to second order and beyond: the cotangents of the table travel back by the
      reverse exchange, and one all-reduce sums those of `attention_weights`. No exchange stands inside a
      loop. The same bits in every run. The table is kept for the backward.

    Raises:
      ValueError: `partitioned` has another number of parts than the mesh has devices along `axis`; the axis
        is not in the mesh; an array is not in the layout; kind or mode is unknown; as the operator.
      TypeError: an argument is of the wrong kind, or not one of this kind of attention.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC
      >>> from jax_attn_bwd.parallel import partition_graph, sharded_graph_attention
      >>> graph = BipartiteCSC.from_coo([0, 1, 2, 0], [1, 2, 0, 2], 3, 3)
      >>> mesh = jax.make_mesh((1,), ("graph",), devices=jax.devices()[:1])
      >>> parts = partition_graph(graph, 1).put(mesh, "graph")
      >>> x = parts.src.place(jnp.ones((3, 8)))
      >>> out = sharded_graph_attention(parts, x, None, jnp.ones(16), mesh=mesh, axis="graph", num_heads=2)
      >>> parts.dst.collect(out).shape
      (3, 8)

    Minibatches need no partition: sample a subgraph for each device, and stack them, padded to one shape.
    The one exchange is then that of the shared gradients::

        batch = batch_graphs(graphs, capacity=edges, nodes=nodes, stacked=True)
        stack, nodes = batch.graph, batch.src.join(features)

        @jax.shard_map(mesh=mesh, in_specs=(P(), P("batch"), P("batch")), out_specs=P())
        def loss(params, stack, nodes):
            graph, x = jax.tree.map(lambda x: x[0], (stack, nodes))
            return jax.lax.pmean(loss_of_one(params, graph, x), "batch")
    """
    # The parts are as many as the devices, and the arrays are those of this kind.
    operator = _OPERATORS[checks.choice(_NAME, "kind", kind, tuple(_OPERATORS))]
    checks.choice(_NAME, "mode", mode, get_args(GraphMode))
    remedy = "make one by partition_graph(graph, n)"
    checks.instance(_NAME, "partitioned", partitioned, PartitionedGraph, remedy)
    if (n := check_axis(_NAME, mesh, axis)) != partitioned.src.parts:
        expected = f"have as many parts as mesh axis {axis!r} has devices, {n}"
        remedy = f"cut the graph again: partition_graph(graph, {n})"
        raise ValueError(checks.message(_NAME, "partitioned", expected, partitioned.src.parts, remedy))
    is_transformer = kind == "transformer"
    other, x = ("attention_weights", attention_weights) if is_transformer else ("value", value)
    if x is not None:
        raise TypeError(checks.message(_NAME, other, f"be None for kind {kind!r}", "an array"))
    if dst is None:
        if partitioned.src.position.shape != partitioned.dst.position.shape:
            expected = "be given where sources and destinations are not as many"
            raise ValueError(checks.message(_NAME, "dst", expected, None, "partitioned.dst.place makes it"))
        dst = src
    # Arrays that are given travel into the parts, each with its place on the mesh.
    arrays: dict[str, Any] = {"src": src, "dst": dst, "value": value, "edge": edge, "score_bias": score_bias}
    arrays |= {"attention_weights": attention_weights, "dropout_mask": dropout_mask}
    given = {name: x for name, x in arrays.items() if x is not None or name == "src"}
    arrays = {name: checks.floating(_NAME, name, x) for name, x in given.items()}
    specs = _specs(partitioned, arrays, axis)
    if value is not None:
        shared = _check_value(arrays["src"], arrays["value"], num_heads, options.get("num_kv_heads"))
    offset = (0, 0, 0, 0) if dropout_offset is None else dropout_offset
    arrays["offset"], specs["offset"] = dropout.offset(_NAME, offset, 1, 1), P()
    dropout.check_key(_NAME, dropout_key)
    if dropout_key is not None:
        arrays["dropout_key"], specs["dropout_key"] = dropout.key_words(dropout_key), P()

    def local(shards, arrays):
        graph, number, *indices = jax.tree.map(lambda x: x[0], shards)
        # Rows that other parts read are exchanged, keys and values together.
        rows, values = arrays.pop("src"), arrays.pop("value", None)
        if values is not None:  # head by head: heads may lie along another axis of the mesh
            width = rows.shape[1] // shared
            rows = jnp.concatenate([split_heads(rows, shared), split_heads(values, shared)], axis=2)
        sources = values = _with_halo(rows, partitioned, indices, axis, mode)
        if sources.ndim == 3:
            sources, values = (merge_heads(x) for x in jnp.split(sources, (width,), axis=2))
        # The operator runs on this part's graph; dropout counts edges in the caller's order.
        batch, head, first, _ = arrays.pop("offset")
        inputs = (sources, arrays.pop("dst"), arrays.pop("attention_weights", None))
        if is_transformer:
            inputs = (inputs[1], sources, values)
        at = (batch, head, first + number.astype(first.dtype), 0)
        return operator(graph, *inputs, num_heads=num_heads, dropout_offset=at, **arrays, **options)

    shards = (partitioned.graph, partitioned.edge_number, partitioned.send, partitioned.remote)
    return run_on_parts(local, mesh, axis, (P(axis), specs), P(axis), (shards, arrays))


def _with_halo(rows, partitioned, indices, axis, mode) -> jax.Array:
    """Exchanges rows: `[own rows, ...]` -> `[own and received rows, ...]`."""
    send, remote = indices
    sizes, rounds = partitioned.sizes, partitioned.rounds
    if not sum(sizes):
        return rows
    if mode == "all_gather":
        return jnp.concatenate([rows, rows_at(lax.all_gather(rows, axis, tiled=True), remote)])
    # A message has each row once: its cotangents are added in one order, wide ones, which are rounded once.
    wide, dtype = rows.astype(accumulator_dtype(rows.dtype)), rows.dtype
    messages = [rows_at(wide, index).astype(dtype) for index in jnp.split(send, np.cumsum(sizes)[:-1])]
    rows = wide.astype(dtype)
    if rounds is None:
        received = lax.all_to_all(jnp.stack(messages), axis, 0, 0).reshape(-1, *rows.shape[1:])
        return jnp.concatenate([rows, received])
    received = [lax.ppermute(x, axis, pairs) for x, pairs in zip(messages, rounds, strict=True)]
    return jnp.concatenate([rows, *received])


def _specs(partitioned: PartitionedGraph, arrays: dict[str, jax.Array], axis: Axes) -> dict[str, P]:
    """Tells how each array lies on the mesh; those of nodes and edges are in the layouts of the parts."""
    layouts = {"src": "src", "dst": "dst", "value": "src"}
    layouts |= dict.fromkeys(("edge", "score_bias", "dropout_mask"), "edges")
    specs = dict.fromkeys(arrays, P())
    for name in [name for name in arrays if name in layouts]:
        x, rows_axis = arrays[name], int(name == "dropout_mask")
        if name == "score_bias" and (x.ndim < 2 or x.shape[0] == 1):
            continue
        layout = getattr(partitioned, layouts[name])
        if x.ndim != 2 or x.shape[rows_axis] != layout.parts * layout.rows:
            expected = f"have two axes, and {layout.parts * layout.rows} rows along axis {rows_axis}"
            remedy = f"bring it into the layout by partitioned.{layouts[name]}.place"
            raise ValueError(checks.message(_NAME, name, expected, x.shape, remedy))
        specs[name] = P(*(None,) * rows_axis, axis)
    return specs


def _check_value(src: jax.Array, value: jax.Array, num_heads: Any, num_kv_heads: Any) -> int:
    """Returns the number of heads of keys and values, which travel together."""
    checks.same_dtype(_NAME, src=src, value=value)
    name = "num_heads" if num_kv_heads is None else "num_kv_heads"
    heads = checks.integer(_NAME, name, num_heads if num_kv_heads is None else num_kv_heads, 1)
    for argument, x in (("src", src), ("value", value)):
        if x.shape[1] % heads:
            expected = f"have a width that its {heads} heads divide"
            raise ValueError(checks.message(_NAME, argument, expected, x.shape))
    return heads
