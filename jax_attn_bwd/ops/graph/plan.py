"""Decides about a call before anything is computed: once, in the public function.

Forward and backward take the same `Plan`, and derive nothing that stands in it.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import targets
from jax_attn_bwd._core.sharding import auto_devices, explicit_spec
from jax_attn_bwd._core.split import Pieces
from jax_attn_bwd.ops.graph import kinds, loops, placement
from jax_attn_bwd.ops.graph.groups import first_group_per_node
from jax_attn_bwd.ops.graph.kinds import Kind
from jax_attn_bwd.ops.graph.kinds.kind import Tables
from jax_attn_bwd.ops.graph.loops import Grid, adds_in_order
from jax_attn_bwd.ops.graph.spec import Operands, Options
from jax_attn_bwd.ops.graph.structure import BipartiteCSC


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
      first_groups: whether the passes, all without a loop, take one group of each node first. Their sums are
        rows of the nodes as they are, without a scatter, whose adding has no order off CPUs.
    """

    scores: Grid
    messages: Grid
    sources: Grid
    end_row: bool
    first_groups: bool

    @classmethod
    def of(
        cls, options: Options, operands: Operands, pieces: Pieces | None = None, tied: bool = False
    ) -> "Loops":
        """Decides from the shapes and the platform; groups that are cut, or tied, have a padding."""
        kind, graph = kinds.of(options), operands.graph
        elements, groups = kind.row_elements(operands), [graph.by_destination, graph.by_source]
        if pieces is not None:
            groups = [placement.groups_of_piece(graph, one, pieces) for one in groups]

        # On a CPU up to twice as many elements take no loop in two cases: where messages alone have them, at
        # least four for each score, and with JAX 0.10 where rows are narrow: there a loop takes up to twice
        # the time.
        known = isinstance(elements, int)
        alone = kind.scores_of_numbers and not (known and elements < 4 * options.num_heads)
        is_slow = jax.__version_info__ < (0, 11) and known and elements <= 16
        whole = loops.whole_elements()
        if adds_in_order() and (alone or is_slow):
            whole *= 2
        messages, sources = (loops.grid(one, elements, whole) for one in groups)
        scores = loops.grid(groups[0], kind.score_elements(operands), whole)

        # a row at the end is needed where an index may be past it, and what it finds is summed
        single = all(one.other.shape[1] == 1 for one in groups)
        filled = graph.exact and pieces is None and not tied and messages.count == sources.count == 1
        end_row = adds_in_order() and not (filled or (single and not kind.sums_whole_chunks))

        found = cls(scores, messages, sources, end_row, first_groups=False)
        wide = all(one.other.shape[1] > 1 for one in groups)
        first_groups = found.all_at_once and wide and pieces is None and not adds_in_order()
        return replace(found, first_groups=first_groups)

    @property
    def all_at_once(self) -> bool:
        """Tells whether every pass takes all groups at once."""
        return all(isinstance(n, int) and n == 1 for n, _ in (self.scores, self.messages, self.sources))

    def with_end_row(self, x: jax.Array, fill: float = 0) -> jax.Array:
        """Adds to `x`, by node, a row of `fill` at its end, if `loops.rows` is to find one there."""
        if not self.end_row:
            return x
        return jnp.pad(x, ((0, 1), *((0, 0) for _ in x.shape[1:])), constant_values=fill)

    def with_end_rows(self, t: Tables) -> Tables:
        """Returns the tables, those of nodes as `loops.rows` reads them."""
        padded: Any = lambda x: None if x is None else self.with_end_row(x)
        src, dst = padded(t.src), padded(t.dst)
        message = src if t.message is t.src else padded(t.message)
        return t._replace(src=src, dst=dst, message=message)


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

    @classmethod
    def of(cls, options: Options, operands: Operands, implementation: str, return_residual: bool) -> "Plan":
        """Decides from the shapes, the mesh and the platform."""
        # where nodes and edges lie
        spread = (operands.src, operands.dst, operands.value, operands.edge)
        is_named = any(any(explicit_spec(x)[:-2]) for x in spread if x is not None)
        pieces = placement.pieces_of_edges(operands)
        devices = 1 if pieces else max(auto_devices(x) for x in spread if x is not None)

        # edges are tied to the nodes; in a loop each device then adds to sums of its own
        tied = placement.pieces_like_nodes(operands, devices)
        chunks = Loops.of(options, operands, pieces, tied is not None)
        if tied and not chunks.all_at_once:
            pieces, chunks = tied, Loops.of(options, operands, tied)

        # the order of the edges in the backward
        graph = operands.graph
        single = graph.by_destination.other.shape[1] == graph.by_source.other.shape[1] == 1
        like_forward = adds_in_order() and single and chunks.all_at_once and pieces is None
        return cls(
            options=options,
            implementation=implementation,
            return_residual=return_residual,
            batch_rank=len(operands.batch_axes),
            in_turn=one_after_another() and not is_named,
            on_every_device=devices > 1 and pieces is None,
            tied=tied,
            pieces=pieces,
            loops=chunks,
            like_forward=like_forward,
            one_pass=like_forward or (adds_in_order() and graph.run_owners is None),
        )

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

    def edges_of(self, operands: Operands) -> BipartiteCSC:
        """Returns the graph as the passes walk over it."""
        graph = operands.graph
        if self.tied:
            return placement.edges_sharded_like_nodes(operands, self.tied)
        if not self.loops.first_groups:
            return graph
        by_destination = first_group_per_node(graph.by_destination, graph.num_dst)
        by_source = first_group_per_node(graph.by_source, graph.num_src)
        return replace(graph, by_destination=by_destination, by_source=by_source)


def one_after_another() -> bool:
    """Tells whether entries are computed in turn: a lone CPU takes half the time for it."""
    return targets.is_one_cpu()
