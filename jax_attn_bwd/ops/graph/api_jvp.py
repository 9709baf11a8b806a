"""The tangent rules of the graph attentions, and of the reductions over edges, as plain functions."""

from functools import partial
from typing import Unpack

import jax

from jax_attn_bwd._core import secondary_calls
from jax_attn_bwd._core.types import Array, Implementation
from jax_attn_bwd.ops.graph import edge_reductions
from jax_attn_bwd.ops.graph.api import graph_attention, graph_attention_v2, graph_transformer_attention
from jax_attn_bwd.ops.graph.spec import GraphAttentionJvpKeywords, GraphTransformerAttentionJvpKeywords
from jax_attn_bwd.ops.graph.structure import BipartiteCSC


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
    name = "graph_attention_jvp"
    given = secondary_calls.complete(name, graph_attention, GraphAttentionJvpKeywords, options)
    primals = {"src": src, "dst": dst, "attention_weights": attention_weights, "edge": given.pop("edge")}
    along = {"src": dsrc, "dst": ddst, "attention_weights": dattention_weights, "edge": dedge}
    call = partial(graph_attention, graph, forward_mode=True, **given)
    return secondary_calls.outputs_and_tangents(name, call, primals, along)


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
    name = "graph_attention_v2_jvp"
    given = secondary_calls.complete(name, graph_attention_v2, GraphAttentionJvpKeywords, options)
    primals = {"src": src, "dst": dst, "attention_weights": attention_weights, "edge": given.pop("edge")}
    along = {"src": dsrc, "dst": ddst, "attention_weights": dattention_weights, "edge": dedge}
    call = partial(graph_attention_v2, graph, forward_mode=True, **given)
    return secondary_calls.outputs_and_tangents(name, call, primals, along)


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
    name, like = "graph_transformer_attention_jvp", graph_transformer_attention
    given = secondary_calls.complete(name, like, GraphTransformerAttentionJvpKeywords, options)
    beside = {argument: given.pop(argument) for argument in ("edge", "score_bias")}
    primals = {"query": query, "key": key, "value": value, **beside}
    along = {"query": dquery, "key": dkey, "value": dvalue, "edge": dedge, "score_bias": dscore_bias}
    call = partial(like, graph, forward_mode=True, **given)
    return secondary_calls.outputs_and_tangents(name, call, primals, along)


def edge_sum_jvp(
    graph: BipartiteCSC,
    edge: Array,
    *,
    dedge: Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`edge_sum` and its tangent, the sum of the tangents, as a plain function.

    Args:
      dedge: tangent of `edge`, its shape and dtype; None = 0.
      graph, edge, implementation: as in the forward.

    Returns:
      (out, dout): as the forward returns out; 0 for a destination without edges.

    Gradients:
      Differentiable in both modes, as the call with `forward_mode=True` is.

    Raises:
      As `edge_sum`, and NotImplementedError where this JAX has no `jax.experimental.hijax`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC, edge_sum_jvp
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> edge_sum_jvp(graph, jnp.ones(3), dedge=jnp.array([1.0, 2.0, 3.0]))[1].tolist()
      [2.0, 4.0]
    """
    return _reduction("edge_sum", graph, edge, dedge, implementation)


def edge_mean_jvp(
    graph: BipartiteCSC,
    edge: Array,
    *,
    dedge: Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`edge_mean` and its tangent, the mean of the tangents, as a plain function.

    Args:
      dedge, graph, edge, implementation: as in `edge_sum_jvp`.

    Returns:
      (out, dout): as `edge_sum_jvp` returns them.

    Gradients:
      The same as `edge_sum_jvp`.

    Raises:
      The same as `edge_sum_jvp`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC, edge_mean_jvp
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> edge_mean_jvp(graph, jnp.ones(3), dedge=jnp.array([1.0, 2.0, 3.0]))[1].tolist()
      [2.0, 2.0]
    """
    return _reduction("edge_mean", graph, edge, dedge, implementation)


def edge_max_jvp(
    graph: BipartiteCSC,
    edge: Array,
    *,
    dedge: Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`edge_max` and its tangent, as a plain function: the mean over the edges that hold the maximum.

    Args:
      dedge, graph, edge, implementation: as in `edge_sum_jvp`.

    Returns:
      (out, dout): as `edge_sum_jvp` returns them.

    Gradients:
      The same as `edge_sum_jvp`.

    Raises:
      The same as `edge_sum_jvp`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC, edge_max_jvp
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> edge_max_jvp(graph, jnp.array([1.0, 5.0, 3.0]), dedge=jnp.array([1.0, 2.0, 3.0]))[1].tolist()
      [2.0, 3.0]
    """
    return _reduction("edge_max", graph, edge, dedge, implementation)


def _reduction(name, graph, edge, dedge, implementation):
    call = partial(getattr(edge_reductions, name), graph, forward_mode=True, implementation=implementation)
    return secondary_calls.outputs_and_tangents(f"{name}_jvp", call, {"edge": edge}, {"edge": dedge})
