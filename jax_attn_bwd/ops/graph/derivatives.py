"""The backwards and the tangent rules of the graph attentions as plain functions."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks, secondary_calls
from jax_attn_bwd._core.types import Activation, Array, Implementation
from jax_attn_bwd.ops.graph.api import graph_attention, graph_attention_v2, graph_transformer_attention
from jax_attn_bwd.ops.graph.arguments import check_cotangents, prepare_additive, prepare_transformer
from jax_attn_bwd.ops.graph.kinds import GAT, GATv2
from jax_attn_bwd.ops.graph.placement import laid_like_destinations, laid_like_nodes
from jax_attn_bwd.ops.graph.rule import backward_of, decide, forward_of
from jax_attn_bwd.ops.graph.spec import (
    Cotangents,
    GraphAttentionGrads,
    GraphAttentionJvpKeywords,
    GraphTransformerAttentionGrads,
    GraphTransformerAttentionJvpKeywords,
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
    given = _Given(dout, out, lse, dweights, dlse)
    return _additive_gradients(name, options, operands, given, wrt, implementation, dst is None)


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
      dout, out, lse, dweights, dlse, wrt: as `graph_attention_bwd` takes them.
      graph, src, dst, attention_weights, edge and options: as in the forward call, batch axes too.

    Returns:
      GraphAttentionGrads(src, dst, attention_weights, edge), as `graph_attention_bwd` returns them.

    Gradients:
      The same as `graph_attention_bwd`.

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
    given = _Given(dout, out, lse, dweights, dlse)
    return _additive_gradients(name, options, operands, given, wrt, implementation, dst is None)


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
      dout, out, lse, dweights, dlse: as `graph_attention_bwd` takes them, `out` `[..., num_dst, H * Dv]`.
      wrt: which of "query", "key", "value", "edge", "score_bias" to compute.
      graph, query, key, value, edge, score_bias and options: as in the forward call, batch axes too.

    Returns:
      GraphTransformerAttentionGrads(query, key, value, edge, score_bias), each with its argument's
      shape and dtype; None where not asked.

    Gradients:
      The same as `graph_attention_bwd`.

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
    present = [n for n, operand in _TRANSFORMER.items() if getattr(operands, operand) is not None]
    wanted = {_TRANSFORMER[n] for n in checks.wanted(name, wrt, tuple(_TRANSFORMER), present)}
    given = _Given(dout, out, lse, dweights, dlse)
    grads = _gradients(name, options, operands, given, wanted, implementation)
    return GraphTransformerAttentionGrads(**{n: grads.get(x) for n, x in _TRANSFORMER.items()})


class _Given(NamedTuple):
    """The arguments of a backward beside those of the forward; None where they are not given."""

    dout: Any
    out: Any
    lse: Any
    dweights: Any
    dlse: Any


def _additive_gradients(
    operator: str,
    options: Options,
    operands: Operands,
    given: _Given,
    wrt: Any,
    implementation: Any,
    dst_is_src: bool,
) -> GraphAttentionGrads:
    """Computes the gradients of gat and gatv2; src gets that of destinations which are sources, too."""
    present = [n for n in _ADDITIVE if getattr(operands, n) is not None and not (dst_is_src and n == "dst")]
    wrt = [n for n in present if n != "edge"] if wrt is None else wrt
    wanted = set(checks.wanted(operator, wrt, _ADDITIVE, present))
    shared = dst_is_src and "src" in wanted
    wanted |= {"dst"} if shared else set()
    grads = _gradients(operator, options, operands, given, wanted, implementation)
    if shared:
        ddst = grads.pop("dst")
        others = grads["src"].shape[-2] - ddst.shape[-2]
        grads["src"] = grads["src"] + jnp.pad(ddst, (*((0, 0),) * (ddst.ndim - 2), (0, others), (0, 0)))
    return GraphAttentionGrads(**grads)


def _gradients(
    operator: str, options: Options, operands: Operands, given: _Given, wanted: set[str], implementation: Any
) -> dict[str, jax.Array]:
    """Computes the gradients of the operands in `wanted`, by name."""
    check_cotangents(operator, options, operands, *given)
    plan = decide(operator, options, operands, False, implementation)

    # what the forward left: as it was given, or computed again where something is missing
    dout, out, lse, dweights, dlse = given
    if out is None or lse is None or dweights is not None:
        needed = dataclasses.replace(options, return_weights=dweights is not None)
        result = forward_of(plan)(dataclasses.replace(plan, options=needed), operands)
    else:
        out, lse = (laid_like_destinations(x, operands, True) for x in (out, lse))
        result = Result(out, None, None, lse, None, None)

    # cotangents lie as the outputs would
    dout = None if dout is None else laid_like_destinations(dout, operands, options.concat_heads)
    dweights = None if dweights is None else laid_like_nodes(dweights, operands, (None, -1))
    dlse = None if dlse is None else laid_like_destinations(dlse, operands, True)
    residuals = Residuals(operands, result, Wanted(frozenset(wanted)))
    return backward_of(plan)(plan, residuals, Cotangents(dout, dweights, dlse))


def graph_attention_jvp(
    graph: BipartiteCSC,
    src: Array,
    dst: Array | None,
    attention_weights: Array,
    *,
    dsrc: Array | None = None,
    ddst: Array | None = None,
    dattention_weights: Array | None = None,
    dedge: Array | None = None,
    **options: Unpack[GraphAttentionJvpKeywords],
) -> tuple[jax.Array, jax.Array]:
    """`graph_attention` and its tangent, as a plain function.

    Args:
      dsrc, ddst, dattention_weights, dedge: tangents, each of the shape and dtype of its argument; None = 0.
        With `dst=None` that of `src` moves the destinations too.
      graph, src, dst, attention_weights and options: as in the forward call. Tangents of the weights
        and of lse are for `jax.jvp` of the call with `forward_mode=True`.

    Returns:
      (out, dout): shape and dtype of what the forward call returns, by one pass over the edges. A destination
      without edges has tangent 0.

    Gradients:
      Differentiable in both modes, as the call with `forward_mode=True` is.

    Raises:
      As `graph_attention`, and NotImplementedError where this JAX has no `jax.experimental.hijax`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_attn_bwd as jab
      >>> graph = jab.BipartiteCSC.from_coo(src=[0, 1], dst=[0, 0], num_src=2, num_dst=1)
      >>> x, a = jnp.array([[1.0], [3.0]]), jnp.zeros(2)
      >>> out, dout = jab.graph_attention_jvp(graph, x, None, a, num_heads=1, dsrc=jnp.ones((2, 1)))
      >>> out.item(), dout.item()
      (2.0, 1.0)
    """
    primals = {"src": src, "dst": dst, "attention_weights": attention_weights}
    moving = {"src": dsrc, "dst": ddst, "attention_weights": dattention_weights, "edge": dedge}
    return _with_tangent(graph_attention, GraphAttentionJvpKeywords, graph, primals, moving, options)


def graph_attention_v2_jvp(
    graph: BipartiteCSC,
    src: Array,
    dst: Array | None,
    attention_weights: Array,
    *,
    dsrc: Array | None = None,
    ddst: Array | None = None,
    dattention_weights: Array | None = None,
    dedge: Array | None = None,
    **options: Unpack[GraphAttentionJvpKeywords],
) -> tuple[jax.Array, jax.Array]:
    """`graph_attention_v2` and its tangent, as a plain function.

    Args:
      dsrc, ddst, dattention_weights, dedge: tangents, as `graph_attention_jvp` takes them.
      graph, src, dst, attention_weights and options: as in the forward call.

    Returns:
      (out, dout): as `graph_attention_jvp` returns them.

    Gradients:
      Differentiable in both modes, as the call with `forward_mode=True` is.

    Raises:
      As `graph_attention_v2`, and NotImplementedError where this JAX has no `jax.experimental.hijax`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_attn_bwd as jab
      >>> graph = jab.BipartiteCSC.from_coo(src=[0, 1], dst=[0, 0], num_src=2, num_dst=1)
      >>> x, a, da = jnp.array([[1.0], [3.0]]), jnp.zeros(1), jnp.ones(1)
      >>> out, dout = jab.graph_attention_v2_jvp(graph, x, None, a, num_heads=1, dattention_weights=da)
      >>> out.item(), dout.item()
      (2.0, 1.0)
    """
    primals = {"src": src, "dst": dst, "attention_weights": attention_weights}
    moving = {"src": dsrc, "dst": ddst, "attention_weights": dattention_weights, "edge": dedge}
    return _with_tangent(graph_attention_v2, GraphAttentionJvpKeywords, graph, primals, moving, options)


def graph_transformer_attention_jvp(
    graph: BipartiteCSC,
    query: Array,
    key: Array,
    value: Array,
    *,
    dquery: Array | None = None,
    dkey: Array | None = None,
    dvalue: Array | None = None,
    dedge: Array | None = None,
    dscore_bias: Array | None = None,
    **options: Unpack[GraphTransformerAttentionJvpKeywords],
) -> tuple[jax.Array, jax.Array]:
    """`graph_transformer_attention` and its tangent, as a plain function.

    Args:
      dquery, dkey, dvalue, dedge, dscore_bias: tangents, each of the shape and dtype of its argument;
        None = 0. What hides an edge (a bias of -inf) has none.
      graph, query, key, value and options: as in the forward call.

    Returns:
      (out, dout): as `graph_attention_jvp` returns them.

    Gradients:
      Differentiable in both modes, as the call with `forward_mode=True` is.

    Raises:
      As `graph_transformer_attention`, and NotImplementedError where this JAX has no
      `jax.experimental.hijax`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_attn_bwd as jab
      >>> graph = jab.BipartiteCSC.from_coo(src=[0, 1], dst=[0, 0], num_src=2, num_dst=1)
      >>> q, k, v = jnp.ones((1, 1)), jnp.zeros((2, 1)), jnp.array([[1.0], [3.0]])
      >>> out, dout = jab.graph_transformer_attention_jvp(graph, q, k, v, num_heads=1, dkey=v)
      >>> out.item(), dout.item()
      (2.0, 1.0)
    """
    primals = {"query": query, "key": key, "value": value}
    moving = {"query": dquery, "key": dkey, "value": dvalue, "edge": dedge, "score_bias": dscore_bias}
    kind = GraphTransformerAttentionJvpKeywords
    return _with_tangent(graph_transformer_attention, kind, graph, primals, moving, options)


def _with_tangent(
    operator: Callable[..., Any], keywords_of: Any, graph: Any, primals: Any, moving: Any, options: Any
) -> tuple[jax.Array, jax.Array]:
    """Calls `operator` and returns its output and tangent; `moving` holds the tangents of its arguments.

    Those that `primals` does not hold are among the `options`, whose names and defaults `keywords_of` tells.
    """
    name = f"{operator.__name__}_jvp"
    given = secondary_calls.complete(name, operator, keywords_of, options)
    primals |= {argument: given.pop(argument) for argument in moving if argument not in primals}
    call = partial(operator, graph, forward_mode=True, **given)
    return secondary_calls.outputs_and_tangents(name, call, primals, moving)
