"""`edge_sum`, `edge_mean`, `edge_max`, `edge_softmax`: what is taken over the edges into each destination.

The public functions and their rule; `reductions.py` and `softmax.py` have the passes with their equations,
`forward.py` and `loops.py` the sums inside graph attention.
"""

from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import backend, checks, keywords
from jax_attn_bwd._core.operation import Operation
from jax_attn_bwd._core.sharding import explicit_spec, match_type, reshard_like
from jax_attn_bwd._core.types import Array, Implementation
from jax_attn_bwd.ops.graph import reductions, softmax
from jax_attn_bwd.ops.graph.arguments import check_graph
from jax_attn_bwd.ops.graph.placement import run_on_every_device
from jax_attn_bwd.ops.graph.plan import EdgePlan
from jax_attn_bwd.ops.graph.spec import EdgeKeywords
from jax_attn_bwd.ops.graph.structure import BipartiteCSC


@keywords.known
def edge_sum(
    graph: BipartiteCSC,
    edge: jax.Array,
    *,
    forward_mode: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Sums over the edges into each destination.

        out[i] = sum of edge[e] over the edges e into destination i

    Args:
      graph: the edges; see `BipartiteCSC`.
      edge: `[nnz, ...]`, floating, in the caller's edge order; any further axes.
      forward_mode, implementation: as in `edge_softmax`.

    Returns:
      out: `[num_dst, ...]`, dtype of `edge`, accumulated in float32 or wider; 0 for a destination without
        edges.

    Gradients:
      edge: exact, to second order and beyond; 0 in the padding of a graph with a capacity, and what lies
      there is not read. Saves the graph alone. The same bits in every run.

    Raises:
      The same as `edge_softmax`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC, edge_sum
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=3)
      >>> edge_sum(graph, jnp.array([1.0, 5.0, 3.0])).tolist()
      [5.0, 4.0, 0.0]
    """
    return _reduced("edge_sum", graph, edge, forward_mode, implementation)


@keywords.known
def edge_mean(
    graph: BipartiteCSC, edge: jax.Array, *, forward_mode: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array:  # fmt: skip
    """Takes the mean over the edges into each destination: `edge_sum` divided by their number.

        out[i] = sum of edge[e] / number of edges, over the edges e into destination i

    Arguments, results, gradients and errors are those of `edge_sum`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC, edge_mean
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=3)
      >>> edge_mean(graph, jnp.array([1.0, 5.0, 3.0])).tolist()
      [5.0, 2.0, 0.0]
    """
    return _reduced("edge_mean", graph, edge, forward_mode, implementation)


@keywords.known
def edge_max(
    graph: BipartiteCSC, edge: jax.Array, *, forward_mode: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array:  # fmt: skip
    """Takes the maximum over the edges into each destination; the minimum is `-edge_max(graph, -edge)`.

        out[i] = max of edge[e] over the edges e into destination i

    Arguments and errors are those of `edge_sum`.

    Returns:
      out: `[num_dst, ...]`, dtype of `edge`, exact; 0 for a destination without edges.

    Gradients:
      edge: edges that tie for the maximum share its cotangent in equal parts, as in `jnp.max`; the same in
      any order of the edges. To second order and beyond; 0 in the padding. Saves `edge` and `out`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC, edge_max
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=3)
      >>> edge_max(graph, jnp.array([-1.0, -5.0, -3.0])).tolist()
      [-5.0, -1.0, 0.0]
      >>> jax.grad(lambda edge: edge_max(graph, edge).sum())(jnp.ones(3)).tolist()
      [0.5, 1.0, 0.5]
    """
    return _reduced("edge_max", graph, edge, forward_mode, implementation)


@keywords.known
def edge_sum_bwd(dout: jax.Array, graph: BipartiteCSC, **options: Unpack[EdgeKeywords]) -> jax.Array:
    """Computes the gradient of `edge_sum` with respect to `edge`.

        dedge[e] = dout[i] for edge e into destination i

    A composition of differentiable operations, in either mode; errors are those of the forward call.

    Args:
      dout: `[num_dst, ...]`, floating, cotangent of `out`.

    Returns:
      dedge: `[nnz, ...]`, dtype of `dout`; 0 in the padding.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC, edge_sum_bwd
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> edge_sum_bwd(jnp.array([5.0, 2.0]), graph).tolist()
      [2.0, 5.0, 2.0]
    """
    return _gradient("edge_sum", dout, graph, options)


@keywords.known
def edge_mean_bwd(dout: jax.Array, graph: BipartiteCSC, **options: Unpack[EdgeKeywords]) -> jax.Array:
    """Computes the gradient of `edge_mean` with respect to `edge`, as `edge_sum_bwd` does that of the sum.

        dedge[e] = dout[i] / number of edges into i, for edge e into destination i

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC, edge_mean_bwd
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> edge_mean_bwd(jnp.array([5.0, 2.0]), graph).tolist()
      [1.0, 5.0, 1.0]
    """
    return _gradient("edge_mean", dout, graph, options)


@keywords.known
def edge_max_bwd(
    dout: jax.Array, graph: BipartiteCSC, edge: jax.Array, out: jax.Array, **options: Unpack[EdgeKeywords]
) -> jax.Array:
    """Computes the gradient of `edge_max` with respect to `edge`, by the `edge` and the `out` of the forward.

        dedge[e] = dout[i] / number of ties, for an edge e into i with edge[e] = out[i], else 0

    Errors are those of the forward call.

    Returns:
      dedge: shape and dtype of `edge`; 0 in the padding.

    Gradients:
      dout: a composition of differentiable operations, in either mode; 0 for edge and out.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC, edge_max, edge_max_bwd
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> edge = jnp.array([1.0, 5.0, 3.0])
      >>> edge_max_bwd(jnp.array([5.0, 2.0]), graph, edge, edge_max(graph, edge)).tolist()
      [0.0, 5.0, 2.0]
    """
    return _gradient("edge_max", dout, graph, options, edge, out)


@keywords.known
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
    name, graph = "edge_softmax", check_graph("edge_softmax", graph)
    return _run(name, graph, _by_edge(name, "scores", graph, scores), forward_mode, implementation)


@keywords.known
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
    name = "edge_softmax_bwd"
    implementation = checks.complete(name, edge_softmax, EdgeKeywords, options)["implementation"]
    if np.ndim(weights) == np.ndim(dweights) == 1:
        columns = (jnp.asarray(x)[:, None] for x in (dweights, weights))
        return edge_softmax_bwd(next(columns), graph, next(columns), **options)[:, 0]
    graph = check_graph(name, graph)
    weights = _by_edge(name, "weights", graph, weights)
    dweights = _by_edge(name, "dweights", graph, dweights)
    checks.shape(name, "dweights", dweights, "the shape of weights", weights.shape)
    checks.same_dtype(name, weights=weights, dweights=dweights)
    dweights = reshard_like(dweights, weights, range(weights.ndim))
    plan = _planned(name, "edge_softmax", implementation, Operands(graph, weights))
    return _named(plan).backward(plan, graph, dweights, weights)


def _reduced(name: str, graph: Any, edge: Any, forward_mode: Any, implementation: Any) -> jax.Array:
    graph = check_graph(name, graph)
    return _run(name, graph, _rows(name, "edge", edge, "nnz", graph.capacity), forward_mode, implementation)


def _run(name: str, graph: BipartiteCSC, edge: jax.Array, forward_mode: Any, implementation: Any) -> Any:
    operands = Operands(graph, edge)
    return _OPERATION.runner(name, forward_mode)(_planned(name, name, implementation, operands), operands)


def _planned(operator: str, name: str, implementation: Any, operands: "Operands") -> EdgePlan:
    """Returns the plan of the operation `name` for a call of `operator`, which errors name."""
    return backend.planned(operator, IMPLEMENTATIONS, implementation, name, operands, EdgePlan.of)


def _gradient(
    forward: str, dout: Any, graph: Any, options: EdgeKeywords, edge: Any = None, out: Any = None
) -> jax.Array:
    name = f"{forward}_bwd"
    implementation = checks.complete(name, edge_sum, EdgeKeywords, options)["implementation"]
    graph = check_graph(name, graph)
    dout = _rows(name, "dout", dout, "num_dst", graph.num_dst)
    given: tuple = ()
    if forward == "edge_max":
        edge = _rows(name, "edge", edge, "nnz", graph.capacity)
        axes = (None, *range(1, edge.ndim))
        for argument, x in (("out", out), ("dout", dout)):
            x = checks.floating(name, argument, x)
            checks.shape(name, argument, x, "[num_dst, ...] as edge", (graph.num_dst, *edge.shape[1:]))
        checks.same_dtype(name, edge=edge, out=jnp.asarray(out), dout=dout)
        given = (edge, reshard_like(jnp.asarray(out), edge, axes))
        dout = reshard_like(dout, edge, axes)
    plan = _planned(name, forward, implementation, Operands(graph, dout))
    return _named(plan).backward(plan, graph, dout, *given).astype(dout.dtype)


def _rows(operator: str, argument: str, x: Any, name: str, size: Any) -> jax.Array:
    """Checks the data of edges or destinations, `[size, ...]`."""
    x = checks.floating(operator, argument, x)
    if x.ndim < 1 or x.shape[0] != size:
        expected = f"have shape [{name}, ...] with {name} = {size}"
        remedy = "batch axes come behind it, or use jax.vmap" if size in x.shape else ""
        raise ValueError(checks.message(operator, argument, expected, x.shape, remedy))
    if (spec := explicit_spec(x))[0] is not None:
        placed, remedy = f"not be sharded along its first axis, {name}", "shard another, or reshard it"
        raise ValueError(checks.message(operator, argument, placed, spec, remedy))
    return x


def _by_edge(operator: str, argument: str, graph: BipartiteCSC, given: Array) -> jax.Array:
    x = checks.floating(operator, argument, given)
    if x.ndim < 2 or x.shape[-2] != graph.capacity:
        names = f"[..., nnz, H] with nnz = {graph.capacity}"
        raise ValueError(checks.message(operator, argument, f"have shape {names}", x.shape))
    if (spec := explicit_spec(x))[-2] is not None:
        placed, remedy = "not be sharded along its edges", "shard the heads"
        raise ValueError(checks.message(operator, argument, placed, spec, remedy))
    return x


_REDUCTION = (reductions.forward, reductions.backward, reductions.tangent)
_PASSES: dict[str, tuple[Any, Any, Any]] = {
    **dict.fromkeys(("edge_sum", "edge_mean", "edge_max"), _REDUCTION),
    "edge_softmax": (softmax.weights_of, softmax.through_weights, softmax.through_weights),
}


def _pass(which: int, plan: EdgePlan, graph: BipartiteCSC, *arrays: jax.Array) -> jax.Array:
    """Runs a pass of an operation; of a softmax, `[nnz, H]`, for each entry of the batch axes in front."""
    run = partial(run_on_every_device, _PASSES[plan.name][which], plan)
    for _ in range(arrays[0].ndim - 2 if plan.name == "edge_softmax" else 0):
        run = jax.vmap(run, in_axes=(None, *(0 for _ in arrays)))
    return run(graph, *arrays)


IMPLEMENTATIONS = (backend.Implementation("xla", partial(_pass, 0), partial(_pass, 1)),)


class Operands(NamedTuple):
    """The arrays of a call."""

    graph: BipartiteCSC
    edge: jax.Array  # the scores of a softmax


def _named(plan: EdgePlan) -> backend.Implementation:
    return backend.named(IMPLEMENTATIONS, plan.implementation)


def _primal(plan: EdgePlan, operands: Operands) -> jax.Array:
    return _named(plan).forward(plan, *operands)


def _forward(plan, operands, wanted):
    graph, edge = operands
    out = _named(plan).forward(plan, graph, edge)
    read = {"edge_max": (edge, out), "edge_softmax": (out,)}.get(plan.name, ())
    return out, (graph, read, edge[..., :0, :] if plan.name == "edge_softmax" else edge[:0])


def _backward(plan, saved, wanted, dout):
    graph, read, like_edge = saved
    dedge = _named(plan).backward(plan, graph, dout, *read)
    return Operands(None, match_type(dedge, like_edge))  # shards of the graph may share the edges' data


def _tangent(plan, saved, tangents):
    graph, read, _ = saved
    return _pass(2, plan, graph, tangents.edge, *read)


_OPERATION = Operation((), _primal, _forward, _backward, _tangent)
