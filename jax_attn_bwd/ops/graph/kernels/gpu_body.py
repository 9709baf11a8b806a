"""The parts of a kernel of graph attention: a `Body`, functions of arrays in registers; inputs; outputs.

One program carries bodies out (`gpu_walk`): a warpgroup takes R segments, and the registers of a body are
`[R, H]` and `[R, H, D]`, float32. What a segment is `segments.py` tells.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core.numerics import segment_sums
from jax_attn_bwd.ops.graph.groups import Groups, segments_of_groups
from jax_attn_bwd.ops.graph.kinds import Kind
from jax_attn_bwd.ops.graph.kinds.kind import Tables
from jax_attn_bwd.ops.graph.loops import Chunk, by_levels, put
from jax_attn_bwd.ops.graph.segments import Segments

EDGES = 4  # at a time
NUMBERS = 1024  # of the rows of a program's segments: eight a thread of a warpgroup
WIDTHS = (8, 16, 32, 64, 128, 256)  # of a head

Registers = dict[str, jax.Array]


def segments_of(graph: Any, side: str) -> Segments:
    """Returns the segments that the graph carries, or cuts its edges here; `side` names its groups."""
    if graph.schedules is not None:
        return getattr(graph.schedules, side)
    nodes = graph.num_dst if side == "by_destination" else graph.num_src
    return segments_of_groups(jnp, getattr(graph, side), nodes, graph.capacity)


def settled(x: jax.Array, at: Segments, parts: jax.Array) -> jax.Array:
    """Puts the sum of each node's `parts`, added in a fixed order, in its row of `x`, by node."""
    return put(x, *sums_of_spills(at, parts))


def sums_of_spills(at: Segments, parts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums the `parts` of each node: (nodes, distinct, some of them past the end; sums)."""
    if at.hubs is not None:
        return at.hubs, by_levels(parts, at.levels, jnp.sum, 0)
    first, last = _ends(at.owner)
    sums = segment_sums(parts, jnp.expand_dims(first, tuple(range(1, parts.ndim))), axis=0)
    past = jnp.iinfo(jnp.int32).max - jnp.arange(at.owner.shape[0], dtype=jnp.int32)
    return jnp.where(last, at.owner, past), sums


def highest_of_spills(x: jax.Array, at: Segments, parts: jax.Array) -> jax.Array:
    """Puts the highest of each node's `parts` in its row of `x`, by node."""
    if at.hubs is not None:
        return put(x, at.hubs, by_levels(parts, at.levels, jnp.max, -jnp.inf))
    top = jnp.full_like(x, -jnp.inf).at[at.owner].max(parts, mode="drop", indices_are_sorted=True)
    own = top[jnp.minimum(at.owner, x.shape[0] - 1)]
    return x.at[at.owner].set(own, mode="drop", indices_are_sorted=True)


def _ends(owner: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tells which spills are the first, and the last, of their owners."""
    differs, one = owner[1:] != owner[:-1], jnp.ones(1, bool)
    return jnp.concatenate([one, differs]), jnp.concatenate([differs, one])


class Inputs(NamedTuple):
    """The arrays that a kernel reads: `[n, H]` or `[n, H, D]` by node or edge."""

    segments: Segments
    ends: jax.Array  # int32 [P], of each slot the node at the edge's other end
    numbers: jax.Array  # int32 [P], the number of the edge in the caller's order
    own: dict[str, jax.Array]  # of the node whose edges these are
    other: dict[str, jax.Array]  # of the node at an edge's other end
    edge: dict[str, jax.Array]  # of an edge, by its number
    shared: dict[str, jax.Array]  # [H, D], the same for all


def inputs_of(at: Segments, groups: Groups, own: dict, other: dict, edge: dict, t: Tables) -> Inputs:
    """Collects the tables of a kernel, and what all of them read of an edge; what is None is left out."""
    edge = {"edge": t.edge, "bias": t.bias, **edge}
    given = (own, other, edge, {"a": t.a})
    tables = ({name: x for name, x in group.items() if x is not None} for group in given)
    return Inputs(at, groups.other.reshape(-1), groups.number.reshape(-1), *tables)


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
      numbers, rows: what is carried from edge to edge, `[R, H]` and `[R, H, D]`: {name: where it starts}.
      step: `(own and shared, edges, factors, carry) -> carry, written`: takes some edges, each a dict of
        what is read for it, with `[R, H]` that is 1, or 0 for what is past the end. `written`
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
        """Tells whether a part of the carry is `[R, H, D]`."""
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
    """Returns the heads that one program handles: a power of two, whose rows leave room for two segments."""
    found = H & -H  # Mosaic GPU (JAX 0.12) lowers no arrays of a single segment
    while found > 1 and 2 * found * D > NUMBERS:
        found //= 2
    return found


def spread(x: jax.Array, like: jax.Array) -> jax.Array:
    """Spreads a number of each head over its row, `[R, H]` -> `[R, H, D]`; rows stay."""
    return x if x.ndim == like.ndim else lax.broadcast_in_dim(x, like.shape, (0, 1))
