"""Which queries see nothing, and which keys nothing sees: a `Mask` read by row and by column.

NaN in such a row must reach nothing, so both answers are exact. They take memory linear in T and S.
"""

import functools
import math
import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import targets
from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd._core.sharding import full_like_operands
from jax_attn_bwd._core.slicing import put_at, take_at
from jax_attn_bwd.ops.dot_product import masking, mod_functions
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.spec import Operands, Options
from jax_attn_bwd.ops.dot_product.tiling import Tiling, count, of_blocks

BLOCK_ELEMENTS = 1 << 22  # 4 MiB of booleans at a time


def live_and_seen(mask: Mask, bias: Any, T: Any, S: Any, batch_rank: int, groups: int) -> tuple[Any, Any]:
    """(which queries see a key, `[..., K|1, G|1, T]`; which keys a query sees, `[..., K|1, S]`); None = all.

    Both are exact, and in memory linear in T and S: block after block of queries is held against all keys,
    unless causality, windows and lengths alone decide, or an array that is reduced as it lies; with a
    `mask_mod`, tile after tile of those that are neither empty nor full.
    """
    if tells_by_index(mask, bias) or 0 in (T, S):
        live, seen = _by_index(mask, T, S, batch_rank)
        return _unless_all(live), _unless_all(seen)
    if _tells_by_diagonal(mask, bias, T, S) and T == S:
        return None, None
    plane: Any = partial(masking.of_plane, mask, bias, T, S, batch_rank, groups)
    sees = jax.eval_shape(plane)
    if sees is None:
        return None, None
    batch = math.prod(sees.shape[:-2])
    if _is_array(mask, bias):
        return _reduced(plane(), T, S)
    if all(isinstance(n, int) for n in (batch, T, S)) and batch * T * S > BLOCK_ELEMENTS:
        if mask.mask_mod is not None:
            return _tile_after_tile(mask, bias, T, S, batch_rank, groups)
        block = max(1, BLOCK_ELEMENTS // (batch * S))
        return _block_after_block(mask, bias, T, S, batch_rank, groups, block)
    return _reduced(plane(), T, S)


def live_and_seen_of(operands: Operands) -> tuple[Any, Any]:
    """`live_and_seen` of a call."""
    batch, T, S, _, G = operands.sizes
    return live_and_seen(operands.mask, operands.bias, T, S, len(batch), G)


def every_query_sees(options: Options, operands: Operands) -> bool:
    """Whether shapes alone tell that each query sees a key."""
    batch, T, S, _, _ = operands.sizes
    mask, bias = operands.mask, operands.bias
    if options.score_mod is not None:  # which may give -inf
        return False
    if _tells_by_diagonal(mask, bias, T, S):
        return T <= S
    if not tells_by_index(mask, bias):
        return False
    live, _ = _by_index(mask, T, S, len(batch))
    return isinstance(live, np.ndarray) and bool(live.all())


def tells_by_index(mask: Mask, bias: Any) -> bool:
    """Whether who sees whom is a matter of indices and lengths alone."""
    others = bias is not None or mask.has("elements", "query_segment_ids", "mask_mod")
    return not others and not (mask.is_banded and mask.has_positions)


def _tells_by_diagonal(mask: Mask, bias: Any, T: Any, S: Any) -> bool:
    """Whether with a `mask_mod` each query certainly sees the key of its own index, if there is one."""
    if mask.mask_mod is None or bias is not None or not (isinstance(T, int) and isinstance(S, int)):
        return False
    if mask.has_positions or mask.has("elements", "query_origin", "query_segment_ids"):
        return False
    return not mask.has("query_seq_lengths", "key_value_seq_lengths") and mod_functions.sees_diagonal(mask)


def _is_array(mask: Mask, bias: Any) -> bool:
    """Whether an array alone tells who sees whom: it is there already, its reductions take no memory.

    On a CPU a bias is reduced block after block: the sums over its heads and queries took 1.2 of the forward.
    """
    others = "query_segment_ids", "mask_mod", "query_seq_lengths", "key_value_seq_lengths"
    alone = bias is None or (not mask.has("elements") and targets.platform() != "cpu")
    return alone and not mask.is_banded and not mask.has(*others)


def _by_index(mask: Mask, T: Any, S: Any, batch_rank: int) -> tuple[Any, Any]:
    """A query sees an interval of the keys, and a key is seen by one of the queries: is it empty?"""
    far = 2**30
    left, right = mask.window or (far, far)
    left, right = min(left, far), 0 if mask.is_causal else min(right, far)

    def meets(index, others, before, after, end, other_end, other_first=0):
        """Whether each index finds one of the others in [index - before, index + after]."""
        known = all(isinstance(x, int | np.ndarray) for x in (index, others, other_first))
        least, greatest = (np if known else jnp).maximum(index - before, other_first), index + after
        greatest = (np if known else jnp).minimum(greatest, other_first + (others - 1))
        if other_end is not None:
            other_end = other_end[..., None]
            least, greatest = (to_rank(x, other_end.ndim) for x in (least, greatest))
            greatest = jnp.minimum(greatest, other_end - 1)
        found = least <= greatest
        if end is not None:
            end = end[..., None]
            found = to_rank(found, end.ndim) & (to_rank(index, end.ndim) < end)
        return to_rank(found, batch_rank + 1)

    q_end, k_end = mask.query_seq_lengths, mask.key_value_seq_lengths
    range_of = lambda n: (np if isinstance(n, int) else jnp).arange(n, dtype=np.int32)
    rows, columns = masking.Tokens(T, origin=mask.query_origin).in_whole(range_of(T)), range_of(S)
    live = meets(rows, S, left, right, q_end, k_end)
    firsts = [0] if mask.query_origin is None else list(mask.query_origin)
    seen_of = lambda first: meets(columns, T // len(firsts), right, left, k_end, q_end, other_first=first)
    seen = functools.reduce(operator.or_, map(seen_of, firsts))
    return live[..., None, None, :], seen[..., None, :]


def _unless_all(x: Any) -> jax.Array | None:
    """None if shapes alone tell that all is seen."""
    return None if isinstance(x, np.ndarray) and x.all() else jnp.asarray(x)


def _block_after_block(mask, bias, T, S, batch_rank, groups, block) -> tuple[jax.Array, jax.Array]:
    """`live_and_seen`, `block` queries at a time."""
    tiling, origin = Tiling(block, S, "float32"), np.int32(0)
    found = masking.tile_mask(mask, bias, T, S, batch_rank, groups, block)

    def held(i):
        return _reduced(masking.of_tile(found, i, origin, True, tiling, batch_rank + 4), block, S)

    def step(seen, i):
        live, more = held(i)
        return seen | more, live

    first, seen = held(origin)
    seen, others = lax.scan(step, seen, np.arange(1, count(T, block), dtype=np.int32))
    live = jnp.moveaxis(jnp.concatenate([first[None], others]), 0, -2)
    return live.reshape(*live.shape[:-2], -1)[..., :T], seen


def _tile_after_tile(mask, bias, T, S, batch_rank, groups) -> tuple[jax.Array, jax.Array]:
    """`live_and_seen`: tiles that bounds call empty are passed over, and full ones not looked into."""
    block_q, block_k = of_blocks(mask.mask_mod, min(T, 256), min(S, 512))
    tiling, rank = Tiling(block_q, block_k, "float32"), batch_rank + 4
    found = masking.tile_mask(mask, bias, T, S, batch_rank, groups, block_q, block_k)
    some, every, final = masking.known_tiles(found, block_q, block_k)
    pairs: Any = np.argwhere(some).astype(np.int32)
    if not final:
        lives, fulls = masking.of_tiles(
            found.rules, found.rows, found.columns, block_q, block_k, found.places
        )
        batch = tuple(range(lives.ndim - 2))
        some, every = lives.any(batch), fulls.all(batch)
    if not all(x is None for x in (found.elements, found.bias, found.rows.valid_length)):
        every = every & False
    empty_mixed_full = some.astype(np.int32) + (some & every).astype(np.int32)

    def held(i, j):
        return _reduced(masking.of_tile(found, i, j, True, tiling, rank), block_q, block_k)

    first = held(np.int32(0), np.int32(0))
    sizes = (count(T, block_q) * block_q, count(S, block_k) * block_k)
    none = tuple(
        full_like_operands(x, (*x.shape[:-1], n), False, bool, (mask, bias))
        for x, n in zip(first, sizes, strict=True)
    )

    def step(carry, x):
        i, j, kind = x
        blocks = {-1: (i, block_q)}, {-1: (j, block_k)}
        old = tuple(map(take_at, carry, blocks))
        empty = lambda old: old
        mixed = lambda old: tuple(a | b for a, b in zip(old, held(i, j), strict=True))
        full = lambda old: tuple(x | True for x in old)
        new = lax.switch(kind, (empty, mixed, full), old)
        return tuple(map(put_at, carry, new, blocks)), None

    i, j = pairs.T
    live, seen = lax.scan(step, none, (i, j, empty_mixed_full[i, j]))[0]
    return live[..., :T], seen[..., :S]


def _reduced(sees: jax.Array, T: Any, S: Any) -> tuple[jax.Array, jax.Array]:
    """(live, seen) of `sees [..., K|1, G|1, T|1, S|1]`."""
    live, seen = sees.any(-1), sees.any((-3, -2))
    return jnp.broadcast_to(live, (*live.shape[:-1], T)), jnp.broadcast_to(seen, (*seen.shape[:-1], S))
