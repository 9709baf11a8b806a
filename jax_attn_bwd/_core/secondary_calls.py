"""Hands the arguments of public calls on by name; an operator's secondary calls spell only their own.

A TypedDict lists the options of `<operator>_bwd`, `<operator>_jvp` and what is built on them, and the call
beneath has their defaults:

    def f(x, *, scale=1.0, forward_mode=False):
        options, operands = prepare("f", **secondary_calls.without(locals(), "forward_mode"))

    def f_bwd(dout, x, *, wrt=None, **options: Unpack[FKeywords]):
        given = secondary_calls.complete("f_bwd", f, FKeywords, options)

    def f_jvp(x, *, dx=None, **options: Unpack[FKeywords]):
        return secondary_calls.with_tangent(f, FKeywords, **locals())

An editor shows the names and types that the TypedDict lists, and nothing is spelled out twice.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.sharding import reshard_like


def complete(
    operator: str, like: Callable[..., Any], allowed: Any, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the options that a call was given, and the defaults of the others that it may be given.

    Args:
      operator: the call, as errors name it.
      like: the function whose signature has the defaults.
      allowed: the TypedDict of the options that the call may be given.
      given: the options that it was given.

    Raises:
      TypeError: an option is unknown or missing, in the words that Python has for it.
    """
    known = allowed.__required_keys__ | allowed.__optional_keys__
    for name in given.keys() - known:
        close = difflib.get_close_matches(name, known, 1)
        remedy = f". Did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"{operator}() got an unexpected keyword argument {name!r}{remedy}")
    for name in allowed.__required_keys__ - given.keys():
        raise TypeError(f"{operator}() missing 1 required keyword-only argument: {name!r}")
    return {**_defaults(like, allowed), **given}


@cache
def _defaults(like: Callable[..., Any], allowed: Any) -> dict[str, Any]:
    parameters = inspect.signature(like).parameters
    return {name: x.default for name, x in parameters.items() if name in allowed.__optional_keys__}


def without(arguments: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Returns the arguments of a call, its `locals()`, but those of these names."""
    return {name: x for name, x in arguments.items() if name not in names}


def with_tangent(
    operator: Callable[..., Any], allowed: Any, options: Mapping[str, Any], **arguments: Any
) -> tuple[Any, Any]:
    """Returns the output of `operator` and its tangent, as its `_jvp` does.

    Args:
      operator: the function, of which `dx` is the tangent of the argument `x`.
      allowed: the TypedDict of the options.
      options: those that the `_jvp` was given.
      arguments: its other arguments, the tangents among them.
    """
    name = f"{operator.__name__}_jvp"
    arguments |= complete(name, operator, allowed, options)
    moving = [x for x in inspect.signature(operator).parameters if f"d{x}" in arguments]
    tangents = {x: arguments.pop(f"d{x}") for x in moving}
    primals = {x: arguments.pop(x) for x in moving}
    return outputs_and_tangents(name, partial(operator, forward_mode=True, **arguments), primals, tangents)


def outputs_and_tangents(
    operator: str, call: Callable[..., Any], primals: Mapping[str, Any], tangents: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Returns (`call(**primals)`, its tangents), by the rule of a call with `forward_mode=True`.

    Args:
      operator: the `_jvp`, as errors name it.
      call: the operator, with the arguments that have no tangents.
      primals: the differentiable arguments; None where not given.
      tangents: by the same names; None is zero.
    """
    at, along = {}, {}
    for name, tangent in tangents.items():
        if tangent is not None:
            at[name], along[name] = _arrays(operator, name, primals[name], tangent)
    rest = {name: x for name, x in primals.items() if name not in at}
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
