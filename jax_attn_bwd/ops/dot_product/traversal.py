"""The walk over the tiles of the T x S plane.

The portable forward and backward scan one list of (i, j) tile pairs. Causality and windows over plain
indices, and what bounds tell of a `mask_mod` there, drop dead pairs from the list at trace time; where all
others are full nothing is compared, else every tile is mixed: its elements are compared one by one. Lengths,
segments, positions and the arrays of a `mask_mod` are known at run time only: they give each pair a live
flag, and `lax.cond` skips dead ones. No loop has a traced trip count, so the scans have a reverse mode.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd.ops.dot_product import visibility
from jax_attn_bwd.ops.dot_product.spec import Options
from jax_attn_bwd.ops.dot_product.tiling import Tiling, count
from jax_attn_bwd.ops.dot_product.visibility import Conditions


def live_tiles(options: Options, given: Conditions, tiling: Tiling) -> jax.Array | None:
    """Whether any batch entry sees anything of each tile, `[n_q, n_k]`; None if all is static."""
    rows, columns, blocks = given.rows, given.columns, (tiling.block_q, tiling.block_k)
    if isinstance(rows.length, int) and isinstance(columns.length, int):
        _, _, final = visibility.known_tiles(options, given, *blocks)
        if final:
            return None
    some, _ = visibility.of_tiles(options, rows, columns, *blocks, given.places)
    return jnp.asarray(some).any(tuple(range(some.ndim - 2)))


def static_pairs(options: Options, given: Conditions, tiling: Tiling) -> tuple[np.ndarray, np.ndarray]:
    """(full, mixed): the tiles to visit, each `[n, 2]` of (i, j), as far as shapes alone tell."""
    block_q, block_k = tiling.block_q, tiling.block_k
    T, S = given.rows.length, given.columns.length
    some, every, _ = visibility.known_tiles(options, given, block_q, block_k)
    i, j = np.indices(some.shape, np.int32)
    every = every & ((j + 1) * block_k <= S) & ((i + 1) * block_q <= T)
    pairs = np.stack([i, j], -1)
    return pairs[some & every], pairs[some & ~every]


def scan_tiles(
    step: Callable[..., Any], carry: Any, options: Options, given: Conditions, tiling: Tiling
) -> Any:
    """Runs `carry = step(carry, i, j, mixed, live)` over the tiles that may be seen.

    `live` is None, or a traced bool: the step skips its work where it is False. If one tile is mixed, all are
    compared: a second loop for the full ones would save no time, and cost that of compiling it.
    """
    rows, columns = given.rows, given.columns
    T, S = rows.length, columns.length
    live = live_tiles(options, given, tiling)
    if isinstance(T, int) and isinstance(S, int):
        full, some_seen = static_pairs(options, given, tiling)
        i, j = np.concatenate([full, some_seen]).T
        mixed = len(some_seen) > 0 or live is not None
        if not len(i):
            return carry
    else:
        n_k = count(S, tiling.block_k)
        pair = jnp.arange(count(T, tiling.block_q) * n_k, dtype=jnp.int32)
        i, j, mixed = pair // n_k, pair % n_k, True

    def body(carry, x):
        i, j, live = x
        return step(carry, i, j, mixed, live), None

    return lax.scan(body, carry, (i, j, None if live is None else live[i, j]))[0]
