"""Interval arithmetic on a function's jaxpr: between which bounds lie its results, if its arguments lie so?

Each element of each array is held between a least and a greatest value. Elementwise functions of arrays whose
elements stand for tiles of indices are so evaluated on all tiles at once, in time and memory of their number.
Bounds enclose every value that can come out: exactly where each argument is read once, else with room to
spare. What is not known makes no bounds: the whole range of an integer, or for floats NaN, to which
no comparison gives a definite answer.

NumPy bounds stay NumPy, so that what shapes tell is known at trace time; others are computed by jnp.

References:
  Moore, Kearfott and Cloud, Introduction to Interval Analysis, SIAM, 2009.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks, pallas
from jax_attn_bwd._core.jaxpr import walk
from jax_attn_bwd._core.jaxpr.interval_rules import RULES, STRUCTURAL, dtype_range, floored, gathered

# these make or move floats without rounding them
_MOVES = ("dynamic_slice", "dynamic_update_slice", "iota", "pad", "rev", "sort", "split")


@dataclass(frozen=True, eq=False)
class Interval:
    """Bounds of the elements of an array."""

    least: Any  # an array of its shape and dtype
    greatest: Any  # likewise; the same object where the value is exact
    vague: bool = False  # whether it depends on something that was not known, and may be known later
    parts: tuple["Interval", ...] = ()  # what it was concatenated from along its last axis, if worth knowing

    @property
    def is_exact(self) -> bool:
        """Tells whether least and greatest are the value itself."""
        return self.least is self.greatest

    @property
    def is_known(self) -> bool:
        """Tells whether the bounds are known at trace time."""
        return isinstance(self.least, np.ndarray) and isinstance(self.greatest, np.ndarray)


def exact(x: Any) -> Interval:
    """Returns the value `x` itself; concrete arrays are known at trace time."""
    values = checks.known(x)
    x = x if values is None else values
    return Interval(x, x)


def unknown(shape: Sequence[Any], dtype: Any, vague: bool = False) -> Interval:
    """Returns the bounds of a value of which nothing is known; `vague` if it may be known later."""
    xp: Any = np if all(isinstance(n, int) for n in shape) else jnp
    least, greatest = (xp.broadcast_to(x, tuple(shape)) for x in dtype_range(dtype))
    return Interval(least, greatest, vague)


@jax.jit
def told(value: Any, least: Any, greatest: Any) -> Any:
    """Returns `value`, which bounds take to lie between `least` and `greatest`; nothing else reads these."""
    del least, greatest
    return value


def _is_told(equation: Any) -> bool:
    """Tells whether an equation is a call of `told`."""
    called = walk.called_jaxpr(equation)
    return equation.params.get("name") == "told" and not called.eqns and len(equation.invars) == 3


def bounds(function: Callable[..., Any], *arguments: Any) -> Interval:
    """Returns the bounds of the one result of `function`; `arguments` are pytrees of `Interval`s."""
    leaves, tree = jax.tree.flatten(arguments)
    shapes = [jax.ShapeDtypeStruct(x.least.shape, x.least.dtype) for x in leaves]
    closed = jax.make_jaxpr(lambda *given: function(*jax.tree.unflatten(tree, given)))(*shapes)
    of_exact = lambda x, _: exact(x)
    (result,) = walk.evaluate(closed, leaves, _results, of_exact, enters=_is_evaluated_by_parts)
    return result


def _is_evaluated_by_parts(equation: Any, inputs: list[Interval]) -> bool:
    """Tells whether rules see what an equation calls: not if it can be run, or has a rule of its own."""
    if all(x.is_exact for x in inputs) and not all(x.is_known for x in inputs):
        return False
    return not (_is_told(equation) or (len(inputs) == 2 and is_floored(equation)))


def _results(equation: Any, inputs: list[Interval]) -> list[Interval]:
    """Returns the bounds of the results of an equation."""
    name, vague = equation.primitive.name, any(x.vague for x in inputs)
    all_exact = all(x.is_exact for x in inputs)
    # exact values that are traced: the equation itself
    if all_exact and not all(x.is_known for x in inputs):
        return _bound(equation, inputs)
    # calls that have a rule of their own: `told`, and jnp's `//` and `%`
    if walk.called_jaxpr(equation) is not None:
        if _is_told(equation):
            return [Interval(inputs[1].least, inputs[2].greatest, inputs[1].vague or inputs[2].vague)]
        dtype = equation.outvars[0].aval.dtype  # a Python number that they divide by is wider under x64
        return [_by_rule(floored[equation.params["name"]], equation, [_cast(x, dtype) for x in inputs])]
    # equations that have a rule
    if name == "gather":
        return [_gather(equation, *inputs)]
    if name == "concatenate" and not all_exact:
        return [_concatenated(equation, inputs)]
    if name in STRUCTURAL:
        return [_rearranged(equation, inputs)]
    if name in RULES:
        return [_by_rule(RULES[name], equation, inputs)]
    # known values of any other equation: it is run; else nothing is known
    if all_exact and _is_of_one_value(equation):
        with contextlib.nullcontext() if _is_symbolic(equation) else jax.ensure_compile_time_eval():
            return _bound(equation, inputs)
    return [unknown(x.aval.shape, x.aval.dtype, vague) for x in equation.outvars]


def _cast(x: Interval, dtype: Any) -> Interval:
    """Bounds in a dtype that they fit."""
    if x.least.dtype == dtype:
        return x
    least = x.least.astype(dtype)
    return Interval(least, least if x.is_exact else x.greatest.astype(dtype), x.vague)


def _is_of_one_value(equation: Any) -> bool:
    """Tells whether its results are the same wherever they are computed: floats may be rounded otherwise."""
    floats = any(jnp.issubdtype(x.aval.dtype, jnp.inexact) for x in equation.outvars)
    return not floats or equation.primitive.name in _MOVES


def _is_symbolic(equation: Any) -> bool:
    """Tells whether results are, or have, sizes not known while an exported program is traced."""
    sizes = (n for x in equation.outvars for n in x.aval.shape)
    return equation.primitive.name == "dim_as_value" or not all(isinstance(n, int) for n in sizes)


def _bound(equation: Any, inputs: Sequence[Interval]) -> list[Interval]:
    """Returns the results of exact values: those of the equation itself."""
    values = pallas.vary_alike([jnp.asarray(x.least) for x in inputs])
    return [exact(x) for x in walk.bound(equation, values)]


def constant(equation: Any, values: Sequence[np.ndarray]) -> np.ndarray | None:
    """Returns the one result of known values, by the rules; None if these do not tell it exactly."""
    name, inputs = equation.primitive.name, [exact(x) for x in values]
    if name in STRUCTURAL:
        found = _rearranged(equation, inputs)
    elif name in RULES:
        found = _by_rule(RULES[name], equation, inputs)
    else:
        return None
    return found.least if found.is_known and found.is_exact else None


def is_floored(equation: Any) -> bool:
    """Tells whether it is jnp's `//` or `%` of integers, which one rule bounds better than its parts'."""
    name = equation.params.get("name")
    avals = [x.aval for x in equation.invars]
    if name not in floored or not all(jnp.issubdtype(x.dtype, jnp.integer) for x in avals):
        return False
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals]
    own = jax.make_jaxpr(getattr(jnp, name))(*shapes).eqns[-1]
    return str(own.params.get("jaxpr")) == str(equation.params["jaxpr"])


def _by_rule(rule: Any, equation: Any, inputs: Sequence[Interval]) -> Interval:
    """Bounds by an elementwise rule: `(np or jnp, parameters, inputs...) -> (least, greatest)`."""
    xp: Any = np if all(x.is_known for x in inputs) else jnp
    (aval,) = (x.aval for x in equation.outvars)
    square = len(equation.invars) == 2 and equation.invars[0] is equation.invars[1]
    parameters = {**equation.params, "dtype": aval.dtype, "square": square}
    with np.errstate(all="ignore"):
        least, greatest = rule(xp, parameters, *inputs)
    least, greatest = (xp.broadcast_to(xp.asarray(x), aval.shape) for x in (least, greatest))
    if all(x.is_exact for x in inputs) and np.array_equal(least, greatest):
        return Interval(least, least)
    return Interval(least, greatest, any(x.vague for x in inputs))


def _rearranged(equation: Any, inputs: Sequence[Interval]) -> Interval:
    """Does to bounds what the equation does, which moves, repeats, joins or reduces elements in order."""

    def moved(values):
        if all(isinstance(x, np.ndarray) for x in values):
            return STRUCTURAL[equation.primitive.name](equation, *values)
        values = pallas.vary_alike([jnp.asarray(x) for x in values])
        return equation.primitive.bind(*values, **equation.params)

    least = moved([x.least for x in inputs])
    vague = any(x.vague for x in inputs)
    if all(x.is_exact for x in inputs):
        return Interval(least, least, vague)
    return Interval(least, moved([x.greatest for x in inputs]), vague)


def _concatenated(equation: Any, inputs: list[Interval]) -> Interval:
    """Keeps what was joined: a gather tells apart the indices into several axes."""
    whole, axis = _rearranged(equation, inputs), equation.params["dimension"]
    parts = tuple(inputs) if axis == whole.least.ndim - 1 else ()
    return Interval(whole.least, whole.greatest, whole.vague, parts)


def _gather(equation: Any, operand: Interval, indices: Interval) -> Interval:
    """Returns the bounds of single elements that are read of an exact operand, at indices between bounds."""
    # only single elements of a known array
    (aval,) = (x.aval for x in equation.outvars)
    numbers, rank = equation.params["dimension_numbers"], operand.least.ndim
    elements = (
        not numbers.offset_dims
        and not numbers.operand_batching_dims
        and sorted(numbers.start_index_map) == list(range(rank))
    )
    vague = operand.vague or indices.vague
    symbolic = not all(isinstance(n, int) for n in (*operand.least.shape, *aval.shape))
    if vague or symbolic or not elements or not operand.is_exact or 0 in operand.least.shape:
        return unknown(aval.shape, aval.dtype, vague)
    # bounds of the index of each axis: of what the indices were joined from, where that is known
    found = [(part, 0) for part in indices.parts]
    if any(x.least.shape[-1] != 1 for x in indices.parts) or len(found) != rank:
        found = [(indices, k) for k in range(rank)]
    places: list[Any] = [None] * rank
    for axis, (part, k) in zip(numbers.start_index_map, found, strict=True):
        least = part.least[..., k]
        places[axis] = (least, least if part.is_exact else part.greatest[..., k])
    return Interval(*gathered(operand.least, places, str(equation.params["mode"])))
