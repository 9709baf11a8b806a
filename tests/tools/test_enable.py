"""`check --enable` on chips played by scripts and by the interpreter, with kernels that fail and hang."""

import dataclasses
import itertools
import json
import os
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import cudnn_twin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPERATORS, thorough

from jax_attn_bwd import explain, scaled_masked_softmax
from jax_attn_bwd._core import pallas, records, targets
from jax_attn_bwd.check import __main__ as command
from jax_attn_bwd.check import enable, worker

H200 = "NVIDIA H200"
slow_interpreter = thorough if jax.__version_info__ < (0, 12) else lambda test: test
CHIP = {"device": H200, "platform": "gpu", "driver": "580", "kernels": {"softmax": ["mosaic_gpu"]}}
X = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
CASE = "scaled_masked_softmax: a"

# A worker that knows its lines: `{job: [message, "hang" or "die", ...]}`.
PLAYED = """
    import json, os, signal, sys, time
    lines = json.loads(sys.argv[1])
    for job in sys.stdin:
        for line in lines[" ".join(json.loads(job))]:
            if line == "hang":
                time.sleep(60)
            elif line == "die":
                print("Fatal: an illegal memory access", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                print(json.dumps(line), flush=True)
"""


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch, unproven):
    monkeypatch.setenv("JAX_ATTN_BWD_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def play(tmp_path, monkeypatch, capsys):
    """`play({job: lines}, seconds) -> (exit code, what was printed, what went to stderr)`."""
    script = tmp_path / "played.py"
    script.write_text(textwrap.dedent(PLAYED))

    def run(lines, families=("softmax",), seconds=60.0):
        lines = {"chip": [{"answer": CHIP}], "time softmax xla": timed(2.0), **lines}
        monkeypatch.setattr(enable, "COMMAND", (sys.executable, "-I", str(script), json.dumps(lines)))
        return enable.run(families, seconds), *capsys.readouterr()

    return run


def timed(ms):
    return [{"answer": {"times": {CASE: ms}, "sizes": {CASE: [32768, 256]}}}]


def proved(failed=None, refused=None, cases=14):
    return [{"answer": {"failed": failed, "refused": refused, "cases": cases}}]


def reason():
    return explain(scaled_masked_softmax, X, platform=H200)["mosaic_gpu"]


def test_a_kernel_that_is_right_and_fast_is_picked_from_then_on(play):
    assert "there is no record" in reason()
    code, printed, _ = play({"prove softmax mosaic_gpu": proved(), "time softmax mosaic_gpu": timed(1.0)})
    assert code == 0
    assert reason() == "ok"
    assert "faster than xla at 1 of 1 sizes: 2 to 2 times" in " ".join(printed.split())
    file = records.path(H200, "softmax")
    assert f"wrote {file}" in printed.replace("\n", "")
    assert json.loads(file.read_text())["driver"] == "580"


def test_a_kernel_that_is_slow_is_not(play):
    code, printed, _ = play({"prove softmax mosaic_gpu": proved(), "time softmax mosaic_gpu": timed(3.0)})
    assert code == 0
    assert "slower than xla" in printed
    assert "3 ms to 2 ms of xla at the nearest size" in reason()


AT = {"does": "runs case a", "within": 0.3}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (proved("case a: dx: error 1, limit 0.1"), "case a: dx: error 1, limit 0.1"),
        ([AT, "hang"], "runs case a: it hung, for more than 0 s"),
        ([AT, "die"], "runs case a: the process ended, SIGKILL: Fatal: an illegal memory access"),
        ([AT, {"error": "ValueError: no"}], "runs case a: ValueError: no"),
    ],
    ids=["wrong", "hangs", "dies", "raises"],
)
def test_a_kernel_that_fails_is_not_and_those_after_it_are_proven(play, lines, words):
    chip = {**CHIP, "kernels": {"softmax": ["mosaic_gpu", "cudnn"]}}
    code, printed, _ = play({
        "chip": [{"answer": chip}],
        "prove softmax mosaic_gpu": lines,
        "prove softmax cudnn": proved(),
        "time softmax cudnn": timed(1.0),
    })  # fmt: skip
    assert code == 1
    assert "FAILED" in printed
    assert words in reason()
    known = records.record(H200, "softmax")
    assert known.kernels["cudnn"] == (None, {CASE: 1.0})


def test_a_kernel_that_hangs_while_it_is_timed_has_failed(play):
    code, *_ = play({"prove softmax mosaic_gpu": proved(), "time softmax mosaic_gpu": [AT, "hang"]})
    assert code == 1
    assert "it hung" in reason()


def test_a_kernel_that_takes_no_call_is_no_failure_and_is_not_kept(play):
    code, printed, _ = play({"prove softmax mosaic_gpu": proved(refused="it needs JAX 0.12", cases=0)})
    assert code == 0
    assert "cannot run" in printed
    assert "there is no record" in reason()


def test_what_the_time_does_not_reach_is_not_proven_and_no_failure(play):
    kept = {"written": "x", "kernels": {"mosaic_gpu": {"failed": "long ago", "times": {}}}, "sizes": {}}
    enable.write(H200, "softmax", kept)
    hangs = {"prove softmax mosaic_gpu": [{**AT, "within": 60}, "hang"]}
    code, printed, _ = play(hangs, seconds=1.5)
    assert code == 1
    assert "not reached" in printed
    assert "long ago" in reason()  # what was known stays


def test_without_a_chip_it_says_so(play):
    code, _, told = play({"chip": [{"answer": {**CHIP, "device": "cpu", "platform": "cpu", "kernels": {}}}]})
    assert code == 2
    assert "no kernel of softmax is for this cpu (cpu)" in told
    code, _, told = play({"chip": [{"does": "looks for a device", "within": 9}, {"error": "no driver"}]})
    assert code == 2
    assert "no device could be asked: looks for a device: no driver" in told


def test_a_folder_that_cannot_be_written_is_told_before_anything_runs(play, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAX_ATTN_BWD_CACHE", str(tmp_path / "file" / "folder"))
    code, _, told = play({"chip": ["die"]})
    assert code == 2
    assert told.startswith(
        f"check --enable: the folder of records, {tmp_path}/file/folder, cannot be written ("
    )
    assert "set JAX_ATTN_BWD_CACHE to one that can" in told


def test_two_processes_may_write_at_once():
    def write(number):
        kernels = {"mosaic_gpu": {"failed": str(number) * 5000, "times": {}}}
        enable.write(H200, "softmax", {"written": "x", "kernels": kernels, "sizes": {}})

    write(0)
    file, writers = records.path(H200, "softmax"), []
    for number in range(20):
        writers.append(threading.Thread(target=write, args=(number,)))
        writers[-1].start()
        assert json.loads(file.read_text())["device"] == H200
    for writer in writers:
        writer.join()
    assert list(file.parent.iterdir()) == [file]


def test_the_command_takes_operators_and_folders(monkeypatch):
    folders, asked = ["deformable", "dot_product", "graph", "linear_attention", "softmax"], []
    monkeypatch.setattr(enable, "run", lambda families, seconds: asked.append((families, seconds)) or 0)
    for argv in (["graph", "multi_head"], ["--seconds", "30"]):
        assert command.main(["--enable", *argv]) == 0
    assert asked[0] == (["graph", "dot_product"], 300.0)
    assert (sorted(asked[1][0]), asked[1][1]) == (folders, 30.0)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--enable", "edge_softmax"], "there is nothing to enable: edge_softmax has no kernels"),
        (["--enable", "--json"], "--enable settles the dtypes itself and prints a table: leave out"),
        (["--enable", "--seconds", "0"], "--seconds must be positive, and belongs to --enable"),
        (["--seconds", "9"], "--seconds must be positive, and belongs to --enable"),
    ],
)
def test_words_that_do_not_go_together_are_refused(argv, words, capsys):
    with pytest.raises(SystemExit) as caught:
        command.main(argv)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("picked", ["none", "mosaic_tpu"])
def test_a_plain_check_leaves_out_what_is_passed_over(monkeypatch, picked):
    """Unproven kernels may hang."""
    (operator,) = (o for o in OPERATORS if o.name == "scaled_masked_softmax")
    monkeypatch.setenv("JAX_ATTN_BWD_KERNELS", picked)
    with targets.aimed_at("v6e"):
        jobs, absent = command.plan([operator], ["float32", "float64"])
    dtypes = {dtype for _, name, _, dtype in jobs if name == "mosaic_tpu"}
    assert dtypes == ({"float32"} if picked == "mosaic_tpu" else set())
    assert {name for _, name, _ in absent} == {"mosaic_gpu", "mosaic_tpu"} - ({picked} if dtypes else set())


def dense(*names, **changes):
    """Dense attention with some of its cases, changed."""
    (operator,) = (o for o in OPERATORS if o.name == "dot_product_attention")
    cases = (c for c in operator.cases if c.name in names)
    return dataclasses.replace(operator, cases=tuple(dataclasses.replace(c, **changes) for c in cases))


def test_a_plain_check_on_a_gpu_runs_cudnn_where_it_is_supported():
    """It is no kernel of ours, so it need not be proven first."""
    with targets.aimed_at("H200"):
        jobs, absent = command.plan([dense("plain", "sink", "dropout")], ["bfloat16", "float32"])
    of = lambda name: {(case.name, dtype) for _, n, case, dtype in jobs if n == name}
    assert of("cudnn") == {("plain", "bfloat16"), ("sink", "bfloat16")}
    assert len(of("xla")) == 6
    assert {name for _, name, _ in absent} == {"mosaic_tpu", "mosaic_gpu"}


# ---------------------------------------------------------------------- what the worker does


@pytest.fixture
def softmax(monkeypatch):
    """`softmax(change)`: the one operator of the package, with one case; its kernels are the portable path.

    `change(y, x)` is what they give instead of `y`.
    """
    (operator,) = (o for o in OPERATORS if o.name == "scaled_masked_softmax")
    (case,) = (c for c in operator.cases if c.name == "second_mask")
    case = dataclasses.replace(case, tags=frozenset({"large", "poison", "timed"}))
    monkeypatch.setattr(worker, "DTYPES", ("float32", "bfloat16"))

    def install(change=lambda y, x: y):
        def call(implementation=None, **arguments):
            given = {} if implementation is None else {"implementation": "xla"}
            return tuple(change(y, arguments["x"]) for y in operator.call(**arguments, **given))

        played = dataclasses.replace(operator, cases=(case,), call=call)
        monkeypatch.setattr(worker.ops, "discover", lambda: (played,))

    with pallas.interpreting("mosaic_tpu"):
        yield install


def ignored(does, within):
    pass


def failure():
    return worker.prove(ignored, "softmax", "mosaic_tpu")["failed"]


def test_the_worker_proves_and_times_a_right_kernel(softmax):
    softmax()
    told = []
    found = worker.prove(lambda does, within: told.append(does), "softmax", "mosaic_tpu")
    assert found == {"failed": None, "refused": None, "cases": 2}
    case = "scaled_masked_softmax: second_mask, {} ({} of 2)"
    cases = case.format("float32", 1), case.format("bfloat16", 2)
    assert told == [f"{what} {about}" for about in cases for what in ("compiles", "runs")]
    found = worker.timings(ignored, "softmax", "xla")
    assert found["sizes"] == {"scaled_masked_softmax: second_mask": (48, 4)}
    assert found["times"]["scaled_masked_softmax: second_mask"] > 0


def test_the_worker_finds_a_wrong_value(softmax):
    softmax(lambda y, x: 1.01 * y)
    found = failure()
    assert found.startswith("scaled_masked_softmax: second_mask, float32: dx: error 0.01, limit ")
    assert "; y: error 0.01, limit " in found


def test_the_worker_finds_what_differs_from_run_to_run(softmax):
    runs = itertools.count()

    def tick(y, x):
        now = jax.pure_callback(lambda: jnp.float32(1e-9 * next(runs)), jax.ShapeDtypeStruct((), "float32"))
        return y + jax.lax.stop_gradient(now).astype(y.dtype)

    softmax(tick)
    assert failure() == "scaled_masked_softmax: second_mask, float32: y differs from run to run"


@thorough
def test_the_worker_does_not_ask_cudnn_for_equal_bits(monkeypatch):
    """A twin plays it, and adds in any order; its values and NaN where nothing looks count as before."""
    runs, twin = itertools.cycle((0, 0, 1 / 256, 1 / 256)), cudnn_twin.backward  # a run calls it twice

    def backward(*args):
        dq, *rest = twin(*args)
        now = jax.pure_callback(lambda: np.float32(next(runs)), jax.ShapeDtypeStruct((), "float32"))
        return (dq.astype(now.dtype) * (1 + now)).astype(dq.dtype), *rest

    monkeypatch.setattr(cudnn_twin, "backward", backward)
    options = {"is_causal": True, "scale": 0.3}  # of no other test, which would have the twin traced
    operator = dense("lengths", tags=frozenset({"poison"}), options=options)
    call = worker.Call(operator, "cudnn", operator.cases[0], "bfloat16")
    with pallas.interpreting("cudnn"):
        aim, program = worker._prepare(call)
    assert worker.examined(call, aim, program) == ""
    runs = itertools.repeat(1 / 8)
    assert worker.examined(call, aim, program).startswith("dquery: error 0.1")
    runs = itertools.chain([0] * 4, itertools.repeat(np.nan))  # what follows the clean run
    assert worker.examined(call, aim, program) == "NaN where nothing looks: dquery differs, dquery is NaN"


def test_the_worker_finds_that_poison_reaches_a_result(softmax):
    softmax(lambda y, x: y + 0 * jax.lax.stop_gradient(x).sum())
    assert "NaN where nothing looks: y differs" in failure()


def test_a_gradient_of_what_nothing_reads_is_found_though_it_is_finite():
    """Everywhere else, and where a cotangent is hidden, anything may stand."""
    hidden = {"x": np.array([[True, False], [False, False]]), "y": np.array([True, False])}
    x = np.ones((2, 2, 1), np.float32)
    poison = worker.Poison(hidden, ({"x": x}, (x,)), ({"x": x}, (x,)))
    found = lambda dx: poison.reached({"y": x, "dx": dx}, {"y": x, "dx": dx}, False)
    gradient = np.array([[0, 1], [2, 3]], np.float32)[..., None]
    assert found(gradient) == ""
    assert found(gradient + np.float32(1e-9)) == "dx is not 0 there"
    assert found(gradient * [[[1], [np.nan]]]) == "dx is NaN"  # without poison, too


def test_an_error_that_is_not_a_number_is_wrong():
    aim = SimpleNamespace(expected={"y": np.ones(2)}, limits={"y": 0.1})
    assert worker.wrong_values(aim, {"y": np.array([1, 1.05])}) == ""
    assert "1 NaN" in worker.wrong_values(aim, {"y": np.array([1, np.nan])})


def test_the_worker_says_what_no_kernel_takes(softmax, monkeypatch):
    softmax()
    monkeypatch.setattr(worker, "DTYPES", ("float16",))
    found = worker.prove(ignored, "softmax", "mosaic_tpu")
    assert (found["failed"], found["cases"]) == (None, 0)
    assert "float16" in found["refused"]
    assert worker.timings(ignored, "softmax", "mosaic_gpu") == {"times": {}, "sizes": {}}


INTERPRETED = """
    import cases
    from jax_attn_bwd import ops
    from jax_attn_bwd.check import worker
    from jax_attn_bwd._core import pallas, targets
    targets.platform, targets.device_kind = lambda: "tpu", lambda: "TPU v6 lite"
    worker.PROVED, worker.TIMED, worker.DTYPES = ("second",), "second", ("float32",)
    worker.REPEATS, worker.COMPILE_SECONDS, worker.LAUNCH_SECONDS = 1, 250.0, 250.0
    known = cases.discover()
    ops.discover = lambda: known
    with pallas.interpreting("mosaic_tpu"):
        worker.main()
"""


@pytest.mark.kernel
@slow_interpreter
def test_a_chip_played_by_the_interpreter(tmp_path, monkeypatch, capsys):
    script = tmp_path / "played.py"
    script.write_text(textwrap.dedent(INTERPRETED))
    folders = (Path(worker.__file__).parents[2], Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
    monkeypatch.setattr(enable, "COMMAND", (sys.executable, str(script)))
    assert enable.run(["softmax"]) == 0, capsys.readouterr()
    known = records.record("TPU v6 lite", "softmax")
    assert known.kernels["mosaic_tpu"].failed is None
    assert set(known.kernels["mosaic_tpu"].times) < set(known.kernels["xla"].times) == set(known.sizes)
