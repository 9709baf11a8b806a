"""`python -m tests.bench race`: what is drawn, that both sides agree, and what a floor does."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from bench import __main__ as bench
from bench import measure
from bench.plain import solves_end
from bench.race import call, program, rounding, rules, run
from bench.report import Row
from helpers import thorough

from jax_attn_bwd import dot_product_attention

ALL = (*program.DRAWN,)


@pytest.fixture(autouse=True)
def as_users_have_it(monkeypatch):
    """Plain formulas promote dtypes and ranks; what other tests of the process have compiled is kept."""
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_a_seed_and_a_number_are_one_program():
    names = [program.draw(3, number, ALL, program.WHOLE).name for number in range(4)]
    assert names == [
        "0: deformable float32, decoder B4 Q900 8x64 P2, levels 10x10 5x5 2x2 1x1, "
        "layer norm before, layer norm behind",
        "1: multi_head float32, E128 B4 T167 N16 K4 H8, causal, lengths",
        "2: graph float32, GATv2 1,367 nodes, 12,303 edges, uniform, 4x8, layer norm before, product behind",
        "3: deformable float32, decoder B2 Q900 8x32 P8, levels 36x36 18x18 9x9 4x4, normalized, "
        "scan of 2 layers",
    ]


def test_what_is_drawn_is_within_the_budget_and_of_every_kind():
    drawn = [program.draw(0, number, ALL, program.WHOLE) for number in range(400)]
    assert {p.operator for p in drawn} == {*ALL}
    told = "\n".join(p.name for p in drawn)
    assert all(name in told for name in KINDS)
    assert ("delta rule" in told) == solves_end()
    for p in drawn:
        assert all(np.prod(x.shape) <= program.WHOLE.elements for x in p.call.inputs.values()), p.name
        assert len({*p.call.inputs}) == len(p.call.inputs)


KINDS = (
    *("float32", "bfloat16", "sine before", "GELU behind", "layer norm before", "product behind"),
    *("vmap of 2", "scan of 4 layers", "remat", "causal", "window", "mask", "lengths", "segments", "prefix"),
    *("bias", "with gradient", "relative bias", "ALiBi", "soft cap", "sink", "dropout", "rotary", "memory"),
    *("encoder", "decoder", "normalized", "axis -2", "scale"),
    *("GAT ", "GATv2", "transformer", "edge_max", "power law", "edge features", "mean of heads"),
    *("edge features, dropout", "decays", "a decay a channel", "Hv64, K"),
)


@thorough
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("operator", ALL)
def test_both_sides_compute_the_same(operator, number):
    measure.check_agreement(program.workload(program.draw(0, number, (operator,), program.QUICK)))


@pytest.mark.parametrize(("number", "dtype", "times"), [(0, "float32", 1.01), (2, "bfloat16", 1.1)])
def test_a_wrong_gradient_is_found(number, dtype, times):
    """The key's gradient alone is wrong."""
    drawn = program.draw(7, number, ("dot_product",), call.Budget(2**13, 1e7))
    assert drawn.dtype == dtype

    @jax.custom_vjp
    def wrong(x):
        return x

    wrong.defvjp(lambda x: (x, None), lambda _, dx: ((times * dx).astype(dx.dtype),))
    ours = lambda data, a: drawn.call.ours(data, {**a, "key": wrong(a["key"])})
    case = program.workload(drawn._replace(call=replace(drawn.call, ours=ours)))
    with pytest.raises(RuntimeError, match="disagree"):
        measure.check_agreement(case)


def step_of(zero: float, narrow: float = 0.0) -> list[np.ndarray]:
    """Makes an output, a gradient, and one that is 0 but for what its terms leave."""
    rng = np.random.default_rng(0)
    step = [rng.standard_normal((50, 4)).astype(np.float32) for _ in range(3)]
    step = [x * (1 + narrow * rng.uniform(-1, 1, x.shape).astype(np.float32)) for x in step]
    return [*step[:2], zero * step[2]]


@pytest.mark.parametrize(("zero", "alike"), [(3e-8, True), (1e-5, False)])
def test_what_is_left_of_terms_that_cancel_is_no_fault(zero, alike):
    assert rounding.of_terms_that_cancel(1e-4, step_of(zero), step_of(-zero)) == alike


def test_of_float32_nothing_else_is_rounding():
    for number in range(2):
        ours = step_of(0)
        ours[number] = ours[number] * np.float32(1.001)
        assert not rounding.of_terms_that_cancel(1e-4, ours, step_of(0))


@pytest.mark.parametrize(
    ("ours", "plain", "alike"),
    [
        (step_of(0, 0.015), step_of(0, 0.01), True),  # half as much again
        (step_of(0, 0.05), step_of(0, 0.01), False),
        (step_of(0, 0.05), step_of(0, 0.04), True),  # it is no better
        (step_of(0.002), step_of(0), True),  # less than the other gradient's rounding
        (step_of(0.02), step_of(0), False),
    ],
)
def test_the_error_in_a_narrow_dtype_is_at_most_twice_that_of_plain(ours, plain, alike):
    assert rounding.of_narrow("bfloat16", ours, plain, step_of(0)) == alike


@thorough
def test_rounding_that_a_compiler_lets_go_of_plain_is_no_fault_of_ours():
    """XLA of JAX 0.10 fuses the plain formula with the product in front, and keeps what lies between wide."""
    measure.check_agreement(program.workload(program.draw(1, 15, ALL, program.WHOLE)))


def race(tmp_path: Path, *options: str) -> int:
    return bench.main(["race", *options, "--quick", "--repeats", "1", "--out", str(tmp_path)])


def test_a_race_prints_each_program_and_writes_json_and_a_plot(tmp_path, capsys):
    assert race(tmp_path, "--seed", "1", "--first", "4", "--count", "2", "--operator", "softmax") == 0
    told = capsys.readouterr().out
    (path,) = tmp_path.glob("race_seed1_*.json")
    report = json.loads(path.read_text())
    assert report["finished"]
    assert report["race"]["operators"] == ["softmax"]
    assert [row["contender"] for row in report["rows"]] == ["jax_attn_bwd", "plain"] * 2
    for row in report["rows"][::2]:
        assert re.search(rf"^ +\d+\.\d+ .*{re.escape(row['case'])}$", told, re.MULTILINE)
    assert report["distribution"].keys() >= {"least", "median", "greatest", "below 1"}
    assert path.with_suffix(".png").stat().st_size > 1000


def rows(name: str, x: float) -> list[Row]:
    notes = {run.COMPILED: "0.10 s"}
    return [Row(name, "jax_attn_bwd", 1.0, 1.0, notes=notes), Row(name, "plain", x, x, notes=notes)]


@pytest.mark.parametrize(
    ("beside", "alone", "floor", "code"),
    [(0.8, 0.8, None, 0), (0.8, 1.2, "0.9", 0), (0.8, 0.85, "0.9", 1), (0.95, 0.1, "0.9", 0)],
)
def test_what_is_below_the_floor_alone_too_counts(beside, alone, floor, code, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "_measured", lambda race, drawn: rows(drawn.name, beside))
    monkeypatch.setattr(run, "_alone", lambda race, drawn, x: rows(drawn.name, alone))
    assert race(tmp_path, *(["--floor", floor] if floor else []), "--count", "1") == code


def test_a_program_that_fails_is_told_and_the_next_is_measured(tmp_path, monkeypatch, capsys):
    made = []

    def broken(drawn):
        made.append(drawn)
        raise RuntimeError("they disagree")

    monkeypatch.setattr(program, "workload", broken)
    assert race(tmp_path, "--count", "2") == 1
    assert len(made) == 2
    assert "they disagree" in capsys.readouterr().out


@thorough
def test_a_program_is_measured_in_a_process_of_its_own(tmp_path):
    asked = run.Race(1, True, seed=1, count=2, operators=("softmax",))
    drawn = program.draw(1, 1, ("softmax",), program.QUICK)
    ours, plain = run._alone(asked, drawn, 0.5)
    assert ours.case == drawn.name
    assert plain.ratio > 0
    assert plain.notes[run.BESIDE] == "0.50"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["race", "--count", "0"], "--count: must be at least 1, got 0"),
        (["race", "--seed", "-1"], "--seed: must be at least 0, got -1"),
        (["race", "--floor", "fast"], "--floor: must be a positive number, got fast"),
        (["race", "--operator", "sorting"], "--operator: invalid choice: 'sorting'"),
        (["softmax", "--seed", "1"], "--seed is of race; softmax has cases of its own"),
        (["race", "--scaling"], "--scaling measures one operator; the sizes of race are its own"),
        (["race", "--only", "softmax"], "--only chooses among compiling, mods, programs; race has"),
    ],
    ids=["count", "seed", "floor", "operator", "elsewhere", "scaling", "only"],
)
def test_bad_arguments_are_refused(argv, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        bench.main([*argv, "--out", str(tmp_path / "new")])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------- what a rule is worth


def test_rules_that_change_a_program_are_timed_without(one_device, monkeypatch, tmp_path):
    """Not one that holds, and leaves the program as it was."""
    monkeypatch.setattr(rules, "LEAST", 0.0)
    x = call.Input((8, 512, 2, 8), call.normal)
    given = dict.fromkeys(("query", "key", "value"), x)
    attention = lambda data, x: dot_product_attention(*x.values(), is_causal=True)
    made = call.Call("a batch", given, x.shape, attention, attention)
    drawn = program.Program(0, 0, "dot_product", "float32", made)
    monkeypatch.setattr(program, "draw", lambda *args: drawn)
    path = tmp_path / "rules.json"
    assert rules.run(run.Race(1, True, count=1), {}, path) == 0
    found = json.loads(path.read_text())
    assert [row["contender"] for row in found["rows"]] == [rules.OURS, "batch_slices"]
    assert found["rules"]["batch_slices"]["programs"] == 1


def test_the_worth_of_a_rule_is_over_the_programs_that_it_changes():
    rows = [Row(str(i), name, ratio=x) for i, x in enumerate((0.9, 1.5, 1.2)) for name in ("few_keys",)]
    found = rules.worth([*rows, Row("0", rules.OURS, ratio=1.0), Row("9", "batch_slices")])
    spread = {"least": 0.9, "median": 1.2, "greatest": 1.5}
    assert found == {"few_keys": {"reason": "speed", "programs": 3, **spread, "memory": 1.0}}


def test_a_program_that_fails_makes_the_exit_code_1(monkeypatch, tmp_path, capsys):
    def fails(*args):
        raise RuntimeError("no memory")

    monkeypatch.setattr(rules, "_measured", fails)
    assert rules.run(run.Race(1, True, count=1), {}, tmp_path / "rules.json") == 1
    assert "RuntimeError" in capsys.readouterr().out
