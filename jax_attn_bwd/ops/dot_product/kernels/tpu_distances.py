"""How the TPU kernels of dense attention hold values that the distance between query and key tells.

XLA makes a vector of one value for each distance, `hoisting.values`. A tile of scores needs block_q + block_k
neighbours of it, its window, and holds them along its diagonals. All queries by 128 keys of a tile are read
from one band of 128 rows, in which each row is the window moved one lane further than the row before:

    band[p, m] = window[m - p],    score[key 128 a + p, query r] = band[p, block_k - 128 a + r]

so every block of a tile is a slice of whole registers. XLA lays the first 8 rows of a band, which fill its
registers; a kernel moves these 8, 16, ... lanes further. Gradients go the way back: sums of blocks in a band,
which is folded into a window, and the windows of all tiles into a vector.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from jax_attn_bwd._core.mosaic_tpu import LANES

SIDE = 2  # of values of the distance, beside 0 for queries and 1 for keys
ROWS = 8  # of a register


def _step(tiling: Any) -> int:
    """Counts the entries between one window and the next: the distance of tiles is a multiple of it."""
    return math.gcd(tiling.block_q, tiling.block_k)


def width(tiling: Any) -> int:
    """Counts the values of a window."""
    return tiling.block_q + tiling.block_k


def count(tiling: Any, T: int, S: int) -> int:
    """Counts the windows of padded T and S."""
    return (T + S - width(tiling)) // _step(tiling) + 1


def window(step: Any, tiling: Any, S: int) -> Any:
    """Returns the number of the window of a step's tile."""
    unit = _step(tiling)
    behind = S // tiling.block_k - 1 - step.column
    return step.row * (tiling.block_q // unit) + behind * (tiling.block_k // unit)


def windows(x: jax.Array, tiling: Any) -> jax.Array:
    """Lays `[B|1, N|1, T + S]` of `hoisting.values` as `[B|1, N|1, windows, 8, width]`."""
    # the first 8 rows of every band, each one lane further: [..., 8, T + S]
    (*lead, length), unit = x.shape, _step(tiling)
    before = jnp.pad(x, [(0, 0)] * len(lead) + [(ROWS, 0)], mode="edge")
    rows = jnp.stack([before[..., ROWS - i : ROWS - i + length] for i in range(ROWS)], -2)
    # cut into windows, which overlap
    units = rows.reshape(*lead, ROWS, length // unit, unit)
    n, each = (length - width(tiling)) // unit + 1, width(tiling) // unit
    laid = jnp.concatenate([units[..., i : i + n, :] for i in range(each)], -1)
    return jnp.swapaxes(laid, -2, -3)


def cut(x: jax.Array, tiles: slice, tiling: Any, T: int) -> jax.Array:
    """Cuts from `windows`, of T queries, what the tiles of queries `tiles` read."""
    per_tile = tiling.block_q // _step(tiling)
    beyond = max(0, T // tiling.block_q - tiles.stop) * per_tile
    return x[:, :, tiles.start * per_tile : x.shape[2] - beyond]


def vector(x: jax.Array, tiling: Any, first: int, length: int) -> jax.Array:
    """Adds up the sums `[B, N, windows, 1, width]` of a call's tiles: `[B, N, T + S]`.

    The first tile of queries is `first`; `length` is T + S of all calls.
    """
    # windows overlap: entry j of one is entry j - unit of the next
    (B, N, n, _, _), unit = x.shape, _step(tiling)
    each = width(tiling) // unit
    units = x.reshape(B, N, n, each, unit)
    pad = lambda i: [(0, 0), (0, 0), (i, each - 1 - i), (0, 0)]
    total = functools.reduce(jnp.add, [jnp.pad(units[:, :, :, i], pad(i)) for i in range(each)])
    total = total.reshape(B, N, -1)
    # zeros for the distances of other calls' queries
    before = first * tiling.block_q
    return jnp.pad(total, [(0, 0), (0, 0), (before, length - before - total.shape[-1])])


def band(tiling: Any, dtype: Any) -> Any:
    """Returns vector memory for a band."""
    return pltpu.VMEM((LANES, width(tiling)), dtype)


def spread(ref: Any, rows: jax.Array) -> None:
    """Writes the band whose first rows are `[8, width]`."""
    for i in range(0, LANES, ROWS):
        ref[i : i + ROWS, :] = _moved(rows, i)


def fold(ref: Any) -> jax.Array:
    """Sums a band `[128, width]` to the window `[1, width]` that it was spread from."""
    # groups of 8 rows, the last first, each moved back to where the one before it begins
    total = ref[LANES - ROWS :, :]
    for i in range(LANES - 2 * ROWS, -1, -ROWS):
        total = _moved(total, -ROWS) + ref[i : i + ROWS, :]
    # then the 8 rows: row p by p lanes, a bit of p at a time
    row = lax.broadcasted_iota(jnp.int32, total.shape, 0)
    for bit in (1, 2, 4):
        total = jnp.where(row & bit != 0, _moved(total, -bit), total)
    return total.sum(0, keepdims=True)


def _moved(x: jax.Array, lanes: int) -> jax.Array:
    """Moves x by that many lanes; what leaves at one end enters at the other, where no block is."""
    shift: Any = np.int32(lanes % x.shape[1])  # not int64 in x64 mode
    return pltpu.roll(x, shift, 1) if lanes else x


def block(ref: Any, slices: Sequence[slice], tiling: Any) -> jax.Array:
    """Reads `[keys, queries]` of the given queries and keys of a tile, whose band is `ref`."""
    found = [ref[:, where] for where in _places(slices, tiling)]
    return found[0] if len(found) == 1 else jnp.concatenate(found, 0)


def add(ref: Any, x: jax.Array, slices: Sequence[slice], tiling: Any) -> None:
    """Adds `[keys, queries]` of them to the band of sums `ref`."""
    for i, where in enumerate(_places(slices, tiling)):
        ref[:, where] += x[i * LANES : (i + 1) * LANES]


def _places(slices: Sequence[slice], tiling: Any) -> list[slice]:
    """Returns the columns of a band for each 128 keys."""
    queries, keys = slices
    starts = (tiling.block_k - key + queries.start for key in range(keys.start, keys.stop, LANES))
    return [slice(start, start + queries.stop - queries.start) for start in starts]
