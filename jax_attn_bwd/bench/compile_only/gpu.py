"""What the compiler says of each Mosaic GPU kernel, and `results/nvidia_static.md`, the page of it all."""

import hashlib
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_attn_bwd.bench import report
from jax_attn_bwd.bench.compile_only.devices import tool
from jax_attn_bwd.bench.compile_only.programs import Program, did_not_compile

COUNTED = (
    "HGMMA", "UTMALDG", "UTMASTG", "UTMAREDG", "MUFU.EX2", "MUFU.TANH", "LDG.E.128", "STG.E.128",
    "LDG", "STG", "LD.E", "ST.E", "LDS", "STS", "LDSM", "STSM", "LDL", "STL", "R2UR", "SHFL", "BAR", "SYNCS",
    "RED",
)  # fmt: skip
_SHOWN = ("HGMMA", "UTMALDG", "MUFU.EX2", "LDG.E.128", "STG.E.128", "R2UR", "total")
_KERNEL_COLUMNS = (
    "operator",
    "case",
    "kernel",
    "chip",
    "threads",
    "registers",
    "spilled bytes",
    "stack bytes",
    "shared KiB",
    *_SHOWN,
)
_LOWERED = ".before_layout_inference.txt"


REGISTERS = 255
SHARED_MEMORY = 227 * 1024  # bytes of a block, on compute capability 9.0 and later
GRAPH = ("graph_attention", "graph_attention_v2", "graph_transformer_attention")
NEEDED = {  # of some kernel of the program: without these it is not the kernel it should be
    "dot_product_attention": ("HGMMA", "UTMALDG", "MUFU.EX2"),
    "scaled_masked_softmax": ("MUFU.EX2",),
    **dict.fromkeys(GRAPH, ("MUFU.EX2", "LD.E", "ST.E")),
}


@dataclass(frozen=True)
class Kernel:
    """Static figures of one compiled kernel; bytes are of one thread, shared memory of one block."""

    name: str
    architecture: str
    threads: int
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared_memory: int
    instructions: dict[str, int] = field(default_factory=dict)

    def limits(self) -> dict[str, int]:
        """The budget: {figure: the most it may be}."""
        none = dict.fromkeys(("spill_stores", "spill_loads", "stack"), 0)
        return {**none, "registers": REGISTERS, "shared_memory": SHARED_MEMORY}

    def shown(self) -> dict[str, Any]:
        """What the terminal shows of it."""
        spills, shared = self.spill_stores + self.spill_loads, f"{self.shared_memory / 1024:.0f}"
        return {"registers": self.registers, "spills": spills, "shared KiB": shared}


def wrong(program: Program) -> list[str]:
    """What a program's kernels lack, in a few words each."""
    used = [{name for name, n in kernel.instructions.items() if n} for kernel in program.kernels]
    needed = NEEDED.get(program.operator, ())
    return [f"no kernel has the instruction {x}" for x in needed if not any(x in u for u in used)]


def dumped(folder: Path, known: dict[str, Kernel]) -> list[Kernel]:
    """The kernels of the program that was just compiled, from Mosaic GPU's dump in `folder`.

    A kernel that this process compiled before is not compiled again (before JAX 0.12 it may be): `known`
    remembers it by the text it was lowered from, and is added to. Lowering and compilation number their
    files each for itself, so a text finds its machine code by the kernel's name and, among those of one
    name, by the order.
    """
    texts: dict[str, Path] = {}
    for path in sorted(folder.glob(f"*{_LOWERED}"), key=_number):
        text = re.sub(r'dump_basename = "[^"]*"', "", path.read_text())
        texts.setdefault(hashlib.sha256(text.encode()).hexdigest(), path)
    for name in {_name(path) for path in texts.values()}:
        mine = [f for f, path in texts.items() if _name(path) == name]
        new = [f for f in mine if f not in known]
        made = sorted((p for p in folder.glob("*.ptx") if _name(p) == name), key=_number)
        if len(made) not in (len(new), len(mine)):
            raise RuntimeError(f"{name}: {len(new)} kernels are new and PTX was dumped of {len(made)}")
        for fingerprint, ptx in zip(new if len(made) == len(new) else mine, made, strict=True):
            lowered = texts[fingerprint].name.removesuffix(_LOWERED)
            known[fingerprint] = parse(ptx, folder / f"{lowered}.resources.txt")
    return [known[fingerprint] for fingerprint in texts]


def _number(path: Path) -> int:
    return int(_one(r"_(\d+)\.", path.name))


def _name(path: Path) -> str:
    return _one(r"^(.*)_\d+\.", path.name)


def parse(ptx: Path, resources: Path) -> Kernel:
    """The figures of one dumped kernel; ptxas' own words lie beside the PTX."""
    text = ptx.read_text()
    entry, architecture = _one(r"\.entry (\w+)", text), _one(r"\.target (\w+)", text)
    assembled = ptx.with_suffix(".ptxas").read_text()
    return Kernel(
        name=entry.removesuffix("_mosaic_gpu_kernel"),
        architecture=architecture,
        threads=int(_one(r"\.maxntid (\d+)", text)),
        registers=int(_one(r"Used (\d+) registers", assembled)),
        spill_stores=int(_one(r"(\d+) bytes spill stores", assembled)),
        spill_loads=int(_one(r"(\d+) bytes spill loads", assembled)),
        stack=int(_one(r"(\d+) bytes stack frame", assembled)),
        shared_memory=_shared_memory(resources.read_text()),
        instructions=count(disassemble(ptx, architecture)),
    )


def _one(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"the compiler's report has no {pattern!r}:\n{text[:500]}")
    return found[1]


def _shared_memory(resources: str) -> int:
    """Scratch, and 8 bytes for each barrier."""
    barriers = re.findall(r"num_barriers=(\d+)[^)]*\): (\d+)", resources)
    scratch = int(_one(r"smem_scratch_bytes=(\d+)", resources))
    return scratch + 8 * sum(int(size) * int(times) for size, times in barriers)


def disassemble(ptx: Path, architecture: str) -> str:
    """The machine code of a PTX file as text."""
    cubin = ptx.with_suffix(".cubin")
    ptxas, nvdisasm = tool("ptxas"), tool("nvdisasm")
    if ptxas is None or nvdisasm is None:
        raise RuntimeError("ptxas and nvdisasm are needed")
    subprocess.run([ptxas, "-O3", f"-arch={architecture}", "-o", cubin, ptx], check=True)
    shown = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True)
    return shown.stdout


def count(sass: str) -> dict[str, int]:
    """How often each instruction of `COUNTED` occurs, its variants included, and `total`."""
    opcodes = Counter(re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", sass))
    counts = {
        name: sum(n for opcode, n in opcodes.items() if f"{opcode}.".startswith(f"{name}."))
        for name in COUNTED
    }
    return {**counts, "total": opcodes.total()}


def markdown(rows: Sequence[Program], versions: dict[str, str]) -> str:
    """The page."""
    kernels = [row for row in rows if row.implementation != "xla"]
    portable = [row for row in rows if row.implementation == "xla"]
    pieces = [
        "# Static figures of the compiled programs, NVIDIA",
        f"JAX {versions['jax']}, ptxas {versions['ptxas']}. Compiled in full with no such chip at hand; "
        "every figure is static, none is a time. Rewritten by "
        "`python -m jax_attn_bwd.bench.compile_only --table`.",
        "## Kernels",
        _kernels(kernels) if kernels else "No kernel is registered.",
        "## Portable path: temporary memory, MiB",
        _portable(portable) if portable else "Not compiled.",
    ]
    return report.page(*pieces, *did_not_compile(rows))


def _kernels(rows: Sequence[Program]) -> str:
    """One line per kernel and case; chips with the same figures share it."""
    lines: dict[tuple, list[str]] = {}
    for row in rows:
        for kernel in row.kernels:
            chips = lines.setdefault((row.operator, row.case, *_cells(kernel)), [])
            if row.target not in chips:  # a gradient's program holds the forward's kernels too
                chips.append(row.target)
    return report.markdown_table(
        _KERNEL_COLUMNS, [(*key[:3], ", ".join(chips), *key[3:]) for key, chips in lines.items()]
    )


def _cells(kernel: Kernel) -> tuple:
    return (
        kernel.name,
        kernel.threads,
        kernel.registers,
        kernel.spill_stores + kernel.spill_loads,
        kernel.stack,
        f"{kernel.shared_memory / 1024:.1f}",
        *(kernel.instructions[name] for name in _SHOWN),
    )


def _portable(rows: Sequence[Program]) -> str:
    """One line per case and direction, one column per chip."""
    targets = list(dict.fromkeys(row.target for row in rows))
    lines: dict[tuple, dict[str, str]] = {}
    for row in rows:
        cells = lines.setdefault((row.operator, row.case, row.direction), {})
        if row.temporary_bytes is not None:
            cells[row.target] = f"{row.temporary_bytes / 2**20:.1f}"
    body = [(*key, *(cells.get(t, "failed") for t in targets)) for key, cells in lines.items()]
    return report.markdown_table(("operator", "case", "direction", *targets), body)
