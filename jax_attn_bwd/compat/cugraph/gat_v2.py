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
    """Graph attention from node to node, `s = <a, act(h_src + h_dst)>`.

    Args:
      attention_weights: `(dim_node,)`.
      src_node_embedding, dst_node_embedding, graph, params, return_softmax_scores: as in `mha_gat_n2n_fwd`.

    Returns:
      As `mha_gat_n2n_fwd`.

    Gradients:
      Every array, through both results, to any order.

    Raises:
      As `mha_gat_n2n_fwd`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import cugraph
      >>> graph = cugraph.make_bipartite_csc([0, 1, 3], [2, 0, 1], 3)
      >>> src, dst = jnp.ones((3, 8)), jnp.ones((2, 8))
      >>> cugraph.mha_gat_v2_n2n_fwd(src, dst, jnp.ones(8), graph, cugraph.mha_params(2)).shape
      (2, 8)
    """
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
    """The gradients of `mha_gat_v2_n2n_fwd`.

    Args, Returns, Gradients and Raises: as of `mha_gat_n2n_bwd`, with `attention_weights` `(dim_node,)`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import cugraph
      >>> graph = cugraph.make_bipartite_csc([0, 1, 3], [2, 0, 1], 3)
      >>> src, dst = jnp.ones((3, 8)), jnp.ones((2, 8))
      >>> grads = cugraph.mha_gat_v2_n2n_bwd(dst, src, dst, jnp.ones(8), None, graph, cugraph.mha_params(2))
      >>> grads.grad_src_node_embedding[:, 0].tolist()
      [0.5, 0.5, 1.0]
    """
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
    """`mha_gat_v2_n2n_fwd` with edge embeddings, `s = <a, act(h_src + h_dst + e)>`.

    Args, Returns, Gradients and Raises: as of `mha_gat_n2n_efeat_fwd`, with `edge_embedding`
    `(nnz, dim_node)` and `attention_weights` `(dim_node,)`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import cugraph
      >>> graph = cugraph.make_bipartite_csc([0, 1, 3], [2, 0, 1], 3)
      >>> src, dst, a = jnp.ones((3, 8)), jnp.ones((2, 8)), jnp.ones(8)
      >>> cugraph.mha_gat_v2_n2n_efeat_fwd(src, dst, src, a, graph, cugraph.mha_params(2)).shape
      (2, 8)
    """
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
    """The gradients of `mha_gat_v2_n2n_efeat_fwd`.

    Args, Returns, Gradients and Raises: as of `mha_gat_n2n_efeat_bwd`, with `edge_embedding`
    `(nnz, dim_node)` and `attention_weights` `(dim_node,)`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import cugraph
      >>> graph = cugraph.make_bipartite_csc([0, 1, 3], [2, 0, 1], 3)
      >>> src, dst, a = jnp.ones((3, 8)), jnp.ones((2, 8)), jnp.ones(8)
      >>> grads = cugraph.mha_gat_v2_n2n_efeat_bwd(dst, src, dst, src, a, None, graph, cugraph.mha_params(2))
      >>> grads.grad_edge_embedding.shape
      (3, 8)
    """
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
