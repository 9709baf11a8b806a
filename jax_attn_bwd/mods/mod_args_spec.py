"""What named functions read of `mod_args`, checked: past the end of an array JAX reads its last number."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd.ops.dot_product.mod_functions import ReadSizes


@dataclass(frozen=True)
class Read:
    """An array that a function reads.

    Attributes:
      name: of the function and of the array, for messages.
      kind: of its dtype, `jnp.integer` or `jnp.floating`.
      shape: sizes; "N" is the number of query heads, "T" at least that of the rows and of the columns.
      has_batch: whether the batch axes of a call may stand in front, or one of all their entries.
    """

    name: str
    kind: Any
    shape: tuple[int | str, ...]
    has_batch: bool = False

    def check(self, operator: str, x: Any, sizes: ReadSizes) -> None:
        """Raises unless `x` fits a call of those sizes."""
        argument = f"{self.name} in mod_args"
        dtype = getattr(x, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, self.kind):
            expected = "be an array of integers" if self.kind is jnp.integer else "be a floating-point array"
            got = type(x).__name__ if dtype is None else f"dtype {dtype}"
            raise TypeError(checks.message(operator, argument, expected, got))
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
        tail = [str(n) for n in self.shape]
        names = " or ".join(f"[{', '.join(x)}]" for x in (tail, ["...", *tail])[: 1 + self.has_batch])
        letters = [(n, m) for n, m in zip(self.shape, wanted, strict=True) if isinstance(n, str)]
        sides = [f"{n} {'at least' if n == 'T' else '='} {m}" for n, m in letters]
        sides += [f"... = {sizes.batch}"] * self.has_batch
        return f"have shape {names}" + (f" with {', '.join(sides)}" if sides else "")


def check(
    operator: str,
    argument: str,
    num_args: int,
    reads: Sequence[Read | None],
    args: Sequence[Any],
    sizes: ReadSizes,
) -> None:
    """Raises unless `args` hold what the function given as `argument` reads; None is not known."""
    if len(args) != num_args:
        expected = f"hold the {num_args} that {argument} reads"
        raise ValueError(checks.message(operator, "mod_args", expected, f"{len(args)}"))
    for read, x in zip(reads, args, strict=False):
        if read is not None:
            read.check(operator, x, sizes)
