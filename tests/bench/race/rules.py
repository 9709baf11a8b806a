"""Measures what each rule of the plans is worth: our steps with it and without it, in turns."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from bench import report
from bench.measure import Contender, Workload, compiled_contender, measure
from bench.race import program
from bench.race.run import QUICK_SECONDS, SECONDS, Race
from bench.report import Row
from jax_attn_bwd._core import choices, console

LEAST = 1e-3  # seconds of a step that tells something
OURS = "with all rules"


def run(race: Race, context: Mapping[str, Any], path: Path) -> int:
    """Prints a line a program, then what each rule is worth; writes JSON.

    Returns 1 if a program failed, else 0.
    """
    document, rows, failed = {**context, "race": asdict(race)}, list[Row](), 0
    budget = program.QUICK if race.quick else program.WHOLE
    for number in range(race.first, race.first + race.count):
        drawn = program.draw(race.seed, number, race.operators, budget)
        try:
            found = _measured(race, drawn)
        except Exception as error:  # the others are measured all the same
            failed += 1
            print(f"{drawn.name}: {report.sentence(error)}", flush=True)
            continue
        told = ", ".join(f"{row.contender} {row.ratio:.2f}" for row in found[1:])
        print(f"{drawn.name}: {told or 'no rule changes it, or it is short'}", flush=True)
        rows += found
        report.write(path, document, rows, finished=False)

    # what a rule is worth over all programs that it changes
    report.write(path, {**document, "rules": worth(rows)}, rows, finished=True)
    columns = ("rule", "reason", "programs", "least", "median", "greatest", "memory")
    cells = [
        (name, found["reason"], found["programs"], *(f"{found[x]:.2f}" for x in columns[3:]))
        for name, found in worth(rows).items()
    ]
    console.table("Time of a step without a rule over that with it", columns, cells)
    print(f"wrote {path}")
    return int(failed > 0)


def worth(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Returns for each rule the programs that it changes: time and memory without it over those with it."""
    found: dict[str, dict[str, Any]] = {}
    reasons = {rule.name: rule.reason for rule in choices.known()}
    for name, reason in reasons.items():
        own = [row for row in rows if row.contender == name]
        if ratios := [row.ratio for row in own if row.ratio is not None]:
            spread = {"least": min(ratios), "median": statistics.median(ratios), "greatest": max(ratios)}
            memory = statistics.median([row.memory_ratio or 1.0 for row in own])
            found[name] = {"reason": reason, "programs": len(ratios), **spread, "memory": memory}
    return found


def _measured(race: Race, drawn: program.Program) -> list[Row]:
    """Measures ours with all rules, and without each that changes it; nothing where it is short."""
    numbers = program.numbers(drawn)
    args = numbers.dout, numbers.own_data, numbers.arrays

    def step() -> Callable[..., tuple]:  # one that was not traced yet
        jax.clear_caches()
        return program.steps(drawn.call, drawn.call.ours)

    def lowered() -> str:
        return jax.jit(step()).lower(*args).as_text()

    def contender(name: str) -> Contender:
        return compiled_contender(name, step(), *args, compare=False)

    # a rule that leaves the program as it was changes nothing
    with choices.noted() as held:
        text = lowered()
    changing = []
    for name in held:
        with choices.without(name):
            changing += [name] * (lowered() != text)
    ours = contender(OURS)
    alone = Workload(drawn.name, [ours])
    if not changing or (measure(alone, 3)[0].milliseconds or 0) < LEAST * 1e3:
        return []

    # in turns with all that it is compared with
    contenders = [ours]
    for name in changing:
        with choices.without(name):
            contenders.append(contender(name))
    seconds = (QUICK_SECONDS if race.quick else SECONDS) * len(contenders) / 2
    return measure(Workload(drawn.name, contenders), race.repeats, seconds)
