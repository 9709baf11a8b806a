"""Tells by its jaxpr whether a function of arrays that broadcast to a tile is elementwise.

A function that takes a maximum over the columns, turns the rows round or counts the columns itself computes
something else on every tile. So each axis of each value is followed: it is an axis of the tile, several of
them joined, one of its own (of an array that is read, of random bits, of a count), or says nothing (size 1,
or broadcast). An operation that is not known to leave the tile's axes apart is taken to mix them.

`is_true_on_diagonal` tells whether a function of a row and a column is True wherever the two are equal.
Equal expressions are one value, whatever it is: `ids[row] == ids[column]` is True there for all `ids`. So no
array is read, and nothing is computed but with constants.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core.jaxpr import walk
from jax_attn_bwd._core.jaxpr.intervals import constant

OWN = "an array's own axis"
NAMES = {-1: "columns", -2: "rows", -3: "heads", -4: "heads"}  # the tile's axes, from the last; else batch
_ALONG = ("axis", "dimension", "dimensions", "axes")  # parameters that name the axes along which numbers meet
# fmt: off
_NUMBER_BY_NUMBER = frozenset((
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "eq_to", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac",
    "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2", "logistic", "lt",
    "lt_to", "max", "mesh_cast", "min", "mul", "mulhi", "ne", "neg", "nextafter", "not", "one_minus_square",
    "optimization_barrier", "or", "polygamma", "population_count", "pow", "pvary", "random_gamma_grad",
    "real", "reduce_precision", "regularized_incomplete_beta", "rem", "reshard", "round", "rsqrt",
    "select_n", "sharding_constraint", "shift_left", "shift_right_arithmetic", "shift_right_logical",
    "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor", "zeta",
))
# fmt: on
_TELL_BROADCASTS = ("broadcast_in_dim", "gather", "squeeze", "transpose", "cond", "while", "scan")
_OF_ITS_OWN = ("iota", "random_bits", "random_unwrap", "random_wrap", "random_seed")

# an axis of the tile, counted from the last; several of them in one, with their sizes; OWN; None
Axis = int | tuple[tuple[Any, int], ...] | str | None
Axes = tuple[Axis, ...]


class _Mixes(Exception):
    """Tells what an operation does, and along which axis of the tile."""


def violation(closed: Any, tile_inputs: int) -> str | None:
    """Tells what the function of this jaxpr does that is not elementwise; None if nothing is found.

    Its first `tile_inputs` arguments broadcast to the tile.
    """
    shapes = [v.aval.shape for v in closed.jaxpr.invars]
    inputs: list[Axes] = [
        tuple(None if n == 1 else i - len(shape) for i, n in enumerate(shape))
        for shape in shapes[:tile_inputs]
    ]
    inputs += map(_own, shapes[tile_inputs:])
    try:
        (result,) = _followed(closed, inputs)
    except _Mixes as found:
        return str(found)
    for i, axis in enumerate(result):
        place = i - len(result)
        if axis not in (None, place):
            return f"what it returns has {_name(axis)} where the tile has its {NAMES.get(place, 'batch')}"
    return None


def _own(shape: Sequence[Any]) -> Axes:
    return tuple(None if n == 1 else OWN for n in shape)


def _name(axis: Axis) -> str:
    if isinstance(axis, tuple):
        return " and ".join(_name(part) for part, _ in axis)
    return f"the {NAMES.get(axis, 'batch')}" if isinstance(axis, int) else OWN


def _is_of_tile(axis: Axis) -> bool:
    return axis is not None and axis != OWN


def _followed(closed: Any, inputs: Sequence[Axes]) -> list[Axes]:
    """Returns the axes of each result."""
    return walk.evaluate(closed, inputs, _results, lambda x, aval: _own(aval.shape))


def _results(equation: Any, given: list[Axes]) -> list[Axes]:
    name, shapes = equation.primitive.name, [v.aval.shape for v in equation.outvars]
    # number by number, by a rule of its own, or of no axis of the tile
    if name in _NUMBER_BY_NUMBER:
        return [_together(name, given, shape) for shape in shapes]
    of_tile = any(_is_of_tile(axis) for axes in given for axis in axes)
    if name in _RULES and (of_tile or name in _TELL_BROADCASTS):
        return _RULES[name](equation, given)
    if name in _OF_ITS_OWN or not of_tile:
        return [_own(shape) for shape in shapes]
    # along axes that its parameters name: these must not be the tile's
    along = {axis for key in _ALONG for axis in _listed(equation.params.get(key))}
    if name.startswith(("reduce", "arg")):
        _nothing_along(name, given, along)
        axes = _together(name, given, equation.invars[0].aval.shape)
        return [tuple(x for i, x in enumerate(axes) if i not in along) for _ in shapes]
    if name.startswith("cum") or name in ("rev", "sort", "concatenate", "split"):
        _nothing_along(name, given, along)
        joined = name == "concatenate"  # parts of size 1 make an axis of its own
        axes = _together(name, given, shapes[0], along)
        return [tuple(OWN if joined and i in along else x for i, x in enumerate(axes)) for _ in shapes]
    raise _Mixes(f"{name!r}, which is not number by number, of {_first_of_tile(given)}")


def _first_of_tile(given: Sequence[Axes]) -> str:
    return next(_name(axis) for axes in given for axis in axes if _is_of_tile(axis))


def _together(name: str, given: Sequence[Axes], shape: Sequence[Any], besides: Any = ()) -> Axes:
    """Returns the axes where operands meet number by number; scalars meet all; `besides` are not compared."""
    alike = [axes for axes in given if len(axes) == len(shape)]
    return tuple(
        next((axes[i] for axes in alike if axes[i] is not None), None)
        if i in besides
        else _merged(name, {axes[i] for axes in alike})
        for i in range(len(shape))
    )


def _listed(x: Any) -> tuple[int, ...]:
    return () if x is None else (x,) if isinstance(x, int) else tuple(x)


def _nothing_along(name: str, given: Sequence[Axes], axes: Any) -> None:
    for of_one in given:
        for i in axes:
            if i < len(of_one) and _is_of_tile(of_one[i]):
                raise _Mixes(f"{name!r} along {_name(of_one[i])}")


def _merged(name: str, axes: set[Axis]) -> Axis:
    """Tells what one axis is where operands are combined number by number."""
    known = axes - {None}
    if len(known) > 1:
        raise _Mixes(f"{name!r} of {' with '.join(sorted(map(_name, known)))}")
    return next(iter(known), None)


def _broadcast(equation: Any, given: list[Axes]) -> list[Axes]:
    found: list[Axis] = [None] * len(equation.params["shape"])
    for axis, place in zip(given[0], equation.params["broadcast_dimensions"], strict=True):
        found[place] = axis
    return [tuple(found)]


def _reshape(equation: Any, given: list[Axes]) -> list[Axes]:
    """Follows axes of size 1 that come or go, and neighbours that are joined or told apart again."""
    parts: list[tuple[Axis, Any]] = []
    for axis, n in zip(given[0], equation.invars[0].aval.shape, strict=True):
        parts += axis if isinstance(axis, tuple) else [(axis, n)] if n != 1 else []
    found: list[Axis] = []
    for n in equation.outvars[0].aval.shape:
        taken: list[tuple[Axis, Any]] = []
        while n != 1 and parts and (not taken or math.prod(size for _, size in taken) != n):
            taken.append(parts.pop(0))
        if n != 1 and math.prod(size for _, size in taken) != n:
            raise _Mixes(f"'reshape' of {_first_of_tile(given)}")
        kinds = {axis for axis, _ in taken}
        found.append(None if n == 1 else kinds.pop() if kinds <= {OWN} or len(taken) == 1 else tuple(taken))
    return [tuple(found)]


def _cut(equation: Any, given: list[Axes]) -> list[Axes]:
    """Follows an axis of which some of the numbers are taken."""
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    changed = [i for i, (n, m) in enumerate(zip(before, after, strict=True)) if n != m]
    _nothing_along(equation.primitive.name, given[:1], changed)
    return [tuple(None if n == 1 else axis for n, axis in zip(after, given[0], strict=True))]


def _gather(equation: Any, given: list[Axes]) -> list[Axes]:
    """Follows what is read: it lies where the indices do, with the axes of what is read of the array."""
    numbers, shape = equation.params["dimension_numbers"], equation.outvars[0].aval.shape
    own = (i for i in range(len(given[0])) if i not in numbers.operand_batching_dims)
    _nothing_along("gather", given[:1], own)
    indices = iter(given[1][:-1])
    return [
        tuple(
            (OWN if n != 1 else None) if i in numbers.offset_dims else next(indices)
            for i, n in enumerate(shape)
        )
    ]


def _dot(equation: Any, given: list[Axes]) -> list[Axes]:
    """Sums over axes of their own leave the others."""
    (left, right), (left_batch, right_batch) = equation.params["dimension_numbers"]
    for axes, along in zip(given, (left, right), strict=True):
        _nothing_along("dot_general", [axes], along)
    pairs = zip(left_batch, right_batch, strict=True)
    both = [_merged("dot_general", {given[0][i], given[1][j]}) for i, j in pairs]
    taken = ({*left, *left_batch}, {*right, *right_batch})
    free = [
        x for axes, of_one in zip(given, taken, strict=True) for i, x in enumerate(axes) if i not in of_one
    ]
    return [(*both, *free)]


def _stack(equation: Any, given: list[Axes]) -> list[Axes]:
    axes, place = _together("stack", given, equation.invars[0].aval.shape), equation.params["axis"]
    return [(*axes[:place], OWN, *axes[place:])]


def _class_of_primitive(equation: Any, given: list[Axes]) -> list[Axes]:
    """Follows the one of JAX's classes of primitives that finds where numbers stand in a sorted array."""
    kind = type(equation.params.get("_prim")).__name__
    if kind != "SearchSorted" or any(map(_is_of_tile, given[0])):
        raise _Mixes(f"{kind!r}, which is not number by number, of {_first_of_tile(given)}")
    return [given[1]]


def _branches(equation: Any, given: list[Axes]) -> list[Axes]:
    found = [_followed(branch, given[1:]) for branch in equation.params["branches"]]
    return [_together("cond", axes, axes[0]) for axes in zip(*found, strict=True)]


def _loop(name: str, body: Any, consts: list[Axes], carry: list[Axes], xs: list[Axes]) -> list[Axes]:
    """Returns the axes of what a body carries, and of what it gives beside, which follow from one another."""
    while True:
        found = _followed(body, [*consts, *carry, *xs])
        pairs = zip(carry, found, strict=False)
        new = [_together(name, pair, pair[0]) for pair in pairs]
        if new == carry:  # a loop may take no turn: then it gives what it began with
            return [*carry, *found[len(carry) :]]
        carry = new


def _while(equation: Any, given: list[Axes]) -> list[Axes]:
    """Follows its body; its condition under `jax.vmap` asks whether any element goes on, and is left out."""
    skipped, consts = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    given = given[skipped:]
    return _loop("while", equation.params["body_jaxpr"], given[:consts], given[consts:], [])


def _scan(equation: Any, given: list[Axes]) -> list[Axes]:
    consts, carry, _ = walk.scan_counts(equation)
    given, carried, xs = given[:consts], given[consts : consts + carry], given[consts + carry :]
    _nothing_along("scan", xs, (0,))
    found = _loop("scan", equation.params["jaxpr"], given, carried, [axes[1:] for axes in xs])
    entries = None if equation.params["length"] == 1 else OWN
    return [*found[:carry], *((entries, *axes) for axes in found[carry:])]


_RULES: dict[str, Callable[[Any, list[Axes]], list[Axes]]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": lambda equation, given: [
        tuple(axis for i, axis in enumerate(given[0]) if i not in equation.params["dimensions"])
    ],
    "transpose": lambda equation, given: [tuple(given[0][i] for i in equation.params["permutation"])],
    "slice": _cut,
    "dynamic_slice": _cut,
    "pad": _cut,
    "gather": _gather,
    "dot_general": _dot,
    "stack": _stack,
    "call_hi_primitive": _class_of_primitive,
    "cond": _branches,
    "while": _while,
    "scan": _scan,
}


# what these give for one value twice; inexact ones may be NaN
_OF_EQUALS = {"eq": True, "le": True, "ge": True, "ne": False, "lt": False, "gt": False, "sub": 0}


def is_true_on_diagonal(function: Callable[..., Any], lead: Sequence[Any], index: Any, args: Any) -> bool:
    """Tells whether `function(*lead, x, x, *args)` is certainly True for every index x.

    `lead` and `index` are types of scalars, `args` those of arrays, and trees of them.
    """
    try:
        closed = jax.make_jaxpr(lambda *given: function(*given))(*lead, index, index, *args)
    except Exception:  # it does not take single elements: nothing is known of it
        return False
    numbers: dict[Any, int] = {}
    arguments = [_numbered(numbers, ("argument", i)) for i, _ in enumerate(closed.jaxpr.invars)]
    arguments[len(lead) + 1] = arguments[len(lead)]
    of_array = lambda x, _: _numbered(numbers, ("constant", id(x)))
    rule = partial(_values_of_equals, numbers)
    (result,) = walk.evaluate(closed, arguments, rule, of_array, literal=lambda x, _: x)
    return isinstance(result, np.ndarray) and bool(result.all())


def _numbered(numbers: dict[Any, int], expression: Any) -> int:
    return numbers.setdefault(expression, len(numbers))


def _values_of_equals(numbers: dict[Any, int], equation: Any, inputs: list[Any]) -> list[Any]:
    """Returns each result: a NumPy array if it is known; else a number that equal expressions share."""
    name = equation.primitive.name
    # known: of constants, or decided by one
    if all(isinstance(x, np.ndarray) for x in inputs):
        known = constant(equation, inputs)
        if known is not None:
            return [known]
    if name in ("and", "or") and equation.outvars[0].aval.dtype == np.bool_:
        decides = name == "or"
        if any((x == decides).all() for x in inputs if isinstance(x, np.ndarray)):
            return [np.full(equation.outvars[0].aval.shape, decides)]
    # known of one value twice
    if name in _OF_EQUALS and isinstance(inputs[0], int) and inputs[0] == inputs[1]:
        aval = equation.outvars[0].aval
        if not jnp.issubdtype(equation.invars[0].aval.dtype, jnp.inexact):
            return [np.full(aval.shape, _OF_EQUALS[name], aval.dtype)]
    if name == "select_n" and isinstance(inputs[0], np.ndarray) and inputs[0].ndim == 0:
        return [inputs[1 + int(inputs[0])]]
    # any other expression: one number for all that are alike
    given = tuple((str(x.dtype), x.tobytes()) if isinstance(x, np.ndarray) else x for x in inputs)
    parameters = str(sorted(equation.params.items(), key=lambda x: x[0]))
    return [_numbered(numbers, (name, parameters, given, i)) for i, _ in enumerate(equation.outvars)]
