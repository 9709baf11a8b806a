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
from typing import Any

from jax_attn_bwd.bench.gate.steps import FAILED, NOT_REACHED, Row, Step

PHASES = (0.45, 0.88, 1.0)  # the share of the time after which each phase makes room for the next
START_SECONDS = 90.0


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
        return self._receive(seconds)

    def ask(self, step: Step, seconds: float) -> list[Row]:
        """The rows of a step."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.write(step.name + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise Lost(self._last_words()) from None
        reply = self._receive(seconds)
        self.broken = reply["broken"]
        return [Row(**row) for row in reply["rows"]]

    def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=max(seconds, 0.01))
        except queue.Empty:
            raise Lost(f"no answer in {seconds:.0f} s") from None
        if not line:
            raise Lost(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        try:
            status: Any = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            status = "unknown, its output is closed"
        self._errors.seek(0)
        return f"the process ended with status {status}: {self._errors.read().strip()[-800:]}"

    def end(self) -> None:
        """Kills the process, whatever it does."""
        self._process.kill()
        self._process.wait()
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
    undone: list[Step] = []
    for phase, share in enumerate(PHASES):
        chosen = [step for step in steps if step.phase == phase]
        if phase == len(PHASES) - 1:
            chosen, undone = [*undone, *chosen], []
        for alone, library in dict.fromkeys((step.alone, step.library) for step in chosen):
            group = [step for step in chosen if (step.alone, step.library) == (alone, library)]
            undone += _serve(group, library, start, clock, share, 1 if alone else parallel, record)
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
) -> list[Step]:
    """Runs `steps` in `processes` children until `share` of the time is used; returns those undone."""
    waiting, undone, lock = collections.deque(steps), [], threading.Lock()

    def work():
        child = None
        while True:
            with lock:
                if not waiting or clock.left(share) <= 0:
                    break
                step = waiting.popleft()
            usable = False
            try:
                if child is None:
                    child = start(library)
                    child.greeting(min(START_SECONDS, clock.left()))
                rows = child.ask(step, min(step.seconds, clock.left()))
                usable = not child.broken
            except Lost as lost:
                rows = [step.row(FAILED, str(lost))]
            with lock:
                if usable or clock.left() > 0:
                    record(rows)
                else:  # cut off by the end, not by a fault of its own
                    undone.append(step)
            if child is not None and not usable:
                child.end()
                child = None
        if child is not None:
            child.end()

    threads = [threading.Thread(target=work) for _ in range(min(processes, len(steps)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [*undone, *waiting]
