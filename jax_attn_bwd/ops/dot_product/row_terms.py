"""What is told of each row beside its softmax: delta (7), the gradient of the sink (9), what rounding takes.

The numbers are those of `backward.py`; every implementation takes them from here.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import fusion
from jax_attn_bwd._core.numerics import accumulator_dtype, reduce_to, to_rank
from jax_attn_bwd.ops.dot_product import visibility
from jax_attn_bwd.ops.dot_product.spec import Operands, Options, Result


def in_two(
    options: Options, operands: Operands, out: jax.Array, lost: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """`out` in the dtype of the operands, and if `keeps_low` what rounding took from it, `lost` included."""
    dtype = operands.query.dtype
    if not keeps_low(options, operands):
        return out.astype(dtype), None
    narrow = fusion.rounded(out, dtype)
    low = out - narrow.astype(out.dtype)
    return narrow, (low if lost is None else low + lost).astype(dtype)


def keeps_low(options: Options, operands: Operands) -> bool:
    """Whether what rounding takes from `out` counts.

    An error of delta is one of the whole row of (8). The gradients of bias and of what a score reads sum it
    over the row, and would be wrong by several times what the plain formula is. So does what rounding takes
    from p, where it is a factor in a narrow dtype: the backward's p are not rounded alike.
    """
    dtype = operands.query.dtype
    is_narrow = accumulator_dtype(dtype) != dtype
    return is_narrow and (operands.bias is not None or options.score_mod is not None)


def delta(
    options: Options, operands: Operands, result: Result, dout: jax.Array, dlse: jax.Array | None
) -> jax.Array:
    """(7), `[..., T, N]`, for the row values of all keys that the queries attend to."""
    lse = result.lse
    dout = dout.astype(lse.dtype)
    if not visibility.every_query_sees(options, operands):
        dout = jnp.where(sees_nothing(operands, result)[..., None], 0, dout)
    found = (dout * result.wide_out()).sum(-1)
    return found if dlse is None else found - finite_rows(options, operands, lse, dlse)


def sees_nothing(operands: Operands, result: Result) -> jax.Array:
    """Whether a row attends to nothing, bool `[..., T, N]`: its out is 0, and its dout may be anything."""
    lse, sink = result.lse, operands.sink
    nothing = -jnp.inf if sink is None else to_rank(sink.astype(lse.dtype), lse.ndim)
    return (lse == nothing) & (result.out == 0).all(-1)


def finite_rows(options: Options, operands: Operands, lse: jax.Array, dlse: jax.Array) -> jax.Array:
    """dlse, 0 where lse is -inf: it may be anything there."""
    if visibility.every_query_sees(options, operands):
        return dlse
    return jnp.where(lse == -jnp.inf, 0, dlse)


def gradient_of_sink(sink: jax.Array, result: Result, delta: Any) -> jax.Array:
    """(9), `[N]`, for delta `[..., T, N]`."""
    lse = jnp.where(result.lse == -jnp.inf, jnp.inf, result.lse)  # nothing seen, and a sink of -inf
    low = 0 if result.lse_low is None else result.lse_low
    p = jnp.exp((to_rank(sink.astype(delta.dtype), delta.ndim) - lse) - low)
    return reduce_to(-(p * delta), sink.shape)
