"""What a child tells while it runs a step, so that a launch that hangs is noticed soon."""

from collections.abc import Callable
from typing import Any

COMPILING, LAUNCHING = "compiling", "launching"
_listeners: list[Callable[[str], None]] = []


def listen(listener: Callable[[str], None]) -> None:
    """`listener` is called with what begins."""
    _listeners.append(listener)


def tell(doing: str) -> None:
    """`doing` begins: COMPILING, which may take long, or LAUNCHING, which may not."""
    for listener in _listeners:
        listener(doing)


def compiled(function: Any, *args: Any, **kwargs: Any) -> Any:
    """`function`, of `jax.jit`, compiled for these arguments; what follows is a launch."""
    tell(COMPILING)
    program = function.lower(*args, **kwargs).compile()
    tell(LAUNCHING)
    return program
