"""Compiles the cases of the operators for one chip, and holds what comes out against budgets."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from jax_attn_bwd._core import console, mosaic_tpu
from jax_attn_bwd._core.cases import Operator
from jax_attn_bwd.bench.compile_only import cases as static
from jax_attn_bwd.bench.compile_only import devices, tpu_kernels, tpu_peers
from jax_attn_bwd.bench.compile_only.kernels import Kernel, dumped
from jax_attn_bwd.bench.compile_only.tpu_kernels import TpuKernel
from jax_attn_bwd.bench.errors import sentence

REGISTERS = 255
SHARED_MEMORY = 227 * 1024  # bytes of a block, on compute capability 9.0 and later
# stores of vector registers for each score of a tile; of the softmax, for each bundle: 1
SPILLS = 8 / 1024
# our kernels ask for as much themselves
_PEERS = {"xla_tpu_scoped_vmem_limit_kib": str(mosaic_tpu.VMEM // 1024)}
NEEDED = {  # of some kernel of the program: without these it is not the kernel it should be
    "dot_product_attention": ("HGMMA", "UTMALDG", "MUFU.EX2"),
    "scaled_masked_softmax": ("MUFU.EX2",),
}


@dataclass(frozen=True)
class Row:
    """One program: a case in one direction, compiled for one chip.

    Attributes:
      expected: kernel launches of the program before it was compiled.
      temporary_bytes: what the compiled program allocates beside arguments and results.
      error: why it did not compile.
    """

    target: str
    operator: str
    implementation: str
    case: str
    direction: str
    expected: int = 0
    temporary_bytes: int | None = None
    kernels: list[Any] = field(default_factory=list)  # Kernel of a GPU, TpuKernel of a TPU
    error: str | None = None


def violations(row: Row) -> list[str]:
    """What is wrong with a row, one sentence each; empty if nothing."""
    where = f"{row.operator}[{row.implementation}] {row.case!r} {row.direction} for {row.target}"
    if row.implementation in tpu_peers.NAMES:
        return []
    if row.error is not None:
        return [f"{where}: {row.error}"]
    if row.implementation == "xla":
        return [] if row.temporary_bytes is not None else [f"{where}: no memory was reported"]
    found = []
    if not row.kernels or len(row.kernels) > row.expected:
        found.append(f"{where}: {row.expected} launches and {len(row.kernels)} kernels")
    for kernel in row.kernels:
        for name, limit in _limits(kernel).items():
            if (value := getattr(kernel, name)) > limit:
                found.append(f"{where}: {kernel.name} has {name} {value}, at most {limit} allowed")
    if row.target in devices.TPU:
        needed = row.operator == "dot_product_attention"
        if needed and not all(kernel.slots["MXU"] for kernel in row.kernels):
            found.append(f"{where}: a kernel does not use the matrix unit")
        return found
    for instruction in NEEDED.get(row.operator, ()):
        if not any(kernel.instructions.get(instruction) for kernel in row.kernels):
            found.append(f"{where}: no kernel has the instruction {instruction}")
    return found


def _limits(kernel: Kernel | TpuKernel) -> dict[str, int]:
    """The budget of a kernel: {figure: the most it may be}."""
    if isinstance(kernel, TpuKernel):
        spills = SPILLS * kernel.scores * kernel.programs or kernel.bundles
        return {"vmem": mosaic_tpu.VMEM, "spill_stores": int(spills)}
    return {
        "spill_stores": 0, "spill_loads": 0, "stack": 0,
        "registers": REGISTERS, "shared_memory": SHARED_MEMORY,
    }  # fmt: skip


def compile_all(
    target: str, implementation: str, operators: Sequence[Operator], only: str | None = None
) -> list[Row]:
    """A row for each case and direction; `only`: of the case of that name."""
    if target in devices.TPU:
        tpu_kernels.dump_folder()
    (device,) = devices.devices(target)
    jobs = [
        (operator, case, direction)
        for operator in operators
        for case in static.cases(operator, implementation, target)
        if only in (None, case.name)
        for direction in static.directions(target)
    ]
    known: dict[str, Kernel] = {}
    rows = []
    for operator, case, direction in console.progress(jobs, len(jobs), f"compile for {target}"):
        row = Row(target, operator.name, implementation, case.name, direction)
        rows.append(_compile(row, operator, case, device, known))
    return rows


def _compile(
    row: Row, operator: Operator, case: static.StaticCase, device: Any, known: dict[str, Kernel]
) -> Row:
    """`row` with what the compiler says, or with its error."""
    function, arguments = static.function(operator, case, row.direction, row.implementation)
    if row.target in devices.TPU:
        return compile_for_tpu(row, function, arguments, device)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            lowered = devices.lower(function, arguments, device)
            launches = lowered.as_text().count("custom_call @mosaic_gpu")
            memory = lowered.compile().memory_analysis()
            kernels = dumped(Path(folder), known)
        except Exception as error:  # whatever the compiler raises is this row's answer
            return replace(row, error=sentence(error))
        finally:
            del os.environ["MOSAIC_GPU_DUMP_TO"]
    temporary = memory.temp_size_in_bytes
    return replace(row, expected=launches, kernels=kernels, temporary_bytes=temporary)


def compile_for_tpu(
    row: Row, function: Any, arguments: tuple[Any, ...], device: Any, options: Any = None
) -> Row:
    """`row` with what the compiler of TPUs says of `function`, or with its error."""
    tpu_kernels.clear()
    try:
        lowered = devices.lower(function, arguments, device)
        launches = lowered.as_text().count("@tpu_custom_call")
        compiled = lowered.compile(options)
        kernels = tpu_kernels.dumped(compiled.as_text())
    except Exception as error:  # whatever the compiler raises is this row's answer
        return replace(row, error=sentence(error))
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return replace(row, expected=launches, kernels=kernels, temporary_bytes=temporary)


def compile_peers(target: str) -> list[Row]:
    """A row for each peer's program; what a peer's kernel is called and spills is its own matter."""
    tpu_kernels.dump_folder()
    (device,) = devices.devices(target)
    rows = []
    for peer, case, tile, function, arguments in tpu_peers.programs():
        row = Row(target, "dot_product_attention", peer, case, f"gradients, {tile[0]} x {tile[1]}")
        row = compile_for_tpu(row, function, arguments, device, _PEERS)
        tiles = [tile if "bwd" not in k.name and "dkv" not in k.name else tpu_peers.BACKWARD_TILE
                 for k in row.kernels]  # fmt: skip
        kernels = [replace(k, tile=t, programs=1) for k, t in zip(row.kernels, tiles, strict=True)]
        rows.append(replace(row, kernels=kernels))
    return rows


def document(rows: Sequence[Row]) -> dict[str, Any]:
    """What `--out` writes: versions, and the rows with what is wrong with them."""
    return {
        "jax": jax.__version__,
        "ptxas": devices.tool_version("ptxas"),
        "libtpu": devices.package_version("libtpu"),
        "rows": [{**asdict(row), "violations": violations(row)} for row in rows],
    }


def read(document: dict[str, Any]) -> list[Row]:
    """The rows of a document."""
    rows = [{k: v for k, v in row.items() if k != "violations"} for row in document["rows"]]
    return [Row(**{**row, "kernels": [_kernel(k) for k in row["kernels"]]}) for row in rows]


def _kernel(figures: dict[str, Any]) -> Kernel | TpuKernel:
    if "architecture" in figures:
        return Kernel(**figures)
    tile = figures["tile"]
    return TpuKernel(**{**figures, "tile": None if tile is None else tuple(tile)})
