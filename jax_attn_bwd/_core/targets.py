"""What is compiled for: the platform, the kind of device, and the generation whose kernels it runs."""

import os
import re
from typing import Any, NamedTuple

import jax


class Generation(NamedTuple):
    """Devices that run the same kernel files."""

    files: str  # what the names of its kernel files begin with
    kinds: str  # regular expression of the kinds of device, as their makers call them
    words: str
    ran: str  # when and where its kernels passed on such a device; "" = not yet
    capability: tuple[int, int] | None = None  # the least of a device of any other name that tells its own


# By implementation, the newest last. The Mosaic GPU interpreter does not model asynchronous wgmma,
# reduce-adds and setmaxnreg, so a GPU generation whose `ran` is empty is not picked by itself: to turn it on
# for everyone, `ran="<date>, <commit whose tests/gpu passed there>"`. For TPUs compiler and interpreter
# leave no such gap.
GENERATIONS = {
    "mosaic_tpu": (
        Generation("tpu", r"TPU ?v?([5-9]|\d\d)", "a TPU v5e, v5p, v6e or TPU7x", "interpreted and compiled"),
    ),
    "mosaic_gpu": (
        Generation(
            "gpu", r"\b(A|L|H|GH|B|GB)\d+", "an NVIDIA GPU of compute capability 8.0 or more", "", (8, 0)
        ),
        Generation("hopper", r"\b(GH|H)\d+", "a Hopper GPU (compute capability 9.0)", ""),
    ),
    "cudnn": (
        Generation(
            "cudnn", r"\b(A|L|H|GH|B|GB)\d+", "an NVIDIA GPU of compute capability 8.0 or more", "", (8, 0)
        ),
    ),
}
# Environment variable: 1 picks the kernels of this package that have not run yet, too, cudnn picks cuDNN.
GPU_KERNELS = "JAX_ATTN_BWD_GPU_KERNELS"


def platform() -> str:
    """The platform that is aimed at: of the ambient mesh, else the default device, else JAX's default."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.abstract_device is not None:
        return mesh.abstract_device.platform
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def device_kind() -> str:
    """The kind of device that is aimed at, as its maker calls it: "NVIDIA H200"."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.abstract_device is not None:
        return mesh.abstract_device.device_kind
    return _default_device().device_kind


def compute_capability() -> tuple[int, int] | None:
    """That of the GPU that is aimed at; None where it does not tell."""
    mesh = jax.sharding.get_abstract_mesh()
    device = _default_device()
    if (
        not mesh.empty
        and (aimed := mesh.abstract_device) is not None
        and aimed.device_kind != device.device_kind
    ):
        device = aimed
    found = re.fullmatch(r"(\d+)\.(\d+)", getattr(device, "compute_capability", ""))
    return None if found is None else (int(found[1]), int(found[2]))


def _default_device() -> Any:
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    return jax.devices(device)[0] if device is None or isinstance(device, str) else device


def generation(implementation: str, generations: tuple[str, ...]) -> Generation | str:
    """The one of `generations` (by their files) that the targeted device is of, or why it is of none."""
    known = [g for g in GENERATIONS[implementation] if g.files in generations]
    kind, capability = device_kind(), compute_capability()
    for found in known:
        least = found.capability
        if re.search(found.kinds, kind) or (least and capability and capability >= least):
            return found
    return f"it needs {' or '.join(g.words for g in known)}, not {kind}"


def not_picked(found: Generation) -> str | None:
    """Why `implementation=None` passes over the kernels of a generation; None if it does not."""
    word = "cudnn" if found.files == "cudnn" else "1"
    if found.ran or os.environ.get(GPU_KERNELS) == word:
        return None
    return (
        f"its kernels have not run on {found.words} yet, so they are not picked by themselves; "
        f"ask for them by name, or set {GPU_KERNELS}={word}"
    )
