"""Cutting a graph by its destinations into parts of one shape.

`PartitionedGraph` holds the parts, the layout of their arrays, and what travels between them.
"""

import heapq
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_attn_bwd._core import checks, keywords
from jax_attn_bwd._core.trees import exportable_dataclass
from jax_attn_bwd.ops.graph import BipartiteCSC

_PADDING = 1.1  # moved rows at most, of the needed ones
_FEW = 16  # rows whose transfer takes no longer than its start


def rows_at(x: jax.Array, index: Any) -> jax.Array:
    """Reads the rows of `x` at `index`, which has none twice; 0 past the end."""
    if not x.shape[0]:  # a gather needs a row to clamp to
        return jnp.zeros((*np.shape(index), *x.shape[1:]), x.dtype)
    return x.at[index].get(mode="fill", fill_value=0, unique_indices=True)


class Traffic(NamedTuple):
    """What all devices together send in one forward; the backward sends as much."""

    needed: int  # every source once to every part but its own that has an edge from it
    halo: int  # what mode="halo" sends: with the padding
    all_gather: int  # what mode="all_gather" sends


@exportable_dataclass
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """Where rows of the caller's order stand in the parts: part after part, each padded to `rows`.

    Attributes:
      position: int32 `[size]`, the place of each row; past the end for those that have none.
      parts: number of parts.
      rows: what a part has room for.
    """

    position: Any
    parts: int = field(metadata={"static": True})
    rows: int = field(metadata={"static": True})

    def place(self, x: Any) -> Any:
        """`[size, ...]` -> `[parts * rows, ...]`, 0 in the padding; on the host for NumPy, before `put`."""
        x = x if checks.is_array(x) else np.asarray(x)
        checks.shape("Layout.place", "x", x, "[size, ...]", (*self.position.shape, *x.shape[1:]))
        shape = (self.parts * self.rows, *x.shape[1:])
        if isinstance(x, np.ndarray) and isinstance(self.position, np.ndarray):
            on_host, inside = np.zeros(shape, x.dtype), self.position < shape[0]
            on_host[self.position[inside]] = x[inside]
            return on_host
        placed = jnp.zeros(shape, x.dtype)
        if not shape[0]:  # the gradient of a scatter is a gather, which needs a row to clamp to
            return placed
        return placed.at[self.position].set(x, mode="drop", unique_indices=True)

    def collect(self, x: Any) -> jax.Array:
        """`[parts * rows, ...]` -> `[size, ...]`, whole on every device; 0 for what has no place."""
        x = jnp.asarray(x)
        checks.shape("Layout.collect", "x", x, "[parts * rows, ...]", (self.parts * self.rows, *x.shape[1:]))
        if not (mesh := jax.typeof(x).sharding.mesh).empty:
            x = jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec()))
        return rows_at(x, self.position)


@exportable_dataclass
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class PartitionedGraph:
    """A graph in parts; `partition_graph` makes it, `sharded_graph_attention` runs it.

    A part owns destinations, all edges into them, and sources; all parts have one shape. `src`, `dst` and
    `edges` tell the layout of arrays of nodes and edges, `[parts * rows, ...]`, to be sharded along axis 0:
    `partitioned.src.place(x)` brings an array of the caller's order into it, `partitioned.dst.collect(out)`
    brings one back. Both are differentiable and take any dtype. With as many sources as destinations the two
    are taken for the same nodes and have one layout: what one layer puts out is the source of the next.

    It is a pytree: hand what `put` returns to a compiled function as an argument.

    Attributes:
      graph: the parts, stacked: sources are numbered by own rows, then those of other parts.
      edge_number: int32 `[parts, edges.rows]`, of each edge in the caller's order.
      send: int32 `[parts, halo]`, own rows in the order in which they are sent.
      remote: int32 `[parts, halo]`, the received rows by their places in the layout of the sources.
      src, dst, edges: the layouts; edges are the `capacity` of the whole graph.
      sizes: rows of each message: it splits the axis `halo`.
      rounds: (sender, receiver) pairs of each exchange of messages; None: one all-to-all.
      remote_rows: distinct (part, source of another part) pairs that have an edge.
    """

    graph: BipartiteCSC
    edge_number: Any
    send: Any
    remote: Any
    src: Layout
    dst: Layout
    edges: Layout
    sizes: tuple[int, ...] = field(metadata={"static": True})
    rounds: tuple[tuple[tuple[int, int], ...], ...] | None = field(metadata={"static": True})
    remote_rows: int = field(metadata={"static": True})

    def __repr__(self) -> str:
        rows = ", ".join(f"{name}_rows={getattr(self, name).rows}" for name in ("src", "dst", "edges"))
        return f"PartitionedGraph(parts={self.src.parts}, {rows}, remote_rows={self.remote_rows})"

    def traffic(self, row_bytes: int = 1) -> Traffic:
        """Bytes that are sent if a source row has `row_bytes`, by either mode; or numbers of rows."""
        n = self.src.parts
        counts = [n * (n - 1)] if self.rounds is None else map(len, self.rounds)  # to itself: stays
        sent = sum(size * pairs for size, pairs in zip(self.sizes, counts, strict=False))
        rows = (self.remote_rows, sent, n * (n - 1) * self.src.rows)
        return Traffic(*(count * row_bytes for count in rows))

    def put(self, mesh: Mesh, axis: str | tuple[str, ...]) -> "PartitionedGraph":
        """The same on `mesh`: each part on its device along `axis`, the layouts on all."""
        parts = {name: getattr(self, name) for name in ("graph", "edge_number", "send", "remote")}
        whole = {name: getattr(self, name) for name in ("src", "dst", "edges")}
        parts = jax.device_put(parts, NamedSharding(mesh, PartitionSpec(axis)))
        return replace(self, **parts, **jax.device_put(whole, NamedSharding(mesh, PartitionSpec())))


@keywords.known
def partition_graph(graph: BipartiteCSC, n: int, *, parts: Any = "balanced") -> PartitionedGraph:
    """Cuts a graph by its destinations into `n` parts, one for each device along a mesh axis.

    Every part holds all edges into its destinations, so that no softmax is split; some of their sources
    belong to other parts (the halo). Built once, outside `jit`, by NumPy: two million edges take a second.

    Args:
      graph: the whole graph.
      n: number of parts.
      parts: which destinations form a part. "balanced": the same number in each, and edges as equal as
        degrees allow. "contiguous": ranges of the caller's order with about equal numbers of edges, for
        meshes and orders in which neighbours stand near: little travels then. Or integers `[num_dst]`, the
        part of each (of METIS, say); the longest part sets the shapes of all.

    Returns:
      The parts. Where their layout is not the caller's order, it has another length (if need be, by a row of
      padding in each part), so that an array in the caller's order is refused by its shape.
      A source belongs to the part of the destination of its number, where there are as many;
      else to the part that has most edges from it, up to an equal share. Rows travel in one all-to-all if
      that pads them by less than 10%, otherwise in several exchanges of messages of about one size, each
      padded by at most 10% or 16 rows. `traffic()` tells what is sent.

    Raises:
      ValueError: `n` is not positive; `parts` has another length, a number outside `[0, n)`, or is unknown.
      TypeError: `graph` is no `BipartiteCSC`, or is traced; `parts` is not of integers.

    Example:
      >>> from jax_attn_bwd import BipartiteCSC
      >>> from jax_attn_bwd.parallel import partition_graph
      >>> graph = BipartiteCSC.from_coo([0, 1, 2, 3], [1, 2, 3, 0], 4, 4)  # a ring
      >>> partition_graph(graph, 2, parts="contiguous")
      PartitionedGraph(parts=2, src_rows=2, dst_rows=2, edges_rows=3, remote_rows=2)
    """
    operator = "partition_graph"
    n = checks.integer(operator, "n", n, 1)
    if not isinstance(graph, BipartiteCSC) or isinstance(graph.offsets, jax.core.Tracer):
        expected, got = "be a BipartiteCSC that is not traced", type(graph).__name__
        raise TypeError(checks.message(operator, "graph", expected, got, "build and cut it outside jit"))
    offsets = np.asarray(graph.offsets)
    if offsets.ndim != 1:
        raise ValueError(checks.message(operator, "graph", "be one graph", f"a stack of {len(offsets)}"))
    degree, nnz = np.diff(offsets), int(offsets[-1])
    source, number = np.asarray(graph.indices)[:nnz], np.asarray(graph.map_csc_to_coo)[:nnz]

    # Destinations are dealt to the parts; an edge lies where its destination does.
    dst_part = _part_of_destinations(operator, parts, degree, n)
    dst_row, dst_rows = _rows_with_room(dst_part, n)
    edge_part = np.repeat(dst_part, degree)
    edge_row, edge_rows = _rows_with_room(edge_part, n, number, graph.capacity)
    # Sources lie with the destinations that they are, or where most of their edges are.
    src_part, src_row, src_rows = dst_part, dst_row, dst_rows
    if graph.num_src != graph.num_dst:
        src_part = _seated(source, edge_part, graph.num_src, n)
        src_row, src_rows = _rows_with_room(src_part, n)

    # What a part's edges read of other parts' sources is listed, to be sent.
    local, halo = _halo(source, edge_part, src_part, src_row, src_rows, n)
    # Each part is a graph of its own, whose sources are its rows and then those it receives.
    ends = np.zeros((n, dst_rows + 1), np.int64)
    ends[dst_part, dst_row + 1] = degree
    built = []
    for part, end in enumerate(ends.cumsum(1)):
        indices, num_src = local[edge_part == part], src_rows + sum(halo["sizes"])
        own = BipartiteCSC.from_csc(end, indices, num_src, capacity=edge_rows)
        built.append(jax.tree.map(np.asarray, own))
    # Both ways between the caller's edge order and the rows of the parts.
    edge_number = np.zeros((n, edge_rows), np.int32)
    edge_number[edge_part, edge_row] = number
    edge_position = n * edge_rows + np.arange(graph.capacity, dtype=np.int32)
    edge_position[number] = edge_part * edge_rows + edge_row
    return PartitionedGraph(
        jax.tree.map(lambda *x: np.stack(x), *built),
        edge_number,
        src=Layout((src_part * src_rows + src_row).astype(np.int32), n, src_rows),
        dst=Layout((dst_part * dst_rows + dst_row).astype(np.int32), n, dst_rows),
        edges=Layout(edge_position, n, edge_rows),
        **halo,
    )


def _part_of_destinations(operator: str, parts: Any, degree: np.ndarray, n: int) -> np.ndarray:
    """Returns the part of each destination."""
    nodes = len(degree)
    if isinstance(parts, str):
        if checks.choice(operator, "parts", parts, ("balanced", "contiguous")) == "balanced":
            return _balanced(degree, n)
        weight = degree + 1.0  # a row takes about what an edge does
        return ((np.cumsum(weight) - weight / 2) * (n / max(weight.sum(), 1))).astype(np.int64)
    given = np.asarray(checks.integers(operator, "parts", parts, 0, n - 1)).astype(np.int64)
    if given.shape != (nodes,):
        raise ValueError(checks.message(operator, "parts", f"have shape [num_dst] = ({nodes},)", given.shape))
    return given


def _balanced(degree: np.ndarray, n: int) -> np.ndarray:
    """Deals each node, the largest degrees first, to the part with the fewest edges that has a seat left."""
    part, seats = np.zeros(len(degree), np.int64), -(-len(degree) // n)
    heap = [(0, 0, p) for p in range(n)]
    for node in np.argsort(-degree, kind="stable"):
        edges, nodes, p = heap[0]
        part[node] = p
        if nodes + 1 < seats:
            heapq.heapreplace(heap, (edges + int(degree[node]), nodes + 1, p))
        else:
            heapq.heappop(heap)
    return part


def _seated(source: np.ndarray, edge_part: np.ndarray, num_src: int, n: int) -> np.ndarray:
    """Returns the part of each source: the one with most edges from it while it has seats, then any."""
    pairs, edges = np.unique(edge_part * np.int64(num_src) + source, return_counts=True)
    parts, sources = np.divmod(pairs[np.argsort(edges, kind="stable")], max(num_src, 1))
    part, seats = np.zeros(num_src, np.int64), -(-num_src // n)
    part[sources] = parts  # a node of several parts goes to the last, which has most edges
    over = _rows(part, n)[0] >= seats
    free = np.maximum(seats - np.bincount(part, minlength=n), 0)
    part[over] = np.repeat(np.arange(n), free)[: over.sum()]
    return part


def _rows(part: np.ndarray, n: int) -> tuple[np.ndarray, int]:
    """Returns (the row of each element in its part, in the order given; rows of the longest part)."""
    count = np.bincount(part, minlength=n)
    row = np.empty(len(part), np.int64)
    row[np.argsort(part, kind="stable")] = np.arange(len(part)) - np.repeat(np.cumsum(count) - count, count)
    return row, int(count.max(initial=0))


def _rows_with_room(
    part: np.ndarray, n: int, number: np.ndarray | None = None, size: int | None = None
) -> tuple[np.ndarray, int]:
    """Returns `_rows`; one more where the layout would be as long as the caller's, in another order.

    `number`: of each element in the caller's order, which has `size`.
    """
    row, rows = _rows(part, n)
    number = np.arange(len(part)) if number is None else number
    is_kept = np.array_equal(part * rows + row, number)
    return row, rows + (n * rows == (len(part) if size is None else size) and not is_kept)


def _halo(source, edge_part, src_part, src_row, src_rows: int, n: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Lists what the parts send one another, so that each has the sources of its edges.

    Returns the source of each edge as its part numbers it, and fields of `PartitionedGraph`.
    """
    # every (part, source) once, and those whose source lies in another part
    num_src = len(src_part)
    pairs, name = np.unique(edge_part * np.int64(num_src) + source, return_inverse=True)
    receiver, needed = np.divmod(pairs, max(num_src, 1))
    sender, row = src_part[needed], src_row[needed]
    away = np.flatnonzero(sender != receiver)
    # how many rows go from which part to which, and when
    channel = sender[away] * n + receiver[away]
    wanted = np.bincount(channel, minlength=n * n).reshape(n, n)
    sizes, rounds, send_start, receive_start = _schedule(wanted)
    rank, _ = _rows(channel, n * n)
    # padding is past the end, and distinct: it is read as 0 and its gradients are dropped
    past = np.tile(np.arange(sum(sizes), dtype=np.int32), (n, 1))
    send, remote, local = past + src_rows, past + n * src_rows, row.copy()
    send[sender[away], send_start.ravel()[channel] + rank] = row[away]
    slot = receive_start.ravel()[channel] + rank
    remote[receiver[away], slot] = sender[away] * src_rows + row[away]
    local[away] = src_rows + slot
    sent = {"send": send, "remote": remote, "sizes": sizes, "rounds": rounds, "remote_rows": len(away)}
    return local[name], sent


def _schedule(wanted: np.ndarray) -> tuple[tuple, tuple | None, np.ndarray, np.ndarray]:
    """Returns (sizes, rounds, where each message starts for its sender, and for its receiver).

    `wanted[sender, receiver]` rows.
    """
    # one all-to-all of messages of the largest size, if little of it is padding
    n, largest = len(wanted), int(wanted.max())
    if 0 < n * (n - 1) * largest <= _PADDING * wanted.sum():
        start = np.broadcast_to(np.arange(n) * largest, (n, n))
        return (largest,) * n, None, start, start.T
    # else rounds, the largest messages first: in each a part sends and receives once, and sizes are near
    rounds: list[list[tuple[int, int]]] = []
    sizes: list[int] = []
    busy: list[set[int]] = []  # senders, and ~receivers
    for place in np.argsort(-wanted, axis=None, kind="stable")[: np.count_nonzero(wanted)]:
        sender, receiver = divmod(int(place), n)
        size, ends = int(wanted[sender, receiver]), {sender, ~receiver}
        limit = max(_PADDING * size, size + _FEW)
        free = (k for k, room in enumerate(sizes) if room <= limit and busy[k].isdisjoint(ends))
        k = next(free, len(sizes))
        if k == len(sizes):
            rounds.append([])
            sizes.append(size)
            busy.append(set())
        rounds[k].append((sender, receiver))
        busy[k] |= ends
    # the messages of a round stand where the earlier rounds end
    start = np.zeros((n, n), np.int64)
    for pairs, end, size in zip(rounds, np.cumsum(sizes), sizes, strict=True):
        for pair in pairs:
            start[pair] = end - size
    return tuple(sizes), tuple(map(tuple, rounds)), start, start
