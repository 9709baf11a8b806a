"""Keywords of a secondary call: a TypedDict lists them, and the call beneath has their defaults.

    def f_bwd(dout, x, *, wrt=None, **options: Unpack[FKeywords]):
        options = keywords.complete("f_bwd", f, FKeywords, options)

An editor shows the names and types that the TypedDict lists, and nothing is spelled out twice.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any


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
