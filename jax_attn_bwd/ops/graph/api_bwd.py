"""The backwards of the graph attentions as plain functions."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.types import Activation, Array, Implementation
from jax_attn_bwd.ops.graph.arguments import check_cotangents, prepare_additive, prepare_transformer
from jax_attn_bwd.ops.graph.kinds import GAT, GATv2
from jax_attn_bwd.ops.graph.placement import laid_like_destinations, laid_like_nodes
from jax_attn_bwd.ops.graph.rule import backward_of, decide, forward_of
from jax_attn_bwd.ops.graph.spec import (
    Cotangents,
    GraphAttentionGrads,
    GraphTransformerAttentionGrads,
    Operands,
    Options,
    Residuals,
    Result,
    Wanted,
)
from jax_attn_bwd.ops.graph.structure import BipartiteCSC

_TRANSFORMER_OPERANDS = {
    "query": "dst",
    "key": "src",
    "value": "value",
    "edge": "edge",
    "score_bias": "score_bias",
}


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
    num_heads: int,
    edge: Array | None = None,
    concat_heads: bool = True,
    activation: Activation = "leaky_relu",
    alpha: float = 0.2,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_mask: Array | None = None,
    dropout_offset: Sequence[Any] | None = None,
    implementation: Implementation | None = None,
) -> GraphAttentionGrads:
    """The backward of `graph_attention` as a plain function.

    Args:
      dout: cotangent of `out`, its shape and dtype; None = 0.
      out, lse: of the forward call, `out` per head, `[..., num_dst, dim]`, also without `concat_heads`. If
        either is None, or `dweights` is given, the forward runs again. Scores of
        1e4 and more that tie lose digits in `lse`: only the gradient of the attention itself keeps them.
      dweights, dlse: cotangents of the weights and of `lse`; None = 0.
      wrt: which of "src", "dst", "attention_weights", "edge" to compute;
        default: all that are given but "edge".
      graph, src, dst, attention_weights, edge and options: as in the forward call, batch axes too.

    Returns:
      GraphAttentionGrads(src, dst, attention_weights, edge), each with its argument's
      shape and dtype; None where not asked. With `dst=None` the
      gradient of `src` holds both its shares, and "dst" has none.

    Gradients:
      A composition of differentiable operations: it may itself be differentiated, in either mode.

    Raises:
      The same as `graph_attention`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_attn_bwd as jab
      >>> graph = jab.BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> x, a, dout = jnp.ones((3, 8)), jnp.ones(16), jnp.ones((2, 8))
      >>> grads = jab.graph_attention_bwd(dout, graph, x, None, a, num_heads=2)
      >>> grads.src.shape, grads.attention_weights.shape, grads.dst is None
      ((3, 8), (16,), True)
    """
    name = "graph_attention_bwd"
    options, operands = prepare_additive(
        name, GAT, graph, src, dst, attention_weights, num_heads=num_heads, edge=edge,
        concat_heads=concat_heads, activation=activation, alpha=alpha, dropout_rate=dropout_rate,
        dropout_key=dropout_key, dropout_mask=dropout_mask, dropout_offset=dropout_offset,
        return_attention_weights=False,
    )  # fmt: skip
    given = {"src": src, "dst": dst, "attention_weights": attention_weights, "edge": edge}
    return _additive_gradients(
        name, options, operands, given, dout, out, lse, dweights, dlse, wrt, implementation
    )


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
    num_heads: int,
    edge: Array | None = None,
    concat_heads: bool = True,
    activation: Activation = "leaky_relu",
    alpha: float = 0.2,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_mask: Array | None = None,
    dropout_offset: Sequence[Any] | None = None,
    implementation: Implementation | None = None,
) -> GraphAttentionGrads:
    """The backward of `graph_attention_v2` as a plain function.

    Args:
      dout: cotangent of `out`, its shape and dtype; None = 0.
      out, lse: of the forward call, `out` per head, `[..., num_dst, dim]`, also without `concat_heads`. If
        either is None, or `dweights` is given, the forward runs again. Scores of
        1e4 and more that tie lose digits in `lse`: only the gradient of the attention itself keeps them.
      dweights, dlse: cotangents of the weights and of `lse`; None = 0.
      wrt: which of "src", "dst", "attention_weights", "edge" to compute;
        default: all that are given but "edge".
      graph, src, dst, attention_weights, edge and options: as in the forward call, batch axes too.

    Returns:
      GraphAttentionGrads(src, dst, attention_weights, edge), each with its argument's
      shape and dtype; None where not asked. With `dst=None` the
      gradient of `src` holds both its shares, and "dst" has none.

    Gradients:
      A composition of differentiable operations: it may itself be differentiated, in either mode.

    Raises:
      The same as `graph_attention_v2`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_attn_bwd as jab
      >>> graph = jab.BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> x, a, dout = jnp.ones((3, 8)), jnp.ones(8), jnp.ones((2, 8))
      >>> grads = jab.graph_attention_v2_bwd(dout, graph, x, None, a, num_heads=2)
      >>> grads.src.shape, grads.attention_weights.shape, grads.dst is None
      ((3, 8), (8,), True)
    """
    name = "graph_attention_v2_bwd"
    options, operands = prepare_additive(
        name, GATv2, graph, src, dst, attention_weights, num_heads=num_heads, edge=edge,
        concat_heads=concat_heads, activation=activation, alpha=alpha, dropout_rate=dropout_rate,
        dropout_key=dropout_key, dropout_mask=dropout_mask, dropout_offset=dropout_offset,
        return_attention_weights=False,
    )  # fmt: skip
    given = {"src": src, "dst": dst, "attention_weights": attention_weights, "edge": edge}
    return _additive_gradients(
        name, options, operands, given, dout, out, lse, dweights, dlse, wrt, implementation
    )


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
    num_heads: int,
    num_kv_heads: int | None = None,
    edge: Array | None = None,
    score_bias: Array | None = None,
    scale: float | None = None,
    concat_heads: bool = True,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_mask: Array | None = None,
    dropout_offset: Sequence[Any] | None = None,
    implementation: Implementation | None = None,
) -> GraphTransformerAttentionGrads:
    """The backward of `graph_transformer_attention` as a plain function.

    Args:
      dout: cotangent of `out`, its shape and dtype; None = 0.
      out, lse: of the forward call, `out` per head, `[..., num_dst, H * Dv]`, also without `concat_heads`. If
        either is None, or `dweights` is given, the forward runs again. Scores of
        1e4 and more that tie lose digits in `lse`: only the gradient of the attention itself keeps them.
      dweights, dlse: cotangents of the weights and of `lse`; None = 0.
      wrt: which of "query", "key", "value", "edge", "score_bias" to compute.
      graph, query, key, value, edge, score_bias and options: as in the forward call, batch axes too.

    Returns:
      GraphTransformerAttentionGrads(query, key, value, edge, score_bias), each with its argument's
      shape and dtype; None where not asked.

    Gradients:
      A composition of differentiable operations: it may itself be differentiated, in either mode.

    Raises:
      The same as `graph_transformer_attention`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_attn_bwd as jab
      >>> graph = jab.BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> q, k, dout = jnp.ones((2, 8)), jnp.ones((3, 8)), jnp.ones((2, 8))
      >>> grads = jab.graph_transformer_attention_bwd(dout, graph, q, k, k, num_heads=2, wrt="key")
      >>> grads.key.shape, grads.query is None
      ((3, 8), True)
    """
    name = "graph_transformer_attention_bwd"
    options, operands = prepare_transformer(
        name, graph, query, key, value, num_heads=num_heads, num_kv_heads=num_kv_heads, edge=edge,
        score_bias=score_bias, scale=scale, concat_heads=concat_heads, dropout_rate=dropout_rate,
        dropout_key=dropout_key, dropout_mask=dropout_mask, dropout_offset=dropout_offset,
        return_attention_weights=False,
    )  # fmt: skip
    present = [n for n in _TRANSFORMER_OPERANDS if getattr(operands, _TRANSFORMER_OPERANDS[n]) is not None]
    wanted = [
        _TRANSFORMER_OPERANDS[n] for n in checks.wanted(name, wrt, tuple(_TRANSFORMER_OPERANDS), present)
    ]
    grads = _gradients(name, options, operands, dout, out, lse, dweights, dlse, wanted, implementation)
    return GraphTransformerAttentionGrads(
        **{n: grads.get(_TRANSFORMER_OPERANDS[n]) for n in _TRANSFORMER_OPERANDS}
    )


def _gradients(
    operator: str,
    options: Options,
    operands: Operands,
    dout: Any,
    out: Any,
    lse: Any,
    dweights: Any,
    dlse: Any,
    wanted: Iterable[str],
    implementation: Any,
) -> dict[str, jax.Array]:
    """The backward as a plain function: gradients of the operands in `wanted`, by name."""
    check_cotangents(operator, options, operands, dout, out, lse, dweights, dlse)
    plan = decide(operator, options, operands, False, implementation)
    if out is None or lse is None or dweights is not None:
        needed = dataclasses.replace(options, return_weights=dweights is not None)
        result = forward_of(plan)(dataclasses.replace(plan, options=needed), operands)
    else:
        out, lse = (laid_like_destinations(x, operands, True) for x in (out, lse))
        result = Result(out, None, None, lse, None, None)
    dout = None if dout is None else laid_like_destinations(dout, operands, options.concat_heads)
    dweights = None if dweights is None else laid_like_nodes(dweights, operands, (None, -1))
    dlse = None if dlse is None else laid_like_destinations(dlse, operands, True)
    residuals = Residuals(operands, result, Wanted(frozenset(wanted)))
    return backward_of(plan)(plan, residuals, Cotangents(dout, dweights, dlse))


def _additive_gradients(
    operator: str,
    options: Options,
    operands: Operands,
    given: dict[str, Any],
    dout: Any,
    out: Any,
    lse: Any,
    dweights: Any,
    dlse: Any,
    wrt: Any,
    implementation: Any,
) -> GraphAttentionGrads:
    """`_gradients` of gat and gatv2; `given` holds the caller's arguments, whose dst may be None."""
    present = [name for name, x in given.items() if x is not None]
    wrt = [name for name in present if name != "edge"] if wrt is None else wrt
    wanted = set(checks.wanted(operator, wrt, tuple(given), present))
    shared = given["dst"] is None and "src" in wanted
    grads = _gradients(
        operator,
        options,
        operands,
        dout,
        out,
        lse,
        dweights,
        dlse,
        wanted | ({"dst"} if shared else set()),
        implementation,
    )
    if shared:
        ddst = grads.pop("dst")
        others = grads["src"].shape[-2] - ddst.shape[-2]
        grads["src"] = grads["src"] + jnp.pad(ddst, (*((0, 0),) * (ddst.ndim - 2), (0, others), (0, 0)))
    return GraphAttentionGrads(**grads)
