"""The parent process: hands steps to child processes, minds the clock, keeps what they find."""

import collections
import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jax_attn_bwd.bench.errors import sentence
from jax_attn_bwd.bench.gate import progress
from jax_attn_bwd.bench.gate.steps import FAILED, NOT_REACHED, PROBE, SKIPPED, Row, Step

# the share of the time after which each phase makes room for the next
PHASES = (0.2, 0.5, 0.88, 1.0)
START_SECONDS = 90.0
# a launch that takes longer hangs; compilation may take as long as the step says
LAUNCH_SECONDS = 15.0
LOSSES = 2  # of children, after which a kernel is not tried again
TAIL = 800  # characters of what a child wrote


class Lost(Exception):
    """A child process gave no answer: it died, or said nothing for too long."""


class Child:
    """A child process that runs steps by name."""

    def __init__(self, plan: str, settings: dict[str, Any], library: str, environment: dict):
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (`end` closes it)
        command = [sys.executable, "-m", "jax_attn_bwd.bench.gate.worker"]
        self._process = subprocess.Popen(
            [*command, plan, json.dumps(settings), library],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.broken = False

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put("")

    def greeting(self, seconds: float) -> dict[str, Any]:
        """What it says of the device, once it is ready."""
        return self._receive(seconds, "starting")

    def ask(self, step: Step, seconds: float) -> list[Row]:
        """The rows of a step, for which there are `seconds` left at most."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.write(step.name + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise Lost(self._last_words()) from None
        limits = {progress.COMPILING: step.seconds, progress.LAUNCHING: LAUNCH_SECONDS}
        clock, limit, doing = Clock(seconds), step.seconds, "running"
        while "rows" not in (reply := self._receive(min(limit, clock.left()), doing)):
            doing = reply["doing"]
            limit = limits[doing]
        self.broken = reply["broken"]
        return [Row(**row) for row in reply["rows"]]

    def _receive(self, seconds: float, doing: str) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=max(seconds, 0.01))
        except queue.Empty:
            raise Lost(f"no answer in {seconds:.0f} s of {doing}{self._said()}") from None
        if not line:
            raise Lost(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        try:
            status: Any = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            status = "unknown, its output is closed"
        return f"the process ended with status {status}{self._said()}"

    def _said(self) -> str:
        """The end of what it wrote to stderr, whose position it shares: read without moving that."""
        file = self._errors.fileno()
        start = max(0, os.fstat(file).st_size - TAIL)
        text = os.pread(file, TAIL, start).decode(errors="replace").strip()
        return f": {text}" if text else ""

    def end(self) -> None:
        """Kills the process, whatever it does; one that a driver holds is left to the system."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        self._reader.join(5)
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(OSError):  # what was not delivered to a dead process
                if stream is not None:
                    stream.close()


class Clock:
    """The time of the whole run."""

    def __init__(self, seconds: float):
        self._start, self.seconds = time.monotonic(), seconds

    def left(self, share: float = 1.0) -> float:
        """Seconds until `share` of the time is used."""
        return self._start + share * self.seconds - time.monotonic()


class Losses:
    """Which kernels cost children: what needs one that cost `LOSSES` of them is not run again."""

    def __init__(self) -> None:
        self._lost: collections.Counter[str] = collections.Counter()

    def add(self, step: Step) -> None:
        """The child was lost in this step."""
        if step.needs:
            self._lost[step.needs[-1]] += 1

    def hung(self, step: Step) -> str | None:
        """A kernel that the step needs and that is given up; None if there is none."""
        return next((name for name in step.needs if self._lost[name] >= LOSSES), None)


def run(
    steps: Sequence[Step],
    start: Callable[[str], Any],
    clock: Clock,
    parallel: int,
    record: Callable[[list[Row]], None],
) -> None:
    """Runs the steps phase by phase; what a phase leaves undone is taken up at the end.

    Args:
      steps: in the order of their importance within each phase.
      start: `library -> Child`.
      clock: when to stop.
      parallel: processes at a time for steps that are not timed.
      record: is handed the rows of each step as they come.
    """
    losses = Losses()
    undone: list[Step] = []
    for phase, share in enumerate(PHASES):
        chosen = [step for step in steps if step.phase == phase]
        if phase == len(PHASES) - 1:
            chosen, undone = [*undone, *chosen], []
        for alone, library in dict.fromkeys((step.alone, step.library) for step in chosen):
            group = [step for step in chosen if (step.alone, step.library) == (alone, library)]
            workers = 1 if alone else parallel
            undone += _serve(group, library, start, clock, share, workers, record, losses)
    for step in undone:
        record([step.row(NOT_REACHED, "the time was up")])


def _serve(
    steps: Sequence[Step],
    library: str,
    start: Callable[[str], Any],
    clock: Clock,
    share: float,
    processes: int,
    record: Callable[[list[Row]], None],
    losses: Losses,
) -> list[Step]:
    """Runs `steps` in `processes` children until `share` of the time is used; returns those undone."""
    waiting, undone, lock = collections.deque(steps), [], threading.Lock()
    children: set[Any] = set()

    def take() -> Step | None:
        """The next step; of one that needs a kernel that hangs, what is run instead."""
        with lock:
            while waiting and clock.left(share) > 0:
                step: Step | None = waiting.popleft()
                while step is not None and step.kind != PROBE and (kernel := losses.hung(step)):
                    record([step.row(SKIPPED, f"{kernel} was lost {LOSSES} times")])
                    step = step.instead
                if step is not None:
                    return step
        return None

    def work() -> None:
        child = None
        while (step := take()) is not None:
            rows, usable, lost = [], False, False
            try:
                if child is None:
                    child = start(library)
                    children.add(child)
                    child.greeting(min(START_SECONDS, clock.left()))
                rows = [replace(row, step=step.name) for row in child.ask(step, clock.left())]
                usable = not child.broken
            except Lost as error:
                rows, lost = [step.row(FAILED, str(error))], True
            except Exception as error:  # of the gate itself, or an answer that is none
                rows = [step.row(FAILED, sentence(error))]
            with lock:
                if usable or clock.left() > 0:
                    record(rows)
                    if lost:
                        losses.add(step)
                else:  # cut off by the end, not by a fault of its own
                    undone.append(step)
            if child is not None and not usable:
                children.discard(child)
                child.end()
                child = None
        if child is not None:
            children.discard(child)
            child.end()

    threads = [
        threading.Thread(target=work, daemon=True) for _ in range(min(processes, len(steps)))
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:  # an interrupt: no child outlives the parent
        for child in list(children):
            child.end()
    return [*undone, *waiting]
