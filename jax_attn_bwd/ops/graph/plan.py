"""What is decided about a call before anything is computed: once, in the public function.

Forward and backward take the same `Plan`, and derive nothing that stands in it.
"""

from dataclasses import dataclass

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
        What belongs to a single edge is dropped where it would be added.
    """

    scores: Grid
    messages: Grid
    sources: Grid
    end_row: bool

    @classmethod
    def of(cls, options: Options, operands: Operands, pieces: Pieces | None = None) -> "Loops":
        """Decides from the shapes and the platform."""
        kind, graph = kinds.of(options), operands.graph
        elements, walks = kind.row_elements(operands), [graph.by_destination, graph.by_source]
        if pieces is not None:
            walks = [edge_pieces.share(graph, walk, pieces) for walk in walks]
        messages, sources = (edge_loops.grid(walk, elements) for walk in walks)
        single = adds_in_order() and all(walk.other.shape[1] == 1 for walk in walks)
        filled = graph.exact and pieces is None and messages.count == sources.count == 1
        end_row = not (filled or (single and not kind.sums_whole_chunks))
        return cls(edge_loops.grid(walks[0], kind.score_elements(operands)), messages, sources, end_row)


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
    pieces: Pieces | None
    loops: Loops
    one_pass: bool

    @classmethod
    def of(cls, options: Options, operands: Operands, implementation: str, return_residual: bool) -> "Plan":
        """Decides from the shapes, the mesh and the platform."""
        spread = (operands.src, operands.dst, operands.value, operands.edge)
        pieces = edge_pieces.of_nodes(operands)
        return cls(
            options,
            implementation,
            return_residual,
            batch_axes.batch_rank(operands),
            batch_axes.one_after_another(),
            any(auto_devices(x) > 1 for x in spread if x is not None),
            pieces,
            Loops.of(options, operands, pieces),
            adds_in_order() and operands.graph.run_owners is None,
        )
