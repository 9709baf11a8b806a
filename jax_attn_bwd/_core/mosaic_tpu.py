"""Shared by the Mosaic TPU kernels: which TPUs run them, how they are launched, small vector helpers."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_attn_bwd._core import pallas, targets

NAME = "mosaic_tpu"
LANES = 128  # of a vector register
VMEM = 56 * 2**20  # bytes that a kernel may take: the smallest memory, of v5p and TPU7x, is 64 MiB
DTYPES = ("bfloat16", "float32")  # that the matrix unit multiplies; it refuses float16

ZERO = np.int32(0)  # of index maps, which must return int32 in x64 mode too


def has_wide_units() -> bool:
    """Tells whether the TPU multiplies 256 x 256 matrices (v6e and later), faster than it adds up rows."""
    return not pallas.is_interpreted(NAME) and bool(re.match(r"TPU ?v?([6-9]|\d\d)", targets.device_kind()))


def launch(
    body: Callable[..., None],
    name: str,
    *,
    interpret: bool,
    grid: Sequence[int],
    parallel: int,
    prefetched: int = 0,
    in_specs: Sequence[Any],
    out_specs: Sequence[Any],
    out_type: Sequence[Any],
    scratch: Sequence[Any] = (),
) -> Callable[..., Any]:
    """Returns a Pallas TPU kernel: `body(*scalar refs, *input refs, *output refs, *scratch refs)`.

    The first `parallel` axes of `grid` may be split over the cores of a chip, the others run in order; the
    first `prefetched` operands are in scalar memory before a step begins, and index maps read them.
    """
    # interpreted, by two virtual cores with race detection, and in memory that holds NaN until it is written
    options: Any = {"detect_races": True, "num_cores_or_threads": 2, "uninitialized_memory": "nan"}
    semantics: list[Any] = ["parallel"] * parallel + ["arbitrary"] * (len(grid) - parallel)
    return pl.pallas_call(
        body,
        out_shape=list(out_type),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=prefetched,
            grid=tuple(grid),
            in_specs=list(in_specs),
            out_specs=list(out_specs),
            scratch_shapes=list(scratch),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=tuple(semantics), vmem_limit_bytes=VMEM),
        interpret=pltpu.InterpretParams(**options) if interpret else False,
        name=name,
    )


def entry_by_entry(f: Callable[..., Any]) -> Callable[..., Any]:
    """Runs kernels of `f` under `jax.vmap` one batch entry after the other, each with its own scalars."""
    return jax.custom_batching.sequential_vmap(f)


def scalars() -> Any:
    """Returns the spec of an operand that lies in scalar memory as a whole."""
    return pl.BlockSpec(memory_space=pltpu.SMEM)


def stand(row: jax.Array) -> jax.Array:
    """Turns `[1, n]` of 32 bits into `[n, 1]`."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def lie(column: jax.Array) -> jax.Array:
    """Turns `[n, 1]` of 32 bits into `[1, n]`."""
    return jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1]


def lane_blocks(x: jax.Array) -> list[jax.Array]:
    """Cuts `[n, m * 128]` into m arrays `[n, 128]`, each of whole registers."""
    return [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]
