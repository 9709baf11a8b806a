"""What the compiler says of each Mosaic GPU kernel, and `results/nvidia_static.md`, the page of it all."""

import hashlib
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from compile_only import pages
from compile_only.devices import tool
from compile_only.programs import Program, did_not_compile

COUNTED = (
    "HGMMA", "UTMALDG", "UTMASTG", "UTMAREDG", "MUFU.EX2", "MUFU.TANH", "LDG.E.128", "STG.E.128",
    "LDG", "STG", "LD.E", "ST.E", "LDS", "STS", "LDSM", "STSM", "LDL", "STL", "R2UR", "SHFL", "BAR", "SYNCS",
    "RED", "ATOM",
)  # fmt: skip
_VARIANTS = {"RED": ("RED", "REDG"), "ATOM": ("ATOM", "ATOMG", "ATOMS")}  # by the memory they are of
_SHOWN = ("HGMMA", "UTMALDG", "MUFU.EX2", "LDG.E.128", "STG.E.128", "R2UR", "total")
_SHOWN_SPARSE = (
    "LDG.E.128",
    "LDG",
    "LD.E",
    "STG.E.128",
    "STG",
    "ST.E",
    "RED",
    "ATOM",
    "SHFL",
    "MUFU.EX2",
    "total",
)
_LOWERED = ".before_layout_inference.txt"


REGISTERS = 255
SHARED_MEMORY = 227 * 1024  # bytes of a block, on compute capability 9.0 and later
GRAPH = ("graph_attention", "graph_attention_v2", "graph_transformer_attention")
SPARSE = (*GRAPH, "multi_scale_deformable_attention")  # no atomics: the same bits in every run
NEEDED = {  # instructions: some kernel of the program has one of each row, or it is not what it should be
    "dot_product_attention": (("HGMMA",), ("UTMALDG",), ("MUFU.EX2",)),
    "scaled_masked_softmax": (("MUFU.EX2",),),
    **dict.fromkeys(GRAPH, (("MUFU.EX2",), ("LD.E", "LDG.E.128"), ("ST.E", "STG.E.128"))),
    "multi_scale_deformable_attention": (("LD.E",), ("ST.E",), ("SHFL",)),
}


class _Processor(NamedTuple):
    """What the blocks on one multiprocessor share."""

    shared_memory: int  # bytes
    registers: int = 65536
    warps: int = 64
    blocks: int = 32


_PROCESSORS = {
    "sm_80": _Processor(164 * 1024),
    "sm_90": _Processor(228 * 1024),
    "sm_100": _Processor(228 * 1024),
}
_SYSTEM = 1024  # bytes of shared memory that a block takes beside its own


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
        spilled = dict.fromkeys(("spill_stores", "spill_loads", "stack"), 0)
        return {**spilled, "registers": REGISTERS, "shared_memory": SHARED_MEMORY}

    @property
    def occupancy(self) -> float:
        """The share of a multiprocessor's warps that can be there at once, by registers and shared memory."""
        chip = _PROCESSORS[self.architecture.rstrip("af")]
        warps = -(-self.threads // 32)
        of_warp = -(-self.registers // 8) * 8 * 32  # registers are handed out in eights
        by_registers = chip.registers // of_warp // warps
        by_memory = chip.shared_memory // (self.shared_memory + _SYSTEM)
        return min(by_registers, by_memory, chip.warps // warps, chip.blocks) * warps / chip.warps

    def shown(self) -> dict[str, Any]:
        """What the terminal shows of it."""
        spills, shared = self.spill_stores + self.spill_loads, f"{self.shared_memory / 1024:.0f}"
        return {"registers": self.registers, "spills": spills, "shared KiB": shared}


def wrong(program: Program) -> list[str]:
    """What a program's kernels lack, in a few words each."""
    used = {name for kernel in program.kernels for name, n in kernel.instructions.items() if n}
    needed = NEEDED.get(program.operator, ())
    found = [f"no kernel has the instruction {' or '.join(row)}" for row in needed if not used & {*row}]
    atomics = used & {"RED", "ATOM"} if program.operator in SPARSE else ()
    return found + [f"a kernel has the instruction {x}" for x in sorted(atomics)]


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
    starts = {name: tuple(f"{x}." for x in _VARIANTS.get(name, (name,))) for name in COUNTED}
    counts = {
        name: sum(n for opcode, n in opcodes.items() if f"{opcode}.".startswith(start))
        for name, start in starts.items()
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
        "`PYTHONPATH=tests python -m compile_only --table`.",
        "## Kernels",
        _kernels([row for row in kernels if row.operator not in SPARSE], _SHOWN),
        "## Kernels of graphs and of deformable attention",
        "Occupancy: the share of a processor's 64 warps that registers and shared memory have room for. "
        "LD.E and ST.E are loads and stores by generic addresses; RED and ATOM would be atomics.",
        _kernels([row for row in kernels if row.operator in SPARSE], _SHOWN_SPARSE, occupancy=True),
        "## Portable path: temporary memory, MiB",
        _portable(portable) if portable else "Not compiled.",
    ]
    return pages.page(*pieces, *did_not_compile(rows))


def _kernels(rows: Sequence[Program], shown: Sequence[str], *, occupancy: bool = False) -> str:
    """One line per kernel and case; chips with the same figures share it."""
    lines: dict[tuple, list[str]] = {}
    columns: list[str] = []
    for row in rows:
        for kernel in row.kernels:
            cells = _cells(kernel, shown, occupancy)
            columns = ["operator", "case", "kernel", "chip", *cells]
            chips = lines.setdefault((row.operator, row.case, kernel.name, *cells.values()), [])
            if row.target not in chips:  # a gradient's program holds the forward's kernels too
                chips.append(row.target)
    if not lines:
        return "No kernel is registered."
    body = [(*key[:3], ", ".join(chips), *key[3:]) for key, chips in lines.items()]
    return pages.table(columns, body)


def _cells(kernel: Kernel, shown: Sequence[str], occupancy: bool) -> dict[str, Any]:
    """What a table says of a kernel, by column."""
    return {
        "threads": kernel.threads,
        "registers": kernel.registers,
        "spilled bytes": kernel.spill_stores + kernel.spill_loads,
        "stack bytes": kernel.stack,
        "shared KiB": f"{kernel.shared_memory / 1024:.1f}",
        **({"occupancy": f"{kernel.occupancy:.0%}"} if occupancy else {}),
        **{name: kernel.instructions[name] for name in shown},
    }


def _portable(rows: Sequence[Program]) -> str:
    """One line per case and direction, one column per chip."""
    targets = list(dict.fromkeys(row.target for row in rows))
    lines: dict[tuple, dict[str, str]] = {}
    for row in rows:
        cells = lines.setdefault((row.operator, row.case, row.direction), {})
        if row.temporary_bytes is not None:
            cells[row.target] = f"{row.temporary_bytes / 2**20:.1f}"
    body = [(*key, *(cells.get(t, "failed") for t in targets)) for key, cells in lines.items()]
    return pages.table(("operator", "case", "direction", *targets), body)
