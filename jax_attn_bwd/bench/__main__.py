"""Command line: `python -m jax_attn_bwd.bench <operator> [--out DIR] [--repeats N]`, `<operator> --quick
--out DIR`, or `python -m jax_attn_bwd.bench --gate gpu [--out DIR] [--minutes M]`.
"""

import argparse
import datetime
import importlib
import json
import math
import os
import pkgutil
import platform
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import jax

import jax_attn_bwd
from jax_attn_bwd import bench, ops
from jax_attn_bwd._core import console
from jax_attn_bwd.bench.gate import command as gate
from jax_attn_bwd.bench.measure import Row, measure

RESULTS = Path(bench.__file__).parent / "results"
MINUTES, REPEATS = 7.5, 9


def main(argv: list[str] | None = None) -> int:
    """Measures one operator, prints a table, writes JSON and a plot; or runs the gate."""
    known = {m.name for m in pkgutil.iter_modules(ops.__path__)}
    measured = sorted(known & {m.name for m in pkgutil.iter_modules(bench.__path__)})
    parser = argparse.ArgumentParser(prog="python -m jax_attn_bwd.bench", description=bench.__doc__)
    parser.add_argument("operator", nargs="?", choices=measured)
    parser.add_argument(
        "--gate",
        choices=gate.PLATFORMS,
        help="prove and time every kernel on this platform; cpu tries the gate at tiny sizes",
    )
    parser.add_argument("--minutes", type=_minutes, help=f"deadline of the gate; default {MINUTES}")
    parser.add_argument(
        "--out", type=Path, help=f"folder of what is written; default {RESULTS.name}"
    )
    parser.add_argument(
        "--repeats", type=_repeats, help=f"rounds; the median is taken; default {REPEATS}"
    )
    parser.add_argument("--quick", action="store_true", help="small shapes, to try the command")
    args = parser.parse_args(argv)
    _refuse(parser, args, measured)
    out = args.out or RESULTS
    _prepare(parser, out)
    if args.gate:
        return gate.main(args.gate, out, args.minutes or MINUTES)

    module = importlib.import_module(f"{bench.__name__}.{args.operator}")
    rows: list[Row] = []
    for case in console.progress(module.cases(args.quick), None, f"bench {args.operator}"):
        rows += measure(case, args.repeats or REPEATS)
    context = environment()
    title = f"{args.operator}: forward + backward, {context['device']}, JAX {context['jax']}"
    console.table(title, *_table(rows))

    stem = f"{args.operator}_{context['platform']}_jax{context['jax']}"
    path = out / f"{stem}.json"
    path.write_text(json.dumps({**context, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
    print(f"wrote {path}")
    if plotted := plot(rows, title, out / f"{stem}.png"):
        print(f"wrote {plotted}")
    return 0


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive and finite, got {text}")
    return minutes


def _repeats(text: str) -> int:
    repeats = int(text)
    if repeats < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return repeats


def _refuse(parser: argparse.ArgumentParser, args: argparse.Namespace, measured: list[str]) -> None:
    """Ends with an error for arguments that do not go together."""
    if (args.operator is None) == (args.gate is None):
        parser.error(f"give an operator, one of {measured}, or --gate")
    if args.gate == "cpu" and args.out is None:
        parser.error("--gate cpu only tries the gate: give a folder with --out")
    if args.quick and args.out is None:
        parser.error("--quick only tries the command: give a folder with --out")
    if args.operator and args.minutes is not None:
        parser.error(
            "--minutes is the deadline of --gate; an operator is measured for --repeats rounds"
        )
    if args.gate and (args.quick or args.repeats is not None):
        parser.error(
            "--quick and --repeats are of an operator; --gate has its own sizes and rounds"
        )


def _prepare(parser: argparse.ArgumentParser, out: Path) -> None:
    """Makes the folder `out` before anything is measured, or ends with an error."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out must be a folder that can be written to, got {out}: {error.strerror}")
    if not os.access(out, os.W_OK | os.X_OK):
        parser.error(f"--out must be a folder that can be written to, got {out}: no permission")


def environment() -> dict[str, str]:
    """Where and when: device, versions, commit."""
    device = jax.devices()[0]
    cpu = f"{platform.machine()} CPU, {_cores()} cores"
    versions = {}
    for name in ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "torch", "tokamax"):
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
        "commit": _commit(),
        **versions,
    }


def _commit() -> str:
    """The commit of this package, "-dirty" if its files differ; "unknown" if no repository holds it."""
    package = Path(jax_attn_bwd.__file__)

    def git(*command: str) -> str:
        done = subprocess.run(
            ["git", *command], cwd=package.parent, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", package.name)  # not merely a folder inside a repository
        changed = git("status", "--porcelain", "--", ".", ":(exclude)bench/results")
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):  # git is not installed, or does not know it
        return "unknown"


def _cores() -> int:
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
    sys.exit(main())
