"""What benchmarks leave: a row for each contender; a table, a JSON file and a plot of them; Markdown."""

import argparse
import json
import os
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jax_attn_bwd._core import console

OUT = Path("out")  # of the current folder
LIMIT = 1500  # characters of an error: compilers quote whole programs


@dataclass(frozen=True)
class Row:
    """What was measured of one contender in one case; `notes` says why not, where it was not."""

    case: str
    contender: str
    milliseconds: float | None = None
    ratio: float | None = None  # time over ours: above 1, ours is faster
    temporary_mib: float | None = None
    memory_ratio: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)


def sentence(error: BaseException) -> str:
    """An exception in one line: its type, the place in the code it came from, and its message."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}: {error}"[:LIMIT]


def prepare(parser: argparse.ArgumentParser, out: Path) -> None:
    """Makes the folder `out` before anything is measured, or ends with an error."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out must be a folder that can be written to, got {out}: {error.strerror}")
    if not os.access(out, os.W_OK | os.X_OK):
        parser.error(f"--out must be a folder that can be written to, got {out}: no permission")


def write(path: Path, context: dict[str, Any], rows: Sequence[Row], finished: bool) -> None:
    """Writes the JSON file, whole: whoever reads it meanwhile finds an earlier one."""
    document = {**context, "finished": finished, "rows": [asdict(row) for row in rows]}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.replace(path)


def read(path: Path) -> list[Row]:
    """The rows of such a file."""
    return [Row(**row) for row in json.loads(path.read_text())["rows"]]


def show(title: str, rows: Sequence[Row]) -> None:
    """The rows on the terminal."""

    def number(x, digits=1):
        return None if x is None else f"{x:.{digits}f}"

    columns = ["case", "contender", "time (ms)", "time / ours", "temp (MiB)", "temp / ours", "notes"]
    cells = [
        [
            row.case,
            row.contender,
            number(row.milliseconds, 1 if (row.milliseconds or 0) > 10 else 3),
            number(row.ratio, 2),
            number(row.temporary_mib),
            number(row.memory_ratio, 2),
            ", ".join(f"{name}: {value}" for name, value in row.notes.items()),
        ]
        for row in rows
    ]
    console.table(title, columns, cells)


def plot(rows: Sequence[Row], title: str, path: Path) -> Path | None:
    """A bar chart of times over ours; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [r for r in rows if r.ratio is not None]
    ratios = [r.ratio or 0.0 for r in timed]
    labels = [f"{r.case}\n{r.contender}" for r in timed]
    figure, axes = pyplot.subplots(figsize=(8, 0.45 * len(timed) + 1.2), layout="constrained")
    ours = [r.ratio == 1.0 for r in timed]
    bars = axes.barh(labels, ratios, color=["#0072b2" if o else "#e69f00" for o in ours])
    axes.bar_label(bars, [f"{r.ratio:.2f}  ({r.milliseconds:.3g} ms)" for r in timed], padding=3, fontsize=7)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("time over the first of its case (above 1: the first is faster)")
    axes.set_title(title, fontsize=9)
    axes.margins(x=0.2)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    shown = (["" if x is None else str(x).replace("|", "\\|") for x in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in shown)


def page(*pieces: str) -> str:
    """Paragraphs, headings and tables as one page."""
    return "\n\n".join(pieces) + "\n"
