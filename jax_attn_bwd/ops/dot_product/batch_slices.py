"""A batch worked through slice after slice: what one slice computes stays in the cache."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import dropout
from jax_attn_bwd.ops.dot_product.spec import Operands

_OWN_AXES = {  # how many axes come after those of the batch
    "query": 3,
    "key": 3,
    "value": 3,
    "bias": 3,
    "mask": 3,
    "query_seq_lengths": 0,
    "key_value_seq_lengths": 0,
    "query_segment_ids": 1,
    "key_value_segment_ids": 1,
    "query_positions": 1,
    "key_value_positions": 1,
    "mod_batch": 0,
}


def sliced(operands: Operands) -> frozenset[str]:
    """The operands that have the first batch axis; all slices share the others."""
    batch_axes = operands.query.ndim - 3
    if batch_axes == 0:
        return frozenset()
    return frozenset(
        name
        for name, own in _OWN_AXES.items()
        for x in [getattr(operands, name)]
        if x is not None and x.ndim == batch_axes + own and x.shape[0] != 1
    )


def over_slices(
    fn: Callable[[Operands, Any], tuple[Any, Any]], count: int, operands: Operands, rows: Any, sums: Any
) -> tuple[Any, Any]:
    """`fn(operands, rows) -> (results, shares)` of the whole batch.

    Args:
      fn: computes it of some of the batch.
      count: number of slices; divides the first batch axis.
      operands: of the call.
      rows: further arrays with all batch axes, sliced likewise.
      sums: zeros that the shares of the slices are added to.

    Returns:
      `(results, sums)`: the slices' results, which have all batch axes, put together; and the sums.
    """
    if count == 1:
        return fn(operands, rows)
    names = sliced(operands)
    split = lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:])
    slices = {name: split(getattr(operands, name)) for name in names}
    entries = math.prod(operands.query.shape[:-3]) // count
    first = entries * jnp.arange(count, dtype=jnp.uint32)

    def body(sums, x):
        taken, rows, first = x
        results, shares = fn(_beginning_at(operands._replace(**taken), first), rows)
        return jax.tree.map(jnp.add, sums, shares), results

    sums, results = lax.scan(body, sums, (slices, jax.tree.map(split, rows), first))
    join = lambda x: x.reshape(count * x.shape[1], *x.shape[2:])
    return jax.tree.map(join, results), sums


def _beginning_at(operands: Operands, first: jax.Array) -> Operands:
    """`operands` of a slice whose first batch entry is number `first`: that is where its dropout lies."""
    if operands.dropout_words is None:
        return operands
    zero = jnp.uint32(0)
    offset = operands.dropout_offset or dropout.Offset(zero, zero, zero, zero)
    return operands._replace(dropout_offset=offset._replace(batch=offset.batch + first))
