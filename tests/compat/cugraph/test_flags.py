"""Gradients that are refused, and those that are asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compat.cugraph.calls import DIM, N_DST, N_SRC, H, arrays, call, cotangent, structure
from helpers import assert_close, thorough

from jax_attn_bwd.compat import cugraph


@pytest.mark.parametrize("family", ["mha_gat_n2n_efeat", pytest.param("mha_gat_v2_n2n", marks=thorough)])
def test_a_refused_gradient_is_none_and_the_others_stay(rng, edges, family):
    params = cugraph.mha_params(H)
    operands, g = arrays(rng, family), cotangent(rng, params)
    graph, backward = structure(edges), getattr(cugraph, f"{family}_bwd")
    *_, full = call(family, graph, params, g, operands)
    for refused, flag in zip(full._fields, (None, False, np.False_, False), strict=False):
        grads = backward(g, *operands.values(), None, graph, params, **{refused: flag})
        assert getattr(grads, refused) is None
        for name in set(full._fields) - {refused}:
            assert_close(getattr(grads, name), getattr(full, name), 1e-13, name)
    none = dict.fromkeys(full._fields)
    assert set(backward(g, *operands.values(), None, graph, params, **none)) == {None}


def test_an_array_to_write_a_gradient_into_asks_for_it(rng, edges):
    given, params = arrays(rng, "mha_gat_n2n"), cugraph.mha_params(H)
    arguments = (cotangent(rng, params), *given.values(), None, structure(edges), params)
    grads = cugraph.mha_gat_n2n_bwd(
        *arguments, grad_src_node_embedding=jnp.zeros((N_SRC, DIM)), grad_attention_weights=None
    )
    expected = cugraph.mha_gat_n2n_bwd(*arguments)
    assert_close(grads.grad_src_node_embedding, expected.grad_src_node_embedding, 0)
    assert grads.grad_attention_weights is None
    for wrong in (jnp.zeros((N_SRC + 1, DIM)), jnp.zeros((N_SRC, DIM), jnp.bfloat16)):
        with pytest.raises(
            (ValueError, TypeError), match="mha_gat_n2n_bwd: grad_src_node_embedding must have"
        ):
            cugraph.mha_gat_n2n_bwd(*arguments, grad_src_node_embedding=wrong)
    asked = cugraph.mha_gat_n2n_bwd(*arguments, grad_attention_weights=np.True_)
    assert_close(asked.grad_attention_weights, expected.grad_attention_weights, 0)
    key, query, graph = jnp.ones((N_SRC, DIM)), jnp.ones((N_DST, DIM)), structure(edges)
    with pytest.raises(TypeError, match="mha_simple_n2n_bwd: grad_score_bias must be None or False"):
        cugraph.mha_simple_n2n_bwd(query, key, query, key, graph, H, grad_score_bias="no")


def test_a_float32_array_asks_narrow_nodes_for_a_gradient_in_float32(rng, edges):
    params, graph = cugraph.mha_params(H), structure(edges)
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in arrays(rng, "mha_gat_n2n").values()]
    g = cotangent(rng, params).astype(jnp.bfloat16)
    backward = jax.jit(
        lambda g, *nodes, **slots: cugraph.mha_gat_n2n_bwd(g, *nodes, None, graph, params, **slots)
    )
    wide = backward(*(x.astype(jnp.float32) for x in (g, *narrow)))
    got = backward(g, *narrow, grad_src_node_embedding=jnp.zeros((N_SRC, DIM), jnp.float32))
    assert [x.dtype for x in got] == [jnp.float32, jnp.bfloat16, jnp.bfloat16]
    assert_close(got.grad_src_node_embedding, wide.grad_src_node_embedding, 1e-6)
    assert_close(got.grad_dst_node_embedding, wide.grad_dst_node_embedding, 2**-8)
    assert_close(got.grad_attention_weights, wide.grad_attention_weights, 2**-8)
