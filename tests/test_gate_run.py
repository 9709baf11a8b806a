"""The parent of the GPU gate and its children: crashes, hangs, deadlines, interrupts, what they share."""

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import pytest

from jax_attn_bwd import ops
from jax_attn_bwd.bench.gate import command, plan, progress, report, run
from jax_attn_bwd.bench.gate.steps import FAILED, NOT_REACHED, OK, PROBE, SKIPPED, Row, Step

SOFTMAX = next(o for o in ops.discover() if o.name == "scaled_masked_softmax")


def good(name):
    return [Row("correctness", "f[xla]", name, figures={"error": 0.0, "limit": 1.0})]


def eventful(platform, tiny):
    """Steps of which some hang, crash or raise; `platform` and `tiny` are as for the real plan."""

    def step(name, action, seconds=60.0, **more):
        return Step("correctness", "f[xla]", name, action, seconds, **more)

    def fail():
        raise FloatingPointError("wrong result")

    def wait():
        print("waiting for the barrier", file=sys.stderr, flush=True)
        time.sleep(600)

    return [
        step("first", partial(good, "first")),
        step("raises", fail),
        step("crashes", os.abort),
        step("after a crash", partial(good, "after a crash")),
        step("hangs", wait, 1.0),
        step("prints", lambda: print("noise") or good("prints"), alone=True, phase=1),
        step("empty", list, phase=2),
    ]


@pytest.fixture
def as_plan(monkeypatch):
    """Children can import the plans of this file."""
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setattr(plan, "kernels", lambda platform: [(SOFTMAX, "xla")])


def test_a_crash_a_hang_and_an_error_cost_one_step_each(as_plan, tmp_path, capsys):
    status = command.main("cpu", tmp_path, 5, "test_gate_run:eventful")
    assert status == 1
    document = json.loads((tmp_path / "cpu.json").read_text())
    rows = {row["case"]: row for row in document["rows"]}
    assert not document["passed"]
    assert [name for name, row in rows.items() if row["status"] == "ok"] == [
        "first", "after a crash", "prints",
    ]  # fmt: skip
    assert "FloatingPointError" in rows["raises"]["note"]
    assert "wrong result" in rows["raises"]["note"]
    assert "ended with status -6" in rows["crashes"]["note"]
    assert rows["hangs"]["note"].startswith("no answer in 1 s of running: ")
    assert rows["hangs"]["note"].endswith("waiting for the barrier")
    assert rows["empty"]["note"] == "it gave no result"
    assert document["jax"] == jax.__version__
    assert {"commit", "date", "device"} <= document.keys()
    printed = capsys.readouterr().out
    assert "7 steps, 7 rows" in printed
    assert "FAULT correctness of f[xla], hangs: no answer in 1 s" in printed
    page = (tmp_path / "cpu.md").read_text()
    assert "not passed" in page
    assert "wrong result" in page


class Fake:
    """A child that runs steps at once; one of the name `broken` breaks its device."""

    made: list

    def __init__(self, library):
        self.broken, self.ended = False, False
        self.made.append(self)

    def greeting(self, seconds):
        return {}

    def ask(self, step, seconds):
        if step.case == "lost":
            raise run.Lost("it died")
        if step.case == "slow":
            time.sleep(seconds)
            raise run.Lost("no answer")
        if step.case == "garbled":
            raise ValueError("half a line of JSON")
        self.broken = step.case == "broken"
        return step.run()

    def end(self):
        self.ended = True


@pytest.fixture
def fake():
    Fake.made = []
    return Fake


def sequence(*names, **more):
    return [Step("correctness", "f", name, partial(good, name), **more) for name in names]


def test_a_broken_device_gets_a_new_child(fake):
    rows: list = []
    run.run(sequence("a", "broken", "b", "lost", "c"), fake, run.Clock(60), 1, rows.extend)
    assert [(row.case, row.status) for row in rows] == [
        ("a", OK), ("broken", OK), ("b", OK), ("lost", FAILED), ("c", OK),
    ]  # fmt: skip
    assert len(fake.made) == 3
    assert all(child.ended for child in fake.made)


def test_steps_after_the_deadline_are_listed_as_not_reached(fake):
    rows: list = []
    steps = [*sequence("a", "slow", "b"), *sequence("c", phase=1, alone=True)]
    run.run(steps, fake, run.Clock(0.5), 1, rows.extend)
    assert [(row.case, row.status) for row in rows] == [
        ("a", OK), ("slow", NOT_REACHED), ("b", NOT_REACHED), ("c", NOT_REACHED),
    ]  # fmt: skip
    assert all(child.ended for child in fake.made)


def test_a_phase_makes_room_for_the_next_and_is_taken_up_again(fake):
    wait = Step("correctness", "f", "wait", lambda: time.sleep(0.6) or good("wait"))
    steps = [wait, *sequence("later"), *sequence("timed", phase=2, alone=True)]
    rows: list = []
    run.run(steps, fake, run.Clock(1.2), 1, rows.extend)
    assert [row.case for row in rows] == ["wait", "timed", "later"]


def test_parallel_children_share_the_steps(fake):
    steps = [
        Step("correctness", "f", str(i), lambda i=i: time.sleep(0.05) or good(str(i)))
        for i in range(8)
    ]  # fmt: skip
    rows: list = []
    run.run(steps, fake, run.Clock(60), 4, rows.extend)
    assert {row.case for row in rows} == {str(i) for i in range(8)}
    assert len(fake.made) == 4


def test_an_answer_that_is_none_fails_its_step_and_ends_the_child(fake):
    rows: list = []
    run.run(sequence("a", "garbled", "b"), fake, run.Clock(60), 1, rows.extend)
    assert [(row.case, row.status) for row in rows] == [("a", OK), ("garbled", FAILED), ("b", OK)]
    assert "ValueError" in rows[1].note
    assert "half a line of JSON" in rows[1].note
    assert len(fake.made) == 2
    assert all(child.ended for child in fake.made)


def test_a_kernel_that_cost_two_children_is_not_run_again(fake):
    def using(case, *needs, instead=None, kind="correctness"):
        return Step(kind, "f", case, partial(good, case), needs=needs, instead=instead)

    alone = using("forward alone", "forward")
    steps = [
        using("lost", "forward", "backward", kind=PROBE),
        using("other", "forward", "other"),
        using("lost", "forward", "backward"),
        using("late probe", "forward", "backward", kind=PROBE),
        using("c", "forward", "backward", instead=alone),
        using("d", "forward", "backward"),
        using("e", "forward", "other"),
    ]
    rows: list = []
    run.run(steps, fake, run.Clock(60), 1, rows.extend)
    assert [(row.case, row.status) for row in rows] == [
        ("lost", FAILED), ("other", OK), ("lost", FAILED), ("late probe", OK),
        ("c", SKIPPED), ("forward alone", OK), ("d", SKIPPED), ("e", OK),
    ]  # fmt: skip
    assert {row.step for row in rows} == {step.name for step in [*steps, alone]}
    (fault, *_) = (x for x in report.faults(rows, []) if SKIPPED in x)
    assert fault == "f: 2 proofs skipped: hung"


def launches(platform, tiny):
    def step(name, *doing, seconds=60.0):
        def act():
            for what in doing:
                progress.tell(what) if isinstance(what, str) else time.sleep(what)
            return good(name)

        return Step("correctness", "f[xla]", name, act, seconds)

    compiling, launching = progress.COMPILING, progress.LAUNCHING
    return [
        step("compiles long", compiling, 3.0, launching),
        step("launches often", launching, 1.2, launching, 1.2, launching),
        step("compiles again", launching, compiling, 3.0),
        step("hangs", compiling, launching, 600),
        step("compiles too long", launching, compiling, 600, seconds=1.0),
    ]


def test_a_launch_has_less_time_than_a_compilation(as_plan, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "LAUNCH_SECONDS", 2.0)
    command.main("cpu", tmp_path, 5, "test_gate_run:launches")
    rows = {r["case"]: r for r in json.loads((tmp_path / "cpu.json").read_text())["rows"]}
    right = ["compiles long", "launches often", "compiles again"]
    assert [name for name, row in rows.items() if row["status"] == "ok"] == right
    assert rows["hangs"]["note"].startswith("no answer in 2 s of launching")
    assert rows["compiles too long"]["note"].startswith("no answer in 1 s of compiling")


def killing(platform, tiny):
    """The second step kills the parent."""
    return [
        Step("correctness", "f[xla]", "first", partial(good, "first")),
        Step("correctness", "f[xla]", "kills", lambda: os.kill(os.getppid(), 9) or good("kills")),
        Step("correctness", "f[xla]", "never", partial(good, "never")),
    ]


def test_a_gate_that_was_killed_is_not_finished(as_plan, tmp_path):
    program = (
        "import sys; from pathlib import Path; from jax_attn_bwd.bench.gate import command;"
        "command.main('cpu', Path(sys.argv[1]), 5, 'test_gate_run:killing')"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -9
    document = json.loads((tmp_path / "cpu.json").read_text())
    assert not document["passed"]
    assert not document["finished"]
    assert {row["case"]: row["status"] for row in document["rows"]} == {
        "first": OK, "kills": NOT_REACHED, "never": NOT_REACHED,
    }  # fmt: skip
    assert "CPU" in (title := (tmp_path / "cpu.md").read_text().splitlines()[0])
    assert title.endswith(": not finished")


def test_an_interrupt_ends_the_children(fake, monkeypatch):
    def interrupted(self, timeout=None):
        time.sleep(0.2)
        raise KeyboardInterrupt

    monkeypatch.setattr(run.threading.Thread, "join", interrupted)
    wait = Step("correctness", "f", "wait", lambda: time.sleep(1) or good("wait"))
    with pytest.raises(KeyboardInterrupt):
        run.run([wait], fake, run.Clock(60), 1, lambda rows: None)
    assert [child.ended for child in fake.made] == [True]


def test_a_process_that_cannot_be_killed_does_not_hold_the_gate_up(monkeypatch):
    child = run.Child("test_gate_run:launches", {"platform": "cpu", "tiny": True}, "jax", {})
    process, waits = child._process, []

    def wait(timeout=None):
        waits.append(timeout)
        raise subprocess.TimeoutExpired("worker", timeout)

    with monkeypatch.context() as patch:
        patch.setattr(process, "wait", wait)
        child.end()
    assert waits
    assert None not in waits
    process.wait(10)


PARENT = """
from pathlib import Path
import jax
from jax._src import xla_bridge
from jax_attn_bwd.bench import __main__
from jax_attn_bwd.bench.gate import command, plan, run, worker

steps = worker.load_plan(command.PLAN, {"platform": "gpu", "tiny": False})
assert len(steps) > 200 and plan.kernels("gpu")
assert not xla_bridge._backends, list(xla_bridge._backends)

def lost(start):
    raise run.Lost("no child")

command._greet = lost
assert command.main("gpu", Path("unused"), 1) == 2
assert jax.config.jax_platforms == "cpu"
assert not xla_bridge._backends
"""


def test_the_parent_touches_no_device():
    environment = {name: x for name, x in os.environ.items() if name != "JAX_PLATFORMS"}
    subprocess.run([sys.executable, "-c", PARENT], check=True, env=environment)


def test_children_share_a_folder_of_programs_and_torch_has_the_gpu_alone(monkeypatch):
    monkeypatch.setattr(command, "Child", lambda plan, settings, library, environment: environment)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    start = partial(command._start, "plan", {"platform": "gpu"}, "/a/folder")
    assert start("torch")["JAX_PLATFORMS"] == "cpu"
    assert "JAX_PLATFORMS" not in start("jax")
    assert start("jax")["JAX_COMPILATION_CACHE_DIR"] == "/a/folder"
    assert start("jax")["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
