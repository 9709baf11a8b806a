"""Jaxprs on values of the caller's own kind: bounds, axes, expressions, numbers that are guarded.

**Guarded** functions are elementwise, and hidden elements have no derivative by them, not even a bad one. A
cotangent that is 0 times a derivative that is NaN or infinite is NaN. So where an element is hidden, what an
operation with such a derivative reads is replaced by a harmless number: `where` then stands between it and
the arguments, and cuts its cotangents off, at any order. Operations whose derivatives are always finite are
left as they are.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import pallas

_HARMLESS = 0.5  # within the domain of nearly all functions: log, sqrt, 1 / x, asin, atanh
_MOVES = frozenset(
    ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "slice", "dynamic_slice", "gather")
)
_STEPS = frozenset(("sign", "floor", "ceil", "round", "stop_gradient"))
# their derivatives are 0, 1 and -1
_LINEAR = frozenset(("add", "sub", "neg", "max", "min", "clamp", "select_n", "convert_element_type", "copy"))
_LINEAR |= _MOVES | _STEPS | {"concatenate", "iota", "pvary", "pcast", "reduce_sum"}
_KEEPS_FINITE = _LINEAR | {"mul", "abs"}  # if they are given numbers that integers were converted to


def evaluate(
    closed: Any,
    inputs: Sequence[Any],
    rule: Callable[[Any, list[Any]], Sequence[Any]],
    constant: Callable[[Any, Any], Any],
    literal: Callable[[Any, Any], Any] | None = None,
    enters: Callable[[Any, list[Any]], bool] = lambda equation, values: True,
) -> list[Any]:
    """Returns the values of the results of a jaxpr; what its equations call is evaluated in the same way.

    Args:
      closed: a closed jaxpr, or one without constants.
      inputs: a value for each of its arguments.
      rule: `(equation, values of its operands) -> values of its results`.
      constant: `(array, type) -> value` of what the function closes over.
      literal: likewise of a number that is written in an equation, a NumPy array; None: `constant`.
      enters: whether an equation that calls a jaxpr is evaluated by that, not by `rule`.
    """
    jaxpr, literal = getattr(closed, "jaxpr", closed), literal or constant
    found = dict(zip(jaxpr.invars, inputs, strict=True))
    for variable, x in zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True):
        found[variable] = constant(x, variable.aval)

    def read(x):
        return literal(np.asarray(x.val, x.aval.dtype), x.aval) if is_literal(x) else found[x]

    for equation in jaxpr.eqns:
        values, called = [read(x) for x in equation.invars], called_jaxpr(equation)
        if called is not None and enters(equation, values):
            results: Any = evaluate(called, values, rule, constant, literal, enters)
        else:
            results = rule(equation, values)
        found |= dict(zip(equation.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields all equations, those of what they call in the place of the calls."""
    for equation in jaxpr.eqns:
        called = called_jaxpr(equation)
        yield from [equation] if called is None else equations(called.jaxpr)


def bound(equation: Any, values: Sequence[Any], **changes: Any) -> list[jax.Array]:
    """Returns the results of an equation on arrays, with `changes` of its parameters."""
    primitive = equation.primitive
    results = primitive.bind(*values, **(primitive.get_bind_params(equation.params) | changes))
    return results if primitive.multiple_results else [results]


def called_jaxpr(equation: Any) -> Any:
    """Returns the closed jaxpr that an equation calls once, as it is; None if it does not."""
    if equation.primitive.name in ("jit", "pjit", "closed_call", "core_closed_call"):
        return equation.params.get("jaxpr") or equation.params["call_jaxpr"]
    if equation.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        return equation.params["call_jaxpr"]
    if equation.primitive.name in ("checkpoint", "remat", "remat2"):
        from jax.extend.core import ClosedJaxpr

        return ClosedJaxpr(equation.params["jaxpr"], ())
    return None


def is_literal(operand: Any) -> bool:
    """Tells whether an operand of an equation is a constant that is written in it, `operand.val`."""
    from jax.extend.core import Literal  # a tenth of the time of importing this package, if at its top

    return isinstance(operand, Literal)


def scan_counts(equation: Any) -> tuple[int, int, int]:
    """Counts the operands of a scan that are constants, are carried, and are taken entry by entry."""
    if "num_consts" in equation.params:  # JAX before 0.12
        consts, carry = equation.params["num_consts"], equation.params["num_carry"]
        return consts, carry, len(equation.invars) - consts - carry
    consts, carry, xs = map(len, equation.params["ft_in"].unpack())
    return consts, carry, xs


class _Known(NamedTuple):
    x: Any
    varies: bool  # has a derivative by floats that were handed over
    elements: bool  # was made of elements
    finite: bool  # made of integers alone, by operations that make no infinity of them


def guarded(function: Callable[..., Any], seen: jax.Array, elements: tuple, args: tuple) -> jax.Array:
    """Runs `function(*elements, *args)`; elements that are not `seen` have derivative 0, and any value.

    The function is elementwise, of one result; `args` are arrays, and trees of them, that it gathers from;
    `seen`, bool, broadcasts to the elements and has their rank.
    """
    # the jaxpr of the function of a flat list of arrays
    leaves, tree = jax.tree.flatten(args)

    def flat(*given):
        return function(*given[: len(elements)], *jax.tree.unflatten(tree, given[len(elements) :]))

    given = pallas.vary_alike([jnp.asarray(x) for x in (*elements, *leaves)])
    closed = jax.make_jaxpr(flat)(*given)
    # evaluated on them, with what is hidden replaced where a derivative may be bad
    values = [
        _Known(x, is_float := _is_float(x), i < len(elements), not is_float) for i, x in enumerate(given)
    ]
    (result,) = evaluate(
        closed,
        values,
        partial(_results, _Guard(seen)),
        constant=lambda x, _: _Known(x, False, False, not _is_float(x)),
        literal=lambda x, _: _Known(jnp.asarray(x), False, False, bool(np.isfinite(x))),
        enters=lambda equation, _: not equation.primitive.name.startswith("custom_"),
    )
    return result.x


class _Guard:
    """Replaces what is hidden; of a value that is shared by a row or column, if all there is."""

    def __init__(self, seen: jax.Array):
        self._seen: dict[tuple, jax.Array] = {}
        self._all = seen

    def fits(self, shape: tuple) -> bool:
        """Tells whether an array of this shape has an element for some of the elements."""
        sizes = zip(shape, self._all.shape, strict=True) if len(shape) == self._all.ndim else [(2, 3)]
        return all(n in (1, m) or m == 1 for n, m in sizes)

    def __call__(self, x: jax.Array) -> jax.Array:
        axes = tuple(i for i, n in enumerate(self._all.shape) if x.shape[i] == 1 != n)
        if axes not in self._seen:
            self._seen[axes] = self._all.any(axes, keepdims=True)
        return jnp.where(self._seen[axes], x, jnp.asarray(_HARMLESS, x.dtype))


def _results(guard: _Guard, equation: Any, inputs: list[_Known]) -> list[_Known]:
    name = equation.primitive.name
    elements = any(x.elements for x in inputs)
    given = [x.x for x in inputs]
    differentiates = any(_is_float(x.aval) for x in equation.outvars) and any(x.varies for x in inputs)
    if elements and differentiates and not _is_tame(equation, inputs):
        guarded_ones = [_is_float(x) and guard.fits(x.shape) for x in given]
        given = [guard(x) if bad else x for x, bad in zip(given, guarded_ones, strict=True)]
    results = bound(equation, pallas.vary_alike(given))
    varies = any(x.varies for x in inputs)
    finite = name in _KEEPS_FINITE and all(x.finite for x in inputs)
    return [_Known(x, varies and _is_float(x), elements, finite or not _is_float(x)) for x in results]


def _is_tame(equation: Any, inputs: list[_Known]) -> bool:
    """Tells whether its derivatives by what varies are finite, whatever that is."""
    name = equation.primitive.name
    if name in _LINEAR:
        return True
    if name == "mul":
        x, y = inputs
        return (not x.varies or y.finite) and (not y.varies or x.finite)
    if name == "div":
        denominator = equation.invars[1]
        return is_literal(denominator) and denominator.val != 0
    return False


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))
