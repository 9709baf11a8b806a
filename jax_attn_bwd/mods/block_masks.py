"""Blocks of rows and columns that a model chooses, as a mask."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.types import Integers
from jax_attn_bwd.mods.masks import Mask
from jax_attn_bwd.mods.mod_args_spec import Read
from jax_attn_bwd.ops.dot_product.mod_functions import ReadSizes


@dataclass(frozen=True)
class _Blocks:
    tile: tuple[int, int]  # rows and columns of a block

    def __call__(self, batch, head, row, column, chosen):
        chosen = chosen.reshape(-1, *chosen.shape[-3:])
        lead = (jnp.zeros_like(i) if n == 1 else i for i, n in zip((batch, head), chosen.shape, strict=False))
        return chosen[(*lead, row // self.tile[0], column // self.tile[1])]


@dataclass(frozen=True)
class _BlocksRead(Read):
    tile: tuple[int, int] = (1, 1)

    def check(self, operator: str, x: Any, sizes: ReadSizes) -> None:
        argument, shape = f"{self.name} in mod_args", tuple(getattr(x, "shape", ()))
        if x.dtype != np.bool_:
            remedy = "write blocks != 0, or make them of indices by mods.blocks_from_indices"
            raise TypeError(checks.message(operator, argument, "be boolean", f"dtype {x.dtype}", remedy))
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
    query_size, key_size = (
        checks.integer(name, n, x, 1) for n, x in (("query_size", query_size), ("key_size", key_size))
    )
    tile = (query_size, key_size)
    return Mask(_Blocks(tile), 1, (_BlocksRead("the blocks of mods.blocks", np.bool_, ("N",), True, tile),))


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
