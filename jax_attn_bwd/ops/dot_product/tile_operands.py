"""The operands in the layout of tiles: heads in front, grouped, sequences padded to whole tiles."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import fusion
from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd._core.pallas import vary_alike
from jax_attn_bwd._core.slicing import take_at
from jax_attn_bwd.ops.dot_product import dropping, fully_masked, layout, masking, mod_functions
from jax_attn_bwd.ops.dot_product.plan import Plan
from jax_attn_bwd.ops.dot_product.spec import Operands, Options


class TileOperands(NamedTuple):
    """The operands of all tiles; queries that see nothing, and keys that nothing sees, are 0."""

    q: jax.Array  # [..., K, G, T, H]
    k: jax.Array  # [..., K, S, H]
    v: jax.Array  # [..., K, S, Hv]
    live: jax.Array | None  # [..., K|1, G|1, T] before padding, which queries see something; None = all
    mask: masking.TileMask  # the bias is part of it
    counters: dropping.Counters | None  # with dropout


class Tile(NamedTuple):
    """What the step of one tile reads."""

    q: jax.Array  # [..., K, G, block_q, H]
    k: jax.Array  # [..., K, block_k, H]
    v: jax.Array  # [..., K, block_k, Hv]
    bias: jax.Array | None  # [..., K|1, G|1, block_q|1, block_k|1]
    seen: jax.Array | None  # likewise; None = all
    places: mod_functions.Tile | None  # where the elements stand, with a `score_mod`


def tile_operands(plan: Plan, operands: Operands) -> TileOperands:
    """Brings the operands into the layout of tiles.

    Inside `jax.shard_map` all vary alike: a derivative by what is the same on all devices is a sum over them,
    and must not stand in a tile that some of them skip, where they would wait for the others for ever.
    """
    options, tiling, operands = plan.options, plan.tiling, vary_alike(operands)
    if operands.mask.elements is not None:
        # XLA would fold the padding and the reductions of a mask that is a constant of the program, which
        # takes it minutes for a few million elements.
        operands = operands.with_arrays({"elements": fusion.barrier(operands.mask.elements)})
    batch, T, S, _, G = operands.sizes
    q, k, v, live = unpoisoned(options, operands)
    blocks = tiling.block_q, tiling.block_k
    mask = masking.tile_mask(operands.mask, operands.bias, T, S, len(batch), G, *blocks)
    if mask.elements is not None:  # padded once: XLA would do so for each of its readers
        mask = mask._replace(elements=fusion.barrier(mask.elements))
    return TileOperands(
        q=layout.pad(q, {-2: tiling.block_q}),
        k=layout.pad(k, {-2: tiling.block_k}),
        v=layout.pad(v, {-2: tiling.block_k}),
        live=live,
        mask=mask,
        counters=dropping.counters(options, operands, *blocks) if options.dropout_rate else None,
    )


def unpoisoned(options: Options, operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    """(q, k, v, live) before padding: NaN where nobody looks would pass through p = 0, so it becomes 0."""
    batch, T, _, _, G = operands.sizes
    q = layout.split_heads(operands.query, G)
    k, v = (jnp.swapaxes(x, -2, -3) for x in (operands.key, operands.value))
    live, seen = fully_masked.live_and_seen_of(operands)
    if live is None and options.score_mod is not None:  # it may give -inf to all that a query sees
        live = jnp.ones((1,) * (len(batch) + 2) + (T,), bool)
    if live is not None:
        live = to_rank(live, q.ndim - 1)
        q = jnp.where(live[..., None], q, 0)
    if seen is not None:
        k, v = (jnp.where(to_rank(seen[..., None], x.ndim), x, 0) for x in (k, v))
    return q, k, v, live


def tile(plan: Plan, w: TileOperands, i: Any, j: Any, mixed: bool) -> Tile:
    """Tile (i, j); unless it is `mixed`, masks and biases alone hide elements of it."""
    tiling, given = plan.tiling, w.mask
    rows, columns = (i, tiling.block_q), (j, tiling.block_k)
    q = take_at(w.q, {-2: rows}).astype(tiling.product_dtype)
    k, v = (take_at(x, {-2: columns}).astype(tiling.product_dtype) for x in (w.k, w.v))
    seen = masking.of_tile(given, i, j, mixed, tiling, w.q.ndim)
    bias, places = None, None
    if given.bias is not None:
        bias = take_at(given.bias, {-2: rows, -1: columns})
    if plan.options.score_mod is not None:
        assert given.places is not None  # prepared with the function
        at = masking.positions(given, i, j, (tiling.block_q, tiling.block_k), w.q.ndim)
        places = mod_functions.Tile(given.places.batch, given.places.head, *at, seen)
    return Tile(q, k, v, bias, seen, places)
