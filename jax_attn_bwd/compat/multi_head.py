"""What the multi-head calls of other systems share: their arrays and masks, weights after dropout."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks, dropout
from jax_attn_bwd._core.numerics import accumulator_dtype, to_rank


def arrays(operator: str, needed: tuple[str, ...], **given: Any) -> dict[str, Any]:
    """`given` as floating-point arrays of one dtype; None, which those `needed` must not be, stays None."""
    found = {
        name: checks.floating(operator, name, x)
        for name, x in given.items()
        if x is not None or name in needed
    }
    checks.same_dtype(operator, **found)
    return given | found


def integer(operator: str, argument: str, n: Any, least: int = 0) -> int:
    """A Python int, `least` or more."""
    return checks.integer(operator, argument, n, least)


def heads(operator: str, num_heads: Any, **widths: Any) -> int:
    """The number of heads, which divides each of `widths`."""
    num_heads = integer(operator, "num_heads", num_heads, 1)
    for argument, n in widths.items():
        if integer(operator, argument, n) % num_heads:
            expected = f"be a multiple of num_heads = {num_heads}"
            raise ValueError(checks.message(operator, argument, expected, n))
    return num_heads


def both(operator: str, **rows: Any) -> None:
    """Either both arguments are given or neither."""
    for one, other in zip(rows, reversed(rows), strict=True):
        if rows[one] is not None and rows[other] is None:
            expected = f"be given together with {one}: they are one key and its value"
            raise ValueError(checks.message(operator, other, expected, None))


def mask(operator: str, argument: str, x: Any) -> jax.Array:
    """`x` as an array: boolean, True = masked, or floating, added to the logits."""
    if checks.is_array(x) and (x.dtype == np.bool_ or jnp.issubdtype(x.dtype, jnp.floating)):
        return jnp.asarray(x)
    expected = "be boolean (True = masked) or floating (added to the logits)"
    got = f"dtype {x.dtype}" if checks.is_array(x) else type(x).__name__
    raise TypeError(checks.message(operator, argument, expected, got))


def merged(*planes: jax.Array | None) -> dict[str, jax.Array | None]:
    """The layer's `mask` and `bias` from masks of one rank: what a boolean one hides, what the others add."""
    hidden = bias = None
    for x in planes:
        if x is None:
            continue
        if x.dtype == np.bool_:
            hidden = x if hidden is None else hidden | x
        else:
            dtype = x.dtype if bias is None else jnp.promote_types(bias.dtype, x.dtype)
            bias = x if bias is None else bias.astype(dtype) + x.astype(dtype)
    return {"mask": None if hidden is None else ~hidden, "bias": bias}


def drops(operator: str, rates: dict[str, float], training: bool, dropout_key: Any) -> tuple:
    """The rates, 0 unless `training`; a key must be given for one above 0."""
    dropout.check_key(operator, dropout_key)  # an error names this operator
    found = tuple(checks.rate(operator, name, rate) for name, rate in rates.items())
    if not checks.flag(operator, "training", training):
        return (0.0,) * len(found)
    if any(found) and dropout_key is None:
        given = ", ".join(f"{name} = {rate}" for name, rate in rates.items())
        expected, remedy = f"be given in training with {given}", "pass jax.random.key(0)"
        raise ValueError(checks.message(operator, "dropout_key", expected, None, remedy))
    return found


def after_dropout(weights: jax.Array, rate: float, key: Any) -> jax.Array:
    """Weights `[..., N, T, S']` of a layer times the factors that its dropout of `rate` under `key` drew."""
    if rate == 0:
        return weights
    *batch, N, T, S = weights.shape
    index = partial(jnp.arange, dtype=jnp.uint32)
    entry = index(math.prod(batch)).reshape(*batch, 1, 1, 1)
    head, row, column = (
        to_rank(x, weights.ndim) for x in (index(N)[:, None, None], index(T)[:, None], index(S))
    )
    keys = dropout.head_keys(dropout.key_words(key), entry, head)
    dtype = accumulator_dtype(weights.dtype)
    factors = dropout.factors(keys, row, column, rate, dtype)
    return (weights.astype(dtype) * factors).astype(weights.dtype)
