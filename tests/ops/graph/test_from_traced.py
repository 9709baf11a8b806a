"""Graphs that are built inside `jit`, of edges that are found there."""

import re
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_trees_close, thorough
from ops.graph.calls import FUNCTIONS, QUICK, D, H, inputs, normal, program, random_edges

import jax_attn_bwd as jab
from jax_attn_bwd import BipartiteCSC
from jax_attn_bwd._core import targets
from jax_attn_bwd.ops.graph import groups, plan


def built(num_src, num_dst):
    """`(src, dst) -> graph`, compiled, of nodes that are known."""
    return jax.jit(lambda src, dst: BipartiteCSC.from_traced(src, dst, num_src, num_dst))


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize(
    ("num_src", "num_dst", "nnz"), [(7, 5, 23), (9, 8, 5000), (4, 3, 0), (3, 0, 0), (1, 1, 1)]
)
def test_as_numpy_builds_it(num_src, num_dst, nnz, width, monkeypatch):
    """Every array, of hubs, too, whose edges are summed in runs."""
    monkeypatch.setattr(plan, "group_width", lambda edges, nodes: width)
    src, dst = random_edges(max(num_src, 3), max(num_dst, 3), nnz)
    dst[nnz // 2 :] = 0
    expected = BipartiteCSC.from_coo(src, dst, num_src, num_dst, capacity=nnz)
    got = built(num_src, num_dst)(jnp.asarray(src), jnp.asarray(dst))
    assert got == expected
    assert (got.run_owners is not None) == (nnz > 16 * groups.RUN and width == 1)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_it_searches_in_a_loop_on_cpus_alone(platform, monkeypatch):
    """On a GPU its launches would cost more than the rest; on a CPU all its steps take long to compile."""
    monkeypatch.setattr(targets, "platform", lambda: platform)
    ends = jax.ShapeDtypeStruct((5000,), jnp.int32)
    found = jax.jit(lambda src, dst: BipartiteCSC.from_traced(src, dst, 900, 800)).lower(ends, ends).as_text()
    assert found.count('"stablehlo.sort"') == (2 if platform == "cpu" else 3)  # one of both sides' segments
    assert ("stablehlo.while" in found) == (platform == "cpu")
    assert platform == "cpu" or '"stablehlo.scatter"' not in found


@pytest.mark.parametrize("few", [0, pytest.param(5000, marks=thorough)])
def test_as_numpy_builds_it_for_a_gpu(few, monkeypatch):
    """But for how sums of several segments, or groups, are put together, which `jit` leaves to each call."""
    monkeypatch.setattr(targets, "platform", lambda: "gpu")
    monkeypatch.setattr(plan, "_FEW_EDGES", few)
    src, dst = random_edges(30, 40, 5000)
    src[:700], dst[2500:] = 3, 0

    def without_levels(graph):
        sides = ("by_destination", "by_source")
        cut = lambda x: x.order and ((x.order.first is not None and x.order._replace(levels=None)) or None)
        groups = {side: getattr(graph, side) for side in sides}
        whole = {side: getattr(graph.schedules, side)._replace(hubs=None, levels=[]) for side in sides}
        groups = {side: x._replace(order=cut(x)) for side, x in groups.items()}
        return replace(graph, **groups, schedules=graph.schedules._replace(**whole))

    expected = BipartiteCSC.from_coo(src, dst, 30, 40, capacity=5000)
    got = built(30, 40)(jnp.asarray(src), jnp.asarray(dst))
    assert got == without_levels(expected)
    assert (got.schedules.by_destination.node < 0).sum() > 4


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[thorough] * (k != "gat")) for k in FUNCTIONS])
def test_ends_out_of_range_are_no_edges(kind):
    """One trace for any; NaN in edge data where no edge is; returned weights and gradients are 0 there."""
    src, dst = random_edges()
    gone = np.arange(23) % 3 == 1
    arrays, function = inputs(kind, 7, 5, edge=23), FUNCTIONS[kind][0]
    cts = [normal(5, H * D, seed=5), normal(23, H, seed=6)]
    kept = arrays | {"edge": arrays["edge"][~gone]}
    graph = BipartiteCSC.from_coo(src[~gone], dst[~gone], 7, 5)
    run = program(function, return_attention_weights=True)
    expected = run(graph, kept, [cts[0], cts[1][~gone]])
    poisoned = arrays | {"edge": jnp.where(gone[:, None], jnp.nan, arrays["edge"])}

    chex.clear_trace_counter()

    def step(src, dst):
        return run.__wrapped__(BipartiteCSC.from_traced(src, dst, 7, 5), poisoned, cts)

    step = jax.jit(chex.assert_max_traces(step, 1), compiler_options=QUICK)
    for bad in ((-1, -1), (7, 0), (0, 5), (1 << 20, -5)):
        ends = (jnp.asarray(np.where(gone, x, y)) for x, y in zip(bad, (src, dst), strict=True))
        got = step(*ends)
        for name in ("output 1", "edge"):
            assert not np.asarray(got[name])[gone].any()
            got[name] = got[name][~gone]
        assert_trees_close(got, expected, 1e-12)


def test_under_vmap():
    """A graph for each member of a batch: the nearest of points that move."""

    def mean_of_nearest(x):
        away = jnp.abs(x[:, None] - x[None]) + jnp.diag(jnp.full(len(x), jnp.inf))
        nearest = jax.lax.top_k(-away, 2)[1].ravel()
        nodes = jnp.repeat(jnp.arange(len(x), dtype=nearest.dtype), 2)
        graph = BipartiteCSC.from_traced(nearest, nodes, len(x), len(x))
        return jab.edge_mean(graph, x[nearest])

    x = normal(3, 8)
    got = jax.jit(jax.vmap(mean_of_nearest), compiler_options=QUICK)(x)
    for row, of_one in zip(got, x, strict=True):
        nearest = np.argsort(abs(of_one[:, None] - of_one[None]), axis=1)[:, 1:3]
        assert_close(row, np.asarray(of_one)[nearest].mean(1), 1e-12)


@pytest.mark.parametrize("fill_value", ["mean", pytest.param("min", marks=thorough), 2.5])
def test_self_loops_of_a_traced_graph(fill_value):
    """The graph, edge data and gradients that it has outside `jit`."""
    src, dst = random_edges(6, 6)
    graph = BipartiteCSC.from_coo(src, dst, 6, 6, capacity=25)
    edge, ct = normal(25, 2), normal(31, 2, seed=1)

    def loops(graph, edge, capacity=None):
        found, pullback = jax.vjp(
            lambda edge: graph.with_self_loops(edge, fill_value=fill_value, capacity=capacity)[1], edge
        )
        return graph.with_self_loops(capacity=capacity), found, pullback(ct)[0]

    (expected, *data), (got, *own) = loops(graph, edge, 31), jax.jit(loops)(graph, edge)
    assert got == expected
    for one, other in zip(own, data, strict=True):
        assert_close(one, other, 1e-12)
    with pytest.raises(ValueError, match="capacity must be at least 31, that of the traced graph and a loop"):
        jax.jit(lambda graph: graph.with_self_loops(capacity=30).offsets)(graph)


def test_edges_out_of_range_outside_jit():
    """Self-loops leave them out; a batch refuses them."""
    graph = BipartiteCSC.from_traced(jnp.array([0, -1, 2]), jnp.array([1, 1, 1]), 3, 3)
    found, data = graph.with_self_loops(jnp.array([1.0, jnp.nan, 3.0]))
    assert found == BipartiteCSC.from_coo([0, 2], [1, 1], 3, 3).with_self_loops()
    assert data.tolist() == [1, 3, 0, 2, 0]
    with pytest.raises(ValueError, match="a graph must have its edges before its padding"):
        jab.batch_graphs([graph])


BAD = {
    "shape": (
        ValueError,
        lambda: BipartiteCSC.from_traced([0], [0, 1], 2, 2),
        "dst must have shape as src = (1,), got (2,)",
    ),
    "axes": (
        ValueError,
        lambda: BipartiteCSC.from_traced([[0]], [0], 2, 2),
        "src must have one axis, got (1, 1)",
    ),
    "dtype": (
        TypeError,
        lambda: BipartiteCSC.from_traced([0.5], [0], 2, 2),
        "src must be integers, got dtype float",
    ),
    "count": (
        TypeError,
        lambda: BipartiteCSC.from_traced([0], [0], jnp.ones(()), 2),
        "num_src must be an int",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    kind, call, message = BAD[name]
    with pytest.raises(kind, match=re.escape(f"BipartiteCSC.from_traced: {message}")):
        call()
