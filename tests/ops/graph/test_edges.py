"""Edges: missing, in any order, twice, beside padding, in a batch of graphs."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from helpers import assert_trees_close
from ops.graph.calls import (
    FUNCTIONS,
    QUICK,
    D,
    H,
    each_kind,
    inputs,
    normal,
    program,
    random_edges,
    values_and_gradients,
)

import jax_attn_bwd as jab
from jax_attn_bwd import BipartiteCSC


@each_kind("transformer")
def test_a_destination_without_edges_gives_zero_and_takes_no_gradient(kind):
    src, dst = random_edges()
    graph = BipartiteCSC.from_coo(src, dst, 7, 5)
    got = values_and_gradients(FUNCTIONS[kind][0], inputs(kind, 7, 5), graph=graph, return_residual=True)
    np.testing.assert_array_equal(got["output 0"][3:], 0)
    np.testing.assert_array_equal(got["output 1"][3:], -np.inf)
    nodes = ("query", "key", "value") if kind == "transformer" else ("dst", "src")
    for name, first in zip(nodes, (3, 5, 5), strict=False):
        np.testing.assert_array_equal(got[name][first:], 0)
        assert np.abs(got[name][:first]).max() > 0


@each_kind("transformer")
def test_the_order_of_the_edges_does_not_matter(kind):
    """Edges and their data permuted together, as a list or by `map_csc_to_coo`."""
    src, dst = random_edges()
    order = np.random.default_rng(1).permutation(len(src))
    arrays = inputs(kind, 7, 5, edge=len(src))
    cts = [normal(5, H * D, seed=5), normal(len(src), H, seed=6)]
    run = program(FUNCTIONS[kind][0], return_attention_weights=True)
    one = run(BipartiteCSC.from_coo(src, dst, 7, 5), arrays, cts)
    graph = BipartiteCSC.from_coo(src[order], dst[order], 7, 5)
    permuted = arrays | {"edge": arrays["edge"][order]}
    two = run(graph, permuted, [cts[0], cts[1][order]])
    by_edge = ("output 1", "edge")
    assert_trees_close(two, {n: x[order] if n in by_edge else x for n, x in one.items()}, 1e-12)


@each_kind("gat")
def test_an_edge_that_occurs_twice_counts_twice(kind):
    """It acts like one edge whose score is greater by log 2; all edges of a node doubled change nothing."""
    src, dst = random_edges()
    run, arrays = program(FUNCTIONS[kind][0]), inputs(kind, 7, 5)
    once = BipartiteCSC.from_coo(src, dst, 7, 5, capacity=2 * len(src))
    twice = BipartiteCSC.from_coo(np.tile(src, 2), np.tile(dst, 2), 7, 5)
    assert_trees_close(run(twice, arrays, None), run(once, arrays, None), 1e-12)


@each_kind("gat")
def test_graphs_of_one_capacity_share_a_program(kind):
    """One trace for two graphs handed in as arguments; the padding changes nothing."""
    function, cts = FUNCTIONS[kind][0], [normal(5, H * D, seed=5)]
    chex.clear_trace_counter()
    traced_once = chex.assert_max_traces(function, n=1)
    step = program(traced_once)
    for nnz in (0, 23):
        src, dst = random_edges(nnz=nnz, seed=nnz)
        arrays = inputs(kind, 7, 5, edge=40)
        exact = {n: x[:nnz] if n == "edge" else x for n, x in arrays.items()}
        padded = BipartiteCSC.from_coo(src, dst, 7, 5, capacity=40)
        got = step(padded, arrays, cts)
        graph = BipartiteCSC.from_coo(src, dst, 7, 5)
        expected = values_and_gradients(function, exact, cts, graph)
        np.testing.assert_array_equal(got["edge"][nnz:], 0)
        assert_trees_close(got | {"edge": got["edge"][:nnz]}, expected, 1e-12)


def test_a_batch_of_graphs():
    """`vmap` over graphs of one capacity, stacked."""
    graphs = [BipartiteCSC.from_coo(*random_edges(nnz=n, seed=n), 7, 5, capacity=30) for n in (9, 30)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *graphs)
    arrays = inputs("gat", 7, 5)

    def gradient(graph, arrays):
        def loss(a):
            out = jab.graph_attention(graph, **a, num_heads=H)
            return (jnp.sin(out) * normal(5, H * D, seed=5)).sum()

        return jax.grad(loss)(arrays)

    batched = jax.jit(jax.vmap(gradient, in_axes=(0, None)), compiler_options=QUICK)(stacked, arrays)
    alone = jax.jit(gradient, compiler_options=QUICK)
    for i, graph in enumerate(graphs):
        single = alone(graph, arrays)
        assert_trees_close(jax.tree.map(lambda x, i=i: x[i], batched), single, 1e-12)
