"""`edge_sum`, `edge_mean`, `edge_max`: sums, means and maxima over the edges into each destination.

The public functions and their rules; `forward.py` and `loops.py` have the sums inside graph attention.
"""

from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import backend, checks, secondary_calls
from jax_attn_bwd._core.operation import Operation
from jax_attn_bwd._core.sharding import explicit_spec, match_type, reshard_like
from jax_attn_bwd._core.types import Array, Implementation
from jax_attn_bwd.ops.graph import reductions
from jax_attn_bwd.ops.graph.arguments import check_graph
from jax_attn_bwd.ops.graph.placement import run_on_every_device
from jax_attn_bwd.ops.graph.spec import EdgeKeywords
from jax_attn_bwd.ops.graph.structure import BipartiteCSC


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
    return _reduced("edge_sum", **locals())


def edge_mean(
    graph: BipartiteCSC,
    edge: jax.Array,
    *,
    forward_mode: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array:
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
    return _reduced("edge_mean", **locals())


def edge_max(
    graph: BipartiteCSC,
    edge: jax.Array,
    *,
    forward_mode: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array:
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
    return _reduced("edge_max", **locals())


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
    return _gradient("edge_sum", **locals())


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
    return _gradient("edge_mean", **locals())


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
    return _gradient("edge_max", **locals())


def edge_sum_jvp(
    graph: BipartiteCSC, edge: Array, *, dedge: Array | None = None, **options: Unpack[EdgeKeywords]
) -> tuple[jax.Array, jax.Array]:
    """Returns `edge_sum` and its tangent, the sum of the tangents.

    Differentiable in both modes, and raises, as the forward call with `forward_mode=True`.

    Args:
      dedge: tangent of `edge`, its shape and dtype; None = 0.

    Returns:
      (out, dout): as the forward returns out; 0 for a destination without edges.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC, edge_sum_jvp
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> edge_sum_jvp(graph, jnp.ones(3), dedge=jnp.array([1.0, 2.0, 3.0]))[1].tolist()
      [2.0, 4.0]
    """
    return secondary_calls.with_tangent(edge_sum, EdgeKeywords, **locals())


def edge_mean_jvp(
    graph: BipartiteCSC, edge: Array, *, dedge: Array | None = None, **options: Unpack[EdgeKeywords]
) -> tuple[jax.Array, jax.Array]:
    """Returns `edge_mean` and its tangent, the mean of the tangents, as `edge_sum_jvp` does those of the sum.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC, edge_mean_jvp
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> edge_mean_jvp(graph, jnp.ones(3), dedge=jnp.array([1.0, 2.0, 3.0]))[1].tolist()
      [2.0, 2.0]
    """
    return secondary_calls.with_tangent(edge_mean, EdgeKeywords, **locals())


def edge_max_jvp(
    graph: BipartiteCSC, edge: Array, *, dedge: Array | None = None, **options: Unpack[EdgeKeywords]
) -> tuple[jax.Array, jax.Array]:
    """Returns `edge_max` and its tangent, the mean over the edges that hold it, as `edge_sum_jvp` does.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC, edge_max_jvp
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> edge_max_jvp(graph, jnp.array([1.0, 5.0, 3.0]), dedge=jnp.array([1.0, 2.0, 3.0]))[1].tolist()
      [2.0, 3.0]
    """
    return secondary_calls.with_tangent(edge_max, EdgeKeywords, **locals())


def _reduced(name: str, graph: Any, edge: Any, forward_mode: Any, implementation: Any) -> jax.Array:
    graph = check_graph(name, graph)
    edge = _rows(name, "edge", edge, "nnz", graph.capacity)
    chosen = backend.select(name, IMPLEMENTATIONS[name], implementation, None, (graph, edge))
    return _OPERATION.runner(name, forward_mode)((name, chosen.name), Operands(graph, edge))


def _gradient(
    forward: str, dout: Any, graph: Any, options: EdgeKeywords, edge: Any = None, out: Any = None
) -> jax.Array:
    name, chosen = f"{forward}_bwd", IMPLEMENTATIONS[forward]
    implementation = secondary_calls.complete(name, edge_sum, EdgeKeywords, options)["implementation"]
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
    run = backend.select(name, chosen, implementation, None, (graph, dout))
    return run.backward(graph, dout, *given).astype(dout.dtype)


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


def _portable(name: str) -> backend.Implementation:
    forward, backward = (jax.jit(partial(one, name)) for one in (reductions.forward, reductions.backward))
    return backend.Implementation(
        "xla", partial(run_on_every_device, forward), partial(run_on_every_device, backward)
    )


IMPLEMENTATIONS = {name: (_portable(name),) for name in ("edge_sum", "edge_mean", "edge_max")}
_TANGENTS = {name: jax.jit(partial(reductions.tangent, name)) for name in IMPLEMENTATIONS}


class Operands(NamedTuple):
    """The arrays of a call."""

    graph: BipartiteCSC
    edge: jax.Array


def _primal(static: tuple[str, str], operands: Operands) -> jax.Array:
    name, implementation = static
    return backend.named(IMPLEMENTATIONS[name], implementation).forward(*operands)


def _forward(static, operands, wanted):
    name, implementation = static
    graph, edge = operands
    out = backend.named(IMPLEMENTATIONS[name], implementation).forward(graph, edge)
    return out, (graph, (edge, out) if name == "edge_max" else (), edge[:0])


def _backward(static, saved, wanted, dout):
    name, implementation = static
    graph, read, like_edge = saved
    dedge = backend.named(IMPLEMENTATIONS[name], implementation).backward(graph, dout, *read)
    return Operands(None, match_type(dedge, like_edge))  # shards of the graph may share the edges' data


def _tangent(static, saved, tangents):
    graph, read, _ = saved
    return run_on_every_device(_TANGENTS[static[0]], graph, tangents.edge, *read)


_OPERATION = Operation((), _primal, _forward, _backward, _tangent)
