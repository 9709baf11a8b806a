"""Any mask of T x S elements in one bit an element."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.jaxpr import intervals
from jax_attn_bwd.mods.masks import Mask
from jax_attn_bwd.mods.mod_args_spec import Read
from jax_attn_bwd.ops.dot_product.mod_functions import ReadSizes
from jax_attn_bwd.ops.graph.structure import BipartiteCSC

_NAME = "mods.packed"
_CELL = 32  # rows and columns of a cell, which is left out where it is empty
_KIND = 8  # rows and columns of which it is told whether all is seen, some or nothing: tiles are multiples


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
    words, plane = _words(mask)
    T, S = plane
    strips: Any = words.view(np.uint8).reshape(words.shape[0] // _KIND, _KIND, -1)
    some = np.bitwise_or.reduce(strips, axis=1) != 0
    in_cells = words.reshape(-1, _CELL, words.shape[1]).transpose(0, 2, 1)  # [cell row, cell column, row]
    live = in_cells.any(-1)
    cells = np.where(live, np.cumsum(live, dtype=np.int32).reshape(live.shape), 0).astype(np.int32)
    stored = np.concatenate([np.zeros((1, _CELL), np.uint32), in_cells[live]])
    words[T:] = ~np.uint32(0)  # padding, which is never read, does not make what is full mixed
    if S % _CELL:
        words[:, -1] |= ~np.uint32((1 << S % _CELL) - 1)
    kinds = some.astype(np.int8) + (np.bitwise_and.reduce(strips, axis=1) == 255) * some
    arrays: tuple[np.ndarray, ...] = (kinds.astype(np.int8), words)
    if stored.nbytes + cells.nbytes < words.nbytes:
        arrays = (kinds.astype(np.int8), stored, cells)
    reads = [Read(f"array {i} of mods.packed", jnp.integer, x.shape) for i, x in enumerate(arrays)]
    first = _PlaneRead(reads[0].name, jnp.integer, reads[0].shape, plane=plane)
    return Mask(_Packed(), len(arrays), (first, *reads[1:])), tuple(map(jnp.asarray, arrays))


def _words(mask: Any) -> tuple[np.ndarray, tuple[int, int]]:
    """(little-endian words of 32 columns, uint32, rows and columns padded to cells; T and S)."""
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(mask))
    if traced:
        remedy = "pack it outside of jax.jit, and hand over mod_args"
        raise TypeError(checks.message(_NAME, "mask", "be known", "a traced one", remedy))
    if isinstance(mask, BipartiteCSC):
        plane = (mask.num_dst, mask.num_src)
        offsets = np.asarray(mask.offsets)
        columns = np.asarray(mask.indices)[: offsets[-1]]
        return _scattered(plane, np.repeat(np.arange(plane[0]), np.diff(offsets)), columns), plane
    if hasattr(mask, "tocoo"):
        plane, found = mask.shape, mask.tocoo()
        kept = found.data != 0
        return _scattered(plane, found.row[kept], found.col[kept]), plane
    mask = np.asarray(mask)
    if mask.dtype != np.bool_:
        expected = "be a NumPy array of bools, a SciPy sparse array or a BipartiteCSC"
        raise TypeError(checks.message(_NAME, "mask", expected, f"dtype {mask.dtype}", "write mask != 0"))
    if mask.ndim != 2 or 0 in mask.shape:
        raise ValueError(checks.message(_NAME, "mask", "have shape [T, S], both positive", mask.shape))
    T, S = mask.shape
    words = np.zeros((-(-T // _CELL) * _CELL, -(-S // _CELL)), "<u4")
    words.view(np.uint8)[:T, : -(-S // 8)] = np.packbits(mask, axis=1, bitorder="little")
    return words, (T, S)


def _scattered(plane: tuple[int, int], rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The words of single elements."""
    words = np.zeros(tuple(-(-n // _CELL) * size for n, size in zip(plane, (_CELL, 1), strict=True)), "<u4")
    bit = np.left_shift(np.uint32(1), (columns % _CELL).astype(np.uint32))
    np.bitwise_or.at(words, (rows, columns // _CELL), bit)
    return words
