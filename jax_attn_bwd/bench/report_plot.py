"""The picture of a benchmark: how many times as long as ours every contender takes, case by case."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_attn_bwd.bench.report import Row, shown

_OURS = ("jax_attn_bwd", "our ", "causal")  # how contenders of our own begin
_HATCH = "///"  # of bars that compare ours with ours


def title(operator: str, what: str, context: Mapping[str, Any]) -> str:
    """What was measured, where, and beside which torch: its builds for CPUs and for CUDA differ on a CPU."""
    torch = str(context.get("torch", ""))
    build = "for CPUs" if torch.endswith("+cpu") else "for CUDA"
    beside = f", torch {torch.split('+')[0]} built {build}" if torch else ""
    return f"{operator}:{what} {context['device']},\nJAX {context['jax']}{beside}"


def plot(rows: Sequence[Row], title: str, path: Path) -> Path | None:
    """A chart of the contenders' times over that of the first of their case; None without matplotlib.

    A peer that was refused has a line that says why. Bars of our own are hatched.
    """
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = _groups(rows)
    bars = sum(len(group) for group in groups)  # and a gap after each case
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
    _axis(axes)
    axes.set_title(title, fontsize=9)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each case that has anything beside its first contender, which was measured."""
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
    """One for all bars, below them."""
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=colour, hatch=_HATCH if _is_ours(name) else None, edgecolor="white", lw=0)
        for name, colour in colours.items()
    ]
    names = [f"{name} (ours, too)" if _is_ours(name) else name for name in colours]
    if names:
        figure.legend(patches, names, loc="outside lower center", ncols=3, fontsize=7)


def _axis(axes: Any) -> None:
    from matplotlib import ticker

    axes.axvline(1, color="black", lw=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xlabel("time / ours (named under the case): right of 1 ours is faster")


def _is_ours(contender: str) -> bool:
    return contender.startswith(_OURS)
