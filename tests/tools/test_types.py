"""What type checkers are told of public functions is what runs; `typed_calls.py` has what they accept."""

import inspect
import typing

import pytest

import jax_attn_bwd
from jax_attn_bwd import parallel
from jax_attn_bwd.compat import bnns, cugraph

FUNCTIONS = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (jax_attn_bwd, parallel, bnns, cugraph)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name))
}
# flags that change what is returned
FLAGS = {
    "return_residual",
    "return_weights",
    "return_attention_weights",
    "return_softmax_scores",
    "return_final_state",
    "backprop_cache",
}
# functions that type checkers are told to take for others, by whose overloads they are called
TYPED_LIKE = {
    "jax_attn_bwd.graph_attention_v2": "jax_attn_bwd.graph_attention",
    "jax_attn_bwd.parallel.all_gather_attention": "jax_attn_bwd.parallel.ring_attention",
    "jax_attn_bwd.parallel.ulysses_attention": "jax_attn_bwd.parallel.ring_attention",
}


def keywords(function) -> dict:
    """Its parameters' annotations by name, those of `**options: Unpack[...]` among them."""
    hints = {name: x for name, x in typing.get_type_hints(function).items() if name != "return"}
    options = hints.pop("options", None)
    return hints | (typing.get_type_hints(typing.get_args(options)[0]) if typing.get_args(options) else {})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_overloads_have_the_arguments_of_the_function(name):
    model = FUNCTIONS[TYPED_LIKE.get(name, name)]
    given, overloads = keywords(FUNCTIONS[name]), typing.get_overloads(inspect.unwrap(model))
    assert overloads or not any(given.get(flag) is bool for flag in FLAGS)
    for overload in overloads:
        told = keywords(overload)
        if name != "jax_attn_bwd.parallel.sharded_graph_attention":  # it hands the others on
            assert told.keys() == given.keys()
        for argument in given.keys() - FLAGS:
            assert told[argument] == given[argument], argument


OPERATORS = [
    name
    for name, function in FUNCTIONS.items()
    if ".sharded_graph" not in name and "explain" not in name and ".compat." not in name
]
SECONDARY = [
    name
    for name, function in FUNCTIONS.items()
    if "options" in inspect.signature(function).parameters and ".sharded_" not in name
]


def needed(function) -> dict:
    """Its parameters without a default, each None."""
    parameters = inspect.signature(function).parameters.values()
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {p.name: None for p in parameters if p.default is p.empty and p.kind not in starred}


def needed_options(function) -> frozenset:
    """Those of its `**options` without a default."""
    return typing.get_args(inspect.signature(function).parameters["options"].annotation)[0].__required_keys__


@pytest.mark.parametrize("name", sorted({*OPERATORS, *SECONDARY}))
def test_a_keyword_that_a_call_does_not_list(name):
    expected = rf"{name.rpartition('.')[2]}\(\) got an unexpected keyword argument 'im2col_step'"
    answer = "" if ".compat." in name else "; leave it out: it changes no result"
    with pytest.raises(TypeError, match=expected + answer):
        FUNCTIONS[name](**needed(FUNCTIONS[name]), im2col_step=64)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_signature_leaves_room_for_the_docstring(name):
    assert len(str(inspect.signature(FUNCTIONS[name]))) <= 900


NEEDING = [name for name in SECONDARY if "num_heads" in needed_options(FUNCTIONS[name])]


@pytest.mark.parametrize("name", NEEDING)
def test_a_keyword_that_a_secondary_call_needs(name):
    expected = rf"{name.rpartition('.')[2]}\(\) missing 1 required keyword-only argument: 'num_heads'"
    with pytest.raises(TypeError, match=expected):
        FUNCTIONS[name](**needed(FUNCTIONS[name]))


def test_what_graph_attention_needs_is_known_to_its_secondary_calls():
    assert len(NEEDING) == 3
