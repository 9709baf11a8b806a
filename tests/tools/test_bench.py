"""`python -m tests.bench`: correctness first, then times; what it writes, and where."""

import dataclasses
import json
import shutil
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench import __main__ as bench
from bench import compiling, measure, operators, peers, plots
from bench import report as report_module
from cases import multi_head as named
from cases import shapes
from helpers import OPERATORS, thorough

from jax_attn_bwd import MultiHeadAttentionParams

WIDE = dict(B=(1,), T=256, S=256, N=8, K=8, H=64, Hv=64, Eq=512, Ek=512, Ev=512, Eo=512)
CONTEXT = {"date", "platform", "device", "jax", "python", "jax_attn_bwd", "commit"}
FIELDS = {"case", "contender", "milliseconds", "ratio", "temporary_mib", "memory_ratio", "spread", "notes"}


@pytest.mark.parametrize(
    ("operator", "options"),
    [
        ("programs", ()),
        ("mods", ("--only", "tree")),
        *(
            pytest.param(o, (), marks=thorough)
            for o in ("compiling", "softmax", "dot_product", "multi_head", "deformable", "graph")
        ),
    ],
)
def test_bench_writes_json_and_a_plot(operator, options, tmp_path, capsys):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # for the peers
        bench.main([operator, *options, "--quick", "--repeats", "1", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    assert path.stem == f"{operator}_cpu_jax{jax.__version__}"
    report = json.loads(path.read_text())
    assert report.keys() >= CONTEXT
    assert all(report[name] for name in (*CONTEXT, "finished"))
    rows = report["rows"]
    assert all(row.keys() == FIELDS for row in rows)
    assert len({row["contender"] for row in rows}) > 1
    assert all("refused" not in row["notes"] for row in rows)
    assert report_module.read(path) == [report_module.Row(**row) for row in rows]
    assert all(row["milliseconds"] is None or row["milliseconds"] > 0 for row in rows)
    for case in {row["case"] for row in rows}:  # ours comes first, and ratios are to it
        first = next(row for row in rows if row["case"] == case)
        assert first["ratio"] == 1.0
        assert first["memory_ratio"] == (None if operator == "compiling" else 1.0)
    assert path.with_suffix(".png").stat().st_size > 1000
    assert str(path) in capsys.readouterr().out


@pytest.mark.parametrize("label", compiling.ATTENTIONS)
def test_a_process_tells_the_seconds_of_compiling(label, capsys):
    """Of what is quickly compiled here, in this process."""
    start = time.perf_counter()
    compiling.main(*compiling.QUICK, label)
    assert 0 < float(capsys.readouterr().out) < time.perf_counter() - start


def test_a_picture_says_who_was_refused_and_which_bars_are_ours(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures, Row = [], report_module.Row
    monkeypatch.setattr(pyplot, "close", figures.append)
    rows = [
        Row("large", "jax_attn_bwd", 2.0, 1.0),
        Row("large", "our option", 4.0, 2.0),
        Row("large", "torch 2", 3.0, 1.5),
        Row("large", "jax.nn", notes={"refused": "holds planes of 0.5 GiB each"}),
        Row("alone", "jax_attn_bwd", 1.0, 1.0),
    ]
    title = plots.title("dense", "", {"device": "CPU", "jax": "1", "torch": "2.13.0+cpu"})
    plots.ratios(rows, title, tmp_path / "plot.png")
    (figure,) = figures
    (axes,), (legend,) = figure.axes, figure.legends
    assert axes.get_title() == "dense: CPU,\nJAX 1, torch 2.13.0 built for CPUs"
    assert axes.get_xlabel().endswith("right of 1 ours is faster")
    shown = [text.get_text() for text in axes.texts]
    assert shown == ["2.00  (4 ms)", "1.50  (3 ms)", "jax.nn refused: holds planes of 0.5 GiB each"]
    assert [text.get_text() for text in legend.get_texts()] == ["our option (ours, too)", "torch 2"]


@thorough
def test_scaling_is_over_sizes(tmp_path, capsys):
    bench.main(["softmax", "--scaling", "--quick", "--repeats", "1", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("softmax_scaling_*.json")
    (series,) = json.loads(path.read_text())["slopes"].items()
    assert series[0] == "256 rows over S"
    assert all(by_figure["milliseconds"] is not None for by_figure in series[1].values())
    assert path.with_suffix(".png").stat().st_size > 1000
    assert " us " in capsys.readouterr().out  # in which small ones are told


def test_slopes_are_powers_of_the_size():
    rows = [
        report_module.Row(f"full: T={T}", "ours", 1e-3 * T**2 + (T < 100), temporary_mib=5.0 * T)
        for T in (16, 128, 1024, 512)
    ]
    rows.append(report_module.Row("full: T=128", "peer", notes={"refused": "holds planes"}))
    (found,) = plots.slopes(rows).values()
    assert found == {"ours": {"milliseconds": pytest.approx(2), "temporary_mib": pytest.approx(1)}}


def test_two_runs_are_compared_by_their_peers(tmp_path, capsys):
    Row = report_module.Row

    def file(name, *cases):
        rows = []
        for case, ours, mib, peer in cases:
            rows += [Row(case, "jax_attn_bwd", ours, 1.0, mib, 1.0), Row(case, "plain", peer, 2.0, 9.0, 2.0)]
        report_module.write(tmp_path / name, {}, rows, finished=True)
        return str(tmp_path / name)

    old = file("old", ("same", 10.0, 5.0, 20.0), ("slow", 10.0, 5.0, 20.0), ("large", 10.0, 5.0, 20.0))
    busy = file("busy", ("same", 20.0, 5.0, 40.0), ("other", 1.0, 1.0, 1.0))  # the machine was
    worse = file("worse", ("same", 10.5, 5.1, 20.0), ("slow", 12.0, 5.0, 20.0), ("large", 10.0, 6.5, 20.0))
    assert bench.main(["--compare", old, busy]) == 0
    told = capsys.readouterr().out
    assert "1 cases in both files, 0 slower" in told
    assert told.count("in the old file alone") == 2
    assert told.count("in the new file alone") == 1
    assert bench.main(["--compare", old, worse]) == 1
    table = capsys.readouterr().out
    for case, verdict in (("same", ""), ("slow", "slower"), ("large", "larger")):
        (line,) = (line for line in table.splitlines() if line.strip("│ ").startswith(case))
        assert ("slower" in line, "larger" in line) == (verdict == "slower", verdict == "larger")
    assert bench.main(["--compare", old, file("another", ("other", 1.0, 1.0, 1.0))]) == 1


@pytest.mark.parametrize(
    ("was", "now", "verdict"),
    [
        ({}, {"milliseconds": 10.8}, "slower"),  # by four spreads of 1%
        ({"spread": 0.05}, {"milliseconds": 10.8}, ""),
        ({}, {"milliseconds": 10.3, "spread": 0.0}, ""),
        ({"temporary_mib": 0.0}, {"temporary_mib": 500.0}, "larger"),
        ({"temporary_mib": 0.01}, {"temporary_mib": 0.5}, ""),
        ({}, {"milliseconds": None}, "not measured any more"),
        ({"milliseconds": None}, {"milliseconds": None}, ""),
    ],
)
def test_noise_memory_and_missing_times_in_comparisons(was, now, verdict):
    row = report_module.Row("case", "ours", 10.0, 1.0, 5.0, 1.0, 0.01)
    told = report_module._changes(dataclasses.replace(row, **was), dataclasses.replace(row, **now), [])
    assert told[-1] == verdict
    assert report_module._changes(row, None, [])[-1] == "not measured any more"


@pytest.fixture
def measures_nothing(monkeypatch):
    """Whatever would be measured fails instead."""

    def fail(*args):
        raise AssertionError("something was measured")

    monkeypatch.setattr(bench, "measure", fail)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["sorting"], "invalid choice: 'sorting'"),
        ([], "give an operator to measure, or --compare two files, not both"),
        (["softmax", "--compare", "a", "b"], "give an operator to measure, or --compare two files, not both"),
        (["--compare", "missing.json", "b"], "two files that a benchmark wrote: [Errno 2] No such file"),
        (["softmax", "--repeats", "0"], "--repeats: must be at least 1, got 0"),
        (["programs", "--scaling"], "--scaling measures one operator"),
        (["softmax", "--only", "masked"], "--only chooses among compiling, mods, programs; softmax has"),
    ],
    ids=["operator", "nothing", "both", "missing", "repeats", "scaling", "only"],
)
def test_bench_refuses_what_it_cannot_measure(argv, words, capsys, tmp_path, measures_nothing):
    with pytest.raises(SystemExit) as caught:
        bench.main([*argv, "--out", str(tmp_path / "new")])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_bench_refuses_a_folder_it_cannot_write_to_before_measuring(
    capsys, tmp_path, monkeypatch, measures_nothing
):
    file = tmp_path / "file"
    file.write_text("here already")
    for out in (file, file / "below"):
        with pytest.raises(SystemExit) as caught:
            bench.main(["softmax", "--out", str(out)])
        assert caught.value.code == 2
        expected = f"--out must be a folder that can be written to, got {out}: "
        assert expected in capsys.readouterr().err
    monkeypatch.setattr(report_module.os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(SystemExit):
        bench.main(["softmax", "--out", str(tmp_path / "locked")])
    assert "locked: no permission" in capsys.readouterr().err


def test_bench_writes_into_out_and_an_interrupted_run_says_that_it_is_not_finished(tmp_path, monkeypatch):
    def broken():
        yield measure.Workload("one", [contender("ours", None)])
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bench.operators.parts", lambda name, quick: [("one", broken)])
    with pytest.raises(KeyboardInterrupt):
        bench.main(["softmax"])
    (path,) = (tmp_path / "out").iterdir()
    written = json.loads(path.read_text())
    assert (written["finished"], [row["case"] for row in written["rows"]]) == (False, ["one"])


def test_the_kept_results_are_rows():
    folder = Path(bench.__file__).parent / "results"
    rows = [row for path in folder.glob("*.json") for row in report_module.read(path)]
    assert len(rows) > 80
    why = (
        "holds planes of",
        "does not support backward on CPU",
        "may never end on a CPU",
    )  # a peer may be refused for these alone
    untimed = [row for row in rows if not row.milliseconds]
    assert all(
        "memory only" in row.case
        or "jax.nn, window" in row.contender
        or row.contender == "plain, our dropout"  # compared alone: it drops what ours drops
        or any(words in row.notes.get("refused", "") for words in why)
        for row in untimed
    )


def contender(name, x, runs=None):
    def run():
        if runs is not None:
            runs.append(name)

    results = None if x is None else lambda: [np.asarray(x)]
    return measure.Contender(name, run, results=results)


def test_measure_refuses_contenders_that_disagree():
    runs = []
    case = measure.Workload("two", [contender("ours", [1.0], runs), contender("peer", [1.01], runs)])
    with pytest.raises(RuntimeError, match=r"peer and ours disagree in 'two'.*nothing is timed"):
        measure.measure(case, repeats=1)
    assert runs == []  # correctness first


@pytest.mark.parametrize("wrong", [[np.nan], [np.inf], [1.0, 1.0]])
def test_measure_refuses_nan_inf_and_other_shapes(wrong):
    case = measure.Workload("two", [contender("ours", [1.0]), contender("peer", wrong)])
    with pytest.raises(RuntimeError, match="disagree"):
        measure.measure(case, repeats=1)


def test_measure_refuses_ours_where_it_is_nan():
    """Whichever of the two it is."""
    case = measure.Workload("two", [contender("ours", [np.nan]), contender("peer", [1.0])])
    with pytest.raises(RuntimeError, match="disagree"):
        measure.measure(case, repeats=1)


def test_measure_refuses_results_that_agree_in_nan_alone():
    case = measure.Workload("two", [contender("ours", [1.0, np.nan]), contender("peer", [1.0, np.nan])])
    with pytest.raises(RuntimeError, match="'two' are not finite"):
        measure.measure(case, repeats=1)


def test_measure_runs_the_contenders_in_turns():
    runs = []
    contenders = [contender("a", [1.0], runs), contender("b", [1.0], runs), contender("c", None)]
    rows = measure.measure(measure.Workload("three", contenders), repeats=3)
    assert runs == ["a", "a", "b", "b"] * 3  # each timed call follows an untimed one
    assert [(row.case, row.contender) for row in rows] == [("three", c) for c in "abc"]
    assert rows[0].ratio == 1.0
    assert all(row.milliseconds >= 0 for row in rows)


def test_measure_times_nothing_of_a_case_that_is_about_memory():
    runs = []
    case = measure.Workload("memory", [contender("a", [1.0], runs)], timed=False)
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


def test_bench_tells_the_commit_of_this_package_alone(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")

    def git(*command):
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        done = subprocess.run(
            ["git", *who, *command], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    package, bench = tmp_path / "site" / "jax_attn_bwd", tmp_path / "tests" / "bench"
    results = bench / "results"
    package.mkdir(parents=True)
    results.mkdir(parents=True)
    init = package / "__init__.py"
    init.write_text("")
    (tmp_path / "other.py").write_text("")
    assert report_module.commit(init) == "unknown"  # no repository
    git("init")
    git("add", "other.py")
    git("commit", "-m", "another project, in which this package is installed")
    assert report_module.commit(init) == "unknown"
    git("add", "site")
    git("commit", "-m", "this package")
    commit = git("rev-parse", "--short", "HEAD")
    (results / "softmax.json").write_text("{}")  # what an earlier benchmark wrote
    assert report_module.commit(init) == commit
    for file in (init, bench / "measure.py"):
        file.write_text("changed = True")
        assert report_module.commit(init) == f"{commit}-dirty"
        file.write_text("")


@pytest.mark.parametrize(("save", "mebibytes"), [("inputs", "0.5"), ("qkv", "2.0")])
def test_bench_counts_what_a_layer_keeps_beside_its_arguments(save, mebibytes):
    """The heads' output is 0.5 MiB, and so is each of q, k and v; the parameters would be 4 MiB more."""
    (operator,) = named.OPERATORS
    case = named.case("wide", named._SELF, sizes=WIDE, dtype="float32")
    arrays, dout = measure.inputs(operator, case)
    x = arrays.pop("query")
    (ours,) = operators.our_layer(x, dout, MultiHeadAttentionParams(**arrays), save)
    assert ours.notes["saved beside the inputs"].startswith(f"{mebibytes} MiB (MegEngine ")


def test_a_peer_that_fails_is_a_row_with_its_reason():
    def broken():
        raise MemoryError("too much")

    found, refused = peers.gather("a case", {"one": lambda: contender("one", [1.0]), "two": broken})
    assert [c.name for c in found] == ["one"]
    (row,) = refused
    assert (row.case, row.contender, row.milliseconds) == ("a case", "two", None)
    assert row.notes["refused"].startswith("MemoryError at test_bench.py:")
    rows = measure.measure(measure.Workload("a case", found, refused=refused), repeats=1)
    assert rows[1:] == [row]


def test_rates_are_of_the_median_time():
    workload = measure.Workload("copy", [contender("ours", None)], rates={"GB/s": 3.0})
    (row,) = measure.measure(workload, repeats=3)
    assert float(row.notes["GB/s"]) == pytest.approx(3e3 / row.milliseconds, rel=0.01)


def test_operations_of_attention_are_counted_as_usual():
    (operator,) = (o for o in OPERATORS if o.name == "dot_product_attention")
    cases = {case.name: case for case in operator.tagged("bench_gpu")}
    full = 4 * 2 * 8192**2 * 2048
    counted = lambda name: operators.operations(cases[name], shapes(cases[name])["query"])
    assert counted("H=128 B=2 T=8192 N=16 full") == full
    assert counted("H=128 B=2 T=8192 N=16 causal") == full / 2
    window = counted("H=64 B=1 T=16384 N=32 causal window 1024")
    assert window == 4 * 2048 * (1024 * 1025 // 2 + (16384 - 1024) * 1025)
