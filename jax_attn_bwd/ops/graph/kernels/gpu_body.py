"""The parts of a kernel of graph attention: a `Body`, functions of arrays in registers; segments; outputs.

Two programs carry bodies out. Rows of 128 numbers and more have a warpgroup for each segment (`gpu_walk`),
and the registers of a body are `[H]` and `[H, D]`; narrower ones share it (`gpu_lockstep`), and those are
`[R, H]` and `[R, H, D]`, of R segments. All are float32.

A segment is what one program walks over: up to 256 edges of one node. A node of many edges is several of
them, so that a hub takes no longer than its edges would take elsewhere. What its segments find goes to spills
in an array of its own and is summed there, in order: no atomics, and the same bits in every run. A node
without edges is one segment of none, which writes the node's zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core.numerics import segment_sums
from jax_attn_bwd.ops.graph.groups import Groups
from jax_attn_bwd.ops.graph.kinds import Kind
from jax_attn_bwd.ops.graph.kinds.kind import Tables
from jax_attn_bwd.ops.graph.loops import Chunk

LENGTH = 256  # edges of a segment, at most
EDGES = 4  # at a time
ELEMENTS = 512  # of a block of heads, at most
THREADS = 128  # of a warpgroup
WIDTHS = (8, 16, 32, 64, 128, 256)  # of a head

Registers = dict[str, jax.Array]


class Segments(NamedTuple):
    """The edges of a graph, sorted by the nodes at one end; S segments, P slots of edges, X spills."""

    node: jax.Array  # int32 [S], whose edges these are; past the end: there is no such segment
    begin: jax.Array  # int32 [S], the first of its slots
    end: jax.Array  # int32 [S], past the last of them
    spill: jax.Array  # int32 [S], where the sums of a part of a node's edges go; -1: these are all of them
    owner: Any  # int32 [X], the node of each spill, not decreasing; past the end: none. No kernel reads it
    other: jax.Array  # int32 [P], the node at the other end
    number: jax.Array  # int32 [P], of the edge in the caller's order


def segments(groups: Groups, nodes: int, capacity: int) -> Segments:
    """Cuts edges, in groups by node, into segments. S and X are bounds by the shapes, so every graph fits."""
    # the slots of each node, `start` to `stop`, without the empty ones behind them: [nodes]
    total, width = groups.other.shape
    slots = total * width
    first = jnp.searchsorted(groups.node, jnp.arange(nodes + 1, dtype=jnp.int32)).astype(jnp.int32)
    empty = (groups.number >= capacity).sum(1, dtype=jnp.int32)  # slots of a group, all at its end
    last = empty[jnp.maximum(first[1:] - 1, 0)]
    start, stop = first[:-1] * width, first[1:] * width
    stop = jnp.where(stop > start, stop - last, stop)
    count = jnp.maximum((stop - start + LENGTH - 1) // LENGTH, 1)

    # segments follow the nodes: which node each is of, and which of the node's it is, [S]
    before = jnp.cumsum(count, dtype=jnp.int32) - count
    position = jnp.arange(nodes + slots // LENGTH, dtype=jnp.int32)
    node = jnp.searchsorted(before, position, side="right").astype(jnp.int32) - 1
    rank = position - before[node]
    exists = rank < count[node]  # the last node is found past its end, too
    begin = start[node] + rank * LENGTH
    end = jnp.minimum(begin + LENGTH, stop[node])

    # parts of a node's edges have spills, in order, [X]
    parts = jnp.where(count > 1, count, 0)
    at = (jnp.cumsum(parts, dtype=jnp.int32) - parts)[node] + rank
    shared = exists & (parts[node] > 0)
    spills = 2 * (slots // LENGTH) if slots > LENGTH else 0  # at most 2 d / 256 for d > 256 edges
    past = spills + position
    owner = jnp.full(spills, nodes, jnp.int32)
    owner = owner.at[jnp.where(shared, at, past)].set(node, mode="drop", unique_indices=True)
    return Segments(
        jnp.where(exists, node, nodes),
        begin,
        end,
        jnp.where(shared, at, -1),
        owner,
        groups.other.reshape(-1),
        groups.number.reshape(-1),
    )


def settled(x: jax.Array, owner: jax.Array, parts: jax.Array) -> jax.Array:
    """Puts the sum of each owner's `parts`, added in order, in its row of `x`, by node."""
    first, last = _ends(owner)
    sums = segment_sums(parts, jnp.expand_dims(first, tuple(range(1, parts.ndim))), axis=0)
    past = x.shape[0] + 1 + jnp.arange(owner.shape[0], dtype=jnp.int32)  # distinct, and all dropped
    rows = jnp.where(last, owner, past)
    return x.at[rows].set(sums.astype(x.dtype), mode="drop", unique_indices=True)


def _ends(owner: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tells which spills are the first, and the last, of their owners."""
    differs, one = owner[1:] != owner[:-1], jnp.ones(1, bool)
    return jnp.concatenate([one, differs]), jnp.concatenate([differs, one])


class Inputs(NamedTuple):
    """The arrays that a kernel reads: `[n, H]` or `[n, H, D]` by node or edge."""

    segments: Segments
    own: dict[str, jax.Array]  # of the node whose edges these are
    other: dict[str, jax.Array]  # of the node at an edge's other end
    edge: dict[str, jax.Array]  # of an edge, by its number
    shared: dict[str, jax.Array]  # [H, D], the same for all


def inputs_of(at: Segments, own: dict, other: dict, edge: dict, t: Tables) -> Inputs:
    """Collects the tables of a kernel, and what all of them read of an edge; what is None is left out."""
    edge = {"edge": t.edge, "bias": t.bias, **edge}
    groups = (own, other, edge, {"a": t.a})
    return Inputs(at, *({name: x for name, x in group.items() if x is not None} for group in groups))


def without_keys(t: Tables) -> Tables:
    """Drops what dropout is drawn from: the kernels are given the factors."""
    return t._replace(mask=None, keys=None, counters=None)


def factors_by_edge(kind: Kind, t: Tables, capacity: int) -> jax.Array | None:
    """Returns dropout factors `[E, H]`, by number of the edge; None = all 1."""
    number: Any = jnp.arange(capacity, dtype=jnp.int32)
    return kind.dropout_factors(t, Chunk(number, number, number, None))


@dataclass(frozen=True)
class Body:
    """The functions by which a kernel takes the edges of a segment, in registers.

    Attributes:
      name: of the kernel.
      numbers, rows: what is carried from edge to edge, `[H]` and `[H, D]`: {name: where it starts}.
      step: `(own and shared, edges, factors, carry) -> carry, written`: takes some edges, each a dict of
        what is read for it, with a scalar or `[R, H]` that is 1, or 0 for what is past the end. `written`
        is, for each edge, what goes to its row.
      finish: what of the carry goes to the node's row.
      out: {name: (dtype, whether it is a row)} of that; None: the carry itself.
      written: as `out`.
      by_segment: what of the carry is kept by segment, and not by node.
    """

    name: str
    step: Callable[..., tuple[Registers, list[Registers]]]
    numbers: dict[str, float] = field(default_factory=dict)
    rows: dict[str, float] = field(default_factory=dict)
    finish: Callable[[Registers], Registers] = lambda carry: carry
    out: dict[str, tuple[Any, bool]] | None = None
    written: dict[str, tuple[Any, bool]] = field(default_factory=dict)
    by_segment: tuple[str, ...] = ()

    def is_row(self, name: str) -> bool:
        """Tells whether a part of the carry is `[H, D]`."""
        return name in self.rows


class Walked(NamedTuple):
    """The arrays that a kernel leaves; junk in rows of nodes with several segments, and of absent edges."""

    nodes: dict[str, jax.Array]
    spills: dict[str, jax.Array]  # the carry of each part of a node's edges; empty if there can be none
    edges: dict[str, jax.Array]
    segments: dict[str, jax.Array]


class Call(NamedTuple):
    """The part of a call that programs know at trace time."""

    nodes: int
    heads: tuple[int, int]  # H and D of the rows
    interpret: bool


def heads_of_block(H: int, D: int) -> int:
    """Returns the heads that one program handles: a power of two."""
    found = H & -H
    while found > 1 and found * D > ELEMENTS:
        found //= 2
    return found


def is_narrow(H: int, D: int) -> bool:
    """Tells whether a block of heads is too narrow for a warpgroup of its own."""
    return heads_of_block(H, D) * D < THREADS


def registers(tiles: tuple[tuple[int, ...], ...], warp_dims: tuple, lane_dims: tuple) -> Any:
    """Returns how a warpgroup holds an array: see `TiledLayout`; a thread's own numbers are the last axis."""
    found = fragmented_array.TiledLayout(
        fragmented_array.Tiling(tiles), warp_dims, lane_dims, vector_dim=-1, _check_canonical=False
    ).canonicalize()
    return plgpu.Layout.TILED(
        plgpu.Tiling(tuple(found.tiling.tiles)),
        warp_dims=found.warp_dims,
        lane_dims=found.lane_dims,
        vector_dim=found.vector_dim,
    )


def spread(x: jax.Array, like: jax.Array) -> jax.Array:
    """Spreads a number of each head over its row, `[..., H]` -> `[..., H, D]`; scalars and rows stay."""
    if x.ndim in (0, like.ndim):
        return x
    return lax.broadcast_in_dim(x, like.shape, tuple(range(x.ndim)))
