"""Checks of what a graph is built from."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks
from jax_attn_bwd.ops.graph.edge_groups import LIMIT


def integers(operator: str, argument: str, x: Any) -> np.ndarray:
    """Checks that `x` has one axis and an integer dtype; returns it as a NumPy array of int64."""
    if isinstance(x, jax.core.Tracer):
        remedy = "build the graph outside jit and hand it in as an argument, or take from_traced"
        raise TypeError(checks.message(operator, argument, "be a concrete array", "a tracer", remedy))
    array = np.asarray(x)
    if array.size == 0 and np.issubdtype(array.dtype, np.floating):
        array = array.astype(np.int32)  # an empty list, or `np.zeros((2, 0))`
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(checks.message(operator, argument, "be integers", f"dtype {array.dtype}"))
    if array.ndim != 1:
        raise ValueError(checks.message(operator, argument, "have one axis", array.shape))
    info = np.iinfo(np.int64)
    if array.size and array.dtype == np.uint64 and array.max() > info.max:
        raise ValueError(checks.message(operator, argument, "fit int64", array.max()))
    return array.astype(np.int64)


def rows(operator: str, argument: str, x: Any) -> tuple[np.ndarray, np.ndarray]:
    """Checks that `x` has two rows of integers; returns them as NumPy arrays of int64."""
    shapes = [np.shape(row) for row in x] if isinstance(x, tuple | list) else []
    shape = (len(shapes), *shapes[0]) if len(set(shapes)) == 1 else shapes or np.shape(x)
    if len(set(shapes)) > 1 or len(shape) != 2 or shape[0] != 2:
        raise ValueError(checks.message(operator, argument, "have shape [2, nnz]", shape))
    src, dst = (integers(operator, argument, row) for row in x)
    return src, dst


def indices(operator: str, argument: str, x: Any) -> jax.Array:
    """Checks that `x` has one axis and an integer dtype; returns it as a JAX array."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(checks.message(operator, argument, "be integers", f"dtype {x.dtype}"))
    if x.ndim != 1:
        raise ValueError(checks.message(operator, argument, "have one axis", x.shape))
    return x


def count(operator: str, argument: str, x: Any) -> int:
    """Checks that `x` is a number of nodes or edges that int32 can count."""
    x = checks.integer(operator, argument, x)
    if not 0 <= x < LIMIT:
        raise ValueError(checks.message(operator, argument, f"lie in [0, {LIMIT})", x))
    return x


def within(operator: str, argument: str, x: np.ndarray, size: int, name: str) -> None:
    """Checks that every entry of `x` is in [0, size)."""
    if not x.size:
        return
    low, high = int(x.min()), int(x.max())
    if low < 0 or high >= size:
        expected = f"lie in [0, {size}), the range of {name}"
        got = low if low < 0 else high
        raise ValueError(checks.message(operator, argument, expected, got))


def permutation(operator: str, x: np.ndarray, n: int) -> np.ndarray:
    """Checks that `x` is a permutation of 0 to n - 1."""
    in_range = x.shape == (n,) and (n == 0 or (x.min() >= 0 and x.max() < n))
    if not in_range or not (np.bincount(x, minlength=n) == 1).all():
        expected = f"be a permutation of 0 to {n} - 1"
        got = f"shape {x.shape}" if x.shape != (n,) else "other or repeated numbers"
        raise ValueError(checks.message(operator, "map_csc_to_coo", expected, got))
    return x
