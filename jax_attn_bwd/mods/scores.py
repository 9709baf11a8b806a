"""Scores, `(logits, batch, head, row, column, *args) -> logits`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks, numerics
from jax_attn_bwd.mods.masks import Mod, Read
from jax_attn_bwd.ops.dot_product.mod_functions import ReadSizes


@dataclass(frozen=True)
class Score(Mod):
    """A score that reads the last of `mod_args`, so that a mask may read the first.

    Attributes:
      function: `(logits, batch, head, row, column, *args) -> logits`.
      num_args: how many entries of `mod_args` it reads.
      reads: what these must be; None, or nothing, where it is not known, and not checked.
    """

    place = ("logits", *Mod.place)

    def __call__(
        self,
        logits: Any = None,
        batch: Any = None,
        head: Any = None,
        row: Any = None,
        column: Any = None,
        *args: Any,
    ) -> Any:
        """The new logits."""
        self._check_called(column)
        read = args[len(args) - self.num_args :]
        return self.function(logits, batch, head, row, column, *read)

    def check(self, operator: str, args: Sequence[Any], sizes: ReadSizes) -> None:
        """Raises unless `mod_args` end with what it reads, for a call of those sizes."""
        self._check(operator, "score_mod", args[max(len(args) - self.num_args, 0) :], sizes)


@partial(Score, num_args=1, reads=(Read("the slopes of alibi", jnp.floating, ("N",)),))
def alibi(logits: Any, batch: Any, head: Any, row: Any, column: Any, slopes: Any) -> Any:
    """`logits - slope |row - column|`. Reads `slopes`, floating `[N]`, which have a gradient.

    Example:
      >>> import jax, numpy as np
      >>> from jax_attn_bwd import dot_product_attention, mods
      >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 16, 4, 8))
      >>> attend = lambda slopes: dot_product_attention(q, k, v, score_mod=mods.alibi, mod_args=(slopes,))
      >>> jax.grad(lambda slopes: attend(slopes).sum())(mods.alibi_slopes(4)).shape
      (4,)

    References:
      Press et al., Train short, test long, 2022, arXiv:2108.12409.
    """
    return logits - slopes[head] * jnp.abs(row - column).astype(logits.dtype)


@dataclass(frozen=True)
class _StaticAlibi:
    num_heads: int

    def __call__(self, logits, batch, head, row, column):
        whole = 2 ** (self.num_heads.bit_length() - 1)
        number = head.astype(logits.dtype)
        exponent = (number + 1) * (-8.0 / whole)
        if whole != self.num_heads:
            exponent = jnp.where(head < whole, exponent, (number - (whole - 0.5)) * (-8.0 / whole))
        return logits - jnp.exp2(exponent) * jnp.abs(row - column).astype(logits.dtype)


def static_alibi(num_heads: int) -> Score:
    """`alibi` with the slopes of the paper: it reads no array.

    Example:
      >>> import numpy as np
      >>> from jax_attn_bwd import dot_product_attention, mods
      >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 16, 4, 8))
      >>> dot_product_attention(q, k, v, score_mod=mods.static_alibi(4)).shape
      (2, 16, 4, 8)
    """
    return Score(_StaticAlibi(checks.integer("mods.static_alibi", "num_heads", num_heads, 1)))


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
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from jax_attn_bwd import dot_product_attention, mods
      >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 16, 4, 8))
      >>> near = mods.relative_bias(8)
      >>> attend = lambda table: dot_product_attention(q, k, v, score_mod=near, mod_args=(table,))
      >>> jax.grad(lambda table: attend(table).sum())(jnp.zeros((4, 17))).shape
      (4, 17)

    References:
      Shaw et al., Self-attention with relative position representations, 2018, arXiv:1803.02155.
    """
    max_distance = checks.integer("mods.relative_bias", "max_distance", max_distance, 0)
    table = Read("the table of relative_bias", jnp.floating, ("N", 2 * max_distance + 1))
    return Score(_RelativeBias(max_distance), 1, (table,))


@dataclass(frozen=True)
class _SoftCap:
    cap: float

    def __call__(self, logits, batch, head, row, column):
        if numerics.soft_cap_is_identity(self.cap, jnp.result_type(logits)):
            return logits
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


__test__ = {"alibi": alibi.function.__doc__}
