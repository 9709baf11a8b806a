"""`mha_simple_n2n`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jax_attn_bwd._core import checks
from jax_attn_bwd.compat.cugraph.call import gradients, source_call
from jax_attn_bwd.ops import graph as operators
from jax_attn_bwd.ops.graph import BipartiteCSC
from jax_attn_bwd.ops.graph.arguments import check_cotangents, prepare_transformer

# The source's names of the operator's arrays, in the order of the gradients.
_ARRAYS = {
    "key": "key_emb",
    "query": "query_emb",
    "value": "value_emb",
    "edge": "edge_emb",
    "score_bias": "score_bias",
}


class MhaSimpleGrads(NamedTuple):
    """Holds what `mha_simple_n2n_bwd` returns; None = refused, or no such argument."""

    grad_key_emb: jax.Array | None
    grad_query_emb: jax.Array | None
    grad_value_emb: jax.Array | None
    grad_edge_emb: jax.Array | None
    grad_score_bias: jax.Array | None


@source_call
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

    Gradients:
      Every array, to any order.

    Raises:
      ValueError: shapes disagree. TypeError: an argument is of the wrong kind.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import cugraph
      >>> graph = cugraph.make_bipartite_csc([0, 1, 3], [2, 0, 1], 3)
      >>> nodes, queries = jnp.ones((3, 8)), jnp.ones((2, 8))
      >>> cugraph.mha_simple_n2n(nodes, queries, nodes, graph, num_heads=2, concat_heads=False).shape
      (2, 4)
    """
    given, options, _ = _checked("cugraph.mha_simple_n2n", locals())
    return operators.graph_transformer_attention(graph, **given, **options)


@source_call
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
    grad_key_emb: bool | jax.Array | None = True,
    grad_query_emb: bool | jax.Array | None = True,
    grad_value_emb: bool | jax.Array | None = True,
    grad_edge_emb: bool | jax.Array | None = True,
    grad_score_bias: bool | jax.Array | None = True,
) -> MhaSimpleGrads:
    """The gradients of `mha_simple_n2n`.

    Args:
      grad_output_embedding: cotangent of `output_embedding`, its shape and dtype.
      grad_key_emb, grad_query_emb, grad_value_emb, grad_edge_emb, grad_score_bias: each asks for its
        gradient, or refuses it, as in `mha_gat_n2n_bwd`.
      key_emb, query_emb, value_emb, graph, num_heads, concat_heads, edge_emb, norm_by_dim, score_bias: as in
        the forward.

    Returns:
      MhaSimpleGrads, each with its argument's shape and dtype; None = refused, or no such argument. They may
      be differentiated in turn; errors are those of the forward.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import cugraph
      >>> graph = cugraph.make_bipartite_csc([0, 1, 3], [2, 0, 1], 3)
      >>> nodes, queries = jnp.ones((3, 8)), jnp.ones((2, 8))
      >>> grads = cugraph.mha_simple_n2n_bwd(queries, nodes, queries, nodes, graph, 2, grad_key_emb=False)
      >>> grads.grad_value_emb[:, 0].tolist(), grads.grad_key_emb is None
      ([0.5, 0.5, 1.0], True)
    """
    arguments, call = locals(), "cugraph.mha_simple_n2n_bwd"
    given, options, (checked_options, operands) = _checked(call, arguments)
    g = checks.floating(call, "grad_output_embedding", grad_output_embedding)
    check_cotangents(call, checked_options, operands, g, None, None, None, None)
    slots = {field: (f"grad_{name}", arguments[f"grad_{name}"]) for field, name in _ARRAYS.items()}
    operator = operators.graph_transformer_attention_bwd
    return MhaSimpleGrads(*gradients(call, operator, g, graph, given, slots, options))


def _checked(call: str, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], tuple]:
    """Returns the operator's arrays and options by name, and both checked; an error names `call`."""
    norm_by_dim = checks.flag(call, "norm_by_dim", arguments["norm_by_dim"])
    options = {name: arguments[name] for name in ("num_heads", "concat_heads")}
    options |= {"scale": None if norm_by_dim else 1.0}
    given = {field: arguments[name] for field, name in _ARRAYS.items()}
    checked = prepare_transformer(
        call, arguments["graph"], **given, num_kv_heads=None, dropout_rate=0.0, dropout_key=None,
        dropout_mask=None, dropout_offset=None, return_attention_weights=False, **options,
    )  # fmt: skip
    return given, options, checked
