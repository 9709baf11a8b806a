"""`PartitionedGraph`: the parts of a graph, the layout of its arrays, and what travels between parts."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.serialization import exportable_dataclass
from jax_attn_bwd.ops.graph import BipartiteCSC


def rows_at(x: jax.Array, index: Any) -> jax.Array:
    """The rows of `x` at `index`, which has none twice; 0 past the end."""
    if not x.shape[0]:  # a gather needs a row to clamp to
        return jnp.zeros((*jnp.shape(index), *x.shape[1:]), x.dtype)
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
            placed, inside = np.zeros(shape, x.dtype), self.position < shape[0]
            placed[self.position[inside]] = x[inside]
            return placed
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
