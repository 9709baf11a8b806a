"""Compiles the cases of the operators for one chip, and holds what comes out against budgets."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
from bench import report

from compile_only import devices, gpu, programs, tpu, tpu_peers
from compile_only.programs import Program
from jax_attn_bwd._core import console, mosaic_tpu
from jax_attn_bwd._core.cases import Case, Operator

WITHOUT_GPU = {"xla_gpu_enable_cub_radix_sort": False}  # the library's sort asks the GPU at hand
# our kernels ask for as much themselves
_PEERS = {"xla_tpu_scoped_vmem_limit_kib": str(mosaic_tpu.VMEM // 1024)}


def violations(program: Program) -> list[str]:
    """What is wrong with a program, one sentence each; empty if nothing."""
    if program.implementation in tpu_peers.NAMES:
        return []
    if program.error is not None:
        found = [program.error]
    elif program.implementation == "xla":
        found = [] if program.temporary_bytes is not None else ["no memory was reported"]
    else:
        found, kernels = [], program.kernels
        if not kernels or len(kernels) > program.expected:
            found.append(f"{program.expected} launches and {len(kernels)} kernels")
        for kernel in kernels:
            for name, limit in kernel.limits().items():
                if (value := getattr(kernel, name)) > limit:
                    found.append(f"{kernel.name} has {name} {value}, at most {limit} allowed")
        found += (tpu if program.target in devices.TPU else gpu).wrong(program)
    return [f"{program.name}: {what}" for what in found]


def compile_all(
    target: str, implementation: str, operators: Sequence[Operator], only: Sequence[str] = ()
) -> list[Program]:
    """A program for each case and direction; `only`: of the cases of these names."""
    if target in devices.TPU:
        tpu.dump_folder()
    (device,) = devices.devices(target)
    jobs = [
        (operator, case, direction)
        for operator in operators
        for case in programs.cases(operator, implementation, target)
        if not only or case.name in only
        for direction in programs.directions(operator, implementation, target)
    ]
    known: dict[str, gpu.Kernel] = {}
    found = []
    for operator, case, direction in console.progress(jobs, len(jobs), f"compile for {target}"):
        program = Program(target, operator.name, implementation, case.name, direction)
        found.append(_compile(program, operator, case, device, known))
    return found


def _compile(
    program: Program, operator: Operator, case: Case, device: Any, known: dict[str, gpu.Kernel]
) -> Program:
    """`program` with what the compiler says, or with its error."""
    function, arguments = programs.function(operator, case, program.direction, program.implementation)
    if program.target in devices.TPU:
        return compile_for_tpu(program, function, arguments, device)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            lowered = devices.lower(function, arguments, device)
            launches = lowered.as_text().count("custom_call @mosaic_gpu")
            memory = lowered.compile(WITHOUT_GPU).memory_analysis()
            kernels = gpu.dumped(Path(folder), known)
        except Exception as error:  # whatever the compiler raises is this program's answer
            return replace(program, error=report.sentence(error))
        finally:
            del os.environ["MOSAIC_GPU_DUMP_TO"]
    temporary = memory.temp_size_in_bytes
    return replace(program, expected=launches, kernels=kernels, temporary_bytes=temporary)


def compile_for_tpu(
    program: Program, function: Any, arguments: tuple[Any, ...], device: Any, options: Any = None
) -> Program:
    """`program` with what the compiler of TPUs says of `function`, or with its error."""
    tpu.clear()
    try:
        lowered = devices.lower(function, arguments, device)
        launches = lowered.as_text().count("@tpu_custom_call")
        compiled = lowered.compile(options)
        kernels = tpu.dumped(compiled.as_text())
    except Exception as error:  # whatever the compiler raises is this program's answer
        return replace(program, error=report.sentence(error))
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return replace(program, expected=launches, kernels=kernels, temporary_bytes=temporary)


def compile_peers(target: str) -> list[Program]:
    """The peers' programs; what a peer's kernel is called and spills is its own matter."""
    tpu.dump_folder()
    (device,) = devices.devices(target)
    found = []
    for peer, case, tile, function, arguments in tpu_peers.programs():
        program = Program(target, "dot_product_attention", peer, case, f"gradients, {tile[0]} x {tile[1]}")
        program = compile_for_tpu(program, function, arguments, device, _PEERS)
        tiles = [
            tile if "bwd" not in k.name and "dkv" not in k.name else tpu_peers.BACKWARD_TILE
            for k in program.kernels
        ]
        kernels = [replace(k, tile=t, programs=1) for k, t in zip(program.kernels, tiles, strict=True)]
        found.append(replace(program, kernels=kernels))
    return found


def document(found: Sequence[Program]) -> dict[str, Any]:
    """What `--out` writes: versions, and the programs with what is wrong with them."""
    return {
        "jax": jax.__version__,
        "ptxas": devices.tool_version("ptxas"),
        "libtpu": devices.package_version("libtpu"),
        "programs": [{**asdict(program), "violations": violations(program)} for program in found],
    }


def read(document: dict[str, Any]) -> list[Program]:
    """The programs of a document."""
    found = [{k: v for k, v in entry.items() if k != "violations"} for entry in document["programs"]]
    return [Program(**{**entry, "kernels": [_kernel(k) for k in entry["kernels"]]}) for entry in found]


def _kernel(figures: dict[str, Any]) -> gpu.Kernel | tpu.Kernel:
    if "architecture" in figures:
        return gpu.Kernel(**figures)
    tile = figures["tile"]
    return tpu.Kernel(**{**figures, "tile": None if tile is None else tuple(tile)})
