"""Jaxprs on values of the caller's own kind: bounds, axes, expressions, numbers that are guarded."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np


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
