"""Command line: `python -m tests.bench <operator>|compiling|mods|programs`.

It takes `[--out DIR] [--repeats N] [--quick]`. With `--scaling` one case of the operator at many sizes.
Programs drawn by lot: `python -m tests.bench race --seed N --count M [--operator ...] [--floor X]`; what each
rule of the plans is worth in them: `python -m tests.bench race --rules --seed N`. Or
`python -m tests.bench --compare OLD.json NEW.json`.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch shares the GPU

import jax
from cases import discover

import bench
from bench import compiling, mods, operators, plots, programs, report
from bench.measure import Part, measure
from bench.race import rules
from bench.race.program import DRAWN
from bench.race.run import Race, run
from jax_attn_bwd._core import console

# what is measured under names of its own, not by an operator's cases
NAMED: dict[str, Callable[..., list[Part]]] = {
    "compiling": compiling.parts,
    "mods": mods.parts,
    "programs": programs.parts,
}


def main(argv: list[str] | None = None) -> int:
    """Measures an operator, programs, or masks as functions; prints a table, writes JSON and a plot.

    Or compares two such files: the exit code is 1 where something became slower or larger.
    """
    # what the command line says, and what does not go together
    measured = sorted({operator.folder for operator in discover() if operator.name in operators.MEASURED})
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=bench.__doc__)
    parser.add_argument("operator", nargs="?", choices=[*measured, *NAMED, "race"])
    files = ("OLD.json", "NEW.json")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=files, help="what became slower or larger")
    parser.add_argument("--out", type=Path, default=report.OUT, help="folder of what is written; default out")
    parser.add_argument(
        "--repeats",
        type=partial(_at_least, 1),
        help="rounds; the median is taken; default 9, of race 5, and more of short programs",
    )
    parser.add_argument("--quick", action="store_true", help="small shapes, to try the command")
    parser.add_argument(
        "--scaling", action="store_true", help="one case at many sizes: time and memory over it"
    )
    parser.add_argument("--only", default="", help=f"of {', '.join(NAMED)}, those whose names contain this")
    asked = _options_of_race(parser)
    args = parser.parse_args(argv)
    given = [action for action in asked if hasattr(args, action.dest)]
    if (args.operator is None) == (args.compare is None):
        parser.error("give an operator to measure, or --compare two files, not both")
    if args.compare:
        try:
            old, new = map(report.read, args.compare)
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"--compare must be given two files that a benchmark wrote: {error}")
        return report.compare(old, new)
    if args.scaling and args.operator not in measured:
        parser.error(f"--scaling measures one operator; the sizes of {args.operator} are its own")
    if given and args.operator != "race":
        parser.error(f"{given[0].option_strings[0]} is of race; {args.operator} has cases of its own")
    if args.only and args.operator not in NAMED:
        parser.error(f"--only chooses among {', '.join(NAMED)}; {args.operator} has cases of its own")
    report.prepare(parser, args.out)
    if args.operator == "race":
        wanted = {action.dest: getattr(args, action.dest) for action in given}
        weighs = wanted.pop("rules", False)
        drawn = Race(args.repeats or 5, args.quick, **wanted)
        context = report.environment()
        stem = f"race{'_rules' * weighs}_seed{drawn.seed}_{context['platform']}_jax{context['jax']}"
        return (rules.run if weighs else run)(drawn, context, args.out / f"{stem}.json")

    make = NAMED.get(args.operator) or partial(operators.parts, args.operator)
    # the file is written after each workload: an interrupted run keeps what it has
    context = report.environment()
    stem = f"{args.operator}{'_scaling' * args.scaling}_{context['platform']}_jax{context['jax']}"
    path, rows = args.out / f"{stem}.json", list[report.Row]()
    report.write(path, context, rows, finished=False)
    chosen: dict[str, Any] = {"only": args.only} if args.only else {}
    chosen |= {"scaling": True} if args.scaling else {}
    parts = make(args.quick, **chosen)
    for _, build in console.progress(parts, len(parts), f"bench {args.operator}", lambda part: part[0]):
        for workload in build():
            rows += measure(workload, args.repeats or 9)
            report.write(path, context, rows, finished=False)
    found = {"slopes": plots.slopes(rows)} if args.scaling else {}
    report.write(path, context | found, rows, finished=True)

    what = "" if args.operator in NAMED else " forward + backward,"
    title = plots.title(args.operator, what, context)
    report.show(title.replace("\n", " "), rows)
    print(f"wrote {path}")
    plot = plots.scaling if args.scaling else plots.ratios
    if plotted := plot(rows, title, path.with_suffix(".png")):
        print(f"wrote {plotted}")
    return 0


def _options_of_race(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Adds the options of `race`; those that are not given are no attributes of what is parsed."""
    race = parser.add_argument_group(
        "race",
        "Random training steps over all operators and the layer, alone and among others, each beside the "
        "plain formula that JAX differentiates. A seed and a number are one program on every machine: "
        "--seed 3 --first 17 --count 1 runs number 17 of seed 3 alone, with the same --operator. On two "
        "cores a program takes about five seconds, more than half of them to compile both sides.",
        argument_default=argparse.SUPPRESS,
    )
    floor = (
        "a program whose plain step takes less than this share of our time is measured again in a process of "
        "its own; if it is below there, too, the exit code is 1"
    )
    weighed = (
        "measure, instead of the plain step, ours with each rule that changes it switched off, where it "
        "takes a millisecond or more"
    )
    return [
        race.add_argument(
            "--seed", type=partial(_at_least, 0), help="another draws other programs; default 0"
        ),
        race.add_argument("--count", type=partial(_at_least, 1), help="how many programs; default 20"),
        race.add_argument("--first", type=partial(_at_least, 0), help="number of the first; default 0"),
        race.add_argument(
            "--operator",
            dest="operators",
            nargs="+",
            choices=[*DRAWN],
            metavar="NAME",
            help=f"one or more of {', '.join(DRAWN)}; default all",
        ),
        race.add_argument("--floor", type=_positive, help=floor),
        race.add_argument("--rules", action="store_true", help=weighed),
    ]


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return number


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)  # it is told what compiling takes
    sys.exit(main())
