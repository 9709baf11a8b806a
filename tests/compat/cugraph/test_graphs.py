"""Graphs without a map, with one side, with padding, without edges."""

import jax.numpy as jnp
import numpy as np
import pytest
from compat.cugraph.calls import DIM, N_DST, N_SRC, NNZ, H, arrays, call, cotangent, source, structure
from helpers import assert_close, thorough

from jax_attn_bwd import BipartiteCSC
from jax_attn_bwd.compat import cugraph


def test_without_a_map_edges_are_in_the_order_of_the_graph(rng, edges):
    family, params = "mha_gat_n2n_efeat", cugraph.mha_params(H)
    operands, g = arrays(rng, family), cotangent(rng, params)
    order = np.argsort(edges[1], kind="stable")
    out, planes, grads = source(family, tuple(x[order] for x in edges), params, g, **operands)
    got, got_planes, got_grads = call(family, structure(edges, False), params, g, operands)
    assert_close(got, out, 1e-13)
    assert_close(got_planes, planes, 1e-13)
    assert_close(got_grads.grad_edge_embedding, grads["edge_embedding"], 1e-12)


def test_one_array_for_both_sides(rng, edges):
    """The gradient of the sources then holds both shares."""
    family, params = "mha_gat_n2n", cugraph.mha_params(H)
    operands, g = arrays(rng, family), cotangent(rng, params)
    both = operands | {"dst_node_embedding": operands["src_node_embedding"][:N_DST]}
    out, planes, grads = source(family, edges, params, g, **both)
    shares = grads["src_node_embedding"].copy()
    shares[:N_DST] += grads["dst_node_embedding"]
    single = operands | {"dst_node_embedding": None}
    got, got_planes, got_grads = call(family, structure(edges), params, g, single)
    assert_close(got, out, 1e-13)
    assert_close(got_planes, planes, 1e-13)
    assert_close(got_grads.grad_src_node_embedding, shares, 1e-12)
    assert got_grads.grad_dst_node_embedding is None


def test_padding_of_a_capacity_has_no_scores(rng, edges):
    family, params, room = "mha_gat_v2_n2n_efeat", cugraph.mha_params(H), NNZ + 5
    operands, g = arrays(rng, family), cotangent(rng, params)
    out, planes, grads = source(family, edges, params, g, **operands)
    padded = operands | {"edge_embedding": np.full((room, DIM), np.nan)}
    padded["edge_embedding"][:NNZ] = operands["edge_embedding"]
    graph = BipartiteCSC.from_coo(*edges, N_SRC, N_DST, capacity=room)
    got, got_planes, got_grads = call(family, graph, params, g, padded)
    assert_close(got, out, 1e-13)
    assert_close(got_planes[..., :NNZ], planes, 1e-13)
    np.testing.assert_array_equal(got_planes[..., NNZ:], 0)
    assert_close(got_grads.grad_edge_embedding[:NNZ], grads["edge_embedding"], 1e-12)
    np.testing.assert_array_equal(got_grads.grad_edge_embedding[NNZ:], 0)


@pytest.mark.parametrize(
    ("shape", "room"),
    [
        pytest.param(
            shape, room, id=f"{shape}-{room}", marks=() if (shape == (4, 4)) == (room == 3) else thorough
        )
        for shape in ((0, 4), (4, 4), (5, 0))
        for room in (0, 3)
    ],
)
def test_graphs_without_edges(shape, room):
    n_dst, n_src = shape
    graph = BipartiteCSC.from_coo([], [], n_src, n_dst, capacity=room)
    src, dst, a = jnp.ones((n_src, DIM)), jnp.ones((n_dst, DIM)), jnp.ones(2 * DIM)
    params = cugraph.mha_params(H)
    out, planes = cugraph.mha_gat_n2n_fwd(src, dst, a, graph, params, return_softmax_scores=True)
    np.testing.assert_array_equal(out, np.zeros((n_dst, DIM)))
    np.testing.assert_array_equal(planes, np.zeros((2, H, room)))
    grads = cugraph.mha_gat_n2n_bwd(out, src, dst, a, planes, graph, params)
    for gradient, x in zip(grads, (src, dst, a), strict=True):
        np.testing.assert_array_equal(gradient, np.zeros(x.shape))
