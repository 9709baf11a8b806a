"""`mha_simple_n2n`."""

from typing import Any, NamedTuple

import jax

from jax_attn_bwd._core import checks
from jax_attn_bwd.ops import graph as operators
from jax_attn_bwd.ops.graph import BipartiteCSC


class MhaSimpleGrads(NamedTuple):
    """What `mha_simple_n2n_bwd` returns; None = refused, or no such argument."""

    grad_key_emb: jax.Array | None
    grad_query_emb: jax.Array | None
    grad_value_emb: jax.Array | None
    grad_edge_emb: jax.Array | None
    grad_score_bias: jax.Array | None


def mha_simple_n2n(
    key_emb: jax.Array,
    query_emb: jax.Array,
    value_emb: jax.Array,
    graph: BipartiteCSC,
    num_heads: int,
    concat_heads: bool = True,
    edge_emb: jax.Array | None = None,
    norm_by_dim: bool = True,
    score_bias: jax.Array | None = None,
) -> jax.Array:
    """Graph attention by dot products, `softmax(<q, k + e> / sqrt(dim / num_heads) + bias)` of `v + e`.

    Args:
      key_emb, value_emb: `(n_src_nodes, dim)`, floating, already projected.
      query_emb: `(n_dst_nodes, dim)`.
      graph: the edges.
      num_heads, concat_heads: as in `mha_params`.
      edge_emb: `(nnz, dim)`, added to keys and values.
      norm_by_dim: whether to divide the products by sqrt(dim / num_heads).
      score_bias: broadcasts to `(nnz, num_heads)`.

    Returns:
      output_embedding: `(n_dst_nodes, dim)`, or without `concat_heads` `(n_dst_nodes, dim / num_heads)`.

    Raises:
      ValueError: shapes disagree. TypeError: an argument is of the wrong kind.
    """
    return operators.graph_transformer_attention(
        graph, query_emb, key_emb, value_emb, num_heads=num_heads, concat_heads=concat_heads,
        edge=edge_emb, score_bias=score_bias, scale=_scale("mha_simple_n2n", norm_by_dim),
    )  # fmt: skip


def mha_simple_n2n_bwd(
    grad_output_embedding: jax.Array,
    key_emb: jax.Array,
    query_emb: jax.Array,
    value_emb: jax.Array,
    graph: BipartiteCSC,
    num_heads: int,
    concat_heads: bool = True,
    edge_emb: jax.Array | None = None,
    norm_by_dim: bool = True,
    score_bias: jax.Array | None = None,
    *,
    grad_key_emb: bool | None = True,
    grad_query_emb: bool | None = True,
    grad_value_emb: bool | None = True,
    grad_edge_emb: bool | None = True,
    grad_score_bias: bool | None = True,
) -> MhaSimpleGrads:
    """The gradients of `mha_simple_n2n`; each may be refused."""
    name = "mha_simple_n2n_bwd"
    given = {
        "key": grad_key_emb, "query": grad_query_emb, "value": grad_value_emb,
        "edge": edge_emb is not None and grad_edge_emb,
        "score_bias": score_bias is not None and grad_score_bias,
    }  # fmt: skip
    grads = operators.graph_transformer_attention_bwd(
        grad_output_embedding, graph, query_emb, key_emb, value_emb, num_heads=num_heads,
        concat_heads=concat_heads, edge=edge_emb, score_bias=score_bias,
        scale=_scale(name, norm_by_dim), wrt=[argument for argument, flag in given.items() if flag],
    )  # fmt: skip
    return MhaSimpleGrads(*(getattr(grads, argument) for argument in given))


def _scale(name: str, norm_by_dim: Any) -> float | None:
    return None if checks.flag(f"cugraph.{name}", "norm_by_dim", norm_by_dim) else 1.0
