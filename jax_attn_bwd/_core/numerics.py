"""Small numerical helpers shared by all operators.

**Rounding** is what rounding took from a number, x - fl(x), and is kept beside it where it would be missed. A
row of 1,024 logits of -1e9 has m = -1e9 and log l = 6.93. Its lse = m + log l is -1e9 again, as numbers of
float32 are 64 apart there, and the rounding is 6.93: exp(logits - lse) would be 1 for each key, and
exp((logits - lse) - rounding) is 1 / 1,024 (`fast_two_sum`). The probability 0.1 is 0.10009766 in bfloat16,
with the rounding -0.000098: a product with values that sums rows is made of both (`rounding_of`). An output
that rows are summed of is kept as it was before (`narrowed`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap


def accumulator_dtype(dtype: Any) -> jnp.dtype:
    """Returns float32 for float32 and narrower, float64 for float64."""
    return jnp.dtype("float64" if dtype == "float64" else "float32")


def ceil_div(n: Any, size: Any) -> Any:
    """Returns the number of blocks of `size` that cover `n`; either may be symbolic."""
    return -(-n // size)


def round_up(n: Any, size: Any) -> Any:
    """Returns the least multiple of `size` that covers `n`."""
    return ceil_div(n, size) * size


def finite(m: jax.Array) -> jax.Array:
    """Returns `m` with 0 for the -inf of a row that sees nothing, so that exp(-inf - m) is 0, not NaN."""
    return jnp.where(m == -jnp.inf, 0.0, m)  # as `lax.select` Mosaic GPU does not lower it


def total(*terms: Any) -> Any:
    """Adds the terms that are not None, in their order; None where there is none."""
    given = [x for x in terms if x is not None]
    return sum(given[1:], start=given[0]) if given else None


def fast_two_sum(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (x + y, the rounding of that sum), the second without a derivative; exact where |x| >= |y|."""
    total = x + y
    return total, lax.stop_gradient((x - total) + y)


def rounding_between(x: jax.Array, narrow: jax.Array) -> jax.Array:
    """Returns the rounding of `x` where it became `narrow`, in the dtype of that; in a kernel."""
    return (x - narrow.astype(x.dtype)).astype(narrow.dtype)


def rounding_of(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns the rounding of `x`, float32, where it becomes a narrower `dtype`, in it; no derivative.

    Rounded by the bits, as XLA:GPU takes a conversion there and back for nothing.
    """
    cut = 23 - jnp.finfo(dtype).nmant
    bits = lax.bitcast_convert_type(x, jnp.int32)
    bits = (bits + (1 << (cut - 1)) - 1 + (bits >> cut & 1)) & -(1 << cut)
    return lax.stop_gradient(x - lax.bitcast_convert_type(bits, jnp.float32)).astype(dtype)


def narrowed(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """Returns (`x` in `dtype`, `x` itself for who sums over it; None where it is not wider)."""
    return x.astype(dtype), None if x.dtype == dtype else x


def to_rank(x: jax.Array, rank: int) -> jax.Array:
    """Puts axes of size 1 in front of `x` up to `rank`: ranks are promoted in the open, never implicitly."""
    return x.reshape((1,) * (rank - x.ndim) + x.shape)


def moved(x: jax.Array, source: int, destination: int) -> jax.Array:
    """Moves an axis as `jnp.moveaxis` does, which is jitted and takes five times as long to trace."""
    axes = list(range(x.ndim))
    axes.insert(destination % x.ndim, axes.pop(source))
    return lax.transpose(x, axes)


def reduce_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sums `x` over the axes that `shape` broadcasts, so that the result has `shape`."""
    extra = x.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(
        extra + i for i, n in enumerate(shape) if n == 1 and x.shape[extra + i] != 1
    )
    return x.sum(axes, keepdims=True).reshape(shape) if axes else x


def fits_int32(x: Any) -> bool:
    """Tells whether each integer of the dtype of `x` is an int32, or the values are known, and checked."""
    return not isinstance(x, jax.core.Tracer) or jnp.can_cast(x.dtype, jnp.int32)


def saturated(x: jax.Array, least: int = -(2**31), greatest: int = 2**31 - 1) -> jax.Array:
    """Returns integers as int32; traced ones of a wider dtype beyond the bounds become the nearer bound."""
    return (x if fits_int32(x) else jnp.clip(x, least, greatest)).astype(jnp.int32)


def ranks(one: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two rows of integers `[..., length]` as int32 that are ordered, and equal, as they are."""
    row = jnp.concatenate([one, other], -1)
    values, position = lax.sort((row, lax.broadcasted_iota(jnp.int32, row.shape, row.ndim - 1)), num_keys=1)
    is_new = jnp.concatenate([jnp.zeros_like(values[..., :1], bool), values[..., 1:] != values[..., :-1]], -1)
    number = jnp.cumsum(is_new, -1, dtype=jnp.int32)
    _, number = lax.sort((position, number), num_keys=1)
    return number[..., : one.shape[-1]], number[..., one.shape[-1] :]


def soft_cap_is_identity(cap: float, dtype: Any) -> bool:
    """Tells whether `x / cap` is flushed to 0 in `dtype` where x is not small beside 1, so large is `cap`.

    There tanh is the identity, whose product with `cap` is x.
    """
    info = jnp.finfo(dtype)
    return cap * float(info.tiny) >= float(info.eps)


def segment_sums(rows: jax.Array, first: jax.Array, axis: int) -> jax.Array:
    """Sums `rows` along `axis`, anew from each `first` (bool, broadcasts to `rows`); returns running sums.

    Rows are added in their order: the bits are the same in every run, also on a GPU.
    """

    def combine(left, right):
        (left_first, left_sum), (right_first, right_sum) = left, right
        return left_first | right_first, jnp.where(right_first, right_sum, left_sum + right_sum)

    return lax.associative_scan(combine, (first, rows), axis=axis)[1]


@custom_vmap
def any_of_batch(x: jax.Array) -> jax.Array:
    """Returns `x`, bool; under `vmap` whether it is so in any entry of the batch.

    Then a `lax.cond` on it runs one branch. On a bool of each entry it would run both.
    """
    return x


@any_of_batch.def_vmap
def _any_of_batch_in_vmap(size: int, in_batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    return any_of_batch(x.any(0) if in_batched[0] else x), False
