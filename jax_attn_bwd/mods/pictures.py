"""Pictures of a mask: which tiles it leaves to be visited."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_attn_bwd._core import checks
from jax_attn_bwd.ops.dot_product import mod_functions


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
