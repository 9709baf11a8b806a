"""`BipartiteCSC`: a graph, and the order in which the loops walk over its edges."""

from dataclasses import dataclass, field
from typing import Any, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.trees import exportable_dataclass
from jax_attn_bwd._core.types import Array, Fill
from jax_attn_bwd.ops.graph import groups, plan, reductions
from jax_attn_bwd.ops.graph.groups import LIMIT, Groups, Schedules, ends_of_edges

FILLS = get_args(Fill)
_LOOPS = "BipartiteCSC.with_self_loops"


@exportable_dataclass
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class BipartiteCSC:
    """A directed graph from `num_src` source nodes to `num_dst` destination nodes, for the graph operators.

    Built once, outside `jit`, by one of the class methods (NumPy: ten million edges take seconds);
    `from_traced` builds it inside, from edges that are found there. It is a pytree: hand it to a compiled
    function as an argument, or close over it. Two graphs with the same node counts share one compiled program
    if both were given the same `capacity`; such graphs may be stacked, for `jax.vmap` of a call over them.
    Build a graph where it is used: its edges are grouped for the platform of the default device, and groups
    that were made on a CPU take a GPU more memory and time.

    Two graphs are equal if all their arrays hold the same numbers; where these cannot be read (traced
    arrays, those of other processes) an array equals itself alone. `hash` depends on the node counts alone.

    Attributes:
      offsets: int32 `[num_dst + 1]`; the edges into destination i are `offsets[i]` to `offsets[i + 1]`.
      indices: int32 `[capacity]`, the source of each edge, by destination; `num_src` in the padding.
      map_csc_to_coo: int32 `[capacity]`, the number of each of these edges in the caller's order.
      by_destination, by_source: the same edges in groups; off CPUs with the order in which they are summed.
      run_owners: int32, the destination of each run of edges that is summed apart; None if all are short.
      schedules: what kernels need of the graph alone, made once; None unless it was built for a GPU.
      num_src, num_dst: node counts.
      exact: whether every place of the groups holds an edge.
      aligned: whether destination i is source i, as self-loops and `dst=None` of an operator have it; not in
        a batch, side by side, of graphs with other numbers of sources than of destinations.

    Example:
      >>> from jax_attn_bwd import BipartiteCSC
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> graph.offsets.tolist(), graph.indices.tolist(), graph.map_csc_to_coo.tolist()
      ([0, 1, 3], [2, 0, 1], [1, 0, 2])
      >>> graph
      BipartiteCSC(num_src=3, num_dst=2, num_edges=3, capacity=3, dtype=int32)
    """

    offsets: jax.Array
    indices: jax.Array
    map_csc_to_coo: jax.Array
    by_destination: Groups
    by_source: Groups
    run_owners: jax.Array | None
    num_src: int = field(metadata={"static": True})
    num_dst: int = field(metadata={"static": True})
    exact: bool = field(metadata={"static": True})
    aligned: bool = field(default=True, metadata={"static": True})
    schedules: Schedules | None = None

    @property
    def capacity(self) -> int:
        """Edges that there is room for: rows of edge data and of returned weights."""
        return self.indices.shape[-1]

    @property
    def exists(self) -> jax.Array:
        """Where there is an edge, bool `[capacity]`, in the caller's order."""
        in_order = jnp.arange(self.capacity, dtype=jnp.int32) < self.offsets[-1]
        if self.exact:
            return in_order
        return jnp.zeros(self.capacity, bool).at[self.map_csc_to_coo].set(in_order, unique_indices=True)

    @property
    def num_edges(self) -> Any:
        """Edges that there are, without the padding: an int; an array if the graph is traced or stacked."""
        if isinstance(self.offsets, jax.core.Tracer):
            return self.offsets[..., -1]
        last = np.asarray(self.offsets)[..., -1]
        return last if last.ndim else int(last)

    def __eq__(self, other: object) -> bool:
        return equal(self, other) if isinstance(other, BipartiteCSC) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.num_src, self.num_dst))

    def __repr__(self) -> str:
        edges = f"capacity={getattr(self.indices, 'shape', (None,))[-1]}"
        if checks.is_array(self.offsets) and not isinstance(self.offsets, jax.core.Tracer):
            edges = f"num_edges={self.num_edges}, {edges}"
        dtype = getattr(self.indices, "dtype", None)
        return f"BipartiteCSC(num_src={self.num_src}, num_dst={self.num_dst}, {edges}, dtype={dtype})"

    @overload
    def with_self_loops(
        self, edge: None = None, *, fill_value: float | Array | Fill = "mean", capacity: int | None = None
    ) -> "BipartiteCSC": ...
    @overload
    def with_self_loops(
        self, edge: Array, *, fill_value: float | Array | Fill = "mean", capacity: int | None = None
    ) -> tuple["BipartiteCSC", jax.Array]: ...
    def with_self_loops(
        self,
        edge: Array | None = None,
        *,
        fill_value: float | Array | Fill = "mean",
        capacity: int | None = None,
    ) -> Any:
        """The graph with exactly one edge from each node to itself, those that were there replaced.

        Args:
          edge: edge data `[nnz, ...]`, floating, in the caller's order.
          fill_value: what it holds for the loops: a number, an array that broadcasts to `[nodes, ...]`, or
            "mean", "add", "min" or "max" of what the edges into the node hold.
          capacity: as in `from_csc`. Of a traced graph it must have room for its capacity and the loops,
            which is the default there; the graph is then built by `from_traced`.

        Returns:
          The graph, whose edges are in the caller's order without its loops, followed by one loop for each
          node (those with a source and a destination of their number). With `edge`: (graph, edge data).

        Gradients:
          edge, and fill_value if it is an array.

        Raises:
          ValueError: shapes disagree, `capacity` is too small, or no source is known for a destination's loop
            (graphs side by side with other numbers of sources: add the loops before).

        Example:
          >>> import jax.numpy as jnp
          >>> from jax_attn_bwd import BipartiteCSC
          >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 1, 1], num_src=3, num_dst=3)
          >>> graph, edge = graph.with_self_loops(jnp.array([1.0, 3.0, 7.0]))
          >>> graph.num_edges, edge.tolist()
          (5, [1.0, 3.0, 0.0, 2.0, 0.0])
        """
        # a graph whose destinations are its first sources
        _check_one(_LOOPS, self)
        if not self.aligned:
            expected = "hold as its first sources the destinations"
            got = "several graphs side by side, each with sources of its own before the next one's"
            remedy = "add the loops to each graph before batch_graphs"
            raise ValueError(checks.message(_LOOPS, "the graph", expected, got, remedy))
        if isinstance(fill_value, str):
            checks.choice(_LOOPS, "fill_value", fill_value, FILLS)
        elif not checks.is_array(fill_value) and type(fill_value) not in (int, float):
            expected, got = f"be a number, an array or one of {FILLS}", type(fill_value).__name__
            raise TypeError(checks.message(_LOOPS, "fill_value", expected, got))

        # edge data, and those given for the loops, one row for each
        if edge is not None:
            edge = checks.floating(_LOOPS, "edge", edge)
            if edge.ndim == 0 or edge.shape[0] != self.capacity:
                expected = f"have shape [nnz, ...], nnz = {self.capacity}"
                raise ValueError(checks.message(_LOOPS, "edge", expected, edge.shape))
            if not isinstance(fill_value, str):
                shape = (min(self.num_src, self.num_dst), *edge.shape[1:])
                fill_value = jnp.asarray(fill_value, edge.dtype)
                checks.broadcasts(_LOOPS, "fill_value", fill_value, "[nodes, ...] as edge", shape)
                fill_value = jnp.broadcast_to(fill_value, shape)

        run = _looped_on_device if is_traced(self) else _looped_on_host
        found, data = run(self, edge, fill_value, capacity)
        return found if edge is None else (found, data)

    @classmethod
    def from_csc(
        cls,
        offsets: Any,
        indices: Any,
        num_src: int,
        *,
        map_csc_to_coo: Any = None,
        capacity: int | None = None,
    ) -> "BipartiteCSC":
        """From the sources of each destination's edges.

        Args:
          offsets: int32 or int64 `[num_dst + 1]`, from 0 to the number of edges, not decreasing.
          indices: int32 or int64 `[nnz]`, the source of each edge, in `[0, num_src)`.
          num_src: number of source nodes.
          map_csc_to_coo: `[nnz]`, a permutation: edge k here is edge `map_csc_to_coo[k]` of the caller's
            edge data; default: the same order.
          capacity: room for edges, at least nnz. Every shape then depends on it and on the node counts
            alone; edge data and returned weights are `[capacity, ...]`, and what lies in the padding is
            never read, or 0.

        Returns:
          The graph.

        Raises:
          ValueError: offsets decrease, do not start at 0 or do not end at nnz; an index is outside the
            sources; `map_csc_to_coo` is no permutation; there are more edges than `capacity` or than
            int32 can count.
          TypeError: an argument is not of integers, or is traced.
        """
        # integers, of which offsets lead from 0 to the number of edges
        operator = "BipartiteCSC.from_csc"
        offsets = _integers(operator, "offsets", offsets)
        indices = _integers(operator, "indices", indices)
        num_src = _count(operator, "num_src", num_src)
        nnz = len(indices)
        if len(offsets) == 0:
            raise ValueError(checks.message(operator, "offsets", "have shape [num_dst + 1]", "(0,)"))
        if offsets[0] != 0:
            raise ValueError(checks.message(operator, "offsets", "start at 0", offsets[0]))
        if (falls := np.flatnonzero(np.diff(offsets) < 0)).size:
            i = falls[0]
            got = f"{offsets[i]} then {offsets[i + 1]} at position {i + 1}"
            raise ValueError(checks.message(operator, "offsets", "not decrease", got))
        if offsets[-1] != nnz:
            expected = f"end at the number of indices, {nnz}"
            raise ValueError(checks.message(operator, "offsets", expected, offsets[-1]))

        # the ends of the edges, and their numbers for the caller
        _check_within(operator, "indices", indices, num_src, "num_src")
        number = np.arange(nnz)
        if map_csc_to_coo is not None:
            numbers = _integers(operator, "map_csc_to_coo", map_csc_to_coo)
            number = _check_permutation(operator, numbers, nnz)
        return cls._from_sorted(operator, offsets, indices, number, num_src, capacity)

    @classmethod
    def _from_sorted(cls, operator, offsets, indices, number, num_src, capacity) -> "BipartiteCSC":
        """Builds the graph of edges by destination, checked but for their count and the capacity."""
        nnz, num_dst = len(indices), _count(operator, "num_dst", len(offsets) - 1)
        room = nnz if capacity is None else _count(operator, "capacity", capacity)
        if nnz > room:
            raise ValueError(checks.message(operator, "capacity", f"be at least nnz = {nnz}", capacity))
        grouping = plan.grouping(operator, num_src, num_dst, room, exact=capacity is None)
        found = groups.arrays_of_known(grouping, offsets, indices, number)
        return of_one_graph(cls(**found, num_src=num_src, num_dst=num_dst))

    @classmethod
    def from_coo(
        cls, src: Any, dst: Any, num_src: int, num_dst: int, *, capacity: int | None = None
    ) -> "BipartiteCSC":
        """From a list of edges in any order, which is the order of edge data and returned weights.

        Args:
          src, dst: int32 or int64 `[nnz]`, the two ends of each edge; the same edge may occur twice.
          num_src, num_dst: node counts.
          capacity: as in `from_csc`.

        Returns:
          The graph.

        Raises:
          ValueError: `src` and `dst` differ in length; an index is out of range; as `from_csc`.
          TypeError: an argument is not of integers, or is traced.
        """
        operator = "BipartiteCSC.from_coo"
        src, dst = _integers(operator, "src", src), _integers(operator, "dst", dst)
        num_src = _count(operator, "num_src", num_src)
        num_dst = _count(operator, "num_dst", num_dst)
        if len(src) != len(dst):
            raise ValueError(checks.message(operator, "dst", f"have shape {src.shape}", dst.shape))
        _check_within(operator, "src", src, num_src, "num_src")
        _check_within(operator, "dst", dst, num_dst, "num_dst")
        order = groups.stable_order(dst)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=num_dst))])
        return cls._from_sorted(operator, offsets, src[order], order, num_src, capacity)

    @classmethod
    def from_traced(cls, src: Any, dst: Any, num_src: int, num_dst: int) -> "BipartiteCSC":
        """From a list of edges that is made inside `jit`: neighbours found, or drawn, on the device.

        At each call it sorts the edges twice. A graph that stays is built outside, by `from_coo`. Under
        `vmap` it builds a graph for each member of a batch.

        Args:
          src, dst: int32 `[capacity]`, JAX arrays, traced or not: the ends of each edge, in the order of edge
            data. Where an end is out of range, -1 for example, there is no edge: what is there of edge data
            is never read, and of weights 0.
          num_src, num_dst: node counts, ints.

        Returns:
          The graph, whose shapes depend on `capacity` and the node counts alone.

        Raises:
          ValueError: `src` and `dst` differ in shape, or there are more edges than int32 can count.
          TypeError: an argument is not of integers.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from jax_attn_bwd import BipartiteCSC, edge_mean
          >>> @jax.jit
          ... def mean_of_the_nearest(x):
          ...     away = abs(x[:, None] - x[None]) + jnp.diag(jnp.full(len(x), jnp.inf, x.dtype))
          ...     _, nearest = jax.lax.top_k(-away, 2)  # two edges into each node
          ...     nodes = jnp.repeat(jnp.arange(len(x), dtype=nearest.dtype), 2)
          ...     graph = BipartiteCSC.from_traced(nearest.ravel(), nodes, len(x), len(x))
          ...     return edge_mean(graph, x[nearest.ravel()])
          >>> mean_of_the_nearest(jnp.array([0.0, 1.0, 3.0, 9.0])).tolist()
          [2.0, 1.5, 0.5, 2.0]
        """
        operator = "BipartiteCSC.from_traced"
        num_src = _count(operator, "num_src", num_src)
        num_dst = _count(operator, "num_dst", num_dst)
        src, dst = (_traced_integers(operator, name, x) for name, x in (("src", src), ("dst", dst)))
        checks.shape(operator, "dst", dst, "as src", src.shape)
        _count(operator, "the number of edges", src.shape[0])
        grouping = plan.grouping(operator, num_src, num_dst, src.shape[0], exact=False)
        found = groups.arrays_of_traced(grouping, src, dst)
        return of_one_graph(cls(**found, num_src=num_src, num_dst=num_dst))

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Any,
        num_nodes: int | tuple[int, int],
        *,
        add_self_loops: bool = False,
        capacity: int | None = None,
    ) -> "BipartiteCSC":
        """From the `edge_index` of PyTorch Geometric: a row of sources and a row of destinations.

        Args:
          edge_index: integers `[2, nnz]` (of a CPU tensor: its `.numpy()`).
          num_nodes: nodes, or (sources, destinations).
          add_self_loops: as `with_self_loops`, which also takes edge data along. The layers of PyTorch
            Geometric do so by default.
          capacity: as in `from_csc`, self-loops included.

        Returns:
          The graph.

        Raises:
          The same as `from_coo`.

        Example:
          >>> from jax_attn_bwd import BipartiteCSC
          >>> BipartiteCSC.from_edge_index([[0, 2], [1, 1]], 3, add_self_loops=True).num_edges
          5
        """
        operator = "BipartiteCSC.from_edge_index"
        src, dst = _two_rows(operator, "edge_index", edge_index)
        nodes = num_nodes if isinstance(num_nodes, tuple | list) else (num_nodes, num_nodes)
        if len(nodes) != 2:
            expected, got = "be one number, or (sources, destinations)", f"{len(nodes)} of them"
            raise ValueError(checks.message(operator, "num_nodes", expected, got))
        num_src, num_dst = (_count(operator, "num_nodes", n) for n in nodes)
        for row, ends, size in (("sources", src, num_src), ("destinations", dst, num_dst)):
            _check_within(operator, f"the {row} of edge_index", ends, size, "num_nodes")
        add_self_loops = checks.flag(operator, "add_self_loops", add_self_loops)
        graph = cls.from_coo(src, dst, num_src, num_dst, capacity=None if add_self_loops else capacity)
        return graph.with_self_loops(capacity=capacity) if add_self_loops else graph

    @classmethod
    def from_jraph(cls, graph: Any, *, capacity: int | None = None) -> "BipartiteCSC":
        """From a `jraph.GraphsTuple` (or its like): senders are sources, receivers destinations.

        Args:
          graph: has `senders`, `receivers` and `n_node`; edge data stay in its order. A batch is one
            graph of `sum(n_node)` nodes; the padding of `jraph.pad_with_graphs` is taken as it is.
          capacity: as in `from_csc`.

        Returns:
          The graph, with as many destinations as sources.

        Raises:
          The same as `from_coo`. TypeError: `graph` is something else.
        """
        operator = "BipartiteCSC.from_jraph"
        if not all(hasattr(graph, name) for name in ("senders", "receivers", "n_node")):
            expected = "be a jraph.GraphsTuple, or have its senders, receivers and n_node"
            raise TypeError(checks.message(operator, "graph", expected, type(graph).__name__))
        nodes = int(_integers(operator, "n_node", graph.n_node).sum())
        return cls.from_coo(graph.senders, graph.receivers, nodes, nodes, capacity=capacity)

    @classmethod
    def from_scipy(cls, matrix: Any, *, capacity: int | None = None) -> "BipartiteCSC":
        """From a SciPy sparse matrix `[num_dst, num_src]`: entry (i, j) is an edge from source j to i.

        Args:
          matrix: any SciPy sparse format; stored zeros count as edges. Edge data are in the order of
            `matrix.tocsr().data`.
          capacity: as in `from_csc`.

        Returns:
          The graph.

        Raises:
          The same as `from_csc`. TypeError: `matrix` is not sparse. ValueError: a COO matrix holds an entry
            twice, which SciPy would add up.
        """
        if not hasattr(matrix, "tocsr"):
            expected, remedy = "be a SciPy sparse matrix", "scipy.sparse.csr_array(matrix)"
            got = type(matrix).__name__
            raise TypeError(checks.message("BipartiteCSC.from_scipy", "matrix", expected, got, remedy))
        rows = matrix.tocsr()
        if matrix.format == "coo" and rows.nnz < matrix.nnz:
            expected, got = "hold each entry once", f"{matrix.nnz - rows.nnz} of {matrix.nnz} more than once"
            remedy = (
                "matrix.sum_duplicates() makes one edge of them, "
                "from_coo(matrix.col, matrix.row, num_src, num_dst) keeps them apart"
            )
            raise ValueError(checks.message("BipartiteCSC.from_scipy", "matrix", expected, got, remedy))
        return cls.from_csc(rows.indptr, rows.indices, rows.shape[1], capacity=capacity)


def equal(one: Any, two: Any) -> bool:
    """Tells whether two pytrees hold the same numbers."""
    structure: Any = jax.tree.structure(one)
    alike = structure == jax.tree.structure(two)
    return alike and all(map(_equal, jax.tree.leaves(one), jax.tree.leaves(two)))


def _equal(one: Any, two: Any) -> bool:
    """Tells whether two leaves hold the same; leaves that cannot be read do if they are one object."""
    if one is two:
        return True
    if not (checks.is_array(one) and checks.is_array(two)):
        return bool(one == two)
    readable = not any(isinstance(x, jax.core.Tracer) for x in (one, two))
    readable = readable and all(getattr(x, "is_fully_addressable", True) for x in (one, two))
    return readable and np.array_equal(one, two)


def _integers(operator: str, argument: str, x: Any) -> np.ndarray:
    """Checks that `x` has one axis and an integer dtype; returns it as a NumPy array of int64."""
    if isinstance(x, jax.core.Tracer):
        remedy = "build the graph outside jit and hand it in as an argument, or take from_traced"
        raise TypeError(checks.message(operator, argument, "be a concrete array", "a tracer", remedy))
    array = np.asarray(x)
    if array.size == 0 and np.issubdtype(array.dtype, np.floating):
        array = array.astype(np.int32)  # an empty list, or `np.zeros((2, 0))`
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(checks.message(operator, argument, "be integers", f"dtype {array.dtype}"))
    if array.ndim != 1:
        raise ValueError(checks.message(operator, argument, "have one axis", array.shape))
    info = np.iinfo(np.int64)
    if array.size and array.dtype == np.uint64 and array.max() > info.max:
        raise ValueError(checks.message(operator, argument, "fit int64", array.max()))
    return array.astype(np.int64)


def _two_rows(operator: str, argument: str, x: Any) -> tuple[np.ndarray, np.ndarray]:
    """Checks that `x` has two rows of integers; returns them as NumPy arrays of int64."""
    shapes = [np.shape(row) for row in x] if isinstance(x, tuple | list) else []
    shape = (len(shapes), *shapes[0]) if len(set(shapes)) == 1 else shapes or np.shape(x)
    if len(set(shapes)) > 1 or len(shape) != 2 or shape[0] != 2:
        remedy = f"write {argument}.T" if len(shape) == 2 and shape[1] == 2 else ""
        raise ValueError(checks.message(operator, argument, "have shape [2, nnz]", shape, remedy))
    src, dst = (_integers(operator, argument, row) for row in x)
    return src, dst


def _traced_integers(operator: str, argument: str, x: Any) -> jax.Array:
    """Checks that `x` has one axis and an integer dtype; returns it as a JAX array."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(checks.message(operator, argument, "be integers", f"dtype {x.dtype}"))
    if x.ndim != 1:
        raise ValueError(checks.message(operator, argument, "have one axis", x.shape))
    return x


def _count(operator: str, argument: str, x: Any) -> int:
    """Checks that `x` is a number of nodes or edges that int32 can count."""
    x = checks.integer(operator, argument, x)
    if not 0 <= x < LIMIT:
        raise ValueError(checks.message(operator, argument, f"lie in [0, {LIMIT})", x))
    return x


def _check_within(operator: str, argument: str, x: np.ndarray, size: int, name: str) -> None:
    """Checks that every entry of `x` is in [0, size)."""
    if not x.size:
        return
    low, high = int(x.min()), int(x.max())
    if low < 0 or high >= size:
        expected = f"lie in [0, {size}), the range of {name}"
        got = low if low < 0 else high
        raise ValueError(checks.message(operator, argument, expected, got))


def _check_permutation(operator: str, x: np.ndarray, n: int) -> np.ndarray:
    """Checks that `x` is a permutation of 0 to n - 1."""
    in_range = x.shape == (n,) and (n == 0 or (x.min() >= 0 and x.max() < n))
    if not in_range or not (np.bincount(x, minlength=n) == 1).all():
        expected = f"be a permutation of 0 to {n} - 1"
        got = f"shape {x.shape}" if x.shape != (n,) else "other or repeated numbers"
        raise ValueError(checks.message(operator, "map_csc_to_coo", expected, got))
    return x


# Whether the arrays of a graph belong together: those that a constructor made do.


def of_one_graph(graph: BipartiteCSC) -> BipartiteCSC:
    """Returns the graph, whose arrays are known to belong together."""
    object.__setattr__(graph, "_is_of_one_graph", True)  # no field: what is made of it is another object
    return graph


def check_of_one_graph(operator: str, graph: BipartiteCSC) -> None:
    """Checks, where they can be read, that the groups and schedules of a graph are those of its edges.

    That takes about two thirds of the time of building it, once for each object that no constructor has made:
    one that is copied, loaded or put on a device for each call is best handed to a compiled function.
    """
    if getattr(graph, "_is_of_one_graph", False):
        return
    leaves = jax.tree.leaves(graph)
    readable = all(checks.is_array(x) and not isinstance(x, jax.core.Tracer) for x in leaves)
    if not readable or not all(getattr(x, "is_fully_addressable", True) for x in leaves):
        return
    if not groups.belong_together(jax.tree.map(np.asarray, graph)):
        expected = "hold groups and schedules of the edges that it has"
        remedy = "its arrays are not to be replaced one by one: build a graph of the new edges"
        raise ValueError(checks.message(operator, "the graph", expected, "those of others", remedy))
    of_one_graph(graph)


# Self-loops: an edge from each node to itself, as PyTorch Geometric's layers add them by default.


def is_traced(graph: BipartiteCSC) -> bool:
    """Tells whether the edges of the graph are traced, and so not known."""
    return any(isinstance(x, jax.core.Tracer) for x in (graph.offsets, graph.indices))


def edges(operator: str, graph: BipartiteCSC) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (sources, destinations, numbers) of the edges of a graph, in the caller's order."""
    if is_traced(graph):
        remedy = "build it outside jit and hand it in as an argument"
        raise TypeError(checks.message(operator, "the graph", "be known", "a traced one", remedy))
    _check_one(operator, graph)
    offsets, number = np.asarray(graph.offsets), np.asarray(graph.map_csc_to_coo)[: graph.num_edges]
    order = np.argsort(number)
    dst = np.repeat(np.arange(graph.num_dst), np.diff(offsets))
    return np.asarray(graph.indices, np.int64)[order], dst[order], number[order]


def _looped_on_host(graph, edge, fill_value, capacity):
    # the edges that stay, then the loops
    src, dst, number = edges(_LOOPS, graph)
    kept, nodes = np.flatnonzero(src != dst), min(graph.num_src, graph.num_dst)
    loops = np.arange(nodes)
    ends = (np.concatenate([x[kept], loops]) for x in (src, dst))
    found = BipartiteCSC.from_coo(*ends, graph.num_src, graph.num_dst, capacity=capacity)
    if edge is None:
        return found, None
    given, filled = edge[number[kept]], _filled(graph, edge, fill_value)
    room = jnp.zeros((found.capacity - len(kept) - nodes, *edge.shape[1:]), edge.dtype)
    return found, jnp.concatenate([given, filled, room])


def _looped_on_device(graph, edge, fill_value, capacity):
    """Does what `_looped_on_host` does for a traced graph, whose number of edges is not known."""
    nodes = min(graph.num_src, graph.num_dst)
    least = graph.capacity + nodes
    room = least if capacity is None else checks.integer(_LOOPS, "capacity", capacity)
    if room < least:
        expected = f"be at least {least}, that of the traced graph and a loop for each node"
        raise ValueError(checks.message(_LOOPS, "capacity", expected, capacity))

    # the edges that stay keep their order; the loops follow the last of them
    src, dst = ends_of_edges(graph)
    kept = (dst < graph.num_dst) & (src != dst)
    loops = jnp.arange(nodes, dtype=jnp.int32)
    position = jnp.where(kept, jnp.cumsum(kept, dtype=jnp.int32) - 1, room)
    last = kept.sum(dtype=jnp.int32) + loops

    def joined(given, own, none):
        both = jnp.full((room, *given.shape[1:]), none, given.dtype).at[position].set(given, mode="drop")
        return both.at[last].set(own, unique_indices=True)

    ends = (joined(x, loops, -1) for x in (src, dst))
    found = BipartiteCSC.from_traced(*ends, graph.num_src, graph.num_dst)
    if edge is None:
        return found, None
    return found, joined(edge, _filled(graph, edge, fill_value), 0)


def _filled(graph: BipartiteCSC, edge: jax.Array, fill_value: Any) -> jax.Array:
    """Returns the data of the loops: `fill_value`, or what it makes of the edges into each node, 0 without.

    Loops that are replaced do not count.
    """
    if not isinstance(fill_value, str):
        return fill_value
    # what the edges into each node hold, without the loops that are replaced
    src, dst = ends_of_edges(graph)
    replaced = (src == dst) & (dst < graph.num_dst)
    count = (graph.offsets[1:] - graph.offsets[:-1]).at[dst].add(-replaced.astype(jnp.int32), mode="drop")
    spread = lambda x: jnp.expand_dims(x, tuple(range(1, edge.ndim)))
    neutral, sign = (0, 1) if fill_value in ("mean", "add") else (-jnp.inf, -1 if fill_value == "min" else 1)
    given = jnp.where(spread(replaced), neutral, sign * edge.astype(accumulator_dtype(edge.dtype)))

    # the minimum is the negative of a maximum; the mean divides the sum by what is counted
    sums = plan.EdgePlan.of("xla", "edge_sum" if neutral == 0 else "edge_max", (graph, given))
    found = sign * reductions.forward(sums, graph, given)
    if fill_value == "mean":
        found = found / spread(jnp.maximum(count, 1)).astype(found.dtype)
    found = jnp.where(spread(count > 0), found, 0).astype(edge.dtype)
    return found[: min(graph.num_src, graph.num_dst)]


def _check_one(operator: str, graph: BipartiteCSC) -> None:
    if np.ndim(graph.offsets) != 1:
        expected = "be one graph"
        raise ValueError(checks.message(operator, "the graph", expected, "a stack of them"))
