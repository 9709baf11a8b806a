"""Whether a function of arrays that broadcast to a tile is elementwise, by its jaxpr.

A function that takes a maximum over the columns, turns the rows round or counts the columns itself computes
something else on every tile. So each axis of each value is followed: it is an axis of the tile, one of its
own (of an array that is read, of random bits, of a count), or says nothing (size 1, or broadcast).
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax_attn_bwd._core.intervals import called_jaxpr
from jax_attn_bwd._core.jaxprs import is_literal

OWN = "an array's own axis"
NAMES = {-1: "columns", -2: "rows", -3: "heads", -4: "heads"}  # of the tile's axes, from the last; else batch
_ALONG = ("axis", "dimension", "dimensions")  # parameters that name the axes along which numbers meet
# what meets what in these is not followed
_JOINING = ("dot_general", "conv_general_dilated", "cond", "while", "scan")

Axis = int | str | None  # of the tile, counted from the last; OWN; None
Axes = tuple[Axis, ...]


class _Mixes(Exception):
    """What an operation does, and along which axis of the tile."""


def violation(closed: Any, tile_inputs: int) -> str | None:
    """What the function does that is not elementwise; None if nothing is found.

    Args:
      closed: its jaxpr, of which the first `tile_inputs` arguments broadcast to the tile.
      tile_inputs: their number.
    """
    inputs = [
        _of_tile(v.aval.shape) if i < tile_inputs else _own(v.aval.shape)
        for i, v in enumerate(closed.jaxpr.invars)
    ]
    try:
        (result,) = _followed(closed, inputs)
    except _Mixes as found:
        return str(found)
    if result is None:
        return None
    for i, axis in enumerate(result):
        place = i - len(result)
        if axis not in (None, place):
            return f"what it returns has {_name(axis)} where the tile has its {NAMES.get(place, 'batch')}"
    return None


def _of_tile(shape: Sequence[Any]) -> Axes:
    return tuple(None if n == 1 else i - len(shape) for i, n in enumerate(shape))


def _own(shape: Sequence[Any]) -> Axes:
    return tuple(None if n == 1 else OWN for n in shape)


def _name(axis: Axis) -> str:
    return f"the {NAMES.get(axis, 'batch')}" if isinstance(axis, int) else OWN


def _followed(closed: Any, inputs: Sequence[Axes | None]) -> list[Axes | None]:
    """The axes of each result; None where they are not known."""
    jaxpr = closed.jaxpr
    found: dict[Any, Axes | None] = {v: _own(v.aval.shape) for v in jaxpr.constvars}
    found |= dict(zip(jaxpr.invars, inputs, strict=True))
    read = lambda x: _own(x.aval.shape) if is_literal(x) else found[x]
    for equation in jaxpr.eqns:
        given, called = [read(x) for x in equation.invars], called_jaxpr(equation)
        if called is not None:
            results = _followed(called, given)
        elif any(axes is None for axes in given):
            results = [None for _ in equation.outvars]
        else:
            results = _results(equation, given)
        ranks = [len(v.aval.shape) for v in equation.outvars]
        known = [x if x is None or len(x) == n else None for x, n in zip(results, ranks, strict=True)]
        found |= dict(zip(equation.outvars, known, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _results(equation: Any, given: list[Any]) -> list[Axes | None]:
    name, shapes = equation.primitive.name, [x.aval.shape for x in equation.invars]
    shape = equation.outvars[0].aval.shape
    if name in _RULES:
        return [_RULES[name](equation, given)]
    along = {axis for key in _ALONG for axis in _listed(equation.params.get(key))}
    if name.startswith(("reduce_", "arg")):
        axes = set(_listed(equation.params.get("axes")))
        _nothing_along(name, given, axes)
        return [tuple(x for i, x in enumerate(given[0]) if i not in axes) for _ in equation.outvars]
    if name.startswith("cum") or name in ("rev", "sort", "concatenate"):
        _nothing_along(name, given, along)
    elif name in ("iota", "random_bits", "random_unwrap", "random_wrap", "random_seed") or not given:
        return [_own(v.aval.shape) for v in equation.outvars]
    elif name in _JOINING or not all(_broadcasts(s, shape) for s in shapes):
        return [_if_none_of_tile(v.aval.shape, given) for v in equation.outvars]
    alike = [axes for axes, s in zip(given, shapes, strict=True) if len(s) == len(shape)]
    merged = tuple(_merged(name, {axes[i] for axes in alike}) for i in range(len(shape)))
    return [merged if len(v.aval.shape) == len(shape) else None for v in equation.outvars]


def _broadcasts(shape: Sequence[Any], to: Sequence[Any]) -> bool:
    """Whether number meets number: of one rank, or a scalar."""
    return not shape or (len(shape) == len(to) and all(n in (1, m) for n, m in zip(shape, to, strict=True)))


def _listed(x: Any) -> tuple[int, ...]:
    return () if x is None else (x,) if isinstance(x, int) else tuple(x)


def _nothing_along(name: str, given: Sequence[Axes], axes: Any) -> None:
    for of_one in given:
        for i in axes:
            if i < len(of_one) and isinstance(of_one[i], int):
                raise _Mixes(f"{name!r} along the {NAMES.get(of_one[i], 'batch')}")


def _merged(name: str, axes: set[Axis]) -> Axis:
    """Of one axis of operands that are combined number by number."""
    known = axes - {None}
    if len(known) > 1:
        raise _Mixes(f"{name!r} of {' with '.join(sorted(map(_name, known)))}")
    return next(iter(known), None)


def _if_none_of_tile(shape: Sequence[Any], given: Sequence[Axes]) -> Axes | None:
    """Of what is made of arrays alone; else it is not known."""
    made_of_tile = any(isinstance(axis, int) for axes in given for axis in axes)
    return None if made_of_tile else _own(shape)


def _broadcast(equation: Any, given: list[Axes]) -> Axes:
    found: list[Axis] = [None] * len(equation.params["shape"])
    for axis, place in zip(given[0], equation.params["broadcast_dimensions"], strict=True):
        found[place] = axis
    return tuple(found)


def _reshape(equation: Any, given: list[Axes]) -> Axes | None:
    """Where axes of size 1 come or go; a tile's axes are not split or joined."""
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    long = [axis for axis, n in zip(given[0], before, strict=True) if n != 1]
    if [n for n in before if n != 1] != [n for n in after if n != 1]:
        return _if_none_of_tile(after, given)
    rest = iter(long)
    return tuple(None if n == 1 else next(rest) for n in after)


def _squeeze(equation: Any, given: list[Axes]) -> Axes:
    return tuple(axis for i, axis in enumerate(given[0]) if i not in equation.params["dimensions"])


def _transpose(equation: Any, given: list[Axes]) -> Axes:
    return tuple(given[0][i] for i in equation.params["permutation"])


def _cut(equation: Any, given: list[Axes]) -> Axes:
    """Some of the numbers along an axis."""
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    changed = [i for i, (n, m) in enumerate(zip(before, after, strict=True)) if n != m]
    _nothing_along(equation.primitive.name, given[:1], changed)
    return tuple(None if n == 1 else axis for n, axis in zip(after, given[0], strict=True))


def _gather(equation: Any, given: list[Axes]) -> Axes:
    """What is read lies where the indices do, with the axes of what is read of the array."""
    numbers, shape = equation.params["dimension_numbers"], equation.outvars[0].aval.shape
    own = (i for i in range(len(given[0])) if i not in numbers.operand_batching_dims)
    _nothing_along("gather", given[:1], own)
    indices = iter(given[1][:-1])
    return tuple(
        (OWN if n != 1 else None) if i in numbers.offset_dims else next(indices) for i, n in enumerate(shape)
    )


_RULES: dict[str, Callable[[Any, list[Axes]], Axes | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "slice": _cut,
    "dynamic_slice": _cut,
    "pad": _cut,
    "gather": _gather,
}
