"""`results/nvidia_static.md`: the static figures of every kernel and case, as a Markdown table."""

from collections.abc import Sequence
from typing import Any

from jax_attn_bwd.bench.compile_only.compiling import Row
from jax_attn_bwd.bench.compile_only.devices import TPU
from jax_attn_bwd.bench.compile_only.kernels import Kernel

_SHOWN = ("HGMMA", "UTMALDG", "MUFU.EX2", "LDG.E.128", "STG.E.128", "R2UR", "total")
_KERNEL_COLUMNS = (
    "operator", "case", "kernel", "chip", "threads", "registers", "spilled bytes", "stack bytes",
    "shared KiB", *_SHOWN,
)  # fmt: skip


def markdown(rows: Sequence[Row], versions: dict[str, str]) -> str:
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
    failed = [f"* {row.operator}[{row.implementation}] {row.case} {row.direction}, {row.target}: {row.error}"
              for row in rows if row.error]  # fmt: skip
    if failed:
        pieces += ["## Did not compile", "\n".join(failed)]
    return "\n\n".join(pieces) + "\n"


def figures(target: str, kernel: Any = None) -> dict[str, Any]:
    """{what the terminal shows of a kernel compiled for `target`: its value, None without a kernel}."""
    if target in TPU:
        names = {"bundles": "inner", "spills": "spill_stores"}
        shown = {title: getattr(kernel, name, None) for title, name in names.items()}
        per_score = getattr(kernel, "per_score", None)
        shown["per score"] = None if per_score is None else f"{per_score * 1e3:.2f}e-3"
        return shown | {"VMEM KiB": kernel and kernel.vmem // 1024}
    return {
        "registers": kernel and kernel.registers,
        "spills": kernel and kernel.spill_stores + kernel.spill_loads,
        "shared KiB": kernel and f"{kernel.shared_memory / 1024:.0f}",
    }


def grid(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    shown = (["" if x is None else str(x).replace("|", "\\|") for x in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in shown)


def _kernels(rows: Sequence[Row]) -> str:
    """One line per kernel and case; chips with the same figures share it."""
    lines: dict[tuple, list[str]] = {}
    for row in rows:
        for kernel in row.kernels:
            chips = lines.setdefault((row.operator, row.case, *_figures(kernel)), [])
            if row.target not in chips:  # a gradient's program holds the forward's kernels too
                chips.append(row.target)
    return grid(
        _KERNEL_COLUMNS,
        [(*key[:3], ", ".join(chips), *key[3:]) for key, chips in lines.items()],
    )


def _figures(kernel: Kernel) -> tuple:
    return (
        kernel.name, kernel.threads, kernel.registers, kernel.spill_stores + kernel.spill_loads,
        kernel.stack, f"{kernel.shared_memory / 1024:.1f}",
        *(kernel.instructions[name] for name in _SHOWN),
    )  # fmt: skip


def _portable(rows: Sequence[Row]) -> str:
    """One line per case and direction, one column per chip."""
    targets = list(dict.fromkeys(row.target for row in rows))
    lines: dict[tuple, dict[str, str]] = {}
    for row in rows:
        cells = lines.setdefault((row.operator, row.case, row.direction), {})
        if row.temporary_bytes is not None:
            cells[row.target] = f"{row.temporary_bytes / 2**20:.1f}"
    body = [(*key, *(cells.get(t, "failed") for t in targets)) for key, cells in lines.items()]
    return grid(("operator", "case", "direction", *targets), body)
