"""What benchmarks leave: a row for each contender; a table, a JSON file, where and when it was."""

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import jax_attn_bwd
from jax_attn_bwd._core import console

OUT = Path("out")  # in the current folder
LIMIT = 1500  # characters of an error: compilers quote whole programs


@dataclass(frozen=True)
class Row:
    """Holds what was measured of one contender in one case; `notes` says why not, where it was not."""

    case: str
    contender: str
    milliseconds: float | None = None
    ratio: float | None = None  # time over ours: above 1, ours is faster
    temporary_mib: float | None = None
    memory_ratio: float | None = None
    spread: float | None = None  # between the quartiles of its rounds, over their median
    notes: dict[str, Any] = field(default_factory=dict)


def sentence(error: BaseException) -> str:
    """Tells of an exception in one line: its type, the place in the code it came from, and its message."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}: {error}"[:LIMIT]


def environment() -> dict[str, str]:
    """Returns {what: its version}, of what the measurements depend on."""
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cpu = f"{_processor()}, {cores} cores"
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
        "commit": commit(Path(jax_attn_bwd.__file__)),
        **versions,
    }


def commit(package: Path) -> str:
    """Finds the commit of the file `package`, "-dirty" if its folder or this one differs; else "unknown"."""

    def git(*command: str) -> str:
        done = subprocess.run(
            ["git", *command], cwd=package.parent, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", package.name)  # not merely a folder inside a repository
        measured = (".", ":(top)tests/bench", ":(top,exclude)tests/bench/results")
        changed = git("status", "--porcelain", "--", *measured)
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):  # git is not installed, or does not know it
        return "unknown"


def _processor() -> str:
    """Finds the CPU's name, where the system tells: libraries that are beside one another differ by it."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.exists() else []
    return f"{platform.machine()} CPU ({names[0]})" if names else f"{platform.machine()} CPU"


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
    """Reads the rows of such a file."""
    return [Row(**row) for row in json.loads(path.read_text())["rows"]]


def show(title: str, rows: Sequence[Row]) -> None:
    """Prints the rows on the terminal."""

    def number(x, digits=1):
        return None if x is None else f"{x:.{digits}f}"

    columns = {
        "case": lambda row: row.case,
        "contender": lambda row: row.contender,
        "time": lambda row: None if row.milliseconds is None else shown(row),
        "time / ours": lambda row: number(row.ratio, 2),
        "temp (MiB)": lambda row: number(row.temporary_mib),
        "temp / ours": lambda row: number(row.memory_ratio, 2),
        "notes": lambda row: ", ".join(f"{name}: {value}" for name, value in row.notes.items()),
    }
    console.table(title, [*columns], [[cell(row) for cell in columns.values()] for row in rows])


SLOWER, LARGER = 1.15, 1.05  # beyond this a time of unknown spread, or a memory, changed
LEAST, LEAST_MIB = 1.05, 1.0  # and less than this is no change, whatever the spread


def compare(old: Sequence[Row], new: Sequence[Row]) -> int:
    """Prints how ours changed from one run to another; 1 if it became slower or larger anywhere, else 0.

    Where both runs have peers of a case, ours is measured by theirs: the machine may have been slower. A time
    changed if it did by twice the spreads of both runs. What is in one file alone is said, and is no change;
    it is one if ours was measured before, and in the new run, which has the case, was not. 1, too, if the
    files have no case in common.
    """
    before, after = ({(r.case, r.contender): r for r in rows} for rows in (old, new))
    ours = {row.case: row.contender for row in reversed([*old, *new])}  # the first of the older file
    measured = {case for case, _ in after}
    lines: list[tuple[str, str | None, str | None, str]] = []
    for case, contender in reversed(ours.items()):
        was, now = before.get((case, contender)), after.get((case, contender))
        if was is None or case not in measured:
            lines.append((case, None, None, f"in the {'new' if was is None else 'old'} file alone"))
        else:
            keys = [key for key in before.keys() & after.keys() if key[0] == case and key[1] != contender]
            lines.append((case, *_changes(was, now, [(before[key], after[key]) for key in keys])))
    console.table("new over old", ["case", "time", "memory", "verdict"], lines)
    both = [verdict for *_, verdict in lines if "alone" not in verdict]
    worse = sum(map(bool, both))
    print(f"{len(both)} cases in both files, {worse} slower, larger or not measured any more")
    return int(bool(worse) or not both)


def _changes(
    was: Row, now: Row | None, peers: Sequence[tuple[Row, Row]]
) -> tuple[str | None, str | None, str]:
    """Returns the change of time and of memory, and what became worse."""
    if now is None or (now.milliseconds is None) > (was.milliseconds is None):
        return None, None, "not measured any more"
    changes = (_change(a.milliseconds, b.milliseconds) for a, b in peers)
    machine = [x for x in changes if x is not None]
    time, memory = _change(was.milliseconds, now.milliseconds), _change(was.temporary_mib, now.temporary_mib)
    if time is not None and machine:
        time /= statistics.geometric_mean(machine)
    slower = SLOWER
    if was.spread is not None and now.spread is not None:
        slower = max(LEAST, 1 + 2 * (was.spread + now.spread))
    grown = (now.temporary_mib or 0.0) - (was.temporary_mib or 0.0)
    larger = grown > LEAST_MIB and (memory is None or memory > LARGER)
    verdict = ["slower"] * ((time or 1) > slower) + ["larger"] * larger
    shown = lambda x: None if x is None else f"{x:.2f}"
    return shown(time), shown(memory), ", ".join(verdict)


def _change(old: float | None, new: float | None) -> float | None:
    return new / old if old and new else None


def shown(row: Row) -> str:
    """Writes its time in the unit that suits it."""
    ms = row.milliseconds or 0.0
    if ms < 1:
        return f"{1e3 * ms:.3g} us"
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
