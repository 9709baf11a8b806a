"""Softmax over the edges into each destination: the public functions, the passes, and the rules.

With s the scores and dw the cotangent of the weights, for edge e into i:

    w_e  = exp(s_e - m_i) / l_i,   m_i = max_f s_f,   l_i = sum_f exp(s_f - m_i)          (1)
    ds_e = w_e (dw_e - sum_f w_f dw_f),   f the edges into the same i        from (1)     (2)

The Jacobian is symmetric: with ds a tangent of the scores and dw that of the weights, (2) holds the other
way round, and the backward is the tangent rule too.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import backend, checks, secondary_calls
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.operation import Operation
from jax_attn_bwd._core.sharding import explicit_spec, full_like_operands, match_type, reshard_like, tie
from jax_attn_bwd._core.types import Array, Implementation
from jax_attn_bwd.ops.graph import loops
from jax_attn_bwd.ops.graph.arguments import check_graph
from jax_attn_bwd.ops.graph.loops import has_edges, own_rows, sum_of_group, take
from jax_attn_bwd.ops.graph.placement import run_on_every_device
from jax_attn_bwd.ops.graph.softmax import present, softmax
from jax_attn_bwd.ops.graph.spec import EdgeKeywords
from jax_attn_bwd.ops.graph.structure import BipartiteCSC

_NAME = "edge_softmax"


def edge_softmax(
    graph: BipartiteCSC,
    scores: Array,
    *,
    forward_mode: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Softmax over the edges into each destination, per head.

        w[e] = exp(scores[e]) / sum of exp(scores[f]) over the edges f into the same destination

    Args:
      graph: the edges; see `BipartiteCSC`.
      scores: `[..., nnz, H]`, floating, in the caller's edge order; any batch axes; or `[nnz]`, of one head.
        -inf hides an edge.
      forward_mode: also differentiable by `jax.jvp`, `jax.jacfwd` and `jax.linearize`, by a written rule.
      implementation: None picks the best one for the platform and shapes; a name runs that one or raises.

    Returns:
      weights: shape and dtype of `scores`, computed in float32 or wider; 0 in the padding of a graph with
        a capacity, and where all scores of a destination are -inf.

    Gradients:
      scores: exact, to second order and beyond. Saves the weights. What lies in the padding is not read.

    Raises:
      ValueError: shapes disagree.
      TypeError: an argument is of the wrong kind.
      NotImplementedError: the named implementation cannot run this call.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC, edge_softmax
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> weights = edge_softmax(graph, jnp.log(jnp.array([[1.0], [5.0], [3.0]])))
      >>> [round(float(w), 3) for w in weights.ravel()]
      [0.25, 1.0, 0.75]

    References:
      Velickovic et al., Graph attention networks, 2018, arXiv:1710.10903, equation 2.
    """
    if np.ndim(scores) == 1:
        column = jnp.asarray(scores)[:, None]
        return edge_softmax(graph, column, forward_mode=forward_mode, implementation=implementation)[:, 0]
    graph, scores = check_graph(_NAME, graph), _by_edge(_NAME, "scores", graph, scores)
    chosen = backend.select(_NAME, IMPLEMENTATIONS, implementation, None, (graph, scores))
    return _OPERATION.runner(_NAME, forward_mode)(chosen.name, Operands(graph, scores))


def edge_softmax_bwd(
    dweights: Array, graph: BipartiteCSC, weights: Array, **options: Unpack[EdgeKeywords]
) -> jax.Array:
    """Computes the gradient of `edge_softmax` with respect to `scores`.

        dscores[e] = w[e] (dw[e] - sum of w[f] dw[f] over the edges f into the same destination)

    A composition of differentiable operations, in either mode; errors are those of the forward call.

    Args:
      dweights: cotangent of `weights`, its shape and dtype.
      weights: what `edge_softmax` returned.

    Returns:
      dscores: shape and dtype of `weights`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC, edge_softmax_bwd
      >>> graph = BipartiteCSC.from_coo(src=[0, 1], dst=[0, 0], num_src=2, num_dst=1)
      >>> edge_softmax_bwd(jnp.array([1.0, 0.0]), graph, jnp.array([0.25, 0.75])).tolist()
      [0.1875, -0.1875]
    """
    name = f"{_NAME}_bwd"
    implementation = secondary_calls.complete(name, edge_softmax, EdgeKeywords, options)["implementation"]
    if np.ndim(weights) == np.ndim(dweights) == 1:
        columns = (jnp.asarray(x)[:, None] for x in (dweights, weights))
        return edge_softmax_bwd(next(columns), graph, next(columns), **options)[:, 0]
    graph = check_graph(name, graph)
    weights = _by_edge(name, "weights", graph, weights)
    dweights = _by_edge(name, "dweights", graph, dweights)
    checks.shape(name, "dweights", dweights, "the shape of weights", weights.shape)
    checks.same_dtype(name, weights=weights, dweights=dweights)
    dweights = reshard_like(dweights, weights, range(weights.ndim))
    chosen = backend.select(name, IMPLEMENTATIONS, implementation, None, (graph, weights))
    return chosen.backward(graph, weights, dweights)


def edge_softmax_jvp(
    graph: BipartiteCSC, scores: Array, *, dscores: Array | None = None, **options: Unpack[EdgeKeywords]
) -> tuple[jax.Array, jax.Array]:
    """Returns the output of `edge_softmax` and its tangent.

        dw[e] = w[e] (ds[e] - sum of w[f] ds[f] over the edges f into the same destination)

    Differentiable in both modes, and raises, as the forward call with `forward_mode=True`.

    Args:
      dscores: tangent of `scores`, its shape and dtype; None = 0.

    Returns:
      (weights, dweights): shape and dtype of `scores`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC, edge_softmax_jvp
      >>> graph = BipartiteCSC.from_coo(src=[0, 1], dst=[0, 0], num_src=2, num_dst=1)
      >>> scores, moving = jnp.log(jnp.array([1.0, 3.0])), jnp.array([1.0, 0.0])
      >>> edge_softmax_jvp(graph, scores, dscores=moving)[1].round(4).tolist()
      [0.1875, -0.1875]
    """
    return secondary_calls.with_tangent(edge_softmax, EdgeKeywords, **locals())


def _by_edge(operator: str, argument: str, graph: BipartiteCSC, given: Array) -> jax.Array:
    x = checks.floating(operator, argument, given)
    if x.ndim < 2 or x.shape[-2] != graph.capacity:
        names = f"[..., nnz, H] with nnz = {graph.capacity}"
        raise ValueError(checks.message(operator, argument, f"have shape {names}", x.shape))
    if (spec := explicit_spec(x))[-2] is not None:
        placed, remedy = "not be sharded along its edges", "shard the heads"
        raise ValueError(checks.message(operator, argument, placed, spec, remedy))
    return x


@jax.jit
def forward(graph: BipartiteCSC, scores: jax.Array) -> jax.Array:
    """Computes the weights (1)."""
    dtype, like = accumulator_dtype(scores.dtype), (graph, scores)
    edges = loops.one_chunk(graph.by_destination, graph.capacity)
    weights = full_like_operands(scores, scores.shape, 0, scores.dtype, like)
    if has_edges(graph):
        zeros = full_like_operands(scores, (graph.num_dst, scores.shape[1]), 0, dtype, like)
        s = present(take(scores, edges.number).astype(dtype), edges)
        ((p,), *_) = softmax([s], [edges], graph, zeros)
        weights = loops.put(weights, edges.number, p)
    return tie(weights, like)


@jax.jit
def backward(graph: BipartiteCSC, weights: jax.Array, dweights: jax.Array) -> jax.Array:
    """Computes the gradient of the scores (2)."""
    dtype, like = accumulator_dtype(weights.dtype), (graph, weights, dweights)
    edges = loops.one_chunk(graph.by_destination, graph.capacity)
    dscores = full_like_operands(weights, weights.shape, 0, dtype, like)
    if has_edges(graph):
        w = take(weights, edges.number).astype(dtype)
        dw = jnp.where(w == 0, 0, take(dweights, edges.number).astype(dtype))
        zeros = full_like_operands(weights, (graph.num_dst, weights.shape[1]), 0, dtype, like)
        sums = loops.add(zeros, edges, sum_of_group(w * dw, edges))
        ds = w * (dw - own_rows(sums, edges))  # (2)
        dscores = loops.put(dscores, edges.number, ds)
    return match_type(dscores, weights)


def _of_entries(run: Callable[..., jax.Array], graph: BipartiteCSC, *arrays: jax.Array) -> jax.Array:
    """Calls `run(graph, *arrays)`, `[nnz, H]`, for each entry of the batch axes in front."""
    run = partial(run_on_every_device, run)
    for _ in range(arrays[0].ndim - 2):
        run = jax.vmap(run, in_axes=(None, *(0 for _ in arrays)))
    return run(graph, *arrays)


IMPLEMENTATIONS = (
    backend.Implementation("xla", partial(_of_entries, forward), partial(_of_entries, backward)),
)


class Operands(NamedTuple):
    """The arrays of a call."""

    graph: BipartiteCSC
    scores: jax.Array


def _primal(implementation: str, operands: Operands) -> jax.Array:
    return backend.named(IMPLEMENTATIONS, implementation).forward(*operands)


def _forward(implementation, operands, wanted):
    weights = backend.named(IMPLEMENTATIONS, implementation).forward(*operands)
    return weights, (operands.graph, weights, operands.scores[..., :0, :])


def _backward(implementation, saved, wanted, dweights):
    graph, weights, like_scores = saved
    dscores = backend.named(IMPLEMENTATIONS, implementation).backward(graph, weights, dweights)
    return Operands(None, match_type(dscores, like_scores))  # shards of the graph may share the scores


def _tangent(implementation, saved, tangents):
    graph, weights, _ = saved
    return backend.named(IMPLEMENTATIONS, implementation).backward(graph, weights, tangents.scores)


_OPERATION = Operation((), _primal, _forward, _backward, _tangent)
