"""Which tiles the Hopper kernels of dense attention visit.

XLA tells each tile of queries which tiles of keys it visits, or the reverse, in one of these forms:

    an array  int32 [B|1, tiles, 4]: a run of tiles, `first <= j < end`; those with
              `full_first <= j < full_end` need no comparison
    Listed    how many tiles, and each of them in order: where a mask may leave holes in the runs
    Each      every tile by itself, likewise, for the kernel whose blocks own one tile each

Kernels read them from memory step by step: registers are scarcer than loads that hit the cache.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd.ops.dot_product.kernels.inputs import Inputs, at
from jax_attn_bwd.ops.dot_product.kernels.tile_flags import live_first, tile_flags
from jax_attn_bwd.ops.dot_product.spec import KernelOptions


class Listed(NamedTuple):
    """The tiles that are visited, without holes."""

    words: Any  # int32 [B|1, tiles, 1 + all]: how many, then 2 * tile + (whether it must be compared)


class Each(NamedTuple):
    """All tiles."""

    words: Any  # int32 [B|1, tiles, all]: 0 nothing is seen, 1 all is, 2 it must be compared


def bounds(
    options: KernelOptions, refs: Inputs, rows: int, columns: int, by_key: bool = False, each: bool = False
) -> jax.Array | Listed | Each | None:
    """Which tiles a tile visits, as `Inputs.bounds`: rows x columns is the size of a tile.

    For each tile of queries over the tiles of keys; with `by_key` the reverse. None: all, and all full.
    Where there may be holes `Listed`, or with `each` `Each`.
    """
    some, every, _ = tile_flags(options, refs, rows, columns, common=64)
    if by_key:
        some, every = some.swapaxes(-1, -2), every.swapaxes(-1, -2)
    xp: Any = np if isinstance(some, np.ndarray) else jnp
    if xp is np and every.all():
        return None
    every = xp.broadcast_to(every, some.shape)
    n = some.shape[-1]
    first = some.argmax(-1)
    end = xp.where(some.any(-1), n - some[..., ::-1].argmax(-1), 0)
    may_have_holes = any(x is not None for x in (options.mask_mod, refs.mask, refs.bias))
    if may_have_holes and (xp is jnp or (end - first > some.sum(-1)).any()):
        return _each(some, every) if each else _listed(xp, some, every)
    full_first = every.argmax(-1)
    after = ~every & (xp.arange(n)[None, None] >= full_first[..., None])
    full_end = xp.where(after.any(-1), after.argmax(-1), n)
    return jnp.stack([jnp.asarray(x, jnp.int32) for x in (first, full_first, full_end, end)], -1)


def _listed(xp: Any, some: Any, every: Any) -> Listed:
    order, counts = live_first(some)
    compared = ~xp.take_along_axis(every, order, axis=-1)
    counts, order, compared = (x.astype(np.int32) for x in (counts, order, compared))
    return Listed(jnp.asarray(xp.concatenate([counts, 2 * order + compared], -1)))


def _each(some: Any, every: Any) -> Each:
    return Each(jnp.asarray(some, jnp.int32) * (2 - jnp.asarray(every, jnp.int32)))


class Run(NamedTuple):
    """The tiles that one tile of the other side visits, one after the other."""

    ref: Any  # int32 [4] in global memory; None: all, and all full
    first: Any
    end: Any

    @property
    def count(self) -> Any:
        """How many they are."""
        return self.end - self.first

    def tile(self, step: Any) -> Any:
        """The tile that is visited at a step."""
        return self.first + step

    def visits(self, tile: Any) -> Any:
        """Whether a tile is visited."""
        return (tile >= self.first) & (tile < self.end)

    def compares(self, tile: Any) -> Any:
        """Whether a tile must be compared element by element."""
        if self.ref is None:
            return jnp.bool_(False)
        return (tile < self.ref[1]) | (tile >= self.ref[2])

    def mixed(self, step: Any) -> Any:
        """Whether the tile of a step must be compared element by element."""
        return self.compares(self.tile(step))

    def opaque_zero(self) -> Any:
        """0, which compilers cannot know: addresses it is added to are computed inside the loop.

        Hoisted out of it, the descriptors of a tile with H = 256 take more registers than there are.
        """
        return jnp.int32(0) if self.ref is None else lax.shift_right_logical(self.ref[1], jnp.int32(31))


class Steps(NamedTuple):
    """The same as a list; the methods are those of `Run`."""

    ref: Any  # int32 [1 + all] in global memory, of `Listed`
    count: Any

    def tile(self, step: Any) -> Any:
        """The tile that is visited at a step."""
        return lax.shift_right_logical(self.ref[step + 1], jnp.int32(1))

    def mixed(self, step: Any) -> Any:
        """Whether the tile of a step must be compared element by element."""
        return (self.ref[step + 1] & 1) != 0

    def opaque_zero(self) -> Any:
        """0, which compilers cannot know."""
        return lax.shift_right_logical(self.ref[0], jnp.int32(31))


class Kinds(NamedTuple):
    """What is known of each tile of the other side; the methods are those of `Run`."""

    ref: Any  # int32 [all] in global memory, of `Each`

    def visits(self, tile: Any) -> Any:
        """Whether a tile is visited."""
        return self.ref[tile] != 0

    def compares(self, tile: Any) -> Any:
        """Whether a tile must be compared element by element."""
        return self.ref[tile] == 2


def are_of_all(refs: Inputs) -> bool:
    """Whether all batch entries visit the same tiles."""
    return all(x.shape[0] == 1 for x in jax.tree.leaves(refs.bounds))


def load(refs: Inputs, b: Any, tile: Any, count: int) -> Any:
    """What `tile` visits: `Run`, `Steps` or `Kinds`; `count` is the number of tiles if all are visited."""
    if refs.bounds is None:
        return Run(None, jnp.int32(0), jnp.int32(count))
    (words,) = jax.tree.leaves(refs.bounds)
    ref = words.at[at(words, 0, b), tile]
    if isinstance(refs.bounds, Listed):
        return Steps(ref, ref[0])
    if isinstance(refs.bounds, Each):
        return Kinds(ref)
    return Run(ref, ref[0], ref[3])
