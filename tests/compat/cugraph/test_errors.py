"""Errors of `compat.cugraph`."""

import jax.numpy as jnp
import numpy as np
import pytest
from compat.cugraph.calls import DIM, N_DST, N_SRC, NNZ, D, H, arrays, cotangent, structure

from jax_attn_bwd.compat import cugraph


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"params": cugraph.mha_params(4)}, ValueError, r"cugraph.mha_gat_n2n_bwd: num_heads must .* got 4"),
        ({"params": cugraph.mha_params(H, 1)}, TypeError, "concat_heads must be a Python bool"),
        ({"params": cugraph.mha_params(H, True, "Softplus")}, ValueError, r"one of \('ELU', 'LeakyReLU'"),
        ({"params": cugraph.mha_params(H, True, "ReLU", jnp.ones(()))}, TypeError, "alpha must be a Python"),
        ({"attention_weights": jnp.ones(DIM)}, ValueError, r"attention_weights must .* \(12,\), got \(6,\)"),
        (
            {"src_node_embedding": jnp.ones((2, N_SRC, DIM))},
            ValueError,
            "src_node_embedding must have two axes",
        ),
        ({"softmax_scores": jnp.ones((H, NNZ))}, ValueError, r"softmax_scores must .* \(2, 2, 15\)"),
        ({"softmax_scores": np.ones((2, H, NNZ), int)}, TypeError, "softmax_scores must be a floating"),
        ({"graph": None}, TypeError, "graph must be a BipartiteCSC"),
        ({"params": None}, TypeError, "params must be mha_params, got NoneType"),
        ({"params": cugraph.mha_params(H, True, "relu")}, ValueError, "'ReLU',.* got 'relu'"),
        ({"params": cugraph.mha_params(H, True, ["ReLU"])}, ValueError, "activation must be one of"),
        ({"grad_src_node_embedding": "no"}, TypeError, "grad_src_node_embedding must be None or False"),
        ({"grad_output_embedding": jnp.ones((N_DST, D))}, ValueError, "grad_output_embedding must have"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_errors(rng, edges, changed, error, message):
    operands, params = arrays(rng, "mha_gat_n2n"), cugraph.mha_params(H)
    arguments = {"grad_output_embedding": cotangent(rng, params), **operands}
    arguments |= {"softmax_scores": None, "graph": structure(edges), "params": params} | changed
    with pytest.raises(error, match=message):
        cugraph.mha_gat_n2n_bwd(**arguments)


@pytest.mark.parametrize(
    "name", ["stream_id", "grad_softmax_scores", "grad_attention_weights_workspace", "output_embedding"]
)
def test_what_the_source_has_beside_is_refused_with_the_remedy(rng, edges, name):
    operands, params = arrays(rng, "mha_gat_n2n"), cugraph.mha_params(H)
    words = rf"^cugraph.mha_gat_n2n_fwd: {name} must be left out, got one; \w+"
    with pytest.raises(TypeError, match=words):
        cugraph.mha_gat_n2n_fwd(**operands, graph=structure(edges), params=params, **{name: 0})
    with pytest.raises(TypeError, match="unexpected keyword argument 'stream'"):
        cugraph.mha_gat_n2n_fwd(**operands, graph=structure(edges), params=params, stream=0)
    key, query = jnp.ones((N_SRC, DIM)), jnp.ones((N_DST, DIM))
    with pytest.raises(TypeError, match=f"^cugraph.mha_simple_n2n_bwd: {name} must be left out"):
        cugraph.mha_simple_n2n_bwd(query, key, query, key, structure(edges), H, **{name: None})


def test_a_gradient_of_what_is_not_given_is_not_asked_for_by_an_array(rng, edges):
    operands, params = arrays(rng, "mha_gat_n2n"), cugraph.mha_params(H)
    given = {"grad_output_embedding": cotangent(rng, params), "softmax_scores": None, **operands}
    given |= {"graph": structure(edges), "params": params, "dst_node_embedding": None}
    words = "grad_dst_node_embedding must be None or a bool where dst_node_embedding is None, got an array"
    with pytest.raises(ValueError, match=words):
        cugraph.mha_gat_n2n_bwd(**given, grad_dst_node_embedding=jnp.ones((N_DST, DIM)))
    assert cugraph.mha_gat_n2n_bwd(**given).grad_dst_node_embedding is None


def test_errors_of_calls_with_more_arguments(rng, edges):
    given, params = arrays(rng, "mha_gat_n2n_efeat"), cugraph.mha_params(H)
    with pytest.raises(TypeError, match=r"cugraph.mha_gat_n2n_efeat_fwd: edge_embedding must be a floating"):
        cugraph.mha_gat_n2n_efeat_fwd(
            **given | {"edge_embedding": None}, graph=structure(edges), params=params
        )
    key, query = jnp.ones((N_SRC, DIM)), jnp.ones((N_DST, DIM))
    with pytest.raises(ValueError, match=r"cugraph.mha_simple_n2n: key must have shape"):
        cugraph.mha_simple_n2n(key[:, 1:], query, key, structure(edges), H)
    with pytest.raises(ValueError, match=r"cugraph.mha_simple_n2n_bwd: dout must have shape"):
        cugraph.mha_simple_n2n_bwd(query[1:], key, query, key, structure(edges), H)
