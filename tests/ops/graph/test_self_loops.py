"""Self-loops, and graphs from the arrays of PyTorch Geometric."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

from jax_attn_bwd import BipartiteCSC

SRC, DST = np.array([0, 2, 1, 1, 3, 2]), np.array([1, 1, 1, 3, 3, 2])  # three of them loops
KEPT = [0, 1, 3]
REDUCE = {"mean": np.mean, "add": np.sum, "min": np.min, "max": np.max}


def edges_of(graph):
    """(src, dst) in the caller's order."""
    number = np.asarray(graph.map_csc_to_coo)[: graph.num_edges]
    src, dst = np.empty((2, len(number)), int)
    src[number] = np.asarray(graph.indices)[: len(number)]
    dst[number] = np.repeat(np.arange(graph.num_dst), np.diff(graph.offsets))
    return src, dst


@pytest.mark.parametrize("capacity", [None, 11])
@pytest.mark.parametrize("fill_value", ["mean", "add", "min", "max", 2.5])
def test_each_node_gets_one_loop_and_its_data(rng, fill_value, capacity):
    src, dst = np.append(SRC, 3), np.append(DST, 3)  # the loop of node 3 twice
    graph, edge = BipartiteCSC.from_coo(src, dst, 4, 4), jnp.asarray(rng.standard_normal((7, 2, 3)))
    found, data = graph.with_self_loops(edge, fill_value=fill_value, capacity=capacity)
    assert found == graph.with_self_loops(capacity=capacity)
    got_src, got_dst = edges_of(found)
    np.testing.assert_array_equal(got_src, [*SRC[KEPT], 0, 1, 2, 3])
    np.testing.assert_array_equal(got_dst, [*DST[KEPT], 0, 1, 2, 3])
    assert found.capacity == (capacity or 7) == data.shape[0]
    np.testing.assert_array_equal(data[:3], edge[np.array(KEPT)])
    for node in range(4):
        into = [k for k in KEPT if DST[k] == node]
        if isinstance(fill_value, float):
            expected = np.full((2, 3), fill_value)
        else:
            expected = REDUCE[fill_value](np.asarray(edge)[into], 0) if into else np.zeros((2, 3))
        assert_close(data[3 + node], expected, 1e-15)


def test_more_sources_than_destinations():
    graph = BipartiteCSC.from_coo([3, 0], [1, 0], 4, 2).with_self_loops()
    assert [x.tolist() for x in edges_of(graph)] == [[3, 0, 1], [1, 0, 1]]
    assert (graph.num_src, graph.num_dst) == (4, 2)


def test_edge_data_are_differentiable(rng):
    graph, weights = BipartiteCSC.from_coo(SRC, DST, 4, 4), jnp.asarray(rng.standard_normal((7, 2)))
    edge = jnp.asarray(rng.standard_normal((6, 2)))
    gradient = jax.jit(jax.grad(lambda edge: (graph.with_self_loops(edge)[1] * weights).sum()))(edge)
    expected = np.zeros((6, 2))
    weights = np.asarray(weights)
    expected[KEPT] = weights[:3]
    expected[[0, 1]] += weights[3 + 1] / 2  # two edges into node 1, one into node 3
    expected[3] += weights[3 + 3]
    assert_close(gradient, expected, 1e-15)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_edge_data_are_summed_in_float32(rng, dtype):
    """A thousand edges into node 0, whose own loop is replaced; what else it holds does not count."""
    n = 1000
    nodes = np.arange(n + 1)
    graph = BipartiteCSC.from_coo(nodes, np.zeros(n + 1, int), n + 1, n + 1)
    edge = jnp.asarray(rng.uniform(50, 100, (n + 1, 2)), dtype).at[0].set(jnp.nan)
    expected = np.asarray(edge, np.float64)[1:].mean(0)
    for found in (graph.with_self_loops, jax.jit(graph.with_self_loops)):
        _, data = found(edge)
        assert data.dtype == dtype
        assert_close(data[n].astype(float), expected, float(jnp.finfo(dtype).eps))
        assert not data[n + 1 :].any()


def test_edge_index():
    index = np.stack([SRC, DST]).astype(np.int32)
    assert BipartiteCSC.from_edge_index(index, 4) == BipartiteCSC.from_coo(SRC, DST, 4, 4)
    assert BipartiteCSC.from_edge_index(index, (5, 4)) == BipartiteCSC.from_coo(SRC, DST, 5, 4)
    assert BipartiteCSC.from_edge_index([list(SRC), list(DST)], [5, 4]).num_src == 5
    assert BipartiteCSC.from_edge_index([[], []], 3).num_edges == 0
    with_loops = BipartiteCSC.from_edge_index(index, 4, add_self_loops=True, capacity=9)
    assert with_loops == BipartiteCSC.from_coo(SRC, DST, 4, 4).with_self_loops(capacity=9)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda g: g.with_self_loops(jnp.ones((5, 1))),
            ValueError,
            r"edge must have shape \[nnz, ...\], nnz = 6",
        ),
        (lambda g: g.with_self_loops(np.arange(6)), TypeError, "edge must be a floating"),
        (lambda g: g.with_self_loops(jnp.ones(6), fill_value="sum"), ValueError, "fill_value must be one of"),
        (lambda g: g.with_self_loops(fill_value="sum"), ValueError, "fill_value must be one of"),
        (lambda g: g.with_self_loops(jnp.ones(6), fill_value=None), TypeError, "fill_value must be a number"),
        (
            lambda g: g.with_self_loops(jnp.ones((6, 2)), fill_value=jnp.ones(3)),
            ValueError,
            r"fill_value must broadcast to \[nodes, ...\] as edge = \(4, 2\), got \(3,\)",
        ),
        (lambda g: g.with_self_loops(capacity=5), ValueError, "capacity must be at least nnz = 7"),
        (
            lambda g: BipartiteCSC.from_edge_index([0, 1], 2),
            ValueError,
            r"edge_index must have shape \[2, nnz\]",
        ),
        (
            lambda g: BipartiteCSC.from_edge_index([[0, 1], [1]], 2),
            ValueError,
            r"edge_index must have shape \[2, nnz\], got \[\(2,\), \(1,\)\]",
        ),
        (
            lambda g: BipartiteCSC.from_edge_index([[0], [9]], 2),
            ValueError,
            r"the destinations of edge_index must lie in \[0, 2\), the range of num_nodes, got 9",
        ),
        (lambda g: BipartiteCSC.from_edge_index([[0], [1]], None), TypeError, "num_nodes must be an int"),
        (
            lambda g: BipartiteCSC.from_edge_index([[0], [1]], (2, 2, 2)),
            ValueError,
            r"num_nodes must be one number, or \(sources, destinations\), got 3 of them",
        ),
    ],
    ids=[
        "shape",
        "dtype",
        "fill",
        "fill_alone",
        "fill_kind",
        "fill_shape",
        "capacity",
        "index",
        "ragged",
        "range",
        "nodes",
        "three",
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error, match=f"^BipartiteCSC.*{words}"):
        call(BipartiteCSC.from_coo(SRC, DST, 4, 4))
