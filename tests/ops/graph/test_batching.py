"""Batches of graphs: the numbers of each graph alone, one trace, and the way back."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from ops.graph.calls import QUICK, D, H, inputs, random_edges

import jax_attn_bwd as jab
from jax_attn_bwd import BipartiteCSC, batch_graphs

SIZES = [[(6, 4, 9), (6, 4, 0), (8, 5, 14)], [(6, 4, 20), (0, 0, 0), (8, 5, 2)]]


def graphs_of(sizes, capacity=None):
    ends = [random_edges(max(n, 3), max(m, 3), nnz, seed=nnz) for n, m, nnz in sizes]
    return [
        BipartiteCSC.from_coo(*end, n, m, capacity=capacity)
        for end, (n, m, _) in zip(ends, sizes, strict=True)
    ]


def arrays_of(graph):
    """For a batch `attention_weights` is one; the first of each."""
    found = inputs("gat", graph.num_src, graph.num_dst, edge=graph.capacity)
    return found.pop("attention_weights"), found


def attend(graph, weights, arrays):
    return jab.graph_attention(
        graph, attention_weights=weights, **arrays, num_heads=H, return_attention_weights=True
    )


@pytest.mark.parametrize("stacked", [False, True])
def test_one_program_gives_the_numbers_of_each_graph(stacked):
    """Outputs, weights and gradients; NaN wherever there is no node and no edge."""

    def loss(weights, graph, arrays):
        run = jax.vmap(attend, (0, None, 0)) if stacked else attend
        out, probs = run(graph, weights, arrays)
        return (jnp.sin(out).sum() + (probs**2).sum()), (out, probs)

    chex.clear_trace_counter()
    step = jax.value_and_grad(chex.assert_max_traces(loss, 1), argnums=(0, 2), has_aux=True)
    step = jax.jit(step, compiler_options=QUICK)
    for sizes in SIZES:
        graphs = graphs_of(sizes, capacity=22)
        batch = batch_graphs(graphs, capacity=25, nodes=(23, 14), stacked=stacked)
        weights, each = arrays_of(graphs[0])[0], [arrays_of(graph)[1] for graph in graphs]
        layouts = {"src": batch.src, "dst": batch.dst, "edge": batch.edges}
        arrays = {}
        for name, layout in layouts.items():
            joined = layout.join([x[name] for x in each])
            missing = (layout.owner >= len(graphs)).reshape(*layout.owner.shape, 1)
            arrays[name] = jnp.where(missing, jnp.nan, joined)
        (_, (out, probs)), (dweights, grads) = step(weights, batch.graph, arrays)

        expected = [alone(weights, graph, x) for graph, x in zip(graphs, each, strict=True)]
        assert_close(dweights, sum(gradient[0] for _, gradient in expected), 1e-12)
        parts = zip(batch.dst.split(out), batch.edges.split(probs), strict=True)
        for (got, own), ((_, (out_k, probs_k)), _) in zip(parts, expected, strict=True):
            assert_close(got, out_k, 1e-12)
            assert_close(own, probs_k, 1e-12)
        for name, layout in layouts.items():
            for got, (_, (_, of_one)) in zip(layout.split(grads[name]), expected, strict=True):
                assert_close(got, of_one[name], 1e-12, name)


@functools.partial(jax.jit, compiler_options=QUICK)
def alone(weights, graph, arrays):
    def loss(weights, arrays):
        out, probs = attend(graph, weights, arrays)
        return (jnp.sin(out).sum() + (probs**2).sum()), (out, probs)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(weights, arrays)


@pytest.mark.parametrize("stacked", [False, True])
def test_there_and_back(stacked):
    """Exactly, of JAX arrays and of NumPy's, which stay on the host; sums over graphs drop the padding."""
    graphs = graphs_of(SIZES[0])
    batch = batch_graphs(graphs, stacked=stacked, nodes=21)
    for layout, sizes in ((batch.src, (6, 6, 8)), (batch.dst, (4, 4, 5)), (batch.edges, (9, 0, 14))):
        rng = np.random.default_rng(0)
        given = [rng.standard_normal((n, D)) for n in sizes]
        for kind in (np.asarray, jnp.asarray):
            joined = layout.join([kind(x) for x in given])
            assert isinstance(joined, np.ndarray) == (kind is np.asarray)
            chex.assert_trees_all_equal(layout.split(joined), given)
        total = jax.ops.segment_sum(
            jnp.ones_like(joined).reshape(-1, D), layout.owner.ravel(), num_segments=len(graphs)
        )
        np.testing.assert_array_equal(total[:, 0], sizes)


def test_the_batch_is_the_blocks_of_its_graphs():
    graphs = graphs_of(SIZES[0])
    assert batch_graphs(graphs[:1]).graph == graphs[0]
    found = np.zeros((20, 13), int)
    row = column = 0
    for graph in graphs:
        src, dst = (np.asarray(x) for x in jab.ops.graph.reference.ends(graph))
        np.add.at(found, (src + row, dst + column), 1)
        row, column = row + graph.num_src, column + graph.num_dst
    src, dst = (np.asarray(x) for x in jab.ops.graph.reference.ends(batch_graphs(graphs).graph))
    again = np.zeros_like(found)
    np.add.at(again, (src, dst), 1)
    np.testing.assert_array_equal(again, found)


def test_loops_are_those_of_the_graphs_where_each_has_as_many_sources_as_destinations():
    graphs = graphs_of([(4, 4, 9), (6, 6, 5)])
    batch = batch_graphs([graph.with_self_loops() for graph in graphs])
    again = batch_graphs(graphs).graph.with_self_loops()
    src, dst = (np.asarray(x) for x in jab.ops.graph.reference.ends(batch.graph))
    pairs = np.sort(src * 10 + dst)
    src, dst = (np.asarray(x) for x in jab.ops.graph.reference.ends(again))
    np.testing.assert_array_equal(pairs, np.sort(src * 10 + dst))
    alone = batch_graphs(graphs_of([(6, 4, 9)]), nodes=(9, 7)).graph  # its first sources are its own
    assert alone.with_self_loops(capacity=17).num_edges > 9


def test_equality_and_words():
    graphs = graphs_of(SIZES[0])
    batch = batch_graphs(graphs)
    assert batch == batch_graphs(graphs) != batch_graphs(graphs[:2])
    assert batch.src == batch_graphs(graphs).src != batch.dst
    assert hash(batch) == hash(batch_graphs(graphs))
    assert repr(batch.src) == "BatchLayout(graphs=3, rows=20, stacked=False)"
    assert batch != 3


GRAPHS = graphs_of(SIZES[0])
BATCH = batch_graphs(GRAPHS)
BAD = {
    "capacity": (
        ValueError,
        lambda: batch_graphs(GRAPHS, capacity=22),
        "capacity must be at least 23, the number of edges, got 22",
    ),
    "sources": (
        ValueError,
        lambda: batch_graphs(GRAPHS, nodes=(19, 13)),
        "nodes must be at least 20, the number of sources, got 19",
    ),
    "destinations": (
        ValueError,
        lambda: batch_graphs(GRAPHS, nodes=(8, 4), stacked=True),
        "be at least 5, the number of destinations, got 4",
    ),
    "none": (ValueError, lambda: batch_graphs([]), "graphs must hold at least one graph, got none"),
    "kind": (
        TypeError,
        lambda: batch_graphs([GRAPHS[0], 3]),
        "graphs must be a list of BipartiteCSC, got list, BipartiteCSC, int",
    ),
    "one graph": (
        TypeError,
        lambda: batch_graphs(GRAPHS[0]),
        "graphs must be a list of BipartiteCSC, got BipartiteCSC",
    ),
    "traced": (
        TypeError,
        lambda: jax.jit(lambda g: batch_graphs([g]).graph)(GRAPHS[0]),
        "the graph must be known, got a traced one",
    ),
    "stack": (
        ValueError,
        lambda: batch_graphs([batch_graphs(GRAPHS, stacked=True).graph]),
        "the graph must be one graph, got a stack",
    ),
    "dst of its own": (
        ValueError,
        lambda: jab.graph_attention(BATCH.graph, jnp.ones((20, 4)), None, jnp.ones(8), num_heads=2),
        "dst must be given for graphs side by side with other numbers of sources, got None; "
        "batch.dst.join makes that of dst",
    ),
    "self-loops": (
        ValueError,
        lambda: BATCH.graph.with_self_loops(),
        "hold as its first sources the destinations, got several graphs side by side, each with sources of "
        "its own before the next one's; add the loops to each graph before batch_graphs",
    ),
    "arrays": (
        ValueError,
        lambda: BATCH.src.join([np.ones(6)]),
        "BatchLayout.join: arrays must hold one for each of 3 graphs, got 1",
    ),
    "rows": (
        ValueError,
        lambda: BATCH.dst.join([np.ones(4), np.ones(3), np.ones(5)]),
        "arrays[1] must have shape [size, ...] as the others = (4,), got (3,)",
    ),
    "joined": (
        ValueError,
        lambda: BATCH.dst.split(np.ones((3, 2))),
        "BatchLayout.split: x must have shape [rows, ...] = (13, 2), got (3, 2)",
    ),
    "traced batch": (
        TypeError,
        lambda: jax.jit(lambda b: b.dst.split(jnp.ones(13)))(BATCH),
        "BatchLayout.split: the batch must be known, got a traced one; join and split outside jit",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    kind, call, message = BAD[name]
    with pytest.raises(kind, match=re.escape(message)):
        call()
