"""Arguments that calls of several sources share: arrays, heads, masks, dropout, slots that ask for gradients.

A backward of a source writes into arrays that it is given; here these slots tell what is asked for.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks, dropout
from jax_attn_bwd._core.numerics import accumulator_dtype, to_rank


def arrays(operator: str, needed: tuple[str, ...], **given: Any) -> dict[str, Any]:
    """Returns `given` as floating arrays of one dtype; None, which those `needed` must not be, stays None."""
    there = {name: x for name, x in given.items() if x is not None or name in needed}
    found = {name: checks.floating(operator, name, x) for name, x in there.items()}
    checks.same_dtype(operator, **found)
    return given | found


def shaped(operator: str, given: Mapping[str, Any], name: str, letters: str, *shape: int) -> Any:
    """Returns the array of this name among those `given`, of this shape; None stays None."""
    if given[name] is not None:
        checks.shape(operator, name, given[name], letters, shape)
    return given[name]


def heads(operator: str, num_heads: Any, **widths: Any) -> int:
    """Returns the number of heads, which divides each of `widths`."""
    num_heads = checks.integer(operator, "num_heads", num_heads, least=1)
    for argument, n in widths.items():
        if checks.integer(operator, argument, n, least=0) % num_heads:
            expected = f"be a multiple of num_heads = {num_heads}"
            raise ValueError(checks.message(operator, argument, expected, n))
    return num_heads


def both(operator: str, **rows: Any) -> None:
    """Raises where one of two arguments is given without the other."""
    for one, other in zip(rows, reversed(rows), strict=True):
        if rows[one] is not None and rows[other] is None:
            expected = f"be given together with {one}: they are one key and its value"
            raise ValueError(checks.message(operator, other, expected, None))


def mask(operator: str, argument: str, x: Any) -> jax.Array:
    """Returns `x` as an array: boolean, True = masked, or floating, added to the logits."""
    if checks.is_array(x) and (x.dtype == np.bool_ or jnp.issubdtype(x.dtype, jnp.floating)):
        return jnp.asarray(x)
    expected = "be boolean (True = masked) or floating (added to the logits)"
    got = f"dtype {x.dtype}" if checks.is_array(x) else type(x).__name__
    raise TypeError(checks.message(operator, argument, expected, got))


def mask_planes(
    operator: str,
    batched: bool,
    sizes: tuple[int, int, int, int],
    key_padding_mask: Any,
    attn_mask: Any,
    by_head: str = "",
    remedy: str = "",
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns `key_padding_mask` as `(N, 1, 1, S)` and `attn_mask` as `(N or 1, H or 1, L, S)`.

    `sizes` are (N, L, S, H); errors call a mask of three axes `by_head`, and add `remedy`.
    """
    N, L, S, H = sizes
    padding = allowed = None
    if key_padding_mask is not None:
        padding = mask(operator, "key_padding_mask", key_padding_mask)
        letters, expected = ("(N, S)", (N, S)) if batched else ("(S,)", (S,))
        checks.shape(operator, "key_padding_mask", padding, letters, expected, remedy)
        padding = padding.reshape(N, 1, 1, S)
    if attn_mask is not None:
        allowed = mask(operator, "attn_mask", attn_mask)
        each = by_head or "(N * num_heads, L, S)"
        letters, shape = (each, (N * H, L, S)) if allowed.ndim == 3 else ("(L, S)", (L, S))
        checks.shape(operator, "attn_mask", allowed, letters, shape, remedy)
        allowed = allowed.reshape(*((N, H) if allowed.ndim == 3 else (1, 1)), L, S)
    return padding, allowed


def merged(*planes: jax.Array | None) -> dict[str, jax.Array | None]:
    """Merges masks of one rank: the layer's `mask` is what boolean ones leave, its `bias` what others add."""
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
    """Returns the rates, 0 unless `training`; a key must be given for one above 0."""
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
    """Multiplies weights `[..., N, T, S']` of a layer by the factors that its dropout drew under `key`."""
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


def is_asked(operator: str, argument: str, slot: Any) -> bool:
    """Tells whether a slot asks for its gradient: True or an array does, None or False refuses it."""
    if slot is None or isinstance(slot, bool | np.bool_):
        return bool(slot)
    if not checks.is_array(slot):
        expected = "be None or False to refuse the gradient, True, or an array of its shape"
        raise TypeError(checks.message(operator, argument, expected, type(slot).__name__))
    return True


def check_slot(operator: str, argument: str, slot: Any, like: Any, dtypes: Sequence[Any]) -> None:
    """Raises for an array in a slot without the shape of `like`, the argument, or one of `dtypes`."""
    if not checks.is_array(slot):
        return
    checks.shape(operator, argument, slot, "that of the gradient", like.shape)
    if slot.dtype not in dtypes:
        names = " or ".join(dict.fromkeys(str(np.dtype(dtype)) for dtype in dtypes))
        raise TypeError(checks.message(operator, argument, f"have dtype {names}", slot.dtype))
