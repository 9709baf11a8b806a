"""The pictures of a benchmark, none without matplotlib.

Case by case, how many times as long as ours every contender takes; or, of one case at many sizes, time and
temporary memory over the size, with the slopes between logarithmic axes.
"""

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.report import Row, shown

_OURS = ("jax_attn_bwd", "our ", "causal")  # how contenders of our own begin
_HATCH = "///"  # of bars that compare ours with ours


def _pyplot() -> Any:
    """Returns matplotlib's pyplot, which draws into files; None where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def title(operator: str, what: str, context: Mapping[str, Any]) -> str:
    """Tells what was measured, where, and beside which torch: its builds for CPUs and for CUDA differ."""
    torch = str(context.get("torch", ""))
    build = "for CPUs" if torch.endswith("+cpu") else "for CUDA"
    beside = f", torch {torch.split('+')[0]} built {build}" if torch else ""
    return f"{operator}:{what} {context['device']},\nJAX {context['jax']}{beside}"


def ratios(rows: Sequence[Row], title: str, path: Path) -> Path | None:
    """Draws a chart of the contenders' times over that of the first of their case; None without matplotlib.

    A peer that was refused has a line that says why. Bars of our own are hatched.
    """
    if (pyplot := _pyplot()) is None:
        return None

    # a bar for each contender but the first of its case, and a gap after each case
    groups = _groups(rows)
    bars = sum(len(group) for group in groups)
    figure, axes = pyplot.subplots(figsize=(8, 0.25 * bars + 1.6), layout="constrained")
    colours: dict[str, str] = {}
    y, ticks = 0, {}
    for first, *rest in groups:
        ticks[f"{first.case}\n{first.contender} {shown(first)}"] = y + (len(rest) - 1) / 2
        for row in rest:
            if row.ratio is not None:
                colours.setdefault(row.contender, f"C{len(colours)}")
            _draw(axes, row, y, colours)
            y += 1
        y += 1
    axes.set_yticks([*ticks.values()], [*ticks], fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.25, y=0.01)
    _legend(figure, colours)
    _axis(axes, 1, 2, 3, 5)
    axes.set_xlabel("time / ours (named under the case): right of 1 ours is faster")
    axes.set_title(title, fontsize=9)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path


def sorted_ratios(found: Sequence[tuple[str, float]], title: str, path: Path) -> Path | None:
    """Draws a point for each operator and ratio, one above the other; None without points or matplotlib."""
    if not found or (pyplot := _pyplot()) is None:
        return None
    ranked = [*enumerate(sorted(found, key=lambda program: program[1]), 1)]
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for operator in sorted({operator for operator, _ in found}):
        points = [(ratio, rank) for rank, (drawn, ratio) in ranked if drawn == operator]
        axes.plot(*zip(*points, strict=True), "o", markersize=4, label=operator)
    _axis(axes, 1, 1.2, 1.5, 2, 3, 5, 7, 9)
    axes.grid(alpha=0.3)
    axes.set_xlabel("time of plain / ours: right of 1 ours is faster")
    axes.set_ylabel("programs, by that")
    axes.set_title(title, fontsize=9)
    figure.legend(loc="outside lower center", ncols=6, fontsize=7)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Groups the rows of each case that has anything beside its first contender, which was measured."""
    by_case: dict[str, list[Row]] = {}
    for row in rows:
        if row.ratio is not None or "refused" in row.notes:
            by_case.setdefault(row.case, []).append(row)
    return [group for group in by_case.values() if len(group) > 1 and group[0].ratio is not None]


def _draw(axes: Any, row: Row, y: int, colours: Mapping[str, str]) -> None:
    place: dict[str, Any] = {"xytext": (3, 0), "textcoords": "offset points", "va": "center", "fontsize": 7}
    if row.ratio is None:
        why = textwrap.shorten(row.notes["refused"], 50, placeholder=" ...")
        axes.annotate(f"{row.contender} refused: {why}", (1, y), **place, color="gray")
        return
    hatch = _HATCH if _is_ours(row.contender) else None
    axes.barh(y, row.ratio - 1, left=1, color=colours[row.contender], hatch=hatch, edgecolor="white", lw=0)
    axes.annotate(f"{row.ratio:.2f}  ({shown(row)})", (max(row.ratio, 1), y), **place)


def _legend(figure: Any, colours: Mapping[str, str]) -> None:
    """Draws one for all bars, below them."""
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=colour, hatch=_HATCH if _is_ours(name) else None, edgecolor="white", lw=0)
        for name, colour in colours.items()
    ]
    names = [f"{name} (ours, too)" if _is_ours(name) else name for name in colours]
    if names:
        figure.legend(patches, names, loc="outside lower center", ncols=3, fontsize=7)


def _axis(axes: Any, *marked: float) -> None:
    """Makes a logarithmic axis with a line at 1, and numbers at those `marked` of each decade."""
    from matplotlib import ticker

    axes.axvline(1, color="black", lw=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=marked))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())


def _is_ours(contender: str) -> bool:
    return contender.startswith(_OURS)


_FIGURES = {"milliseconds": "time (ms)", "temporary_mib": "temporary memory (MiB)"}


class Point(NamedTuple):
    """One contender at one size."""

    size: int
    milliseconds: float | None
    temporary_mib: float | None


def lines(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, list[Point]]]:
    """Returns {(series, letter of the size): {contender: points}} of cases `series: letter=size`."""
    found: dict[tuple[str, str], dict[str, list[Point]]] = {}
    for row in rows:
        matched = re.fullmatch(r"(.*): (\w+)=(\d+)", row.case)
        if matched and row.milliseconds:
            series, letter, size = matched.groups()
            point = Point(int(size), row.milliseconds, row.temporary_mib)
            found.setdefault((series, letter), {}).setdefault(row.contender, []).append(point)
    return found


def slope(points: Sequence[Point], figure: str) -> float | None:
    """Fits the power of the size by which a figure grows at the three largest; None with fewer than two."""
    known = [(p.size, y) for p in sorted(points) if (y := getattr(p, figure))][-3:]
    if len(known) < 2:
        return None
    x, y = np.log(np.array(known, float)).T
    return float(np.polyfit(x, y, 1)[0])


def slopes(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Returns {series: {contender: {figure: slope}}}."""
    return {
        f"{series} over {letter}": {
            name: {figure: slope(points, figure) for figure in _FIGURES} for name, points in by_name.items()
        }
        for (series, letter), by_name in lines(rows).items()
    }


def scaling(rows: Sequence[Row], title: str, path: Path) -> Path | None:
    """Draws a row of two panels for each series, time and memory over size; None without matplotlib."""
    if (pyplot := _pyplot()) is None:
        return None
    from matplotlib import ticker

    # a colour for each contender, the same in all panels
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
            # sizes are powers of 2, written short
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
