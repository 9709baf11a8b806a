"""What a graph carries beside its edges: it stays with them, and arrays of other graphs are refused."""

import pickle
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import thorough
from ops.graph.calls import random_edges

from jax_attn_bwd import BipartiteCSC, batch_graphs, edge_sum, graph_attention
from jax_attn_bwd._core import targets
from jax_attn_bwd.ops.graph import groups


@pytest.fixture(params=["cpu", "gpu"])
def build(request, monkeypatch):
    """`build(seed, **options) -> graph`, as on that platform."""

    def made(seed=0, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(targets, "platform", lambda: request.param)
            graph = BipartiteCSC.from_coo(*random_edges(7, 7, 60, seed=seed), 7, 7, **options)
        assert (graph.schedules is not None) == (request.param == "gpu")
        return graph

    return made


def arrays():
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.standard_normal((7, 8))), jnp.asarray(rng.standard_normal(16))


def call(graph):
    x, a = arrays()
    return graph_attention(graph, x, None, a, num_heads=2, implementation="xla")


@pytest.mark.parametrize("capacity", [None, 14_000])
def test_what_a_graph_carries_is_small(capacity, monkeypatch):
    """Beside its groups at most twice its indices, also with few edges a node and with hubs."""
    monkeypatch.setattr(targets, "platform", lambda: "gpu")
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    for power in (0, -0.7):
        share = (np.arange(2708) + 1.0) ** power
        src, dst = np.random.default_rng(0).choice(2708, (2, 13_000), p=share / share.sum())
        graph = BipartiteCSC.from_coo(src, dst, 2708, 2708, capacity=capacity)
        orders = graph.by_destination.order, graph.by_source.order
        assert 0 < size((graph.schedules, orders)) <= 2 * size(graph.indices)


PARTS = ("offsets", "indices", "map_csc_to_coo", "by_destination", "by_source", "schedules")


@pytest.mark.parametrize("capacity", [None, pytest.param(80, marks=thorough)])
@pytest.mark.parametrize("part", PARTS)
def test_arrays_of_another_graph_are_refused(part, capacity, build):
    """Wherever they can be read: in a call, and closed over by a compiled function."""
    one, other = build(0, capacity=capacity), build(1, capacity=capacity)
    mixed = replace(one, **{part: getattr(other, part)})
    if getattr(one, part) is None:
        call(mixed)
        return
    message = "the graph must hold groups and schedules of the edges that it has"
    with pytest.raises(ValueError, match=f"graph_attention: {message}"):
        call(mixed)
    with pytest.raises(ValueError, match=f"graph_attention: {message}"):
        jax.jit(lambda: call(mixed))()
    with pytest.raises(ValueError, match=f"edge_sum: {message}"):
        edge_sum(mixed, jnp.ones((mixed.capacity, 1)))


def test_the_order_of_other_groups_is_refused(build):
    one, other = build(0), build(1)
    if one.by_source.order is not None:
        mixed = replace(one, by_source=one.by_source._replace(order=other.by_source.order))
        with pytest.raises(ValueError, match="graph_attention: the graph must hold groups and schedules"):
            call(mixed)


@pytest.mark.parametrize("field", ["node", "other", "number"])
def test_groups_of_other_sizes_are_refused(field, build):
    graph = build(0)
    cut = {field: getattr(graph.by_source, field)[:-1]}
    with pytest.raises(ValueError, match="graph_attention: the graph must hold groups and schedules"):
        call(replace(graph, by_source=graph.by_source._replace(**cut)))


def test_arrays_that_are_known_are_not_read_again(build, monkeypatch):
    """Those that a constructor made, and a batch; others are, once for each object."""
    graph, asked = build(), []
    monkeypatch.setattr(groups, "belong_together", lambda graph: asked.append(graph) or True)
    for known in (graph, batch_graphs([graph]).graph):
        edge_sum(known, jnp.ones((60, 1)))
    assert not asked
    other = jax.tree.map(jnp.copy, graph)
    for _ in range(2):
        edge_sum(other, jnp.ones((60, 1)))
    assert len(asked) == 1


def test_a_graph_stays_one(build):
    """Through trees, `jit`, `device_put`, `pickle` and a batch of one."""
    graph = build(capacity=70)
    expected = call(graph)
    ways = (
        lambda graph: jax.tree.map(jnp.asarray, graph),
        jax.jit(lambda graph: graph),
        jax.device_put,
        lambda graph: replace(graph, aligned=True),
        lambda graph: pickle.loads(pickle.dumps(graph)),
    )
    for way in ways:
        assert way(graph) == graph
        np.testing.assert_array_equal(call(way(graph)), expected)
    step = jax.jit(call)
    np.testing.assert_array_equal(step(graph), step(way(graph)))
    batch = batch_graphs([graph], capacity=70)
    np.testing.assert_allclose(call(batch.graph), expected, 1e-12, 1e-12)
