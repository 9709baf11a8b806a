"""What masks and scores share: a function, what it reads of `mod_args`, and a value as their identity."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from jax_attn_bwd._core import checks
from jax_attn_bwd.mods.mod_args_spec import Read
from jax_attn_bwd.ops.dot_product.mod_functions import takes_other


@dataclass(frozen=True)
class Mod:
    """A function with what it reads: equal ones are one static argument, and so are their copies."""

    function: Callable[..., Any]
    num_args: int = 0
    reads: tuple[Read | None, ...] = ()
    place: ClassVar[tuple[str, ...]] = ("batch", "head", "row", "column")

    def __post_init__(self) -> None:
        """Checks the function; takes the docstring and the module of one that it decorates."""
        taken = takes_other(self.function, len(self.place) + self.num_args)
        if taken is not None:
            expected = f"take ({', '.join(self.place)}) and the {self.num_args} arrays that num_args says"
            raise TypeError(checks.message(f"mods.{type(self).__name__}", "function", expected, taken))
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
