"""Bounds the values that a gather reads, where its indices are known only by bounds.

Along one axis a sparse table answers: it holds the least and the greatest of every stretch of 2^k entries,
and two such stretches cover any other (n log n numbers, two reads for each answer). Where the stretches are
known at trace time and hold few entries together, as those of tiles do, the entries themselves are read.
Known stretches along several axes are taken axis after axis; for bools a summed-area table counts each True
of a rectangle. NumPy in, NumPy out.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core.interval_rules import unless


def gathered(operand: Any, places: list[Any], mode: str) -> tuple[Any, Any]:
    """The least and the greatest of `operand` at `places`, which bound the index of each of its axes.

    Where the two are one object the index is exact. An index out of range may read anything, unless it is
    clipped.
    """
    ends = [x for pair in places for x in pair]
    xp = _module(operand, *ends)
    operand = xp.asarray(operand)
    outside, inside = xp.zeros(np.broadcast_shapes(*(x.shape for x in ends)), bool), []
    for (first, last), n in zip(places, operand.shape, strict=True):
        most = min(n - 1, int(jnp.iinfo(first.dtype).max))
        if "CLIP" not in mode.upper():
            outside = outside | (first < 0) | (last > most)
        clip = lambda x, most=most: _module(x).clip(x, np.asarray(0, x.dtype), np.asarray(most, x.dtype))
        within = [clip(x).astype(np.int32) for x in (first, last)]  # lengths would wrap in narrow ones
        inside.append((within[0], within[0] if first is last else within[1]))
    wide = [axis for axis, (first, last) in enumerate(inside) if first is not last]
    if len(wide) > 1 and all(_is_short(*inside[axis], operand.shape[axis]) for axis in wide):
        least, greatest = _axis_after_axis(xp, operand, inside, wide)
    elif len(wide) == 2 and operand.dtype == np.bool_:
        least, greatest = _by_counts(xp, operand, inside, wide)
    elif len(wide) > 1:
        least, greatest = _at_points(xp, operand, inside)
    elif wide:
        least, greatest = _along(xp, operand, inside, *wide)
    else:
        least = greatest = operand[tuple(first for first, _ in inside)]
    return unless(xp, outside, least, greatest)


def _module(*arrays: Any) -> Any:
    return np if all(isinstance(x, np.ndarray) for x in arrays) else jnp


def _at_points(xp: Any, operand: Any, places: list[Any]) -> tuple[Any, Any]:
    """The entry itself where all indices are known, else the extrema of the whole operand."""
    known: Any = True
    for first, last in places:
        known = known & (first == last)
    value = operand[tuple(first for first, _ in places)]
    return xp.where(known, value, operand.min()), xp.where(known, value, operand.max())


def _is_short(first: Any, last: Any, n: int) -> bool:
    """Whether the stretches are known, and hold few entries together."""
    if not isinstance(first, np.ndarray) or not isinstance(last, np.ndarray):
        return False
    longest = int((last - first).max(initial=0)) + 1
    return longest <= 2 or first.size * longest <= 4 * n


def _axis_after_axis(xp: Any, operand: Any, places: list[Any], wide: list[int]) -> tuple[Any, Any]:
    """Extrema of the rectangles that known stretches make: entry i of an axis becomes those of stretch i.

    Each stretch is taken once, though places are those of all rectangles: else their number would be squared.
    """
    least = greatest = operand
    places = list(places)
    for axis in wide:
        ends, shape = np.stack([x.reshape(-1) for x in places[axis]]), places[axis][0].shape
        (first, last), number = np.unique(ends, axis=1, return_inverse=True)
        longest = int((last - first).max(initial=0)) + 1
        within = np.minimum(first[:, None] + np.arange(longest, dtype=first.dtype), last[:, None])
        least = xp.take(least, within, axis).min(axis + 1)
        greatest = xp.take(greatest, within, axis).max(axis + 1)
        number = number.reshape(shape).astype(np.int32)
        places[axis] = number, number
    at = tuple(first for first, _ in places)
    return least[at], greatest[at]


def _by_counts(xp: Any, operand: Any, places: list[Any], wide: list[int]) -> tuple[Any, Any]:
    """(all, any) of the bools in each rectangle: whether as many of them are True as it has, or one is."""
    counts = operand.astype(np.int32)
    for axis in wide:
        begin = xp.zeros_like(xp.take(counts, np.zeros(1, np.int32), axis))
        counts = xp.concatenate([begin, xp.cumsum(counts, axis, dtype=np.int32)], axis)
    one = np.asarray(1, np.int32)

    def corner(ends):
        at = [first for first, _ in places]
        for axis, is_end in zip(wide, ends, strict=True):
            at[axis] = places[axis][1] + one if is_end else places[axis][0]
        return counts[tuple(at)]

    found = corner((1, 1)) - corner((1, 0)) - corner((0, 1)) + corner((0, 0))
    (first_a, last_a), (first_b, last_b) = (places[axis] for axis in wide)
    return found == (last_a - first_a + one) * (last_b - first_b + one), found > 0


def _along(xp: Any, operand: Any, places: list[Any], axis: int) -> tuple[Any, Any]:
    """The extrema of stretches along `axis`."""
    first, last = places[axis]
    others = [x for i, (x, _) in enumerate(places) if i != axis]
    length = last - first + np.asarray(1, first.dtype)
    longest = operand.shape[axis]
    if isinstance(length, np.ndarray):
        longest = min(longest, int(length.max(initial=1)))
    rows = xp.moveaxis(operand, axis, -1)
    if isinstance(length, np.ndarray) and length.size * longest <= 2 * operand.shape[axis]:
        within = np.minimum(first[..., None] + np.arange(longest, dtype=first.dtype), last[..., None])
        read = rows[(*(x[..., None] for x in others), within)]
        return (read.all(-1), read.any(-1)) if rows.dtype == np.bool_ else (read.min(-1), read.max(-1))
    levels = max(longest, 1).bit_length()
    level = xp.zeros_like(length)
    for k in range(1, levels):
        level = level + (length >= 2**k).astype(length.dtype)
    second = last - (xp.ones_like(level) << level) + np.asarray(1, first.dtype)

    def extremum(pick):
        table = _table(xp, rows, levels, pick)
        return pick(table[(level, *others, first)], table[(level, *others, second)])

    if rows.dtype == np.bool_:
        return extremum(xp.logical_and), extremum(xp.logical_or)
    return extremum(xp.minimum), extremum(xp.maximum)


def _table(xp: Any, x: Any, levels: int, pick: Any) -> Any:
    """`[levels, ..., n]`: entry (k, i) is the extremum of 2^k entries from i on, or to the end."""
    found = [x]
    for k in range(levels - 1):
        last, by = found[-1], min(2**k, x.shape[-1])
        end = xp.repeat(last[..., -1:], by, axis=-1)
        found.append(pick(last, xp.concatenate([last[..., by:], end], axis=-1)))
    return xp.stack(found)
