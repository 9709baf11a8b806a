"""Rules that choose a way of computing: each is named, noted where it holds, and can be switched off."""

import importlib
import inspect

import jax
import jax.numpy as jnp
import pytest
from helpers import OPERATORS

import jax_attn_bwd
from jax_attn_bwd import dot_product_attention, explain, scaled_masked_softmax
from jax_attn_bwd._core import choices, fusion, products
from jax_attn_bwd._core.choices import Reason
from jax_attn_bwd.ops.dot_product import plan as dense

FOLDERS = sorted({operator.folder for operator in OPERATORS if operator.folder != "parallel"})
PLANS = [importlib.import_module(f"jax_attn_bwd.ops.{folder}.plan") for folder in FOLDERS]
TABLES = [plan.RULES for plan in PLANS] + [fusion.RULES, products.RULES]


def tokens(n, dtype=jnp.float32, batch=1):
    return jax.ShapeDtypeStruct((batch, n, 2, 64), dtype)


def choice_of(*args, **options):
    (found,) = [c for c in explain(*args, **options).choices if c.implementation == "xla"]
    return found


# ---------------------------------------------------------------------- the tables


def test_each_rule_stands_in_one_table():
    listed = [rule for table in TABLES for rule in table]
    assert len({rule.name for rule in listed}) == len(listed) == len(choices.known()) <= 45


@pytest.mark.parametrize("rule", choices.known(), ids=lambda rule: rule.name)
def test_each_rule_tells_when_it_holds_and_why(rule):
    assert rule.when
    assert rule.gain
    assert rule.reason in Reason.__args__


@pytest.mark.parametrize("plan", PLANS, ids=FOLDERS)
def test_each_way_has_a_file(plan):
    assert plan.WAYS
    folder = __import__("pathlib").Path(inspect.getfile(plan)).parent
    for way in plan.WAYS:
        assert way.name
        assert way.taken
        assert all(list(folder.glob(name)) for name in way.file.split(", ")), way.file


# ---------------------------------------------------------------------- the switch


def test_a_rule_is_switched_off_by_name(one_device):
    way = lambda: choice_of(dot_product_attention, *[tokens(512, batch=8)] * 3).way
    whole = way()
    with choices.without("batch_slices"):
        assert "slices of the batch" not in way()
    assert "slices of the batch" in whole == way()


def test_a_rule_is_switched_off_by_the_environment(one_device, monkeypatch):
    monkeypatch.setenv(choices.WITHOUT, "few_keys, batch_slices")
    assert "batch_slices" not in choice_of(dot_product_attention, *[tokens(512, batch=8)] * 3).rules


def test_a_name_that_no_rule_has_is_an_error(monkeypatch):
    with pytest.raises(ValueError, match=r"no rule 'few_kyes'; the rules are"), choices.without("few_kyes"):
        pass
    monkeypatch.setenv(choices.WITHOUT, "few_kyes")
    with pytest.raises(ValueError, match=f"{choices.WITHOUT}: there is no rule 'few_kyes'"):
        explain(dot_product_attention, *[tokens(64)] * 3)


def test_rules_that_hold_are_noted_once_and_not_outside():
    rule = dense.FEW_KEYS
    with choices.noted() as names:
        assert not rule.holds(False)
        assert rule.holds(True)
        assert rule.holds()
        with choices.without(rule.name):
            assert not rule.holds()
    rule.holds()
    assert names == [rule.name]


# ---------------------------------------------------------------------- what `explain` tells


def test_explain_tells_the_way_and_the_rules(one_device):
    small, large = (explain(dot_product_attention, *[tokens(n)] * 3, is_causal=True) for n in (64, 4096))
    assert "picked      whole plane" in str(small)
    assert "picked      tiles of 256 x 512" in str(large)
    found = choice_of(dot_product_attention, tokens(1, jnp.bfloat16), *[tokens(64, jnp.bfloat16)] * 2)
    assert found.way == "whole plane"
    assert set(found.rules) == {"vector_last", "kept_rounding"}
    assert str(found) == f"whole plane; rules: {', '.join(found.rules)}"


def test_explain_tells_the_way_on_a_chip_that_is_not_here():
    found = explain(dot_product_attention, *[tokens(4096, jnp.bfloat16)] * 3, platform="A100")
    assert {c.implementation: c.way.split(",")[0] for c in found.choices} == {
        "cudnn": "kernels/cudnn.py",
        "xla": "whole plane",
    }
    found = explain(dot_product_attention, *[tokens(4096, jnp.bfloat16)] * 3, is_causal=True, platform="A100")
    assert "strips, " in str(found)
    many = jax.ShapeDtypeStruct((4, 4096, 16, 64), "bfloat16")
    assert "planes in turn, 4 slices" in str(
        explain(dot_product_attention, many, many, many, platform="A100")
    )


def test_what_cannot_run_has_no_way():
    found = explain(scaled_masked_softmax, jax.ShapeDtypeStruct((4, 8), "float32"))
    assert [c.implementation for c in found.choices] == ["xla"]


def test_a_layer_tells_the_way_of_its_attention(one_device):
    def call(n):
        x = jnp.zeros((1, n, 32))
        params = jax_attn_bwd.MultiHeadAttentionParams(*[jnp.zeros((32, 2, 16))] * 1)
        params = params._replace(key_kernel=params.query_kernel, value_kernel=params.query_kernel)
        return choice_of(lambda: jax_attn_bwd.multi_head_attention(params, x, is_causal=True)).way

    assert "whole plane" in call(64)
    assert "tiles" in call(4096)
