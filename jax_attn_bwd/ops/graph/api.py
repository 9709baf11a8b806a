"""The graph attentions, their backwards as plain functions, and the rules.

The implementations know one graph and the features of one entry of a batch. The rules map them over the
entries, so that the gradient of what entries share is summed once: over the batch, and over devices after.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_attn_bwd._core import backend, checks, dropout, fusion, head_scale, keywords, pallas, split
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.operation import Operation
from jax_attn_bwd._core.sharding import match_type
from jax_attn_bwd._core.types import Activation, Array, Implementation, Pair, Scale, Triple, typed_like
from jax_attn_bwd.ops.graph import backward as portable_backward
from jax_attn_bwd.ops.graph import forward as portable_forward
from jax_attn_bwd.ops.graph import tangent as written_tangent
from jax_attn_bwd.ops.graph.arguments import check_cotangents, prepare_additive, prepare_transformer
from jax_attn_bwd.ops.graph.kinds import GAT, GATv2
from jax_attn_bwd.ops.graph.placement import laid_like_destinations, laid_like_nodes, rows_sharded_like
from jax_attn_bwd.ops.graph.plan import Plan
from jax_attn_bwd.ops.graph.spec import (
    DIFFERENTIABLE,
    RANKS,
    Cotangents,
    GraphAttentionGrads,
    GraphAttentionKeywords,
    GraphTransformerAttentionGrads,
    GraphTransformerAttentionKeywords,
    Operands,
    Options,
    Residuals,
    Result,
    Wanted,
)
from jax_attn_bwd.ops.graph.structure import BipartiteCSC

_ADDITIVE = GraphAttentionGrads._fields  # the differentiable arguments, which are operands
_TRANSFORMER = {"query": "dst", "key": "src", "value": "value", "edge": "edge", "score_bias": "score_bias"}


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
@keywords.known
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
    plan = _planned(name, options, operands, return_residual, implementation)
    return _OPERATION.runner(name, forward_mode)(plan, operands)


@typed_like(graph_attention)
@keywords.known
def graph_attention_v2(
    graph: BipartiteCSC, src: Array, dst: Array | None, attention_weights: Array, *, num_heads: int,
    edge: Array | None = None, concat_heads: bool = True, activation: Activation = "leaky_relu",
    alpha: float = 0.2, dropout_rate: float = 0.0, dropout_key: jax.Array | None = None,
    dropout_mask: Array | None = None, dropout_offset: Sequence[Any] | None = None,
    return_attention_weights: bool = False, return_residual: bool = False, forward_mode: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, ...]:  # fmt: skip
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
    plan = _planned(name, options, operands, return_residual, implementation)
    return _OPERATION.runner(name, forward_mode)(plan, operands)


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
@keywords.known
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
    plan = _planned(name, options, operands, return_residual, implementation)
    return _OPERATION.runner(name, forward_mode)(plan, operands)


@keywords.known
def graph_attention_bwd(
    dout: Array | None,
    graph: BipartiteCSC,
    src: Array,
    dst: Array | None,
    attention_weights: Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    dweights: Array | None = None,
    dlse: Array | None = None,
    wrt: Sequence[str] | None = None,
    **options: Unpack[GraphAttentionKeywords],
) -> GraphAttentionGrads:
    """Computes the gradients of `graph_attention`, by the same arguments, batch axes too.

    A composition of differentiable operations, in either mode; errors are those of the forward call.

    Args:
      dout: cotangent of `out`, its shape and dtype; None = 0.
      out, lse: of the forward call, `out` per head, `[..., num_dst, dim]`, also without `concat_heads`. If
        either is None, or `dweights` is given, the forward runs again. Scores of
        1e4 and more that tie lose digits in `lse`: only the gradient of the attention itself keeps them.
      dweights, dlse: cotangents of the weights and of `lse`; None = 0.
      wrt: which of "src", "dst", "attention_weights", "edge" to compute;
        default: all that are given but "edge".

    Returns:
      GraphAttentionGrads(src, dst, attention_weights, edge), each with its argument's
      shape and dtype; None where not asked. With `dst=None` the
      gradient of `src` holds both its shares, and "dst" has none.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_attn_bwd as jab
      >>> graph = jab.BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> x, a, dout = jnp.ones((3, 8)), jnp.ones(16), jnp.ones((2, 8))
      >>> grads = jab.graph_attention_bwd(dout, graph, x, None, a, num_heads=2)
      >>> grads.src.shape, grads.attention_weights.shape, grads.dst is None
      ((3, 8), (16,), True)
    """
    nodes, cotangents = (src, dst, attention_weights), (dout, out, lse, dweights, dlse)
    return _additive_gradients(graph_attention, GAT, graph, nodes, cotangents, wrt, options)


@keywords.known
def graph_attention_v2_bwd(
    dout: Array | None, graph: BipartiteCSC, src: Array, dst: Array | None, attention_weights: Array, *,
    out: Array | None = None, lse: Array | None = None, dweights: Array | None = None,
    dlse: Array | None = None, wrt: Sequence[str] | None = None, **options: Unpack[GraphAttentionKeywords],
) -> GraphAttentionGrads:  # fmt: skip
    """Computes the gradients of `graph_attention_v2`, otherwise as `graph_attention_bwd` does.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_attn_bwd as jab
      >>> graph = jab.BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> x, a, dout = jnp.ones((3, 8)), jnp.ones(8), jnp.ones((2, 8))
      >>> jab.graph_attention_v2_bwd(dout, graph, x, None, a, num_heads=2).attention_weights.shape
      (8,)
    """
    nodes, cotangents = (src, dst, attention_weights), (dout, out, lse, dweights, dlse)
    return _additive_gradients(graph_attention_v2, GATv2, graph, nodes, cotangents, wrt, options)


@keywords.known
def graph_transformer_attention_bwd(
    dout: Array | None,
    graph: BipartiteCSC,
    query: Array,
    key: Array,
    value: Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    dweights: Array | None = None,
    dlse: Array | None = None,
    wrt: Sequence[str] = ("query", "key", "value"),
    **options: Unpack[GraphTransformerAttentionKeywords],
) -> GraphTransformerAttentionGrads:
    """Computes the gradients of `graph_transformer_attention`, otherwise as `graph_attention_bwd` does.

    Args:
      dout, out, lse, dweights, dlse: as `graph_attention_bwd` takes them, `out` `[..., num_dst, H * Dv]`.
      wrt: which of "query", "key", "value", "edge", "score_bias" to compute.

    Returns:
      GraphTransformerAttentionGrads(query, key, value, edge, score_bias), each with its argument's
      shape and dtype; None where not asked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_attn_bwd as jab
      >>> graph = jab.BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> q, k, dout = jnp.ones((2, 8)), jnp.ones((3, 8)), jnp.ones((2, 8))
      >>> grads = jab.graph_transformer_attention_bwd(dout, graph, q, k, k, num_heads=2, wrt="key")
      >>> grads.key.shape, grads.query is None
      ((3, 8), True)
    """
    # the operands by the names of the arguments, and which of them are asked for
    name, keywords = "graph_transformer_attention_bwd", GraphTransformerAttentionKeywords
    given = checks.complete(name, graph_transformer_attention, keywords, options)
    implementation = given.pop("implementation")
    static, operands = prepare_transformer(
        name, graph, query, key, value, return_attention_weights=False, **given
    )
    present = [n for n, operand in _TRANSFORMER.items() if getattr(operands, operand) is not None]
    wanted = {_TRANSFORMER[n] for n in checks.wanted(name, wrt, tuple(_TRANSFORMER), present)}

    grads = _gradients(name, static, operands, (dout, out, lse, dweights, dlse), wanted, implementation)
    found = {n: grads.get(x) for n, x in _TRANSFORMER.items()}
    if found["query"] is not None:
        found["query"] = head_scale.times(found["query"], given["scale"])
    return GraphTransformerAttentionGrads(**found)


def _additive_gradients(
    forward: Callable[..., Any], kind: type[GAT] | type[GATv2], graph: Any, nodes: tuple[Any, ...],
    cotangents: tuple[Any, ...], wrt: Any, options: GraphAttentionKeywords,
) -> GraphAttentionGrads:  # fmt: skip
    """Computes the gradients of gat and gatv2; src gets that of destinations which are sources, too.

    `nodes` are src, dst and attention_weights, `cotangents` what `_gradients` takes.
    """
    # the operands, and which of them are asked for
    name = f"{forward.__name__}_bwd"
    given = checks.complete(name, forward, GraphAttentionKeywords, options)
    implementation, shares_nodes = given.pop("implementation"), nodes[1] is None
    static, operands = prepare_additive(name, kind, graph, *nodes, return_attention_weights=False, **given)
    present = [n for n in _ADDITIVE if getattr(operands, n) is not None and not (shares_nodes and n == "dst")]
    wrt = [n for n in present if n != "edge"] if wrt is None else wrt
    wanted = set(checks.wanted(name, wrt, _ADDITIVE, present))
    shared = shares_nodes and "src" in wanted
    wanted |= {"dst"} if shared else set()

    # their gradients; that of shared nodes is the sum of both
    grads = _gradients(name, static, operands, cotangents, wanted, implementation)
    if shared:
        ddst = grads.pop("dst")
        others = grads["src"].shape[-2] - ddst.shape[-2]
        grads["src"] = grads["src"] + jnp.pad(ddst, (*((0, 0),) * (ddst.ndim - 2), (0, others), (0, 0)))
    return GraphAttentionGrads(**grads)


def _gradients(
    operator: str, options: Options, operands: Operands, given: Any, wanted: set[str], implementation: Any
) -> dict[str, jax.Array]:
    """Computes the gradients of the operands in `wanted`, by name.

    `given` are dout, out, lse, dweights and dlse, in this order; None where they are not given.
    """
    check_cotangents(operator, options, operands, *given)
    plan = _planned(operator, options, operands, False, implementation)

    # what the forward left: as it was given, or computed again where something is missing
    dout, out, lse, dweights, dlse = given
    if out is None or lse is None or dweights is not None:
        needed = dataclasses.replace(options, return_weights=dweights is not None)
        result = _forward_of(dataclasses.replace(plan, options=needed), operands)()
    else:
        out, lse = (laid_like_destinations(x, operands, True) for x in (out, lse))
        result = Result(out, None, None, lse, None, None)

    # cotangents lie as the outputs would
    dout = None if dout is None else laid_like_destinations(dout, operands, options.concat_heads)
    dweights = None if dweights is None else laid_like_nodes(dweights, operands, (None, -1))
    dlse = None if dlse is None else laid_like_destinations(dlse, operands, True)
    residuals = Residuals(operands, result, Wanted(frozenset(wanted)))
    return _summed(_backward_of(plan, residuals, Cotangents(dout, dweights, dlse))(), operands)


_PORTABLE = backend.Implementation("xla", portable_forward.forward, portable_backward.backward)
IMPLEMENTATIONS = (backend.kernel("mosaic_gpu", __package__, _PORTABLE, ("gpu",)), _PORTABLE)


def _planned(
    operator: str, options: Options, operands: Operands, return_residual: Any, implementation: Any
) -> Plan:
    """Makes the plan of a call whose other arguments are checked."""
    return_residual = checks.flag(operator, "return_residual", return_residual)
    plan = partial(Plan.of, return_residual=return_residual)
    return backend.planned(operator, IMPLEMENTATIONS, implementation, options, operands, plan)


def _forward_of(plan: Plan, operands: Operands) -> Callable[[], Result]:
    """Returns the call that computes the result of every entry."""
    run = partial(backend.named(IMPLEMENTATIONS, plan.implementation).forward, plan)
    return split.over_entries(run, plan.batch_rank, (operands,), (_axes(plan, operands),), plan.in_turn)


def _backward_of(
    plan: Plan, residuals: Residuals, cotangents: Cotangents
) -> Callable[[], dict[str, jax.Array]]:
    """Returns the call that computes the gradients of every entry, by name; `_summed` adds them up."""
    run, operands = backend.named(IMPLEMENTATIONS, plan.implementation).backward, residuals.operands
    of_residuals: Any = _axes(plan, operands), 0, None
    if plan.batch_rank:  # what varies is summed over devices by no entry
        residuals = residuals._replace(operands=pallas.vary_alike(operands))
    arrays, axes = (residuals, cotangents), (Residuals(*of_residuals), 0)
    return split.over_entries(partial(run, plan), plan.batch_rank, arrays, axes, plan.in_turn)


def _axes(plan: Plan, operands: Operands) -> Operands:
    """Returns 0 for each of the operands that has the axes of the batch, None for what entries share."""
    has_batch = lambda x, own_rank: x is not None and x.ndim - own_rank == plan.batch_rank
    axes: Any = {n: 0 for n, rank in RANKS.items() if has_batch(getattr(operands, n), rank)}
    if operands.dropout_words is not None:
        axes["dropout_offset"] = dropout.Offset(0, None, None, None)
    return Operands(**dict.fromkeys(Operands._fields) | axes)


def _summed(grads: dict[str, jax.Array], operands: Operands) -> dict[str, jax.Array]:
    """Sums the gradients of operands that entries share, of which there is one for each entry."""

    def of_all(grad, primal):
        surplus = grad.ndim - primal.ndim
        if surplus:
            grad = grad.astype(accumulator_dtype(grad.dtype)).sum(tuple(range(surplus)))
        return match_type(grad, primal)

    return {name: of_all(grad, getattr(operands, name)) for name, grad in grads.items()}


def _returned(plan: Plan) -> list[str]:
    """Names, as in `Cotangents`, what the operator returns."""
    asked = {"out": True, "weights": plan.options.return_weights, "lse": plan.return_residual}
    return [name for name, is_asked in asked.items() if is_asked]


def _outputs(plan: Plan, operands: Operands, result: Result) -> Any:
    out, lse = result.out if plan.options.concat_heads else result.mean, result.lse
    if plan.tied:
        out, lse = (rows_sharded_like(x, operands.dst) for x in (out, lse))
    found = {"out": out, "weights": result.weights, "lse": lse}
    outputs = tuple(found[name] for name in _returned(plan))
    return outputs if len(outputs) > 1 else out


def _primal(plan: Plan, operands: Operands) -> Any:
    operands = fusion.computed_once(operands, DIFFERENTIABLE)
    return _outputs(plan, operands, _forward_of(plan, operands)())


def _forward(plan, operands, wanted):
    result = _forward_of(plan, fusion.computed_once(operands, DIFFERENTIABLE))()
    result = result._replace(
        out=checkpoint_name(result.out, "attention_out"),
        wide_out=None if result.wide_out is None else checkpoint_name(result.wide_out, "attention_out"),
        m=checkpoint_name(result.m, "attention_lse"),
        l=checkpoint_name(result.l, "attention_lse"),
    )
    return _outputs(plan, operands, result), (operands, result._replace(mean=None, lse=None))


def _backward(plan, saved, wanted, cotangents):
    operands, result = saved
    operands = fusion.computed_once(operands, DIFFERENTIABLE)
    residuals = Residuals(operands, result, Wanted(wanted))
    names = _returned(plan)
    cotangents = jax.tree.map(partial(fusion.kept_whole, may_be_gathered=True), cotangents)
    given = dict(zip(names, cotangents if len(names) > 1 else (cotangents,), strict=True))
    grads = _summed(_backward_of(plan, residuals, Cotangents(**given))(), operands)
    return Operands(None, None, None)._replace(**grads)


def _tangent(plan, saved, tangents):
    operands, result = saved

    # tangents have the axes of their operands
    axes, run = _axes(plan, operands), partial(written_tangent.tangent, plan)
    arrays = operands, result, tangents._replace(graph=None)
    of_tangents = axes._replace(dropout_offset=None)
    run = split.over_entries(run, plan.batch_rank, arrays, (axes, 0, of_tangents), plan.in_turn)
    return _outputs(plan, operands, run())


_OPERATION = Operation(DIFFERENTIABLE, _primal, _forward, _backward, _tangent)
