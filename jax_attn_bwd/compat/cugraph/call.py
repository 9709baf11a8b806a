"""From a call of cugraph-ops to the operators: arguments, options, scores and gradients of all its calls."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.sharding import full_like_operands
from jax_attn_bwd._core.types import F
from jax_attn_bwd.compat.calls import check_slot, is_asked
from jax_attn_bwd.ops import graph as operators
from jax_attn_bwd.ops.graph import BipartiteCSC, kinds, loops
from jax_attn_bwd.ops.graph.arguments import prepare_additive
from jax_attn_bwd.ops.graph.forward import scores
from jax_attn_bwd.ops.graph.kinds import GAT, GATv2
from jax_attn_bwd.ops.graph.plan import Loops
from jax_attn_bwd.ops.graph.spec import Operands, Options

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
    """Holds what a backward without edge embeddings returns; None = refused."""

    grad_src_node_embedding: jax.Array | None
    grad_dst_node_embedding: jax.Array | None
    grad_attention_weights: jax.Array | None


class MhaGatEfeatGrads(NamedTuple):
    """Holds what a backward with edge embeddings returns; None = refused."""

    grad_src_node_embedding: jax.Array | None
    grad_dst_node_embedding: jax.Array | None
    grad_edge_embedding: jax.Array | None
    grad_attention_weights: jax.Array | None


# The operator's names of the source's arrays, and what runs the calls of GAT and of GATv2.
_FIELDS = {
    "src_node_embedding": "src",
    "dst_node_embedding": "dst",
    "attention_weights": "attention_weights",
    "edge_embedding": "edge",
}
_GAT: tuple[Any, ...] = (GAT, operators.graph_attention, operators.graph_attention_bwd)
_GATv2: tuple[Any, ...] = (GATv2, operators.graph_attention_v2, operators.graph_attention_v2_bwd)


def make_bipartite_csc(
    offsets: Any, indices: Any, n_src_nodes: int, map_csc_to_coo: Any = None
) -> BipartiteCSC:
    """`BipartiteCSC.from_csc` under the source's name; outside `jit`.

    Args:
      offsets, indices, map_csc_to_coo: as in `BipartiteCSC.from_csc`.
      n_src_nodes: `num_src` of `BipartiteCSC.from_csc`.

    Example:
      >>> from jax_attn_bwd.compat import cugraph
      >>> cugraph.make_bipartite_csc([0, 1, 3], [2, 0, 1], 3).num_edges
      3
    """
    return BipartiteCSC.from_csc(offsets, indices, n_src_nodes, map_csc_to_coo=map_csc_to_coo)


_INSTEAD = {
    "output_embedding": "the output is returned",
    "softmax_scores": "they are returned with return_softmax_scores=True",
    "activation_scores": "the backward does without them",
    "grad_softmax_scores": "it was workspace",
    "grad_attention_weights_workspace": "it made a gradient deterministic that always is here",
    "stream_id": "XLA orders its own work",
}


def source_call(function: F) -> F:
    """Makes a call of the source raise a TypeError, with the remedy, for arguments that are left out here."""
    left_out = _INSTEAD.keys() - inspect.signature(function).parameters.keys()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs.keys() & left_out:
            operator = f"cugraph.{function.__name__}"
            raise TypeError(checks.message(operator, name, "be left out", "one", _INSTEAD[name]))
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def _options(call: str, params: Any) -> dict[str, Any]:
    """Returns the operator's options from `mha_params`."""
    params = checks.instance(call, "params", params, mha_params, expected="be mha_params")
    name = checks.choice(call, "params.activation", params.activation, tuple(_ACTIVATIONS))
    return dict(
        num_heads=params.num_heads,
        concat_heads=params.concat_heads,
        alpha=params.alpha,
        activation=_ACTIVATIONS[name],
    )


def gradients(
    call: str,
    operator: Callable[..., Any],
    dout: jax.Array,
    graph: BipartiteCSC,
    given: dict[str, Any],
    slots: dict[str, tuple[str, Any]],
    options: dict[str, Any],
) -> list[jax.Array | None]:
    """Computes the gradients that a backward returns, in the order of `slots`.

    `slots` has by the operator's names the source's name and what asks for the gradient. An array that asks
    may be wider than its argument: then all is computed from arrays as wide as it.
    """
    # Which gradients are asked for, and in which dtypes.
    dtypes = {}
    for field, (name, slot) in slots.items():
        if not is_asked(call, name, slot):
            continue
        if given[field] is None:
            if checks.is_array(slot):
                expected = f"be None or a bool where {name.removeprefix('grad_')} is None"
                raise ValueError(checks.message(call, name, expected, "an array"))
            continue
        own = given[field].dtype
        check_slot(call, name, slot, given[field], (own, accumulator_dtype(own)))
        dtypes[field] = slot.dtype if checks.is_array(slot) else own
    if any(dtype != given[field].dtype for field, dtype in dtypes.items()):
        wide = accumulator_dtype(dout.dtype)
        dout = dout.astype(wide)
        given = {field: None if x is None else jnp.asarray(x, wide) for field, x in given.items()}
    # Nothing else is computed.
    grads = operator(dout, graph, **given, **options, wrt=list(dtypes))
    return [getattr(grads, field).astype(dtypes[field]) if field in dtypes else None for field in slots]


def run(name: str, arguments: Mapping[str, Any]) -> Any:
    """Runs one of the eight GAT calls of the source for its own arguments; its name tells the operator."""
    call, graph = f"cugraph.{name}", arguments["graph"]
    kind, forward, backward = _GATv2 if "_v2_" in name else _GAT
    # The arrays by the operator's names, checked with the options.
    arrays: dict[str, Any] = {source: arguments.get(source) for source in _FIELDS}
    if "_efeat_" in name:
        checks.floating(call, "edge_embedding", arrays["edge_embedding"])
    for source, x in arrays.items():
        if source != "attention_weights" and checks.is_array(x) and x.ndim > 2:
            # the operator would take batch axes, the source does not
            raise ValueError(checks.message(call, source, "have two axes", x.shape, "use jax.vmap"))
    given = {_FIELDS[source]: x for source, x in arrays.items()}
    settings = _options(call, arguments["params"])
    options, operands = prepare_additive(
        call, kind, graph, **given, **settings, dropout_rate=0.0, dropout_key=None, dropout_mask=None,
        dropout_offset=None, return_attention_weights=False,
    )  # fmt: skip
    # A forward returns the output, or (output, softmax_scores).
    if name.endswith("_fwd"):
        out = forward(graph, **given, **settings)
        if not checks.flag(call, "return_softmax_scores", arguments["return_softmax_scores"]):
            return out
        before = _scores(options, operands)
        planes = jnp.stack([before, operators.edge_softmax(graph, before)])
        return out, planes.transpose(0, 2, 1)
    # A backward checks the cotangent, and the source's scores, which it does not read.
    n_dst_nodes, dim = operands.dst.shape
    dout = checks.floating(call, "grad_output_embedding", arguments["grad_output_embedding"])
    expected = (n_dst_nodes, dim if options.concat_heads else dim // options.num_heads)
    checks.shape(call, "grad_output_embedding", dout, "(n_dst_nodes, dim_out)", expected)
    if arguments["softmax_scores"] is not None:
        planes = checks.floating(call, "softmax_scores", arguments["softmax_scores"])
        shape = (2, options.num_heads, graph.capacity)
        checks.shape(call, "softmax_scores", planes, "(2, num_heads, nnz)", shape)
    grads_type: Any = MhaGatEfeatGrads if "_efeat_" in name else MhaGatGrads
    slots = {_FIELDS[n.removeprefix("grad_")]: (n, arguments[n]) for n in grads_type._fields}
    return grads_type(*gradients(call, backward, dout, graph, given, slots, settings))


def _scores(options: Options, operands: Operands) -> jax.Array:
    """Computes the scores before the softmax, `[nnz, num_heads]`; 0 in the padding."""
    graph, dtype = operands.graph, accumulator_dtype(operands.src.dtype)
    kind = kinds.of(options)
    cut = Loops.of(options, operands)
    t = cut.with_end_rows(kind.tables(operands).unsharded()[0])
    shape = (graph.capacity, options.num_heads)
    plane = full_like_operands(operands.src, shape, 0, dtype, operands)
    if not loops.has_edges(graph):
        return plane
    walk, of_chunk = (graph.by_destination, graph.capacity), functools.partial(scores, kind, t)
    edges = loops.one_chunk(*walk, cut.in_order)
    found = of_chunk(edges) if cut.scores.count == 1 else loops.each(of_chunk, *walk, cut.scores)
    return loops.put(plane, edges.number, found)
