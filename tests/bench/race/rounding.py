"""Tells rounding from a fault where two steps, each an output and its gradients, differ."""

import jax.numpy as jnp
import numpy as np

from bench.measure import Results

CANCELLED = 8  # roundings of the largest gradient are left where the terms of another cancel
TIMES = 2  # as large as the error of the plain formula that of ours may be
FLOAT32 = float(jnp.finfo("float32").eps)


def of_terms_that_cancel(tolerance: float, ours: Results, plain: Results) -> bool:
    """Tells whether float32 results differ by no more than a tolerance and what is left of terms that cancel.

    The gradient of a key's bias is 0, and what is computed of it rounding. How large its terms were, the
    largest of all gradients tells.
    """
    left = _left(plain)
    limits = [tolerance * _size(x) + left * (number > 0) for number, x in enumerate(plain)]
    return _within(limits, ours, plain)


def of_narrow(dtype: str, ours: Results, rounded: Results, exact: Results) -> bool:
    """Tells whether the error of ours is at most twice that of plain, and rounding.

    `rounded` is what plain computes where it rounds to `dtype` wherever that is written: a compiler may let
    some of it go. `exact` is what it computes of the same numbers in float32.
    """
    eps, largest, left = float(jnp.finfo(dtype).eps), _largest(exact), _left(exact)
    limits = []
    for number, (b, x) in enumerate(zip(rounded, exact, strict=True)):
        cancelled = number > 0 and _size(x) <= left
        limits.append(TIMES * _size(b - x) + eps * (largest if cancelled else _size(x)))
    return _within(limits, ours, exact)


def _within(limits: list[float], ours: Results, exact: Results) -> bool:
    return all(_size(a - x) <= limit for limit, a, x in zip(limits, ours, exact, strict=True))


def _left(exact: Results) -> float:
    return CANCELLED * FLOAT32 * _largest(exact)


def _largest(exact: Results) -> float:
    """Returns the largest entry of all gradients."""
    return max(map(_size, exact[1:]), default=0.0)


def _size(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0))
