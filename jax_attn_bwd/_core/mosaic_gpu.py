"""What the Mosaic GPU kernels share: which GPUs run them, how they are launched, shared-memory layouts."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core import backend, pallas

NAME = "mosaic_gpu"
SHARED_MEMORY = 227 * 1024  # bytes of a block on compute capability 9.0

WGMMA = plgpu.Layout.WGMMA
ROWS, COLUMNS = WGMMA.reduce(1), WGMMA.reduce(0)  # one value per row, per column of a WGMMA tile


def unsupported_device() -> str | None:
    """Why the targeted GPU cannot run these kernels; None if it can."""
    if pallas.is_interpreted(NAME):
        return None
    kind = backend.target_device_kind()
    if re.search(r"\b(GH|H)\d+", kind):  # H100, H200, H800, H20, GH200
        return None
    return f"it needs a Hopper GPU (compute capability 9.0), not {kind}"


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
    """A Pallas Mosaic GPU kernel: `body(*operand refs, *output refs, *scratch refs)`.

    `grid` names its axes, the fastest first; the axis "wg" counts the warpgroups of a block.
    """
    threads = {"num_threads": warpgroups, "thread_name": "wg"} if warpgroups > 1 else {}
    return plgpu.kernel(
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


def can_interpret() -> bool:
    """Whether this JAX has an interpreter that runs these kernels (0.12 and later)."""
    return hasattr(plgpu, "InterpretGPUParams") and jax.__version_info__ >= (0, 12)


def _interpreter() -> Any:
    if not can_interpret():
        raise NotImplementedError("the Mosaic GPU interpreter of this JAX cannot run these kernels")
    return getattr(plgpu, "InterpretGPUParams")(detect_races=True)  # noqa: B009 (absent before 0.12)


def tile(shape: Sequence[int], dtype: Any, swizzle: int = 128) -> Any:
    """Shared memory for tiles `[..., rows, columns]` that WGMMA and TMA read: swizzled 8 x `swizzle` bytes.

    A product needs one swizzle in both factors, and a contracted axis that is a multiple of it.
    """
    bits = jnp.finfo(dtype).bits
    swizzle = min(swizzle, shape[-1] * bits // 8)
    transforms = (
        plgpu.TilingTransform((8, swizzle * 8 // bits)),
        plgpu.SwizzleTransform(swizzle),
    )
    return plgpu.SMEM(tuple(shape), dtype, transforms=transforms)


def load(ref: Any, *, layout: Any, optimized: bool = True) -> jax.Array:
    """A tile in registers; `optimized=False` allows loads that are not coalesced."""
    index = ((),) if jax.__version_info__ < (0, 11) else ()
    return plgpu.load(ref, *index, layout=layout, optimized=optimized)


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
    """`acc += a @ b` on tensor cores, asynchronous: a in registers, b a tile of shared memory.

    The interpreter does not read a from registers: it goes through the shared tile `spare`.
    """
    if spare is not None:
        spare[...] = a
        plgpu.commit_smem()
    plgpu.wgmma(acc, a if spare is None else spare, b)


def add_product(acc: jax.Array, a: jax.Array, b: Any, spare: Any) -> jax.Array:
    """`acc + a @ b` on tensor cores: acc and a in registers, b a tile of shared memory.

    The interpreter does not start an accumulator from registers: it adds afterwards.
    """
    if spare is None:
        return pl.run_state(partial(product, a=a, b=b, spare=None))(plgpu.ACC.init(acc))

    def alone(ref):
        product(ref, a, b, spare)
        return ref[...]

    return acc + pl.run_scoped(alone, plgpu.ACC((acc.shape[0], acc.shape[1]), jnp.float32))
