"""What masks and scores share: a function, what it reads of `mod_args`, and a value as their identity."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax_attn_bwd.mods.mod_args_spec import Read


@dataclass(frozen=True)
class Mod:
    """A function with what it reads: equal ones are one static argument, and so are their copies."""

    function: Callable[..., Any]
    num_args: int = 0
    reads: tuple[Read | None, ...] = ()

    def __post_init__(self) -> None:
        """Takes the docstring and the module of a function that it decorates, for `help` and for pickles."""
        for name in ("__doc__", "__module__"):
            if hasattr(self.function, "__qualname__") and getattr(self.function, name):
                object.__setattr__(self, name, getattr(self.function, name))

    def __reduce__(self) -> str | tuple[Any, ...]:
        """One that is a module's own is pickled and copied by its name, as functions are; others by value."""
        name = getattr(self.function, "__qualname__", "")
        module = getattr(self.function, "__module__", None)
        if module != "__main__" and getattr(sys.modules.get(str(module)), name, None) is self:
            return name
        return type(self), (self.function, self.num_args, self.reads)
