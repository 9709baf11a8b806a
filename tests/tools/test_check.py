"""`python -m jax_attn_bwd.check` passes on a right operator, fails on a wrong one, needs only JAX."""

import dataclasses
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import shapes
from helpers import OPERATORS, thorough

import jax_attn_bwd
from jax_attn_bwd import check, ops
from jax_attn_bwd._core import console
from jax_attn_bwd._core.cases import value_and_gradients
from jax_attn_bwd.check import __main__ as command
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
    yield lambda operator: monkeypatch.setattr(command, "discover", lambda: (operator,))
    jax.config.update("jax_default_matmul_precision", precision)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_the_definition_takes_every_case_that_a_chip_is_held_against(operator):
    """Where no chip is, nothing else hands it their options."""
    for case in operator.tagged("large", "any_order", "repeat", "poison", "timed"):
        define = lambda arrays, options=case.options: operator.reference(**arrays, **options)
        outputs = jax.eval_shape(define, shapes(case))
        assert len(outputs) == len(operator.outputs)


@jax.custom_vjp
def one_percent_too_much(x):
    """The identity, with a gradient that is off by 1 %."""
    return x


one_percent_too_much.defvjp(lambda x: (x, None), lambda _, ct: (ct * jnp.asarray(1.01, ct.dtype),))


def test_the_command_prints_measurements_as_json_where_nothing_but_jax_is_installed(tmp_path):
    """Whatever else is imported fails."""
    blocked = (
        "import sys; sys.modules.update(dict.fromkeys(['rich', 'matplotlib', 'flax', 'torch', 'pytest']))"
    )
    (tmp_path / "sitecustomize.py").write_text(blocked)
    paths = os.pathsep.join([str(tmp_path), str(Path(jax_attn_bwd.__file__).parents[1])])
    command = [sys.executable, "-m", "jax_attn_bwd.check", "edge_softmax"]
    done = subprocess.run(
        [*command, "--dtypes", "float32", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["jax"] == jax.__version__
    assert report["device"]
    rows = report["measurements"]
    assert all(row["ok"] and 0 <= row["error"] <= row["limit"] < 1e-4 for row in rows)
    assert {(row["operator"], row["dtype"]) for row in rows} == {("edge_softmax", "float32")}
    assert {row["quantity"] for row in rows} == {"weights", "dscores"}


def test_dtypes_take_turns_unless_they_are_asked_for():
    """An operator of one case has three of them, one of more all four."""
    operator = softmax_operator()
    jobs, _ = command.plan([operator], ())
    of_case = [[dtype for *_, c, dtype in jobs if c is case] for case in operator.cases]
    assert of_case == [["float64", "float32", "bfloat16"], ["float64", "float16"]]
    jobs, _ = command.plan([operator], ["float16"])
    assert [dtype for *_, dtype in jobs] == ["float16", "float16"]
    for operator in ops.discover():
        jobs, _ = command.plan([operator], ())
        several = len(list(operator.tagged("check"))) > 1
        assert {dtype for *_, dtype in jobs} == {*command.DTYPES} - ({"float16"} if not several else set())


@thorough
def test_check_of_a_right_operator_returns_0(only, capsys):
    only(softmax_operator())
    assert command.main(["--dtypes", "float64", "bfloat16"]) == 0
    printed, told = capsys.readouterr()
    assert re.search(r"4 calls, \d+ quantities in \d+ s on cpu, JAX .*: 0 misses", printed)
    assert re.match(r"check: 4 calls, about 3 s on two cores", told)
    assert "MISS" not in printed


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=thorough), "float64"])
def test_check_finds_a_gradient_that_is_off_by_one_percent(only, capsys, dtype):
    call = softmax_operator().call

    def wrong(x, **arguments):
        return call(x=one_percent_too_much(x), **arguments)

    only(softmax_operator(call=wrong))
    assert command.main(["--dtypes", dtype, "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["measurements"]
    assert {row["quantity"] for row in rows if not row["ok"]} == {"dx"}
    assert all(row["ok"] for row in rows if row["quantity"] == "y")
    assert max(row["error"] for row in rows) == pytest.approx(0.01, rel=1e-3)


def test_check_finds_a_wrong_output_and_says_so_in_the_table(only, capsys):
    call = softmax_operator().call
    only(softmax_operator(call=lambda **arguments: tuple(1.001 * y for y in call(**arguments))))
    assert command.main(["--dtypes", "float32"]) == 1
    assert "MISS" in capsys.readouterr().out


def test_check_finds_a_nan(only, capsys):
    call = softmax_operator().call
    only(softmax_operator(call=lambda **arguments: tuple(y * jnp.nan for y in call(**arguments))))
    assert command.main(["--dtypes", "float32"]) == 1
    assert "MISS" in capsys.readouterr().out


def test_check_without_rich_prints_the_same_table_as_plain_text(only, capsys, monkeypatch):
    monkeypatch.setattr(console, "_RICH", False)
    only(softmax_operator())
    assert command.main(["--dtypes", "float32"]) == 0
    header, rule, *_ = (
        line for line in capsys.readouterr().out.splitlines() if line.startswith(("oper", "scal"))
    )
    assert header.split() == [
        "operator",
        "implementation",
        "dtype",
        "quantity",
        "error",
        "limit",
        "case",
        "verdict",
    ]
    assert rule.split()[0] == "scaled_masked_softmax"
    assert rule.split()[-1] == "ok"


def test_operators_are_known_by_their_folders_too(monkeypatch):
    """`bench` calls them so; named twice, they are checked once."""
    asked = []
    monkeypatch.setattr(command, "plan", lambda operators, dtypes: (asked.append(operators), ([], []))[1])
    assert command.main(["softmax", "scaled_masked_softmax", "multi_head"]) == 0
    assert [operator.name for operator in asked[0]] == ["scaled_masked_softmax", "multi_head_attention"]


def test_check_of_an_unknown_operator_is_refused_with_the_known(capsys):
    with pytest.raises(SystemExit) as caught:
        command.main(["softmaxx"])
    assert caught.value.code == 2
    assert "unknown operator ['softmaxx'], known are" in capsys.readouterr().err


def test_relative_error():
    nan, inf = np.nan, np.inf
    assert relative_error([1.0, -4.0], [1.0, -4.0]) == 0
    assert relative_error([1.0, -4.4], [1.0, -4.0]) == pytest.approx(0.1)  # relative to the largest
    assert relative_error([0.001], [0.0]) == pytest.approx(0.1)  # at least 0.01 counts as size
    assert relative_error([nan, inf, -inf, 2.0], [nan, inf, -inf, 2.0]) == 0
    assert relative_error([nan, 2.2], [nan, 2.0]) == pytest.approx(0.1)
    for got, expected in (
        ([nan], [1.0]),
        ([1.0], [nan]),
        ([inf], [-inf]),
        ([inf], [1.0]),
        ([1.0], [-inf]),
        ([nan], [inf]),
    ):
        assert relative_error(got, expected) == inf
    assert relative_error([1.0], [1.0, 1.0]) == inf  # never broadcast
    assert relative_error(np.zeros((0, 3)), np.zeros((0, 3))) == 0


def test_limits_are_twice_the_errors_of_the_definition_in_the_dtype():
    operator = softmax_operator()
    case = operator.cases[0]
    aim = check.target(operator, case, "bfloat16")
    define = value_and_gradients(operator.reference, ("x",), aim.arrays, case.options)
    (y,), gradients = check.quick_jit(define)(aim.cotangents)
    plain = {"y": y, "dx": gradients["x"]}
    assert plain.keys() == aim.expected.keys() == aim.limits.keys()
    for name, limit in aim.limits.items():
        error = relative_error(plain[name], aim.expected[name])
        assert limit == 2 * error + 2 * float(jnp.finfo("bfloat16").eps)


def test_limits_of_gradients_in_cases_with_means_are_thrice_what_rounding_once_takes():
    """Or half a step of the dtype, where that is more."""
    (operator,) = (o for o in ops.discover() if o.name == "scaled_masked_softmax")
    case = next(operator.tagged(check.MEANS))
    aim = check.target(operator, case, "bfloat16")
    narrow = lambda x: getattr(x, "dtype", None) == jnp.bfloat16
    arrays, cts = jax.tree.map(
        lambda x: x.astype(jnp.float32) if narrow(x) else x, (aim.arrays, aim.cotangents)
    )
    names = operator.differentiated(arrays)
    _, gradients = check.quick_jit(value_and_gradients(operator.reference, names, arrays, case.options))(cts)
    for name, x in gradients.items():
        error = relative_error(x.astype(jnp.bfloat16), aim.expected[f"d{name}"])
        least = float(jnp.finfo("bfloat16").eps) / 2
        expected = max(case.times.get(name, check.TIMES) * error, least)
        assert aim.limits[f"d{name}"] == pytest.approx(expected, rel=1e-3)


def test_long_work_shows_what_runs_and_how_long_it_will_take(monkeypatch, capsys):
    monkeypatch.setattr(console, "_RICH", False)
    seconds = iter(range(0, 100, 6))
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(seconds)))
    assert list(console.progress("abcd", 4, "work", lambda item: f"at {item}")) == [*"abcd"]
    assert capsys.readouterr().err == "work: 1 of 4 after 12 s, about 36 s to go: at b\n" + (
        "work: 3 of 4 after 24 s, about 8 s to go: at d\n"
    )
    monkeypatch.setattr(console, "_said", [-10.0])
    console.status("kernel", 0.5)
    assert capsys.readouterr().err == "[##########..........] kernel\n"


def test_the_package_lists_its_commands(capsys):
    runpy.run_module("jax_attn_bwd", run_name="__main__")
    told = capsys.readouterr().out
    assert "python -m jax_attn_bwd.check --enable" in told
    assert "explain(function" in told
