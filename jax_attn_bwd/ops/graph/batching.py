"""Several graphs as one: side by side in a padded graph, or stacked for `jax.vmap`."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks, keywords
from jax_attn_bwd._core.trees import exportable_dataclass
from jax_attn_bwd.ops.graph.groups import LIMIT
from jax_attn_bwd.ops.graph.structure import BipartiteCSC, edges, equal, of_one_graph

_OPERATOR = "batch_graphs"


@exportable_dataclass
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class BatchLayout:
    """Where the rows of each graph stand among all rows of a `GraphBatch`.

    Attributes:
      owner: int32 `[rows]` (stacked: `[graphs, rows]`), the graph that a row belongs to, for sums over graphs
        by `jax.ops.segment_sum`; 2**31 - 1 in the padding, which those drop.
      counts: int32 `[graphs]`, the rows of each graph that mean something.
      sizes: int32 `[graphs]`, the rows of its arrays: edges of a graph with a capacity have more.
      rows: the rows that there is room for.
      stacked: whether each graph has an index of its own along a first axis.
    """

    owner: Any
    counts: Any
    sizes: Any
    rows: int = field(metadata={"static": True})
    stacked: bool = field(metadata={"static": True})

    def __eq__(self, other: object) -> bool:
        return equal(self, other) if isinstance(other, BatchLayout) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.rows, self.stacked))

    def __repr__(self) -> str:
        return f"BatchLayout(graphs={len(self.counts)}, rows={self.rows}, stacked={self.stacked})"

    def join(self, arrays: Sequence[Any]) -> Any:
        """An array `[size, ...]` of each graph -> `[rows, ...]` (stacked: `[graphs, rows, ...]`).

        0 in the padding. NumPy arrays are joined on the host; JAX arrays may be traced and differentiated.
        """
        name, (counts, sizes) = "BatchLayout.join", self._known("BatchLayout.join")
        if len(arrays) != len(counts):
            expected = f"hold one for each of {len(counts)} graphs"
            raise ValueError(checks.message(name, "arrays", expected, len(arrays)))

        # the rows of each array that mean something
        xp: Any = np if all(isinstance(x, np.ndarray) for x in arrays) else jnp
        given = [xp.asarray(x) for x in arrays]
        rest = given[0].shape[1:]
        for k, (x, size) in enumerate(zip(given, sizes, strict=True)):
            checks.shape(name, f"arrays[{k}]", x, "[size, ...] as the others", (int(size), *rest))
        kept = [x[:count] for x, count in zip(given, counts, strict=True)]

        # one after the other, or each padded alike
        def padded(parts, rows):
            filled = sum(len(x) for x in parts)
            return xp.concatenate([*parts, xp.zeros((rows - filled, *rest), parts[0].dtype)])

        if self.stacked:
            return xp.stack([padded([x], self.rows) for x in kept])
        return padded(kept, self.rows)

    def split(self, x: Any) -> list[Any]:
        """The inverse: `[rows, ...]` (stacked: `[graphs, rows, ...]`) -> `[size, ...]` of each graph."""
        name, (counts, sizes) = "BatchLayout.split", self._known("BatchLayout.split")
        x = x if checks.is_array(x) else np.asarray(x)
        lead = (len(counts), self.rows) if self.stacked else (self.rows,)
        names = "[graphs, rows, ...]" if self.stacked else "[rows, ...]"
        checks.shape(name, "x", x, names, (*lead, *x.shape[len(lead) :]))

        # each graph's rows, then 0 up to the size of its arrays
        starts = np.cumsum(counts) - counts
        parts = list(x) if self.stacked else [x[start:] for start in starts]
        xp: Any = np if isinstance(x, np.ndarray) else jnp
        found = []
        for part, count, size in zip(parts, counts, sizes, strict=True):
            room = ((0, int(size - count)), *((0, 0) for _ in part.shape[1:]))
            found.append(xp.pad(part[:count], room) if size > count else part[:count])
        return found

    def _known(self, operator: str) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(self.counts, jax.core.Tracer):
            remedy = "join and split outside jit, or close over the batch"
            raise TypeError(checks.message(operator, "the batch", "be known", "a traced one", remedy))
        return np.asarray(self.counts), np.asarray(self.sizes)


@exportable_dataclass
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class GraphBatch:
    """Several graphs as one, made by `batch_graphs`.

    It is a pytree: batches of as many graphs and the same `capacity` and `nodes` share one compiled program,
    and where a function takes `graph` alone, so do batches of any number of graphs.

    Attributes:
      graph: the graph of all nodes and edges; of a stacked batch, a stack for `jax.vmap`.
      src, dst, edges: where each graph's sources, destinations and edge data stand in it.
    """

    graph: BipartiteCSC
    src: BatchLayout
    dst: BatchLayout
    edges: BatchLayout

    def __eq__(self, other: object) -> bool:
        return equal(self, other) if isinstance(other, GraphBatch) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.src, self.dst, self.edges))

    def __repr__(self) -> str:
        counts = f"graphs={len(self.src.counts)}, stacked={self.src.stacked}"
        rows = ", ".join(f"{name}_rows={getattr(self, name).rows}" for name in ("src", "dst", "edges"))
        return f"GraphBatch({counts}, {rows})"


@keywords.known
def batch_graphs(
    graphs: Sequence[BipartiteCSC],
    *,
    capacity: int | None = None,
    nodes: int | tuple[int, int] | None = None,
    stacked: bool = False,
) -> GraphBatch:
    """Several graphs as one, in which no edge leads from one to another.

    Built outside `jit`. With `capacity` and `nodes` all shapes depend on these alone: one compiled program
    serves batches of graphs of any size. Nodes and edges of the padding are without edges and without ends:
    whatever stands there reaches no output and no gradient.

    Args:
      graphs: at least one; a batch of fewer than the others is filled up with graphs of no node.
      capacity: room for edges, of all graphs together (stacked: of each); default: as many as there are (of
        the largest).
      nodes: room for nodes, or (for sources, for destinations), in the same way.
      stacked: True pads every graph to one size and sets them along a new first axis, for `jax.vmap` of an
        operator over the graph and its arrays; False sets the graphs side by side in one graph.

    Returns:
      GraphBatch: the graph, and `src`, `dst`, `edges`, by which `batch.src.join([x_1, ...])` makes one array
      of each graph's, and `batch.dst.split(out)` takes them apart again. Edges are in the order of the
      graphs, each in its caller's order. Side by side, `dst=None` of an operator and self-loops need graphs
      with as many sources as destinations: for others pass `batch.dst.join` of the destinations' rows, and
      add loops to each graph before.

    Raises:
      ValueError: `capacity` or `nodes` is too small; there is no graph, or a stack of them.
      TypeError: an argument is of the wrong kind, or a graph is traced.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC, batch_graphs, graph_attention
      >>> triangle = BipartiteCSC.from_coo([0, 1, 2], [1, 2, 0], 3, 3)
      >>> pair = BipartiteCSC.from_coo([0], [1], 2, 2)
      >>> batch = batch_graphs([triangle, pair], capacity=8, nodes=6)
      >>> batch
      GraphBatch(graphs=2, stacked=False, src_rows=6, dst_rows=6, edges_rows=8)
      >>> x = batch.src.join([jnp.ones((3, 4)), jnp.ones((2, 4))])
      >>> out = graph_attention(batch.graph, x, None, jnp.ones(8), num_heads=2)
      >>> [part.shape for part in batch.dst.split(out)]
      [(3, 4), (2, 4)]
    """
    # how many nodes and edges each graph has, and how much room there is
    ends = _ends(graphs)
    stacked = checks.flag(_OPERATOR, "stacked", stacked)
    counts = {
        "src": np.array([graph.num_src for graph in graphs]),
        "dst": np.array([graph.num_dst for graph in graphs]),
        "edges": np.array([len(src) for src, _ in ends]),
    }
    least = {name: int(x.max() if stacked else x.sum()) for name, x in counts.items()}
    of_src, of_dst = nodes if isinstance(nodes, tuple) and len(nodes) == 2 else (nodes, nodes)
    rows = {
        "src": _room("nodes", of_src, least["src"], "sources"),
        "dst": _room("nodes", of_dst, least["dst"], "destinations"),
        "edges": _room("capacity", capacity, least["edges"], "edges"),
    }

    def graph_of(src, dst, room):
        return BipartiteCSC.from_coo(src, dst, rows["src"], rows["dst"], capacity=room)

    # each graph padded to one size; or all in one, their nodes after those of the graphs before
    if stacked:
        built = [jax.tree.map(np.asarray, graph_of(*of_one, rows["edges"])) for of_one in ends]
        graph = jax.tree.map(lambda *x: jnp.stack(x), *built)
    else:
        starts = [np.cumsum(counts[name]) - counts[name] for name in ("src", "dst")]
        sides = zip(zip(*ends, strict=True), starts, strict=True)
        src, dst = (np.concatenate(list(map(np.add, side, start))) for side, start in sides)
        aligned = np.array_equal(*starts) and all(graph.aligned for graph in graphs)
        graph = of_one_graph(replace(graph_of(src, dst, capacity), aligned=aligned))
    sizes = counts | {"edges": np.array([graph.capacity for graph in graphs])}
    return GraphBatch(graph, *(_layout(counts[name], sizes[name], rows[name], stacked) for name in rows))


def _ends(graphs: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns (sources, destinations) of the edges of each graph, in the caller's order."""
    given = graphs if isinstance(graphs, list | tuple) else []
    if given is not graphs or not all(isinstance(x, BipartiteCSC) for x in given):
        got = ", ".join(type(x).__name__ for x in (graphs, *given))
        raise TypeError(checks.message(_OPERATOR, "graphs", "be a list of BipartiteCSC", got))
    if not graphs:
        raise ValueError(checks.message(_OPERATOR, "graphs", "hold at least one graph", "none"))
    found = []
    for graph in graphs:
        src, dst, number = edges(_OPERATOR, graph)
        if (number != np.arange(len(number))).any():
            expected, got = "have its edges before its padding", "one with edges out of range between others"
            raise ValueError(checks.message(_OPERATOR, "a graph", expected, got, "leave them out"))
        found.append((src, dst))
    return found


def _room(argument: str, given: Any, least: int, what: str) -> int:
    """Checks `given`, the room asked for; None takes the least."""
    if given is None:
        return least
    given = checks.integer(_OPERATOR, argument, given)
    if given < least:
        expected = f"be at least {least}, the number of {what}"
        raise ValueError(checks.message(_OPERATOR, argument, expected, given))
    return given


def _layout(counts: np.ndarray, sizes: np.ndarray, rows: int, stacked: bool) -> BatchLayout:
    number = np.arange(len(counts))
    if stacked:
        owner = np.where(np.arange(rows) < counts[:, None], number[:, None], LIMIT)
    else:
        owner = np.concatenate([np.repeat(number, counts), np.full(rows - counts.sum(), LIMIT)])
    owner, counts, sizes = (x.astype(np.int32) for x in (owner, counts, sizes))
    return BatchLayout(jnp.asarray(owner), counts, sizes, rows, stacked)
