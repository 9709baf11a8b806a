"""Warnings that point at the line of the caller, however deep in this package the reason is found."""

import sys
import warnings

_PACKAGE = __name__.partition(".")[0]


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line outside this package that made the call; Python shows it once for each line."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(f"{_PACKAGE}."):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
