"""`python -m jax_attn_bwd.check --enable`: proves the kernels of the chip at hand, and has them picked.

Every kernel runs on the chip in a worker process, which is ended where it hangs, and is compared with
float64: values, gradients, the same bits in every run, NaN where nothing looks. What is right is timed beside
`"xla"`. `implementation=None` picks by the record of both, in the folder that JAX_ATTN_BWD_CACHE names.
"""

import contextlib
import datetime
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax_attn_bwd
from jax_attn_bwd._core import console, records

COMMAND = (sys.executable, "-m", "jax_attn_bwd.check.worker")  # of a worker
HELP = "prove the kernels of the chip at hand, and have them picked where they are faster"
SECONDS = 300.0  # that all of it may take
START_SECONDS = 120.0  # until a worker says its first word
_FIRST = ("dot_product", "softmax")  # what most programs are made of is proven first


class Lost(Exception):
    """A worker did not answer: it hung, ended, or could not do its job."""


class Late(Exception):
    """The time of the whole is over."""


class Worker:
    """A process that runs kernels; after one that failed it is not used again."""

    def __init__(self, command: Sequence[str] = COMMAND):
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `end`)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=_environment(),
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put("")

    def ask(self, job: Sequence[str], deadline: float, see: Callable[[str], None]) -> dict[str, Any]:
        """Waits for the answer to a job; `see` is told what the worker does meanwhile.

        Raises:
          Lost: there is none; the message says why.
          Late: there is none yet at `deadline`.
        """
        does, within = "starts", START_SECONDS
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `_next` finds
            print(json.dumps(job), file=self._process.stdin, flush=True)
        while True:
            told = self._next(does, within, deadline)
            if "answer" in told:
                return told["answer"]
            if "error" in told:
                raise Lost(f"{does}: {told['error']}")
            does, within = told["does"], told["within"]
            see(does)

    def _next(self, does: str, within: float, deadline: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=max(min(within, deadline - time.monotonic()), 0.01))
        except queue.Empty:
            if time.monotonic() >= deadline:
                raise Late from None
            raise Lost(f"{does}: it hung, for more than {within:.0f} s") from None
        if line:
            return json.loads(line)
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._errors.seek(0)
        last = [text.strip() for text in self._errors.read().splitlines() if text.strip()][-1:]
        raise Lost(": ".join([does, f"the process ended, {how}", *last])[:600])

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        self._errors.close()
        jobs, told = self._process.stdin, self._process.stdout
        assert jobs is not None
        assert told is not None
        with contextlib.suppress(BrokenPipeError):
            jobs.close()
        self._reader.join(10)
        if not self._reader.is_alive():  # else a driver holds on to it
            told.close()
            self._process.wait()


def _environment() -> dict[str, str]:
    found = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, records.KERNELS: "none"}
    if (platforms := found.get("JAX_PLATFORMS")) and "cpu" not in platforms.split(","):
        found["JAX_PLATFORMS"] = f"{platforms},cpu"  # float64 is computed there
    return found


class Workers:
    """One worker at a time: a new one after each that was lost."""

    def __init__(self, seconds: float):
        self.started, self.seconds = time.monotonic(), seconds
        self.deadline = self.started + seconds
        self._worker: Worker | None = None

    def ask(self, *job: str) -> dict[str, Any]:
        """Waits for the answer to a job; raises `Lost` or `Late`."""
        if time.monotonic() >= self.deadline:
            raise Late
        self._worker = self._worker or Worker(COMMAND)

        def see(does: str) -> None:
            elapsed = time.monotonic() - self.started
            at_most = f"{elapsed:.0f} s of at most {self.seconds:.0f} s"
            console.status(" ".join([at_most, *job[1:], does]), min(elapsed / self.seconds, 1.0))

        try:
            return self._worker.ask(job, self.deadline, see)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Ends the worker at hand."""
        if self._worker is not None:
            self._worker.end()
        self._worker = None


@dataclass
class Verdict:
    """Holds what was found of one implementation of a folder of `ops`."""

    family: str
    name: str
    failed: str | None = None
    refused: str | None = None
    late: bool = False
    cases: int = 0
    times: Mapping[str, float] = field(default_factory=dict)

    @property
    def proven(self) -> bool:
        """Tells whether it is right, as far as it was asked."""
        return not (self.failed or self.refused or self.late)


def prove(workers: Workers, family: str, names: Sequence[str]) -> tuple[list[Verdict], dict[str, Any]]:
    """Returns (the verdicts of the kernels and of "xla", the sizes of the cases that were timed)."""
    # every kernel runs its cases; after one that failed the worker is a new one
    verdicts, sizes = [Verdict(family, name) for name in names], dict[str, Any]()
    for verdict in verdicts:
        try:
            found = workers.ask("prove", family, verdict.name)
            verdict.failed, verdict.refused = found["failed"], found["refused"]
            verdict.cases = found["cases"]
            if verdict.failed:
                workers.end()
        except Lost as lost:
            verdict.failed = str(lost)
        except Late:
            verdict.late = True
    # those that are right are timed beside "xla", which comes first
    if not any(verdict.proven for verdict in verdicts):
        return verdicts, sizes
    verdicts.append(Verdict(family, "xla"))
    for verdict in [v for v in reversed(verdicts) if v.proven]:
        try:
            found = workers.ask("time", family, verdict.name)
            verdict.times, sizes = found["times"], sizes | found["sizes"]
        except Lost as lost:
            verdict.failed = str(lost)
        except Late:
            verdict.late = verdict.name != "xla"
    return verdicts, sizes


def keep(chip: Mapping[str, Any], verdicts: Sequence[Verdict], sizes: Mapping[str, Any]) -> Path | None:
    """Writes what was found of the kernels of a folder; None where the time was over before anything was."""
    found = [v for v in verdicts if not v.late and not v.refused]
    if not any(v.name != "xla" for v in found):
        return None
    kernels = {v.name: {"failed": v.failed, "times": dict(v.times)} for v in found}
    about = {"version": jax_attn_bwd.__version__, "driver": chip["driver"]}
    written = datetime.date.today().isoformat()
    return write(
        chip["device"], verdicts[0].family, {"written": written, **about, "kernels": kernels, "sizes": sizes}
    )


def write(kind: str, family: str, contents: Mapping[str, Any]) -> Path:
    """Puts a record in place of the old one, at once: who reads meanwhile finds one or the other.

    Raises:
      OSError, RuntimeError: the folder cannot be made or written.
    """
    file = records.path(kind, family)
    file.parent.mkdir(parents=True, exist_ok=True)
    held = {"device": kind, "versions": records.versions(family), **contents}
    number, draft = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".tmp")
    try:
        with os.fdopen(number, "w") as opened:
            json.dump(held, opened, indent=1)
        Path(draft).replace(file)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    records.read_once.cache_clear()
    return file


def row(verdict: Verdict, portable: Mapping[str, float]) -> tuple[str, ...]:
    """Returns the line of the table about a kernel."""
    rates = [portable[case] / ms for case, ms in verdict.times.items() if case in portable]
    if verdict.late:
        word, why = "not reached", "the time was over; name one operator, or give more --seconds"
    elif verdict.refused:
        word, why = "cannot run", verdict.refused
    elif verdict.failed:
        word, why = "FAILED", verdict.failed
    elif not rates:
        word, why = "proven", "not timed beside xla, so not picked"
    else:
        faster = sum(rate > 1 for rate in rates)
        word = "proven" if faster else "slower than xla"
        why = f"faster than xla at {faster} of {len(rates)} sizes: {min(rates):.2g} to {max(rates):.2g} times"
    return verdict.family, verdict.name, word, str(verdict.cases or ""), why


def run(families: Sequence[str], seconds: float = SECONDS) -> int:
    """Proves the kernels of these folders of `ops` on the chip at hand: the exit code of the command."""
    if reason := _unwritable():
        print(f"check --enable: {reason}", file=sys.stderr)
        return 2
    workers, started = Workers(seconds), time.monotonic()
    try:
        # what chip it is, and which of the kernels are for it
        chip = workers.ask("chip")
        kernels = {family: chip["kernels"][family] for family in families if family in chip["kernels"]}
        if not kernels:
            device = f"{chip['device']} ({chip['platform']})"
            print(f"check --enable: no kernel of {', '.join(families)} is for this {device}", file=sys.stderr)
            return 2
        # folder by folder: what is found is kept at once, and told in the end
        rows, files, verdicts = [], [], []
        for family in sorted(kernels, key=lambda f: (f not in _FIRST, families.index(f))):
            found, sizes = prove(workers, family, kernels[family])
            portable = next((v.times for v in found if v.name == "xla"), {})
            rows += [row(v, portable) for v in found if v.name != "xla" or v.failed]
            files.append(keep(chip, found, sizes))
            verdicts += found
    except (Lost, Late) as error:
        print(f"check --enable: no device could be asked: {error or 'the time was over'}", file=sys.stderr)
        return 2
    finally:
        workers.end()
        console.status("")
    console.table(f"Kernels on {chip['device']}", ["operator", "kernel", "verdict", "cases", "why"], rows)
    for file in filter(None, files):
        print(f"wrote {file}")
    print(f"{time.monotonic() - started:.0f} s; implementation=None picks by these records from now on")
    return int(any(v.failed or v.late for v in verdicts))


def _unwritable() -> str | None:
    """Tells why no record can be kept; None if one can."""
    try:
        folder = records.folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except RuntimeError:
        return f"this user has no home folder; set {records.CACHE} to a folder that can be written"
    except OSError as error:
        why = error.strerror or error
        return (
            f"the folder of records, {folder}, cannot be written ({why}); set {records.CACHE} to one that can"
        )
