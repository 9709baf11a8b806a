"""Tells what is compiled for: the platform, the kind of device, the generation whose kernels it runs."""

import functools
import pathlib
import re
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractDevice, AbstractMesh


class Generation(NamedTuple):
    """Devices that run the same kernel files."""

    files: str  # what the names of its kernel files begin with
    kinds: str  # regular expression of the kinds of device, as their makers call them
    words: str
    ran: str  # when and at which commit its kernels passed on such a device; "" = not yet
    capability: tuple[int, int] | None = None  # the least of a device of any other name that tells its own
    oldest_jax: tuple[int, ...] = ()  # on which they passed
    traces: str = ""  # digest of the programs that passed; a test fails where the code's are others


# Cards of data centers, of games, of workstations (a Quadro RTX is older), and what is built into machines.
_AMPERE = (
    r"\b(A|L|H|GH|B|GB)\d+|\bRTX [3-9]0[5-9]0\b|\bRTX .*(Ada|Blackwell)\b|\bRTX PRO\b|\b(Orin|Thor)\b",
    "an NVIDIA GPU of compute capability 8.0 or more",
)
_CARDS = r"(NVIDIA|Tesla|Quadro|GeForce|GTX|RTX|TITAN)\b"  # what names of NVIDIA's begin with
# By implementation, the newest last. Kernels are picked by themselves only where they are proven: by a user's
# own record (`records`), or here. To turn a generation on for everyone, once `tests/gpu` has passed on such
# a device (for TPUs `check --enable`): `ran="<date>, <commit that passed there>"`, the JAX it passed on, and
# the digest that `tests/gpu/traces.py` prints.
GENERATIONS = {
    "mosaic_tpu": (Generation("tpu", r"TPU ?v?([5-9]|\d\d)", "a TPU v5e, v5p, v6e or TPU7x", ""),),
    "mosaic_gpu": (
        Generation("gpu", *_AMPERE, "", (8, 0)),
        Generation(
            "hopper",
            r"\b(GH|H)\d+",
            "a Hopper GPU (compute capability 9.0)",
            "2026-11-26, 391a32d",
            oldest_jax=(0, 11, 2),
            traces="192ce6e6a31b",
        ),
    ),
    # A library that JAX's users run on all of these, whatever the JAX: `kernels/cudnn.py` knows its versions.
    "cudnn": (Generation("cudnn", *_AMPERE, "2026-11-26, 391a32d", (8, 0), traces="d4629354cf40"),),
}
CHIPS = {  # by the names of everyday speech: platform, kind of device
    "cpu": ("cpu", "cpu"),
    "A100": ("gpu", "NVIDIA A100-SXM4-80GB"),
    "H100": ("gpu", "NVIDIA H100 80GB HBM3"),
    "H200": ("gpu", "NVIDIA H200"),
    "B200": ("gpu", "NVIDIA B200"),
    "v5e": ("tpu", "TPU v5 lite"),
    "v5p": ("tpu", "TPU v5"),
    "v6e": ("tpu", "TPU v6 lite"),
    "tpu7x": ("tpu", "TPU7x"),
}


def platform() -> str:
    """Returns the platform aimed at: of the ambient mesh, else the default device, else JAX's default."""
    if (aimed := _abstract_device()) is not None:
        return aimed.platform
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def is_one_cpu() -> bool:
    """Tells whether a CPU is aimed at of which there is one device: then nothing is sharded."""
    if platform() != "cpu":
        return False
    try:
        return jax.device_count("cpu") == 1
    except RuntimeError:  # an abstract mesh names devices that are not here
        return False


def multiplies(dtype: Any) -> bool:
    """Tells whether what is aimed at multiplies matrices of that dtype as they are.

    GPUs and TPUs do. XLA compiles for the CPU that it runs on, which has instructions for float32 and
    float64, and maybe for bfloat16; these are used where nothing is sharded.
    """
    if platform() != "cpu" or dtype in ("float32", "float64"):
        return True
    return dtype == "bfloat16" and _cpu_has_bfloat16() and is_one_cpu()


@functools.cache
def _cpu_has_bfloat16() -> bool:
    """Tells whether this CPU has products of bfloat16; where Linux does not list what it has, it has none."""
    try:
        listed = pathlib.Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(listed)


def device_kind() -> str:
    """Returns the kind of device that is aimed at, as its maker calls it: "NVIDIA H200"."""
    if (aimed := _abstract_device()) is not None:
        return aimed.device_kind
    return _default_device().device_kind


def compute_capability() -> tuple[int, int] | None:
    """Returns the compute capability of the GPU that is aimed at; None where it does not tell."""
    device = _default_device()
    if (aimed := _abstract_device()) is not None and aimed.device_kind != device.device_kind:
        device = aimed
    found = re.fullmatch(r"(\d+)\.(\d+)", getattr(device, "compute_capability", ""))
    return None if found is None else (int(found[1]), int(found[2]))


def is_here() -> bool:
    """Tells whether the device aimed at is the default one, rather than one that is compiled for."""
    return device_kind() == _default_device().device_kind


def aimed_at(chip: str) -> AbstractContextManager:
    """Compiles programs inside for that chip, which need not be here: a key of `CHIPS`, or a kind of device.

    Raises:
      ValueError: it is neither.
    """
    is_gpu = re.match(_CARDS, chip) or re.match(_AMPERE[0], chip)
    if chip not in CHIPS and not is_gpu and not chip.startswith("TPU"):
        known = f"{tuple(CHIPS)}, or a kind of device as its maker calls it ('L40S', 'GeForce RTX 4090')"
        raise ValueError(f"explain: platform must be one of {known}, got {chip!r}")
    platform, kind = CHIPS.get(chip, ("gpu" if is_gpu else "tpu", chip))
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    mesh = jax.sharding.get_abstract_mesh()
    aimed = AbstractMesh(mesh.axis_sizes, mesh.axis_names, mesh.axis_types, abstract_device=device)
    return jax.sharding.use_abstract_mesh(aimed)


def _abstract_device() -> Any:
    return jax.sharding.get_abstract_mesh().abstract_device


def _default_device() -> Any:
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    return jax.devices(device)[0] if device is None or isinstance(device, str) else device


def generation(implementation: str, generations: tuple[str, ...]) -> Generation | str:
    """Returns the one of `generations` (by their files) of the targeted device, or why it is of none."""
    known = [g for g in GENERATIONS[implementation] if g.files in generations]
    kind, capability = device_kind(), compute_capability()
    for found in known:
        least = found.capability
        if re.search(found.kinds, kind) or (least and capability and capability >= least):
            return found
    return f"it needs {' or '.join(g.words for g in known)}, not {kind}"
