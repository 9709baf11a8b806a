"""What `explain` tells of graphs, and rules that are switched off."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, thorough
from ops.graph.calls import FUNCTIONS, every_kind, inputs, random_edges, values_and_gradients

import jax_attn_bwd as jab
from jax_attn_bwd import BipartiteCSC
from jax_attn_bwd._core import choices
from jax_attn_bwd.ops.graph import plan


def told(name, nodes, edges, dtype="float32", platform=None):
    """(way, rules) of a call of many or few edges."""
    rng = np.random.default_rng(0)
    graph = BipartiteCSC.from_coo(rng.integers(0, nodes, edges), rng.integers(0, nodes, edges), nodes, nodes)
    shape = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    if name.startswith("edge"):
        found = jab.explain(getattr(jab, name), graph, shape(edges, 64), platform=platform)
    else:
        x, a = shape(nodes, 64), shape(64 if name.endswith("v2") else 128)
        found = jab.explain(getattr(jab, name), graph, x, None, a, num_heads=4, platform=platform)
    (choice,) = (choice for choice in found.choices if choice.implementation == "xla")
    return choice.way, choice.rules


@pytest.mark.parametrize(
    ("name", "few", "many"),
    [
        ("graph_attention", "all at once, back as forward", "10 chunks, back in one pass"),
        ("graph_attention_v2", "all at once, back as forward", "10 chunks, back in one pass"),
        ("edge_softmax", "all at once", "all at once"),
        ("edge_max", "one scatter", "one scatter"),
    ],
)
def test_explain_names_the_way_and_its_rules(name, few, many):
    found = [told(name, *size) for size in ((20, 100), (2000, 40_000))]
    assert [way for way, _ in found] == [few, many]
    in_loops = [rules.count("graph_loops") for _, rules in found]
    assert in_loops == ([0, 1] if name.startswith("graph") else [0, 0])
    assert all("graph_in_order" in rules for _, rules in found)


def test_explain_tells_what_another_chip_would_do():
    assert told("graph_attention_v2", 20, 100, platform="H100") == (
        "all at once, groups, back in two passes",
        ("graph_reads_twice",),
    )
    assert told("edge_sum", 20, 100) == ("one scatter", ("graph_in_order",))
    assert told("edge_sum", 20, 100, "bfloat16")[0] == "all at once"


def test_a_plan_follows_the_switch():
    with choices.without("graph_loops"):
        assert told("graph_attention_v2", 2000, 40_000)[0] == "all at once, back as forward"
    with choices.without("graph_one_pass"):
        assert told("graph_attention_v2", 20, 100)[0] == "all at once, back in two passes"
    with choices.without("graph_in_order"):
        assert told("edge_sum", 20, 100)[0] == "all at once, groups"
        assert told("graph_attention", 20, 100)[0].startswith("all at once, groups, by their order")


@every_kind
@pytest.mark.parametrize(
    "rule", [pytest.param(r.name, marks=[thorough] * (r is not plan.IN_ORDER)) for r in plan.RULES]
)
def test_without_a_rule_all_is_the_same(kind, rule):
    """With hubs, a batch, and many edges for each node."""
    arrays = {
        n: x if n == "attention_weights" else jnp.stack([x, 2 * x]) for n, x in inputs(kind, 7, 5).items()
    }
    run = lambda: values_and_gradients(
        FUNCTIONS[kind][0], arrays, graph=BipartiteCSC.from_coo(*random_edges(nnz=1500), 7, 5)
    )
    expected = run()
    with choices.without(rule):
        assert_trees_close(run(), expected, 1e-11)
