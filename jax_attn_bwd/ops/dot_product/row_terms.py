"""Terms of each row beside its softmax: delta (7), and what the sink gives (9), (15).

The numbers are those of `backward.py` and `tangent.py`; every implementation takes them from here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core.numerics import finite, reduce_to, to_rank, total
from jax_attn_bwd._core.products import sum_of_products
from jax_attn_bwd.ops.dot_product import layout, visibility
from jax_attn_bwd.ops.dot_product.spec import Operands, Options, Result


def of_forward(
    operands: Operands, has_wide_out: bool, out: jax.Array, out_rounding: Any, lse: jax.Array, rounding: Any
) -> Result:
    """Lays out `[..., K, G, T, Hv]`, the rounding of its factors and row values `[..., K, G, T]` out.

    As the caller has them, `[..., T, N, Hv]` and `[..., T, N]`, without padding.
    """
    T = operands.sizes.T
    whole = lambda x: layout.merge_heads(x)[..., :T, :, :]
    wide = whole(total(out, out_rounding)) if has_wide_out else None
    lse, rounding = (layout.merge_rows(x)[..., :T, :] for x in (lse, rounding))
    return Result(whole(out).astype(operands.query.dtype), lse, rounding, wide)


def of_backward(
    options: Options, operands: Operands, result: Result, dout: Any, dlse: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns (dout `[..., K, G, T, Hv]`, delta `[..., K, G, T]`); a cotangent that is None is zero."""
    groups = operands.sizes.G
    dout = jnp.zeros_like(result.out) if dout is None else dout
    heads = layout.split_heads(dout, groups)
    return heads, layout.split_rows(delta(options, operands, result, dout, dlse), groups)


class RowTerms(NamedTuple):
    """Values of the rows that the gradients of every element of a row read."""

    dout: jax.Array  # [..., K, G, T, Hv]
    lse: jax.Array  # [..., K, G, T]
    lse_rounding: jax.Array
    delta: jax.Array

    def map(self, f: Callable[[jax.Array, int], jax.Array]) -> "RowTerms":
        """Returns `f(x, the axis of the rows)` of each."""
        return RowTerms(f(self.dout, -2), *(f(x, -1) for x in self[1:]))


def in_rows(result: Result, live: Any, dout: jax.Array, delta: jax.Array) -> RowTerms:
    """Lays the rows out; dout and delta, which may be anything in rows that are not `live`, are 0 there."""
    lse, rounding = (layout.split_rows(x, dout.shape[-3]) for x in finite_lse(result))
    dout, delta = in_live_rows(live, dout, delta)
    return RowTerms(dout, lse, rounding, delta)


def in_live_rows(live: Any, dout: jax.Array, delta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (dout, delta), 0 in rows that see nothing, where they may be anything; `live` None = none."""
    if live is None:
        return dout, delta
    return jnp.where(live[..., None], dout, 0), jnp.where(live, delta, 0)


def finite_lse(result: Result) -> tuple[jax.Array, jax.Array]:
    """Returns (lse, 0 where it is -inf; its rounding), each `[..., T, N]`."""
    lse = finite(result.lse)
    return lse, jnp.zeros_like(lse) if result.lse_rounding is None else result.lse_rounding


def delta(
    options: Options, operands: Operands, result: Result, dout: jax.Array, dlse: jax.Array | None
) -> jax.Array:
    """Computes (7), `[..., T, N]`, from the row values of all keys that the queries attend to."""
    lse = result.lse
    dout = dout.astype(lse.dtype)
    if not visibility.every_query_sees(options, operands):
        dout = jnp.where(sees_nothing(operands, result)[..., None], 0, dout)
    found = sum_of_products(dout, result.widest_out())
    return found if dlse is None else found - finite_rows(options, operands, lse, dlse)


def sees_nothing(operands: Operands, result: Result) -> jax.Array:
    """Tells which rows attend to nothing, bool `[..., T, N]`: their out is 0, their dout may be anything."""
    lse, sink = result.lse, operands.sink
    nothing = -jnp.inf if sink is None else to_rank(sink.astype(lse.dtype), lse.ndim)
    return (lse == nothing) & (result.out == 0).all(-1)


def finite_rows(options: Options, operands: Operands, lse: jax.Array, dlse: jax.Array) -> jax.Array:
    """Returns dlse, 0 where lse is -inf: it may be anything there."""
    if visibility.every_query_sees(options, operands):
        return dlse
    return jnp.where(lse == -jnp.inf, 0, dlse)


def gradient_of_sink(sink: Any, result: Result, delta: Any) -> jax.Array:
    """Computes (9), `[N]`, from delta `[..., T, N]`."""
    return reduce_to(-(_probability_of_sink(sink, result) * delta), sink.shape)


def tangent_of_sink(sink: jax.Array, result: Result, dsink: jax.Array) -> jax.Array:
    """Computes what the sink gives to mu, (15), `[..., T, N]`."""
    lse = result.lse
    return _probability_of_sink(sink, result) * to_rank(dsink.astype(lse.dtype), lse.ndim)


def _probability_of_sink(sink: jax.Array, result: Result) -> jax.Array:
    """Returns exp(sink - lse), `[..., T, N]`; 0 where nothing is seen, and the sink is -inf."""
    lse = jnp.where(result.lse == -jnp.inf, jnp.inf, result.lse)
    rounding = 0 if result.lse_rounding is None else result.lse_rounding
    return jnp.exp((to_rank(sink.astype(lse.dtype), lse.ndim) - lse) - rounding)
