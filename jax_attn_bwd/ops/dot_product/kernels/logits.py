"""The logits of a tile, written once for the kernels of every chip; equation numbers are of `backward.py`."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd.ops.dot_product.kernels.inputs import LOG2_E, Inputs, is_plain
from jax_attn_bwd.ops.dot_product.spec import KernelOptions


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

    def exp(self, shift: jax.Array, low: Callable[[], jax.Array] | None = None) -> jax.Array:
        """The exponential of logits - shift - low; plain logits have no `low`, and `shift` in units of exp2.

        `low` is loaded when it is needed: registers are scarce.
        """
        if self.is_plain:
            return jnp.exp2(self.x * self.factor - shift)
        x = self.x - shift
        return jnp.exp2((x if low is None else x - low()) * LOG2_E)

    def decay(self, old: jax.Array, new: jax.Array) -> jax.Array:
        """exp(old - new) of two maxima, in the units of `exp`'s `shift`."""
        return jnp.exp2(old - new) if self.is_plain else jnp.exp2((old - new) * LOG2_E)

    def shift(self, top: jax.Array) -> jax.Array:
        """A maximum of x, in the units of `exp`'s `shift`."""
        return top * self.factor if self.is_plain else top

    @property
    def slope(self) -> jax.Array | None:
        """The derivative of the soft cap (10)."""
        return None if self.tanh is None else 1.0 - self.tanh * self.tanh


def unmasked(
    options: KernelOptions,
    refs: Inputs,
    products: jax.Array,
    tanh: Callable[[jax.Array, float], jax.Array],
    plane: Callable[[], jax.Array],
    scored: Callable[[jax.Array], jax.Array],
) -> tuple[Logits, list[jax.Array]]:
    """(logits of the products q k^T, what the bias says of visibility).

    Args:
      options, refs: of the call.
      products: those of the tile.
      tanh: `(x, cap) -> tanh(x / cap)`.
      plane: the tile of the bias.
      scored: `score_mod` of the tile.
    """
    plain, x, factor, capped = is_plain(options, refs), products, options.scale * LOG2_E, None
    terms = []
    if not plain:
        x, factor = x * options.scale, LOG2_E
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
