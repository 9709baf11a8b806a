"""Time and temporary memory over the size of a problem: slopes, and a picture with logarithmic axes."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jax_attn_bwd.bench.report import Row

_FIGURES = {"milliseconds": "time (ms)", "temporary_mib": "temporary memory (MiB)"}


class Point(NamedTuple):
    """One contender at one size."""

    size: int
    milliseconds: float | None
    temporary_mib: float | None


def lines(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, list[Point]]]:
    """{(series, letter of the size): {contender: points}} of rows whose cases are `series: letter=size`."""
    found: dict[tuple[str, str], dict[str, list[Point]]] = {}
    for row in rows:
        matched = re.fullmatch(r"(.*): (\w+)=(\d+)", row.case)
        if matched and row.milliseconds:
            series, letter, size = matched.groups()
            point = Point(int(size), row.milliseconds, row.temporary_mib)
            found.setdefault((series, letter), {}).setdefault(row.contender, []).append(point)
    return found


def slope(points: Sequence[Point], figure: str) -> float | None:
    """The power of the size by which a figure grows at the three largest sizes; None with fewer than two."""
    known = [(p.size, y) for p in sorted(points) if (y := getattr(p, figure))][-3:]
    if len(known) < 2:
        return None
    x, y = np.log(np.array(known, float)).T
    return float(np.polyfit(x, y, 1)[0])


def slopes(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float | None]]]:
    """{series: {contender: {figure: slope}}}."""
    return {
        f"{series} over {letter}": {
            name: {figure: slope(points, figure) for figure in _FIGURES} for name, points in by_name.items()
        }
        for (series, letter), by_name in lines(rows).items()
    }


def plot(rows: Sequence[Row], title: str, path: Path) -> Path | None:
    """A row of two panels for each series, time and memory over size; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    found = lines(rows)
    names = dict.fromkeys(name for by_name in found.values() for name in by_name)
    colours = {name: f"C{i}" for i, name in enumerate(names)}
    figure, axes = pyplot.subplots(
        max(len(found), 1),
        2,
        figsize=(11, 0.6 + 3.4 * max(len(found), 1)),
        layout="constrained",
        squeeze=False,
    )
    for line, ((series, letter), by_name) in zip(axes, found.items(), strict=False):
        for ax, (field, label) in zip(line, _FIGURES.items(), strict=True):
            for name, points in by_name.items():
                known = [(p.size, getattr(p, field)) for p in sorted(points) if getattr(p, field)]
                if known:
                    power = slope(points, field)
                    legend = name if power is None else f"{name}: {letter}^{power:.2f}"
                    ax.plot(*zip(*known, strict=True), "o-", ms=4, color=colours[name], label=legend)
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
            ax.set(title=series, xlabel=letter, ylabel=label)
            sizes = sorted({p.size for points in by_name.values() for p in points})
            ax.set_xticks(sizes, [_short(size) for size in sizes])
            ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=12))
            ax.yaxis.set_major_formatter("{x:g}")
            ax.minorticks_off()
            ax.grid(alpha=0.3)
            if ax.lines:
                ax.legend(fontsize=8)
    figure.suptitle(f"{title}; powers: at the three largest sizes", fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _short(size: int) -> str:
    return f"{size // 1024}k" if size >= 1024 and size % 1024 == 0 else str(size)
