"""`mha_gat_v2_n2n` and `mha_gat_v2_n2n_efeat`."""

from typing import Any

import jax

from jax_attn_bwd.compat.cugraph.call import (
    MhaGatEfeatGrads,
    MhaGatGrads,
    backward,
    forward,
    mha_params,
)
from jax_attn_bwd.ops.graph import BipartiteCSC


def mha_gat_v2_n2n_fwd(
    src_node_embedding: jax.Array,
    dst_node_embedding: jax.Array | None,
    attention_weights: jax.Array,
    graph: BipartiteCSC,
    params: mha_params,
    *,
    return_softmax_scores: bool = False,
) -> Any:
    """`mha_gat_n2n_fwd` with `s = <a, act(h_src + h_dst)>`; `attention_weights (dim_node,)`."""
    embeddings = (src_node_embedding, dst_node_embedding, None)
    return forward(
        "mha_gat_v2_n2n_fwd", embeddings, attention_weights, graph, params, return_softmax_scores
    )


def mha_gat_v2_n2n_bwd(
    grad_output_embedding: jax.Array,
    src_node_embedding: jax.Array,
    dst_node_embedding: jax.Array | None,
    attention_weights: jax.Array,
    softmax_scores: jax.Array | None,
    graph: BipartiteCSC,
    params: mha_params,
    *,
    grad_src_node_embedding: bool | None = True,
    grad_dst_node_embedding: bool | None = True,
    grad_attention_weights: bool | None = True,
) -> MhaGatGrads:
    """The gradients of `mha_gat_v2_n2n_fwd`; see `mha_gat_n2n_bwd`."""
    wanted = (grad_src_node_embedding, grad_dst_node_embedding, False, grad_attention_weights)
    embeddings = (src_node_embedding, dst_node_embedding, None)
    src, dst, _, weights = backward(
        "mha_gat_v2_n2n_bwd", grad_output_embedding, embeddings, attention_weights, softmax_scores,
        graph, params, wanted,
    )  # fmt: skip
    return MhaGatGrads(src, dst, weights)


def mha_gat_v2_n2n_efeat_fwd(
    src_node_embedding: jax.Array,
    dst_node_embedding: jax.Array | None,
    edge_embedding: jax.Array,
    attention_weights: jax.Array,
    graph: BipartiteCSC,
    params: mha_params,
    *,
    return_softmax_scores: bool = False,
) -> Any:
    """`mha_gat_v2_n2n_fwd` with `s = <a, act(h_src + h_dst + e)>`; `edge_embedding (nnz, dim_node)`."""
    embeddings = (src_node_embedding, dst_node_embedding, edge_embedding)
    return forward(
        "mha_gat_v2_n2n_efeat_fwd", embeddings, attention_weights, graph, params,
        return_softmax_scores,
    )  # fmt: skip


def mha_gat_v2_n2n_efeat_bwd(
    grad_output_embedding: jax.Array,
    src_node_embedding: jax.Array,
    dst_node_embedding: jax.Array | None,
    edge_embedding: jax.Array,
    attention_weights: jax.Array,
    softmax_scores: jax.Array | None,
    graph: BipartiteCSC,
    params: mha_params,
    *,
    grad_src_node_embedding: bool | None = True,
    grad_dst_node_embedding: bool | None = True,
    grad_edge_embedding: bool | None = True,
    grad_attention_weights: bool | None = True,
) -> MhaGatEfeatGrads:
    """The gradients of `mha_gat_v2_n2n_efeat_fwd`; see `mha_gat_n2n_bwd`."""
    wanted = (
        grad_src_node_embedding, grad_dst_node_embedding, grad_edge_embedding,
        grad_attention_weights,
    )  # fmt: skip
    embeddings = (src_node_embedding, dst_node_embedding, edge_embedding)
    return MhaGatEfeatGrads(*backward(
        "mha_gat_v2_n2n_efeat_bwd", grad_output_embedding, embeddings, attention_weights,
        softmax_scores, graph, params, wanted,
    ))  # fmt: skip
