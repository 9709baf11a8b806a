"""Decides about a call before anything is computed: once, in the public function.

Forward and backward take the same `Plan`, and derive nothing that stands in it. `EdgePlan` is that of the
operators over edges; `grouping` decides for a graph that is built.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import targets
from jax_attn_bwd._core.choices import Rule, Way
from jax_attn_bwd._core.numerics import accumulator_dtype, ceil_div
from jax_attn_bwd._core.sharding import auto_devices, explicit_spec
from jax_attn_bwd._core.split import Pieces
from jax_attn_bwd.ops.graph import kinds, placement
from jax_attn_bwd.ops.graph.groups import Grouping, Groups, Side, without_order
from jax_attn_bwd.ops.graph.kinds import Kind
from jax_attn_bwd.ops.graph.kinds.kind import Tables
from jax_attn_bwd.ops.graph.levels import TOGETHER, most_together
from jax_attn_bwd.ops.graph.loops import Grid
from jax_attn_bwd.ops.graph.spec import Operands, Options

_TRACED = "c5259a5: compiled for an H200, run on none"
_ORDERED = "9d958e7: compiled for an H100, run on none"
AT_ONCE = Way("all at once", "forward.py, backward.py", "few elements of edges and features")
CHUNKS = Way("chunks", "loops.py", "more: a loop", "no array of all edges and features", "4b18114")
GROUPS = Way("groups", "loops.py", "off CPUs: dense sums, then blocks in a fixed order", "", _TRACED)
BY_ORDER = Way(
    "by their order", "loops.py", "groups, all at once", "15 to 20 launches in place of 49 to 60", _ORDERED
)
PIECES = Way("pieces", "placement.py", "nodes on several devices, which share the edges")
AS_FORWARD = Way("back as forward", "backward.py", "single edges at once", "0.4 to 0.9 of it", "849fb96")
BACK_ONCE = Way("back in one pass", "backward.py", "single edges in chunks, no hub in runs")
BACK_TWICE = Way("back in two passes", "backward.py", "groups, and hubs in chunks")
ONE_SCATTER = Way("one scatter", "reductions.py", "edge_sum, edge_mean, edge_max on a CPU")
WAYS = (AT_ONCE, CHUNKS, GROUPS, BY_ORDER, PIECES, AS_FORWARD, BACK_ONCE, BACK_TWICE, ONE_SCATTER)

IN_ORDER = Rule(
    "graph_in_order",
    "a CPU",
    "A scatter adds one row after the other, and takes less time than a group's empty places: edges are "
    "single: by groups 20 drawn steps took 1.75 to 22 times as long, 4.8 in the median. Elsewhere rows come "
    "in any order, and groups of up to 16 edges are summed in a fixed one.",
)
LOOPS = Rule(
    "graph_loops",
    "more elements of edges and features than 2^20 on a CPU, 2^30 on a GPU, 2^21 elsewhere",
    "No array of all edges and features. On a CPU buffers above 32 MiB are mapped anew in each call (glibc's "
    "malloc), and the first touch of every page takes longer than the step.",
    "memory",
)
RUNS = Rule(
    "graph_runs",
    "single edges, more than 256 into one node",
    "A hub's edges are summed in runs of 256, then the runs: the error of a sum grows with its terms.",
    "accuracy",
)
ONE_PASS = Rule(
    "graph_one_pass",
    "a CPU; no loop over single edges, or no hub in runs",
    "One pass gives the gradients of sources and destinations. Without a loop it has the forward's order, so "
    "that rows are read and scores computed once: 10,000 to 124,000 edges take 0.4 to 0.9 of the time.",
)
FIRST_GROUPS = Rule(
    "graph_first_groups",
    "off CPUs, more than 65,536 edges; decided where the graph is built",
    "The first group of each node is summed where it is read, so that most nodes have no row of groups: "
    "100,000 nodes and 2.5 million edges move 3.2 GB in place of 9.2, as compiled for an H200. With fewer "
    "edges launches cost more than bytes: all groups are taken at once.",
)
READS_TWICE = Rule(
    "graph_reads_twice",
    "off CPUs, GATv2",
    "The backward reads rows again behind its scores: XLA:GPU would keep slopes by edge and feature.",
    "memory",
)
FEW_STEPS = Rule(
    "graph_few_steps",
    "a GPU; few nodes, and no weights asked for",
    "Each step of a sum is a launch. A step joins up to 128 rows of groups of a node, where it reads 524,288 "
    "rows at most, and 16 elsewhere; messages and l are summed as one row, and divided behind the sum. "
    "2,708 nodes and 13,000 edges with hubs: a step of GATv2 has 20 launches in place of 25, as compiled for "
    "an H100.",
)
IN_TURN = Rule(
    "graph_in_turn",
    "one CPU, batch axes",
    "Entries of a batch are computed one after the other: at once 4 to 16 take 1.5 to 3.1 times as long, and "
    "hold up to 26 times as much.",
)
SEGMENTS = Rule(
    "graph_segments",
    "a GPU; decided where the graph is built",
    "The graph carries the segments of kernels: a step of GAT, 2,708 nodes and 13,000 edges, has 9 launches "
    "in place of 285, as compiled for an H100.",
)
RULES = (IN_ORDER, LOOPS, RUNS, ONE_PASS, FIRST_GROUPS, READS_TWICE, FEW_STEPS, IN_TURN, SEGMENTS)

_FEW_EDGES = 1 << 16
_SYMBOLIC_ELEMENTS = 64  # assumed of an edge where the size is symbolic


def adds_in_order() -> bool:
    """Tells whether a scatter adds one row after the other: a CPU does; elsewhere rows come in any order."""
    return IN_ORDER.holds(targets.platform() == "cpu")


def whole_elements() -> int:
    """Returns the elements of all edges' rows that a pass reads without a loop.

    On a CPU a step then needs some 16 MiB. On a GPU nothing of that size is written but by derivatives of
    derivatives: each such array then has at most 4 GiB in float32.
    """
    return {"cpu": 1 << 20, "gpu": 1 << 30}.get(targets.platform(), 1 << 21)


def chunk_elements() -> int:
    """Returns the elements of the largest array of a chunk: what a CPU's cache holds, or occupies a chip."""
    return {"cpu": 1 << 18, "gpu": 1 << 27}.get(targets.platform(), 1 << 21)


def grid(groups: Groups, elements: Any, whole: int, in_order: bool) -> Grid:
    """Cuts `groups` into chunks for a pass that makes `elements` of an edge; sizes may be symbolic.

    Where these are `whole` of all edges, or fewer, it needs no loop.
    """
    total, width = groups.other.shape
    of_group = width * (elements if isinstance(elements, int) else _SYMBOLIC_ELEMENTS)
    if not LOOPS.holds(not total * of_group <= whole):
        return Grid(1, total, in_order)
    size = max(8, chunk_elements() // max(of_group, 1))
    count = ceil_div(total, size)
    return Grid(count, ceil_div(total, count), in_order)


def group_width(edges: int, nodes: int) -> int:
    """Chooses the edges of a group by the mean degree: wide groups are faster, but emptier where it is low.

    At most 16: a longer axis XLA:GPU sums in another way, for which it writes what is summed.
    """
    if adds_in_order():
        return 1
    mean = edges / max(nodes, 1)
    return next((width for width, least in ((16, 10), (8, 6), (4, 2)) if mean >= least), 2)


def grouping(operator: str, num_src: int, num_dst: int, room: int, exact: bool) -> Grouping:
    """Decides how a graph that is built groups its edges."""
    few = FEW_STEPS.holds(targets.platform() == "gpu")
    together = lambda nodes: most_together(nodes) if few else TOGETHER
    src, dst = (Side(nodes, group_width(room, nodes), together(nodes)) for nodes in (num_src, num_dst))
    in_runs, in_segments = RUNS.holds(dst.width == 1), SEGMENTS.holds(targets.platform() == "gpu")
    in_order = adds_in_order()
    first_apart = FIRST_GROUPS.holds(not in_order and room > _FEW_EDGES)
    return Grouping(operator, src, dst, room, exact, in_runs, in_segments, in_order, first_apart)


@dataclass(frozen=True)
class Loops:
    """How the passes cut the groups of a graph into chunks.

    Attributes:
      scores: chunks of groups by destination, where a pass reads the rows that scores are made of.
      messages: chunks of groups by destination, where it reads all features.
      sources: chunks of groups by source, where it reads all features.
      end_row: whether the tables of nodes get one more row, which an index past the end finds. It counts in
        groups of several edges, which are summed, and where a gradient sums over all that a chunk holds.
        What belongs to a single edge is dropped where it would be added. Where a scatter adds in no order, no
        table needs it.
      by_order: whether the passes, all without a loop, sum groups by the `Order` that the graph carries.
    """

    scores: Grid
    messages: Grid
    sources: Grid
    end_row: bool
    by_order: bool

    @classmethod
    def of(
        cls, options: Options, operands: Operands, pieces: Pieces | None = None, tied: bool = False
    ) -> "Loops":
        """Decides from the shapes and the platform; groups that are cut, or tied, have a padding."""
        kind, graph, in_order = kinds.of(options), operands.graph, adds_in_order()
        elements, groups = kind.row_elements(operands), [graph.by_destination, graph.by_source]
        if pieces is not None:
            groups = [placement.groups_of_piece(graph, one, pieces) for one in groups]

        # twice as many where messages alone have them, at least four for each score
        known = isinstance(elements, int)
        alone = kind.scores_of_numbers and not (known and elements < 4 * options.num_heads)
        whole = whole_elements() * (2 if in_order and alone else 1)
        messages, sources = (grid(one, elements, whole, in_order) for one in groups)
        scores = grid(groups[0], 0 if kind.scores_of_numbers else elements, whole, in_order)

        # a row at the end is needed where an index may be past it, and what it finds is summed
        single = all(one.other.shape[1] == 1 for one in groups)
        filled = graph.exact and pieces is None and not tied and messages.count == sources.count == 1
        end_row = in_order and not (filled or (single and not kind.sums_whole_chunks))

        found = cls(scores, messages, sources, end_row, by_order=False)
        ordered = any(one.order is not None for one in (graph.by_destination, graph.by_source))
        return replace(found, by_order=ordered and found.all_at_once and pieces is None and not in_order)

    @property
    def in_order(self) -> bool:
        """Whether a scatter adds one row after the other."""
        return self.messages.in_order

    @property
    def all_at_once(self) -> bool:
        """Tells whether every pass takes all groups at once."""
        counts = (grid.count for grid in (self.scores, self.messages, self.sources))
        return all(isinstance(n, int) and n == 1 for n in counts)

    def with_end_row(self, x: jax.Array, fill: float = 0) -> jax.Array:
        """Adds to `x`, by node, a row of `fill` at its end, if `loops.rows` is to find one there."""
        if not self.end_row:
            return x
        return jnp.pad(x, ((0, 1), *((0, 0) for _ in x.shape[1:])), constant_values=fill)

    def with_end_rows(self, t: Tables) -> Tables:
        """Returns the tables, those of nodes as `loops.rows` reads them."""
        padded: Any = lambda x: None if x is None else self.with_end_row(x)
        return t._replace(src=padded(t.src), dst=padded(t.dst), message=padded(t.message))


@dataclass(frozen=True)
class Plan:
    """A call, but for its arrays.

    Attributes:
      options: what changes the answer.
      implementation: the name of the one that runs.
      return_residual: whether lse is returned.
      batch_rank: the number of batch axes in front of nodes and edges.
      in_turn: whether the entries of the batch are computed one after the other. Not where an Explicit mesh
        names their axes, be it of one device.
      on_every_device: whether nodes and edges may lie on several devices of an Auto mesh. Then each device
        gathers them all: any edge may ask for any node, and each chunk of a loop would gather its own.
      tied: the pieces in which devices of an Auto mesh may share the edges, see `placement.py`; else None.
      pieces: how devices cut the edges where nodes lie on several of an Explicit mesh, or where passes over
        tied edges have a loop; else None.
      loops: how the passes (over the edges of a piece) are cut into chunks.
      like_forward: whether the backward takes single edges, all at once, in the order of the forward: where a
        scatter adds in order. In a program that holds both XLA then reads rows and computes scores once, and
        in one that computes the forward anew (`jax.checkpoint`) it leaves out the messages.
      one_pass: whether the backward sums for sources and destinations in one pass: in that order, or where
        a scatter adds in order, and no destination has so many edges that their sum is taken in runs.
      reads_twice: whether the backward reads rows once more behind the gradients of the scores.
      sums_in_one: whether messages and l are summed as one row.
    """

    options: Options
    implementation: str
    return_residual: bool
    batch_rank: int
    in_turn: bool
    on_every_device: bool
    tied: Pieces | None
    pieces: Pieces | None
    loops: Loops
    like_forward: bool
    one_pass: bool
    reads_twice: bool
    sums_in_one: bool

    @classmethod
    def of(
        cls, implementation: str, options: Options, operands: Operands, return_residual: bool = False
    ) -> "Plan":
        """Decides from the shapes, the mesh and the platform."""
        # where nodes and edges lie
        kind, graph, batch_rank = kinds.of(options), operands.graph, len(operands.batch_axes)
        spread = (operands.src, operands.dst, operands.value, operands.edge)
        is_named = any(any(explicit_spec(x)[:-2]) for x in spread if x is not None)
        pieces = placement.pieces_of_edges(operands)
        devices = 1 if pieces else max(auto_devices(x) for x in spread if x is not None)

        # edges are tied to the nodes; in a loop each device then adds to sums of its own
        tied = placement.pieces_like_nodes(operands, devices)
        chunks = Loops.of(options, operands, pieces, tied is not None)
        in_order = chunks.in_order
        tied = tied if in_order else None
        if tied and not chunks.all_at_once:
            pieces, chunks = tied, Loops.of(options, operands, tied)

        # the order of the edges in the backward
        single = graph.by_destination.other.shape[1] == graph.by_source.other.shape[1] == 1
        at_once = single and chunks.all_at_once and pieces is None
        one_pass = ONE_PASS.holds(in_order and (at_once or graph.run_owners is None))
        return cls(
            options=options,
            implementation=implementation,
            return_residual=return_residual,
            batch_rank=batch_rank,
            in_turn=IN_TURN.holds(batch_rank and targets.is_one_cpu() and not is_named),
            on_every_device=devices > 1 and pieces is None,
            tied=tied,
            pieces=pieces,
            loops=chunks,
            like_forward=one_pass and at_once,
            one_pass=one_pass,
            reads_twice=READS_TWICE.holds(kind.reads_twice and not in_order),
            sums_in_one=FEW_STEPS.holds(
                targets.platform() == "gpu" and chunks.by_order and not options.return_weights
            ),
        )

    @property
    def way(self) -> str:
        """How a call is computed, for `explain`."""
        cut = self.loops
        back = AS_FORWARD if self.like_forward else BACK_ONCE if self.one_pass else BACK_TWICE
        named = (
            AT_ONCE.name if cut.all_at_once else f"{cut.messages.count} {CHUNKS.name}",
            "" if cut.in_order else GROUPS.name,
            BY_ORDER.name if cut.by_order else "",
            f"{self.pieces.count} {PIECES.name}" if self.pieces else "",
            back.name,
        )
        return ", ".join(filter(None, named))

    @property
    def kind(self) -> Kind:
        """The kind of attention: the score of an edge, its message, and what their cotangents give."""
        return kinds.of(self.options)

    @property
    def delta_by_edge(self) -> bool:
        """Whether the backward sums delta over the edges, and never reads out.

        Not where devices share the edges: it would be one more exchange.
        """
        return self.like_forward and not self.tied

    def edges_of(self, operands: Operands) -> Any:
        """Returns the graph as the passes walk over it."""
        graph = operands.graph
        if self.tied:
            return placement.edges_sharded_like_nodes(operands, self.tied)
        return graph if self.loops.by_order else without_order(graph)


@dataclass(frozen=True)
class EdgePlan:
    """What is static of a sum, mean, maximum or softmax over edges.

    Attributes:
      name: of the operator.
      implementation: the name of the one that runs.
      sums: chunks of groups by destination.
      one_scatter: whether one scatter, in the caller's order, takes the place of groups.
    """

    name: str
    implementation: str
    sums: Grid
    one_scatter: bool

    @classmethod
    def of(cls, implementation: str, name: str, operands: tuple[Any, jax.Array]) -> "EdgePlan":
        """Decides from the shapes of a graph and of what is by edge or, in a backward, by destination."""
        graph, x = operands
        in_order, dtype = adds_in_order(), accumulator_dtype(x.dtype)
        if name == "edge_softmax":  # numbers by edge and head are formed whole
            return cls(name, implementation, Grid(1, graph.by_destination.other.shape[0], in_order), False)
        # up to 32 MiB where it is cheap to sum many
        whole = whole_elements() * (32 // dtype.itemsize if in_order else 1)
        sums = grid(graph.by_destination, math.prod(x.shape[1:]), whole, in_order)
        return cls(name, implementation, sums, in_order and (name == "edge_max" or x.dtype == dtype))

    @property
    def in_order(self) -> bool:
        """Whether a scatter adds one row after the other."""
        return self.sums.in_order

    @property
    def way(self) -> str:
        """How a call is computed, for `explain`."""
        if self.one_scatter:
            return ONE_SCATTER.name
        cut = AT_ONCE.name if self.sums.count == 1 else f"{self.sums.count} {CHUNKS.name}"
        return cut if self.in_order else f"{cut}, {GROUPS.name}"
