"""Deltas: of one array given several times, and only of what is asked for."""

import jax
import numpy as np
import pytest
from compat.bnns.calls import Triple, backward, by_name, inputs, layer, source
from helpers import assert_close, thorough


@pytest.mark.parametrize(
    "shared",
    [
        "query key value",
        "key value",
        *(pytest.param(names, marks=thorough) for names in ("query key", "query value")),
    ],
)
def test_with_sum_aliased_one_array_for_several_inputs_gets_the_sum_in_each(shared):
    F, (query, key, value, dout) = layer(), inputs()
    query = np.ascontiguousarray(key[:, ::-1])  # it is as long as the keys
    dout = np.random.default_rng(6).standard_normal(query.shape)
    given = {"query": query, "key": key, "value": value}
    names = shared.split()
    given |= dict.fromkeys(names, given[names[0]])
    expected = source(F, *list(given.values())[:2], None, given["value"], None, dout)
    arguments = F, given["query"], given["key"], None, given["value"], None, dout
    for name, own in by_name(backward(*arguments)).items():
        assert_close(own, expected[name], 1e-12, name)
    deltas = by_name(backward(*arguments, sum_aliased=True))
    total = sum(expected[f"{name}.target_desc"] for name in names)
    for name in given:
        expect = total if name in names else expected[f"{name}.target_desc"]
        assert_close(deltas[f"{name}.target_desc"], expect, 1e-12, name)


def test_the_sum_is_of_the_deltas_asked_for():
    F, (_, x, _, _) = layer(), inputs()
    dout = np.random.default_rng(6).standard_normal(x.shape)
    expected = source(F, x, x, None, x, None, dout)
    deltas = backward(F, x, x, None, x, None, dout, value_param_delta=None, sum_aliased=True)
    total = expected["query.target_desc"] + expected["key.target_desc"]
    assert_close(deltas.query_param_delta.target_desc, total, 1e-12)
    assert_close(deltas.key_param_delta.target_desc, total, 1e-12)
    assert deltas.value_param_delta == Triple()


def test_arrays_ask_for_deltas_and_one_array_twice_for_their_sum():
    F, (query, key, value, dout) = layer(), inputs()
    expected = source(F, query, key, None, value, None, dout)
    to, other = np.full_like(key, np.nan), np.full_like(value, np.nan)
    slots = {"key_param_delta": Triple(to), "value_param_delta": Triple(other), "query_param_delta": None}
    arguments = F, query, key, None, value, None, dout
    apart = backward(*arguments, **slots, sum_aliased=True)
    assert_close(apart.key_param_delta.target_desc, expected["key.target_desc"], 1e-12)
    assert_close(apart.value_param_delta.target_desc, expected["value.target_desc"], 1e-12)
    assert apart.query_param_delta == Triple()
    slots["value_param_delta"] = Triple(to, np.zeros_like(F.value.weights))
    together = backward(*arguments, **slots, sum_aliased=True)
    total = expected["key.target_desc"] + expected["value.target_desc"]
    assert_close(together.key_param_delta.target_desc, total, 1e-12)
    assert_close(together.value_param_delta.target_desc, total, 1e-12)
    assert_close(together.value_param_delta.weights, expected["value.weights"], 1e-12)


@pytest.mark.parametrize(
    "asked", ["query.weights", "key.target_desc", "value.bias", "output.weights", "key_attn_bias"]
)
def test_only_what_is_asked_for_comes_back(asked):
    F, (query, key, value, dout) = layer(("rows",)), inputs()
    part, _, field = asked.partition(".")
    flags = {f"{n}_param_delta": None for n in ("query", "key", "value")}
    flags |= {"output_param_delta": Triple(dout), "key_attn_bias_delta": None, "value_attn_bias_delta": False}
    if not field:
        flags[f"{part}_delta"] = True
    elif part == "output":
        flags["output_param_delta"] = Triple(dout, True, False)
    else:
        flags[f"{part}_param_delta"] = Triple()._replace(**{field: True})
    shapes = jax.eval_shape(lambda: backward(F, query, key, None, value, None, dout, **flags))
    deltas = by_name(shapes)
    assert list(deltas) == [asked]
    assert deltas[asked].shape == source(F, query, key, None, value, None, dout)[asked].shape
