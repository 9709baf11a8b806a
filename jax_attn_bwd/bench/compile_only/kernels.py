"""What the compiler says of each Mosaic GPU kernel: registers, spills, shared memory, instructions."""

import hashlib
import re
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from jax_attn_bwd.bench.compile_only.devices import tool

COUNTED = (
    "HGMMA", "UTMALDG", "UTMASTG", "UTMAREDG", "MUFU.EX2", "MUFU.TANH", "LDG.E.128", "STG.E.128",
    "LDG", "STG", "LDS", "STS", "LDSM", "STSM", "LDL", "STL", "R2UR", "SHFL", "BAR", "SYNCS", "RED",
)  # fmt: skip
_LOWERED = ".before_layout_inference.txt"


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
            raise RuntimeError(
                f"{name}: {len(new)} kernels are new and PTX was dumped of {len(made)}"
            )
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
