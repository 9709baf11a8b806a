"""Timing and memory of contenders that compute the same thing."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jax_attn_bwd.check import relative_error


@dataclass(frozen=True)
class Contender:
    """One way to compute a case.

    Attributes:
      name: of the library or variant.
      run: computes once and waits for the result, which it returns as NumPy arrays on request.
      results: the arrays to compare with the other contenders'; None = computes something else.
      temporary_bytes: peak temporary memory of the compiled program, where the compiler tells.
      timed: False for one that is there to compare results with, and would disturb the others' caches.
      notes: further figures to print, by name.
    """

    name: str
    run: Callable[[], Any]
    results: Callable[[], Sequence[np.ndarray]] | None = None
    temporary_bytes: int | None = None
    timed: bool = True
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A named workload; the first contender is ours, and ratios are to it."""

    name: str
    contenders: Sequence[Contender]
    timed: bool = True
    tolerance: float = 1e-4  # of the contenders' results, relative to the largest entry


@dataclass(frozen=True)
class Row:
    """What was measured of one contender in one case."""

    case: str
    contender: str
    milliseconds: float | None
    ratio: float | None  # time over ours: above 1, ours is faster
    temporary_mib: float | None
    memory_ratio: float | None
    notes: dict[str, Any]


def compiled_contender(
    name: str,
    function: Callable,
    *args: Any,
    compare: bool = True,
    timed: bool = True,
    **notes: Any,
) -> Contender:
    """A contender made of a function to jit, with its memory as the compiler tells it."""
    compiled = jax.jit(function).lower(*args).compile()
    memory = compiled.memory_analysis()

    def results():
        return [np.asarray(x, np.float32) for x in jax.tree.leaves(compiled(*args))]

    return Contender(
        name,
        run=lambda: jax.block_until_ready(compiled(*args)),
        results=results if compare else None,
        temporary_bytes=None if memory is None else memory.temp_size_in_bytes,
        timed=timed,
        notes=notes,
    )


def check_agreement(case: Case) -> None:
    """Refuses to measure contenders that disagree."""
    comparable = [c for c in case.contenders if c.results is not None]
    if len(comparable) < 2:
        return
    ours, *others = comparable
    results = {c.name: c.results() for c in comparable if c.results is not None}
    for other in others:
        pairs = zip(results[other.name], results[ours.name], strict=True)
        errors = [relative_error(a, b) for a, b in pairs]
        if max(errors) > case.tolerance:
            raise RuntimeError(
                f"bench: {other.name} and {ours.name} disagree in {case.name!r}: relative errors "
                f"{errors}, tolerance {case.tolerance}; nothing is timed"
            )


def measure(case: Case, repeats: int) -> list[Row]:
    """Medians over `repeats` rounds in which the contenders take turns.

    Each timed call follows an untimed one of the same contender, as in a training loop: what another
    contender left in the caches and the allocator is not measured.
    """
    times: dict[str, list[float]] = {c.name: [] for c in case.contenders}
    if case.timed:
        check_agreement(case)
        runners = [c for c in case.contenders if c.timed]
        for _ in range(repeats):
            for contender in runners:
                contender.run()
                start = time.perf_counter()
                contender.run()
                times[contender.name].append(time.perf_counter() - start)
    medians = {name: statistics.median(t) * 1e3 for name, t in times.items() if t}
    first = case.contenders[0]
    rows = []
    for c in case.contenders:
        ms, memory = medians.get(c.name), c.temporary_bytes
        rows.append(
            Row(
                case.name,
                c.name,
                ms,
                None if ms is None else ms / medians[first.name],
                None if memory is None else memory / 2**20,
                None if not memory or not first.temporary_bytes else memory / first.temporary_bytes,
                c.notes,
            )
        )
    return rows
