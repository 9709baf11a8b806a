"""Measures programs drawn by lot one after the other, and tells how ours does over all of them."""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench import ROOT, plots, report
from bench.measure import compiled_contender, measure
from bench.race import program
from bench.report import Row

SECONDS, QUICK_SECONDS = 0.5, 0.1  # of the rounds of a program, where the least number takes less
COMPILED = "compiled in"  # the note that says how long it took
BESIDE = "x beside other programs"  # of one that was measured again


@dataclass(frozen=True)
class Race:
    """Holds what the command line asks for.

    Attributes:
      repeats: rounds of each program, at least.
      quick: whether programs are small.
      seed: of all that is drawn.
      first, count: the numbers of the programs.
      operators: what is drawn.
      floor: how fast ours must be, as the time of plain over ours; 0 asks for nothing.
    """

    repeats: int
    quick: bool
    seed: int = 0
    first: int = 0
    count: int = 20
    operators: Sequence[str] = (*program.DRAWN,)
    floor: float = 0.0


def run(race: Race, context: Mapping[str, Any], path: Path) -> int:
    """Prints a line a program, then the distribution; writes JSON and a plot.

    Returns 1 if a program failed, or is below the floor in a process of its own, too; else 0.
    """
    document, rows = {**context, "race": asdict(race)}, list[Row]()
    ratios: list[tuple[str, float]] = []  # (operator, x) of each program that did not fail
    budget = program.QUICK if race.quick else program.WHOLE
    compiled_contender("warm", abs, 1.0)  # what the first of a process pays for
    print(_line("x", "ours", "plain", "compiled in", "plain in", "program"))
    for number in range(race.first, race.first + race.count):
        drawn = program.draw(race.seed, number, race.operators, budget)
        found = _measured(race, drawn)
        if (x := ratio(found)) is not None and x < race.floor:
            found = _alone(race, drawn, x)
            x = ratio(found)
        print(_told(found), flush=True)
        rows += found
        if x is not None:
            ratios.append((drawn.operator, x))
        report.write(path, document, rows, finished=False)

    # what they say together
    failed = race.count - len(ratios)
    told = distribution([x for _, x in ratios], race.floor) if ratios else {}
    report.write(path, {**document, "distribution": told}, rows, finished=True)
    print(f"\n{len(ratios)} programs, {failed} failed. x, the time of plain over that of ours:")
    print(", ".join(f"{name} {value:.3g}" for name, value in told.items()))
    print(f"wrote {path}")

    title = plots.title(f"race, seed {race.seed}", "", context)
    if plotted := plots.sorted_ratios(ratios, title, path.with_suffix(".png")):
        print(f"wrote {plotted}")
    return int(failed > 0 or bool(told.get("below the floor")))


def ratio(rows: Sequence[Row]) -> float | None:
    """Returns the time of the plain step over ours; None where they were not measured."""
    return next((row.ratio for row in rows if row.contender == "plain"), None)


def distribution(ratios: Sequence[float], floor: float) -> dict[str, float]:
    """Returns the least and the greatest, the quartiles, and how many are below 1 and below a floor."""
    quartiles = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else [*ratios] * 3
    names = ("least", "first quartile", "median", "third quartile", "greatest")
    found = dict(zip(names, (min(ratios), *quartiles, max(ratios)), strict=True))
    found["below 1"] = sum(x < 1 for x in ratios)
    if floor:
        found["below the floor"] = sum(x < floor for x in ratios)
    return found


def _measured(race: Race, drawn: program.Program) -> list[Row]:
    try:
        return measure(program.workload(drawn), race.repeats, QUICK_SECONDS if race.quick else SECONDS)
    except Exception as error:  # the others are measured all the same
        return [Row(drawn.name, "jax_attn_bwd", notes={"failed": report.sentence(error)})]


def _alone(race: Race, drawn: program.Program, beside: float) -> list[Row]:
    """Measures a program again in a process of its own; `beside` is its ratio in this one."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "seed": drawn.seed,
            "first": drawn.number,
            "count": 1,
            "repeats": race.repeats,
            "out": folder,
        }
        options = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "tests.bench", "race", *options, *["--quick"] * race.quick]
        done = subprocess.run(
            [*command, "--operator", *race.operators], cwd=ROOT, capture_output=True, text=True, check=False
        )
        written = [*Path(folder).glob("*.json")]
        if not written:
            why = f"in a process of its own: {done.stderr[-report.LIMIT :]}"
            return [Row(drawn.name, "jax_attn_bwd", notes={"failed": why})]
        return [replace(row, notes={**row.notes, BESIDE: f"{beside:.2f}"}) for row in report.read(written[0])]


def _told(rows: Sequence[Row]) -> str:
    ours, *others = rows
    if "failed" in ours.notes:
        return _line("-", "", "", "", "", f"{ours.case}: {ours.notes['failed']}")
    plain = others[0]
    seconds = (row.notes[COMPILED] for row in (ours, plain))
    name = ours.case
    if BESIDE in ours.notes:
        name += f" (in a process of its own; {ours.notes[BESIDE]} beside other programs)"
    return _line(f"{plain.ratio:.2f}", report.shown(ours), report.shown(plain), *seconds, name)


def _line(*cells: str) -> str:
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, (6, 8, 8, 11, 8, 0), strict=True))
