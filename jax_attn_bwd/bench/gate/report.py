"""What the gate leaves: a JSON file with every row, a Markdown page, a short table on the terminal."""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jax_attn_bwd._core import console
from jax_attn_bwd.bench.compile_only.table import grid
from jax_attn_bwd.bench.gate.steps import (
    CORRECTNESS,
    FAILED,
    NOT_REACHED,
    OK,
    PORTABLE,
    PROOFS,
    REFUSED,
    SKIPPED,
    TIME,
    Row,
    Step,
)  # fmt: skip

_STATUSES = (OK, FAILED, REFUSED, NOT_REACHED, SKIPPED)


def stem(environment: dict[str, Any]) -> str:
    """The files' name: `nvidia_h200`."""
    kind = environment["device"] if environment["platform"] == "gpu" else environment["platform"]
    return re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_")


def faults(rows: Sequence[Row], proven: Sequence[str]) -> list[str]:
    """Why the gate is not passed, one sentence each; empty if it is.

    `proven`: the subjects that must have been right somewhere.
    """
    found = [
        f"{r.kind} of {r.subject}, {r.case}: {' '.join(str(x) for x in (r.note, r.figures) if x)}"
        for r in rows
        if r.status == FAILED
    ]
    found += [f"{r.kind} of {r.subject}, {r.case}: not reached" for r in rows
              if r.status == NOT_REACHED and r.kind in PROOFS]  # fmt: skip
    skipped = Counter(r.subject for r in rows if r.status == SKIPPED and r.kind in PROOFS)
    found += [f"{subject}: {n} proofs {SKIPPED}" for subject, n in skipped.items()]
    right = {row.subject for row in rows if row.kind == CORRECTNESS and row.status == OK}
    found += [
        f"{subject}: nothing of it was shown to be right"
        for subject in proven
        if subject not in right
    ]
    return found if proven else [*found, "no kernel is registered for this platform"]


def counts(rows: Sequence[Row]) -> list[list[Any]]:
    """Of each subject and kind of proof: how many rows of each status, and the worst error over its limit."""
    keys = dict.fromkeys((row.subject, row.kind) for row in rows if row.kind in PROOFS)
    lines = []
    for subject, kind in keys:
        mine = [row for row in rows if (row.subject, row.kind) == (subject, kind)]
        number = Counter(row.status for row in mine)
        ratios = [r.figures["error"] / r.figures["limit"] for r in mine if "limit" in r.figures]
        worst = f"{max(ratios):.2f}" if ratios else None
        lines.append([subject, kind, *(number[status] for status in _STATUSES), worst])
    return lines


COUNT_COLUMNS = ("subject", "proof", *_STATUSES, "worst error / limit")


def times(rows: Sequence[Row]) -> list[list[Any]]:
    """Every timed row: workload, contender, figures."""
    ordered = sorted(
        (row for row in rows if row.kind in (TIME, PORTABLE)),
        key=lambda r: (r.kind != TIME, r.case),
    )

    def number(row, name, digits):
        return f"{row.figures[name]:.{digits}f}" if name in row.figures else None

    return [
        [row.case, row.subject, number(row, "ms", 3), number(row, "TFLOP/s", 0), number(row, "GB/s", 0),
         number(row, "share of the copy", 2), number(row, "temp MiB", 1),
         row.note if row.status == OK else f"{row.status}: {row.note}"]
        for row in ordered
    ]  # fmt: skip


TIME_COLUMNS = ("workload", "contender", "ms", "TFLOP/s", "GB/s", "of the copy", "temp MiB", "note")


def write(
    folder: Path,
    environment: dict[str, Any],
    rows: Sequence[Row],
    proven: Sequence[str],
    steps: Sequence[Step] = (),
) -> Path:
    """Writes both files, whole, and returns the path of the JSON.

    While one of the planned `steps` has no row, the run is not finished: it may stop here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem(environment)}.json"
    done = {row.step for row in rows}
    rest = [step.row(NOT_REACHED, "the run stopped") for step in steps if step.name not in done]
    rows = [*rows, *rest]
    wrong = faults(rows, proven)
    state = "not finished" if rest else "not passed" if wrong else "passed"
    document = {**environment, "finished": not rest, "passed": state == "passed"}
    document["rows"] = [_finite(asdict(row)) for row in rows]
    for target, text in (
        (path, json.dumps(document, indent=1, allow_nan=False) + "\n"),
        (path.with_suffix(".md"), markdown(environment, rows, wrong, state)),
    ):
        partial_ = target.with_suffix(target.suffix + ".part")
        partial_.write_text(text)
        partial_.replace(target)  # whoever reads it meanwhile finds it whole
    return path


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no inf and no NaN: they become text."""
    figures = {n: x if math.isfinite(x) else str(x) for n, x in row["figures"].items()}
    return {**row, "figures": figures}


def markdown(
    environment: dict[str, Any], rows: Sequence[Row], wrong: Sequence[str], state: str
) -> str:
    """The page; `state`: "passed", "not passed" or "not finished"."""
    versions = ", ".join(f"{name} {value}" for name, value in environment.items())
    cell = lambda line: ["" if x is None else str(x).replace("\n", " ") for x in line]  # noqa: E731
    pieces = [
        f"# Gate on {environment['device']}: {state}",
        f"{versions}. Rewritten by `python -m jax_attn_bwd.bench --gate`.",
        "## Proofs",
        grid(COUNT_COLUMNS, [cell(line) for line in counts(rows)]),
        "## Times",
        "Medians over rounds of many calls on random data; causal counts half the operations, a backward "
        "2.5 forwards.",
        grid(TIME_COLUMNS, [cell(line) for line in times(rows)]),
    ]
    for title, lines in (
        ("Faults", wrong),
        ("Refused", [f"{r.subject}, {r.case}: {r.note}" for r in rows
                     if r.status == REFUSED and r.kind in PROOFS]),
        ("Not reached", [f"{r.kind} of {r.subject}, {r.case}" for r in rows if r.status == NOT_REACHED]),
    ):  # fmt: skip
        if lines:
            shown = [" ".join(line.split())[:600] for line in lines]
            pieces += [f"## {title}", "\n".join(f"* {line}" for line in shown)]
    return "\n\n".join(pieces) + "\n"


def show(rows: Sequence[Row], wrong: Sequence[str]) -> None:
    """The faults, the proofs, and last the times: one line for each workload."""
    for sentence in wrong[:40]:
        print("FAULT", " ".join(sentence.split())[:400])
    console.table("Proofs", COUNT_COLUMNS, counts(rows))
    timed = [row for row in rows if row.kind in (TIME, PORTABLE) and row.status == OK]
    for case in dict.fromkeys(row.case for row in timed):
        print(f"{case}: " + "; ".join(_brief(row) for row in timed if row.case == case))


def _brief(row: Row) -> str:
    units = {
        "ms": ".3f",
        "TFLOP/s": ".0f",
        "GB/s": ".0f",
        "share of the copy": ".2f",
        "temp MiB": ".1f",
    }
    figures = (f"{row.figures[name]:{digits}} {name}" for name, digits in units.items()
               if name in row.figures)  # fmt: skip
    return f"{row.subject} {', '.join(figures)}"
