"""Timing and memory of contenders that compute the same thing."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from bench.report import Row
from jax_attn_bwd._core.cases import Case, Operator, cast, cotangents
from jax_attn_bwd.check import relative_error

TOLERANCES = {
    "float32": 1e-4,
    "bfloat16": 0.03,
}  # results that agree differ by less, relative to the largest entry
ROUND = 0.03  # seconds of one round on a GPU: starting it and waiting for it do not count
LONG = 0.1  # seconds of a call that what was in the caches before makes no faster

Results = Sequence[np.ndarray]


@dataclass(frozen=True)
class Contender:
    """One way to compute a workload.

    Attributes:
      name: name of the library or variant.
      run: starts the computation and returns its arrays.
      wait: waits for what `run` returned.
      results: the arrays to compare with the other contenders'; None = computes something else.
      temporary_bytes: peak temporary memory of the compiled program, where the compiler tells.
      tells_seconds: `run` returns how long it took: what it did to set itself up does not count.
      timed: False for one that is there to compare results with, and would disturb the others' caches.
      notes: further figures to print, by name.
    """

    name: str
    run: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready
    results: Callable[[], Results] | None = None
    temporary_bytes: int | None = None
    tells_seconds: bool = False
    timed: bool = True
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    """What is measured under one name; the first contender is ours, and ratios are to it.

    Results that differ by more than the tolerance are those of a fault, unless `rounding` tells, of ours and
    another's, that it is rounding.
    """

    name: str
    contenders: Sequence[Contender]
    timed: bool = True
    tolerance: float = TOLERANCES["float32"]
    rounding: Callable[[Results, Results], bool] = lambda ours, other: False
    rates: Mapping[str, float] = field(
        default_factory=dict
    )  # {unit: its amount in one call, for "TFLOP/s" in TFLOP}
    refused: Sequence[Row] = ()  # contenders that cannot run it


# what a bar counts: a name, and what builds the workloads under it, one at a time
Part = tuple[str, Callable[[], Iterator[Workload]]]


def tag(quick: bool, scaling: bool = False) -> str:
    """Returns the tag of the cases that are measured here."""
    if scaling:
        return "quick_scaling" if quick else "scaling"
    return "quick" if quick else "bench" if jax.default_backend() == "cpu" else "bench_gpu"


def inputs(operator: Operator, case: Case) -> tuple[dict[str, Any], jax.Array]:
    """Draws the arrays of a case in its own dtype, and a random cotangent of its first output."""
    arrays = case.arrays(case.dtype)
    outputs = jax.eval_shape(lambda: operator.call(**arrays, **case.options))
    return arrays, cast(cotangents(operator, outputs[:1])[0], case.dtype)


def step(function: Callable[..., Any]) -> Callable[..., tuple]:
    """Makes `(dout, *arrays) -> (out, *gradients)` of `function(*arrays)`."""

    def run(dout, *arrays):
        out, pullback = jax.vjp(function, *arrays)
        return (out, *pullback(dout))

    return run


def compiled_contender(
    name: str,
    function: Callable,
    *args: Any,
    compare: bool = True,
    timed: bool = True,
    costs: bool = False,
    **notes: Any,
) -> Contender:
    """Makes a contender of a function to jit, with its memory as the compiler tells it.

    With `costs` the notes say what compiling took in this process, after what it traced before, and how long
    the program is.
    """
    start = time.perf_counter()
    lowered = jax.jit(function).lower(*args)
    compiled = lowered.compile()
    if costs:
        seconds, lines = time.perf_counter() - start, lowered.as_text().count("\n")
        notes |= {"compiled in": f"{seconds:.2f} s", "StableHLO": f"{lines} lines"}
    memory = compiled.memory_analysis()

    def results():
        return [np.asarray(x, np.float32) for x in jax.tree.leaves(compiled(*args))]

    return Contender(
        name,
        run=lambda: compiled(*args),
        results=results if compare else None,
        temporary_bytes=None if memory is None else memory.temp_size_in_bytes,
        timed=timed,
        notes=notes,
    )


def check_agreement(workload: Workload) -> None:
    """Refuses to measure contenders that disagree."""
    comparable = [c for c in workload.contenders if c.results is not None]
    if len(comparable) < 2:
        return
    ours, *others = comparable
    results = {c.name: c.results() for c in comparable if c.results is not None}
    for other in others:
        pairs = zip(results[other.name], results[ours.name], strict=True)
        errors = [relative_error(a, b) for a, b in pairs]
        if max(errors) <= workload.tolerance:
            continue
        # inf tells of other shapes, or of NaN on one side
        if np.inf in errors or not workload.rounding(results[ours.name], results[other.name]):
            raise RuntimeError(
                f"bench: {other.name} and {ours.name} disagree in {workload.name!r}: relative errors "
                f"{errors}, tolerance {workload.tolerance}; nothing is timed"
            )
    if not all(np.isfinite(x).all() for x in results[ours.name]):
        raise RuntimeError(
            f"bench: results of {workload.name!r} are not finite: that they agree says nothing"
        )


def measure(workload: Workload, repeats: int, seconds: float = 0.0) -> list[Row]:
    """Takes medians over rounds in which the contenders take turns: `repeats`, or more while `seconds` last.

    What is timed follows an untimed call of the same contender, as in a training loop: what another
    contender left in the caches and the allocator is not measured. Where `seconds` are given, calls so long
    that it makes no difference follow none but in the first round.
    """
    many = jax.default_backend() != "cpu"  # there a call is over before it is waited for
    times: dict[str, list[float]] = {c.name: [] for c in workload.contenders}
    if workload.timed:
        check_agreement(workload)
        rounds, start = 0, time.perf_counter()
        while rounds < repeats or time.perf_counter() < start + seconds:
            for contender in workload.contenders:
                if contender.timed:
                    found = times[contender.name]
                    is_long = seconds > 0 and len(found) > 0 and found[-1] > LONG
                    found.append(_seconds(contender, many, warm=not is_long))
            rounds += 1
    return [*_rows(workload, {name: t for name, t in times.items() if t}), *workload.refused]


def _seconds(contender: Contender, many: bool, warm: bool) -> float:
    """Times one call in seconds, after an untimed one if `warm`."""
    if contender.tells_seconds:
        return contender.run()
    if warm:
        contender.wait(contender.run())
    calls = 1
    if many:
        calls = max(1, min(200, round(ROUND / _clock(contender, 1))))
    return _clock(contender, calls)


def _clock(contender: Contender, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        result = contender.run()
    contender.wait(result)
    return (time.perf_counter() - start) / calls


def _rows(workload: Workload, times: dict[str, list[float]]) -> Iterable[Row]:
    first = workload.contenders[0]
    medians = {name: statistics.median(t) * 1e3 for name, t in times.items()}
    for c in workload.contenders:
        ms, memory = medians.get(c.name), c.temporary_bytes
        rates = {unit: f"{amount / ms * 1e3:.3g}" for unit, amount in workload.rates.items() if ms}
        yield Row(
            workload.name,
            c.name,
            ms,
            None if ms is None else ms / medians[first.name],
            None if memory is None else memory / 2**20,
            None if not memory or not first.temporary_bytes else memory / first.temporary_bytes,
            None if ms is None else _spread(times[c.name]),
            {**c.notes, **rates},
        )


def _spread(times: Sequence[float]) -> float | None:
    """Returns the distance between the quartiles over the median of four rounds or more; else None."""
    if len(times) < 4:
        return None
    low, median, high = statistics.quantiles(times)
    return (high - low) / median
