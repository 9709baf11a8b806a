"""The GPU gate on a CPU at tiny size: what its steps find and time, its plan, its report."""

import dataclasses
import json
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jax_attn_bwd import ops
from jax_attn_bwd.bench import __main__ as bench
from jax_attn_bwd.bench.gate import (
    cases,
    command,
    correctness,
    peers,
    plan,
    report,
    timing,
    worker,
)  # fmt: skip
from jax_attn_bwd.bench.gate.steps import FAILED, NOT_REACHED, OK, REFUSED, SKIPPED, Row, Step

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
    (failed,) = (row for row in rows if row.status == FAILED)
    assert failed.case.split()[-1] == f"d{operator.differentiable[0]}"
    assert 0 < failed.figures["wrong share"] <= 1
    assert failed.figures["NaN"] == 0
    assert failed.note.startswith("worst at (")


def test_a_row_of_wrong_results_says_where_they_are():
    expected = np.arange(24.0).reshape(2, 3, 4) + 1
    got = expected.copy()
    got[1, 2, 3], got[1, 0, 3], got[1, 0, 1] = 30, np.nan, 14.1
    figures, note = correctness.wrong_entries(got, expected, 0.05)
    assert figures == {"wrong share": 2 / 24, "NaN": 1.0}
    assert note == (
        "worst at (1, 0, 3): nan, expected 16; "
        "wrong along the axes of (2, 3, 4): 1..1 (1), 0..2 (2), 3..3 (1)"
    )
    got[1, 0, 3] = -np.inf
    assert "(1, 0, 3): -inf" in correctness.wrong_entries(got, expected, 0.05)[1]
    assert correctness.wrong_entries(got, np.full_like(got, np.nan), 0.05)[0]["wrong share"] == 1


def test_some_gradients_alone():
    """As the probes ask for them: each launches one kernel more than the forward."""
    for wanted in ((), ("key", "value")):
        rows = [*correctness.compare(ATTENTION, "xla", case(ATTENTION, "plain"), "bfloat16",
                                     "probe", wanted, " alone")]  # fmt: skip
        names = {"out", "lse", *(f"d{name}" for name in wanted)}
        assert {row.case for row in rows} == {f"plain bfloat16 alone {name}" for name in names}
        assert {(row.kind, row.status) for row in rows} == {("probe", OK)}


def test_a_nan_is_found():
    wrong = with_gradient_off_by(SOFTMAX, np.nan)
    rows = list(correctness.compare(wrong, "xla", case(SOFTMAX, "plain"), "float32"))
    assert {row.case: row.status for row in rows} == {
        "plain float32 y": OK, "plain float32 dx": FAILED,
    }  # fmt: skip
    assert max(row.figures.get("NaN", 0) for row in rows) > 0


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


@pytest.mark.parametrize(
    ("free", "fits"), [(6 * 2**20, True), (5 * 2**20, False), (None, True), (2**40, True)]
)
def test_a_peer_needs_memory_that_is_free(free, fits, monkeypatch):
    """4 MiB of what the process holds are in use, and 1 MiB of it is not."""
    stats = {"bytes_limit": 2**30, "bytes_in_use": 4 * 2**20, "pool_bytes": 5 * 2**20}
    device = SimpleNamespace(memory_stats=lambda: stats, local_hardware_id=0)
    monkeypatch.setattr(peers.jax, "devices", lambda: [device])
    monkeypatch.setattr(peers, "_free_bytes", lambda gpu: free)
    needed = SimpleNamespace(temp_size_in_bytes=4 * 2**20, output_size_in_bytes=3 * 2**20)
    program = SimpleNamespace(memory_analysis=lambda: needed)
    monkeypatch.setattr(peers.progress, "compiled", lambda function, *args: program)
    if fits:
        assert peers._fitting(None) is program
        stats["bytes_limit"] = 10 * 2**20
    with pytest.raises(peers.Absent, match=r"it needs 0\.0 GiB of 0\.0 GiB free"):
        peers._fitting(None)


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
        kinds = {s.kind for s in steps if s.subject == f"{operator.name}[xla]" and s.phase < 2}
        assert kinds == {"probe", "correctness", "poison", "repeat"}
    assert any(s.library == "torch" for s in steps)
    with pytest.raises(ValueError, match="different names"):
        worker.load_plan("test_gate:same_twice", {})


def same_twice():
    return [Step("time", "a", "b", list), Step("time", "a", "b", list)]


def test_each_kernel_is_probed_before_anything_else():
    steps = worker.load_plan(command.PLAN, {"platform": "gpu", "tiny": False})
    probes = [s for s in steps if s.kind == "probe"]
    assert steps[: len(probes)] == probes
    assert {s.phase for s in probes} == {0}
    assert not any(s.phase == 0 for s in steps[len(probes) :])
    kernels = {s.needs[-1] for s in steps if s.needs}
    assert {s.needs[-1] for s in probes} == kernels
    assert kernels == {
        "attention forward", "attention backward", "attention bias", "attention any order",
        "softmax forward", "softmax backward",
    }  # fmt: skip
    ran = [s for s in steps if "[mosaic_gpu]" in s.subject]
    assert all(s.needs for s in ran)
    assert all(s.instead for s in ran if s.kind == "correctness")


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the fused kernel needs JAX 0.11")
def test_cases_in_any_order_are_in_the_first_phase_and_run_the_fused_kernel():
    steps = worker.load_plan(command.PLAN, {"platform": "gpu", "tiny": False})
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    types = (AxisType.Explicit,)
    mesh = AbstractMesh((1,), ("x",), axis_types=types, abstract_device=device)
    operator, made = plan._any_order(ATTENTION), cases.any_order(tiny=False)
    for c in made:
        (step,) = (s for s in steps if s.case == f"{c.name} bfloat16")
        assert step.phase == plan.FIRST
        arrays, options = c.arrays("bfloat16"), {**c.options, "implementation": "mosaic_gpu"}
        shape = arrays["query"].shape
        cts = jnp.zeros(shape, jnp.bfloat16), jnp.zeros(shape[:-1], jnp.float32)
        function = correctness.run(operator, operator.call, arrays, options)
        with jax.sharding.use_abstract_mesh(mesh):
            program = str(jax.make_jaxpr(function)(arrays, cts))
        assert "attention_dkey_dquery_dvalue" in program, c.name


@pytest.mark.parametrize("c", cases.any_order(tiny=True), ids=lambda c: c.name)
def test_cases_in_any_order_against_the_definition(c):
    rows = list(correctness.compare(plan._any_order(ATTENTION), "xla", c, "bfloat16"))
    assert {row.status for row in rows} == {OK}


def test_kernels_of_a_gpu_are_those_of_its_platform():
    found = {(o.name, name) for o, name in plan.kernels("gpu")}
    expected = {
        (o.name, i.name)
        for o in ops.discover() for i in o.implementations if i.platform == "gpu"
    }  # fmt: skip
    assert found == expected
    assert {name for _, name in plan.kernels("cpu")} == {"xla"}


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
    assert "| f[mosaic_gpu] | correctness | 1 | 0 | 0 | 0 | 0 | 0.50 |" in page
    assert "| forward | f[mosaic_gpu] | 1.250 | 500 |" in page
    assert "NVIDIA H200: passed" in page


def test_a_run_with_steps_to_come_is_not_finished(tmp_path):
    steps = [Step("correctness", "f[mosaic_gpu]", name, list) for name in ("a", "b")]
    rows = [dataclasses.replace(ROWS[0], step=steps[0].name)]
    write = partial(report.write, tmp_path, environment())
    path = write(rows, ["f[mosaic_gpu]"], steps)
    document = json.loads(path.read_text())
    assert (document["passed"], document["finished"]) == (False, False)
    assert document["rows"][1]["status"] == NOT_REACHED
    page = path.with_suffix(".md").read_text()
    assert "NVIDIA H200: not finished" in page
    assert "* correctness of f[mosaic_gpu], b" in page
    document = json.loads(write(rows, ["f[mosaic_gpu]"], steps[:1]).read_text())
    assert (document["passed"], document["finished"]) == (True, True)


@pytest.mark.parametrize(
    ("rows", "proven", "said"),
    [
        ([Row("time", "f[mosaic_gpu]", "w", FAILED, note="bad")], ["f[mosaic_gpu]"], "bad"),
        ([Row("repeat", "f[mosaic_gpu]", "w", NOT_REACHED)], ["f[mosaic_gpu]"], "not reached"),
        ([Row("repeat", "f", "w", SKIPPED)], ["f[mosaic_gpu]"], "f: 1 proofs skipped: hung"),
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
    assert "## Not reached" in report.markdown(environment(), [*ROWS, row], [], "passed")


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
