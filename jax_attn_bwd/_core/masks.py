"""One meaning of causality and windows, element by element and tile by tile.

A query at position r sees a key at position c if c <= r (causal) and -right <= r - c <= left (window).
"""

from typing import Any

import jax
import numpy as np

from jax_attn_bwd._core import checks

Window = tuple[int, int]
_FARTHEST = 2**31 - 1  # positions are int32: a wider window is no limit either


def window(operator: str, value: Any) -> Window | None:
    """Returns `local_window_size` as (left, right); an int means both sides."""
    if value is None:
        return None
    pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
    expected = "be a non-negative int or a pair (left, right) of them"
    if any(isinstance(n, bool) or not isinstance(n, int | np.integer) for n in pair):
        remedy = checks.static(value)
        raise TypeError(checks.message(operator, "local_window_size", expected, repr(value), remedy))
    if len(pair) != 2 or min(pair) < 0:
        remedy = (
            "None is no window; of a side without a limit it is the sequence's length" if -1 in pair else ""
        )
        raise ValueError(checks.message(operator, "local_window_size", expected, repr(value), remedy))
    left, right = (min(int(n), _FARTHEST) for n in pair)
    return left, right


def in_band(row: jax.Array, column: jax.Array, is_causal: bool, window: Window | None) -> Any:
    """Tells whether the query at `row` sees the key at `column` (both broadcast); None if all do."""
    terms = []
    if is_causal:
        terms.append(column <= row)
    if window is not None:
        terms += [row - column <= window[0], column - row <= window[1]]
    return conjunction(*terms)


def conjunction(*terms: Any) -> Any:
    """Returns the logical and of those terms that are not None; None if there are none."""
    result = None
    for term in terms:
        if term is not None:
            result = term if result is None else result & term
    return result


def tile_in_band(
    row: tuple[Any, Any], column: tuple[Any, Any], is_causal: bool, window: Window | None
) -> tuple[Any, Any]:
    """Returns (some, all) of a tile of positions in [min, max]: can any element be seen, can all?

    Works on Python ints, NumPy and JAX arrays. `some` may be True for a tile that has gaps.
    """
    (row_min, row_max), (column_min, column_max) = row, column
    some, every = True, True
    if is_causal:
        some, every = some & (column_min <= row_max), every & (column_max <= row_min)
    if window is not None:
        left, right = window
        some = some & (row_min - column_max <= left) & (column_min - row_max <= right)
        every = every & (row_max - column_min <= left) & (column_max - row_min <= right)
    return some, every
