"""(1) of `backward.py`: what the logits are made of, in the forward and in the backward alike."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd.ops.dot_product.spec import Options


def scaled_product(
    options: Options, q: jax.Array, k: jax.Array, dtype: Any, transposed: bool = False
) -> jax.Array:
    """Scale * q k^T of a tile, `[..., K, G, T, S]`, or transposed `[..., K, S, G, T]`.

    Wide factors: the scale goes into q. Then the logits are bare sums of products, the same bits in the
    forward and in the backward, and exp(logits - lse) is exact where one logit of 1e5 takes all. (Where
    it multiplies the logits, compilers contract it with the subtraction, and round differently.)
    """
    in_q = q.dtype == dtype
    q = q * options.scale if in_q else q
    *lead, G, T, H = q.shape
    q, S = q.reshape(*lead, G * T, H), k.shape[-2]
    # XLA:CPU of JAX 0.10 sums in an order that depends on the width of the second factor, so where that
    # may differ the product is taken as in the forward, and transposed afterwards.
    swap = transposed and all(isinstance(n, int) and n % 64 == 0 for n in (G * T, S))
    factors = (k, q) if swap else (q, k)
    logits = jnp.einsum(
        "...ah,...bh->...ab", *factors, precision=options.precision, preferred_element_type=dtype
    )
    logits = logits.reshape(*lead, *((S, G, T) if swap else (G, T, S)))
    if transposed and not swap:
        logits = jnp.moveaxis(logits, -1, -3)
    return logits if in_q else options.scale * logits


def soft_capped(options: Options, logits: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """(soft_cap(logits), its tanh)."""
    if options.logits_soft_cap is None:
        return logits, None
    tanh = jnp.tanh(logits / options.logits_soft_cap)
    return options.logits_soft_cap * tanh, tanh
