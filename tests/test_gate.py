"""The GPU gate on a CPU at tiny size: it finds what is wrong, outlives what crashes, and keeps the time."""

import dataclasses
import json
import os
import re
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_attn_bwd import ops
from jax_attn_bwd.bench import __main__ as bench
from jax_attn_bwd.bench.gate import (
    cases,
    command,
    correctness,
    peers,
    plan,
    report,
    run,
    timing,
    worker,
)  # fmt: skip
from jax_attn_bwd.bench.gate.steps import FAILED, NOT_REACHED, OK, REFUSED, Row, Step

SOFTMAX = next(o for o in ops.discover() if o.name == "scaled_masked_softmax")
ATTENTION = next(o for o in ops.discover() if o.name == "dot_product_attention")


def case(operator, name):
    return next(c for c in operator.cases if c.name == name)


def scaled(factor, first):
    """The identity; its gradient is off by `factor`."""

    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, None), lambda _, ct: ((ct * jnp.asarray(factor, ct.dtype)),))
    return lambda **arguments: {**arguments, first: identity(arguments[first])}


def with_gradient_off_by(operator, factor):
    change = scaled(factor, operator.differentiable[0])
    return dataclasses.replace(operator, call=lambda **a: operator.call(**change(**a)))


# ---------------------------------------------------------------------- what the steps find


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("operator", "name"), [(SOFTMAX, "mask_rows"), (ATTENTION, "lengths"), (ATTENTION, "dropout")]
)
def test_a_right_operator_is_right_within_the_limit_of_check(operator, name, dtype):
    rows = list(correctness.compare(operator, "xla", case(operator, name), dtype))
    assert {row.status for row in rows} == {OK}
    quantities = {row.case.split()[-1] for row in rows}
    assert quantities >= {*operator.outputs, f"d{operator.differentiable[0]}"}
    assert all(0 <= row.figures["error"] <= row.figures["limit"] < 0.1 for row in rows)


@pytest.mark.parametrize(("operator", "name"), [(SOFTMAX, "mask_rows"), (ATTENTION, "plain")])
def test_a_wrong_gradient_is_found_and_named(operator, name):
    wrong = with_gradient_off_by(operator, 1.1)
    rows = list(correctness.compare(wrong, "xla", case(operator, name), "bfloat16"))
    failed = {row.case.split()[-1] for row in rows if row.status == FAILED}
    assert failed == {f"d{operator.differentiable[0]}"}


def test_a_nan_is_found():
    wrong = with_gradient_off_by(SOFTMAX, np.nan)
    rows = list(correctness.compare(wrong, "xla", case(SOFTMAX, "plain"), "float32"))
    assert {row.case: row.status for row in rows} == {
        "plain float32 y": OK, "plain float32 dx": FAILED,
    }  # fmt: skip


def test_what_an_implementation_cannot_run_is_refused_with_its_reason():
    for step in (correctness.compare, correctness.repeat):
        (row,) = step(SOFTMAX, "triton", case(SOFTMAX, "plain"), "float32")
        assert row.status == REFUSED
        assert "no such implementation" in row.note


def test_results_that_change_from_run_to_run_are_found():
    def drifting(**arguments):
        def next_number():
            drifting.count += 1
            return np.float32(drifting.count)

        (y,) = SOFTMAX.call(**arguments)
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return (y + jax.lax.stop_gradient(jax.pure_callback(next_number, shape)),)

    drifting.count = 0
    plain = case(SOFTMAX, "plain")
    (row,) = correctness.repeat(SOFTMAX, "xla", plain, "float32")
    assert (row.status, row.figures) == (OK, {"runs": float(correctness.REPEATS)})
    wrong = dataclasses.replace(SOFTMAX, call=drifting)
    (row,) = correctness.repeat(wrong, "xla", plain, "float32")
    assert row.status == FAILED
    assert "not the same bits in 20 runs: ['y']" in row.note


POISONED = [
    pytest.param(operator, poisoned, id=f"{operator.name}-{poisoned.case.name}")
    for operator in (SOFTMAX, ATTENTION)
    for poisoned in cases.poisoned(operator, tiny=True)
]


@pytest.mark.parametrize(("operator", "poisoned"), POISONED)
def test_poison_is_not_read_and_would_be_noticed(operator, poisoned):
    (row,) = correctness.poison(operator, "xla", poisoned, "bfloat16")
    assert row.status == OK, row

    names = set(poisoned.hidden(poisoned.case.arrays("bfloat16"))) - {"dout"}

    def reading(**arguments):
        out, *rest = operator.call(**arguments)
        read = sum(arguments[name].sum() for name in names)
        return (out + 0 * read.astype(out.dtype), *rest)

    changed = dataclasses.replace(operator, call=reading)
    (row,) = correctness.poison(changed, "xla", poisoned, "bfloat16")
    assert row.status == FAILED
    assert "changed by poison" in row.note


@pytest.mark.parametrize("operator", [SOFTMAX, ATTENTION], ids=lambda o: o.name)
def test_poison_cases_hide_something_at_full_size_too(operator):
    for poisoned in cases.poisoned(operator, tiny=False):
        hidden = poisoned.hidden(poisoned.case.arrays("bfloat16"))
        assert all(0 < where.mean() < 1 for where in hidden.values()), poisoned.case.name


# ---------------------------------------------------------------------- times


def test_operations_are_counted_as_usual():
    full = timing.Attention("forward", 8192, 128, B=2, N=16)
    assert full.operations == 4 * 2 * 16 * 8192**2 * 128
    causal = dataclasses.replace(full, is_causal=True, direction="backward")
    assert causal.operations == 2.5 * full.operations / 2
    window = dataclasses.replace(full, is_causal=True, window=1, T=5)
    assert window.operations == 4 * 2 * 16 * 128 * (1 + 2 * 4)  # a row sees itself and one before


def test_the_table_is_16k_tokens_of_width_2048():
    works = timing.workloads(tiny=False)
    assert len({work.name for work in works}) == len(works) == 13
    short = [w for w in works if w.T == 8192]
    assert {(w.B * w.T, w.N * w.H) for w in short} == {(16384, 2048)}
    assert any(w.window == 1024 and w.T == 16384 and w.H == 64 for w in works)
    assert any(w.T == 32768 and w.deterministic for w in works)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("contender", ["xla", "jax.nn[xla]"])
def test_attention_is_timed_after_it_agrees(direction, contender):
    work = timing.Attention(direction, 40, 16, N=2, is_causal=True, window=7)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # for the peer
        (row,) = timing.attention(work, contender)
    assert row.status == OK, row.note
    assert row.figures["ms"] > 0
    assert row.figures["TFLOP/s"] == pytest.approx(work.operations / row.figures["ms"] / 1e9)


def test_a_contender_that_disagrees_is_not_timed(monkeypatch):
    work = timing.Attention("forward", 24, 16, N=2)
    right = timing.ours(work, "xla")
    monkeypatch.setattr(timing, "ours", lambda w, name: lambda: 1.05 * right())
    timing._portable_result.cache_clear()
    monkeypatch.setattr(timing, "_portable_result", lambda w: timing._numbers(right()))
    (row,) = timing.attention(work, "xla")
    assert row.status == FAILED
    assert "disagrees" in row.note
    assert "ms" not in row.figures


def test_a_peer_that_is_absent_or_fails_is_no_fault(monkeypatch):
    work = timing.Attention("forward", 24, 16, N=2)
    (row,) = timing.attention(work, "jax.nn[cudnn]")
    assert row.status == REFUSED
    assert "cuDNN needs an NVIDIA GPU" in row.note

    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(peers, "attention", fail)
    (row,) = timing.attention(work, "tokamax")
    assert row.status == REFUSED
    assert re.fullmatch(r"RuntimeError at test_gate.py:\d+: out of memory", row.note)
    monkeypatch.setattr(timing, "ours", fail)
    step = Step("time", "ours", "w", lambda: list(timing.attention(work, "xla")))
    (row,) = worker.execute(step)
    assert row.status == FAILED


def test_softmax_is_timed_beside_a_copy():
    contenders = timing.softmax_contenders(("xla", "triton"))
    rows = list(timing.softmax(64, "float32", contenders, 4096))
    by = {(row.subject, row.case): row for row in rows}
    assert by["copy", "softmax 64 float32"].figures["GB/s"] > 0
    for who in ("scaled_masked_softmax[xla]", "jax.nn.softmax"):
        for direction in ("forward", "backward"):
            row = by[who, f"softmax {direction} 64 float32"]
            assert row.status == OK
            share = row.figures["GB/s"] / by["copy", "softmax 64 float32"].figures["GB/s"]
            assert row.figures["share of the copy"] == pytest.approx(share)
    refused = by["scaled_masked_softmax[triton]", "softmax forward 64 float32"]
    assert refused.status == REFUSED


def test_the_portable_path_is_put_beside_autodiff_of_the_definition():
    ours, plain = timing.portable(SOFTMAX, cases.bench(SOFTMAX, tiny=True), "float32")
    assert ours.subject == "scaled_masked_softmax[xla]"
    assert "autodiff" in plain.subject
    assert ours.figures.keys() == plain.figures.keys() == {"ms", "temp MiB"}


# ---------------------------------------------------------------------- the plan


def test_the_plan_names_every_kernel_case_once():
    steps = worker.load_plan(command.PLAN, {"platform": "cpu", "tiny": False})
    for operator in (SOFTMAX, ATTENTION):
        for c in operator.tagged("ci", "check", "edge", "second"):
            assert f"correctness {operator.name}[xla] {c.name} bfloat16" in {s.name for s in steps}
        kinds = {s.kind for s in steps if s.subject == f"{operator.name}[xla]" and s.phase == 0}
        assert kinds == {"correctness", "poison", "repeat"}
    assert any(s.library == "torch" for s in steps)
    with pytest.raises(ValueError, match="different names"):
        worker.load_plan("test_gate:same_twice", {})


def same_twice():
    return [Step("time", "a", "b", list), Step("time", "a", "b", list)]


def test_kernels_of_a_gpu_are_those_of_its_platform():
    found = {(o.name, name) for o, name in plan.kernels("gpu")}
    expected = {
        (o.name, i.name)
        for o in ops.discover() for i in o.implementations if i.platform == "gpu"
    }  # fmt: skip
    assert found == expected
    assert {name for _, name in plan.kernels("cpu")} == {"xla"}


# ---------------------------------------------------------------------- child processes and the clock


def good(name):
    return [Row("correctness", "f[xla]", name, figures={"error": 0.0, "limit": 1.0})]


def eventful(platform, tiny):
    """Steps of which some hang, crash or raise; `platform` and `tiny` are as for the real plan."""

    def step(name, action, seconds=60.0, **more):
        return Step("correctness", "f[xla]", name, action, seconds, **more)

    def fail():
        raise FloatingPointError("wrong result")

    return [
        step("first", partial(good, "first")),
        step("raises", fail),
        step("crashes", os.abort),
        step("after a crash", partial(good, "after a crash")),
        step("hangs", partial(time.sleep, 600), 1.0),
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
    status = command.main("cpu", tmp_path, 5, "test_gate:eventful")
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
    assert rows["hangs"]["note"] == "no answer in 1 s"
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
    steps = [wait, *sequence("later"), *sequence("timed", phase=1, alone=True)]
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


# ---------------------------------------------------------------------- the report


def environment(**more):
    return {"platform": "gpu", "device": "NVIDIA H200", "jax": "0.11.2", "commit": "abc", **more}


ROWS = [
    Row("correctness", "f[mosaic_gpu]", "a bfloat16 out", figures={"error": 0.5, "limit": 1.0}),
    Row("time", "f[mosaic_gpu]", "forward", figures={"ms": 1.25, "TFLOP/s": 500.0}),
]


def test_a_passed_gate_has_no_faults_and_says_so(tmp_path):
    path = report.write(tmp_path, environment(), ROWS, ["f[mosaic_gpu]"])
    assert path.name == "nvidia_h200.json"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["nvidia_h200.json", "nvidia_h200.md"]
    document = json.loads(path.read_text())
    assert document["passed"]
    assert document["rows"][1]["figures"] == {"ms": 1.25, "TFLOP/s": 500.0}
    page = path.with_suffix(".md").read_text()
    assert "| f[mosaic_gpu] | correctness | 1 | 0 | 0 | 0 | 0.50 |" in page
    assert "| forward | f[mosaic_gpu] | 1.250 | 500 |" in page
    assert "NVIDIA H200: passed" in page


@pytest.mark.parametrize(
    ("rows", "proven", "said"),
    [
        ([Row("time", "f[mosaic_gpu]", "w", FAILED, note="bad")], ["f[mosaic_gpu]"], "bad"),
        ([Row("repeat", "f[mosaic_gpu]", "w", NOT_REACHED)], ["f[mosaic_gpu]"], "not reached"),
        ([], ["f[mosaic_gpu]", "g[mosaic_gpu]"], "g[mosaic_gpu]: nothing of it was shown"),
        ([Row("correctness", "g", "c", REFUSED)], ["g"], "g: nothing of it was shown"),
        ([], [], "no kernel is registered"),
    ],
)
def test_faults(rows, proven, said):
    found = report.faults([*ROWS, *rows], proven)
    assert any(said in sentence for sentence in found)


def test_peers_that_were_not_reached_are_listed_but_no_fault():
    row = Row("time", "tokamax", "w", NOT_REACHED)
    assert report.faults([*ROWS, row], ["f[mosaic_gpu]"]) == []
    assert "## Not reached" in report.markdown(environment(), [*ROWS, row], [])


def test_infinite_errors_are_valid_json(tmp_path):
    row = Row("correctness", "f", "c", FAILED, {"error": np.inf, "limit": 1.0})
    path = report.write(tmp_path, environment(), [row], ["f"])
    text = path.read_text()
    assert json.loads(text)["rows"][0]["figures"]["error"] == "inf"
    assert "Infinity" not in text


# ---------------------------------------------------------------------- the command


def test_without_a_gpu_one_sentence_and_status_2(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert bench.main(["--gate", "gpu", "--out", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("--gate gpu needs an NVIDIA GPU; JAX finds ")
    assert len(captured.err.splitlines()) == 1
    assert not captured.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "argv", [["softmax", "--gate", "gpu"], ["--gate", "cpu"], ["--gate", "tpu"], []]
)
def test_the_gate_excludes_an_operator(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        bench.main(argv)
    assert caught.value.code == 2
