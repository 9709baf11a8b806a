"""Where nodes and edges lie, if several devices share them.

On an Explicit mesh arrays tell how their nodes lie, and **pieces** of the edges follow: the devices that
share the destinations, else the sources, cut the groups of the graph evenly, as they stand: by
destination in a pass by destination, by source in a pass by source. So no device has more edges than
another, were all of them into one node:

    tables of nodes, made where the nodes lie -> gathered once -> a pass over the own groups
    -> a share of the sum of every node -> one reduce-scatter, to the device that the node lies on

It costs each device the rows of all nodes, twice: as they are gathered, and as shares of their sums.

On an Auto mesh a trace does not tell how nodes lie: they, heads, a batch or nothing may be sharded. Where a
scatter adds in order, on CPUs, the partitioner decides (`edges_sharded_like_nodes`): the pieces of a pass are
tied to the rows of the nodes by an addition of what is always 0, which makes it shard both alike. If nodes
are sharded, each device has a piece of the edges; if they are not, each has all.

* A pass without a loop is left as it is: what it sums by node is one all-reduce.
* In a loop over chunks of edges each step would hold an exchange. There the pieces are a batch axis, each
  with sums of its own for every node, which are one all-reduce behind the loop. A device without a share
  of the nodes holds those of all pieces.

Running sums of sorted edges would exchange, too: off CPUs each device gets all nodes and edges
(`gathered_operands`).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding, PartitionSpec, reshard

from jax_attn_bwd._core import split
from jax_attn_bwd._core.numerics import ceil_div
from jax_attn_bwd._core.sharding import (
    all_gathered,
    auto_devices,
    explicit_axes,
    explicit_spec,
    full_like_operands,
    gathered,
    mesh_axes_of,
    on_shards,
    reshard_like,
    resharded,
    unsharded,
)
from jax_attn_bwd._core.split import Pieces
from jax_attn_bwd.ops.graph.groups import RUN, Groups, without_order
from jax_attn_bwd.ops.graph.loops import Grid, has_edges, in_chunks
from jax_attn_bwd.ops.graph.spec import Operands


def laid_like_nodes(x: jax.Array, operands: Operands, axes: tuple[int | None, ...]) -> jax.Array:
    """Lays `x` out on an Explicit mesh like the nodes: its batch axes like theirs, its others like `axes`."""
    batch = x.ndim - len(axes)
    return reshard_like(x, operands.leader, (*range(batch), *axes))


def laid_like_destinations(x: jax.Array, operands: Operands, has_heads: bool) -> jax.Array:
    """Lays `x` `[..., num_dst, n]` out on an Explicit mesh like the destinations; its n may be of heads."""
    spec = explicit_spec(operands.leader)
    rows, heads = explicit_spec(operands.dst)[-2], spec[-1] if has_heads else None
    return resharded(x, operands.leader, (*spec[: x.ndim - 2], rows, heads))


# Pieces of the edges.


def pieces_of_edges(operands: Operands) -> Pieces | None:
    """Returns the pieces into which devices cut the edges; None where each node is on every device."""
    if not has_edges(operands.graph):
        return None
    for nodes in (operands.dst, operands.src, operands.value):
        if nodes is not None and explicit_spec(nodes)[-2] is not None:
            return split.pieces_for_rows(nodes, nodes.ndim - 2, 1)
    return None


def groups_of_piece(graph: Any, groups: Groups, pieces: Pieces) -> Groups:
    """Returns the shapes of the `groups` that a piece has; a run of edges that is summed apart is not cut."""
    size = ceil_div(groups.node.shape[0], pieces.count)
    size = size if graph.run_owners is None else ceil_div(size, RUN) * RUN
    shapes: Any = (jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in groups[:3])
    return Groups(*shapes)


def unsharded_rows(tree: Any) -> Any:
    """Puts all of the first axis of the arrays of `tree`, of nodes or edges, on every device.

    Numbers by node and head, `[n, H]`, that lie alike travel together.
    """
    leaves, structure = jax.tree.flatten(tree)
    alike: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        small = x.ndim == 2 and explicit_spec(x)[0] is not None
        alike.setdefault((x.shape, x.dtype, explicit_spec(x)) if small else i, []).append(i)
    for which in alike.values():
        if len(which) == 1:
            leaves[which[0]] = _whole_rows(leaves[which[0]], tree)
        else:
            together = _whole_rows(jnp.stack([leaves[i] for i in which], 1), tree)
            for column, i in enumerate(which):
                leaves[i] = together[:, column]
    return jax.tree.unflatten(structure, leaves)


def _whole_rows(x: jax.Array, others: Any) -> jax.Array:
    """Puts all rows of `x` on every device; on an Auto mesh as one axis of features, as operands lie.

    An operand that a forward and its backward gather is then gathered once.
    """
    if auto_devices(x) == 1:
        return unsharded(x, 0)
    return gathered(x.reshape(x.shape[0], -1), 0, others).reshape(x.shape)


def over_pieces(
    pieces: Pieces, graph: Any, side: str, function: Callable[[Any, Any], Any], shared: Any, specs: Any
) -> Any:
    """Returns the results of `function(graph, shared)` over all pieces, graphs of a part of the edges.

    Args:
      pieces: of the edges.
      graph: that of all edges.
      side: "by_destination" or "by_source", the groups that a piece has a part of; of the others it has none.
      function: computes the results of one piece.
      shared: what it reads, whole on every device.
      specs: where each result goes, a tree of `OutSpec`. A sum goes to the devices that share its rows by the
        spec, or to all; results that are joined lie one after the other along their first axis.
    """
    # order and schedules are those of all edges
    graph = without_order(replace(graph, schedules=None))

    # the runs of a piece are numbered from those of its first group on; the next begin `runs` further
    groups, owners, names = getattr(graph, side), graph.run_owners, pieces.mesh_axes
    runs = groups_of_piece(graph, groups, pieces).node.shape[0] // RUN
    if side == "by_destination" and owners is not None:
        more = graph.num_dst + pieces.count * runs + 1 - owners.shape[0]
        owners = jnp.pad(owners, (0, max(more, 0)), constant_values=graph.num_dst)

    def of_piece(graph, owners, shared, own):
        if side == "by_destination" and owners is not None:
            first = pieces.index() * runs
            owners = lax.dynamic_slice(owners, (first,), (graph.num_dst + runs + 1,))
        return function(replace(graph, **{side: own}, run_owners=owners, exact=False), shared)

    # side by side, shares are summed on every device before each keeps its rows
    if pieces.mesh is None:
        arrays, axes = (graph, owners, shared, groups), (None, None, None, 0)
        found = split.over(pieces, of_piece, arrays, axes, specs)()
        laid = lambda spec, x: x if spec.like is None else rows_sharded_like(x, spec.like)
        return split.map_specs(laid, specs, all_gathered(found))

    leaves, structure = jax.tree.flatten((unsharded_rows(graph), owners, shared))

    # a reduce-scatter has no lowering where other mesh axes are Explicit: there shares are summed outside
    is_scattered = lambda spec: spec.axis is None and mesh_axes_of(*spec.spec[:1]) == set(names)
    apart = explicit_axes(pieces.mesh) > set(names)

    def of_device(*given):
        graph, owners, shared = structure.unflatten(given)
        found = of_piece(graph, owners, shared, _part(graph, side, pieces, pieces.index()))
        return split.map_specs(gone_home, specs, found)

    def gone_home(spec, x):
        if not is_scattered(spec):
            return x
        return x[None] if apart else lax.psum_scatter(x, names, scatter_dimension=0, tiled=True)

    def summed(spec, x):
        """Sums shares `[n, nodes, ...]`, and shards the sum along its nodes as their first axis was."""
        if not (apart and is_scattered(spec)):
            return x
        spec = PartitionSpec(None, names, *explicit_spec(x)[2:])
        return reshard(x, NamedSharding(jax.typeof(x).sharding.mesh, spec)).sum(0)

    # over the mesh axes of the pieces alone: heads stay with the partitioner
    cut, whole = PartitionSpec(names), PartitionSpec()
    out_specs = split.map_specs(lambda p: cut if is_scattered(p) or p.axis == 0 else whole, specs)
    run = on_shards(of_device, pieces.mesh, whole, out_specs, names)
    return split.map_specs(summed, specs, run(*leaves))


def sources_with_edges(graph: Any, src: jax.Array) -> jax.Array:
    """Tells which sources have an edge, bool `[num_src]`, sharded like the rows of `src`."""
    pieces = (
        split.pieces_for_rows(src, 0, 1) if explicit_spec(src)[0] is not None and has_edges(graph) else None
    )
    if pieces is None and graph.schedules is not None:
        return graph.schedules.used
    if pieces is None:
        return jnp.zeros(graph.num_src, bool).at[_with_edges(graph)].set(True, mode="drop")

    def marks(graph, _):
        zeros = full_like_operands(graph.offsets[:1], (graph.num_src,), 0, jnp.int32, graph)
        return zeros.at[_with_edges(graph)].set(1, mode="drop")

    return over_pieces(pieces, graph, "by_source", marks, (), split.out_spec(src, None)) > 0


def _with_edges(graph: Any) -> jax.Array:
    """Returns the nodes of the groups by source; past the end those of groups without an edge."""
    node, number = graph.by_source.node, graph.by_source.number
    return jnp.where(number[:, 0] < graph.capacity, node, graph.num_src)


def _part(graph: Any, side: str, pieces: Pieces, index: jax.Array) -> Groups:
    """Takes the groups of piece `index`; behind the last, no edge: one past the ends of node and other."""
    ends = (graph.num_dst, graph.num_src) if side == "by_destination" else (graph.num_src, graph.num_dst)

    def part(x, of_piece, none):
        size, total = of_piece.shape[0], x.shape[0]
        first = index * size
        if size * pieces.count == total:
            return lax.dynamic_slice_in_dim(x, first, size)
        fill = lambda x, n: jnp.pad(x, ((0, n), *((0, 0) for _ in x.shape[1:])), constant_values=none)
        start = jnp.minimum(first, max(total - size, 0))
        own = lax.dynamic_slice_in_dim(fill(x, max(size - total, 0)), start, size)
        return lax.dynamic_slice_in_dim(fill(own, size), first - start, size)

    groups = getattr(graph, side)
    return Groups(*map(part, groups[:3], groups_of_piece(graph, groups, pieces)[:3], (*ends, graph.capacity)))


# On an Auto mesh: edges tied to the nodes, or all nodes and edges on every device.


def gathered_operands(operands: Operands) -> Operands:
    """Puts all nodes and edges on every device of an Auto mesh; under `jax.jit`.

    Any edge may ask for any node: were nodes on several devices, each chunk of a loop would gather its own.
    """
    a, mask = operands.attention_weights, operands.dropout_mask
    others = all_gathered(operands._replace(attention_weights=None, dropout_mask=None))
    mask = None if mask is None else gathered(mask, 1, operands)
    return others._replace(attention_weights=a, dropout_mask=mask)


def run_on_every_device(function: Callable[..., jax.Array], plan: Any, *operands: Any) -> jax.Array:
    """Calls `function(plan, graph, array, ...)`; on an Auto mesh every device gets all edges."""
    spread = auto_devices(operands[1]) > 1
    return _on_every_device(function, plan, *operands) if spread else function(plan, *operands)


@partial(jax.jit, static_argnums=(0, 1))
def _on_every_device(function, plan, *operands):
    return all_gathered(function(plan, *all_gathered(operands)))


def pieces_like_nodes(operands: Operands, devices: int) -> Pieces | None:
    """Returns as many pieces of edges, side by side, as devices of an Auto mesh can share the nodes.

    None where these are one device, or where a batch forbids it.
    """
    count = max(math.gcd(n, devices) for n in (operands.graph.num_dst, operands.graph.num_src))
    return Pieces(count) if count > 1 and not operands.batch_axes else None


def edges_sharded_like_nodes(operands: Operands, pieces: Pieces) -> Any:
    """Returns the graph with its groups in pieces that are tied to the nodes."""
    # a row of the nodes for each piece
    graph, nodes, count = operands.graph, (operands.dst, operands.src), pieces.count
    rows = [lax.stop_gradient(x).reshape(count, -1).sum(1) for x in nodes if x.shape[0] % count == 0]

    def tied(groups, node, other):
        # [V, ...] -> [count, V / count, ...], no edge in the padding
        grid = Grid(count, groups_of_piece(graph, groups, pieces).node.shape[0], in_order=True)
        ends = (node, other, graph.capacity)
        found = (_tied(in_chunks(x, grid, none), rows) for x, none in zip(groups[:3], ends, strict=True))
        return Groups(*(x.reshape(-1, *x.shape[2:]) for x in found))

    by_destination = tied(graph.by_destination, graph.num_dst, graph.num_src)
    by_source = tied(graph.by_source, graph.num_src, graph.num_dst)
    return replace(graph, by_destination=by_destination, by_source=by_source, exact=False, schedules=None)


def rows_sharded_like(x: Any, nodes: jax.Array) -> Any:
    """Returns `x` `[nodes, ...]`, or None, such that its rows are to lie like those of `nodes`."""
    if x is None:
        return None
    rows = nodes.sum(tuple(range(1, nodes.ndim))).astype(x.dtype)
    return jnp.where(jnp.zeros((), bool), rows.reshape(-1, *(1,) * (x.ndim - 1)), x)


@custom_vmap
def _tied(x: jax.Array, rows: list[jax.Array]) -> jax.Array:
    """Returns `x` `[parts, ...]` of integers, sharded like `rows` `[parts]`; under `vmap` as it is."""
    for row in rows:
        zero = jnp.where(jnp.zeros((), bool), row.astype(x.dtype), 0)
        x = x + zero.reshape(-1, *(1,) * (x.ndim - 1))
    return x


@_tied.def_vmap
def _tied_in_batch(size, in_batched, x, rows):
    return x, in_batched[0]
