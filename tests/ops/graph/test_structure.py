"""`BipartiteCSC`: what it holds, whatever it is built from, and what it refuses."""

import re
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import thorough
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_attn_bwd import BipartiteCSC
from jax_attn_bwd._core import targets
from jax_attn_bwd.ops.graph import plan
from jax_attn_bwd.ops.graph.reference import ends


def edges_of(groups, nodes, others, capacity):
    """{edge: (node, other)} that groups hold, each once; the padding is past every end."""
    node = np.broadcast_to(np.asarray(groups.node)[:, None], groups.number.shape)
    exists = np.asarray(groups.number) < capacity
    assert (np.asarray(groups.other)[~exists] == others).all()
    found = np.asarray(groups.number)[exists]
    assert len(set(found.tolist())) == len(found)
    assert (np.diff(np.asarray(groups.node)) >= 0).all()
    pairs = zip(node[exists].tolist(), np.asarray(groups.other)[exists].tolist(), strict=True)
    return dict(zip(found.tolist(), pairs, strict=True))


@pytest.mark.parametrize("padded", [False, True])
def test_both_orders_of_one_graph_hold_every_edge_once(padded):
    assert_every_edge_once(num_src=7, num_dst=4, nnz=40, spare=5, seed=0, padded=padded)


@thorough
@settings(max_examples=30, deadline=None)
@given(
    num_src=st.integers(1, 9),
    num_dst=st.integers(1, 9),
    nnz=st.integers(0, 60),
    spare=st.integers(0, 20),
    seed=st.integers(0, 9),
    padded=st.booleans(),
)
def test_both_orders_hold_every_edge_once(**graph):
    assert_every_edge_once(**graph)


def assert_every_edge_once(num_src, num_dst, nnz, spare, seed, padded):
    rng = np.random.default_rng(seed)
    src, dst = rng.integers(0, num_src, nnz), rng.integers(0, num_dst, nnz)
    capacity = nnz + spare if padded else None
    graph = BipartiteCSC.from_coo(src, dst, num_src, num_dst, capacity=capacity)
    room = graph.capacity
    assert room == (capacity if padded else nnz)
    incoming = edges_of(graph.by_destination, num_dst, num_src, room)
    outgoing = edges_of(graph.by_source, num_src, num_dst, room)
    assert incoming == {e: (dst[e], src[e]) for e in range(nnz)}
    assert outgoing == {e: (src[e], dst[e]) for e in range(nnz)}
    source, destination = ends(graph)
    np.testing.assert_array_equal(source[:nnz], src)
    np.testing.assert_array_equal(destination[:nnz], dst)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_csc_and_coo_build_the_same_graph(dtype):
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 6, 30).astype(dtype), rng.integers(0, 5, 30).astype(dtype)
    order = np.argsort(dst, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=5))]).astype(dtype)
    one = BipartiteCSC.from_coo(src, dst, 6, 5)
    two = BipartiteCSC.from_csc(offsets, src[order], 6, map_csc_to_coo=order)
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert jax.tree.structure(one) == jax.tree.structure(two)
    assert all(x.dtype == np.int32 for x in jax.tree.leaves(one))
    np.testing.assert_array_equal(one.offsets, offsets)
    np.testing.assert_array_equal(one.indices, src[order])


def test_from_jraph_and_from_scipy_name_what_they_take():
    with pytest.raises(TypeError, match=r"from_scipy: matrix must be .* sparse .*, got ndarray; scipy"):
        BipartiteCSC.from_scipy(np.eye(3))
    with pytest.raises(TypeError, match=r"from_jraph: graph must be a jraph.GraphsTuple.* NoneType"):
        BipartiteCSC.from_jraph(None)


def test_from_jraph_and_from_scipy():
    src, dst = np.array([0, 2, 1, 2]), np.array([1, 0, 1, 3])
    batch = SimpleNamespace(senders=jnp.asarray(src), receivers=jnp.asarray(dst), n_node=[3, 1])
    expected = BipartiteCSC.from_coo(src, dst, 4, 4)
    jax.tree.map(np.testing.assert_array_equal, BipartiteCSC.from_jraph(batch), expected)

    sparse = pytest.importorskip("scipy.sparse")
    matrix = sparse.coo_matrix((np.ones(4), (dst, src)), shape=(4, 3))
    graph = BipartiteCSC.from_scipy(matrix, capacity=9)
    assert (graph.num_dst, graph.num_src, graph.capacity) == (4, 3, 9)
    np.testing.assert_array_equal(graph.indices[:4], matrix.tocsr().indices)

    twice = sparse.coo_array((np.ones(4), ([0, 1, 1, 1], [2, 0, 0, 2])), shape=(2, 3))
    with pytest.raises(
        ValueError, match=r"hold each entry once, got 1 of 4 more than once; .*from_coo\(matrix"
    ):
        BipartiteCSC.from_scipy(twice)
    assert BipartiteCSC.from_coo(twice.col, twice.row, 3, 2).num_edges == 4
    twice.sum_duplicates()
    assert BipartiteCSC.from_scipy(twice).num_edges == 3


def test_shapes_depend_on_capacity_and_node_counts_alone():
    rng = np.random.default_rng(0)

    def shapes(nnz, hub):
        dst = np.zeros(nnz, int) if hub else rng.integers(0, 40, nnz)
        graph = BipartiteCSC.from_coo(rng.integers(0, 50, nnz), dst, 50, 40, capacity=300)
        return jax.tree.map(lambda x: (x.shape, x.dtype), graph)

    assert shapes(0, False) == shapes(7, True) == shapes(300, False) == shapes(300, True)


def test_a_hub_is_many_groups_and_little_padding():
    dst = np.concatenate([np.full(10_000, 3), np.arange(50)])
    graph = BipartiteCSC.from_coo(np.arange(10_050) % 77, dst, 77, 50)
    slots = graph.by_destination.number.size
    assert slots <= 10_050 + 50 * graph.by_destination.number.shape[1]


def test_a_million_edges_in_a_second_or_so():
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 50_000, 1_000_000), rng.integers(0, 50_000, 1_000_000)
    start = time.perf_counter()
    BipartiteCSC.from_coo(src, dst, 50_000, 50_000)
    assert time.perf_counter() - start < 10  # a tenth of it on an idle machine; a Python loop takes minutes


def test_counts_beyond_int32_are_refused(monkeypatch):
    """Nodes, edges and slots are counted by int32. Rows are addressed by node, head and feature apart,
    never by their product, so nodes x dim may well pass 2**31."""
    with pytest.raises(ValueError, match=r"num_src must lie in \[0, 2147483647\), got 2147483648"):
        BipartiteCSC.from_csc([0], np.zeros(0, np.int64), 2**31)
    monkeypatch.setattr(plan, "group_width", lambda edges, nodes: 8)
    with pytest.raises(ValueError, match=r"need at most 2147483647 slots.*split the graph"):
        BipartiteCSC.from_coo([0], [0], 1, 1, capacity=2**31 - 2)


BAD = {
    "starts": (dict(offsets=[1, 2], indices=[0, 0]), "offsets must start at 0, got 1"),
    "falls": (
        dict(offsets=[0, 2, 1, 3], indices=[0, 0, 0]),
        "offsets must not decrease, got 2 then 1 at position 2",
    ),
    "ends": (dict(offsets=[0, 2], indices=[0]), "offsets must end at the number of indices, 1, got 2"),
    "no offsets": (dict(offsets=[], indices=[]), "offsets must have shape [num_dst + 1], got (0,)"),
    "too large": (
        dict(offsets=[0, 1], indices=[3]),
        "indices must lie in [0, 3), the range of num_src, got 3",
    ),
    "negative": (
        dict(offsets=[0, 1], indices=[-1]),
        "indices must lie in [0, 3), the range of num_src, got -1",
    ),
    "map repeats": (
        dict(offsets=[0, 2], indices=[0, 1], map_csc_to_coo=[1, 1]),
        "map_csc_to_coo must be a permutation of 0 to 2 - 1, got other or repeated numbers",
    ),
    "map short": (
        dict(offsets=[0, 2], indices=[0, 1], map_csc_to_coo=[0]),
        "map_csc_to_coo must be a permutation of 0 to 2 - 1, got shape (1,)",
    ),
    "capacity": (
        dict(offsets=[0, 2], indices=[0, 1], capacity=1),
        "capacity must be at least nnz = 2, got 1",
    ),
    "two axes": (dict(offsets=[[0, 1]], indices=[0]), "offsets must have one axis, got (1, 2)"),
    "num_src": (dict(offsets=[0], indices=[], num_src=-1), "num_src must lie in [0, 2147483647), got -1"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_graph_is_refused_when_it_is_built(name):
    arguments, message = BAD[name]
    with pytest.raises(ValueError, match=re.escape(f"BipartiteCSC.from_csc: {message}")):
        BipartiteCSC.from_csc(**{"num_src": 3, **arguments})


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint64])
def test_integers_of_any_width(dtype):
    offsets, indices = np.array([0, 2, 2], dtype), np.array([0, 1], dtype)
    graph = BipartiteCSC.from_csc(offsets, indices, 256, capacity=4)
    np.testing.assert_array_equal(graph.indices, [0, 1, 256, 256])
    with pytest.raises(ValueError, match="offsets must not decrease, got 2 then 1 at position 2"):
        BipartiteCSC.from_csc(np.array([0, 2, 1, 2], dtype), indices, 2)


def test_kinds_that_are_refused():
    with pytest.raises(ValueError, match="offsets must fit int64, got 18446744073709551615"):
        BipartiteCSC.from_csc(np.array([0, 2**64 - 1], np.uint64), [0], 3)
    with pytest.raises(TypeError, match="offsets must be integers, got dtype float64"):
        BipartiteCSC.from_csc(np.zeros(1), [], 3)
    with pytest.raises(TypeError, match="num_src must be an int, got float"):
        BipartiteCSC.from_csc([0], [], 3.0)
    with pytest.raises(TypeError, match=r"src must be a concrete array.*outside jit"):
        jax.jit(lambda src: BipartiteCSC.from_coo(src, [0], 1, 1))(jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match=re.escape("dst must have shape (2,), got (1,)")):
        BipartiteCSC.from_coo([0, 1], [0], 2, 1)
    with pytest.raises(ValueError, match=re.escape("dst must lie in [0, 1), the range of num_dst, got 4")):
        BipartiteCSC.from_coo([0], [4], 2, 1)


def test_width_of_a_group_follows_the_mean_degree(monkeypatch):
    """Where a scatter is dear; on a CPU it is not, and a group is one edge."""
    assert plan.group_width(5000, 100) == 1
    monkeypatch.setattr(targets, "platform", lambda: "gpu")
    widths = [plan.group_width(edges, 100) for edges in (0, 150, 400, 5000)]
    assert widths == sorted(widths)
