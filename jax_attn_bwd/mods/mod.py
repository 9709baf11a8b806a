"""A mask or a score as a value: a function, and what it reads of `mod_args`, which is checked.

Past the end of an array JAX reads its last number, so an array of a wrong size would not be noticed.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd.ops.dot_product.mod_functions import ReadSizes, takes_other


@dataclass(frozen=True)
class Read:
    """An array that a function reads."""

    name: str  # of the function and of the array, for messages
    kind: Any  # of its dtype, `jnp.integer` or `jnp.floating`
    shape: tuple[int | str, ...]  # "N": query heads; "T": at least as many as rows, and as columns
    has_batch: bool = False  # the batch axes of a call may stand in front, or one of all their entries

    def check(self, operator: str, x: Any, sizes: ReadSizes) -> None:
        """Raises unless `x` fits a call of those sizes."""
        argument = f"{self.name} in mod_args"
        dtype = getattr(x, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, self.kind):
            expected = "be an array of integers" if self.kind is jnp.integer else "be a floating-point array"
            got = type(x).__name__ if dtype is None else f"dtype {dtype}"
            raise TypeError(checks.message(operator, argument, expected, got))

        # the batch axes of the call, in front or as one; then sizes that are known and as expected
        shape, cut = tuple(x.shape), max(len(x.shape) - len(self.shape), 0)
        leads = [(), sizes.batch, (math.prod(sizes.batch),)][: 3 if self.has_batch else 1]
        letters = {"N": sizes.heads, "T": sizes.tokens}
        wanted = [letters[n] if isinstance(n, str) else n for n in self.shape]
        fits = len(shape) >= len(wanted) and shape[:cut] in leads
        for letter, n, least in zip(self.shape, shape[cut:], wanted, strict=False):
            known = isinstance(n, int) and isinstance(least, int)  # else symbolic
            fits = fits and (not known or n == least or (letter == "T" and n > least))
        if not fits:
            raise ValueError(checks.message(operator, argument, self._expected(sizes, wanted), shape))

    def _expected(self, sizes: ReadSizes, wanted: Sequence[Any]) -> str:
        """Tells what shape the array should have."""
        tail = [str(n) for n in self.shape]
        names = " or ".join(f"[{', '.join(x)}]" for x in (tail, ["...", *tail])[: 1 + self.has_batch])
        letters = [(n, m) for n, m in zip(self.shape, wanted, strict=True) if isinstance(n, str)]
        sides = [f"{n} {'at least' if n == 'T' else '='} {m}" for n, m in letters]
        sides += [f"... = {sizes.batch}"] * self.has_batch
        return f"have shape {names}" + (f" with {', '.join(sides)}" if sides else "")


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

    def _check_called(self, column: Any) -> None:
        """Raises where it is called without places, as functions are that make a mask or a score."""
        if column is None:
            kind, name = type(self).__name__.lower(), getattr(self.function, "__name__", "...")
            expected, got = f"be told ({', '.join(self.place)})", f"a call of what is a {kind} itself"
            remedy = f"write {kind}_mod=mods.{name}, without ()"
            raise TypeError(checks.message(f"mods.{name}", f"a {kind}", expected, got, remedy))

    def _check(self, operator: str, argument: str, args: Sequence[Any], sizes: ReadSizes) -> None:
        """Raises unless `args` hold what the function, given as `argument`, reads."""
        if len(args) != self.num_args:
            expected = f"hold the {self.num_args} that {argument} reads"
            raise ValueError(checks.message(operator, "mod_args", expected, f"{len(args)}"))
        for read, x in zip(self.reads, args, strict=False):
            if read is not None:  # else it is not known
                read.check(operator, x, sizes)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickles and copies one that is a module's own by its name, as functions are; others by value."""
        name = getattr(self.function, "__qualname__", "")
        module = getattr(self.function, "__module__", None)
        if module != "__main__" and getattr(sys.modules.get(str(module)), name, None) is self:
            return name
        return type(self), (self.function, self.num_args, self.reads)
