"""Shared by the kernels of every chip: whether a tile is visited, and what its logits are.

Flags of tiles are made by XLA before a kernel runs, logits in the kernel; equation numbers are of
`backward.py`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd.ops.dot_product import visibility
from jax_attn_bwd.ops.dot_product.kernels import functions
from jax_attn_bwd.ops.dot_product.kernels.inputs import LOG2_E, Inputs, at, is_plain
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.spec import KernelOptions
from jax_attn_bwd.ops.dot_product.visibility import Tokens


class Flags(NamedTuple):
    """Two flags for each tile, `[B|1, query tiles, key tiles]`; NumPy arrays if shapes alone decide."""

    some: Any  # whether anything of it is seen; never False where something is
    every: Any  # whether all of it is but what a bias hides; never True where something else is hidden
    by_shapes: Any = None  # NumPy: where shapes alone leave something to be seen; None = they do not tell


def tile_flags(options: KernelOptions, refs: Inputs, rows: int, columns: int, common: int = 128) -> Flags:
    """Flags tiles as causality, window, lengths, segments, `mask_mod`, the mask and a bias of -inf tell.

    Arrays are reduced to tiles of `common` rows and columns first, which the kernels of a call may have in
    common: XLA finds that, and reads the array once for all of them.
    """
    # by the least and greatest index, position and segment of the tokens of a tile
    queries = Tokens(refs.q.shape[1], refs.row_position, refs.row_segment, refs.rows_end)
    keys = Tokens(refs.k.shape[1], refs.column_position, refs.column_segment, refs.columns_end)
    mask_mod, places = functions.mask_for_bounds(options, refs, rows, columns)
    rules = Mask(options.is_causal, options.window, mask_mod)
    some, every = (to_rank(x, 3) for x in visibility.of_tiles(rules, queries, keys, rows, columns, places))
    by_shapes = some if isinstance(some, np.ndarray) else None
    # by all elements of the mask and of the bias
    small = math.gcd(rows, common), math.gcd(columns, common)
    over_tiles = partial(_over_tiles, sizes=(small, (rows // small[0], columns // small[1])))
    if refs.mask is not None:
        some = some & (over_tiles(refs.mask, jnp.max) != 0)
        every = every & (over_tiles(refs.mask, jnp.min) != 0)
    if refs.bias is not None:
        some = some & over_tiles(refs.bias != -jnp.inf, jnp.any)
    return Flags(some, every, by_shapes)


def _over_tiles(plane: jax.Array, reduction: Any, sizes: Sequence[tuple[int, int]]) -> jax.Array:
    """Reduces the elements of each tile to one, over heads, `[B|1, query tiles|1, key tiles|1]`.

    In steps: each of the sizes counts tiles of the one before it.
    """
    for size in sizes:
        B, N, *lengths = plane.shape
        (n_q, rows), (n_k, columns) = (
            (1, 1) if n == 1 else (n // block, block) for n, block in zip(lengths, size, strict=True)
        )
        plane = reduction(plane.reshape(B, N, n_q, rows, n_k, columns), (1, 3, 5))[:, None]
    return plane[:, 0]


def live_first(live: Any) -> tuple[Any, Any]:
    """Returns (live places in order, then the others; how many are live `[..., 1]`) along the last axis."""
    xp: Any = np if isinstance(live, np.ndarray) else jnp
    return xp.argsort(~live, axis=-1, stable=True), live.sum(-1, keepdims=True)


def seen(part: Any, b: Any) -> list[Any]:
    """Lists what is seen by index, position, segment, mask array and function, in a kernel.

    `part` is what a chip has of a tile, of batch entry `b`: `hopper_tiles.Tile`, `tpu_tiles.Part`.
    """
    options, refs, terms = part.options, part.refs, []
    if options.is_causal or options.window is not None:
        terms.append(part.in_band())
    # lengths, or the end of the keys where their number is not whole
    if refs.columns_end is not None:
        end = refs.columns_end[at(refs.columns_end, 0, b)]
        terms.append(part.offset(1) < end - part.start(1))
    if refs.row_segment is not None:
        terms.append(part.tokens("row_segment") == part.tokens("column_segment"))
    if refs.mask is not None:
        terms.append(part.elements() != 0)
    if options.mask_mod is not None:
        terms.append(part.by_function(options.mask_mod))
    return terms


class Logits(NamedTuple):
    """The logits of a tile, -inf where nothing is seen.

    Plain ones (`is_plain`) are factor * x in units of exp2: one multiplication an element. Others are x, in
    natural units, so that a maximum is subtracted before anything is rounded: huge tied logits stay exact.
    """

    x: jax.Array
    factor: float
    tanh: jax.Array | None  # of the soft cap
    is_plain: bool
    before: jax.Array | None = None  # what `score_mod` was handed

    def exp(self, shift: jax.Array, rounding: Callable[[], jax.Array] | None = None) -> jax.Array:
        """Computes the exponential of logits - shift - rounding.

        Plain logits have no `rounding`, and `shift` in units of exp2. It is loaded when it is needed:
        registers are scarce.
        """
        if self.is_plain:
            return jnp.exp2(self.x * self.factor - shift)
        x = self.x - shift
        return jnp.exp2((x if rounding is None else x - rounding()) * LOG2_E)

    def decay(self, old: jax.Array, new: jax.Array) -> jax.Array:
        """Computes exp(old - new) of two maxima, in the units of `exp`'s `shift`."""
        return jnp.exp2(old - new) if self.is_plain else jnp.exp2((old - new) * LOG2_E)

    def shift(self, top: jax.Array) -> jax.Array:
        """Returns a maximum of x in the units of `exp`'s `shift`."""
        return top * self.factor if self.is_plain else top

    @property
    def slope(self) -> jax.Array | None:
        """Returns the derivative of the soft cap (10)."""
        return None if self.tanh is None else 1.0 - self.tanh * self.tanh


def unmasked(
    options: KernelOptions,
    refs: Inputs,
    products: jax.Array,
    tanh: Callable[[jax.Array, float], jax.Array],
    plane: Callable[[], jax.Array],
    scored: Callable[[jax.Array], jax.Array],
) -> tuple[Logits, list[jax.Array]]:
    """Returns (logits of the products q k^T, what the bias says of visibility).

    Args:
      options, refs: of the call.
      products: those of the tile.
      tanh: `(x, cap) -> tanh(x / cap)`.
      plane: the tile of the bias.
      scored: `score_mod` of the tile.
    """
    # the scale goes into the exponent, or is multiplied with the products
    plain, x, factor, capped = is_plain(options, refs), products, options.scale * LOG2_E, None
    terms = []
    if not plain:
        x, factor = x * options.scale, LOG2_E
    # soft cap, bias, score
    if options.logits_soft_cap is not None:
        capped = tanh(x, options.logits_soft_cap)
        x = options.logits_soft_cap * capped
    if refs.bias is not None:
        bias = plane()
        x = x + bias
        terms.append(bias != -jnp.inf)
    if options.score_mod is None:
        return Logits(x, factor, capped, plain), terms
    return Logits(scored(x), factor, capped, plain, before=x), terms
