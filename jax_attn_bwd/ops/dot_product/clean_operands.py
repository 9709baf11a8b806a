"""Operands as every way of computing reads them: all keys on each device, no poison, known places."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core.numerics import moved, to_rank
from jax_attn_bwd._core.sharding import unsharded
from jax_attn_bwd.ops.dot_product import layout, mod_functions, visibility
from jax_attn_bwd.ops.dot_product.spec import Operands, Options
from jax_attn_bwd.ops.dot_product.visibility import TileMask


def with_whole_keys(operands: Operands) -> Operands:
    """Returns `operands` with all keys on every device, as far as types tell."""
    whole: Callable[[Any], Any] = lambda x: None if x is None else unsharded(x, -3)
    return operands._replace(key=whole(operands.key), value=whole(operands.value))


def unpoisoned(options: Options, operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    """Returns (q, k, v, live) before padding, in the layout of tiles, without poison.

    NaN where nobody looks would pass through p = 0, so it becomes 0. Which queries are `live` is told as
    `TileSource` has it.
    """
    sizes = operands.sizes
    q = layout.split_heads(operands.query, sizes.G)  # [..., K, G, T, H]
    k, v = (moved(x, -2, -3) for x in (operands.key, operands.value))  # [..., K, S, H]

    # Queries that see nothing, and keys that nothing sees, become 0.
    live, seen = visibility.used_queries_and_keys(operands.mask, operands.bias, sizes)
    if live is None and options.score_mod is not None:  # it may give -inf to all that a query sees
        live = jnp.ones((1,) * (len(sizes.batch) + 2) + (sizes.T,), bool)
    if live is not None:
        live = to_rank(live, q.ndim - 1)
        q = jnp.where(live[..., None], q, 0)
    if seen is not None:
        k, v = (jnp.where(to_rank(seen[..., None], x.ndim), x, 0) for x in (k, v))
    return q, k, v, live


def places(
    options: Options, given: TileMask, row: Any, column: Any, blocks: tuple[Any, Any], seen: Any
) -> tuple[mod_functions.Elements | None, tuple[Any, ...]]:
    """Returns where the elements of a tile stand, if a score reads it, and the arrays that it reads."""
    if options.score_mod is None:
        return None, ()
    assert given.places is not None  # prepared with the function
    batch, head, args = given.places
    position = visibility.positions(given, row, column, blocks, batch.ndim)
    return mod_functions.Elements(batch, head, *position, seen), args
