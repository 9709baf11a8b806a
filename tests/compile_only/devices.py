"""Devices that can only be compiled for, and compilation for them."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

NVIDIA = {
    "A100": "NVIDIA_A100_SXM4_80GB",
    "H100": "NVIDIA_H100_80GB_HBM3",
    "H200": "NVIDIA_H200_141GB_HBM3e",
    "B200": "NVIDIA_B200",
}
HOPPER = ("H100", "H200")
TPU = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2x1", "tpu7x": "tpu7x:2x2x1"}
TARGETS = (*NVIDIA, *TPU)

_TPU_ENVIRONMENT = {  # libtpu asks no metadata server for what is said here
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is used that several processes would have to share
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


def missing(target: str, sass: bool = False) -> str | None:
    """What has to be installed to compile for `target`, in one sentence; None if nothing.

    `sass`: also what disassembles the kernels.
    """
    if target in TPU:
        found = importlib.util.find_spec("libtpu")
        return None if found else f"compiling for {target} needs the package libtpu"
    try:
        plugin = metadata.version("jax-cuda13-plugin")
    except metadata.PackageNotFoundError:
        return f"compiling for {target} needs jax-cuda13-plugin and jax-cuda13-pjrt {jax.__version__}"
    if plugin != jax.__version__:
        return f"jax-cuda13-plugin {plugin} does not fit JAX {jax.__version__}: the versions must be equal"
    for name, package in (("ptxas", "nvidia-cuda-nvcc"), ("nvdisasm", "nvidia-cuda-nvdisasm")):
        if (name != "nvdisasm" or sass) and tool(name) is None:
            return f"compiling for {target} needs {name}: a CUDA toolkit, or the package {package}"
    return None


@cache
def tool(name: str) -> str | None:
    """The path of a program of the CUDA toolkit: on PATH, or in an NVIDIA package."""
    if found := shutil.which(name):
        return found
    namespace = importlib.util.find_spec("nvidia")
    folders = () if namespace is None else namespace.submodule_search_locations or ()
    for folder in folders:
        for path in sorted(Path(folder).glob(f"**/bin/{name}")):
            return str(path)
    return None


def tool_version(name: str) -> str:
    """The version that a program of the CUDA toolkit reports."""
    path = tool(name)
    if path is None:
        return "not installed"
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", said)
    return found[1] if found else said.strip().splitlines()[-1]


def package_version(name: str) -> str:
    """The version of an installed package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def none_of_this_machine() -> None:
    """To be called before JAX looks for devices.

    Otherwise the CUDA plugin looks for a GPU, and libtpu starts before it is told what it compiles for.
    """
    jax.config.update("jax_platforms", "cpu")


def devices(target: str, gpus: int = 1, topology: str | None = None) -> list[Any]:
    """The compile-only devices of `target`: some GPUs of one host, or a TPU.

    With `topology`, "16x16", all TPUs of a slice of that shape.
    """
    none_of_this_machine()
    if target in TPU:
        for name, value in _TPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        name, count = (TPU[target], 1) if topology is None else (f"{target}:{topology}", None)
        return topologies.get_topology_desc(name, platform="tpu").devices[:count]
    folder = resources.files(__package__) / "targets"
    text = (folder / f"{NVIDIA[target]}.txtpb").read_text()
    if jax.__version_info__ < (0, 12):  # older plugins refuse this field
        lines = text.splitlines()
        text = "\n".join(x for x in lines if "collective_memory_granularity" not in x)
    return topologies.get_topology_desc(
        "", platform="cuda", target_config=text, topology=f"1x1x{gpus}"
    ).devices


@dataclass(frozen=True)
class _GPU(AbstractDevice):
    """Mosaic GPU takes a device that does not tell its compute capability for one of 9.0."""

    compute_capability: str


def _abstract(mesh: Mesh) -> AbstractMesh:
    """The abstract mesh of one compile-only device."""
    device, found = mesh.devices.flat[0], mesh.abstract_mesh
    if not hasattr(device, "compute_capability"):
        return found
    known = found.abstract_device
    gpu = _GPU(known.device_kind, known.num_cores, known.platform, device.compute_capability)
    return AbstractMesh(found.axis_sizes, found.axis_names, found.axis_types, abstract_device=gpu)


def lower(function: Callable[..., Any], arguments: tuple[Any, ...], target: Any) -> Any:
    """`function(*arguments)` lowered for the compile-only device `target`.

    The ambient mesh tells the operators, and Pallas, what chip is aimed at.
    """
    mesh = Mesh(np.array([target]), ("x",), axis_types=(AxisType.Explicit,))
    replicated = NamedSharding(mesh, PartitionSpec())
    platform = "cuda" if target.platform == "gpu" else target.platform
    with jax.sharding.use_abstract_mesh(_abstract(mesh)):
        traced = jax.jit(function, in_shardings=(replicated,) * len(arguments)).trace(*arguments)
        return traced.lower(lowering_platforms=(platform,))
