"""What the compiler says of each TPU kernel, and `results/tpu_static.md`, the page of it all.

A TPU core issues one bundle of instructions a cycle. Bundles are counted in the program text, those of the
loop over the grid as `inner`: divided by the elements of the tile that one step computes they compare
variants of a kernel. They are not a time: waiting for memory and for the matrix unit is not in them.
"""

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from compile_only import pages
from compile_only.programs import Program, did_not_compile
from compile_only.tpu_peers import NAMES
from jax_attn_bwd._core import mosaic_tpu

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:((?:\s*>)*)\s*\{", re.M)
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%(?=[\w.-]+ = )", re.M)  # its text may run over lines
_PASSES = "final_(bundles|hlo-static-per-bundle-utilization)"
SLOTS = ("MXU", "XLU", "VALU", "EUP", "VLOAD", "VSTORE")
SPILLS = 8 / 1024  # stores of vector registers for each score of a tile; of the softmax, for each bundle: 1
_FIGURES = (
    "bundles",
    "per score, 1e-3",
    "spill stores per score, 1e-3",
    "VMEM KiB",
    *(f"{s} %" for s in SLOTS),
)

_ABOUT = """Compiled in full with no such chip at hand. A bundle is what a core issues in a cycle in
which it waits for nothing: bundles compare programs, they are not a time. `bundles` are those of the
loop over the grid in the program text; `per score` divides them by the elements of the tile of one step,
where the loop holds one program for a tile (`full`: nothing is compared; `mixed`: causality, windows and
lengths are; `both`: one of each). MXU, XLU, ...: share of the slots of that unit. Rewritten by
`PYTHONPATH=tests python -m compile_only --table tpu`."""
_ABOUT_PEERS = """bfloat16, H = 128, T = S = 4096; `one causal tile`: 1024. `temp MiB`: what the program of
forward and gradients allocates beside arguments and results, for 2 x 16 heads (ours) and 8 heads (peers)."""


@dataclass(frozen=True)
class Kernel:
    """Static figures of one compiled kernel.

    Attributes:
      tile: (queries, keys) that one step of an attention kernel computes.
      programs: for a tile, in the kernel: 2 if full and mixed tiles have one each.
      bundles, inner: numbers for the program, and for its loop over the grid.
      spill_stores, spill_loads: vector registers stored to and loaded from memory for want of registers.
      vmem: bytes of vector memory.
      slots: per cent of the program's slots of each unit that are used.
    """

    name: str
    tile: tuple[int, int] | None
    programs: int
    bundles: int
    inner: int
    spill_stores: int
    spill_loads: int
    vmem: int
    slots: dict[str, int] = field(default_factory=dict)

    @property
    def per_score(self) -> float | None:
        """Bundles of the loop over the grid for each element of a tile, if the loop holds one program."""
        return self.inner / self.scores if self.programs == 1 and self.inner else None

    @property
    def scores(self) -> int:
        """Elements of a tile."""
        return 0 if self.tile is None else self.tile[0] * self.tile[1]

    def limits(self) -> dict[str, int]:
        """The budget: {figure: the most it may be}."""
        spills = SPILLS * self.scores * self.programs or self.bundles
        return {"vmem": mosaic_tpu.VMEM, "spill_stores": int(spills)}

    def shown(self) -> dict[str, Any]:
        """What the terminal shows of it."""
        per_score = None if self.per_score is None else f"{self.per_score * 1e3:.2f}e-3"
        spills, vmem = self.spill_stores, self.vmem // 1024
        return {"bundles": self.inner, "spills": spills, "per score": per_score, "VMEM KiB": vmem}


def wrong(program: Program) -> list[str]:
    """What a program's kernels lack, in a few words each."""
    needed = program.operator in ("dot_product_attention", "multi_scale_deformable_attention")
    lacks = needed and not all(kernel.slots["MXU"] for kernel in program.kernels)
    return ["a kernel does not use the matrix unit"] if lacks else []


@cache
def dump_folder() -> Path:
    """Where the compiler of this process leaves its last passes; to be called before libtpu is loaded."""
    folder = tempfile.mkdtemp(prefix="tpu_bundles_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"{given} --xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        f"--xla_jf_dump_llo_pass_label_regex={_PASSES}"
    ).strip()
    return Path(folder)


def clear() -> None:
    """Forgets what was compiled before."""
    for path in dump_folder().iterdir():
        path.unlink()


def dumped(program: str) -> list[Kernel]:
    """The kernels of the program that was just compiled, whose optimised HLO is `program`.

    Of calls of one and the same kernel the compiler tells once.
    """
    found, untold = [], set()
    for name, vmem in custom_calls(program).items():
        stem = rf"\d+-{re.escape(name)}(?:\.refs_\d+_)?-\d+-"
        bundles = _file(rf"{stem}final_bundles\.txt")
        use = _file(rf"{stem}final_hlo-static-per-bundle-utilization\.txt")
        if bundles and use:
            found.append(parse(name, bundles.read_text(errors="replace"), use.read_text(), vmem))
        else:
            untold.add(_plain(name))
    if missing := untold - {kernel.name for kernel in found}:
        raise RuntimeError(f"the compiler left no file of {sorted(missing)}")
    return found


def custom_calls(program: str) -> dict[str, int]:
    """{name of a Pallas kernel: bytes of vector memory it takes} of optimised HLO."""
    calls = {}
    for instruction in _INSTRUCTION.split(program):
        if 'custom_call_target="tpu_custom_call"' not in instruction:
            continue
        name = re.match(r"([\w.-]+) =", instruction)
        sizes = re.search(r'"used_scoped_memory_configs":\[([^\]]*)\]', instruction)
        if name is None or sizes is None:
            raise RuntimeError(f"a kernel's call has another form:\n{instruction[:300]}")
        calls[name[1]] = sum(int(n) for n in re.findall(r'"size":"(\d+)"', sizes[1]))
    return calls


def _file(pattern: str) -> Path | None:
    found = sorted(p for p in dump_folder().iterdir() if re.fullmatch(pattern, p.name))
    return found[-1] if found else None


def _plain(name: str) -> str:
    """The name of a kernel, without the number of its call."""
    return re.sub(r"(\.\d+|\.refs_\d+_)+$", "", name)


def parse(name: str, bundles: str, use: str, vmem: int) -> Kernel:
    """The figures of one kernel from the text of its bundles and of their use of the slots."""
    depths = [m[1].count(">") for m in _BUNDLE.finditer(bundles)]
    if not depths:
        raise RuntimeError(f"{name}: the compiler's text holds no bundles:\n{bundles[:300]}")
    counts, slots = utilisation(use)
    tile = re.search(r"_(\d+)x(\d+)_(full|mixed|both)", name)
    return Kernel(
        name=_plain(name),
        tile=None if tile is None else (int(tile[1]), int(tile[2])),
        programs=0 if tile is None else 1 + (tile[3] == "both"),
        bundles=len(depths),
        inner=sum(depth > 0 for depth in depths),
        spill_stores=counts["VSTORE:SPILL"],
        spill_loads=counts["VLOAD:FILL"],
        vmem=vmem,
        slots={slot: slots[slot] for slot in SLOTS},
    )


def utilisation(text: str) -> tuple[dict[str, int], dict[str, int]]:
    """(operations, per cent of the slots) by unit; a line of the text is a bundle."""
    lines = text.splitlines()
    names = [x.strip() for x in lines[1].split(",")]
    capacity = [int(x) for x in lines[2].split()]
    numbers = (line for line in lines[4:] if re.fullmatch(r"[\d ]*\d[\d ]*", line.strip()))
    rows = [[int(x) for x in line.split()] for line in numbers]
    if not rows or len(rows[0]) != len(names):
        raise RuntimeError(f"the compiler's text of utilisation has another form:\n{text[:300]}")
    totals = dict(zip(names, (sum(column) for column in zip(*rows, strict=True)), strict=True))
    share = {
        name: round(100 * totals[name] / (most * len(rows)))
        for name, most in zip(names, capacity, strict=True)
    }
    return totals, share


def markdown(rows: Sequence[Program], versions: dict[str, str]) -> str:
    """The page."""
    peers = [row for row in rows if row.implementation in NAMES]
    own = [row for row in rows if row.implementation not in NAMES]
    pieces = [
        "# Static figures of the compiled programs, TPU",
        f"JAX {versions['jax']}, libtpu {versions['libtpu']}. {_ABOUT}",
        "## Dense attention beside JAX's kernels",
        _ABOUT_PEERS,
        pages.table(
            ("kernels of", "case", "kernel", "chip", "tile", *_FIGURES, "temp MiB"),
            [
                (row.implementation, row.case, k.name, row.target, _tile(k), *_figures(k), _temporary(row))
                for row in (*peers, *own)
                for k in row.kernels
                if row in peers or row.case in ("H=128", "one causal tile")
            ],
        ),
        "## Every case",
        pages.table(
            ("operator", "case", "kernel", "chip", *_FIGURES),
            [(row.operator, row.case, k.name, row.target, *_figures(k)) for row in own for k in row.kernels],
        ),
    ]
    return pages.page(*pieces, *did_not_compile(rows))


def _tile(kernel: Kernel) -> str:
    return "" if kernel.tile is None else "{} x {}".format(*kernel.tile)


def _temporary(row: Program) -> str:
    return "" if row.temporary_bytes is None else f"{row.temporary_bytes / 2**20:.1f}"


def _figures(kernel: Kernel) -> tuple:
    per_score = kernel.per_score
    spills = kernel.spill_stores / kernel.scores / kernel.programs if kernel.scores else None
    return (
        kernel.inner,
        None if per_score is None else f"{per_score * 1e3:.2f}",
        kernel.spill_stores if spills is None else f"{spills * 1e3:.2f}",
        kernel.vmem // 1024,
        *(kernel.slots[slot] for slot in SLOTS),
    )
