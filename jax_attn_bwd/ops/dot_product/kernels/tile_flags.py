"""What is known of each tile before a kernel runs: whether anything of it is seen, or all."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd.ops.dot_product import visibility
from jax_attn_bwd.ops.dot_product.kernels import functions
from jax_attn_bwd.ops.dot_product.kernels.inputs import Inputs
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.spec import KernelOptions
from jax_attn_bwd.ops.dot_product.visibility import Tokens


class Flags(NamedTuple):
    """What is known of each tile, `[B|1, query tiles, key tiles]`; NumPy arrays if shapes alone decide."""

    some: Any  # whether anything of it is seen; never False where something is
    every: Any  # whether all of it is but what a bias hides; never True where something else is hidden
    by_shapes: Any = None  # NumPy: where shapes alone leave something to be seen; None = they do not tell


def tile_flags(options: KernelOptions, refs: Inputs, rows: int, columns: int, common: int = 128) -> Flags:
    """As far as causality, window, lengths, segments, `mask_mod`, the mask and a bias of -inf tell.

    Arrays are reduced to tiles of `common` rows and columns first, which the kernels of a call may have in
    common: XLA finds that, and reads the array once for all of them.
    """
    queries = Tokens(refs.q.shape[1], refs.row_position, refs.row_segment, refs.rows_end)
    keys = Tokens(refs.k.shape[1], refs.column_position, refs.column_segment, refs.columns_end)
    mask_mod, places = functions.bounded(options, refs, rows, columns)
    rules = Mask(options.is_causal, options.window, mask_mod)
    some, every = (to_rank(x, 3) for x in visibility.of_tiles(rules, queries, keys, rows, columns, places))
    by_shapes = some if isinstance(some, np.ndarray) else None
    small = math.gcd(rows, common), math.gcd(columns, common)
    over_tiles = partial(_over_tiles, sizes=(small, (rows // small[0], columns // small[1])))
    if refs.mask is not None:
        some = some & (over_tiles(refs.mask, jnp.max) != 0)
        every = every & (over_tiles(refs.mask, jnp.min) != 0)
    if refs.bias is not None:
        some = some & over_tiles(refs.bias != -jnp.inf, jnp.any)
    return Flags(some, every, by_shapes)


def _over_tiles(plane: jax.Array, reduction: Any, sizes: Sequence[tuple[int, int]]) -> jax.Array:
    """The elements of each tile reduced to one, over heads, `[B|1, query tiles|1, key tiles|1]`.

    In steps: each of the sizes is told in tiles of the one before it.
    """
    for size in sizes:
        B, N, *lengths = plane.shape
        (n_q, rows), (n_k, columns) = (
            (1, 1) if n == 1 else (n // block, block) for n, block in zip(lengths, size, strict=True)
        )
        plane = reduction(plane.reshape(B, N, n_q, rows, n_k, columns), (1, 3, 5))[:, None]
    return plane[:, 0]


def live_first(live: Any) -> tuple[Any, Any]:
    """Along the last axis: (where something is live, in order, then the others; how many are, `[..., 1]`)."""
    xp: Any = np if isinstance(live, np.ndarray) else jnp
    return xp.argsort(~live, axis=-1, stable=True), live.sum(-1, keepdims=True)
