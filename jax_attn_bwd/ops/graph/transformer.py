"""Graph transformer attention: the public functions."""

from collections.abc import Sequence
from typing import Any

import jax

from jax_attn_bwd._core import checks
from jax_attn_bwd.ops.graph import rule
from jax_attn_bwd.ops.graph.arguments import prepare_transformer
from jax_attn_bwd.ops.graph.spec import GraphTransformerAttentionGrads
from jax_attn_bwd.ops.graph.structure import BipartiteCSC

_NAME = "graph_transformer_attention"
_OPERANDS = {
    "query": "dst",
    "key": "src",
    "value": "value",
    "edge": "edge",
    "score_bias": "score_bias",
}


def graph_transformer_attention(
    graph: BipartiteCSC,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    num_heads: int,
    edge: jax.Array | None = None,
    score_bias: jax.Array | None = None,
    scale: float | None = None,
    concat_heads: bool = True,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_mask: jax.Array | None = None,
    dropout_offset: Sequence[Any] | None = None,
    return_attention_weights: bool = False,
    return_residual: bool = False,
    implementation: str | None = None,
) -> Any:
    """Attends every destination to the sources of its edges, with scaled dot products.

        s   = scale <q_dst, k_src (+ e)> (+ score_bias)           for every edge and head
        p   = softmax over the edges into a destination of s
        out = sum of dropout(p) (v_src (+ e)) over them

    Shapes: nnz edges (`graph.capacity`), H heads, dim = H * D features of a node, head h the columns from
    h * D to (h + 1) * D. No self-loop is ever added.

    Args:
      graph: the edges; see `BipartiteCSC`.
      query: `[num_dst, dim]`, floating, already projected.
      key, value: `[num_src, dim]`, dtype of `query`.
      num_heads: H; divides dim.
      edge: `[nnz, dim]`, floating; added to the key and to the value.
      score_bias: broadcasts to `[nnz, H]`, floating; added to the scores. -inf hides the edge.
      scale: Python float; default `1 / sqrt(D)`. For a learned temperature multiply `query`.
      concat_heads: False takes the mean over heads instead of setting them side by side.
      dropout_rate: probability in [0, 1] of dropping an edge's weight; 1 gives zeros.
      dropout_key: one JAX random key of any type; required if `dropout_rate > 0`. The mask is a function
        of (key, head, number of the edge in the caller's order) alone.
      dropout_mask: `[H, nnz]`, floating: factors instead of a key (0, or 1 / (1 - rate)); no gradient.
      dropout_offset: (batch, head, edge, 0) of this call in a global one, ints or traced; the third may
        be an index array `[nnz]`.
      return_attention_weights: also return the weights.
      return_residual: also return lse.
      implementation: None picks the best one for the platform and shapes; a name runs that one or raises.

    Returns:
      out: `[num_dst, dim]`, or `[num_dst, D]` without `concat_heads`; dtype of `query`, accumulated in
        float32 (float64 for float64). 0 for a destination without edges.
      weights: `[nnz, H]`, with `return_attention_weights`: after dropout, in the caller's edge order.
      lse: `[num_dst, H]`, with `return_residual`: natural log of the sum of exp(score), float32 (float64
        for float64); -inf for a destination without edges.

    Gradients:
      query, key, value, edge, score_bias: exact, in the dtype and shape of the argument; only what is
      differentiated is computed. All outputs are differentiable, to second order and beyond.
      Saves its inputs, the heads' outputs, and lse with its rounding (and the weights, if they are
      returned); out and lse carry the checkpoint names "attention_out" and "attention_lse". No array of
      edges x dim is formed, but for the gradient of edge features of that width. NaN in a node that no
      edge refers to reaches no output and no gradient. The same bits in every run.

    Raises:
      ValueError: shapes disagree, or an option is out of range.
      TypeError: an argument is of the wrong kind (a graph that is no `BipartiteCSC`, mixed dtypes).
      NotImplementedError: the named implementation cannot run this call.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC, graph_transformer_attention
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> q, k = jnp.ones((2, 8)), jnp.ones((3, 8))
      >>> graph_transformer_attention(graph, q, k, k, num_heads=2).shape
      (2, 8)

    References:
      Shi et al., Masked label prediction, 2021, arXiv:2009.03509, section 3.1.
    """
    options, operands = prepare_transformer(
        _NAME, graph, query, key, value, num_heads=num_heads, edge=edge, score_bias=score_bias,
        scale=scale, concat_heads=concat_heads, dropout_rate=dropout_rate, dropout_key=dropout_key,
        dropout_mask=dropout_mask, dropout_offset=dropout_offset,
        return_attention_weights=return_attention_weights,
    )  # fmt: skip
    return rule.attend(_NAME, options, operands, return_residual, implementation)


def graph_transformer_attention_bwd(
    dout: jax.Array | None,
    graph: BipartiteCSC,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    out: jax.Array | None = None,
    lse: jax.Array | None = None,
    dweights: jax.Array | None = None,
    dlse: jax.Array | None = None,
    wrt: Sequence[str] = ("query", "key", "value"),
    num_heads: int,
    edge: jax.Array | None = None,
    score_bias: jax.Array | None = None,
    scale: float | None = None,
    concat_heads: bool = True,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_mask: jax.Array | None = None,
    dropout_offset: Sequence[Any] | None = None,
    implementation: str | None = None,
) -> GraphTransformerAttentionGrads:
    """The backward of `graph_transformer_attention` as a plain function.

    Args:
      dout: cotangent of `out`, its shape and dtype; None = 0.
      out, lse: of the forward call, `out` per head, `[num_dst, dim]`, also without `concat_heads`. If
        either is None, or `dweights` is given, the forward runs again. Scores of
        1e4 and more that tie lose digits in `lse`: only the gradient of the attention itself keeps them.
      dweights, dlse: cotangents of the weights and of `lse`; None = 0.
      wrt: which of "query", "key", "value", "edge", "score_bias" to compute.
      graph, query, key, value, edge, score_bias and options: as in the forward call.

    Returns:
      GraphTransformerAttentionGrads(query, key, value, edge, score_bias), each with its argument's
      shape and dtype; None where not asked.

    Gradients:
      A composition of differentiable operations: it may itself be differentiated, in either mode.

    Raises:
      As `graph_transformer_attention`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_attn_bwd as jab
      >>> graph = jab.BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> q, k, dout = jnp.ones((2, 8)), jnp.ones((3, 8)), jnp.ones((2, 8))
      >>> grads = jab.graph_transformer_attention_bwd(dout, graph, q, k, k, num_heads=2, wrt="key")
      >>> grads.key.shape, grads.query is None
      ((3, 8), True)
    """
    name = f"{_NAME}_bwd"
    options, operands = prepare_transformer(
        name, graph, query, key, value, num_heads=num_heads, edge=edge, score_bias=score_bias,
        scale=scale, concat_heads=concat_heads, dropout_rate=dropout_rate, dropout_key=dropout_key,
        dropout_mask=dropout_mask, dropout_offset=dropout_offset,
        return_attention_weights=False,
    )  # fmt: skip
    present = [n for n in _OPERANDS if getattr(operands, _OPERANDS[n]) is not None]
    wanted = [_OPERANDS[n] for n in checks.wanted(name, wrt, tuple(_OPERANDS), present)]
    grads = rule.gradients(
        name, options, operands, dout, out, lse, dweights, dlse, wanted, implementation
    )
    return GraphTransformerAttentionGrads(**{n: grads.get(_OPERANDS[n]) for n in _OPERANDS})
