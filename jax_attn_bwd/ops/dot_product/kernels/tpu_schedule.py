"""Which tiles the TPU kernels of dense attention visit, and in which order.

XLA makes the schedule, one int32 for each tile. The grid runs over it, and it lies in scalar memory before a
step begins, so the loads of what is skipped are skipped too.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from jax_attn_bwd.ops.dot_product.kernels.inputs import at
from jax_attn_bwd.ops.dot_product.kernels.tile_flags import Flags, live_first

_MOST_STEPS = 2**16  # of all schedules of a call: 256 KiB of the 1 MiB of scalar memory
_LIVE, _MIXED, _FIRST, _LAST = 1, 2, 4, 8  # flags of a step
_COLUMN_SHIFT, _ROW_SHIFT = 4, 17  # of a step's word: 4 bits of flags, 13 for the tile of keys, the rest


class Schedule(NamedTuple):
    """The tiles that a kernel visits."""

    steps: Any  # int32 [B|1, steps]; NumPy if shapes alone decide
    has_full: bool  # whether a tile may need no comparison
    has_mixed: bool  # whether a tile may need comparison element by element

    @property
    def length(self) -> int:
        """Steps of the grid."""
        return self.steps.shape[1]

    def name(self, kernel: str, tiling: Any) -> str:
        """The name of a kernel in reports: its tile, and which programs for a tile it holds."""
        kind = "both" if self.has_full and self.has_mixed else "mixed" if self.has_mixed else "full"
        return f"{kernel}_{tiling.block_q}x{tiling.block_k}_{kind}"


def schedule(flags: Flags, by_key: bool = False) -> Schedule:
    """The schedule for these flags; a tile of queries ends before the next begins.

    With `by_key` a tile of keys is. One that visits nothing has one step, which is not live.
    """
    some, every, by_shapes = flags
    every = np.broadcast_to(every, some.shape) if isinstance(every, np.ndarray) else every
    xp: Any = np if isinstance(some, np.ndarray) else jnp
    has_full, has_mixed = True, True
    if isinstance(every, np.ndarray):
        has_full, has_mixed = bool(every.any()), bool((by_shapes & ~every).any())
    some, every = _of_all(some, every)
    if by_key:
        some, every = some.swapaxes(-1, -2), every.swapaxes(-1, -2)
        by_shapes = None if by_shapes is None else by_shapes.swapaxes(-1, -2)
    B = some.shape[0]
    visited, minors = _with_idle(some), some.shape[-1]
    most = visited.shape[1] if by_shapes is None else int(_with_idle(by_shapes).sum(-1).max())
    some, every = some.reshape(B, -1), xp.asarray(every.reshape(B, -1))
    order, counts = live_first(visited)
    steps = int(counts.max()) if xp is np else most
    order = order[:, :steps]
    rank = xp.arange(steps)[None]
    valid = rank < counts
    order = xp.take_along_axis(order, xp.minimum(rank, counts - 1), axis=-1)  # repeats the last
    major, minor = order // minors, order % minors
    begins = xp.concatenate([xp.ones((B, 1), bool), major[:, 1:] != major[:, :-1]], -1)
    ends = xp.concatenate([begins[:, 1:], xp.ones((B, 1), bool)], -1) | (rank == counts - 1)
    row, column = (minor, major) if by_key else (major, minor)
    word = (row << _ROW_SHIFT) | (column << _COLUMN_SHIFT)
    bits = (
        (_LIVE, xp.take_along_axis(some, order, axis=-1)),
        (_MIXED, ~xp.take_along_axis(every, order, axis=-1)),
        (_FIRST, begins),
        (_LAST, ends),
    )
    for flag, given in bits:
        word = word | xp.where(given & valid, flag, 0)
    return Schedule(word.astype(np.int32), has_full, has_mixed)


def _of_all(some: Any, every: Any) -> tuple[Any, Any]:
    """Those of all batch entries together where those of each are too many for scalar memory."""
    if some.size <= _MOST_STEPS:
        return some, every
    return some.any(0, keepdims=True), every.all(0, keepdims=True)


def _with_idle(some: Any) -> Any:
    """Which tiles have a step, `[B|1, all]`: the first one, too, where a tile visits nothing."""
    xp: Any = np if isinstance(some, np.ndarray) else jnp
    idle = ~some.any(-1, keepdims=True)
    return (some | (idle & (xp.arange(some.shape[-1]) == 0)[None, None])).reshape(some.shape[0], -1)


def every_tile(flags: Flags) -> Schedule:
    """All tiles, each with its flags: for a result that has a place for every tile."""
    xp: Any = np if isinstance(flags.some, np.ndarray) else jnp
    some, every = _of_all(flags.some, flags.every)
    rows, columns = some.shape[1:]
    place = (xp.arange(rows)[:, None] << _ROW_SHIFT) | (xp.arange(columns)[None] << _COLUMN_SHIFT)
    word = place[None] | xp.where(some, _LIVE, 0) | xp.where(every, 0, _MIXED)
    return Schedule(word.reshape(some.shape[0], -1).astype(np.int32), True, True)


class Step(NamedTuple):
    """Where a grid step is: batch entry, key head, query head, tiles, flags."""

    b: Any
    k: Any
    n: Any
    row: Any
    column: Any
    word: Any

    @classmethod
    def at(cls, steps: Any, groups: int, b: Any, k: Any, g: Any, p: Any) -> "Step":
        """Step `p` of the schedule of batch entry `b`, for query head `g` of key head `k`."""
        word = steps[at(steps, 0, b), p]
        column = (word >> _COLUMN_SHIFT) & (2 ** (_ROW_SHIFT - _COLUMN_SHIFT) - 1)
        return cls(b, k, k * groups + g, word >> _ROW_SHIFT, column, word)

    def tile(self, side: int) -> Any:
        """The tile of queries (side 0) or of keys (side 1)."""
        return self.column if side else self.row

    def flag(self, flag: int) -> Any:
        """Whether the step has one of the flags above."""
        return (self.word & flag) != 0

    @property
    def first(self) -> Any:
        """Whether a tile of the outer side begins here."""
        return self.flag(_FIRST)

    @property
    def last(self) -> Any:
        """Whether a tile of the outer side ends here."""
        return self.flag(_LAST)

    def each_kind(self, tiles: Schedule, run: Any) -> None:
        """`run(mixed)` if the tile is live: two programs, of which the full one compares nothing."""
        live, mixed = self.flag(_LIVE), self.flag(_MIXED)
        if tiles.has_full:
            pl.when(live & ~mixed)(lambda: run(False))
        if tiles.has_mixed:
            pl.when(live & mixed)(lambda: run(True))
