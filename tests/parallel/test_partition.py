"""Graphs cut into parts: who owns what, what travels, and how arrays come into the layout and back."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, thorough
from jax import export
from jax.sharding import PartitionSpec as P

from jax_attn_bwd import BipartiteCSC, graph_attention
from jax_attn_bwd.parallel import PartitionedGraph, Traffic, partition_graph, sharded_graph_attention
from jax_attn_bwd.parallel.partition import _schedule


def power_law(rng, nodes, edges, exponent=0.9):
    """Ends of edges by a power law, in no order."""
    weight = np.arange(1, nodes + 1.0) ** -exponent
    return rng.permutation(nodes)[rng.choice(nodes, edges, p=weight / weight.sum())]


def recovered(partitioned: PartitionedGraph, num_src: int, num_dst: int) -> np.ndarray:
    """(source, destination) of each edge in the caller's order, from the parts alone."""
    src_of = partitioned.src.place(np.arange(num_src) + 1) - 1
    dst_of = partitioned.dst.place(np.arange(num_dst) + 1) - 1
    edges = []
    for part in range(partitioned.src.parts):
        graph = jax.tree.map(lambda x, part=part: x[part], partitioned.graph)
        own = np.arange(partitioned.src.rows) + part * partitioned.src.rows
        table = np.concatenate([own, partitioned.remote[part]])
        count = graph.num_edges
        source = src_of[table[graph.indices[:count]]]
        row = np.repeat(np.arange(graph.num_dst), np.diff(graph.offsets))
        destination = dst_of[part * partitioned.dst.rows + row]
        number = partitioned.edge_number[part, :count]
        assert (np.diff(destination) >= 0).all()
        edges.append(np.stack([number, source, destination], 1))
    found = np.concatenate(edges)
    return found[np.argsort(found[:, 0]), 1:]


@pytest.mark.parametrize(("num_src", "num_dst"), [(29, 29), (40, 13), (5, 61)])
@pytest.mark.parametrize("parts", ["balanced", "contiguous", "given"])
def test_every_edge_is_with_its_destination(rng, num_src, num_dst, parts):
    src, dst = rng.integers(0, num_src - 1, 150), rng.integers(0, num_dst - 1, 150)
    graph = BipartiteCSC.from_coo(src, dst, num_src, num_dst)
    given = rng.integers(0, 7, num_dst)  # one of the 8 parts is empty
    cut = partition_graph(graph, 8, parts=given if parts == "given" else parts)
    np.testing.assert_array_equal(recovered(cut, num_src, num_dst), np.stack([src, dst], 1))
    owner = cut.dst.position // cut.dst.rows
    if parts == "given":
        np.testing.assert_array_equal(owner, given)
    if parts == "contiguous":
        assert (np.diff(owner) >= 0).all()
    needed = {(owner[d], s) for s, d in zip(src, dst, strict=True)}
    home = cut.src.position // cut.src.rows
    assert cut.traffic().needed == sum(home[s] != part for part, s in needed)
    assert cut.traffic().halo <= 1.1 * cut.traffic().needed + 16 * 56
    if num_src == num_dst:
        np.testing.assert_array_equal(cut.src.position, cut.dst.position)


def test_senders_and_receivers_agree(rng):
    """What is sent for a place of the table is the row that stands there."""
    for edges in (60, 4000):  # several rounds; one all-to-all
        graph = BipartiteCSC.from_coo(rng.integers(0, 50, edges), rng.integers(0, 50, edges), 50, 50)
        cut = partition_graph(graph, 4)
        assert (cut.rounds is None) == (edges == 4000)
        starts = np.cumsum((0, *cut.sizes))
        pairs = cut.rounds or [tuple((j, (j + k) % 4) for j in range(4)) for k in range(4)]
        for k, exchange in enumerate(pairs):
            for sender, receiver in exchange:
                out, into = (k, k) if cut.rounds else (receiver, sender)
                sent = cut.send[sender, starts[out] : starts[out + 1]]
                got = cut.remote[receiver, starts[into] : starts[into + 1]]
                real = sent < cut.src.rows
                np.testing.assert_array_equal(got[real], sent[real] + sender * cut.src.rows)
                assert (got[~real] >= 4 * cut.src.rows).all()


@pytest.mark.parametrize("exponent", [0.6, 0.9])
def test_edges_are_balanced(rng, exponent):
    dst = power_law(rng, 20_000, 200_000, exponent)
    cut = partition_graph(BipartiteCSC.from_coo(power_law(rng, 20_000, 200_000), dst, 20_000, 20_000), 8)
    edges = np.asarray(cut.graph.num_edges)
    assert np.bincount(dst).max() < edges.mean()
    assert edges.max() <= 1.01 * edges.mean()
    assert cut.edges.rows == edges.max() + (8 * edges.max() == 200_000)
    assert cut.dst.rows == 2501  # with one of padding: 8 x 2500 is the number of nodes
    tr = cut.traffic(256)
    assert tr.needed == 256 * cut.remote_rows <= tr.halo <= 1.1 * tr.needed < tr.all_gather


def test_a_hub_of_most_edges_is_alone_with_its_share():
    dst = np.concatenate([np.full(900, 5), np.arange(100)])
    cut = partition_graph(BipartiteCSC.from_coo(np.arange(1000) % 100, dst, 100, 100), 4)
    assert cut.edges.rows < 901 + 25
    assert cut.dst.rows == 26  # and one of padding: 4 x 25 is the number of nodes


def test_neighbours_stay_together(rng):
    dst = rng.integers(0, 4000, 40_000)
    src = np.clip(dst + rng.integers(-20, 21, len(dst)), 0, 3999)
    cut = partition_graph(BipartiteCSC.from_coo(src, dst, 4000, 4000), 8, parts="contiguous")
    assert cut.traffic().halo <= 1.1 * cut.traffic().needed
    assert cut.traffic().needed <= 7 * 2 * 20
    assert all(abs(sender - receiver) == 1 for pairs in cut.rounds for sender, receiver in pairs)


@thorough
@pytest.mark.parametrize("exponent", [0.0, 0.8])
def test_a_large_graph_moves_hardly_more_than_it_needs(rng, exponent):
    ends = [power_law(rng, 100_000, 2_000_000, exponent) for _ in range(2)]
    cut = partition_graph(BipartiteCSC.from_coo(*ends, 100_000, 100_000), 8)
    assert cut.traffic().halo <= 1.1 * cut.traffic().needed
    edges = np.asarray(cut.graph.num_edges)
    assert edges.max() <= 1.001 * edges.mean()


def test_messages_of_any_sizes_are_padded_little(rng):
    for n in (2, 3, 8):
        for _ in range(20):
            wanted = np.floor(10 ** rng.uniform(-1, 4, (n, n))).astype(np.int64)
            np.fill_diagonal(wanted, 0)
            sizes, rounds, _, _ = _schedule(wanted)
            sent = sum(size * len(pairs) for size, pairs in zip(sizes, rounds, strict=True))
            assert sent <= 1.1 * wanted.sum() + 16 * n * n
            pairs = [pair for one in rounds for pair in one]
            assert sorted(pairs) == sorted(zip(*np.nonzero(wanted), strict=True))
            for size, one in zip(sizes, rounds, strict=True):
                senders, receivers = zip(*one, strict=True)
                assert len(set(senders)) == len(set(receivers)) == len(one)
                assert size == max(wanted[pair] for pair in one)


def test_arrays_come_into_place_and_back(rng):
    src, dst = rng.integers(0, 20, 70), rng.integers(0, 11, 70)
    graph = BipartiteCSC.from_coo(src, dst, 20, 11, capacity=80)
    cut = partition_graph(graph, 8)
    for kind, size in (("src", 20), ("dst", 11), ("edges", 80)):
        place, collect = getattr(cut, kind).place, getattr(cut, kind).collect
        x = rng.standard_normal((size, 3))
        placed = place(x)
        assert isinstance(placed, np.ndarray)
        np.testing.assert_array_equal(place(jnp.asarray(x)), placed)
        expected = np.where(np.arange(size)[:, None] < (70 if kind == "edges" else size), x, 0)
        np.testing.assert_array_equal(collect(placed), expected)
        assert np.count_nonzero(placed) == np.count_nonzero(expected)
        labels = rng.integers(0, 9, size, dtype=np.int32)
        assert place(labels).dtype == np.int32
        ct = rng.standard_normal(placed.shape)
        (gradient,) = jax.vjp(place, jnp.asarray(x))[1](jnp.asarray(ct))
        np.testing.assert_array_equal(gradient, collect(ct))
        (gradient,) = jax.vjp(collect, jnp.asarray(placed))[1](jnp.asarray(x))
        np.testing.assert_array_equal(gradient, placed)
        with pytest.raises(
            ValueError, match=rf"Layout.place: x must have shape \[size, ...\] = \({size}, 3\)"
        ):
            place(x[1:])
        with pytest.raises(ValueError, match=rf"Layout.collect: x must have .* = \({len(placed)}, 3\)"):
            collect(placed[1:])


def test_it_is_a_pytree_that_can_be_put_and_exported(rng):
    graph = BipartiteCSC.from_coo(rng.integers(0, 20, 70), rng.integers(0, 20, 70), 20, 20)
    cut = partition_graph(graph, 8)
    mesh = jax.make_mesh((8,), ("graph",))
    put = cut.put(mesh, "graph")
    assert put.graph.indices.sharding.spec == put.send.sharding.spec == P("graph")
    assert put.edges.position.sharding.is_fully_replicated
    assert jax.tree.structure(put) == jax.tree.structure(cut)
    x = rng.standard_normal((20, 2))
    np.testing.assert_array_equal(put.src.collect(put.src.place(x)), x)
    sharded = jax.device_put(cut.dst.place(x), put.send.sharding)
    np.testing.assert_array_equal(jax.jit(lambda x, cut: cut.dst.collect(x))(sharded, put), x)
    exported = export.export(jax.jit(lambda cut, x: cut.src.place(x)))(cut, x)
    again = export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(cut, x), cut.src.place(x))


@pytest.mark.parametrize("sizes", [(0, 0), (3, 0), (0, 3), (3, 3)])
def test_graphs_without_edges_or_nodes(sizes):
    cut = partition_graph(BipartiteCSC.from_coo([], [], *sizes), 4)
    assert cut.traffic() == Traffic(0, 0, 4 * 3 * cut.src.rows)
    assert cut.src.place(np.zeros((sizes[0], 2))).shape == (4 * cut.src.rows, 2)
    assert cut.edges.rows == 0


def test_edges_that_are_not_there_are_neither_placed_nor_collected():
    """A gather has no row to clamp to, nor has the gradient of a scatter, which is one."""
    cut = partition_graph(BipartiteCSC.from_coo([], [], 3, 3, capacity=4), 1)
    np.testing.assert_array_equal(cut.edges.collect(jnp.zeros((0, 2))), np.zeros((4, 2)))
    placed, back = jax.vjp(cut.edges.place, jnp.ones((4, 2)))
    np.testing.assert_array_equal(*back(placed), np.zeros((4, 2)))


@pytest.mark.parametrize("order", ["balanced", "contiguous"])
def test_arrays_in_the_order_of_the_caller_are_refused_or_right(order):
    """Parts of as many rows as there are nodes would take them for rows in the layout."""
    rng = np.random.default_rng(0)
    x, a, e = rng.normal(size=(8, 4)), rng.normal(size=8 + 2), rng.normal(size=(16, 2))
    src, dst = rng.integers(0, 8, 16), np.repeat(np.arange(8), 2)
    graph = BipartiteCSC.from_coo(src, dst[:: 1 if order == "contiguous" else -1], 8, 8)
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("graph",))
    parts = partition_graph(graph, 4, parts=order).put(mesh, "graph")
    call = partial(sharded_graph_attention, parts, mesh=mesh, axis="graph", num_heads=2)
    if order == "contiguous":  # the layout is the order of the caller
        assert_close(call(x, None, a, edge=e), graph_attention(graph, x, None, a, num_heads=2, edge=e), 1e-12)
        return
    placed = parts.src.place(x)
    with pytest.raises(ValueError, match=r"src must have two axes, and 12 rows .*partitioned\.src\.place"):
        call(x, None, a)
    with pytest.raises(ValueError, match="dst must have two axes, and 12 rows"):
        call(placed, x, a)
    with pytest.raises(ValueError, match="edge must have two axes, and 20 rows"):
        call(placed, None, a, edge=e)
    out = call(placed, None, a, edge=parts.edges.place(e))
    assert_close(parts.dst.collect(out), graph_attention(graph, x, None, a, num_heads=2, edge=e), 1e-12)


def test_bad_arguments():
    graph = BipartiteCSC.from_coo([0, 1], [1, 0], 2, 2)
    stack = jax.tree.map(lambda x: x[None], graph)
    for error, text, arguments, options in (
        (ValueError, "n must be a positive int, got 0", (graph, 0), {}),
        (TypeError, "n must be a positive int, got float", (graph, 2.0), {}),
        (TypeError, "graph must be a BipartiteCSC .* got tuple", ((1, 2), 2), {}),
        (ValueError, "graph must be one graph, got a stack of 1", (stack, 2), {}),
        (ValueError, "parts must be one of", (graph, 2), {"parts": "metis"}),
        (ValueError, r"parts must have shape \[num_dst\] = \(2,\), got \(1,\)", (graph, 2), {"parts": [0]}),
        (ValueError, r"parts must lie in \[0, 1\], got 0 to 2", (graph, 2), {"parts": [0, 2]}),
        (TypeError, "parts must be integers", (graph, 2), {"parts": [0.0, 1.0]}),
    ):
        with pytest.raises(error, match=f"partition_graph: {text}"):
            partition_graph(*arguments, **options)
    with pytest.raises(TypeError, match="cut it outside jit"):
        jax.jit(lambda graph: partition_graph(graph, 2).send)(graph)
