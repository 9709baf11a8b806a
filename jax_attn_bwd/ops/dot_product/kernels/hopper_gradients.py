"""Shared by the Hopper backward kernels of dense attention: what was saved, and a tile's arithmetic.

Equation numbers are those of `backward.py`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core import dropout, pallas
from jax_attn_bwd.ops.dot_product.kernels import hopper_tiles as tiles
from jax_attn_bwd.ops.dot_product.kernels.blocks import Words
from jax_attn_bwd.ops.dot_product.kernels.hopper_tiles import Tile
from jax_attn_bwd.ops.dot_product.kernels.inputs import Inputs
from jax_attn_bwd.ops.dot_product.spec import KernelOptions


class Saved(NamedTuple):
    """The arrays that every backward kernel reads; padded rows have lse = inf, which makes their p 0."""

    refs: Inputs
    dout: Any  # [B, T, N, Hv]
    rows: Any  # float32 [B, N, 2|3, T]: lse in units of the exponent, delta, rounding with a bias

    def with_bounds(self, options: KernelOptions, rows: int, columns: int, **how: bool) -> "Saved":
        """Adds the bounds of a kernel's tiles; `how` as in `hopper_tiles.bounds`."""
        found = tiles.bounds(options, self.refs, rows, columns, **how)
        return pallas.vary_alike(self._replace(refs=self.refs._replace(bounds=found, mod_args=())))

    def row_loaders(self, tile: Tile) -> list[Any]:
        """Returns functions that load lse, delta, rounding of a tile's queries."""
        rows = self.rows.at[tile.b, tile.n]
        return [partial(tile.vector, rows.at[i], 0) for i in range(self.rows.shape[2])]

    @property
    def has_blocks(self) -> bool:
        """Tells whether a mask is handed values of blocks."""
        return any(isinstance(x, Words) for x in self.refs.mask_values)

    @property
    def head(self) -> int:
        """Returns the larger head size."""
        return max(self.refs.q.shape[-1], self.refs.v.shape[-1])


def value_sides(refs: Inputs) -> list[int]:
    """Returns 0 for each float that `score_mod` is handed of a row or of all, 1 for each of a column."""
    return [int(x.shape[-1] != 1) for x in refs.score_values if x.dtype == jnp.float32]


def loader_of(x):
    """Returns the loader of a value that is in registers."""
    return lambda: x


class Weights(NamedTuple):
    """The probabilities of a tile, and what is left of the way from its dlogits (8) to dx (10).

    Attributes:
      p: (2).
      slope: what p is multiplied by for dlogits, of the soft cap (10) and of `score_mod` (8a); None = 1.
      later: what dlogits are multiplied by, where that is not to be in p.
      before: what `score_mod` was handed, if its derivative is in neither.
    """

    p: Any
    slope: Any = None
    later: Any = None
    before: Any = None

    def with_slope(self) -> jax.Array:
        """Multiplies p by the slope."""
        return self.p if self.slope is None else self.p * self.slope

    def after_p(self) -> "Weights":
        """Returns what is left of them when p is used."""
        return self._replace(p=None, slope=None)


def weights(tile: Tile, products, mixed, rows, of_bias=False, to_values=False) -> Weights:
    """Computes `Weights` from products q k^T; `rows` load lse, delta and rounding.

    What is for a bias has no slope of the soft cap. For the values of the score its derivative is taken of
    dlogits. With dropout the sign of p says what is dropped: a slope that may be negative comes later.
    """
    # p = exp(logits - lse) (2), with the rounding of lse
    logits = tile.logits(products, mixed)
    lse, *_ = rows
    rounding = (lambda: tile.spread(rows[2](), 0)) if len(rows) > 2 else None
    p, slope = logits.exp(tile.spread(lse(), 0), rounding), None if of_bias else logits.slope
    # without a score the slope of the soft cap is all that is left
    if logits.before is None:
        return Weights(p, slope)
    p = jnp.where(tile.spread(lse(), 0) == jnp.inf, 0.0, p)  # a score may be NaN in rows of padding
    if to_values:
        return Weights(p, later=slope, before=logits.before)
    # (8a) is a product with the derivative of the score: a factor of p, or of dlogits later
    by_score = tile.score_slope(logits.before)
    by_score = jnp.where(p == 0.0, 0.0, by_score)  # what is hidden may have no derivative
    by_score = by_score if slope is None else by_score * slope
    return Weights(p, later=by_score) if tile.options.dropout_rate else Weights(p, by_score)


def signed(tile: Tile, p):
    """Makes p negative where dropout drops it: that takes no registers for a mask."""
    kept = tile.keep()
    return p if kept is None else jnp.where(kept, p, -p)


def survivors(options, p, x):
    """Returns `x` times the factor of survivors where signed p survives dropout, else 0."""
    if not options.dropout_rate:
        return x
    return jnp.where(p > 0.0, x * dropout.survivor_factor(options.dropout_rate), 0.0)


def dlogits(tile: Tile, p, dp, rows):
    """Computes (8) from signed p; times the slope of the soft cap if that is in p already."""
    dp = survivors(tile.options, p, dp) - tile.spread(rows[1](), 0)
    return (jnp.abs(p) if tile.options.dropout_rate else p) * dp


def through_score(tile: Tile, found: Weights, dlogits, side=None):
    """Returns (dx, what elements add to the gradient of each float on that side) from dlogits.

    `side` is one of `value_sides`.
    """
    dx, dvalues = dlogits, []
    if found.before is not None:
        through = tile.pulled_back(found.before, dlogits)
        # what is hidden may have no derivative
        dx, dvalues = jax.tree.map(lambda x: jnp.where(dlogits == 0.0, 0.0, x), through)
        dvalues = [x for x, of in zip(dvalues, value_sides(tile.refs), strict=True) if of == side]
    return dx if found.later is None else dx * found.later, dvalues


def zeros(shape, layout):
    """Returns zeros in registers of that layout."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
