"""Shared by the secondary calls of an operator, `<operator>_bwd`, `<operator>_jvp` and those built on it.

A TypedDict lists the keywords of such a call, and the call beneath has their defaults:

    def f_bwd(dout, x, *, wrt=None, **options: Unpack[FKeywords]):
        options = secondary_calls.complete("f_bwd", f, FKeywords, options)

An editor shows the names and types that the TypedDict lists, and nothing is spelled out twice. A `_jvp` takes
tangents by name and hands back pairs.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.sharding import reshard_like


def complete(
    operator: str, like: Callable[..., Any], allowed: Any, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the keywords that a call was given, and the defaults of the others that it may be given.

    Args:
      operator: the call, as errors name it.
      like: the function whose signature has the defaults.
      allowed: the TypedDict of the keywords that the call may be given.
      given: the keywords that it was given.

    Raises:
      TypeError: a keyword is unknown, in the words that Python has for it.
    """
    defaults = _defaults(like, allowed)
    for name in given:
        if name not in defaults and name not in allowed.__required_keys__:
            raise TypeError(f"{operator}() got an unexpected keyword argument {name!r}")
    return {**defaults, **given}


@cache
def _defaults(like: Callable[..., Any], allowed: Any) -> dict[str, Any]:
    parameters = inspect.signature(like).parameters
    return {name: x.default for name, x in parameters.items() if name in allowed.__optional_keys__}


def outputs_and_tangents(
    operator: str, call: Callable[..., Any], primals: Mapping[str, Any], tangents: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Returns (`call(**primals)`, its tangents), by the rule of a call with `forward_mode=True`.

    Args:
      primals: the differentiable arguments; None where not given.
      tangents: by the same names; None is zero.
    """
    moving = {name: t for name, t in tangents.items() if t is not None}
    given = {name: _arrays(operator, name, primals[name], t) for name, t in moving.items()}
    rest = {name: x for name, x in primals.items() if name not in moving}
    at = {name: x for name, (x, _) in given.items()}
    along = {name: t for name, (_, t) in given.items()}
    return jax.jvp(lambda at: call(**rest, **at), (at,), (along,))


def _arrays(operator: str, name: str, primal: Any, tangent: Any) -> tuple[Any, Any]:
    """Returns the argument and its tangent, of one shape and dtype, or sequences of such."""
    if isinstance(primal, list | tuple) and isinstance(tangent, list | tuple) and len(primal) == len(tangent):
        names = (f"{name}[{i}]" for i in range(len(primal)))
        pairs = [_arrays(operator, *each) for each in zip(names, primal, tangent, strict=True)]
        return tuple(x for x, _ in pairs), tuple(t for _, t in pairs)
    if primal is None:
        raise ValueError(checks.message(operator, f"d{name}", f"be None where {name} is None", "an array"))
    x = checks.floating(operator, name, primal)
    t = checks.floating(operator, f"d{name}", tangent)
    checks.shape(operator, f"d{name}", t, f"the shape of {name}", x.shape)
    checks.same_dtype(operator, **{name: x, f"d{name}": t})
    return x, reshard_like(t, x, tuple(range(x.ndim)))
