"""Completes the options of an operator's secondary calls, which spell only arguments of their own.

A TypedDict lists the options of `<operator>_bwd` and of what is built on it, and the call beneath has their
defaults:

    def f(x, *, scale=1.0, forward_mode=False):
        options, operands = prepare("f", x, scale=scale)

    def f_bwd(dout, x, *, wrt=None, **options: Unpack[FKeywords]):
        given = secondary_calls.complete("f_bwd", f, FKeywords, options)

An editor shows the names and types that the TypedDict lists, and nothing is spelled out twice.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any


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
