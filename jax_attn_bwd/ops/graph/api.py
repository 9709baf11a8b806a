"""The graph attentions: the public functions.

`rule.py` has their custom_vjp, `derivatives.py` the `_bwd`s.
"""

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import jax

from jax_attn_bwd._core.types import Activation, Array, Implementation, Pair, Scale, Triple, typed_like
from jax_attn_bwd.ops.graph.arguments import prepare_additive, prepare_transformer
from jax_attn_bwd.ops.graph.kinds import GAT, GATv2
from jax_attn_bwd.ops.graph.rule import OPERATION, decide
from jax_attn_bwd.ops.graph.spec import GraphAttentionKeywords, GraphTransformerAttentionKeywords
from jax_attn_bwd.ops.graph.structure import BipartiteCSC


# fmt: off
@overload
def graph_attention(
    graph: BipartiteCSC, src: Array, dst: Array | None, attention_weights: Array, *,
    return_attention_weights: Literal[False] = False, return_residual: Literal[False] = False,
    forward_mode: bool = False, **options: Unpack[GraphAttentionKeywords]) -> jax.Array: ...
@overload
def graph_attention(
    graph: BipartiteCSC, src: Array, dst: Array | None, attention_weights: Array, *,
    return_attention_weights: Literal[True], return_residual: Literal[False] = False,
    forward_mode: bool = False, **options: Unpack[GraphAttentionKeywords]) -> Pair: ...
@overload
def graph_attention(
    graph: BipartiteCSC, src: Array, dst: Array | None, attention_weights: Array, *,
    return_attention_weights: Literal[False] = False, return_residual: Literal[True],
    forward_mode: bool = False, **options: Unpack[GraphAttentionKeywords]) -> Pair: ...
@overload
def graph_attention(
    graph: BipartiteCSC, src: Array, dst: Array | None, attention_weights: Array, *,
    return_attention_weights: Literal[True], return_residual: Literal[True],
    forward_mode: bool = False, **options: Unpack[GraphAttentionKeywords]) -> Triple: ...
@overload
def graph_attention(
    graph: BipartiteCSC, src: Array, dst: Array | None, attention_weights: Array, *,
    return_attention_weights: bool = False, return_residual: bool = False,
    forward_mode: bool = False, **options: Unpack[GraphAttentionKeywords]) -> jax.Array | Pair | Triple: ...
# fmt: on
def graph_attention(
    graph: BipartiteCSC,
    src: Array,
    dst: Array | None,
    attention_weights: Array,
    *,
    num_heads: int,
    edge: Array | None = None,
    concat_heads: bool = True,
    activation: Activation = "leaky_relu",
    alpha: float = 0.2,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_mask: Array | None = None,
    dropout_offset: Sequence[Any] | None = None,
    return_attention_weights: bool = False,
    return_residual: bool = False,
    forward_mode: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Attends every destination to the sources of its edges, with additive scores (GAT).

        z   = <h_src, a_src> + <h_dst, a_dst> (+ <e, a_edge>)     for every edge and head
        p   = softmax over the edges into a destination of activation(z)
        out = sum of dropout(p) h_src over them

    Heads may be sharded; nodes too: devices share the edges evenly, and the output lies as `dst`. On an Auto
    mesh of other chips than CPUs tell how nodes lie by `jax.sharding.explicit_axes`, or each computes all.

    Shapes: nnz edges (`graph.capacity`), H heads, dim = H * D features of a node, head h the columns from
    h * D to (h + 1) * D. Only the source carries the message; no self-loop is ever added. `...` are batch
    axes for one graph, those of the nodes: each entry is a call of its own, as under `jax.vmap`. An array
    without them is shared by all entries.

    Args:
      graph: the edges; see `BipartiteCSC`.
      src: `[..., num_src, dim]`, floating, already projected.
      dst: `[..., num_dst, dim]`, dtype of `src`; None means that the destinations are the first num_dst
        sources, as in a sampled neighbourhood. Destinations that are other nodes must be given.
      attention_weights: `[2 * dim]`, `[source | destination]`, each head by head; with `edge`
        `[2 * dim + dim_edge]`, the share of the edges last.
      num_heads: H; divides dim.
      edge: `[..., nnz, dim_edge]`, floating, heads side by side as in `src`; they enter the score alone.
      concat_heads: False takes the mean over heads instead of setting them side by side.
      activation: one of linear, relu, sigmoid, tanh, elu, scalar, leaky_relu.
      alpha: slope of leaky_relu below 0, factor of scalar; a Python float.
      dropout_rate: probability in [0, 1] of dropping an edge's weight; 1 gives zeros.
      dropout_key: one JAX random key of any type; required if `dropout_rate > 0`. The mask is a function
        of (key, number of the batch entry, head, number of the edge in the caller's order) alone.
      dropout_mask: `[..., H, nnz]`, floating: factors instead of a key (0, or 1 / (1 - rate)); no gradient.
      dropout_offset: (batch, head, edge, 0) of this call in a global one, ints or traced; the third may
        be an index array `[nnz]`. Known ones lie in [0, 2^31); traced ones count modulo 2^32.
      return_attention_weights: also return the weights.
      return_residual: also return lse.
      forward_mode: also differentiable by `jax.jvp`, `jax.jacfwd` and `jax.linearize`, by a written rule.
      implementation: None picks the fastest that is proven on the device (`python -m jax_attn_bwd.check
        --enable`), else "xla"; a name runs that one or raises.

    Returns:
      out: `[..., num_dst, dim]`, or `[..., num_dst, D]` without `concat_heads`; dtype of `src`, accumulated
        in float32 (float64 for float64). 0 for a destination without edges.
      weights: `[..., nnz, H]`, with `return_attention_weights`: after dropout, in the caller's edge order.
      lse: `[..., num_dst, H]`, with `return_residual`: natural log of the sum of exp(score), float32 (float64
        for float64); -inf for a destination without edges.

    Gradients:
      src, dst, attention_weights, edge: exact, in the dtype and shape of the argument; only what is
      differentiated is computed. All outputs are differentiable, to second order and beyond.
      Saves its inputs, the heads' outputs, and the two parts of lse (and the weights, if they are
      returned), under the checkpoint names "attention_out" and "attention_lse". No entry forms an array of
      edges x dim above 4 MiB (on a CPU), but for the gradient of edge features of that width. NaN in a
      node that no edge refers to reaches no output and no gradient. The same bits in every run.

    Raises:
      ValueError: shapes disagree, or an option is out of range.
      TypeError: an argument is of the wrong kind (a graph that is no `BipartiteCSC`, mixed dtypes).
      NotImplementedError: the named implementation cannot run this call.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC, graph_attention
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> x, a = jnp.arange(24.0).reshape(3, 8), jnp.ones(16)
      >>> out = graph_attention(graph, x, None, a, num_heads=2)  # the destinations are the sources x[:2]
      >>> bool((out == graph_attention(graph, x, x[:2], a, num_heads=2)).all())
      True

    References:
      Velickovic et al., Graph attention networks, 2018, arXiv:1710.10903, section 2.1.
    """
    name = "graph_attention"
    options, operands = prepare_additive(
        name, GAT, graph, src, dst, attention_weights, num_heads=num_heads, edge=edge,
        concat_heads=concat_heads, activation=activation, alpha=alpha, dropout_rate=dropout_rate,
        dropout_key=dropout_key, dropout_mask=dropout_mask, dropout_offset=dropout_offset,
        return_attention_weights=return_attention_weights,
    )  # fmt: skip
    plan = decide(name, options, operands, return_residual, implementation)
    return OPERATION.runner(name, forward_mode)(plan, operands)


@typed_like(graph_attention)
def graph_attention_v2(
    graph: BipartiteCSC,
    src: Array,
    dst: Array | None,
    attention_weights: Array,
    *,
    num_heads: int,
    edge: Array | None = None,
    concat_heads: bool = True,
    activation: Activation = "leaky_relu",
    alpha: float = 0.2,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_mask: Array | None = None,
    dropout_offset: Sequence[Any] | None = None,
    return_attention_weights: bool = False,
    return_residual: bool = False,
    forward_mode: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Attends every destination to the sources of its edges, with dynamic scores (GATv2).

        u   = h_src + h_dst (+ e)                                 for every edge
        p   = softmax over the edges into a destination of <a, activation(u)>, per head
        out = sum of dropout(p) h_src over them

    Shapes, batch axes, results, gradients and errors are those of `graph_attention`.

    Args:
      graph: the edges; see `BipartiteCSC`.
      src: `[..., num_src, dim]`, floating, already projected.
      dst: `[..., num_dst, dim]`, dtype of `src`, or None, as in `graph_attention`.
      attention_weights: `[dim]`, head by head.
      edge: `[..., nnz, dim]`, floating; they enter the score alone.
      num_heads, concat_heads, activation, alpha, dropout_rate, dropout_key, dropout_mask, dropout_offset,
        return_attention_weights, return_residual, forward_mode, implementation: as in `graph_attention`.

    Returns:
      out: `[..., num_dst, dim]`, or `[..., num_dst, D]` without `concat_heads`; then weights and lse, if they
        are asked for, as `graph_attention` returns them.

    Gradients:
      src, dst, attention_weights, edge: as those of `graph_attention`, and saving as much.

    Raises:
      The same as `graph_attention`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC, graph_attention_v2
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> x, a = jnp.ones((3, 8)), jnp.ones(8)
      >>> graph_attention_v2(graph, x, None, a, num_heads=2).shape
      (2, 8)
      >>> graph_attention_v2(graph, jnp.ones((5, 3, 8)), None, a, num_heads=2).shape
      (5, 2, 8)

    References:
      Brody et al., How attentive are graph attention networks?, 2022, arXiv:2105.14491, section 3.
    """
    name = "graph_attention_v2"
    options, operands = prepare_additive(
        name, GATv2, graph, src, dst, attention_weights, num_heads=num_heads, edge=edge,
        concat_heads=concat_heads, activation=activation, alpha=alpha, dropout_rate=dropout_rate,
        dropout_key=dropout_key, dropout_mask=dropout_mask, dropout_offset=dropout_offset,
        return_attention_weights=return_attention_weights,
    )  # fmt: skip
    plan = decide(name, options, operands, return_residual, implementation)
    return OPERATION.runner(name, forward_mode)(plan, operands)


# fmt: off
@overload
def graph_transformer_attention(
    graph: BipartiteCSC, query: Array, key: Array, value: Array, *,
    return_attention_weights: Literal[False] = False, return_residual: Literal[False] = False,
    forward_mode: bool = False, **options: Unpack[GraphTransformerAttentionKeywords]) -> jax.Array: ...
@overload
def graph_transformer_attention(
    graph: BipartiteCSC, query: Array, key: Array, value: Array, *,
    return_attention_weights: Literal[True], return_residual: Literal[False] = False,
    forward_mode: bool = False, **options: Unpack[GraphTransformerAttentionKeywords]) -> Pair: ...
@overload
def graph_transformer_attention(
    graph: BipartiteCSC, query: Array, key: Array, value: Array, *,
    return_attention_weights: Literal[False] = False, return_residual: Literal[True],
    forward_mode: bool = False, **options: Unpack[GraphTransformerAttentionKeywords]) -> Pair: ...
@overload
def graph_transformer_attention(
    graph: BipartiteCSC, query: Array, key: Array, value: Array, *,
    return_attention_weights: Literal[True], return_residual: Literal[True],
    forward_mode: bool = False, **options: Unpack[GraphTransformerAttentionKeywords]) -> Triple: ...
@overload
def graph_transformer_attention(
    graph: BipartiteCSC, query: Array, key: Array, value: Array, *,
    return_attention_weights: bool = False, return_residual: bool = False,
    forward_mode: bool = False,
    **options: Unpack[GraphTransformerAttentionKeywords]) -> jax.Array | Pair | Triple: ...
# fmt: on
def graph_transformer_attention(
    graph: BipartiteCSC,
    query: Array,
    key: Array,
    value: Array,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    edge: Array | None = None,
    score_bias: Array | None = None,
    scale: Scale | None = None,
    concat_heads: bool = True,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_mask: Array | None = None,
    dropout_offset: Sequence[Any] | None = None,
    return_attention_weights: bool = False,
    return_residual: bool = False,
    forward_mode: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Attends every destination to the sources of its edges, with scaled dot products.

        s   = scale <q_dst, k_src (+ e)> (+ score_bias)           for every edge and head
        p   = softmax over the edges into a destination of s
        out = sum of dropout(p) (v_src (+ e)) over them

    Shapes are those of `graph_attention`, with dim = H * D features of a query; K heads of keys and values,
    each read by H / K heads of the query that follow one another, and Dv features of a value's head.

    Args:
      graph: the edges; see `BipartiteCSC`.
      query: `[..., num_dst, dim]`, floating, already projected.
      key: `[..., num_src, K * D]`, dtype of `query`.
      value: `[..., num_src, K * Dv]`, dtype of `query`.
      num_heads: H; divides dim.
      num_kv_heads: K; divides H; default H.
      edge: `[..., nnz, K * D]`, floating; added to the key and to the value, where Dv = D.
      score_bias: broadcasts to `[..., nnz, H]`, floating; added to the scores. -inf hides the edge.
      scale: a number, default `1 / sqrt(D)`; a traced one multiplies the query: see `dot_product_attention`.
      concat_heads, dropout_rate, dropout_key, dropout_mask, dropout_offset, return_attention_weights,
        return_residual, forward_mode, implementation: as in `graph_attention`.

    Returns:
      out: `[..., num_dst, H * Dv]`, or `[..., num_dst, Dv]` without `concat_heads`; dtype of `query`; then
        weights and lse, if they are asked for, as `graph_attention` returns them.

    Gradients:
      query, key, value, edge, score_bias: as those of `graph_attention`, and saving as much.

    Raises:
      The same as `graph_attention`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC, graph_transformer_attention
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> q, k = jnp.ones((2, 8)), jnp.ones((3, 8))
      >>> graph_transformer_attention(graph, q, k, k, num_heads=2).shape
      (2, 8)
      >>> k, v = jnp.ones((3, 4)), jnp.ones((3, 6))
      >>> graph_transformer_attention(graph, q, k, v, num_heads=2, num_kv_heads=1).shape
      (2, 12)

    References:
      Shi et al., Masked label prediction, 2021, arXiv:2009.03509, section 3.1.
      Ainslie et al., GQA, 2023, arXiv:2305.13245: heads that share keys and values.
    """
    name = "graph_transformer_attention"
    options, operands = prepare_transformer(
        name, graph, query, key, value, num_heads=num_heads, num_kv_heads=num_kv_heads, edge=edge,
        score_bias=score_bias, scale=scale, concat_heads=concat_heads, dropout_rate=dropout_rate,
        dropout_key=dropout_key, dropout_mask=dropout_mask, dropout_offset=dropout_offset,
        return_attention_weights=return_attention_weights,
    )  # fmt: skip
    plan = decide(name, options, operands, return_residual, implementation)
    return OPERATION.runner(name, forward_mode)(plan, operands)
