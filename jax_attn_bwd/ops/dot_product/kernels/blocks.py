"""Hands kernels what a mask has one value of in each block of rows and columns.

XLA computes a value a block. Bools become bits: a word of 32 bits holds those of one row and of 32 blocks of
columns, so that a tile reads one number a row; other values of 32 bits are words themselves. Rows share
nothing in this layout, columns all that a block tells of them:

    words[tile of columns, i, row],    bit j of word i is the block 32 i + j of the tile

That is a bit an element for blocks of one column, and less for wider ones. A kernel spreads words over its
tile: each over the columns that it tells of, which then shift their own bit to the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

SIDE = 3  # of values of blocks, beside those of queries, keys and distances
_BITS = 32  # of a word
_static = partial(field, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """A value for each block, `[B|1, N|1, blocks of rows, blocks of columns]`; bools, or 32 bits.

    Attributes:
      x: the values.
      rows, columns: how many a block has; `columns` is a power of two up to 128.
    """

    x: Any
    rows: int = _static()
    columns: int = _static()

    @property
    def of_bits(self) -> bool:
        """Tells whether a word holds a bit for each of 32 blocks."""
        return self.x.dtype == jnp.bool_


def per_word(given: "Blocks | Words", most: int) -> int:
    """Returns how many columns a word tells of, `most` at most."""
    return min(most, given.columns * (_BITS if given.of_bits else 1))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Words:
    """The same values as kernels read them.

    Attributes:
      words: 32 bits `[B|1, N|1, tiles of columns, words, T]`; in a kernel those of a tile, `[words, rows]`.
      columns: how many a block has.
      of_bits: whether a word holds a bit for each of 32 blocks.
    """

    words: Any
    columns: int = _static()
    of_bits: bool = _static()

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the words."""
        return self.words.shape

    def own_bit(self, x: jax.Array, column: jax.Array) -> jax.Array:
        """Takes each column's value from words that are spread over a tile; of bools 0 or 1.

        `column` is counted from the first column of a word.
        """
        if not self.of_bits:
            return x
        bit = (column >> (self.columns.bit_length() - 1)) & (_BITS - 1)
        return lax.shift_right_logical(x, bit) & 1

    def cut(self, rows: slice) -> "Words":
        """Returns the words of some rows."""
        return replace(self, words=self.words[..., rows])

    def spread(self, slices: Sequence[slice]) -> jax.Array:
        """Spreads words over some rows and columns of a tile: values `[columns, rows]`, bools as 0 and 1."""
        rows, columns = slices
        # each word over the columns of the part that it tells of
        each, found = per_word(self, columns.stop), []
        for i in range(columns.start // each, -(-columns.stop // each)):
            count = min(columns.stop, (i + 1) * each) - max(columns.start, i * each)
            found.append(jnp.broadcast_to(self.words[i : i + 1, rows], (count, rows.stop - rows.start)))
        x = found[0] if len(found) == 1 else jnp.concatenate(found, 0)
        return self.own_bit(x, lax.broadcasted_iota(jnp.int32, x.shape, 0) + columns.start)


def words(given: Blocks, T: int, block_k: int) -> Words:
    """Packs the values for T rows and for tiles of `block_k` columns, both padded to whole tiles."""
    # the blocks of each tile of columns: [B|1, N|1, blocks of rows, tiles, blocks of a tile]
    (*lead, n, m), per_tile = given.x.shape, block_k // given.columns
    x = given.x.reshape(*lead, n, m // per_tile, per_tile)
    # bools: 32 neighbouring blocks to a word, bit j from block j
    if given.of_bits:
        widths = [(0, 0)] * (x.ndim - 1) + [(0, -per_tile % _BITS)]
        x = jnp.pad(x, widths).reshape(*x.shape[:-1], -1, _BITS).astype(jnp.uint32)
        x = lax.shift_left(x, lax.broadcasted_iota(jnp.uint32, x.shape, x.ndim - 1))
        x = lax.bitcast_convert_type(x.sum(-1, dtype=jnp.uint32), jnp.int32)
    # a block's words for each of its rows: [B|1, N|1, tiles, words, T]
    x = jnp.repeat(jnp.moveaxis(x, -3, -1), given.rows, axis=-1)[..., :T]
    return Words(x, given.columns, given.of_bits)
