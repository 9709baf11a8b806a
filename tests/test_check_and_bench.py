"""The two commands: they pass on a right operator, fail on a wrong one, and write what they promise."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_attn_bwd import check, ops
from jax_attn_bwd._core import console
from jax_attn_bwd.bench import __main__ as bench
from jax_attn_bwd.bench import measure, multi_head
from jax_attn_bwd.check import relative_error


def softmax_operator(**changes):
    """The softmax with two of its cases, so that a check takes seconds."""
    (operator,) = (o for o in ops.discover() if o.name == "scaled_masked_softmax")
    cases = tuple(c for c in operator.cases if c.name in ("mask_rows", "large"))
    return dataclasses.replace(operator, cases=cases, **changes)


@pytest.fixture
def only(monkeypatch):
    """`only(operator)`: the package then has that one; JAX's precision is put back afterwards."""
    precision = jax.config.jax_default_matmul_precision
    yield lambda operator: monkeypatch.setattr("jax_attn_bwd.ops.discover", lambda: (operator,))
    jax.config.update("jax_default_matmul_precision", precision)


@jax.custom_vjp
def one_percent_too_much(x):
    """The identity, with a gradient that is off by 1 %."""
    return x


one_percent_too_much.defvjp(
    lambda x: (x, None), lambda _, ct: (ct * jnp.asarray(1.01, ct.dtype),)
)  # fmt: skip


# ---------------------------------------------------------------------- check


def test_check_as_a_command_exits_0_and_prints_measurements_as_json():
    command = [sys.executable, "-m", "jax_attn_bwd.check", "scaled_masked_softmax"]
    done = subprocess.run(
        [*command, "--dtypes", "float32", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["jax"] == jax.__version__
    assert report["device"]
    rows = report["measurements"]
    assert all(row["ok"] and 0 <= row["error"] <= row["limit"] < 1e-4 for row in rows)
    assert {row["operator"] for row in rows} == {"scaled_masked_softmax"}
    assert {row["dtype"] for row in rows} == {"float32"}
    assert {row["quantity"] for row in rows} >= {"y", "dx", "dbias", "dscale", "dsink"}
    assert len({row["case"] for row in rows}) > 3


def test_check_of_a_right_operator_returns_0(only, capsys):
    only(softmax_operator())
    assert check.main(["--dtypes", "float64", "bfloat16"]) == 0
    printed = capsys.readouterr().out
    assert "0 misses" in printed
    assert "MISS" not in printed


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_check_finds_a_gradient_that_is_off_by_one_percent(only, capsys, dtype):
    call = softmax_operator().call

    def wrong(x, **arguments):
        return call(x=one_percent_too_much(x), **arguments)

    only(softmax_operator(call=wrong))
    assert check.main(["--dtypes", dtype, "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["measurements"]
    assert {row["quantity"] for row in rows if not row["ok"]} == {"dx"}
    assert all(row["ok"] for row in rows if row["quantity"] == "y")
    assert max(row["error"] for row in rows) == pytest.approx(0.01, rel=1e-3)


def test_check_finds_a_wrong_output_and_says_so_in_the_table(only, capsys):
    call = softmax_operator().call
    only(softmax_operator(call=lambda **arguments: tuple(1.001 * y for y in call(**arguments))))
    assert check.main(["--dtypes", "float32"]) == 1
    assert "MISS" in capsys.readouterr().out


def test_check_finds_a_nan(only, capsys):
    call = softmax_operator().call
    only(softmax_operator(call=lambda **arguments: tuple(y * jnp.nan for y in call(**arguments))))
    assert check.main(["--dtypes", "float32"]) == 1
    assert "MISS" in capsys.readouterr().out


def test_check_without_rich_prints_the_same_table_as_plain_text(only, capsys, monkeypatch):
    monkeypatch.setattr(console, "_RICH", False)
    only(softmax_operator())
    assert check.main(["--dtypes", "float32"]) == 0
    header, rule, *_ = (
        line for line in capsys.readouterr().out.splitlines() if line.startswith(("oper", "scal"))
    )
    assert header.split() == [
        "operator", "implementation", "dtype", "quantity", "error", "limit", "case", "verdict"
    ]  # fmt: skip
    assert rule.split()[0] == "scaled_masked_softmax"
    assert rule.split()[-1] == "ok"


def test_check_of_an_unknown_operator_is_refused_with_the_known(capsys):
    with pytest.raises(SystemExit) as caught:
        check.main(["softmaxx"])
    assert caught.value.code == 2
    assert "unknown operator ['softmaxx'], known are" in capsys.readouterr().err


def test_relative_error():
    nan, inf = np.nan, np.inf
    assert relative_error([1.0, -4.0], [1.0, -4.0]) == 0
    assert relative_error([1.0, -4.4], [1.0, -4.0]) == pytest.approx(0.1)  # of the largest
    assert relative_error([0.001], [0.0]) == pytest.approx(0.1)  # at least 0.01 counts as size
    assert relative_error([nan, inf, -inf, 2.0], [nan, inf, -inf, 2.0]) == 0
    assert relative_error([nan, 2.2], [nan, 2.0]) == pytest.approx(0.1)
    for got, expected in (
        ([nan], [1.0]), ([1.0], [nan]), ([inf], [-inf]), ([inf], [1.0]), ([1.0], [-inf]),
        ([nan], [inf]),
    ):  # fmt: skip
        assert relative_error(got, expected) == inf
    assert relative_error([1.0], [1.0, 1.0]) == inf  # never broadcast
    assert relative_error(np.zeros((0, 3)), np.zeros((0, 3))) == 0


# ---------------------------------------------------------------------- bench

CONTEXT = {"date", "platform", "device", "jax", "python", "jax_attn_bwd", "commit"}
FIELDS = {
    "case", "contender", "milliseconds", "ratio", "temporary_mib", "memory_ratio", "notes",
}  # fmt: skip


@pytest.mark.parametrize("operator", ["softmax", "dot_product"])
def test_bench_writes_json_and_a_plot(operator, tmp_path, capsys):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # for the peers
        bench.main([operator, "--quick", "--repeats", "1", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    assert path.stem == f"{operator}_cpu_jax{jax.__version__}"
    report = json.loads(path.read_text())
    assert report.keys() >= CONTEXT
    assert all(report[name] for name in CONTEXT)
    rows = report["rows"]
    assert all(row.keys() == FIELDS for row in rows)
    assert {"jax_attn_bwd", "jax.nn"} <= {row["contender"] for row in rows}
    assert all(row["milliseconds"] is None or row["milliseconds"] > 0 for row in rows)
    cases = {row["case"] for row in rows}
    assert len(cases) > 1
    for case in cases:  # ours comes first, and ratios are to it
        first = next(row for row in rows if row["case"] == case)
        assert first["ratio"] == first["memory_ratio"] == 1.0
    assert path.with_suffix(".png").stat().st_size > 1000
    assert str(path) in capsys.readouterr().out


@pytest.fixture
def measures_nothing(monkeypatch):
    """Whatever would be measured fails instead, and so does the gate."""

    def fail(*args):
        raise AssertionError("something was measured")

    monkeypatch.setattr(bench, "measure", fail)
    monkeypatch.setattr(bench.gate, "main", fail)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["sorting"], "invalid choice: 'sorting'"),
        ([], "give an operator"),
        (["softmax", "--gate", "cpu"], "give an operator, one of .*, or --gate"),
        (["softmax", "--repeats", "0"], "--repeats: must be at least 1, got 0"),
        (["softmax", "--minutes", "3"], "--minutes is the deadline of --gate"),
        (["--gate", "cpu", "--quick"], "--gate has its own sizes"),
        (["--gate", "cpu", "--repeats", "3"], "--gate has its own sizes and rounds"),
        (["--gate", "cpu", "--minutes", "nan"], "--minutes: must be positive and finite, got nan"),
        (["--gate", "cpu", "--minutes", "-1"], "--minutes: must be positive and finite, got -1"),
        (["--gate", "cpu", "--minutes", "0"], "--minutes: must be positive and finite, got 0"),
        (["--gate", "cpu", "--minutes", "inf"], "--minutes: must be positive and finite, got inf"),
    ],
    ids=lambda x: "_".join(x).replace("-", "") or "nothing" if isinstance(x, list) else "",
)
def test_bench_refuses_what_it_cannot_measure(argv, words, capsys, tmp_path, measures_nothing):
    with pytest.raises(SystemExit) as caught:
        bench.main([*argv, "--out", str(tmp_path / "new")])
    assert caught.value.code == 2
    assert re.search(words, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("argv", [["softmax", "--quick"], ["--gate", "cpu"]], ids=["quick", "gate"])
def test_bench_tries_nothing_into_the_shipped_measurements(argv, capsys, measures_nothing):
    with pytest.raises(SystemExit) as caught:
        bench.main(argv)
    assert caught.value.code == 2
    assert "give a folder with --out" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["softmax"], ["--gate", "gpu"]], ids=["operator", "gate"])
def test_bench_refuses_a_folder_it_cannot_write_to_before_measuring(
    argv, capsys, tmp_path, monkeypatch, measures_nothing
):
    file = tmp_path / "file"
    file.write_text("here already")
    for out in (file, file / "below"):
        with pytest.raises(SystemExit) as caught:
            bench.main([*argv, "--out", str(out)])
        assert caught.value.code == 2
        expected = f"--out must be a folder that can be written to, got {out}: "
        assert expected in capsys.readouterr().err
    monkeypatch.setattr(bench.os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(SystemExit):
        bench.main([*argv, "--out", str(tmp_path / "locked")])
    assert "locked: no permission" in capsys.readouterr().err


def contender(name, x, runs=None):
    def run():
        if runs is not None:
            runs.append(name)

    return measure.Contender(name, run, None if x is None else lambda: [np.asarray(x)])


def test_measure_refuses_contenders_that_disagree():
    runs = []
    case = measure.Case("two", [contender("ours", [1.0], runs), contender("peer", [1.01], runs)])
    with pytest.raises(RuntimeError, match=r"peer and ours disagree in 'two'.*nothing is timed"):
        measure.measure(case, repeats=1)
    assert runs == []  # correctness first


@pytest.mark.parametrize("wrong", [[np.nan], [np.inf], [1.0, 1.0]])
def test_measure_refuses_nan_inf_and_other_shapes(wrong):
    case = measure.Case("two", [contender("ours", [1.0]), contender("peer", wrong)])
    with pytest.raises(RuntimeError, match="disagree"):
        measure.measure(case, repeats=1)


def test_measure_refuses_ours_where_it_is_nan():
    """Whichever of the two it is."""
    case = measure.Case("two", [contender("ours", [np.nan]), contender("peer", [1.0])])
    with pytest.raises(RuntimeError, match="disagree"):
        measure.measure(case, repeats=1)


def test_measure_runs_the_contenders_in_turns():
    runs = []
    contenders = [contender("a", [1.0], runs), contender("b", [1.0], runs), contender("c", None)]
    rows = measure.measure(measure.Case("three", contenders), repeats=3)
    assert runs == ["a", "a", "b", "b"] * 3  # each timed call follows an untimed one
    assert [(row.case, row.contender) for row in rows] == [("three", c) for c in "abc"]
    assert rows[0].ratio == 1.0
    assert all(row.milliseconds >= 0 for row in rows)


def test_measure_times_nothing_of_a_case_that_is_about_memory():
    runs = []
    case = measure.Case("memory", [contender("a", [1.0], runs)], timed=False)
    (row,) = measure.measure(case, repeats=1)
    assert runs == []
    assert row.milliseconds is None


def test_compiled_contender_tells_its_memory():
    x = jnp.ones((256, 255))
    made = measure.compiled_contender("two products", lambda x: x @ (x.T @ x), x, note=3)
    assert made.temporary_bytes >= 255 * 255 * 8
    assert made.notes == {"note": 3}
    (result,) = made.results()
    np.testing.assert_array_equal(result, np.full((256, 255), 256 * 255))


def test_bench_tells_the_commit_of_this_package_alone(monkeypatch, tmp_path):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")

    def git(*command):
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        done = subprocess.run(
            ["git", *who, *command], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    package = tmp_path / "site" / "jax_attn_bwd"
    results = package / "bench" / "results"
    results.mkdir(parents=True)
    init = package / "__init__.py"
    init.write_text("")
    (tmp_path / "other.py").write_text("")
    monkeypatch.setattr(bench.jax_attn_bwd, "__file__", str(init))
    assert bench._commit() == "unknown"  # no repository
    git("init")
    git("add", "other.py")
    git("commit", "-m", "another project, in which this package is installed")
    assert bench._commit() == "unknown"
    git("add", "site")
    git("commit", "-m", "this package")
    commit = git("rev-parse", "--short", "HEAD")
    (results / "softmax.json").write_text("{}")  # what an earlier benchmark wrote
    assert bench._commit() == commit
    init.write_text("changed = True")
    assert bench._commit() == f"{commit}-dirty"


@pytest.mark.parametrize(("save", "mebibytes"), [("inputs", "0.5"), ("qkv", "2.0")])
def test_bench_counts_what_a_layer_keeps_beside_its_arguments(save, mebibytes):
    """The heads' output is 0.5 MiB, and so is each of q, k and v; the parameters would be 4 MiB more."""
    x, dout, params = multi_head._arrays(1, 256, 512, 8)
    ours = multi_head._ours(x, dout, params, save)
    assert ours.notes["saved beside the inputs"].startswith(f"{mebibytes} MiB (MegEngine ")
