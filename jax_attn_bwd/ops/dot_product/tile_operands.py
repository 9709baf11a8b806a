"""The operands in working layout: heads in front, grouped, sequences padded to whole tiles."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd._core.pallas import vary_alike
from jax_attn_bwd._core.slicing import take_at
from jax_attn_bwd.ops.dot_product import dropping, fully_masked, layout, masking
from jax_attn_bwd.ops.dot_product.spec import Operands, Options
from jax_attn_bwd.ops.dot_product.tiling import Tiling


class Working(NamedTuple):
    """The operands in working layout; queries that see nothing, and keys that nothing sees, are 0."""

    q: jax.Array  # [..., K, G, T, H]
    k: jax.Array  # [..., K, S, H]
    v: jax.Array  # [..., K, S, Hv]
    live: jax.Array | None  # [..., K|1, G|1, T] before padding, which queries see something; None = all
    conditions: masking.Conditions  # the bias among them
    counters: dropping.Counters | None  # with dropout

    @property
    def bias(self) -> jax.Array | None:
        """`[..., K|1, G|1, T|1, S|1]`."""
        return self.conditions.bias


def working(options: Options, operands: Operands, tiling: Tiling) -> Working:
    """Brings the operands into working layout.

    Inside `jax.shard_map` all vary alike: a derivative by what is the same on all devices is a sum over them,
    and must not stand in a tile that some of them skip, where they would wait for the others for ever.
    """
    operands = vary_alike(operands)
    (*batch, T, N, _), (S, K, _) = operands.query.shape, operands.key.shape[-3:]
    groups, blocks = N // K, (tiling.block_q, tiling.block_k)
    q, k, v, live = unpoisoned(options, operands)
    return Working(
        q=layout.pad(q, -2, tiling.block_q),
        k=layout.pad(k, -2, tiling.block_k),
        v=layout.pad(v, -2, tiling.block_k),
        live=live,
        conditions=masking.conditions(operands, T, S, len(batch), groups, *blocks),
        counters=dropping.counters(options, operands, *blocks) if options.dropout_rate else None,
    )


def unpoisoned(options: Options, operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    """(q, k, v, live) as in `Working` before padding: NaN where nobody looks would pass through p = 0."""
    (*batch, T, N, _), (S, K, _) = operands.query.shape, operands.key.shape[-3:]
    q = layout.split_heads(operands.query, N // K)
    k, v = (jnp.swapaxes(x, -2, -3) for x in (operands.key, operands.value))
    live, seen = fully_masked.live_and_seen(options, operands, T, S, len(batch), N // K)
    if live is None and options.score_mod is not None:  # it may give -inf to all that a query sees
        live = jnp.ones((1,) * (len(batch) + 2) + (T,), bool)
    if live is not None:
        live = to_rank(live, q.ndim - 1)
        q = jnp.where(live[..., None], q, 0)
    if seen is not None:
        k, v = (jnp.where(to_rank(seen[..., None], x.ndim), x, 0) for x in (k, v))
    return q, k, v, live


def tile(options: Options, tiling: Tiling, w: Working, i: Any, j: Any, mixed: bool):
    """(q, k, v, visible) of tile (i, j); visible is None if all is seen."""
    q = take_at(w.q, {-2: (i, tiling.block_q)}).astype(tiling.product_dtype)
    k, v = (take_at(x, {-2: (j, tiling.block_k)}).astype(tiling.product_dtype) for x in (w.k, w.v))
    return q, k, v, masking.of_tile(options, w.conditions, i, j, mixed, tiling, w.q.ndim)


def positions(tiling: Tiling, w: Working, i: Any, j: Any) -> tuple[jax.Array, jax.Array]:
    """(rows, columns) of tile (i, j) as `score_mod` is handed them."""
    return masking.positions(w.conditions, i, j, (tiling.block_q, tiling.block_k), w.q.ndim)


def bias_tile(w: Working, i: Any, j: Any, tiling: Tiling) -> jax.Array | None:
    """Tile (i, j) of the bias."""
    if w.bias is None:
        return None
    return take_at(w.bias, {-2: (i, tiling.block_q), -1: (j, tiling.block_k)})
