"""Shared by the Mosaic GPU kernels for Hopper: layouts of registers and shared memory, TMA, wgmma."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SHARED_MEMORY = 227 * 1024  # bytes of a block on compute capability 9.0
# Of a thread, after one warpgroup has given to two what it does not need to start copies: multiples of 8,
# together at most the 64 * 1024 registers of a multiprocessor for 3 * 128 threads.
LOAD_REGISTERS, COMPUTE_REGISTERS = 24, 240

WGMMA = plgpu.Layout.WGMMA
ROWS, COLUMNS = WGMMA.reduce(1), WGMMA.reduce(0)  # one value per row, per column of a WGMMA tile


def tile(shape: Sequence[int], dtype: Any, swizzle: int = 128) -> Any:
    """Returns shared memory for tiles `[..., rows, columns]` of WGMMA and TMA: swizzled 8 x `swizzle` bytes.

    A product needs one swizzle in both factors, and a contracted axis that is a multiple of it.
    """
    bits = jnp.finfo(dtype).bits
    swizzle = min(swizzle, shape[-1] * bits // 8)
    transforms = (plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(tuple(shape), dtype, transforms=transforms)


def stream(count: Any, stages: int, rings: Sequence[tuple[Any, Any, Any, Any]]) -> None:
    """Loads `count` steps of tiles into rings of `stages` shared tiles, as they come free.

    A ring is (sources, tiles, loaded, free): `sources(step)` lists references in global memory, `tiles` the
    rings they go to; `loaded` and `free` are barriers, one for each stage. The readers wait for `loaded` and
    arrive on `free`.
    """

    @pl.loop(jnp.int32(0), count)
    def _step(step):
        slot = lax.rem(step, jnp.int32(stages))
        for sources, targets, loaded, free in rings:
            pl.when(step >= stages)(partial(plgpu.barrier_wait, free.at[slot]))
            for source, target in zip(sources(step), targets, strict=True):
                plgpu.copy_gmem_to_smem(source, target.at[slot], loaded.at[slot])


def meet(barrier: Any) -> None:
    """Waits until every warpgroup of the barrier has come by."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def product(acc: Any, a: jax.Array, b: Any, spare: Any) -> None:
    """Adds `a @ b` to `acc` on tensor cores, asynchronously: a in registers, b a tile of shared memory.

    The interpreter does not read a from registers: it goes through the shared tile `spare`.
    """
    if spare is not None:
        spare[...] = a
        plgpu.commit_smem()
    plgpu.wgmma(acc, a if spare is None else spare, b)


def add_products(acc: jax.Array, factors: Sequence[jax.Array], b: Any, spare: Any) -> jax.Array:
    """Adds `a @ b` to acc for each a of `factors` on tensor cores: acc, a in registers, b in shared memory.

    The interpreter does not start an accumulator from registers: it adds afterwards.
    """

    def add(ref):
        for a in factors:
            product(ref, a, b, spare)

    if spare is None:
        return pl.run_state(add)(plgpu.ACC.init(acc))

    def alone(ref):
        add(ref)
        return ref[...]

    return acc + pl.run_scoped(alone, plgpu.ACC((acc.shape[0], acc.shape[1]), jnp.float32))
