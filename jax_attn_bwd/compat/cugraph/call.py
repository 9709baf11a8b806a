"""From a GAT call of cugraph-ops to the operators: options, results, and what the eight calls share."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.sharding import full_like_operands
from jax_attn_bwd.ops import graph as operators
from jax_attn_bwd.ops.graph import BipartiteCSC, groups, scores
from jax_attn_bwd.ops.graph.arguments import prepare_gat
from jax_attn_bwd.ops.graph.forward import has_edges
from jax_attn_bwd.ops.graph.groups import take

_ACTIVATIONS = {
    "ELU": "elu",
    "LeakyReLU": "leaky_relu",
    "Linear": "linear",
    "ReLU": "relu",
    "Scalar": "scalar",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
}


class mha_params(NamedTuple):
    """Options of the GAT calls.

    `activation` is one of ELU, LeakyReLU, Linear, ReLU, Scalar, Sigmoid, Tanh; `alpha` the slope of LeakyReLU
    below 0, or the factor of Scalar.
    """

    num_heads: int
    concat_heads: bool = True
    activation: str = "LeakyReLU"
    alpha: float = 0.2


class MhaGatGrads(NamedTuple):
    """What a backward without edge embeddings returns; None = refused."""

    grad_src_node_embedding: jax.Array | None
    grad_dst_node_embedding: jax.Array | None
    grad_attention_weights: jax.Array | None


class MhaGatEfeatGrads(NamedTuple):
    """What a backward with edge embeddings returns; None = refused."""

    grad_src_node_embedding: jax.Array | None
    grad_dst_node_embedding: jax.Array | None
    grad_edge_embedding: jax.Array | None
    grad_attention_weights: jax.Array | None


_GRADS = (
    "grad_src_node_embedding", "grad_dst_node_embedding", "grad_edge_embedding", "grad_attention_weights",
)  # fmt: skip


def make_bipartite_csc(
    offsets: Any, indices: Any, n_src_nodes: int, map_csc_to_coo: Any = None
) -> BipartiteCSC:
    """`BipartiteCSC.from_csc` under the source's name; outside `jit`."""
    return BipartiteCSC.from_csc(offsets, indices, n_src_nodes, map_csc_to_coo=map_csc_to_coo)


def _options(call: str, params: Any) -> dict[str, Any]:
    if not isinstance(params, mha_params):
        raise TypeError(checks.message(call, "params", "be mha_params", type(params).__name__))
    name = checks.choice(call, "params.activation", params.activation, tuple(_ACTIVATIONS))
    return dict(
        num_heads=params.num_heads, concat_heads=params.concat_heads, alpha=params.alpha,
        activation=_ACTIVATIONS[name],
    )  # fmt: skip


def is_asked(call: str, argument: str, flag: Any) -> bool:
    """Whether a gradient is: None or False refuses it; the source passes the array to write it into."""
    if flag is None or isinstance(flag, bool | np.bool_):
        return bool(flag)
    if not checks.is_array(flag):
        expected = "be None or False to refuse the gradient, or True"
        raise TypeError(checks.message(call, argument, expected, type(flag).__name__))
    return True


def _prepare(name, embeddings, attention_weights, graph, params):
    """The operator's checked (options, operands)."""
    src, dst, edge = embeddings
    call = f"cugraph.{name}"
    if "_efeat_" in name:
        edge = checks.floating(call, "edge_embedding", edge)
    return prepare_gat(
        call, "gatv2" if "_v2_" in name else "gat", graph, src, dst, attention_weights,
        edge=edge, **_options(call, params), dropout_rate=0.0, dropout_key=None, dropout_mask=None,
        dropout_offset=None, return_attention_weights=False,
    )  # fmt: skip


def forward(name, embeddings, attention_weights, graph, params, return_softmax_scores) -> Any:
    """The output of a forward call, or (output, softmax_scores)."""
    checked = _prepare(name, embeddings, attention_weights, graph, params)
    src, dst, edge = embeddings
    operator = operators.graph_attention_v2 if "_v2_" in name else operators.graph_attention
    out = operator(graph, src, dst, attention_weights, edge=edge, **_options(name, params))
    if not checks.flag(f"cugraph.{name}", "return_softmax_scores", return_softmax_scores):
        return out
    before = _scores(*checked)
    planes = jnp.stack([before, operators.edge_softmax(graph, before)])
    return out, planes.transpose(0, 2, 1)


def _scores(options: Any, operands: Any) -> jax.Array:
    """`[nnz, num_heads]`, the scores before the softmax; 0 in the padding."""
    graph, dtype = operands.graph, accumulator_dtype(operands.src.dtype)
    tables = scores.tables(options, operands)

    def body(plane, chunk):
        edge = None if tables.edge is None else take(tables.edge, chunk.edge).astype(dtype)
        ends = (take(tables.src, chunk.other), take(tables.dst, chunk.node))
        rows = scores.Rows(*(x.astype(dtype) for x in ends), edge)
        return groups.put(plane, chunk.edge, scores.score(options, rows, tables))

    shape = (graph.capacity, options.num_heads)
    plane = full_like_operands(operands.src, shape, 0, dtype, operands)
    if not has_edges(graph):
        return plane
    return groups.scan(body, plane, graph.by_destination, graph.capacity, operands.src.shape[1])


def backward(
    name, grad_output_embedding, embeddings, attention_weights, softmax_scores, graph, params, wanted
) -> tuple:  # fmt: skip
    """Gradients of (src, dst, edge, attention_weights), None where not `wanted`."""
    options, operands = _prepare(name, embeddings, attention_weights, graph, params)
    call, heads, (n_dst_nodes, dim) = f"cugraph.{name}", options.num_heads, operands.dst.shape
    g = checks.floating(call, "grad_output_embedding", grad_output_embedding)
    dim_out = dim if options.concat_heads else dim // heads
    checks.shape(call, "grad_output_embedding", g, "(n_dst_nodes, dim_out)", (n_dst_nodes, dim_out))
    if softmax_scores is not None:
        planes = checks.floating(call, "softmax_scores", softmax_scores)
        shape = (2, heads, graph.capacity)
        checks.shape(call, "softmax_scores", planes, "(2, num_heads, nnz)", shape)
    src, dst, edge = embeddings
    fields = ("src", "dst", "edge", "attention_weights")
    present = (True, dst is not None, True, True)
    flags = [is_asked(call, argument, flag) for argument, flag in zip(_GRADS, wanted, strict=True)]
    asked = zip(fields, flags, present, strict=True)
    operator = operators.graph_attention_v2_bwd if "_v2_" in name else operators.graph_attention_bwd
    grads = operator(
        g, graph, src, dst, attention_weights, edge=edge, **_options(call, params),
        wrt=[field for field, flag, there in asked if flag and there],
    )  # fmt: skip
    return tuple(getattr(grads, field) for field in fields)
