"""Shared by the Mosaic GPU kernels of every generation: how they are launched and interpreted."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
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
