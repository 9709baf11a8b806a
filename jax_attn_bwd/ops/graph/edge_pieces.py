"""The passes over the edges where nodes lie on several devices: each takes an equal share of the edges.

An Explicit mesh tells how nodes lie. The devices that share the destinations, else the sources, cut the
groups of the graph evenly, as they stand: by destination in a pass by destination, by source in a pass by
source. So no device has more edges than another, were all of them into one node:

    tables of nodes, made where the nodes lie -> gathered once -> a pass over the own groups
    -> a share of the sum of every node -> one reduce-scatter, to the device that the node lies on

It costs each device the rows of all nodes, twice: as they are gathered, and as shares of their sums.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_attn_bwd._core import split
from jax_attn_bwd._core.numerics import ceil_div
from jax_attn_bwd._core.sharding import explicit_spec, full_like_operands, unsharded, varying
from jax_attn_bwd._core.split import Pieces
from jax_attn_bwd.ops.graph.edge_groups import RUN, Groups
from jax_attn_bwd.ops.graph.edge_loops import has_edges
from jax_attn_bwd.ops.graph.spec import Operands
from jax_attn_bwd.ops.graph.structure import BipartiteCSC


def of_nodes(operands: Operands) -> Pieces | None:
    """The pieces into which devices cut the edges; None where each node is on every device."""
    if not has_edges(operands.graph):
        return None
    for nodes in (operands.dst, operands.src, operands.value):
        if nodes is not None and explicit_spec(nodes)[-2] is not None:
            return split.of_rows(nodes, nodes.ndim - 2, 1)
    return None


def share(graph: BipartiteCSC, groups: Groups, pieces: Pieces) -> Groups:
    """The shapes of the part of `groups` that a piece has; a run of edges that is summed apart is not cut."""
    size = ceil_div(groups.node.shape[0], pieces.count)
    size = size if graph.run_owners is None else ceil_div(size, RUN) * RUN
    shapes: Any = (jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in groups)
    return Groups(*shapes)


def whole(tree: Any) -> Any:
    """The arrays of `tree` with all of their first axis, of nodes or edges, on every device.

    Numbers by node and head, `[n, H]`, that lie alike travel together; what is given twice stays one array.
    """
    distinct = {id(x): x for x in jax.tree.leaves(tree)}
    alike: dict[Any, list[int]] = {}
    for key, x in distinct.items():
        small = x.ndim == 2 and explicit_spec(x)[0] is not None
        alike.setdefault((x.shape, x.dtype, explicit_spec(x)) if small else key, []).append(key)
    for keys in alike.values():
        if len(keys) == 1:
            distinct[keys[0]] = unsharded(distinct[keys[0]], 0)
        else:
            together = unsharded(jnp.stack([distinct[key] for key in keys], 1), 0)
            distinct |= {key: together[:, i] for i, key in enumerate(keys)}
    return jax.tree.map(lambda x: distinct[id(x)], tree)


class Home(NamedTuple):
    """Where a result of the pieces goes.

    Attributes:
      like: its rows, sums over the pieces, lie like those of this array; None: they are on every device.
      is_sum: whether it is summed, if pieces differ; else the results lie one after the other, on a new axis.
    """

    like: jax.Array | None = None
    is_sum: bool = True


EVERYWHERE, EACH = Home(), Home(is_sum=False)


def by_destination(
    pieces: Pieces,
    graph: BipartiteCSC,
    function: Callable[[BipartiteCSC, Any], dict[str, Any]],
    shared: Any,
    homes: dict[str, Home],
) -> dict[str, Any]:
    """The results, by name, of `function(graph, shared)` over all pieces, graphs of a part of the edges.

    They have their groups by destination, no other.
    """
    ends, owners, n = (graph.num_dst, graph.num_src), graph.run_owners, pieces.count
    runs = share(graph, graph.by_destination, pieces).node.shape[0] // RUN
    if owners is not None:  # those of the runs of the next piece begin `runs` further
        more = graph.num_dst + n * runs + 1 - owners.shape[0]
        owners = jnp.pad(owners, (0, max(more, 0)), constant_values=graph.num_dst)

    def of_piece(index, shared):
        graph, owners, rest = shared
        if owners is not None:
            owners = lax.dynamic_slice(owners, (index * runs,), (graph.num_dst + runs + 1,))
        groups = _part(graph, graph.by_destination, ends, pieces, index)
        return function(replace(graph, by_destination=groups, run_owners=owners, exact=False), rest)

    return _over(pieces, of_piece, (whole(graph), owners, shared), homes)


def by_source(
    pieces: Pieces,
    graph: BipartiteCSC,
    function: Callable[[BipartiteCSC, Any], dict[str, Any]],
    shared: Any,
    homes: dict[str, Home],
) -> dict[str, Any]:
    """As `by_destination`, over graphs that have their groups by source."""
    ends = graph.num_src, graph.num_dst

    def of_piece(index, shared):
        graph, rest = shared
        groups = _part(graph, graph.by_source, ends, pieces, index)
        return function(replace(graph, by_source=groups, exact=False), rest)

    return _over(pieces, of_piece, (whole(graph), shared), homes)


def sources_with_edges(graph: BipartiteCSC, src: jax.Array) -> jax.Array:
    """Which sources have an edge, bool `[num_src]`, sharded like the rows of `src`."""
    pieces = split.of_rows(src, 0, 1) if explicit_spec(src)[0] is not None and has_edges(graph) else None
    if pieces is None:
        return jnp.zeros(graph.num_src, bool).at[_with_edges(graph)].set(True, mode="drop")

    def marks(graph, _):
        zeros = full_like_operands(graph.offsets[:1], (graph.num_src,), 0, jnp.int32, graph)
        return {"marks": zeros.at[_with_edges(graph)].set(1, mode="drop")}

    return by_source(pieces, graph, marks, (), {"marks": Home(src)})["marks"] > 0


def _with_edges(graph: BipartiteCSC) -> jax.Array:
    """The nodes of the groups by source; past the end those of groups without an edge."""
    node, _, number = graph.by_source
    return jnp.where(number[:, 0] < graph.capacity, node, graph.num_src)


def _part(
    graph: BipartiteCSC, groups: Groups, ends: tuple[int, int], pieces: Pieces, index: jax.Array
) -> Groups:
    """The groups of piece `index`, and no edge, one past the `ends` of node and other, behind the last."""

    def part(x, of_piece, none):
        size, total = of_piece.shape[0], x.shape[0]
        first = index * size
        if size * pieces.count == total:
            return lax.dynamic_slice_in_dim(x, first, size)
        fill = lambda x, n: jnp.pad(x, ((0, n), *((0, 0) for _ in x.shape[1:])), constant_values=none)
        start = jnp.minimum(first, max(total - size, 0))
        own = lax.dynamic_slice_in_dim(fill(x, max(size - total, 0)), start, size)
        return lax.dynamic_slice_in_dim(fill(own, size), first - start, size)

    return Groups(*map(part, groups, share(graph, groups, pieces), (*ends, graph.capacity)))


def _over(
    pieces: Pieces, function: Callable[[jax.Array, Any], dict[str, Any]], shared: Any, homes: dict[str, Home]
) -> dict[str, Any]:
    """The results, by name, of `function(index of the piece, shared)` over all pieces."""
    given = (shared, [home.like for home in homes.values()])
    mesh = next(m for x in jax.tree.leaves(given) for m in [jax.typeof(x).sharding.mesh] if not m.empty)
    names, along = pieces.mesh_axes, PartitionSpec(pieces.mesh_axes)
    index = jnp.arange(pieces.count, dtype=jnp.int32)
    index = jax.sharding.reshard(index, NamedSharding(mesh, along))
    leaves, structure = jax.tree.flatten(shared)
    distinct = {id(x): x for x in leaves}  # an array that is given twice is one inside, too
    place = dict(zip(distinct, range(len(distinct)), strict=True))
    lies = {name: home.like is not None and _lies_along(home.like, names) for name, home in homes.items()}
    scatters = not _others_are_explicit(mesh, names)  # else a reduce-scatter has no lowering
    stacked = [n for n, home in homes.items() if not home.is_sum or (lies[n] and not scatters)]

    def of_device(index, distinct):
        found = function(index[0], structure.unflatten([distinct[place[id(x)]] for x in leaves]))
        return {name: gone_home(name, found[name]) for name in homes}

    def gone_home(name, x):
        if name in stacked:
            return x[None]
        if lies[name]:
            return lax.psum_scatter(x, names, scatter_dimension=0, tiled=True)
        return lax.psum(x, names) if varying(x) & set(names) else x

    out_specs = {name: along if lies[name] or name in stacked else PartitionSpec() for name in homes}
    run = jax.shard_map(
        of_device, mesh=mesh, in_specs=(along, PartitionSpec()), out_specs=out_specs, axis_names=set(names)
    )
    found = run(index, list(distinct.values()))
    return {name: _summed(x, names) if lies[name] and not scatters else x for name, x in found.items()}


def _summed(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """The sum of `x` `[n, nodes, ...]`, sharded along its first axis, sharded along its nodes instead."""
    _, _, *rest = explicit_spec(x)
    spec = PartitionSpec(None, names, *rest)
    return jax.sharding.reshard(x, NamedSharding(jax.typeof(x).sharding.mesh, spec)).sum(0)


def _lies_along(x: jax.Array, names: tuple[str, ...]) -> bool:
    """Whether the rows of `x` are sharded over just these mesh axes."""
    axis = explicit_spec(x)[0]
    return axis is not None and ((axis,) if isinstance(axis, str) else tuple(axis)) == names


def _others_are_explicit(mesh: Any, names: tuple[str, ...]) -> bool:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return any(kind == AxisType.Explicit for name, kind in kinds if name not in names)
