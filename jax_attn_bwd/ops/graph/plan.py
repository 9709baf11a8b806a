"""What is decided about a call before anything is computed: once, in the public function.

Forward and backward take the same `Plan`, and derive nothing that stands in it.
"""

from dataclasses import dataclass, replace

from jax_attn_bwd._core.sharding import auto_devices
from jax_attn_bwd._core.split import Pieces
from jax_attn_bwd.ops.graph import batch_axes, edge_loops, edge_pieces, kinds
from jax_attn_bwd.ops.graph.edge_loops import Grid, adds_in_order
from jax_attn_bwd.ops.graph.spec import Operands, Options


@dataclass(frozen=True)
class Loops:
    """How the passes cut the groups of a graph into chunks.

    Attributes:
      scores: chunks of groups by destination, where a pass reads the rows that scores are made of.
      messages: chunks of groups by destination, where it reads all features.
      sources: chunks of groups by source, where it reads all features.
      end_row: whether the tables of nodes get one more row, which an index past the end finds. It counts in
        groups of several edges, which are summed, and where a gradient sums over all that a chunk holds.
        What belongs to a single edge is dropped where it would be added. Off CPUs no table needs it.
      led: whether the passes, all without a loop, take one group of each node first. Their sums are rows of
        the nodes as they are, without a scatter, whose adding has no order off CPUs.
    """

    scores: Grid
    messages: Grid
    sources: Grid
    end_row: bool
    led: bool

    @classmethod
    def of(
        cls, options: Options, operands: Operands, pieces: Pieces | None = None, tied: bool = False
    ) -> "Loops":
        """Decides from the shapes and the platform; groups that are cut, or tied, have a padding."""
        kind, graph = kinds.of(options), operands.graph
        elements, walks = kind.row_elements(operands), [graph.by_destination, graph.by_source]
        if pieces is not None:
            walks = [edge_pieces.share(graph, walk, pieces) for walk in walks]
        messages, sources = (edge_loops.grid(walk, elements) for walk in walks)
        single = all(walk.other.shape[1] == 1 for walk in walks)
        filled = graph.exact and pieces is None and not tied and messages.count == sources.count == 1
        end_row = adds_in_order() and not (filled or (single and not kind.sums_whole_chunks))
        scores = edge_loops.grid(walks[0], kind.score_elements(operands))
        found = cls(scores, messages, sources, end_row, led=False)
        groups = all(walk.other.shape[1] > 1 for walk in walks)
        return replace(found, led=found.has_none and groups and pieces is None and not adds_in_order())

    @property
    def has_none(self) -> bool:
        """Whether every pass takes all groups at once."""
        return all(isinstance(n, int) and n == 1 for n, _ in (self.scores, self.messages, self.sources))


@dataclass(frozen=True)
class Plan:
    """A call, but for its arrays.

    Attributes:
      options: what changes the answer.
      implementation: the name of the one that runs.
      return_residual: whether lse is returned.
      batch_rank: the number of batch axes in front of nodes and edges.
      in_turn: whether the entries of the batch are computed one after the other.
      on_every_device: whether nodes and edges may lie on several devices of an Auto mesh. Then each device
        gathers them all: any edge may ask for any node, and each chunk of a loop would gather its own.
      tied: how many devices of an Auto mesh may share the edges, as `edge_ties.py` has it; 1: none do.
      pieces: how devices cut the edges where nodes lie on several of an Explicit mesh; else None.
      loops: how the passes (over the edges of a piece) are cut into chunks.
      one_pass: whether the backward sums for the destinations in its pass by source: where a scatter adds in
        order, and no destination has so many edges that their sum is taken in runs.
    """

    options: Options
    implementation: str
    return_residual: bool
    batch_rank: int
    in_turn: bool
    on_every_device: bool
    tied: int
    pieces: Pieces | None
    loops: Loops
    one_pass: bool

    @classmethod
    def of(cls, options: Options, operands: Operands, implementation: str, return_residual: bool) -> "Plan":
        """Decides from the shapes, the mesh and the platform."""
        spread = (operands.src, operands.dst, operands.value, operands.edge)
        pieces = edge_pieces.of_nodes(operands)
        devices = 1 if pieces else max(auto_devices(x) for x in spread if x is not None)
        batch_rank = batch_axes.batch_rank(operands)
        may_be_tied = devices > 1 and not batch_rank and adds_in_order()
        loops = Loops.of(options, operands, pieces, may_be_tied)
        return cls(
            options,
            implementation,
            return_residual,
            batch_rank,
            batch_axes.one_after_another(),
            devices > 1,
            devices if may_be_tied and loops.has_none else 1,
            pieces,
            loops,
            adds_in_order() and operands.graph.run_owners is None,
        )
