"""Bounds what each operation gives, `(np or jnp, parameters, operands...) -> (least, greatest)`.

An operand has `least` and `greatest`. Integers that may leave the range of their dtype, and would wrap
around, are bounded by that range alone; floats are widened by what rounding, fused or not, may change.
"""

import operator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

_MARGIN = 1 - 2.0**-10  # products are estimated in floating point


def dtype_range(dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the least and greatest number of a dtype; NaN of a float, of which nothing definite follows."""
    if dtype == np.bool_:
        return np.asarray(False), np.asarray(True)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return np.asarray(info.min, dtype), np.asarray(info.max, dtype)
    nan = np.asarray(np.nan, dtype)
    return nan, nan


def _is_integer(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.integer))


def _is_unsigned(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.unsignedinteger))


def unless(xp: Any, lost: Any, least: Any, greatest: Any) -> tuple[Any, Any]:
    """Returns the bounds; the whole range of the dtype where they are `lost`."""
    low, high = dtype_range(least.dtype)
    return xp.where(lost, low, least), xp.where(lost, high, greatest)


def _hull(xp: Any, *values: Any) -> tuple[Any, Any]:
    """Returns (least, greatest) of values; NaN if one is."""
    least = greatest = values[0]
    for x in values[1:]:
        least, greatest = xp.minimum(least, x), xp.maximum(greatest, x)
    return least, greatest


def _outward(xp: Any, least: Any, greatest: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Moves floats one step apart, as fused operations round otherwise; lost where infinity is read.

    What is too small for a normal number may be 0 where it is computed.
    """
    infinity, tiny = np.asarray(np.inf, least.dtype), np.asarray(2 * jnp.finfo(least.dtype).tiny, least.dtype)
    finite = [xp.isfinite(end) for operand in (x, y) for end in (operand.least, operand.greatest)]
    lost = ~(finite[0] & finite[1] & finite[2] & finite[3])
    least, greatest = xp.nextafter(least, -infinity), xp.nextafter(greatest, infinity)
    least = xp.where((least > 0) & (least < tiny), 0, least)
    greatest = xp.where((greatest < 0) & (greatest > -tiny), 0, greatest)
    return unless(xp, lost, least, greatest)


def _of_ends(operation, wraps, xp, x, low, high, y):
    """Bounds by `operation` of the ends of x with `low` and `high` of y; lost where it wraps."""
    least, greatest = operation(x.least, low), operation(x.greatest, high)
    if not _is_integer(least):
        return _outward(xp, least, greatest, x, y)
    lost = wraps(x.least, low, least) | wraps(x.greatest, high, greatest)
    return unless(xp, lost, least, greatest)


def _add(xp, _, x, y):
    def wraps(x, y, total):
        return total < x if _is_unsigned(total) else ((x ^ total) & (y ^ total)) < 0

    return _of_ends(operator.add, wraps, xp, x, y.least, y.greatest, y)


def _sub(xp, _, x, y):
    def wraps(x, y, difference):
        return x < y if _is_unsigned(difference) else ((x ^ y) & (x ^ difference)) < 0

    return _of_ends(operator.sub, wraps, xp, x, y.greatest, y.least, y)


def _mul(xp, parameters, x, y):
    corners = [a * b for a in (x.least, x.greatest) for b in (y.least, y.greatest)]
    least, greatest = _hull(xp, *corners)
    if parameters["square"]:
        spans = (x.least <= 0) & (x.greatest >= 0)
        ends = _hull(xp, corners[0], corners[3])
        least, greatest = xp.where(spans, xp.zeros_like(least), ends[0]), ends[1]
    if not _is_integer(least):
        return _outward(xp, least, greatest, x, y)
    wide: Any = np.float64 if xp is np else np.float32
    size = [xp.maximum(xp.abs(a.least.astype(wide)), xp.abs(a.greatest.astype(wide))) for a in (x, y)]
    limit = wide(float(jnp.iinfo(least.dtype).max) * _MARGIN)
    lost = ~(size[0] * size[1] < limit)
    if _is_unsigned(least):
        return unless(xp, lost, x.least * y.least, x.greatest * y.greatest)
    return unless(xp, lost, least, greatest)


def _power(xp, parameters, x):
    if parameters["y"] != 2:
        return dtype_range(parameters["dtype"])
    return _mul(xp, {"square": True}, x, x)


def _neg(xp, _, x):
    least, greatest = -x.greatest, -x.least
    if not _is_integer(least):
        return least, greatest
    lost = x.greatest > 0 if _is_unsigned(least) else _wraps_absolute(x)
    return unless(xp, lost, least, greatest)


def _abs(xp, _, x):
    low, high = _hull(xp, abs(x.least), abs(x.greatest))
    spans = (x.least <= 0) & (x.greatest >= 0)
    least = xp.where(spans, xp.zeros_like(low), low)
    return unless(xp, _wraps_absolute(x), least, high) if _is_integer(low) else (least, high)


def _end_by_end(function):
    return lambda xp, _, *x: tuple(
        function(xp, *(getattr(i, end) for i in x)) for end in ("least", "greatest")
    )


def _quotient(xp, divide, x, y):
    """Bounds by the corners; lost where the divisor may be 0, or the quotient wraps."""
    lost = (y.least <= 0) & (y.greatest >= 0)
    divisors = [xp.where(lost, xp.ones_like(d), d) for d in (y.least, y.greatest)]
    least, greatest = _hull(xp, *(divide(n, d) for n in (x.least, x.greatest) for d in divisors))
    if not _is_integer(least):
        return unless(xp, lost, *_outward(xp, least, greatest, x, y))
    if jnp.issubdtype(least.dtype, jnp.signedinteger):
        lost = lost | ((x.least == dtype_range(least.dtype)[0]) & (y.least < 0))
    return unless(xp, lost, least, greatest)


def _truncated_quotient(xp, n, d):
    if not _is_integer(n):
        return n / d
    quotient = n // d  # right for the least integer, too, which has no absolute value
    return quotient + ((quotient * d != n) & ((n < 0) != (d < 0))).astype(quotient.dtype)


def _rem(xp, parameters, x, y):
    """Bounds the remainder of the sign of the dividend that integers leave, as in C."""
    dtype = parameters["dtype"]
    if not _is_integer(x.least):
        return dtype_range(dtype)
    size = xp.maximum(xp.abs(y.least), xp.abs(y.greatest)) - np.asarray(1, dtype)
    zero = xp.zeros_like(size)
    least = xp.where(x.least < 0, xp.maximum(x.least, -size), zero)
    greatest = xp.where(x.greatest > 0, xp.minimum(x.greatest, size), zero)
    return _of_one_period(xp, partial(_truncated_quotient, xp), x, y, least, greatest)


def _of_one_period(xp, divide, x, y, least, greatest):
    """Bounds a remainder: exactly where all of x has one quotient; lost where the divisor may be 0."""
    lost = (y.least <= 0) & (y.greatest >= 0) | _wraps_absolute(x) | _wraps_absolute(y)
    divisor = xp.where(lost, xp.ones_like(y.least), y.least)
    first, last = divide(x.least, divisor), divide(x.greatest, divisor)
    same = (y.least == y.greatest) & (first == last)
    least = xp.where(same, x.least - first * divisor, least)
    greatest = xp.where(same, x.greatest - first * divisor, greatest)
    return unless(xp, lost, least, greatest)


def _wraps_absolute(x):
    if _is_unsigned(x.least):
        return x.least != x.least
    return x.least == dtype_range(x.least.dtype)[0]


def _remainder(xp, parameters, x, y):
    """Bounds the remainder of the sign of the divisor that integers leave, as in Python."""
    one, zero = (np.asarray(n, parameters["dtype"]) for n in (1, 0))
    least = xp.where(y.least > 0, zero, y.least + one)
    greatest = xp.where(y.least > 0, y.greatest - one, zero)
    return _of_one_period(xp, operator.floordiv, x, y, least, greatest)


def _shift_right(xp, _, x, y):
    """Shifts by the same number of bits, of the dtype of the operand."""
    bits = jnp.iinfo(x.least.dtype).bits
    lost = (y.least != y.greatest) | (y.least < 0) | (y.least >= bits) | (x.least < 0)
    by = xp.where(lost, xp.zeros_like(y.least), y.least)
    return unless(xp, lost, x.least >> by, x.greatest >> by)


def _of_bools(rule):
    """Bounds bools by `rule`; of integers, which meet bit by bit, nothing is known."""

    def bound(xp, parameters, *operands):
        dtype = parameters["dtype"]
        return rule(xp, parameters, *operands) if dtype == np.bool_ else dtype_range(dtype)

    return bound


# of a comparison: whether it is certainly true, whether it may be


def _lt(xp, _, x, y):
    return x.greatest < y.least, ~(x.least >= y.greatest)


def _le(xp, _, x, y):
    return x.greatest <= y.least, ~(x.least > y.greatest)


def _eq(xp, parameters, x, y):
    same = (x.least == x.greatest) & (y.least == y.greatest) & (x.least == y.least)
    if parameters["square"] and _is_integer(x.least):
        same = xp.ones_like(same)
    return same, ~((x.greatest < y.least) | (y.greatest < x.least))


def _ne(xp, parameters, x, y):
    least, greatest = _eq(xp, {"square": False}, x, y)
    return ~greatest, ~least


def _select(xp, _, which, *cases):
    """Joins the cases that may be taken; an integer out of range takes the first or the last."""
    last = len(cases) - 1
    if which.least.dtype == np.bool_:
        possible = [~which.least, which.greatest]
    else:
        starts = [which.least <= k for k in range(last)] + [xp.ones_like(which.least, bool)]
        ends = [xp.ones_like(which.least, bool)] + [which.greatest >= k for k in range(1, last + 1)]
        possible = [start & end for start, end in zip(starts, ends, strict=True)]
    # the bounds where no case is taken, and with each that may be
    dtype = cases[0].least.dtype
    lowest, highest = dtype_range(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        lowest, highest = np.asarray(-np.inf, dtype), np.asarray(np.inf, dtype)
    lesser, greater = (xp.logical_and, xp.logical_or) if dtype == np.bool_ else (xp.minimum, xp.maximum)
    least, greatest = highest, lowest
    for taken, case in zip(possible, cases, strict=True):
        least = lesser(least, xp.where(taken, case.least, highest))
        greatest = greater(greatest, xp.where(taken, case.greatest, lowest))
    return least, greatest


def _convert(xp, parameters, x):
    old, new = x.least.dtype, jnp.dtype(parameters["dtype"])
    if new == np.bool_:
        none = (x.least == 0) & (x.greatest == 0)
        return (x.least > 0) | (x.greatest < 0), ~none
    # to floats: bounds round as the values do
    if jnp.issubdtype(new, jnp.floating) and new.itemsize < 4:  # compilers may leave the rounding out
        return dtype_range(new)
    if old == np.bool_ or jnp.issubdtype(new, jnp.floating):
        return x.least.astype(new), x.greatest.astype(new)
    # to integers: lost where the value does not fit
    low, high = (float(n) for n in dtype_range(new))
    if jnp.issubdtype(old, jnp.floating):  # towards zero; what does not fit, and NaN, is lost
        lost = ~((x.least > low * _MARGIN) & (x.greatest < high * _MARGIN))
        least, greatest = (xp.where(lost, xp.zeros_like(e), e) for e in (x.least, x.greatest))
        return unless(xp, lost, least.astype(new), greatest.astype(new))
    least, greatest = x.least.astype(new), x.greatest.astype(new)
    lost = (least.astype(old) != x.least) | (greatest.astype(old) != x.greatest)
    lost = lost | ((least < 0) != (x.least < 0)) | ((greatest < 0) != (x.greatest < 0))
    return unless(xp, lost, least, greatest)


def _swapped(rule):
    return lambda xp, parameters, x, y: rule(xp, parameters, y, x)


RULES: dict[str, Any] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "square": lambda xp, parameters, x: _mul(xp, {"square": True}, x, x),
    "integer_pow": _power,
    "neg": _neg,
    "abs": _abs,
    "sign": _end_by_end(lambda xp, x: xp.sign(x)),
    "floor": _end_by_end(lambda xp, x: xp.floor(x)),
    "ceil": _end_by_end(lambda xp, x: xp.ceil(x)),
    "max": _end_by_end(lambda xp, x, y: xp.maximum(x, y)),
    "min": _end_by_end(lambda xp, x, y: xp.minimum(x, y)),
    "clamp": _end_by_end(lambda xp, low, x, high: xp.minimum(xp.maximum(x, low), high)),
    "div": lambda xp, _, x, y: _quotient(xp, partial(_truncated_quotient, xp), x, y),
    "rem": _rem,
    "shift_right_arithmetic": _shift_right,
    "shift_right_logical": _shift_right,
    "and": _of_bools(_end_by_end(lambda xp, x, y: x & y)),
    "or": _of_bools(_end_by_end(lambda xp, x, y: x | y)),
    "xor": _of_bools(_ne),
    "not": _of_bools(lambda xp, _, x: (~x.greatest, ~x.least)),
    "lt": _lt,
    "le": _le,
    "gt": _swapped(_lt),
    "ge": _swapped(_le),
    "eq": _eq,
    "ne": _ne,
    "select_n": _select,
    "convert_element_type": _convert,
}
floored = {
    "floor_divide": lambda xp, _, x, y: _quotient(xp, operator.floordiv, x, y),
    "remainder": _remainder,
}


def _broadcast(equation, x):
    shape = equation.params["shape"]
    inner = [1] * len(shape)
    for axis, n in zip(equation.params["broadcast_dimensions"], x.shape, strict=True):
        inner[axis] = n
    return np.broadcast_to(x.reshape(inner), shape)


def _reduce(function):
    return lambda equation, x: np.asarray(function(x, axis=tuple(equation.params["axes"])))


# how NumPy does what keeps elements in order
STRUCTURAL: dict[str, Any] = {
    "broadcast_in_dim": _broadcast,
    "reshape": lambda equation, x: x.reshape(equation.params["new_sizes"]),
    "squeeze": lambda equation, x: np.squeeze(x, tuple(equation.params["dimensions"])),
    "transpose": lambda equation, x: np.transpose(x, equation.params["permutation"]),
    "concatenate": lambda equation, *xs: np.concatenate(xs, equation.params["dimension"]),
    "slice": lambda equation, x: x[_slices(equation.params)],
    "copy": lambda equation, x: x,
    "reduce_or": _reduce(np.any),
    "reduce_and": _reduce(np.all),
    "reduce_max": _reduce(np.max),
    "reduce_min": _reduce(np.min),
}


def _slices(parameters):
    strides = parameters["strides"] or (1,) * len(parameters["start_indices"])
    ends = zip(parameters["start_indices"], parameters["limit_indices"], strides, strict=True)
    return tuple(slice(*end) for end in ends)


# Bounds of what a gather reads, where its indices are known only by bounds. Along one axis a sparse table
# answers: it holds the least and the greatest of every stretch of 2^k entries, and two such stretches cover
# any other (n log n numbers, two reads for each answer). Where the stretches are known at trace time and hold
# few entries together, as those of tiles do, the entries themselves are read. Known stretches along several
# axes are taken axis after axis; for bools a summed-area table counts each True of a rectangle. NumPy in,
# NumPy out.


def gathered(operand: Any, places: list[Any], mode: str) -> tuple[Any, Any]:
    """Returns least and greatest of `operand` at `places`, which bound the index of each of its axes.

    Where the two are one object the index is exact. An index out of range may read anything, unless it is
    clipped.
    """
    # indices within the operand, and which were not
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
    # the way that fits the axes whose index is known by bounds alone
    wide = [axis for axis, (first, last) in enumerate(inside) if first is not last]
    if len(wide) > 1 and all(_is_short(*inside[axis], operand.shape[axis]) for axis in wide):
        least, greatest = _axis_after_axis(xp, operand, inside, wide)
    elif len(wide) == 2 and operand.dtype == np.bool_:
        least, greatest = _by_counts(xp, operand, inside, wide)
    elif len(wide) > 1:
        least, greatest = _at_points(xp, operand, inside)
    elif wide:
        least, greatest = _of_stretches(xp, operand, inside, *wide)
    else:
        least = greatest = operand[tuple(first for first, _ in inside)]
    return unless(xp, outside, least, greatest)


def _module(*arrays: Any) -> Any:
    return np if all(isinstance(x, np.ndarray) for x in arrays) else jnp


def _at_points(xp: Any, operand: Any, places: list[Any]) -> tuple[Any, Any]:
    """Returns the entry itself where all indices are known, else the extrema of the whole operand."""
    known: Any = True
    for first, last in places:
        known = known & (first == last)
    value = operand[tuple(first for first, _ in places)]
    return xp.where(known, value, operand.min()), xp.where(known, value, operand.max())


def _is_short(first: Any, last: Any, n: int) -> bool:
    """Tells whether the stretches are known, and hold few entries together."""
    if not isinstance(first, np.ndarray) or not isinstance(last, np.ndarray):
        return False
    longest = int((last - first).max(initial=0)) + 1
    return longest <= 2 or first.size * longest <= 4 * n


def _axis_after_axis(xp: Any, operand: Any, places: list[Any], wide: list[int]) -> tuple[Any, Any]:
    """Returns extrema of rectangles of known stretches: entry i of an axis becomes those of stretch i.

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
    """Returns (all, any) of each rectangle of bools: whether as many are True as it has, or one is."""
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


def _of_stretches(xp: Any, operand: Any, places: list[Any], axis: int) -> tuple[Any, Any]:
    """Returns the extrema of stretches along `axis`."""
    # stretches from first to last, none longer than `longest`, of `rows [..., n]`
    first, last = places[axis]
    others = [x for i, (x, _) in enumerate(places) if i != axis]
    length = last - first + np.asarray(1, first.dtype)
    longest = operand.shape[axis]
    if isinstance(length, np.ndarray):
        longest = min(longest, int(length.max(initial=1)))
    rows = xp.moveaxis(operand, axis, -1)
    # few entries together: read them all
    if isinstance(length, np.ndarray) and length.size * longest <= 2 * operand.shape[axis]:
        within = np.minimum(first[..., None] + np.arange(longest, dtype=first.dtype), last[..., None])
        read = rows[(*(x[..., None] for x in others), within)]
        return (read.all(-1), read.any(-1)) if rows.dtype == np.bool_ else (read.min(-1), read.max(-1))
    # else two stretches of 2^level entries, from the first and up to the last, of the sparse table
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
    """Returns `[levels, ..., n]`: entry (k, i) is the extremum of 2^k entries from i on, or to the end."""
    found = [x]
    for k in range(levels - 1):
        last, by = found[-1], min(2**k, x.shape[-1])
        end = xp.repeat(last[..., -1:], by, axis=-1)
        found.append(pick(last, xp.concatenate([last[..., by:], end], axis=-1)))
    return xp.stack(found)
