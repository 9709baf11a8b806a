"""`BipartiteCSC` as an object: equality, hash, repr; a stack of graphs that reaches a call without vmap."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn_bwd as jab
from jax_attn_bwd import BipartiteCSC

SRC, DST = [0, 2, 1, 2], [1, 0, 1, 1]
X, Y = np.ones((3, 4)), np.ones((2, 4))


def graph(src=SRC, dst=DST, num_src=3, num_dst=2, **options):
    return BipartiteCSC.from_coo(src, dst, num_src, num_dst, **options)


def stacked():
    return jax.tree.map(lambda *x: jnp.stack(x), graph(capacity=6), graph(SRC[:2], DST[:2], capacity=6))


CALLS = {
    "graph_attention": lambda g: jab.graph_attention(g, X, Y, np.ones(8), num_heads=2),
    "graph_attention_bwd": lambda g: jab.graph_attention_bwd(Y, g, X, Y, np.ones(8), num_heads=2),
    "graph_attention_v2": lambda g: jab.graph_attention_v2(g, X, Y, np.ones(4), num_heads=2),
    "graph_attention_v2_bwd": lambda g: jab.graph_attention_v2_bwd(Y, g, X, Y, np.ones(4), num_heads=2),
    "graph_transformer_attention": lambda g: jab.graph_transformer_attention(g, Y, X, X, num_heads=2),
    "graph_transformer_attention_bwd": lambda g: jab.graph_transformer_attention_bwd(
        Y, g, Y, X, X, num_heads=2
    ),
    "edge_sum": lambda g: jab.edge_sum(g, np.ones((6, 2))),
    "edge_sum_bwd": lambda g: jab.edge_sum_bwd(np.ones((2, 2)), g),
    "edge_max_bwd": lambda g: jab.edge_max_bwd(np.ones((2, 2)), g, np.ones((6, 2)), np.ones((2, 2))),
    "edge_softmax": lambda g: jab.edge_softmax(g, np.ones((6, 2))),
    "edge_softmax_bwd": lambda g: jab.edge_softmax_bwd(np.ones((6, 2)), g, np.ones((6, 2))),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_stack_of_graphs_asks_for_vmap(name):
    message = rf"^{name}: graph must be one graph, got a stack of \(2,\) graphs; .*vmap"
    with pytest.raises(ValueError, match=message):
        CALLS[name](stacked())
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(CALLS[name], stacked())
    shapes = jax.eval_shape(jax.vmap(CALLS[name]), stacked())
    one = jax.eval_shape(CALLS[name], graph(capacity=6))
    chex.assert_trees_all_equal_shapes_and_dtypes(
        shapes, jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), one)
    )


def test_graphs_are_equal_if_they_hold_the_same_edges():
    assert graph() == graph()
    assert hash(graph()) == hash(graph())
    assert graph() == jax.tree.map(np.asarray, graph())
    others = [graph(capacity=5), graph(SRC[::-1], DST[::-1]), graph(num_src=4), graph(num_dst=3), stacked()]
    for other in others:
        assert graph() != other
        assert len({graph(), other}) == 2
    assert graph() != "a graph"


def test_a_traced_graph_equals_itself_alone():
    @jax.jit
    def step(one, two):
        assert one == one
        assert one != two
        assert one != graph()
        assert hash(one) == hash(two)
        return one.num_edges

    assert step(graph(capacity=6), graph(capacity=6)) == 4


def test_num_edges_and_repr():
    assert graph(capacity=6).num_edges == 4
    assert isinstance(graph().num_edges, int)
    assert repr(graph(capacity=6)) == (
        "BipartiteCSC(num_src=3, num_dst=2, num_edges=4, capacity=6, dtype=int32)"
    )
    np.testing.assert_array_equal(stacked().num_edges, [4, 2])
    assert "num_edges=[4 2], capacity=6" in repr(stacked())
    inside = []

    @jax.jit
    def closed_over():
        inside.append(graph_outside.num_edges)
        return 0

    graph_outside = graph()
    closed_over()
    assert inside == [4]
    jax.eval_shape(lambda g: inside.append(repr(g)), graph(capacity=6))
    assert inside[1] == "BipartiteCSC(num_src=3, num_dst=2, capacity=6, dtype=int32)"
    assert "capacity=None" in repr(jax.tree.map(lambda x: None, graph()))
