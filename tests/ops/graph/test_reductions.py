"""Sums, means and maxima over edges: ties, chunks, groups of several edges, sums of many."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import QUICK, assert_close, thorough
from ops.graph.calls import normal

import jax_attn_bwd as jab
from jax_attn_bwd import BipartiteCSC
from jax_attn_bwd.ops.graph import plan, reference

FUNCTIONS = {"edge_sum": jab.edge_sum, "edge_mean": jab.edge_mean, "edge_max": jab.edge_max}


def both(function, graph, edge, dout):
    """(out, gradient, gradient of the gradient's sine): compiled."""

    def first(edge, dout):
        out, pullback = jax.vjp(lambda edge: function(graph, edge), edge)
        return out, pullback(dout)[0]

    def run(edge, dout):
        second = jax.grad(lambda edge, dout: jnp.sin(first(edge, dout)[1]).sum(), (0, 1))
        return *first(edge, dout), *second(edge, dout)

    return jax.jit(run, compiler_options=QUICK)(edge, dout)


def test_a_cpu_sums_up_to_32_mib_without_a_loop():
    graph = BipartiteCSC.from_coo(np.arange(128), np.arange(128) % 5, 128, 5)

    def has_loop(columns, dtype):
        edge = jax.ShapeDtypeStruct((128, columns), dtype)
        return "scan[" in str(
            jax.make_jaxpr(lambda edge: jax.grad(lambda x: jab.edge_max(graph, x).sum())(edge))(edge)
        )

    assert [has_loop(n, jnp.float32) for n in (1 << 16, 3 << 15)] == [False, True]
    assert [has_loop(n, jnp.float64) for n in (1 << 15, 1 << 16)] == [False, True]


@pytest.fixture
def several_edges_in_a_group(monkeypatch):
    """Groups like those on a GPU, where no scatter has an order, and in many chunks."""
    jax.clear_caches()
    monkeypatch.setattr(plan, "group_width", lambda edges, nodes: 4)
    monkeypatch.setattr(plan, "adds_in_order", lambda: False)
    monkeypatch.setattr(plan, "whole_elements", lambda: 0)
    monkeypatch.setattr(plan, "chunk_elements", lambda: 256)
    yield
    jax.clear_caches()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[thorough] * (n != "edge_max")) for n in FUNCTIONS])
def test_groups_in_chunks(name, several_edges_in_a_group):
    """Edges in any order, some behind the end."""
    rng = np.random.default_rng(0)
    graph = BipartiteCSC.from_coo(rng.integers(0, 9, 80), rng.integers(0, 6, 80), 9, 7, capacity=91)
    edge = jnp.asarray(rng.integers(-3, 3, (91, 2, 3)) * 0.5)
    dout = normal(7, 2, 3)

    def definition(graph, edge):
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return reference.edge_reduction(name, graph, edge)

    names = ("out", "dedge", "second", "second of dout")
    found = both(FUNCTIONS[name], graph, edge, dout), both(definition, graph, edge, dout)
    for which, got, expected in zip(names, *found, strict=True):
        assert_close(got, expected, 1e-12, which)


def test_edges_that_tie_share_alike():
    """In any order of the edges; among equal infinities, too; one that is hidden by nothing but -inf."""
    inf = np.inf
    x, dst = np.array([2, 5, 5, 5, -inf, -inf, inf, 1.0]), np.array([0, 0, 0, 0, 1, 1, 2, 2])
    expected = np.array([0, 1, 1, 1, 1.5, 1.5, 3, 0])
    along = np.arange(8.0)
    for order in (np.arange(8), np.random.default_rng(0).permutation(8)):
        graph = BipartiteCSC.from_coo(np.zeros(8, int), dst[order], 1, 4)
        call = partial(jab.edge_max, graph)
        out, pullback = jax.vjp(call, jnp.asarray(x[order]))
        np.testing.assert_array_equal(out, [5, -inf, inf, 0])
        np.testing.assert_array_equal(pullback(jnp.full(4, 3.0))[0], expected[order])
        call = partial(call, forward_mode=True)
        _, dout = jax.jvp(call, (jnp.asarray(x[order]),), (jnp.asarray(along[order]),))
        np.testing.assert_array_equal(dout, [2, 4.5, 6, 0])


def test_sums_of_many_numbers_keep_their_digits():
    """Float32, 100,000 edges into one destination."""
    x = np.random.default_rng(0).random(100_000).astype(np.float32)
    graph = BipartiteCSC.from_coo(np.zeros(len(x), int), np.zeros(len(x), int), 1, 1)
    total = x.sum(dtype=np.float64)
    assert_close(jab.edge_sum(graph, jnp.asarray(x)), [total], 1e-6)
    assert_close(jab.edge_mean(graph, jnp.asarray(x)), [total / len(x)], 1e-6)


GRAPH = BipartiteCSC.from_coo([0, 2, 1], [1, 0, 1], 3, 2)
BAD = {
    "rows": (
        ValueError,
        lambda: jab.edge_sum(GRAPH, jnp.ones((2, 3))),
        "edge_sum: edge must have shape [nnz, ...] with nnz = 3, got (2, 3)",
    ),
    "a number": (ValueError, lambda: jab.edge_mean(GRAPH, jnp.ones(())), "edge_mean: edge must have shape"),
    "integers": (
        TypeError,
        lambda: jab.edge_max(GRAPH, jnp.ones(3, int)),
        "edge_max: edge must be a floating-point array",
    ),
    "dout": (
        ValueError,
        lambda: jab.edge_mean_bwd(jnp.ones(3), GRAPH),
        "edge_mean_bwd: dout must have shape [num_dst, ...] with num_dst = 2, got (3,)",
    ),
    "out": (
        ValueError,
        lambda: jab.edge_max_bwd(jnp.ones(2), GRAPH, jnp.ones(3), jnp.ones((2, 1))),
        "edge_max_bwd: out must have shape [num_dst, ...] as edge = (2,), got (2, 1)",
    ),
    "implementation": (
        ValueError,
        lambda: jab.edge_sum(GRAPH, jnp.ones(3), implementation="cuda"),
        "implementation must be None or",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    kind, call, message = BAD[name]
    with pytest.raises(kind, match=re.escape(message)):
        call()
