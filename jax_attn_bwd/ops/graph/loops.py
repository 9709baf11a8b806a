"""Walks over the groups of a graph, all of them at once or a chunk at a time, and adds rows to nodes.

A pass that reads a few numbers of each edge takes all edges at once (`parts`, `one_chunk`). A pass that reads
all features does so too where they are few: without a loop XLA compiles it sooner, runs it on all cores
and fuses it with its neighbours. Else the same functions run in a loop over chunks; a `Grid` of the plan
tells which. On a GPU a kernel reads rows where it multiplies and sums them, so that what is written by edge
has no features.

A scatter adds in a fixed order on a CPU alone (`in_order`). Elsewhere the graph tells which rows a node has
(`groups.Order`), if it was built outside `jit`. In a loop, and for a graph of `from_traced`,
`add_in_fixed_order` finds them: it sums rows that lie together. They are cut into blocks of B. The last row
of a block ends the block's tail, the rows before it of the same node; the tails, one for each block, are rows
again, of which the next level is made. A node's rows, up to one of them, are then at most B of each level:
those of its block, the tails of the blocks before that, and so on:

    rows    a a b | b b b | b b b | b c c        B = 3; what is summed for b: the rows in its last block,
    tails       b       b       b                then the tails before it

Each level is a B-th of the one before. The kernel that adds reads them all, and nothing else is written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import fusion
from jax_attn_bwd._core.remat import checkpoint
from jax_attn_bwd._core.sharding import full_like_operands
from jax_attn_bwd._core.split import join
from jax_attn_bwd.ops.graph.groups import RUN, Groups
from jax_attn_bwd.ops.graph.levels import SumLevel

_NONE = np.int32(2**31 - 1)  # a node past every end
_BLOCK = 4  # rows that are summed in a fixed order, at each level


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunk:
    """R groups of W edges. An index past the end stands for no edge; single edges, W = 1, have no axis W."""

    node: Any  # [R], not decreasing; None: of nodes 0 to R - 1, of all that there are
    other: jax.Array  # [(W,) R]
    number: jax.Array  # [(W,) R], of the edge in the caller's order
    exists: jax.Array | None  # bool [W, R]; None for single edges, of which one past the end is none
    levels: list[SumLevel] | None = None  # by which rows of groups are summed for their nodes, if it is known
    # whether a scatter adds one row after the other, and an index past the end finds the last row of a table
    in_order: bool = field(default=False, metadata={"static": True})


class Grid(NamedTuple):
    """How the groups of a graph are cut into chunks; one chunk takes no loop."""

    count: Any  # chunks; may be symbolic
    size: Any  # groups in each
    in_order: bool  # of each chunk


def rows(x: jax.Array, chunk: Chunk, fill: float = 0) -> jax.Array:
    """Reads the rows of `x`, of the nodes at the other ends of a chunk's edges; `fill` past the end."""
    if chunk.exists is None:
        return _reader(chunk, fill)(x, chunk.other)
    return _where(chunk.exists, _or_last(x, chunk.other), fill)


def _where(exists: jax.Array, x: jax.Array, fill: float) -> jax.Array:
    """Returns the rows `x` that exist; `fill` in place of the others."""
    return jnp.where(jnp.expand_dims(exists, tuple(range(exists.ndim, x.ndim))), x, fill)


def _reader(chunk: Chunk, fill: float) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns what reads the rows of an array at indices of nodes; `fill` for an index past the end.

    On a CPU such an index finds the last row, see `Loops.with_end_row`. To compare each index with the end,
    as `take` does, is slower: XLA:CPU then computes an `exp` that follows one number at a time, and a sum of
    products in one more pass.
    """
    return _or_last if chunk.in_order else partial(take, fill=fill)


@jax.custom_jvp
def _or_last(x: jax.Array, index: jax.Array) -> jax.Array:
    """Reads the rows of `x` at `index`; past the end the last one."""
    return x.at[index].get(mode="clip", wrap_negative_indices=False)


@_or_last.defjvp
def _or_last_jvp(primals, tangents):
    """Gives the last row a derivative only from indices that asked for it, not from those past the end."""
    return _or_last(*primals), take(tangents[0], primals[1])


def take(x: jax.Array, index: jax.Array, fill: float = 0) -> jax.Array:
    """Reads the rows of `x` at `index`; `fill`, whatever lies in `x`, for an index past the end."""
    return x.at[index].get(mode="fill", fill_value=fill, wrap_negative_indices=False)


def put(x: jax.Array, index: jax.Array, rows: jax.Array) -> jax.Array:
    """Puts `rows` at `index` of `x`, each row once; those past the end are dropped."""
    rows = rows.astype(x.dtype)
    return x.at[index].set(rows, mode="drop", unique_indices=True, wrap_negative_indices=False)


def own_rows(x: jax.Array, chunk: Chunk, fill: float = 0) -> jax.Array:
    """Reads the rows of `x`, of the nodes whose groups these are, for each edge, `[(W,) R, ...]`.

    `fill` where there is no edge: chosen for each edge, since XLA:GPU would write a table of nodes that is
    masked before.
    """
    if chunk.exists is None:
        return _reader(chunk, fill)(x, chunk.node)
    own = x[: chunk.other.shape[1]] if chunk.node is None else _reader(chunk, fill)(x, chunk.node)
    return _where(chunk.exists, own[None], fill)


def sum_of_group(x: jax.Array, chunk: Chunk) -> jax.Array:
    """Sums over the edges of each group, `[(W,) R, ...]` -> `[R, ...]`."""
    return x if chunk.exists is None else x.sum(0)


def add(x: jax.Array, chunk: Chunk, rows: jax.Array) -> jax.Array:
    """Adds the `rows` `[R, ...]` of a chunk's groups to `x`, by node; those past the end are dropped.

    The order of the sum is fixed, also where a scatter has none.
    """
    if chunk.levels is not None:
        rows = by_levels(rows.astype(x.dtype), chunk.levels, jnp.sum, 0)
    if chunk.node is None or chunk.levels is not None:
        more = ((0, x.shape[0] - rows.shape[0]), *((0, 0) for _ in x.shape[1:]))
        return x + jnp.pad(rows.astype(x.dtype), more)
    return add_sorted(x, chunk.node, rows, chunk.in_order)


def by_levels(rows: jax.Array, levels: Sequence[SumLevel], joined: Any, fill: float) -> jax.Array:
    """Joins the rows of each node by `joined`, `jnp.sum` or `jnp.max`; `fill` where there is none."""
    for start, steps in levels:
        at = start[:-1, None] + np.arange(steps.shape[0], dtype=np.int32)[None]
        rows = joined(_where(at < start[1:, None], _or_last(rows, at), fill), axis=1)
    return rows


def add_in_turn(x: jax.Array, index: jax.Array, rows: jax.Array, is_sorted: bool = False) -> jax.Array:
    """Adds `rows` to `x` at `index` where a scatter adds in order; those past the end are dropped."""
    at, rows = x.at[index], rows.astype(x.dtype)
    return at.add(rows, mode="drop", indices_are_sorted=is_sorted, wrap_negative_indices=False)


def add_sorted(x: jax.Array, index: jax.Array, rows: jax.Array, in_order: bool) -> jax.Array:
    """Adds `rows` to `x` at `index`, which does not decrease; those past the end are dropped."""
    if in_order:
        return add_in_turn(x, index, rows, is_sorted=True)
    return add_in_fixed_order(x, index, rows.astype(x.dtype))


def add_in_fixed_order(x: jax.Array, node: jax.Array, rows: jax.Array) -> jax.Array:
    """Adds `rows` to `x` at `node`, which does not decrease, without a scatter that adds two to one row."""
    count, nodes = node.shape[0], x.shape[0]
    row = np.arange(count, dtype=np.int32)
    if 16 * count < nodes:  # writes the nodes that have rows
        sums = _sums_up_to(rows, node, jnp.asarray(row), node)
        ends = jnp.concatenate([node[1:] != node[:-1], jnp.ones(1, bool)])
        at = jnp.where(ends, node, nodes + row)  # distinct, and past the end dropped
        return x.at[at].add(sums, mode="drop", unique_indices=True)
    last = jnp.full(nodes, -1, jnp.int32).at[node].max(row, mode="drop", indices_are_sorted=True)
    return x + _sums_up_to(rows, node, last, np.arange(nodes, dtype=np.int32))


def _sums_up_to(
    rows: jax.Array, node: jax.Array, last: jax.Array, wanted: jax.Array | np.ndarray
) -> jax.Array:
    """Sums the rows of the nodes `wanted` up to the row `last`; 0 where that is -1."""
    spread = lambda x: jnp.expand_dims(x, tuple(range(1, rows.ndim)))
    total = jnp.zeros((last.shape[0], *rows.shape[1:]), rows.dtype)
    while rows.shape[0]:
        for k in range(_BLOCK):
            at = last // _BLOCK * _BLOCK + k
            mine = (at >= 0) & (at <= last) & (node.at[at].get(mode="clip") == wanted)
            total = total + jnp.where(spread(mine), rows.at[at].get(mode="clip"), 0)
        last = last // _BLOCK - 1
        if rows.shape[0] < _BLOCK:
            break
        rows, node = _tails_of_blocks(rows, node)
    return total


def _tails_of_blocks(rows: jax.Array, node: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums each block's tail, and returns its node, too; blocks that are not full have none."""
    count = rows.shape[0] // _BLOCK
    blocks, of = (
        lax.slice_in_dim(x, 0, count * _BLOCK).reshape(count, _BLOCK, *x.shape[1:]) for x in (rows, node)
    )
    total = blocks[:, -1]
    for k in reversed(range(_BLOCK - 1)):
        same = jnp.expand_dims(of[:, k] == of[:, -1], tuple(range(1, rows.ndim)))
        total = total + jnp.where(same, blocks[:, k], 0)
    return total, of[:, -1]


def highest(x: jax.Array, chunk: Chunk, rows: jax.Array) -> jax.Array:
    """Takes the higher of `x`, by node, and the `rows` of a chunk's groups."""
    if chunk.levels is not None:
        rows = by_levels(rows, chunk.levels, jnp.max, -jnp.inf)
    elif chunk.node is not None:
        at = x.at[chunk.node]
        return at.max(rows, mode="drop", indices_are_sorted=True, wrap_negative_indices=False)
    more = ((0, x.shape[0] - rows.shape[0]), *((0, 0) for _ in x.shape[1:]))
    return jnp.maximum(x, jnp.pad(rows, more, constant_values=-jnp.inf))


def has_edges(graph: Any) -> bool:
    """Tells whether there can be any edge, by the shapes."""
    return bool(graph.capacity and graph.num_src and graph.num_dst)


def in_runs(graph: Any) -> tuple[Groups, int]:
    """Returns the groups by destination, with their run for `node`, and the number of runs."""
    found = graph.by_destination
    if graph.run_owners is None:
        return found, graph.num_dst
    position = jnp.arange(found.node.shape[0], dtype=jnp.int32)
    return found._replace(node=found.node + position // RUN), graph.run_owners.shape[0]


def turned(groups: Groups) -> Groups:
    """Returns single edges, of the nodes at their other ends, in the order that they have."""
    return Groups(groups.other[:, 0], groups.node[:, None], groups.number)


def room_for_runs(zeros: jax.Array, graph: Any) -> jax.Array:
    """Makes of zeros by destination those by run."""
    if graph.run_owners is None:
        return zeros
    shape = (graph.run_owners.shape[0], *zeros.shape[1:])
    return full_like_operands(zeros, shape, 0, zeros.dtype, (zeros, graph))


def to_runs(graph: Any, chunk: Chunk) -> Chunk:
    """Puts the run of each group in place of its `node`, in a chunk of all groups by destination."""
    return chunk if graph.run_owners is None else replace(chunk, node=in_runs(graph)[0].node)


def to_nodes(graph: Any, chunk: Chunk) -> Chunk:
    """Puts the nodes of its groups in place of the runs, in a chunk of `in_runs`."""
    owners = graph.run_owners
    return chunk if owners is None else replace(chunk, node=_reader(chunk, 0)(owners, chunk.node))


def add_runs(x: jax.Array, graph: Any, sums: jax.Array, in_order: bool) -> jax.Array:
    """Adds the sums of the runs to `x`, by destination."""
    return sums if graph.run_owners is None else add_sorted(x, graph.run_owners, sums, in_order)


def by_number(
    parts: Sequence[tuple[jax.Array, jax.Array]], capacity: int
) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that finds the rows of edges by their numbers; 0 past the end.

    `parts` are pairs (numbers `[(W,) R]`, rows `[(W,) R, H]`), which hold each edge once: where a row lies is
    written in place of the row.
    """
    # where the row of each edge lies, counted through the rows of all parts
    none = sum(number.size for number, _ in parts)
    position, start, tables = jnp.full(capacity, none, jnp.int32), 0, []
    for number, rows in parts:
        at = start + np.arange(number.size, dtype=np.int32)
        position = position.at[number.reshape(-1)].set(at, mode="drop", unique_indices=True)
        tables.append((start, rows.reshape(-1, *rows.shape[number.ndim :])))
        start += number.size

    def find(number):
        at = take(position, number, none)
        return sum(take(rows, jnp.where(at < first, none, at - first)) for first, rows in tables)

    return find


def one_chunk(groups: Sequence[Any], capacity: int, in_order: bool) -> Chunk:
    """Makes one chunk of all `Groups` of a graph, or of some rows of them; it has that capacity."""
    node, other, number, *_ = groups
    if other.shape[1] == 1:
        return Chunk(node, other[:, 0], number[:, 0], None, in_order=in_order)
    number = number.T
    return Chunk(node, other.T, number, number < capacity, in_order=in_order)


def parts(groups: Groups, capacity: int, in_order: bool) -> list[Chunk]:
    """Returns all groups in chunks, which a pass without a loop takes one after the other."""
    order = groups.order
    if order is None:
        return [one_chunk(groups, capacity, in_order)]

    def chunk(rows, levels, has_node=True):
        # past the end there is no group: its places are past the ends of nodes and edges
        node, other, number = (x if rows is None else take(x, rows, _NONE) for x in groups[:3])
        other, number = map(fusion.transposed, (other, number))
        return Chunk(node if has_node else None, other, number, number < capacity, levels, in_order)

    if order.first is None:
        return [chunk(None, order.levels)]
    lead = chunk(order.first, None, has_node=False)
    return [lead, chunk(order.others, order.levels)] if order.others.shape[0] else [lead]


def each(function: Callable[[Chunk], jax.Array], groups: Groups, capacity: int, grid: Grid) -> jax.Array:
    """Calls `function(chunk)` in a loop: `[(W,) R, ...]`, of all groups; `scan` explains the arguments."""
    axis = int(groups.other.shape[1] > 1)  # of the groups
    of_chunk = lambda xs: function(one_chunk(xs, capacity, grid.in_order))
    found = lax.map(of_chunk, in_chunks(tuple(groups[:3]), grid, _NONE))
    found = join(jnp.moveaxis(found, 0, axis), axis)
    return found[(slice(None),) * axis + (slice(groups.node.shape[0]),)]


def scan(
    share: Callable[..., Any],
    fold: Callable[[Any, Any, Chunk], Any],
    carry: Any,
    groups: Groups,
    capacity: int,
    grid: Grid,
    *by_edge: list[jax.Array],
) -> Any:
    """Runs `carry = fold(carry, share(chunk, ...), chunk)` over all groups, of a graph of that capacity.

    `share` computes what a chunk gives; of a loop, once more when the loop is differentiated. It is given the
    chunk's share of `by_edge`, too: arrays `[(W,) R, ...]` of each of `parts`.
    """
    if groups.other.shape[0] == 0:
        return carry

    # without a loop
    if grid.count == 1:
        for chunk, *own in zip(parts(groups, capacity, grid.in_order), *by_edge, strict=True):
            carry = fold(carry, share(chunk, *own), chunk)
        return carry

    # in a loop over the chunks, which lie along a first axis
    share = checkpoint(share, prevent_cse=False)
    axis = int(groups.other.shape[1] > 1)  # of the groups

    def step(carry, xs):
        own, rest = xs
        chunk = one_chunk(own, capacity, grid.in_order)
        return fold(carry, share(chunk, *(jnp.moveaxis(x, 0, axis) for x in rest)), chunk), None

    cut = in_chunks([jnp.moveaxis(x, axis, 0) for (x,) in by_edge], grid, 0)
    return lax.scan(step, carry, (in_chunks(tuple(groups[:3]), grid, _NONE), cut))[0]


def sum_in_runs(
    zeros: jax.Array, graph: Any, share: Callable[..., jax.Array], grid: Grid, *by_edge: list[jax.Array]
) -> jax.Array:
    """Sums what `share` gives, `[R, ...]`, by destination: into runs, from these into nodes; see `scan`."""
    fold = lambda sums, new, chunk: add(sums, chunk, new)
    of_runs, (runs, _) = room_for_runs(zeros, graph), in_runs(graph)
    of_runs = scan(share, fold, of_runs, runs, graph.capacity, grid, *by_edge)
    return add_runs(zeros, graph, of_runs, grid.in_order)


def in_chunks(tree: Any, grid: Grid, none: Any) -> Any:
    """Cuts each array of `tree`, `[total, ...]`, into `[count, size, ...]`, `none` in the padding."""
    count, size, _ = grid

    def cut(x):
        pad = ((0, count * size - x.shape[0]), *((0, 0) for _ in x.shape[1:]))
        return jnp.pad(x, pad, constant_values=none).reshape(count, size, *x.shape[1:])

    return jax.tree.map(cut, tree)
