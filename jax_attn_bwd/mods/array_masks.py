"""Masks that arrays tell: blocks that a model chooses, and any mask in one bit an element."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.jaxpr import intervals
from jax_attn_bwd._core.types import Integers
from jax_attn_bwd.mods.masks import Mask, Read
from jax_attn_bwd.ops.dot_product.mod_functions import ReadSizes
from jax_attn_bwd.ops.graph.structure import BipartiteCSC

_PACKED = "mods.packed"
_CELL = 32  # rows and columns of a cell, which is left out where it is empty
_KIND = 8  # rows and columns of which it is told whether all is seen, some or nothing: tiles are multiples


@dataclass(frozen=True)
class _BlockMask:
    """Reads, for an element, whether its block is chosen."""

    tile: tuple[int, int]  # rows and columns of a block

    def __call__(self, batch, head, row, column, chosen):
        chosen = chosen.reshape(-1, *chosen.shape[-3:])
        lead = (jnp.zeros_like(i) if n == 1 else i for i, n in zip((batch, head), chosen.shape, strict=False))
        return chosen[(*lead, row // self.tile[0], column // self.tile[1])]


@dataclass(frozen=True)
class _BlocksRead(Read):
    """The array of chosen blocks, which covers the plane."""

    tile: tuple[int, int] = (1, 1)

    def check(self, operator: str, x: Any, sizes: ReadSizes) -> None:
        argument, shape = f"{self.name} in mod_args", tuple(getattr(x, "shape", ()))
        if x.dtype != np.bool_:
            remedy = "write blocks != 0, or make them of indices by mods.blocks_from_indices"
            raise TypeError(checks.message(operator, argument, "be boolean", f"dtype {x.dtype}", remedy))

        # as many blocks as the rows and columns of the call fill, for each head or for all
        ends = zip((sizes.rows, sizes.columns), self.tile, strict=True)
        counts = [-(-n // size) if isinstance(n, int) else None for n, size in ends]
        leads = [(), sizes.batch, (1,) * len(sizes.batch), (math.prod(sizes.batch),)]
        fits = len(shape) >= 3 and shape[:-3] in leads and shape[-3] in (1, sizes.heads)
        if not (fits and all(n in (None, m) for n, m in zip(counts, shape[-2:], strict=True))):
            rows, columns = ("any" if n is None else n for n in counts)
            expected = f"cover the plane with shape [..., N or 1, {rows}, {columns}]"
            remedy = f"N = {sizes.heads}, ... = {sizes.batch}, blocks of {self.tile[0]} x {self.tile[1]}"
            raise ValueError(checks.message(operator, argument, expected, shape, remedy))


def blocks(query_size: int, key_size: int | None = None) -> Mask:
    """A row sees the columns of the blocks that are chosen for it, which may be others in each step.

    Reads `chosen`, bool `[..., N or 1, ceil(T / query_size), ceil(S / key_size)]`: for each block of rows
    which blocks of columns it sees. Tiles of blocks that are not chosen are skipped, forward and backward, so
    work is proportional to what is chosen, and gradients reach q, k and v through chosen blocks alone. Other
    blocks are no new trace.

    It runs in `implementation="xla"` everywhere. Kernels take blocks of 8 elements or more, of indices
    and not of positions, as a bit for each row and block of columns.

    Args:
      query_size: rows of a block.
      key_size: columns of a block; None: as many.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd import mods
      >>> chosen = mods.blocks_from_indices(jnp.array([[[0, 0], [0, 1], [0, 2], [1, 3]]]), 4)
      >>> print(mods.picture(mods.blocks(2) & mods.causal, 8, 8, (chosen,), block=2))
      +...
      #+..
      #.+.
      .#.+

    References:
      Yuan et al., Native sparse attention, 2025, arXiv:2502.11089.
      Lu et al., MoBA: mixture of block attention, 2025, arXiv:2502.13189.
    """
    name, key_size = "mods.blocks", query_size if key_size is None else key_size
    tile = checks.integer(name, "query_size", query_size, 1), checks.integer(name, "key_size", key_size, 1)
    read = _BlocksRead("the blocks of mods.blocks", np.bool_, ("N",), True, tile)
    return Mask(_BlockMask(tile), 1, (read,))


def blocks_from_indices(indices: Integers, num_blocks: int) -> jax.Array:
    """What `blocks` reads, bool `[..., num_blocks]`, from the numbers of the blocks that each row chooses.

    Args:
      indices: ints `[..., ceil(T / query_size), n]`, of blocks of columns; -1 chooses none.
      num_blocks: `ceil(S / key_size)`.

    Raises:
      ValueError: a known index is not below `num_blocks`; a traced one chooses none.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd import mods
      >>> mods.blocks_from_indices(jnp.array([[0, 2], [1, -1]]), 3)
      Array([[ True, False,  True],
             [False,  True, False]], dtype=bool)
    """
    name = "mods.blocks_from_indices"
    num_blocks = checks.integer(name, "num_blocks", num_blocks, 1)
    indices = checks.integers(name, "indices", indices, least=-1, greatest=num_blocks - 1)
    number = jnp.arange(num_blocks, dtype=indices.dtype).reshape((1,) * indices.ndim + (-1,))
    return (indices[..., None] == number).any(-2)


@dataclass(frozen=True)
class _Packed:
    """Reads bits; from bounds it is told what `kinds` say of 8 x 8 elements: 0 nothing, 1 some, 2 all."""

    def __call__(self, batch, head, row, column, kinds, words, cells=None):
        if cells is None:
            word = words[row, column // _CELL]
        else:
            word = words[cells[row // _CELL, column // _CELL], row % _CELL]
        bit = (word >> (column % _CELL).astype(word.dtype)) & jnp.ones((), word.dtype)
        at = row // _KIND, column // _KIND
        return intervals.told(bit != 0, (kinds == 2)[at], (kinds > 0)[at])


@dataclass(frozen=True)
class _PlaneRead(Read):
    """The first array of a packed mask, which knows the size of the plane."""

    plane: tuple[int, int] = (0, 0)

    def check(self, operator: str, x: Any, sizes: ReadSizes) -> None:
        sides = zip((sizes.rows, sizes.columns), self.plane, strict=True)
        if any(isinstance(n, int) and n != m for n, m in sides):
            expected = f"have the T = {sizes.rows} rows and S = {sizes.columns} columns of the call"
            raise ValueError(checks.message(operator, "the mask of mods.packed", expected, self.plane))
        super().check(operator, x, sizes)


def packed(mask: Any) -> tuple[Mask, tuple[jax.Array, ...]]:
    """(mask_mod, mod_args) of a mask of any pattern, in one bit an element or less.

    It means what the array means, in an eighth of its bytes: it stores the bits of all elements, or if they
    are fewer those of the cells of 32 x 32 in which something is seen. Tiles that are empty are skipped,
    forward and backward.

    It runs in `implementation="xla"` everywhere. Kernels take it for indices, not for positions, and
    hold a bit an element.

    Args:
      mask: what sees what, `[T, S]`: a NumPy array of bools; a SciPy sparse array, whose stored elements that
        are not 0 are seen; or a `BipartiteCSC`, whose destinations are rows and see their sources. Known: it
        is packed once, outside of `jax.jit`.

    Returns:
      The mask, which combines with others, and the arrays that it reads. Masks of one size and number of
      cells share a compiled program.

    Raises:
      TypeError: a mask that is traced, or not of bools.
      ValueError: one that is not `[T, S]`.

    Example:
      >>> import numpy as np
      >>> from jax_attn_bwd import mods
      >>> ring = np.abs(np.arange(48)[:, None] - np.arange(48)) % 40 < 8
      >>> mask_mod, mod_args = mods.packed(ring)
      >>> print(mods.picture(mask_mod, 48, 48, mod_args, block=8))
      #+...+
      +#+...
      .+#+..
      ..+#+.
      ...+#+
      +...+#
    """
    # which words of 8 rows hold something, a byte at a time: [T / 8, S / 8], padded to whole cells
    words, plane = _words(mask)
    T, S = plane
    strips: Any = words.view(np.uint8).reshape(words.shape[0] // _KIND, _KIND, -1)
    some = np.bitwise_or.reduce(strips, axis=1) != 0

    # the cells in which something is seen, numbered from 1: cell 0 is empty
    in_cells = words.reshape(-1, _CELL, words.shape[1]).transpose(0, 2, 1)  # [cell row, cell column, row]
    live = in_cells.any(-1)
    cells = np.where(live, np.cumsum(live, dtype=np.int32).reshape(live.shape), 0).astype(np.int32)
    stored = np.concatenate([np.zeros((1, _CELL), np.uint32), in_cells[live]])

    # of 8 x 8 elements: 0 nothing is seen, 1 some, 2 all
    words[T:] = ~np.uint32(0)  # padding, which is never read, does not make what is full mixed
    if S % _CELL:
        words[:, -1] |= ~np.uint32((1 << S % _CELL) - 1)
    kinds = some.astype(np.int8) + (np.bitwise_and.reduce(strips, axis=1) == 255) * some

    # all elements, or if they are fewer those of the cells
    arrays: tuple[np.ndarray, ...] = (kinds.astype(np.int8), words)
    if stored.nbytes + cells.nbytes < words.nbytes:
        arrays = (kinds.astype(np.int8), stored, cells)
    reads = [Read(f"array {i} of mods.packed", jnp.integer, x.shape) for i, x in enumerate(arrays)]
    first = _PlaneRead(reads[0].name, jnp.integer, reads[0].shape, plane=plane)
    return Mask(_Packed(), len(arrays), (first, *reads[1:])), tuple(map(jnp.asarray, arrays))


def _words(mask: Any) -> tuple[np.ndarray, tuple[int, int]]:
    """Packs a mask: (little-endian words of 32 columns, uint32, rows and columns padded to cells; (T, S))."""
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(mask))
    if traced:
        remedy = "pack it outside of jax.jit, and hand over mod_args"
        raise TypeError(checks.message(_PACKED, "mask", "be known", "a traced one", remedy))

    # elements in lists: of a graph, or of a sparse array
    if isinstance(mask, BipartiteCSC):
        plane = (mask.num_dst, mask.num_src)
        offsets = np.asarray(mask.offsets)
        columns = np.asarray(mask.indices)[: offsets[-1]]
        return _scattered(plane, np.repeat(np.arange(plane[0]), np.diff(offsets)), columns), plane
    if hasattr(mask, "tocoo"):
        plane, found = mask.shape, mask.tocoo()
        kept = found.data != 0
        return _scattered(plane, found.row[kept], found.col[kept]), plane

    # or a whole plane
    mask = np.asarray(mask)
    if mask.dtype != np.bool_:
        expected = "be a NumPy array of bools, a SciPy sparse array or a BipartiteCSC"
        raise TypeError(checks.message(_PACKED, "mask", expected, f"dtype {mask.dtype}", "write mask != 0"))
    if mask.ndim != 2 or 0 in mask.shape:
        raise ValueError(checks.message(_PACKED, "mask", "have shape [T, S], both positive", mask.shape))
    T, S = mask.shape
    words = np.zeros((-(-T // _CELL) * _CELL, -(-S // _CELL)), "<u4")
    words.view(np.uint8)[:T, : -(-S // 8)] = np.packbits(mask, axis=1, bitorder="little")
    return words, (T, S)


def _scattered(plane: tuple[int, int], rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Packs single elements."""
    words = np.zeros(tuple(-(-n // _CELL) * size for n, size in zip(plane, (_CELL, 1), strict=True)), "<u4")
    bit = np.left_shift(np.uint32(1), (columns % _CELL).astype(np.uint32))
    np.bitwise_or.at(words, (rows, columns // _CELL), bit)
    return words
