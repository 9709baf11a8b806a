"""Whether a function of a row and a column is True wherever the two are equal, by its jaxpr alone.

Equal expressions are one value, whatever it is: `ids[row] == ids[column]` is True on the diagonal for all
`ids`. So no array is read, and nothing is computed but with constants.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import jaxprs
from jax_attn_bwd._core.intervals import constant

# what these give for one value twice; inexact ones may be NaN
_OF_EQUALS = {"eq": True, "le": True, "ge": True, "ne": False, "lt": False, "gt": False, "sub": 0}


def is_true(function: Callable[..., Any], lead: Sequence[Any], index: Any, args: Any) -> bool:
    """Whether `function(*lead, x, x, *args)` is certainly True for every index x.

    Args:
      lead, index: types of scalars.
      args: types of arrays, and trees of them.
    """
    try:
        closed = jax.make_jaxpr(lambda *given: function(*given))(*lead, index, index, *args)
    except Exception:  # it does not take single elements: nothing is known of it
        return False
    numbers: dict[Any, int] = {}
    arguments = [_numbered(numbers, ("argument", i)) for i, _ in enumerate(closed.jaxpr.invars)]
    arguments[len(lead) + 1] = arguments[len(lead)]
    of_array = lambda x, _: _numbered(numbers, ("constant", id(x)))
    rule = partial(_results, numbers)
    (result,) = jaxprs.evaluate(closed, arguments, rule, of_array, literal=lambda x, _: x)
    return isinstance(result, np.ndarray) and bool(result.all())


def _numbered(numbers: dict[Any, int], expression: Any) -> int:
    return numbers.setdefault(expression, len(numbers))


def _results(numbers: dict[Any, int], equation: Any, inputs: list[Any]) -> list[Any]:
    """A value of each result: a NumPy array if it is known; else a number that equal expressions share."""
    name = equation.primitive.name
    if all(isinstance(x, np.ndarray) for x in inputs):
        known = constant(equation, inputs)
        if known is not None:
            return [known]
    if name in ("and", "or") and equation.outvars[0].aval.dtype == np.bool_:
        decides = name == "or"
        if any((x == decides).all() for x in inputs if isinstance(x, np.ndarray)):
            return [np.full(equation.outvars[0].aval.shape, decides)]
    if name in _OF_EQUALS and isinstance(inputs[0], int) and inputs[0] == inputs[1]:
        aval = equation.outvars[0].aval
        if not jnp.issubdtype(equation.invars[0].aval.dtype, jnp.inexact):
            return [np.full(aval.shape, _OF_EQUALS[name], aval.dtype)]
    if name == "select_n" and isinstance(inputs[0], np.ndarray) and inputs[0].ndim == 0:
        return [inputs[1 + int(inputs[0])]]
    given = tuple((str(x.dtype), x.tobytes()) if isinstance(x, np.ndarray) else x for x in inputs)
    parameters = str(sorted(equation.params.items(), key=lambda x: x[0]))
    return [_numbered(numbers, (name, parameters, given, i)) for i, _ in enumerate(equation.outvars)]
