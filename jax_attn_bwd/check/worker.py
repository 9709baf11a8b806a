"""The worker of `python -m jax_attn_bwd.check --enable`: runs kernels on a chip, and tells what it finds.

It reads jobs from its standard input, one list in JSON a line: `["chip"]`, `["prove", folder, name]` or
`["time", folder, name]`, and tells in lines of JSON on its standard output what it does and within how many
seconds, then the answer. Who started it ends it where it takes longer: a kernel may hang.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd import check, ops
from jax_attn_bwd._core import backend, targets
from jax_attn_bwd._core.cases import Case, Operator, cotangents, value_and_gradients
from jax_attn_bwd._core.numerics import accumulator_dtype

PROVED, ANY_ORDER, TIMED = ("large", "poison"), "any_order", "timed"  # tags of the cases
DTYPES = ("bfloat16", "float16", "float32")  # all cases in the first, two in each of the others
COMPILE_SECONDS, LAUNCH_SECONDS = 180.0, 30.0  # what takes longer hangs
REPEATS = 5
ROUNDED = 1e-2  # how far what is added in another order may lie apart, relative to the largest entry
Tell = Callable[..., None]


class Refused(Exception):
    """A kernel does not take the call, and says why."""


class Call(NamedTuple):
    """A case of an operator by one implementation; `wanted`: the gradients asked for, None = all."""

    operator: Operator
    implementation: str
    case: Case
    dtype: str
    wanted: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"{self.operator.name}: {self.case.name}, {self.dtype}"

    @property
    def in_any_order(self) -> bool:
        """Tells whether its bits may differ from run to run."""
        implementation = backend.named(self.operator.implementations, self.implementation)
        return implementation.any_order or ANY_ORDER in self.case.tags


def compiled(call: Call, arrays: Any, cts: Any) -> Callable[..., dict[str, jax.Array]]:
    """Compiles `(arrays, cts) -> {output or d<argument>: array}`: what follows is a launch.

    Raises:
      Refused: the implementation cannot run it.
    """
    operator, options = call.operator, {**call.case.options, "implementation": call.implementation}
    refuse(call, arrays)
    names = operator.differentiated(arrays) if call.wanted is None else call.wanted

    def run(arrays, cts):
        outputs, gradients = value_and_gradients(operator.call, names, arrays, options)(cts)
        found = dict(zip(operator.outputs, outputs, strict=True))
        return found | {f"d{name}": x for name, x in gradients.items()}

    return jax.jit(run).lower(arrays, cts).compile()


def refuse(call: Call, arrays: Any) -> None:
    """Raises Refused where the implementation cannot run the call."""
    refused = backend.explain(lambda: call.operator.call(**arrays, **call.case.options)).refused
    if call.implementation in refused:
        raise Refused(refused[call.implementation])


def launched(program: Callable[..., dict[str, jax.Array]], *args: Any) -> dict[str, np.ndarray]:
    """Runs a program and returns its results as NumPy arrays, those narrower than float32 as float32."""
    results = jax.block_until_ready(program(*args))
    return {name: np.asarray(x.astype(accumulator_dtype(x.dtype))) for name, x in results.items()}


def wrong_values(aim: check.Target, got: dict[str, np.ndarray]) -> str:
    """Tells which outputs and gradients lie beyond the limit of `check`, and how far; "" = none."""
    wrong = []
    for name, x in got.items():
        error, limit = check.relative_error(x, aim.expected[name]), aim.limits[name]
        if not error <= limit:
            entries = wrong_entries(x, aim.expected[name], limit)
            wrong.append(f"{name}: error {error:.2g}, limit {limit:.2g}: {entries}")
    return "; ".join(wrong)


def wrong_entries(got: np.ndarray, expected: np.ndarray, limit: float) -> str:
    """Describes which entries are wrong: their pattern tells of the cause."""
    largest = max(np.abs(np.where(np.isfinite(expected), expected, 0)).max(initial=0), 1e-2)
    with np.errstate(invalid="ignore"):
        off = np.where((got == expected) | (np.isnan(got) & np.isnan(expected)), 0, np.abs(got - expected))
    off = np.where(np.isnan(off), np.inf, off / largest)
    worst, wrong = np.unravel_index(int(np.argmax(off)), off.shape), off > limit
    rows = [np.flatnonzero(wrong.any(tuple(set(range(off.ndim)) - {axis}))) for axis in range(off.ndim)]
    spans = ", ".join(f"{r[0]}..{r[-1]} ({r.size})" if r.size else "none" for r in rows)
    where = f"worst at {tuple(map(int, worst))}: {got[worst]:.6g}, expected {expected[worst]:.6g}"
    return f"{wrong.mean():.1%} wrong, {np.isnan(got).sum()} NaN, {where}; along {got.shape}: {spans}"


class Poison(NamedTuple):
    """A call with numbers, and with NaN, where nothing looks."""

    hidden: dict[str, np.ndarray]  # {argument or output: the entries that no one reads}
    clean: tuple[Any, Any]  # (arrays, cotangents)
    filled: tuple[Any, Any]

    def reached(self, clean: dict[str, np.ndarray], got: dict[str, np.ndarray], in_any_order: bool) -> str:
        """Tells what differs, is NaN, or is a gradient of hidden entries that is not 0; "" = nothing."""
        near = (lambda x, y: check.relative_error(x, y) <= ROUNDED) if in_any_order else _same_bits
        found = [f"{n} differs" for n in clean if not near(got[n], clean[n])]
        found += [f"{n} is NaN" for n in clean if np.isnan(got[n]).any()]
        for name in set(self.hidden) & set(self.clean[0]):
            if np.where(_behind(self.hidden[name], got[f"d{name}"]), got[f"d{name}"], 0).any():
                found.append(f"d{name} is not 0 there")
        return ", ".join(found)


def poisoned(operator: Operator, case: Case, arrays: Any, cts: Sequence[Any]) -> Poison | None:
    """Poisons a call of the types of these arrays and cotangents; None where the case hides nothing."""
    hidden = {n: x for n, x in operator.hidden(arrays, case.options).items() if np.any(x)}
    if not hidden:
        return None
    kept = (operator.outputs[0], *hidden)
    named = dict(zip(operator.outputs, cts, strict=True))
    named = {name: ct if name in kept else jnp.zeros_like(ct) for name, ct in named.items()}

    def fill(name, x):
        return jnp.where(_behind(hidden[name], x), np.nan, x).astype(x.dtype) if name in hidden else x

    filled = [{name: fill(name, x) for name, x in group.items()} for group in (arrays, named)]
    return Poison(hidden, (arrays, tuple(named.values())), (filled[0], tuple(filled[1].values())))


def _same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    return x.tobytes() == y.tobytes()


def _behind(where: np.ndarray, x: Any) -> np.ndarray:
    """Gives `where` axes behind, until it has as many as `x`."""
    return np.reshape(where, np.shape(where) + (1,) * (x.ndim - np.ndim(where)))


def operators(family: str, implementation: str) -> tuple[Operator, ...]:
    """Finds the operators of a folder of `ops` that have the implementation."""
    found = [o for o in ops.discover() if o.folder == family]
    return tuple(o for o in found if implementation in {i.name for i in o.implementations})


def chip(tell: Tell) -> dict[str, Any]:
    """Tells what the device is, and which kernels are for it: `{folder: implementations}`."""
    platforms = getattr(jax.config, "jax_platforms", None) or "any platform"
    tell(f"looks for a device, of {platforms}", COMPILE_SECONDS)
    platform, kernels = targets.platform(), dict[str, dict[str, None]]()
    for operator in ops.discover():
        for i in operator.implementations:
            if i.platform == platform:
                kernels.setdefault(i.family, {})[i.name] = None
    driver = Path("/proc/driver/nvidia/version")
    runtime = str(getattr(jax.devices()[0].client, "platform_version", ""))
    return {
        "device": targets.device_kind(),
        "platform": platform,
        "kernels": {family: list(names) for family, names in kernels.items()},
        "driver": driver.read_text().splitlines()[0] if driver.exists() else runtime.replace("\n", " "),
    }


def to_prove(family: str, implementation: str) -> Iterator[Call]:
    """Yields every case of the kernels in bfloat16, and two in each of the other dtypes."""
    for operator in operators(family, implementation):
        first, *others = DTYPES
        cases = [*operator.tagged(*PROVED), *list(operator.tagged(ANY_ORDER))[:2]]
        yield from (Call(operator, implementation, case, first) for case in cases)
        yield from (Call(operator, implementation, case, dtype) for dtype in others for case in cases[:2])


def prove(tell: Tell, family: str, implementation: str) -> dict[str, Any]:
    """Runs the cases.

    `failed`: what is wrong, None = nothing; `refused`: why no case can be run, None = `cases` were.
    """
    calls = list(to_prove(family, implementation))
    pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1))
    prepared = [pool.submit(copy_context().run, _prepare, call) for call in calls]
    done, reason = 0, "it has no case"
    for number, (call, future) in enumerate(zip(calls, prepared, strict=True), 1):
        about = f"{call} ({number} of {len(calls)})"
        tell(f"compiles {about}", COMPILE_SECONDS)
        try:
            aim, program = future.result()
        except Refused as refusal:
            reason = str(refusal)
            continue
        tell(f"runs {about}", LAUNCH_SECONDS)
        if wrong := examined(call, aim, program):
            pool.shutdown(wait=False, cancel_futures=True)
            return {"failed": f"{call}: {wrong}", "refused": None, "cases": number}
        done += 1
    return {"failed": None, "refused": None if done else reason, "cases": done}


def _prepare(call: Call) -> tuple[check.Target, Any]:
    with jax.enable_x64(False), jax.default_matmul_precision("highest"):
        refuse(call, call.case.arrays(call.dtype))
        aim = check.target(call.operator, call.case, call.dtype)
        return aim, compiled(call, aim.arrays, aim.cotangents)


def examined(call: Call, aim: check.Target, program: Any) -> str:
    """Tells what is wrong with a program: values, bits that differ from run to run, poison; "" = nothing."""
    first = launched(program, aim.arrays, aim.cotangents)
    if wrong := wrong_values(aim, first):
        return wrong
    for _ in range(0 if call.in_any_order else REPEATS):
        again = launched(program, aim.arrays, aim.cotangents)
        if unequal := [name for name in first if not _same_bits(first[name], again[name])]:
            return f"{', '.join(unequal)} differs from run to run"
    if "poison" not in call.case.tags:
        return ""
    poison = poisoned(call.operator, call.case, aim.arrays, aim.cotangents)
    if poison is None:
        return ""
    clean, filled = (launched(program, *given) for given in (poison.clean, poison.filled))
    reached = poison.reached(clean, filled, call.in_any_order)
    return f"NaN where nothing looks: {reached}" if reached else ""


def timings(tell: Tell, family: str, implementation: str) -> dict[str, Any]:
    """Measures `times`: milliseconds of a forward with all gradients, by case; `sizes` of the cases."""
    times, sizes = {}, {}
    for operator in operators(family, implementation):
        for case in operator.tagged(TIMED):
            name = f"{operator.name}: {case.name}"
            tell(f"compiles {name}", COMPILE_SECONDS)
            try:
                arrays, sizes[name], program = _timed(Call(operator, implementation, case, case.dtype))
                tell(f"times {name}", LAUNCH_SECONDS)
                times[name] = milliseconds(program, *arrays)
            except (Refused, jax.errors.JaxRuntimeError):  # it is too much for this kernel, or for the memory
                continue
    return {"times": times, "sizes": sizes}


def _timed(call: Call) -> tuple[Any, Sequence[int], Any]:
    with jax.enable_x64(False):
        arrays = call.case.arrays(call.dtype)
        explained = backend.explain(lambda: call.operator.call(**arrays, **call.case.options))
        outputs = jax.eval_shape(lambda: call.operator.call(**arrays, **call.case.options))
        cts = cotangents(call.operator, outputs)
        return (arrays, cts), explained.size, compiled(call, arrays, cts)


def milliseconds(program: Callable[..., Any], *args: Any) -> float:
    """Measures how long one run takes, the least of three rounds of 0.2 s at most."""

    def round_of(runs):
        start = time.perf_counter()
        for _ in range(runs):
            results = program(*args)
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / runs

    round_of(1)
    runs = int(min(max(0.2 / max(round_of(1), 1e-9), 1), 50))
    return 1e3 * min(round_of(runs) for _ in range(3))


def serve(jobs: Iterator[str], write: Callable[[str], Any]) -> None:
    """Does what the lines of `jobs` ask for, and writes what it does and finds."""
    known: dict[str, Callable[..., Any]] = {"chip": chip, "prove": prove, "time": timings}

    def say(**message):
        write(json.dumps(message) + "\n")

    for line in jobs:
        what, *args = json.loads(line)
        try:
            say(answer=known[what](lambda does, within: say(does=does, within=within), *args))
        except Exception as error:
            say(error=f"{type(error).__name__}: {str(error).strip()[:500]}")


def main() -> None:
    """Serves whoever started this process."""
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)  # what libraries print is not taken for an answer
        serve(iter(sys.stdin.readline, ""), out.write)


if __name__ == "__main__":
    main()
