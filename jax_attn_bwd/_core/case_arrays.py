"""Arrays that cases of dense attention and of the layer around it have in common.

Each is a function `(rng, n) -> {argument: array}`, or returns one; `n` has a size for each shape letter:
B (a tuple), T queries, S keys.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Extra = Callable[[np.random.Generator, Mapping[str, Any]], dict[str, np.ndarray]]


def both(*extras: Extra) -> Extra:
    """Draws the arrays of several of these functions, one after the other."""
    return lambda rng, n: {k: v for extra in extras for k, v in extra(rng, n).items()}


def mask(*shape: int, keep: float = 0.6) -> Extra:
    """Returns a boolean mask of that shape, True for a share of `keep`."""
    return lambda rng, n: {"mask": rng.random(shape) < keep}


def bias(*shape: int, spread: float = 1.0) -> Extra:
    """Returns a bias of that shape and standard deviation."""
    return lambda rng, n: {"bias": spread * rng.standard_normal(shape)}


def sink(*shape: int, spread: float = 20.0) -> Extra:
    """A sink of that shape and standard deviation, which is large: one near 0 would hide errors."""
    return lambda rng, n: {"sink": spread * rng.standard_normal(shape)}


def infinite_bias(rng, n):
    """Returns a bias `[2, 1, T, S]` that is -inf in places, and in all of one row, which sees nothing."""
    bias = rng.standard_normal((2, 1, n["T"], n["S"]))
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    bias[1, 0, n["T"] // 2] = -np.inf
    return {"bias": bias}


def segments(rng, n):
    """Draws segment ids in order; some queries, and some keys, are alone in theirs."""
    return {
        "query_segment_ids": np.sort(rng.integers(0, 3, (*n["B"], n["T"])), -1).astype(np.int32),
        "key_value_segment_ids": np.sort(rng.integers(1, 4, (*n["B"], n["S"])), -1).astype(np.int32),
    }


def positions(rng, n):
    """Shuffles positions: those of the queries for all batch entries, those of the keys for each of two."""
    return {
        "query_positions": rng.permutation(n["S"])[: n["T"]].astype(np.int32),
        "key_value_positions": np.stack([rng.permutation(n["S"]) for _ in range(2)]).astype(np.int32),
    }


def dropout_key(*words: int) -> Extra:
    """Returns a raw random key of two words."""
    return lambda rng, n: {"dropout_key": np.array(words, np.uint32)}
