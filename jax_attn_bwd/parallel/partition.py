"""Graphs cut by their destinations into parts of one shape, and what travels between them."""

import heapq
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.serialization import exportable_dataclass
from jax_attn_bwd.ops.graph import BipartiteCSC

_PADDING = 1.1  # moved rows at most, of the needed ones
_FEW = 16  # rows whose transfer takes no longer than its start


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
        """`[size, ...]` -> `[parts * rows, ...]`, 0 in the padding; a NumPy array stays on the host."""
        x = x if checks.is_array(x) else np.asarray(x)
        checks.shape("Layout.place", "x", x, "[size, ...]", (*self.position.shape, *x.shape[1:]))
        shape = (self.parts * self.rows, *x.shape[1:])
        if isinstance(x, np.ndarray) and isinstance(self.position, np.ndarray):
            placed, inside = np.zeros(shape, x.dtype), self.position < shape[0]
            placed[self.position[inside]] = x[inside]
            return placed
        return jnp.zeros(shape, x.dtype).at[self.position].set(x, mode="drop", unique_indices=True)

    def collect(self, x: Any) -> jax.Array:
        """`[parts * rows, ...]` -> `[size, ...]`, whole on every device; 0 for what has no place."""
        x = jnp.asarray(x)
        checks.shape("Layout.collect", "x", x, "[parts * rows, ...]", (self.parts * self.rows, *x.shape[1:]))
        if not (mesh := jax.typeof(x).sharding.mesh).empty:
            x = jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec()))
        return x.at[self.position].get(mode="fill", fill_value=0, unique_indices=True)


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
      The parts. A source belongs to the part of the destination of its number, where there are as many;
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
      PartitionedGraph(parts=2, src_rows=2, dst_rows=2, edges_rows=2, remote_rows=2)
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

    dst_part = _part_of_destinations(operator, parts, degree, n)
    dst_row, dst_rows = _rows(dst_part, n)
    edge_part = np.repeat(dst_part, degree)
    edge_row, edge_rows = _rows(edge_part, n)  # by destination: the order of rows is that of the caller
    src_part, src_row, src_rows = dst_part, dst_row, dst_rows
    if graph.num_src != graph.num_dst:
        src_part = _seated(source, edge_part, graph.num_src, n)
        src_row, src_rows = _rows(src_part, n)

    # every source that a part has an edge from, once; `name` says which one that is for each edge
    pairs, name = np.unique(edge_part * np.int64(graph.num_src) + source, return_inverse=True)
    receiver, needed = np.divmod(pairs, max(graph.num_src, 1))
    sender = src_part[needed]
    away = sender != receiver
    wanted = np.bincount(sender[away] * n + receiver[away], minlength=n * n).reshape(n, n)
    sizes, rounds, send_start, receive_start = _schedule(wanted)
    halo = sum(sizes)
    rank = np.zeros(len(pairs), np.int64)
    rank[away], _ = _rows(sender[away] * n + receiver[away], n * n)
    slot = receive_start[sender, receiver] + rank
    # past the end, and distinct: padding is read as 0 and its gradients are dropped
    send = np.tile(src_rows + np.arange(halo, dtype=np.int32), (n, 1))
    remote = np.tile(n * src_rows + np.arange(halo, dtype=np.int32), (n, 1))
    send[sender[away], (send_start[sender, receiver] + rank)[away]] = src_row[needed[away]]
    remote[receiver[away], slot[away]] = (sender * src_rows + src_row[needed])[away]
    local = np.where(away, src_rows + slot, src_row[needed])[name]

    ends = np.zeros((n, dst_rows + 1), np.int64)
    ends[dst_part, dst_row + 1] = degree
    built = []
    for part, end in enumerate(ends.cumsum(1)):
        own = BipartiteCSC.from_csc(end, local[edge_part == part], src_rows + halo, capacity=edge_rows)
        built.append(jax.tree.map(np.asarray, own))
    edge_number = np.zeros((n, edge_rows), np.int32)
    edge_number[edge_part, edge_row] = number
    edge_position = n * edge_rows + np.arange(graph.capacity, dtype=np.int32)
    edge_position[number] = edge_part * edge_rows + edge_row
    return PartitionedGraph(
        jax.tree.map(lambda *x: np.stack(x), *built),
        edge_number,
        send,
        remote,
        Layout((src_part * src_rows + src_row).astype(np.int32), n, src_rows),
        Layout((dst_part * dst_rows + dst_row).astype(np.int32), n, dst_rows),
        Layout(edge_position, n, edge_rows),
        sizes,
        rounds,
        int(wanted.sum()),
    )


def _part_of_destinations(operator: str, parts: Any, degree: np.ndarray, n: int) -> np.ndarray:
    """The part of each destination."""
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
    """Each node, the largest degrees first, to the part with the fewest edges that has a seat left."""
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
    """The part of each source: the one with most edges from it while it has seats, then any that has."""
    edges = np.bincount(source * np.int64(n) + edge_part, minlength=num_src * n).reshape(num_src, n)
    part, seats = edges.argmax(1), -(-num_src // n)
    over = _rows(part, n)[0] >= seats
    free = np.maximum(seats - np.bincount(part, minlength=n), 0)
    part[over] = np.repeat(np.arange(n), free)[: over.sum()]
    return part


def _rows(part: np.ndarray, n: int) -> tuple[np.ndarray, int]:
    """(the row of each element in its part, in the order given; rows of the longest part)."""
    count = np.bincount(part, minlength=n)
    row = np.empty(len(part), np.int64)
    row[np.argsort(part, kind="stable")] = np.arange(len(part)) - np.repeat(np.cumsum(count) - count, count)
    return row, int(count.max(initial=0))


def _schedule(wanted: np.ndarray) -> tuple[tuple, tuple | None, np.ndarray, np.ndarray]:
    """(sizes, rounds, where each message starts for its sender, and for its receiver).

    `wanted[sender, receiver]` rows.
    """
    n, largest = len(wanted), int(wanted.max())
    if 0 < n * (n - 1) * largest <= _PADDING * wanted.sum():
        start = np.broadcast_to(np.arange(n) * largest, (n, n))
        return (largest,) * n, None, start, start.T
    rounds: list[list[tuple[int, int]]] = []
    sizes: list[int] = []
    for place in np.argsort(-wanted, axis=None, kind="stable")[: np.count_nonzero(wanted)]:
        pair = (int(place) // n, int(place) % n)
        size = int(wanted[pair])
        for pairs, room in zip(rounds, sizes, strict=True):  # the first with both free, and of its size
            close = room <= max(_PADDING * size, size + _FEW)
            if close and all(pair[0] != sender and pair[1] != receiver for sender, receiver in pairs):
                pairs.append(pair)
                break
        else:
            rounds.append([pair])
            sizes.append(size)
    start = np.zeros((n, n), np.int64)
    for pairs, end, size in zip(rounds, np.cumsum(sizes), sizes, strict=True):
        for pair in pairs:
            start[pair] = end - size
    return tuple(sizes), tuple(map(tuple, rounds)), start, start
