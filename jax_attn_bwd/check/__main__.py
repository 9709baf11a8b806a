"""Command line: `python -m jax_attn_bwd.check [operator ...] [--dtypes ...] [--json]`, or `--enable`."""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import jax

from jax_attn_bwd import check, ops
from jax_attn_bwd._core import backend, console, targets
from jax_attn_bwd._core.cases import Case, Operator
from jax_attn_bwd.check import MEANS, Measurement, enable, measure
from jax_attn_bwd.parallel import cases as parallel

DTYPES = ("float64", "float32", "bfloat16", "float16")
NARROW = ("bfloat16", "float16")
FIRST, IN_TURN = ("float32", "bfloat16"), ("float16", "float32", "bfloat16")  # beside float64
CALL_SECONDS = 0.7  # seconds of a call on two cores, most of them for compiling: 106 calls take 74 s


def unavailable(operator: Operator, case: Case, dtype: str) -> dict[str, str]:
    """Returns the implementations that are not checked on this machine, with the reason.

    They cannot run the case, or are kernels that are passed over as long as they are not proven, and may
    hang: those are for `--enable`.
    """
    with jax.enable_x64(dtype == "float64"):
        reasons = backend.explain(operator.call, **case.arrays(dtype), **case.options)
    not_picked = {name: reason for name, reason in reasons.items() if reason != "ok"}
    return {n: why for n, why in not_picked.items() if n != "cudnn" or n in reasons.refused}


def plan(
    operators: Sequence[Operator], dtypes: Sequence[str]
) -> tuple[list[tuple[Operator, str, Case, str]], list[tuple[str, str, str]]]:
    """Returns (jobs, those of a case in a row, [(operator, implementation, why it is not available)]).

    Without `dtypes` an operator's first case is measured in float64, float32 and bfloat16, the others in
    float64 and one of float16, float32 and bfloat16 in turn. What runs over several devices is the operator
    alone where there is one device: in float32. On a CPU cases with means follow, in a narrow dtype.
    """
    jobs, absent, on_cpu = [], [], targets.platform() == "cpu"
    for operator in operators:
        never: dict[str, str] | None = None
        kernels = any(i.platform == targets.platform() for i in operator.implementations)
        alone = operator in parallel.OPERATORS and jax.device_count() == 1
        for number, case in enumerate(operator.tagged("check")):
            narrower = (IN_TURN[(number - 1) % 3],) if number else FIRST
            for dtype in dtypes or (("float32",) if alone else ("float64", *narrower)):
                if never is None or kernels:  # else none but the portable path runs any case
                    missing = unavailable(operator, case, dtype)
                never = missing if never is None else {n: never[n] for n in never if n in missing}
                names = [i.name for i in operator.implementations if i.name not in missing]
                jobs += [(operator, name, case, dtype) for name in names]
        for case in operator.tagged(MEANS) if on_cpu and not alone else ():
            jobs += [(operator, "xla", case, dtype) for dtype in dtypes or ("bfloat16",) if dtype in NARROW]
        absent += [(operator.name, name, reason) for name, reason in (never or {}).items()]
    return jobs, absent


def _measured(jobs: Sequence[tuple[Operator, str, Case, str]]) -> Iterator[Measurement]:
    """Measures `jobs`, cases side by side, for most of the time goes into compiling."""
    running: list[str] = []  # what threads are at

    def of_case(group: Sequence[tuple[Operator, str, Case, str]]) -> list[Measurement]:
        found: list[Measurement] = []
        running.append(group[0][0].name)
        for operator, implementation, case, dtype in group:
            with jax.enable_x64(dtype == "float64"):
                found += measure(operator, implementation, case, dtype)
        running.remove(group[0][0].name)
        return found

    groups = [list(group) for _, group in itertools.groupby(jobs, lambda job: (job[0], job[2]))]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        futures = [pool.submit(of_case, group) for group in groups]
        now = lambda future: ", ".join(sorted({*running} or {jobs[0][0].name}))
        try:
            for future in console.progress(futures, len(groups), "check", now):
                yield from future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def discover() -> tuple[Operator, ...]:
    """Finds the operators, and what runs them over the devices at hand."""
    return (*ops.discover(), *parallel.OPERATORS)


def worst(rows: Sequence[Measurement]) -> list[Measurement]:
    """Picks for each operator, implementation, dtype and quantity the case nearest to, or over, its limit."""
    found: dict[tuple, Measurement] = {}
    for row in rows:
        key = (row.operator, row.implementation, row.dtype, row.quantity)
        if key not in found or not row.error / row.limit <= found[key].error / found[key].limit:
            found[key] = row
    return list(found.values())


def _arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[Operator]]:
    """Returns (what the command line says, the operators that it names)."""
    # an operator goes by its own name, and by that of its folder
    known: dict[str, list[Operator]] = {}
    for operator in discover():
        known[operator.name] = [operator]
        folder = operator.call.__module__.split(".")[-2:][0]  # the name that `bench` has for it
        known.setdefault(folder, []).append(operator)
    # what the command line says, and what does not go together
    parser = argparse.ArgumentParser(prog="python -m jax_attn_bwd.check", description=check.__doc__)
    parser.add_argument("operators", nargs="*", metavar="operator", help=f"some of {sorted(known)}")
    narrow = "default: float64, and the others in turn; of what is for several devices, on one float32 alone"
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=(), help=narrow)
    parser.add_argument("--json", action="store_true", help="print every measurement as JSON instead")
    parser.add_argument("--enable", action="store_true", help=enable.HELP)
    parser.add_argument("--seconds", type=float, help=f"for --enable; {enable.SECONDS:.0f} unless told")
    args = parser.parse_args(argv)
    if unknown := set(args.operators) - set(known):
        parser.error(f"unknown operator {sorted(unknown)}, known are {sorted(known)}")
    if args.enable and (args.dtypes or args.json):
        parser.error("--enable settles the dtypes itself and prints a table: leave out --dtypes and --json")
    if args.seconds is not None and not (args.enable and args.seconds > 0):
        parser.error("--seconds must be positive, and belongs to --enable")
    # the operators, and the folders whose kernels they have
    named = list(dict.fromkeys(o for name in args.operators or known for o in known[name]))
    args.families = list(dict.fromkeys(i.family for o in named for i in o.implementations if i.family))
    if args.enable and not args.families:
        parser.error(f"there is nothing to enable: {', '.join(args.operators)} has no kernels")
    return args, named


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the check, prints the table, returns the exit code."""
    args, named = _arguments(argv)
    if args.enable:
        return enable.run(args.families, args.seconds or enable.SECONDS)
    # every call is measured, compiled and in full precision
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_disable_jit", False)  # what is checked is compiled
    jobs, absent = plan(named, args.dtypes)
    started = time.monotonic()
    about = f"about {CALL_SECONDS * len(jobs):.0f} s on two cores of a CPU"
    print(f"check: {len(jobs)} calls, {about}", file=sys.stderr, flush=True)
    rows = list(_measured(jobs))
    device, misses = jax.devices()[0].device_kind, sum(not row.ok for row in rows)
    # all measurements as JSON, or the worst of each quantity as a table
    if args.json:
        measured = [{**asdict(row), "ok": row.ok} for row in rows]
        missing = [dict(zip(("operator", "implementation", "reason"), a, strict=True)) for a in absent]
        about_it = {"device": device, "jax": jax.__version__}
        print(json.dumps({**about_it, "measurements": measured, "unavailable": missing}))
        return int(misses > 0)

    what = ("operator", "implementation", "dtype", "quantity")
    figures = lambda r: (f"{r.error:.1e}", f"{r.limit:.1e}", r.case, "ok" if r.ok else "MISS")
    console.table(
        "Worst relative error of each quantity, beside its limit",
        [*what, "error", "limit", "case", "verdict"],
        [(*(getattr(row, name) for name in what), *figures(row)) for row in worst(rows)],
    )
    for name, implementation, reason in absent:
        print(f"not available: {name} [{implementation}]: {reason}")
    done = f"{len(jobs)} calls, {len(rows)} quantities in {time.monotonic() - started:.0f} s"
    print(f"{done} on {device}, JAX {jax.__version__}: {misses} misses")
    return int(misses > 0)


def _until_the_pipe_closes() -> int:
    """Runs `main`; what reads the output may stop early, as `head` does, and so may who typed the command."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more
        code = 1
    except KeyboardInterrupt:
        code = 130
    return code


if __name__ == "__main__":
    sys.exit(_until_the_pipe_closes())
