"""`python -m jax_attn_bwd.check`: every operator x implementation x dtype against float64, on this machine.

For each case the operator runs in the dtype, forward and gradients, under a random cotangent. Its error
against the definition in float64 must be at most twice that of the definition in the same dtype, plus
two units of rounding; in float64 at most 1e-10.

In the same narrow dtype the definition rounds as the operator does, and numbers without a mean hide an error
that a row shares. So the cases with means are held against the definition in float32, rounded once at its
end: on a CPU each gradient of portable code must have at most three times its error, or one rounding of the
largest entry. Forward and backward are two programs there: in one, XLA may hand on what was not rounded yet.
Exit code 1 on a miss.
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd import enable, ops
from jax_attn_bwd._core import backend, console, targets
from jax_attn_bwd._core.cases import Arrays, Case, Operator, cast, cotangents, value_and_gradients
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd.parallel import cases as parallel

DTYPES = ("float64", "float32", "bfloat16", "float16")
NARROW = ("bfloat16", "float16")
FIRST, IN_TURN = ("float32", "bfloat16"), ("float16", "float32", "bfloat16")  # beside float64
FLOAT64_LIMIT = 1e-10
MEANS, TIMES = "means", 3  # the tag of cases with means; as large as the error of rounding once theirs may be
CALL_SECONDS = 0.7  # seconds of a call on two cores, most of them for compiling: 106 calls take 74 s
_RUNNING = threading.Lock()  # two programs of several devices at once may wait for each other
# options of the compiler for a program that runs once or twice: most of the time goes into compiling
QUICK: dict[str, Any] = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}
if jax.__version_info__ < (0, 11):  # newer ones have no such option
    QUICK["xla_cpu_use_fusion_emitters"] = False


@dataclass(frozen=True)
class Measurement:
    """Holds the error and the limit of one output or gradient, both relative to its largest entry."""

    operator: str
    implementation: str
    dtype: str
    quantity: str
    case: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        """Tells whether the error is within the limit (a NaN is not)."""
        return self.error <= self.limit


def relative_error(got: Any, expected: Any) -> float:
    """Returns the largest difference over the largest finite entry expected; inf where NaN or inf differ."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    if got.shape != expected.shape:
        return np.inf
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    finite = np.isfinite(got) & np.isfinite(expected)
    if not (same | finite).all():
        return np.inf
    difference = np.abs(np.where(same, 0, got) - np.where(same, 0, expected))
    size = np.abs(np.where(np.isfinite(expected), expected, 0)).max(initial=0)
    return float(difference.max(initial=0) / max(size, 1e-2))


def _run(function: Any, operator: Operator, options: Mapping) -> Any:
    """Makes `(arrays, cts) -> (outputs, {name: gradient})` of a call."""

    def run(arrays, cts):
        names = operator.differentiated(arrays)
        return value_and_gradients(function, names, arrays, options)(cts)

    return run


def _by_name(operator: Operator, outputs: tuple, gradients: dict) -> dict[str, np.ndarray]:
    named = dict(zip(operator.outputs, outputs, strict=True))
    named |= {f"d{name}": gradient for name, gradient in gradients.items()}
    return {name: np.asarray(x).astype(accumulator_dtype(x.dtype)) for name, x in named.items()}


def quick_jit(function: Any) -> Any:
    """Jits a definition: soon compiled, and no rounding left out."""
    return jax.jit(function, compiler_options={"xla_allow_excess_precision": False, **QUICK})


@cache
def _definition(operator: Operator, case: Case) -> Any:
    """Compiles the definition into one program, which the dtypes of a case share."""
    return quick_jit(_run(operator.reference, operator, case.options))


def _on_cpu() -> contextlib.AbstractContextManager:
    """Places what is computed on a CPU, where float64 is exact; where JAX has none, on whatever it has."""
    try:
        return jax.default_device(jax.devices("cpu")[0])
    except RuntimeError:
        return contextlib.nullcontext()


class Target(NamedTuple):
    """Holds a case in one dtype: what it is called with, and what its results are measured by."""

    operator: Operator
    case: Case
    dtype: str
    arrays: Arrays
    cotangents: tuple
    expected: dict[str, np.ndarray]
    limits: dict[str, float]

    def measure(self, implementation: str, outputs: tuple, gradients: dict) -> list[Measurement]:
        """Measures the errors of an implementation, beside their limits."""
        got = _by_name(self.operator, outputs, gradients)
        about = self.operator.name, implementation, self.dtype
        return [
            Measurement(*about, name, self.case.name, relative_error(got[name], x), self.limits[name])
            for name, x in self.expected.items()
        ]


def target(operator: Operator, case: Case, dtype: str) -> Target:
    """Runs the definition in float64, and in `dtype` for the limits, both on the CPU."""
    with _on_cpu():
        arrays, define = case.arrays(dtype), _definition(operator, case)
        with jax.enable_x64(True):
            exact = {name: cast(x, "float64") for name, x in arrays.items()}
            zeros = jax.eval_shape(lambda: operator.reference(**exact, **case.options))
            outputs, _ = define(exact, tuple(np.zeros(x.shape) for x in zeros))
            # random, 0 where the output is not finite (the lse of a row that sees nothing)
            drawn = zip(operator.outputs, outputs, cotangents(operator, outputs), strict=True)
            finite = (np.where(np.isfinite(x), ct + case.means.get(name, 0), 0) for name, x, ct in drawn)
            cts = tuple(cast(cast(ct, dtype), "float64") for ct in finite)  # representable in dtype
            expected = _by_name(operator, *define(exact, cts))
        cts = tuple(cast(ct, dtype) for ct in cts)
        limits = dict.fromkeys(expected, FLOAT64_LIMIT)
        if dtype != "float64":
            plain, rounding = _by_name(operator, *define(arrays, cts)), float(jnp.finfo(dtype).eps)
            limits = {n: 2 * relative_error(plain[n], x) + 2 * rounding for n, x in expected.items()}
        if MEANS in case.tags and accumulator_dtype(dtype) != dtype:
            limits |= _of_rounding_once(operator, case, dtype, (arrays, cts), expected)
        return Target(operator, case, dtype, arrays, cts, expected, limits)


def _of_rounding_once(
    operator: Operator, case: Case, dtype: str, given: tuple[Arrays, tuple], expected: dict[str, np.ndarray]
) -> dict[str, float]:
    """Returns the limits of gradients by the definition in float32, which is rounded at its end."""
    arrays, cts = given
    wide = lambda x: cast(np.asarray(x, np.float32), "float32") if getattr(x, "dtype", None) == dtype else x
    _, gradients = _definition(operator, case)({n: wide(x) for n, x in arrays.items()}, tuple(map(wide, cts)))
    limits = {}
    for name, x in gradients.items():
        error = relative_error(cast(x, arrays[name].dtype), expected[f"d{name}"])
        limits[f"d{name}"] = max(case.times.get(name, TIMES) * error, float(jnp.finfo(dtype).eps) / 2)
    return limits


def measure(operator: Operator, implementation: str, case: Case, dtype: str) -> list[Measurement]:
    """Measures the errors of one case in one dtype, beside their limits."""
    aim = target(operator, case, dtype)
    options = {**case.options, "implementation": implementation}
    run = _in_two_programs if MEANS in case.tags else _in_one_program
    return aim.measure(implementation, *run(operator, options, aim))


def _in_one_program(operator: Operator, options: Mapping, aim: Target) -> tuple[tuple, dict]:
    call = _run(operator.call, operator, options)
    program = jax.jit(call).lower(aim.arrays, aim.cotangents).compile()
    with _RUNNING:
        return jax.block_until_ready(program(aim.arrays, aim.cotangents))


def _in_two_programs(operator: Operator, options: Mapping, aim: Target) -> tuple[tuple, dict]:
    names = operator.differentiated(aim.arrays)

    def forward(arrays):
        call = lambda moved: operator.call(**{**arrays, **moved}, **options)
        return jax.vjp(call, {name: arrays[name] for name in names})

    def backward(pullback, outputs, cts):
        (gradients,) = pullback(tuple(ct.astype(x.dtype) for ct, x in zip(cts, outputs, strict=True)))
        return gradients

    with _RUNNING:
        outputs, pullback = jax.block_until_ready(jax.jit(forward)(aim.arrays))
        return outputs, jax.block_until_ready(jax.jit(backward)(pullback, outputs, aim.cotangents))


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

    def of_case(group: Sequence[tuple[Operator, str, Case, str]]) -> list[Measurement]:
        found: list[Measurement] = []
        for operator, implementation, case, dtype in group:
            with jax.enable_x64(dtype == "float64"):
                found += measure(operator, implementation, case, dtype)
        return found

    groups = [list(group) for _, group in itertools.groupby(jobs, lambda job: (job[0], job[2]))]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for found in console.progress(pool.map(of_case, groups), len(groups), "check"):
            yield from found


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
    parser = argparse.ArgumentParser(prog="python -m jax_attn_bwd.check", description=__doc__)
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
    """Runs `main`; what reads the output may stop early, as `head` does."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more
        code = 1
    return code


if __name__ == "__main__":
    sys.exit(_until_the_pipe_closes())
