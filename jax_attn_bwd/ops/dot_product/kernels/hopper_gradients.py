"""What the Hopper backward kernels of dense attention share: what was saved, and a tile's arithmetic.

Equation numbers are those of `backward.py`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core import dropout, pallas
from jax_attn_bwd.ops.dot_product.kernels import hopper_tiles as tiles
from jax_attn_bwd.ops.dot_product.kernels.hopper_tiles import Inputs, Tile
from jax_attn_bwd.ops.dot_product.spec import Options


class Saved(NamedTuple):
    """What every backward kernel reads; padded rows have lse = inf, which makes their p 0."""

    refs: Inputs
    dout: Any  # [B, T, N, Hv]
    rows: Any  # float32 [B, N, 2|3, T]: lse in units of the exponent, delta, low with a bias

    def bounded(self, options: Options, rows: int, columns: int, by_key: bool = False) -> "Saved":
        """With the bounds of a kernel's tiles."""
        found = tiles.bounds(options, self.refs, rows, columns, by_key)
        return pallas.vary_alike(self._replace(refs=self.refs._replace(bounds=found)))

    def row_loaders(self, tile: Tile) -> list[Any]:
        """Functions that load lse, delta, low of a tile's queries."""
        rows = self.rows.at[tile.b, tile.n]
        return [partial(tile.vector, rows.at[i], 0) for i in range(self.rows.shape[2])]

    @property
    def head(self) -> int:
        """The larger head size."""
        return max(self.refs.q.shape[-1], self.refs.v.shape[-1])


def at_hand(x):
    """The loader of a value that is in registers."""
    return lambda: x


def probabilities(options, refs: Inputs, products, tile: Tile, mixed, rows, of_bias=False):
    """(p (2), what dlogits are multiplied by) from products q k^T; `rows` load lse, delta and low.

    That is the slope of `score_mod` (8a), and unless they are for a bias that of the soft cap (10); None = 1.
    """
    logits = tiles.logits(options, refs, products, tile, mixed)
    lse, *_ = rows
    low = (lambda: tile.spread(rows[2](), 0)) if len(rows) > 2 else None
    p, slope = logits.exp(tile.spread(lse(), 0), low), None if of_bias else logits.slope
    if logits.before is not None:
        p = jnp.where(tile.spread(lse(), 0) == jnp.inf, 0.0, p)  # a score may be NaN in rows of padding
        by_score = tiles.score_slope(options, refs, logits.before, tile)
        by_score = jnp.where(p == 0.0, 0.0, by_score)  # what is hidden may have no derivative
        slope = by_score if slope is None else by_score * slope
    return p, slope


def signed(options, refs: Inputs, p, tile: Tile):
    """P, negative where dropout drops it: that takes no registers for a mask."""
    kept = tiles.keep(options, refs, tile)
    return p if kept is None else jnp.where(kept, p, -p)


def survivors(options, p, x):
    """`x` where signed p survives dropout, times the factor of survivors."""
    if not options.dropout_rate:
        return x
    return jnp.where(p > 0.0, x * dropout.survivor_factor(options.dropout_rate), 0.0)


def dlogits(options, p, dp, tile: Tile, rows):
    """(8), from signed p; times the slope of the soft cap if that is in p already."""
    dp = survivors(options, p, dp) - tile.spread(rows[1](), 0)
    return (jnp.abs(p) if options.dropout_rate else p) * dp


def zeros(shape, layout):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
