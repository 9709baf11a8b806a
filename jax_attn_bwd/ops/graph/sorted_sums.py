"""Sums of rows that lie together, in a fixed order, which a scatter has on a CPU alone.

The rows are cut into blocks of B. The last row of a block ends the block's tail, the rows before it of the
same node; the tails, one for each block, are rows again, of which the next level is made. A node's rows, up
to one of them, are then at most B of each level: those of its block, the tails of the blocks before that, and
so on:

    rows    a a b | b b b | b b b | b c c        B = 3; what is summed for b: the rows in its last block,
    tails       b       b       b                then the tails before it

Each level is a B-th of the one before. The kernel that adds reads them all, and nothing else is written.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK = 4


def add(x: jax.Array, node: jax.Array, rows: jax.Array) -> jax.Array:
    """`x` plus `rows` at `node`, which does not decrease; those past the end are dropped."""
    count, nodes = node.shape[0], x.shape[0]
    row = np.arange(count, dtype=np.int32)
    if 16 * count < nodes:  # writes the nodes that have rows
        sums = _up_to(rows, node, jnp.asarray(row), node)
        ends = jnp.concatenate([node[1:] != node[:-1], jnp.ones(1, bool)])
        at = jnp.where(ends, node, nodes + row)  # distinct, and past the end dropped
        return x.at[at].add(sums, mode="drop", unique_indices=True)
    last = jnp.full(nodes, -1, jnp.int32).at[node].max(row, mode="drop", indices_are_sorted=True)
    return x + _up_to(rows, node, last, np.arange(nodes, dtype=np.int32))


def _up_to(rows: jax.Array, node: jax.Array, last: jax.Array, wanted: jax.Array | np.ndarray) -> jax.Array:
    """The sums of the rows of the nodes `wanted` up to the row `last`; 0 where that is -1."""
    spread = lambda x: jnp.expand_dims(x, tuple(range(1, rows.ndim)))
    total = jnp.zeros((last.shape[0], *rows.shape[1:]), rows.dtype)
    while rows.shape[0]:
        for k in range(BLOCK):
            at = last // BLOCK * BLOCK + k
            mine = (at >= 0) & (at <= last) & (node.at[at].get(mode="clip") == wanted)
            total = total + jnp.where(spread(mine), rows.at[at].get(mode="clip"), 0)
        last = last // BLOCK - 1
        if rows.shape[0] < BLOCK:
            break
        rows, node = _tails(rows, node)
    return total


def _tails(rows: jax.Array, node: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of each block's tail, and its node; blocks that are not full have none."""
    count = rows.shape[0] // BLOCK
    blocks, of = (
        lax.slice_in_dim(x, 0, count * BLOCK).reshape(count, BLOCK, *x.shape[1:]) for x in (rows, node)
    )
    total = blocks[:, -1]
    for k in reversed(range(BLOCK - 1)):
        same = jnp.expand_dims(of[:, k] == of[:, -1], tuple(range(1, rows.ndim)))
        total = total + jnp.where(same, blocks[:, k], 0)
    return total, of[:, -1]
