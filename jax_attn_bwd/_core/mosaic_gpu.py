"""Shared by the Mosaic GPU kernels: how they are launched and interpreted; for Hopper, TMA and wgmma."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core.pallas import of_type

NAME = "mosaic_gpu"


def launch(
    body: Callable[..., None],
    name: str,
    *,
    interpret: bool,
    out_type: Any,
    scratch: Sequence[Any] | Mapping[str, Any],
    grid: Mapping[str, int],
    warpgroups: int = 1,
) -> Callable[..., Any]:
    """Returns a Pallas Mosaic GPU kernel: `body(*operand refs, *output refs, *scratch refs)`.

    `grid` names its axes, the fastest first; the axis "wg" counts the warpgroups of a block.
    """
    threads = {"num_threads": warpgroups, "thread_name": "wg"} if warpgroups > 1 else {}
    run = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=_interpreter() if interpret else None,
        kernel_name=name,
        **threads,  # type: ignore[arg-type]
    )
    # results vary over the mesh axes that `out_type` says
    types = jax.tree.leaves(out_type)

    def call(*operands):
        found, structure = jax.tree.flatten(run(*operands))
        return structure.unflatten(of_type(x, t) for x, t in zip(found, types, strict=True))

    return call


def can_interpret() -> bool:
    """Tells whether this JAX has an interpreter that runs these kernels (0.12 and later)."""
    return hasattr(plgpu, "InterpretGPUParams") and jax.__version_info__ >= (0, 12)


def too_old() -> str | None:
    """Tells why this JAX has not what kernels need that lay out registers themselves; None if it has."""
    if jax.__version_info__ >= (0, 12):
        return None
    return f"it needs JAX 0.12 or later, not {jax.__version__}"


def _interpreter() -> Any:
    if not can_interpret():
        raise NotImplementedError("the Mosaic GPU interpreter of this JAX cannot run these kernels")
    # When a block of one device ends, JAX 0.12 forgets the clocks of all: those beside it would seem to race.
    alone = math.prod(jax.sharding.get_abstract_mesh().shape.values()) == 1
    return getattr(plgpu, "InterpretGPUParams")(detect_races=alone)  # noqa: B009 (absent before 0.12)


def load(ref: Any, *, layout: Any, optimized: bool = True) -> jax.Array:
    """Loads a tile into registers; `optimized=False` allows loads that are not coalesced."""
    index = ((),) if jax.__version_info__ < (0, 11) else ()
    return plgpu.load(ref, *index, layout=layout, optimized=optimized)


# ---- for Hopper: layouts of registers and shared memory, TMA, wgmma

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
