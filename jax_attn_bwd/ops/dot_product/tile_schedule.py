"""The walk over the tiles of the T x S plane.

The portable forward and backward scan one list of (i, j) tile pairs. Causality and windows over plain
indices, and what bounds tell of a `mask_mod` there, drop dead pairs from the list at trace time; where all
others are full nothing is compared, else every tile is mixed: its elements are compared one by one. Lengths,
segments, positions and the arrays of a `mask_mod` are known at run time only: they give each pair a live
flag, and `lax.cond` skips dead ones. No loop has a traced trip count, so the scans have a reverse mode.

Parts of the queries that are a batch axis walk in step: at each step all have the same query tile i, and each
a key tile j of its own list, or one that it does not see where its list is shorter than that of another.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import split
from jax_attn_bwd.ops.dot_product import masking
from jax_attn_bwd.ops.dot_product.masking import Conditions, Tokens
from jax_attn_bwd.ops.dot_product.spec import Options
from jax_attn_bwd.ops.dot_product.tiling import Tiling, count

GROUP = 64  # tiles


def live_tiles(options: Options, given: Conditions, tiling: Tiling) -> jax.Array | None:
    """Whether any batch entry sees anything of each tile, `[n_q, n_k]`; None if all is static."""
    rows, columns, blocks = given.rows, given.columns, (tiling.block_q, tiling.block_k)
    if isinstance(rows.length, int) and isinstance(columns.length, int):
        _, _, final = masking.known_tiles(options, given, *blocks)
        if final:
            return None
    some, _ = masking.of_tiles(options, rows, columns, *blocks, given.places)
    return jnp.asarray(some).any(tuple(range(some.ndim - 2)))


def static_pairs(options: Options, given: Conditions, tiling: Tiling) -> tuple[np.ndarray, np.ndarray]:
    """(full, mixed): the tiles to visit, each `[n, 2]` of (i, j), as far as shapes alone tell."""
    block_q, block_k = tiling.block_q, tiling.block_k
    T, S = given.rows.length, given.columns.length
    some, every, _ = masking.known_tiles(options, given, block_q, block_k)
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
    if tiling.parts > 1:
        return _scan_in_step(step, carry, options, given, tiling, live)
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

    if live is not None and getattr(options.mask_mod, "tile", None) is not None and len(i) > GROUP:
        return _scan_live_first(body, carry, i, j, live[i, j])
    return lax.scan(body, carry, (i, j, None if live is None else live[i, j]))[0]


def _scan_live_first(body, carry, i, j, live):
    """The scan with the tiles that are live first, in their order; groups of dead ones are one step."""
    order = jnp.argsort(~live, stable=True).astype(jnp.int32)
    padding = -len(i) % GROUP
    i, j, live = (jnp.pad(jnp.asarray(x)[order], (0, padding)).reshape(-1, GROUP) for x in (i, j, live))

    def group(carry, x):
        visit = lambda carry: lax.scan(body, carry, x)[0]
        return lax.cond(x[2][0], visit, lambda carry: carry, carry), None

    return lax.scan(group, carry, (i, j, live))[0]


def _scan_in_step(step, carry, options, given, tiling, live):
    """`scan_tiles` of one of the `tiling.parts` of the queries."""
    rows, columns = given.rows, given.columns
    has_positions = rows.position is not None or columns.position is not None
    i, j, mixed = tiles_in_step(options, rows.length, columns.length, has_positions, tiling)
    if not len(i):
        return carry
    j = j[0] if (j == j[0]).all() else jnp.asarray(j)[lax.axis_index(split.AXIS)]
    by_shapes = all(x is None for tokens in (rows._replace(origin=None), columns) for x in tokens[1:])
    if by_shapes and options.mask_mod is None:
        live = None  # beside the origin nothing is known at run time only
    if live is not None:
        live, mixed = lax.pmax(live[i, j].astype(jnp.int32), split.AXIS) > 0, True

    def body(carry, x):
        i, j, live = x
        return step(carry, i, j, mixed, live), None

    return lax.scan(body, carry, (i, j, live))[0]


def tiles_in_step(
    options: Options, T: int, S: int, has_positions: bool, tiling: Tiling
) -> tuple[np.ndarray, np.ndarray, bool]:
    """(i `[n]`, j `[parts, n]`, is one mixed) for parts of T queries each, as far as shapes alone tell."""
    block_q, block_k = tiling.block_q, tiling.block_k
    parts_of_rows = [Tokens(T, origin=part * T) for part in range(tiling.parts)]
    flags = [masking.of_tiles(options, rows, Tokens(S), block_q, block_k) for rows in parts_of_rows]
    some, every = (np.stack(x) for x in zip(*flags, strict=True))
    if has_positions:
        some = np.ones_like(some)
        every = np.full_like(every, not (options.is_causal or options.window is not None))
    every = every & (options.mask_mod is None)  # what bounds tell of one is left to run time
    lists = []
    for i in range(some.shape[1]):
        seen, longest = some[:, i], some[:, i].sum(-1).max()
        if (all_seen := seen.any(0)).sum() == longest:
            j = np.broadcast_to(np.flatnonzero(all_seen), (tiling.parts, longest))
        else:
            j = np.argsort(~seen, axis=-1, kind="stable")[:, :longest]
        lists.append((np.full(longest, i, np.int32), j.astype(np.int32)))
    rows, columns = (np.concatenate(x, -1) for x in zip(*lists, strict=True))
    every = every & (np.arange(1, some.shape[2] + 1) * block_k <= S)
    every = every & (np.arange(1, some.shape[1] + 1)[:, None] * block_q <= T)
    return rows, columns, not every[np.arange(tiling.parts)[:, None], rows, columns].all()
