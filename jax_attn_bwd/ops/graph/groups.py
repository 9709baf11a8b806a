"""Walking over the groups of a graph, a chunk of them at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import backend
from jax_attn_bwd._core.numerics import segment_sums
from jax_attn_bwd.ops.graph.grouping import Groups

_SYMBOLIC_ELEMENTS = 64  # of an edge, where they are not known


class Chunk(NamedTuple):
    """R groups of W edges; an index past the end stands for none."""

    node: jax.Array  # [R]
    other: jax.Array  # [W, R]
    edge: jax.Array  # [W, R]
    exists: jax.Array  # bool [W, R]


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """The rows of `x` at `index`; 0, whatever lies in `x`, for an index past the end."""
    return x.at[index].get(mode="fill", fill_value=0)


def put(x: jax.Array, index: jax.Array, rows: jax.Array) -> jax.Array:
    """`x` with `rows` at `index`, each row once; those past the end are dropped."""
    return x.at[index].set(rows.astype(x.dtype), mode="drop", unique_indices=True)


def add(x: jax.Array, index: jax.Array, rows: jax.Array) -> jax.Array:
    """`x` plus `rows` at `index`, which does not decrease; those past the end are dropped.

    The order of the sum is fixed: a CPU adds one row after the other; elsewhere, where a scatter adds in
    any order, the rows of one index are summed first and then written once.
    """
    rows = rows.astype(x.dtype)
    if backend.target_platform() == "cpu":
        return x.at[index].add(rows, mode="drop", indices_are_sorted=True)
    start = jnp.concatenate([jnp.ones(1, bool), index[1:] != index[:-1]])
    sums = segment_sums(rows, jnp.expand_dims(start, tuple(range(1, rows.ndim))), axis=0)
    last = jnp.concatenate([start[1:], jnp.ones(1, bool)])
    past = x.shape[0] + np.arange(index.shape[0], dtype=np.int32)  # distinct, and all dropped
    return x.at[jnp.where(last, index, past)].add(sums, mode="drop", unique_indices=True)


def scan(
    body: Callable[[Any, Chunk], Any], carry: Any, groups: Groups, capacity: int, elements: Any
) -> Any:
    """`body(carry, chunk)` over all groups, in order.

    Args:
      body: returns the new carry.
      carry: loop state.
      groups: of the graph.
      capacity: of the graph.
      elements: of the largest array that the body makes of an edge; may be symbolic.
    """
    total, width = groups.other.shape
    if total == 0:
        return carry
    if not isinstance(elements, int):
        elements = _SYMBOLIC_ELEMENTS
    size = max(8, chunk_elements() // max(width * elements, 1))
    count = -(-total // size)
    size = -(-total // count)

    def chunks(x, none):
        pad = ((0, count * size - total), *((0, 0) for _ in x.shape[1:]))
        return jnp.pad(x, pad, constant_values=none).reshape(count, size, *x.shape[1:])

    none = np.int32(2**31 - 1)

    def step(carry, chunk):
        node, other, edge = chunk[0], chunk[1].T, chunk[2].T
        return body(carry, Chunk(node, other, edge, edge < capacity)), None

    return lax.scan(step, carry, Groups(*(chunks(x, none) for x in groups)))[0]


def chunk_elements() -> int:
    """Elements of the largest array of a chunk: what the cache of a CPU holds, or what occupies a GPU."""
    return 1 << 18 if backend.target_platform() == "cpu" else 1 << 24
