"""Named masks and scores for `dot_product_attention(..., mask_mod=, score_mod=, mod_args=)`.

Masks are functions `(batch, head, row, column, *args) -> bool` (True attends), scores are functions
`(logits, batch, head, row, column, *args) -> logits`. What they read of `mod_args`, their docstrings say: a
mask the first ones, a score the last. `&`, `|` and `~` combine masks, and hand each its arguments in the
order in which the masks are written. Equal ones are one static argument: `sliding_window(64)` written twice
is compiled once.

`picture` draws which tiles a mask leaves to be visited: `#` all of a tile is seen, `+` some, `.` nothing, and
it is skipped.

Example:
  >>> import jax, jax.numpy as jnp
  >>> from jax_attn_bwd import dot_product_attention, mods
  >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 8))
  >>> ids = jnp.repeat(jnp.arange(4, dtype=jnp.int32), 4)  # four packed documents
  >>> out = dot_product_attention(q, k, v, mask_mod=mods.causal & mods.document, mod_args=(ids,))
  >>> out.shape
  (2, 16, 4, 8)
  >>> print(mods.picture(mods.causal & mods.document, 16, 16, (ids,), block=2))
  +.......
  #+......
  ..+.....
  ..#+....
  ....+...
  ....#+..
  ......+.
  ......#+

References:
  He et al., FlexAttention: a programming model for optimized attention kernels, 2024, arXiv:2412.05496.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd.ops.dot_product import modifiers


@dataclass(frozen=True)
class Mask:
    """A mask that combines with others.

    Attributes:
      function: `(batch, head, row, column, *args) -> bool`.
      num_args: how many entries of `mod_args` it reads, the first ones.

    Example:
      >>> from jax_attn_bwd import mods
      >>> def even_heads(batch, head, row, column):
      ...     return head % 2 == 0
      >>> local_or_even = mods.Mask(even_heads) | mods.sliding_window(64)
    """

    function: Callable[..., Any]
    num_args: int = 0

    def __call__(self, batch: Any, head: Any, row: Any, column: Any, *args: Any) -> Any:
        """Whether the row sees the column."""
        return self.function(batch, head, row, column, *args[: self.num_args])

    def __and__(self, other: "Mask") -> "Mask":
        """Where both are True; the first arguments are those of the left one."""
        return _joined(jnp.logical_and, self, other)

    def __or__(self, other: "Mask") -> "Mask":
        """Where one is True; the first arguments are those of the left one."""
        return _joined(jnp.logical_or, self, other)

    def __invert__(self) -> "Mask":
        """Where it is False."""
        return Mask(_Not(self), self.num_args)


@dataclass(frozen=True)
class Score:
    """A score that reads the last of `mod_args`, so that a mask may read the first.

    Attributes:
      function: `(logits, batch, head, row, column, *args) -> logits`.
      num_args: how many entries of `mod_args` it reads.
    """

    function: Callable[..., Any]
    num_args: int = 0

    def __call__(self, logits: Any, batch: Any, head: Any, row: Any, column: Any, *args: Any) -> Any:
        """The new logits."""
        read = args[len(args) - self.num_args :]
        return self.function(logits, batch, head, row, column, *read)


@dataclass(frozen=True)
class _Joined:
    join: Callable[..., Any]
    left: Mask
    right: Mask

    def __call__(self, batch, head, row, column, *args):
        at, cut = (batch, head, row, column), self.left.num_args
        return self.join(self.left(*at, *args[:cut]), self.right(*at, *args[cut:]))


def _joined(join: Callable[..., Any], left: Mask, right: Any) -> Mask:
    if not isinstance(right, Mask):
        expected, remedy = "be combined with a Mask", "write mods.Mask(function, num_args)"
        raise TypeError(checks.message("mods", "a mask", expected, type(right).__name__, remedy))
    return Mask(_Joined(join, left, right), left.num_args + right.num_args)


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
    """A row sees from `left` columns before its own to `right` after it.

    Example:
      >>> from jax_attn_bwd import mods
      >>> print(mods.picture(mods.sliding_window(3), 8, 8, block=2))
      +...
      #+..
      +#+.
      .+#+
    """
    left, right = (
        checks.integer("mods.sliding_window", name, n, 0) for name, n in (("left", left), ("right", right))
    )
    return Mask(_Window(left, right))


@partial(Mask, num_args=1)
def prefix_lm(batch: Any, head: Any, row: Any, column: Any, length: Any) -> Any:
    """All see the prefix; what follows is causal. Reads the length of the prefix, int `[]` or `[batch]`.

    Example:
      >>> import numpy as np
      >>> from jax_attn_bwd import mods
      >>> print(mods.picture(mods.prefix_lm, 8, 8, (np.int32(4),), block=2))
      ##..
      ##..
      ##+.
      ###+
    """
    length = to_rank(length, batch.ndim) if length.ndim == 0 else length[batch]
    return (column < length) | (column <= row)


@partial(Mask, num_args=1)
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


@partial(Mask, num_args=2)
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
    parents = [checks.integer("mods.tree_intervals", "a parent", p, -1) for p in parents]
    children: list[list[int]] = [[] for _ in parents]
    roots = []
    for token, parent in enumerate(parents):
        if parent >= token:
            expected = f"come before its child {token}"
            raise ValueError(checks.message("mods.tree_intervals", "a parent", expected, parent))
        (roots if parent < 0 else children[parent]).append(token)
    first, order, rest = np.zeros(len(parents), np.int32), 0, roots[::-1]
    while rest:
        token = rest.pop()
        first[token], order = order, order + 1
        rest += children[token][::-1]
    last = first.copy()
    for token in range(len(parents) - 1, -1, -1):
        if parents[token] >= 0:
            last[parents[token]] = max(last[parents[token]], last[token])
    return first, last


@partial(Score, num_args=1)
def alibi(logits: Any, batch: Any, head: Any, row: Any, column: Any, slopes: Any) -> Any:
    """`logits - slope |row - column|`. Reads `slopes`, floating `[N]`, which have a gradient.

    Example:
      >>> import jax
      >>> from jax_attn_bwd import dot_product_attention, mods
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 8))
      >>> attend = lambda slopes: dot_product_attention(q, k, v, score_mod=mods.alibi, mod_args=(slopes,))
      >>> jax.grad(lambda slopes: attend(slopes).sum())(mods.alibi_slopes(4)).shape
      (4,)

    References:
      Press et al., Train short, test long, 2022, arXiv:2108.12409.
    """
    return logits - slopes[head] * jnp.abs(row - column).astype(logits.dtype)


def alibi_slopes(num_heads: int) -> jax.Array:
    """The slopes of the paper, float32 `[num_heads]`: 2^(-8 i / n) for a power of two, else of two of them.

    Example:
      >>> from jax_attn_bwd import mods
      >>> mods.alibi_slopes(4).tolist()
      [0.25, 0.0625, 0.015625, 0.00390625]
    """
    num_heads = checks.integer("mods.alibi_slopes", "num_heads", num_heads, 1)
    whole = 2 ** (num_heads.bit_length() - 1)
    of = lambda n: [2.0 ** (-8 * i / n) for i in range(1, n + 1)]
    return jnp.asarray([*of(whole), *of(2 * whole)[::2]][:num_heads], jnp.float32)


@dataclass(frozen=True)
class _RelativeBias:
    max_distance: int

    def __call__(self, logits, batch, head, row, column, table):
        farthest = self.max_distance
        distance = jnp.clip(column - row, -farthest, farthest)
        return logits + table[head, distance + farthest]


def relative_bias(max_distance: int) -> Score:
    """`logits + table[head, distance]`, distances clipped: a learned bias that forms no T x S array.

    Reads `table`, floating `[N, 2 * max_distance + 1]`, which has a gradient: entry `max_distance + d` is for
    the column d after the row.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd import dot_product_attention, mods
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 8))
      >>> near = mods.relative_bias(8)
      >>> attend = lambda table: dot_product_attention(q, k, v, score_mod=near, mod_args=(table,))
      >>> jax.grad(lambda table: attend(table).sum())(jnp.zeros((4, 17))).shape
      (4, 17)

    References:
      Shaw et al., Self-attention with relative position representations, 2018, arXiv:1803.02155.
    """
    return Score(_RelativeBias(checks.integer("mods.relative_bias", "max_distance", max_distance, 0)), 1)


@dataclass(frozen=True)
class _SoftCap:
    cap: float

    def __call__(self, logits, batch, head, row, column):
        return self.cap * jnp.tanh(logits / self.cap)


def soft_cap(cap: float) -> Score:
    """`cap * tanh(logits / cap)`, after the bias (`logits_soft_cap` comes before it).

    Example:
      >>> from jax_attn_bwd import mods
      >>> float(mods.soft_cap(2.0)(0.0, 0, 0, 0, 0))
      0.0
    """
    cap = checks.python_float("mods.soft_cap", "cap", cap)
    if cap <= 0:
        raise ValueError(checks.message("mods.soft_cap", "cap", "be positive", cap))
    return Score(_SoftCap(cap))


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
    """Of each tile of T rows and S columns whether 2 all, 1 some or 0 nothing of it is seen, by its bounds.

    Args:
      mask_mod, mod_args: as in `dot_product_attention`; the arrays must be known.
      block: rows and columns of a tile.
      batch, head: whose tiles.

    Returns:
      int8 `[ceil(T / rows), ceil(S / columns)]`. 0 and 2 are certain; 1 is exact for the masks of this module
      where each is the only one to read what it reads, else it may stand for a tile that is empty or full.

    Example:
      >>> from jax_attn_bwd import mods
      >>> mods.tiles(mods.causal, 6, 4, block=2)
      array([[1, 0],
             [2, 1],
             [2, 2]], dtype=int8)
    """
    blocks = (block, block) if isinstance(block, int) else block
    index = lambda n: np.full((1, 1, 1, 1), n, np.int32)
    at: Any = modifiers.Places(index(batch), index(head), jax.tree.map(np.asarray, tuple(mod_args)))
    ranges = []
    for n, size, axis in zip((T, S), blocks, (-1, -2), strict=True):
        start = np.arange(0, n, size, dtype=np.int32)
        ends = start, np.minimum(start + np.int32(size), np.int32(n)) - np.int32(1)
        ranges.append(tuple(np.expand_dims(x, axis) for x in ends))
    found = modifiers.of_tiles(mask_mod, at, *ranges)
    some, every = np.asarray(found.some), np.asarray(found.every)
    grid = tuple(-(-n // size) for n, size in zip((T, S), blocks, strict=True))
    return np.broadcast_to(some.astype(np.int8) + (some & every), grid)


def picture(
    mask_mod: Callable[..., Any],
    T: int,
    S: int,
    mod_args: tuple[Any, ...] = (),
    *,
    block: int | tuple[int, int] = (256, 512),
    batch: int = 0,
    head: int = 0,
) -> str:
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


__test__ = {name: x.function.__doc__ for name, x in list(globals().items()) if isinstance(x, Mask | Score)}
