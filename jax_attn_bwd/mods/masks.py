"""Masks, `(batch, head, row, column, *args) -> bool`; the pictures show the tiles that they leave.

A mask or a score is a value: a function, and what it reads of `mod_args`, which is checked. Past the end of
an array JAX reads its last number, so an array of a wrong size would not be noticed.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd.ops.dot_product import mod_functions
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
            names = ", ".join(read.name for read in self.reads if read is not None)
            remedy = f"write a tuple of {names}" if names else ""
            raise ValueError(checks.message(operator, "mod_args", expected, f"{len(args)}", remedy))
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


@dataclass(frozen=True)
class Mask(Mod):
    """A mask that combines with others.

    Attributes:
      function: `(batch, head, row, column, *args) -> bool`.
      num_args: how many entries of `mod_args` it reads, the first ones.
      reads: what these must be; None, or nothing, where it is not known, and not checked.

    Example:
      >>> from jax_attn_bwd import mods
      >>> def even_heads(batch, head, row, column):
      ...     return head % 2 == 0
      >>> local_or_even = mods.Mask(even_heads) | mods.sliding_window(64)
    """

    @property
    def tile(self) -> tuple[int, int] | None:
        """Rows and columns of the tiles that it is made of, so that those of a call are the same; or None."""
        return getattr(self.function, "tile", None)

    def __call__(
        self, batch: Any = None, head: Any = None, row: Any = None, column: Any = None, *args: Any
    ) -> Any:
        """Whether the row sees the column."""
        self._check_called(column)
        return self.function(batch, head, row, column, *args[: self.num_args])

    def check(self, operator: str, args: Sequence[Any], sizes: ReadSizes) -> None:
        """Raises unless `mod_args` begin with what it reads, for a call of those sizes."""
        self._check(operator, "mask_mod", args[: self.num_args], sizes)

    def __and__(self, other: "Mask") -> "Mask":
        """Returns a mask that is True where both are; the first arguments are those of the left one."""
        return _joined("logical_and", self, other)

    def __or__(self, other: "Mask") -> "Mask":
        """Returns a mask that is True where one is; the first arguments are those of the left one."""
        return _joined("logical_or", self, other)

    def __invert__(self) -> "Mask":
        """Returns a mask that is True where this one is False."""
        return Mask(_Not(self), self.num_args, self.reads)


@dataclass(frozen=True)
class _Joined:
    """Two masks, and how they are joined."""

    join: str  # a function of jnp
    left: Mask
    right: Mask

    @property
    def tile(self):
        return self.left.tile or self.right.tile

    def __call__(self, batch, head, row, column, *args):
        at, cut = (batch, head, row, column), self.left.num_args
        return getattr(jnp, self.join)(self.left(*at, *args[:cut]), self.right(*at, *args[cut:]))


def _joined(join: str, left: Mask, right: Any) -> Mask:
    """Joins two masks; raises unless the right one is a mask, too."""
    remedy, expected = "write mods.Mask(function, num_args)", "be combined with a Mask"
    checks.instance("mods", "a mask", right, Mask, remedy, expected)
    reads = [read for mask in (left, right) for read in mask.reads or (None,) * mask.num_args]
    return Mask(_Joined(join, left, right), left.num_args + right.num_args, tuple(reads))


@dataclass(frozen=True)
class _Not:
    mask: Mask

    def __call__(self, *args):
        return jnp.logical_not(self.mask(*args))


@Mask
def causal(batch: Any, head: Any, row: Any, column: Any) -> Any:
    """A row sees the columns up to its own.

    Example:
      >>> from jax_attn_bwd import mods
      >>> print(mods.picture(mods.causal, 8, 8, block=2))
      +...
      #+..
      ##+.
      ###+
    """
    return column <= row


@dataclass(frozen=True)
class _Window:
    left: int
    right: int

    def __call__(self, batch, head, row, column):
        return (row - column <= self.left) & (column - row <= self.right)


def sliding_window(left: int, right: int = 0) -> Mask:
    """A row sees its own column and `left` before it: it looks back only, unless `right` are seen after it.

    The `local_window_size` of `dot_product_attention` looks both ways where it is one number, as in `jax.nn`.
    Gemma's window of 1,024 tokens is `mods.sliding_window(1023)`, or `local_window_size=(1023, 0)`.

    Example:
      >>> from jax_attn_bwd import mods
      >>> print(mods.picture(mods.sliding_window(3), 8, 8, block=2))
      +...
      #+..
      +#+.
      .+#+
    """
    name = "mods.sliding_window"
    return Mask(_Window(checks.integer(name, "left", left, 0), checks.integer(name, "right", right, 0)))


@partial(Mask, num_args=1, reads=(Read("the length of prefix_lm", jnp.integer, (), has_batch=True),))
def prefix_lm(batch: Any, head: Any, row: Any, column: Any, length: Any) -> Any:
    """All see the prefix; what follows is causal. Reads the length of the prefix, int `[]` or `[...]`.

    Example:
      >>> import numpy as np
      >>> from jax_attn_bwd import mods
      >>> print(mods.picture(mods.prefix_lm, 8, 8, (np.int32(4),), block=2))
      ##..
      ##..
      ##+.
      ###+
    """
    length = to_rank(length, batch.ndim) if length.ndim == 0 else length.reshape(-1)[batch]
    return (column < length) | (column <= row)


@dataclass(frozen=True)
class _Prefix:
    length: int

    def __call__(self, batch, head, row, column):
        return (column < self.length) | (column <= row)


def static_prefix_lm(length: int) -> Mask:
    """`prefix_lm` of one length for all, known at trace time: it reads no array.

    Example:
      >>> from jax_attn_bwd import mods
      >>> print(mods.picture(mods.static_prefix_lm(4), 8, 8, block=2))
      ##..
      ##..
      ##+.
      ###+
    """
    return Mask(_Prefix(checks.integer("mods.static_prefix_lm", "length", length, 0)))


@partial(Mask, num_args=1, reads=(Read("the ids of document", jnp.integer, ("T",), has_batch=True),))
def document(batch: Any, head: Any, row: Any, column: Any, ids: Any) -> Any:
    """Rows see the columns of their own document. Reads `ids`, int `[T]` or `[..., T]`, of rows and columns.

    Example:
      >>> import numpy as np
      >>> from jax_attn_bwd import mods
      >>> ids = np.array([0, 0, 0, 1, 1, 1, 2, 2], np.int32)
      >>> print(mods.picture(mods.document, 8, 8, (ids,), block=2))
      #+..
      +++.
      .+#.
      ...#
    """
    if ids.ndim < 2:
        return ids[row] == ids[column]
    ids = ids.reshape(-1, ids.shape[-1])
    return ids[batch, row] == ids[batch, column]


@dataclass(frozen=True)
class _Dilated:
    dilation: int

    def __call__(self, batch, head, row, column):
        return (row - column) % self.dilation == 0


def dilated(dilation: int) -> Mask:
    """A row sees every `dilation`-th column, counted from its own; `& sliding_window(...)` bounds it.

    Example:
      >>> from jax_attn_bwd import mods
      >>> print(mods.picture(mods.dilated(4) & mods.sliding_window(8), 8, 8, block=1))
      #.......
      .#......
      ..#.....
      ...#....
      #...#...
      .#...#..
      ..#...#.
      ...#...#

    References:
      Ding et al., LongNet, 2023, arXiv:2307.02486.
    """
    return Mask(_Dilated(checks.integer("mods.dilated", "dilation", dilation, 1)))


@dataclass(frozen=True)
class _Global:
    number: int

    def __call__(self, batch, head, row, column):
        return (row < self.number) | (column < self.number)


def global_tokens(number: int) -> Mask:
    """The first tokens see all, and are seen by all; `| sliding_window(...)` for the others.

    Example:
      >>> from jax_attn_bwd import mods
      >>> print(mods.picture(mods.global_tokens(2) | mods.sliding_window(1, 1), 8, 8, block=2))
      ####
      ##+.
      #+#+
      #.+#

    References:
      Beltagy et al., Longformer, 2020, arXiv:2004.05150.
    """
    return Mask(_Global(checks.integer("mods.global_tokens", "number", number, 0)))


_NUMBERS = partial(Read, kind=jnp.integer, shape=("T",), has_batch=True)


@partial(Mask, num_args=2, reads=(_NUMBERS("the first of tree"), _NUMBERS("the last of tree")))
def tree(batch: Any, head: Any, row: Any, column: Any, first: Any, last: Any) -> Any:
    """A token sees itself and its ancestors, as drafts in speculative decoding. Reads `tree_intervals`.

    Example:
      >>> from jax_attn_bwd import mods
      >>> intervals = mods.tree_intervals([-1, 0, 1, 1, 0, 4])
      >>> print(mods.picture(mods.tree, 6, 6, intervals, block=1))
      #.....
      ##....
      ###...
      ##.#..
      #...#.
      #...##
    """
    if first.ndim > 1:
        first, last = (x.reshape(-1, x.shape[-1]) for x in (first, last))
        at = first[batch, row]
        return (first[batch, column] <= at) & (at <= last[batch, column])
    return (first[column] <= first[row]) & (first[row] <= last[column])


def tree_intervals(parents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(first, last), int32 `[T]`: the numbers of a token and of its last descendant in depth-first order.

    Args:
      parents: of each token the index of its parent, which comes before it; -1 for a root. Trees whose tokens
        lie in depth-first order skip most tiles.
    """
    # the children of each token, in order
    parents = [checks.integer("mods.tree_intervals", "a parent", p, -1) for p in parents]
    children: list[list[int]] = [[] for _ in parents]
    roots: list[int] = []
    for token, parent in enumerate(parents):
        if parent >= token:
            expected = f"come before its child {token}"
            raise ValueError(checks.message("mods.tree_intervals", "a parent", expected, parent))
        (roots if parent < 0 else children[parent]).append(token)

    # numbers in depth-first order
    first, order, rest = np.zeros(len(parents), np.int32), 0, roots[::-1]
    while rest:
        token = rest.pop()
        first[token], order = order, order + 1
        rest += children[token][::-1]

    # the last number of each subtree, from the leaves up
    last = first.copy()
    for token in range(len(parents) - 1, -1, -1):
        if parents[token] >= 0:
            last[parents[token]] = max(last[parents[token]], last[token])
    return first, last


# ---- pictures: which tiles a mask leaves to be visited


def tiles(
    mask_mod: Callable[..., Any],
    T: int,
    S: int,
    mod_args: tuple[Any, ...] = (),
    *,
    block: int | tuple[int, int] = (256, 512),
    batch: int = 0,
    head: int = 0,
) -> np.ndarray:
    """Whether 2 all, 1 some or 0 nothing is seen of each tile of T rows and S columns, by its bounds.

    Args:
      mask_mod, mod_args: as in `dot_product_attention`; the arrays must be known.
      block: rows and columns of a tile.
      batch, head: whose tiles.

    Returns:
      int8 `[ceil(T / rows), ceil(S / columns)]`. 0 and 2 are certain; 1 is exact for the masks of this module
      where each is the only one to read what it reads, else it may stand for a tile that is empty or full.

    Raises:
      ValueError, TypeError: as `dot_product_attention`; arrays are not known to be long enough.

    Example:
      >>> from jax_attn_bwd import mods
      >>> mods.tiles(mods.causal, 6, 4, block=2)
      array([[1, 0],
             [2, 1],
             [2, 2]], dtype=int8)
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(mod_args)):
        got = checks.message("mods.tiles", "mod_args", "be known", "a traced array", "call it outside of jit")
        raise TypeError(got)

    # the mask's arrays, and where it is looked at
    args = mod_functions.prepared_mask("mods.tiles", mask_mod, mod_args)
    given = (block, block) if isinstance(block, int) else tuple(block)
    blocks = [checks.integer("mods.tiles", "block", size, 1) for size in given]
    index = lambda n: np.full((1, 1, 1, 1), n, np.int32)
    at: Any = mod_functions.Places(index(batch), index(head), jax.tree.map(np.asarray, args))

    # the first and the last row and column of each tile: [rows, 1] and [1, columns]
    ranges = []
    for n, size, axis in zip((T, S), blocks, (-1, -2), strict=True):
        start = np.arange(0, n, size, dtype=np.int32)
        ends = start, np.minimum(start + np.int32(size), np.int32(n)) - np.int32(1)
        ranges.append(tuple(np.expand_dims(x, axis) for x in ends))

    # from these bounds, whether something is seen, and whether all
    found = mod_functions.of_tiles(mask_mod, at, *ranges)
    some, every = np.asarray(found.some), np.asarray(found.every)
    grid = tuple(-(-n // size) for n, size in zip((T, S), blocks, strict=True))
    return np.broadcast_to(some.astype(np.int8) + (some & every), grid)


def picture(
    mask_mod: Callable[..., Any], T: int, S: int, mod_args: tuple[Any, ...] = (), *,
    block: int | tuple[int, int] = (256, 512), batch: int = 0, head: int = 0,
) -> str:  # fmt: skip
    """`tiles` as text: a line for each block of rows; `#` all, `+` some, `.` nothing.

    Example:
      >>> from jax_attn_bwd import mods
      >>> print(mods.picture(~mods.causal, 6, 6, block=2))
      +##
      .+#
      ..+
    """
    found = tiles(mask_mod, T, S, mod_args, block=block, batch=batch, head=head)
    return "\n".join("".join(".+#"[kind] for kind in row) for row in found)


__test__ = {name: x.function.__doc__ for name, x in list(globals().items()) if isinstance(x, Mask)}
