"""Command line: `python -m jax_attn_bwd.bench <operator> [--out DIR] [--repeats N] [--quick]`."""

import argparse
import datetime
import importlib
import json
import pkgutil
import platform
import subprocess
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import jax

import jax_attn_bwd
from jax_attn_bwd import bench, ops
from jax_attn_bwd._core import console
from jax_attn_bwd.bench.measure import Row, measure

RESULTS = Path(bench.__file__).parent / "results"


def main(argv: list[str] | None = None) -> None:
    """Measures one operator, prints a table, writes JSON and a plot."""
    known = {m.name for m in pkgutil.iter_modules(ops.__path__)}
    measured = sorted(known & {m.name for m in pkgutil.iter_modules(bench.__path__)})
    parser = argparse.ArgumentParser(prog="python -m jax_attn_bwd.bench", description=bench.__doc__)
    parser.add_argument("operator", choices=measured)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON and the plot")
    parser.add_argument("--repeats", type=int, default=9, help="rounds; the median is taken")
    parser.add_argument("--quick", action="store_true", help="small shapes, to try the command")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")

    module = importlib.import_module(f"{bench.__name__}.{args.operator}")
    rows: list[Row] = []
    for case in console.progress(module.cases(args.quick), None, f"bench {args.operator}"):
        rows += measure(case, args.repeats)
    context = environment()
    title = f"{args.operator}: forward + backward, {context['device']}, JAX {context['jax']}"
    console.table(title, *_table(rows))

    args.out.mkdir(parents=True, exist_ok=True)
    stem = f"{args.operator}_{context['platform']}_jax{context['jax']}"
    path = args.out / f"{stem}.json"
    path.write_text(json.dumps({**context, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
    print(f"wrote {path}")
    if plotted := plot(rows, title, args.out / f"{stem}.png"):
        print(f"wrote {plotted}")


def environment() -> dict[str, str]:
    """Where and when: device, versions, commit."""
    device = jax.devices()[0]
    cpu = f"{platform.machine()} CPU, {_cores()} cores"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    versions = {}
    for name in ("torch", "tokamax"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "platform": device.platform,
        "device": cpu if device.platform == "cpu" else device.device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "jax_attn_bwd": jax_attn_bwd.__version__,
        "commit": commit or "unknown",
        **versions,
    }


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _table(rows: list[Row]) -> tuple[list[str], list[list]]:
    def number(x, digits=1):
        return None if x is None else f"{x:.{digits}f}"

    columns = [
        "case",
        "contender",
        "time (ms)",
        "time / ours",
        "temp (MiB)",
        "temp / ours",
        "notes",
    ]
    cells = [
        [
            r.case, r.contender, number(r.milliseconds), number(r.ratio, 2), number(r.temporary_mib),
            number(r.memory_ratio, 2), ", ".join(f"{k}: {v}" for k, v in r.notes.items()),
        ]
        for r in rows
    ]  # fmt: skip
    return columns, cells


def plot(rows: list[Row], title: str, path: Path) -> Path | None:
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
    axes.bar_label(
        bars, [f"{r.ratio:.2f}  ({r.milliseconds:.0f} ms)" for r in timed], padding=3, fontsize=7
    )
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("time over the first of its case (above 1: the first is faster)")
    axes.set_title(title, fontsize=9)
    axes.margins(x=0.2)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    main()
