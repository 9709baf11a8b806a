"""`mha_gat_v2_n2n` and `mha_gat_v2_n2n_efeat`."""

from typing import Literal, overload

import jax

from jax_attn_bwd.compat.cugraph.call import Call, MhaGatEfeatGrads, MhaGatGrads, mha_params
from jax_attn_bwd.compat.cugraph.left_out import source_call
from jax_attn_bwd.ops.graph import BipartiteCSC
from jax_attn_bwd.ops.graph.kinds import GATv2


# fmt: off
@overload
def mha_gat_v2_n2n_fwd(
    src_node_embedding: jax.Array, dst_node_embedding: jax.Array | None, attention_weights: jax.Array,
    graph: BipartiteCSC, params: mha_params, *, return_softmax_scores: Literal[False] = False
) -> jax.Array: ...
@overload
def mha_gat_v2_n2n_fwd(
    src_node_embedding: jax.Array, dst_node_embedding: jax.Array | None, attention_weights: jax.Array,
    graph: BipartiteCSC, params: mha_params, *, return_softmax_scores: Literal[True]
) -> tuple[jax.Array, jax.Array]: ...
@overload
def mha_gat_v2_n2n_fwd(
    src_node_embedding: jax.Array, dst_node_embedding: jax.Array | None, attention_weights: jax.Array,
    graph: BipartiteCSC, params: mha_params, *, return_softmax_scores: bool
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
# fmt: on
@source_call
def mha_gat_v2_n2n_fwd(
    src_node_embedding: jax.Array,
    dst_node_embedding: jax.Array | None,
    attention_weights: jax.Array,
    graph: BipartiteCSC,
    params: mha_params,
    *,
    return_softmax_scores: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`mha_gat_n2n_fwd` with `s = <a, act(h_src + h_dst)>`; `attention_weights (dim_node,)`."""
    call = Call(
        "mha_gat_v2_n2n_fwd", GATv2, graph, params, src_node_embedding, dst_node_embedding, attention_weights
    )
    return call.forward(return_softmax_scores)


@source_call
def mha_gat_v2_n2n_bwd(
    grad_output_embedding: jax.Array,
    src_node_embedding: jax.Array,
    dst_node_embedding: jax.Array | None,
    attention_weights: jax.Array,
    softmax_scores: jax.Array | None,
    graph: BipartiteCSC,
    params: mha_params,
    *,
    grad_src_node_embedding: bool | jax.Array | None = True,
    grad_dst_node_embedding: bool | jax.Array | None = True,
    grad_attention_weights: bool | jax.Array | None = True,
) -> MhaGatGrads:
    """The gradients of `mha_gat_v2_n2n_fwd`; see `mha_gat_n2n_bwd`."""
    call = Call(
        "mha_gat_v2_n2n_bwd", GATv2, graph, params, src_node_embedding, dst_node_embedding, attention_weights
    )
    asked = (grad_src_node_embedding, grad_dst_node_embedding, grad_attention_weights)
    return call.backward(MhaGatGrads, grad_output_embedding, softmax_scores, asked)


# fmt: off
@overload
def mha_gat_v2_n2n_efeat_fwd(
    src_node_embedding: jax.Array, dst_node_embedding: jax.Array | None, edge_embedding: jax.Array,
    attention_weights: jax.Array, graph: BipartiteCSC, params: mha_params, *,
    return_softmax_scores: Literal[False] = False) -> jax.Array: ...
@overload
def mha_gat_v2_n2n_efeat_fwd(
    src_node_embedding: jax.Array, dst_node_embedding: jax.Array | None, edge_embedding: jax.Array,
    attention_weights: jax.Array, graph: BipartiteCSC, params: mha_params, *,
    return_softmax_scores: Literal[True]) -> tuple[jax.Array, jax.Array]: ...
@overload
def mha_gat_v2_n2n_efeat_fwd(
    src_node_embedding: jax.Array, dst_node_embedding: jax.Array | None, edge_embedding: jax.Array,
    attention_weights: jax.Array, graph: BipartiteCSC, params: mha_params, *, return_softmax_scores: bool
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
# fmt: on
@source_call
def mha_gat_v2_n2n_efeat_fwd(
    src_node_embedding: jax.Array,
    dst_node_embedding: jax.Array | None,
    edge_embedding: jax.Array,
    attention_weights: jax.Array,
    graph: BipartiteCSC,
    params: mha_params,
    *,
    return_softmax_scores: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`mha_gat_v2_n2n_fwd` with `s = <a, act(h_src + h_dst + e)>`; `edge_embedding (nnz, dim_node)`."""
    call = Call(
        "mha_gat_v2_n2n_efeat_fwd",
        GATv2,
        graph,
        params,
        src_node_embedding,
        dst_node_embedding,
        attention_weights,
        edge_embedding,
    )
    return call.forward(return_softmax_scores)


@source_call
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
    grad_src_node_embedding: bool | jax.Array | None = True,
    grad_dst_node_embedding: bool | jax.Array | None = True,
    grad_edge_embedding: bool | jax.Array | None = True,
    grad_attention_weights: bool | jax.Array | None = True,
) -> MhaGatEfeatGrads:
    """The gradients of `mha_gat_v2_n2n_efeat_fwd`; see `mha_gat_n2n_bwd`."""
    call = Call(
        "mha_gat_v2_n2n_efeat_bwd",
        GATv2,
        graph,
        params,
        src_node_embedding,
        dst_node_embedding,
        attention_weights,
        edge_embedding,
    )
    asked = (grad_src_node_embedding, grad_dst_node_embedding, grad_edge_embedding, grad_attention_weights)
    return call.backward(MhaGatEfeatGrads, grad_output_embedding, softmax_scores, asked)
