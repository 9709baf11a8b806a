"""The backwards of the graph attentions as plain functions."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks, head_scale, secondary_calls
from jax_attn_bwd._core.types import Array
from jax_attn_bwd.ops.graph.api import graph_attention, graph_attention_v2, graph_transformer_attention
from jax_attn_bwd.ops.graph.arguments import check_cotangents, prepare_additive, prepare_transformer
from jax_attn_bwd.ops.graph.kinds import GAT, GATv2
from jax_attn_bwd.ops.graph.placement import laid_like_destinations, laid_like_nodes
from jax_attn_bwd.ops.graph.rule import backward_of, decide, forward_of, summed
from jax_attn_bwd.ops.graph.spec import (
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

_ADDITIVE = ("src", "dst", "attention_weights", "edge")  # the differentiable arguments, which are operands
_TRANSFORMER = {"query": "dst", "key": "src", "value": "value", "edge": "edge", "score_bias": "score_bias"}


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


def graph_attention_v2_bwd(
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
    given = secondary_calls.complete(name, graph_transformer_attention, keywords, options)
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
    given = secondary_calls.complete(name, forward, GraphAttentionKeywords, options)
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
    plan = decide(operator, options, operands, False, implementation)

    # what the forward left: as it was given, or computed again where something is missing
    dout, out, lse, dweights, dlse = given
    if out is None or lse is None or dweights is not None:
        needed = dataclasses.replace(options, return_weights=dweights is not None)
        result = forward_of(dataclasses.replace(plan, options=needed), operands)()
    else:
        out, lse = (laid_like_destinations(x, operands, True) for x in (out, lse))
        result = Result(out, None, None, lse, None, None)

    # cotangents lie as the outputs would
    dout = None if dout is None else laid_like_destinations(dout, operands, options.concat_heads)
    dweights = None if dweights is None else laid_like_nodes(dweights, operands, (None, -1))
    dlse = None if dlse is None else laid_like_destinations(dlse, operands, True)
    residuals = Residuals(operands, result, Wanted(frozenset(wanted)))
    return summed(backward_of(plan, residuals, Cotangents(dout, dweights, dlse))(), operands)
