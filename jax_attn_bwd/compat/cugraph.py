"""Graph attention of RAPIDS cugraph-ops (`pylibcugraphops.operators`), forward and backward, in JAX terms.

`mha_gat_n2n`, `mha_gat_n2n_efeat`, `mha_gat_v2_n2n`, `mha_gat_v2_n2n_efeat`, `mha_simple_n2n`

Kept from the source: names of the arguments, and the order of those it reads (those it writes, which come
first there, are returned; in a backward they are keywords that ask for gradients); heads side by side in the
columns of embeddings; `attention_weights` as `[source | destination | edge]`, each head by head; the names of
activations; `softmax_scores` `(2, num_heads, nnz)`, plane 0 before the softmax and plane 1 after it, float32
or wider; every gradient may be refused, is then not computed, and comes back as None; a destination without
edges gives 0. Edge embeddings and scores are in the caller's edge order, that of `map_csc_to_coo`.

Changed: `graph` is a `BipartiteCSC` (`make_bipartite_csc` builds one). What the source writes into arrays
that it is given is returned; such an array asks for a gradient, in its dtype, as True does, and None or False
refuses it. A gradient has the dtype of its argument, or float32 where an array of that asks, as the source
pairs type suffixes. `dst_node_embedding=None` means the first rows of the sources, whose gradient then holds
both shares.

Left out, for there is no use for it in JAX; delete them from a call that has them (one that names them is
refused in these words):
  * the arrays that a forward writes: `output_embedding`, `softmax_scores`;
  * `grad_softmax_scores`: workspace;
  * `grad_attention_weights_workspace`: it made that gradient deterministic; here it always is;
  * `stream_id`: XLA orders its own work;
  * `activation_scores` of the v2 calls: nnz x dim_node numbers for a backward that here does without.
The `softmax_scores` of a backward is not needed either: what is given is checked, not read; None will do.

Gradients of the forwards are those of the operators beneath: of every array, to any order.

References:
  RAPIDS cugraph-ops (until 25.02), pylibcugraphops.operators; cuDNN, cudnn.gnn.mha_gat, its successor.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.sharding import full_like_operands
from jax_attn_bwd._core.types import F
from jax_attn_bwd.compat.calls import check_slot, is_asked
from jax_attn_bwd.ops import graph as operators
from jax_attn_bwd.ops.graph import BipartiteCSC, kinds, loops
from jax_attn_bwd.ops.graph.arguments import check_cotangents, prepare_additive, prepare_transformer
from jax_attn_bwd.ops.graph.forward import scores
from jax_attn_bwd.ops.graph.kinds import GAT, GATv2
from jax_attn_bwd.ops.graph.plan import Loops
from jax_attn_bwd.ops.graph.spec import Operands, Options

__all__ = [
    "MhaGatEfeatGrads",
    "MhaGatGrads",
    "MhaSimpleGrads",
    "make_bipartite_csc",
    "mha_gat_n2n_bwd",
    "mha_gat_n2n_efeat_bwd",
    "mha_gat_n2n_efeat_fwd",
    "mha_gat_n2n_fwd",
    "mha_gat_v2_n2n_bwd",
    "mha_gat_v2_n2n_efeat_bwd",
    "mha_gat_v2_n2n_efeat_fwd",
    "mha_gat_v2_n2n_fwd",
    "mha_params",
    "mha_simple_n2n",
    "mha_simple_n2n_bwd",
]

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


# The operator's names of the source's arrays in the GAT calls, and what runs these.
_ADDITIVE = {
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


def _source_call(function: F) -> F:
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
    return {**params._asdict(), "activation": _ACTIVATIONS[name]}


def _gradients(
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


def _run(name: str, arguments: Mapping[str, Any]) -> Any:
    """Runs one of the eight GAT calls of the source for its own arguments; its name tells the operator."""
    call, graph = f"cugraph.{name}", arguments["graph"]
    kind, forward, backward = _GATv2 if "_v2_" in name else _GAT
    # The arrays by the operator's names, checked with the options.
    arrays: dict[str, Any] = {source: arguments.get(source) for source in _ADDITIVE}
    if "_efeat_" in name:
        checks.floating(call, "edge_embedding", arrays["edge_embedding"])
    for source, x in arrays.items():
        if source != "attention_weights" and checks.is_array(x) and x.ndim > 2:
            # the operator would take batch axes, the source does not
            raise ValueError(checks.message(call, source, "have two axes", x.shape, "use jax.vmap"))
    given = {_ADDITIVE[source]: x for source, x in arrays.items()}
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
    slots = {_ADDITIVE[n.removeprefix("grad_")]: (n, arguments[n]) for n in grads_type._fields}
    return grads_type(*_gradients(call, backward, dout, graph, given, slots, settings))


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


# fmt: off
@overload
def mha_gat_n2n_fwd(
    src_node_embedding: jax.Array, dst_node_embedding: jax.Array | None, attention_weights: jax.Array,
    graph: BipartiteCSC, params: mha_params, *, return_softmax_scores: Literal[False] = False
) -> jax.Array: ...
@overload
def mha_gat_n2n_fwd(
    src_node_embedding: jax.Array, dst_node_embedding: jax.Array | None, attention_weights: jax.Array,
    graph: BipartiteCSC, params: mha_params, *, return_softmax_scores: Literal[True]
) -> tuple[jax.Array, jax.Array]: ...
@overload
def mha_gat_n2n_fwd(
    src_node_embedding: jax.Array, dst_node_embedding: jax.Array | None, attention_weights: jax.Array,
    graph: BipartiteCSC, params: mha_params, *, return_softmax_scores: bool
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
# fmt: on
@_source_call
def mha_gat_n2n_fwd(
    src_node_embedding: jax.Array,
    dst_node_embedding: jax.Array | None,
    attention_weights: jax.Array,
    graph: BipartiteCSC,
    params: mha_params,
    *,
    return_softmax_scores: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Graph attention from node to node, `s = act(<h_src, a_src> + <h_dst, a_dst>)`.

    Args:
      src_node_embedding: `(n_src_nodes, dim_node)`, floating, already projected.
      dst_node_embedding: `(n_dst_nodes, dim_node)`, or None for the first rows of the sources.
      attention_weights: `(2 * dim_node,)`.
      graph: the edges.
      params: heads and activation.
      return_softmax_scores: also return the scores.

    Returns:
      output_embedding: `(n_dst_nodes, dim_node)`, or `(n_dst_nodes, dim_node / num_heads)` without
        `concat_heads`.
      softmax_scores: `(2, num_heads, nnz)`, with `return_softmax_scores`.

    Gradients:
      Every array, through both results, to any order.

    Raises:
      ValueError: shapes disagree, or an option is out of range. TypeError: an argument is of the wrong kind.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import cugraph
      >>> graph = cugraph.make_bipartite_csc([0, 1, 3], [2, 0, 1], 3)
      >>> src, dst, a = jnp.ones((3, 8)), jnp.ones((2, 8)), jnp.ones(16)
      >>> params = cugraph.mha_params(num_heads=2, activation="ReLU")
      >>> out, scores = cugraph.mha_gat_n2n_fwd(src, dst, a, graph, params, return_softmax_scores=True)
      >>> out.shape, scores[:, 0].tolist()
      ((2, 8), [[8.0, 8.0, 8.0], [1.0, 0.5, 0.5]])
    """
    return _run("mha_gat_n2n_fwd", locals())


@_source_call
def mha_gat_n2n_bwd(
    grad_output_embedding: jax.Array,
    src_node_embedding: jax.Array,
    dst_node_embedding: jax.Array | None,
    attention_weights: jax.Array,
    softmax_scores: jax.Array | None,
    graph: BipartiteCSC,
    params: mha_params,
    *,
    grad_src_node_embedding: bool | jax.Array | None = True,
    grad_dst_node_embedding: bool | jax.Array | None = True,
    grad_attention_weights: bool | jax.Array | None = True,
) -> MhaGatGrads:
    """The gradients of `mha_gat_n2n_fwd`.

    Args:
      grad_output_embedding: cotangent of `output_embedding`, its shape and dtype.
      softmax_scores: `(2, num_heads, nnz)`, what the forward returned, or None.
      src_node_embedding, dst_node_embedding, attention_weights, graph, params: as in the forward.
      grad_src_node_embedding, grad_dst_node_embedding, grad_attention_weights: None or False refuses the
        gradient; True asks for it, and so does an array of its shape, into which the source would write:
        of its argument's dtype, or float32 beside a narrower one, which is then the gradient's dtype.

    Returns:
      MhaGatGrads(grad_src_node_embedding, grad_dst_node_embedding, grad_attention_weights), each with the
      shape and, but for such arrays, the dtype of its argument; or None.

    Gradients:
      A composition of differentiable operations: it may itself be differentiated.

    Raises:
      ValueError, TypeError: under the conditions of the forward.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import cugraph
      >>> graph = cugraph.make_bipartite_csc([0, 1, 3], [2, 0, 1], 3)
      >>> src, dst, a, g = jnp.ones((3, 8)), jnp.ones((2, 8)), jnp.ones(16), jnp.ones((2, 8))
      >>> grads = cugraph.mha_gat_n2n_bwd(
      ...     g, src, dst, a, None, graph, cugraph.mha_params(2), grad_dst_node_embedding=None)
      >>> grads.grad_src_node_embedding[:, 0].tolist(), grads.grad_dst_node_embedding is None
      ([0.5, 0.5, 1.0], True)
    """
    return _run("mha_gat_n2n_bwd", locals())


# fmt: off
@overload
def mha_gat_n2n_efeat_fwd(
    src_node_embedding: jax.Array, dst_node_embedding: jax.Array | None, edge_embedding: jax.Array,
    attention_weights: jax.Array, graph: BipartiteCSC, params: mha_params, *,
    return_softmax_scores: Literal[False] = False) -> jax.Array: ...
@overload
def mha_gat_n2n_efeat_fwd(
    src_node_embedding: jax.Array, dst_node_embedding: jax.Array | None, edge_embedding: jax.Array,
    attention_weights: jax.Array, graph: BipartiteCSC, params: mha_params, *,
    return_softmax_scores: Literal[True]) -> tuple[jax.Array, jax.Array]: ...
@overload
def mha_gat_n2n_efeat_fwd(
    src_node_embedding: jax.Array, dst_node_embedding: jax.Array | None, edge_embedding: jax.Array,
    attention_weights: jax.Array, graph: BipartiteCSC, params: mha_params, *, return_softmax_scores: bool
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
# fmt: on
@_source_call
def mha_gat_n2n_efeat_fwd(
    src_node_embedding: jax.Array, dst_node_embedding: jax.Array | None, edge_embedding: jax.Array,
    attention_weights: jax.Array, graph: BipartiteCSC, params: mha_params, *,
    return_softmax_scores: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:  # fmt: skip
    """`mha_gat_n2n_fwd` with edge embeddings, `s = act(<h_src, a_src> + <h_dst, a_dst> + <e, a_edge>)`.

    Args:
      edge_embedding: `(nnz, dim_edge)`, floating, in the caller's edge order; the heads divide its width.
      attention_weights: `(2 * dim_node + dim_edge,)`.
      src_node_embedding, dst_node_embedding, graph, params, return_softmax_scores: as in `mha_gat_n2n_fwd`.

    Returns:
      The output, and with `return_softmax_scores` the scores, as `mha_gat_n2n_fwd` does.

    Gradients:
      Every array, through both results, to any order.

    Raises:
      ValueError, TypeError: under the conditions of `mha_gat_n2n_fwd`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import cugraph
      >>> graph = cugraph.make_bipartite_csc([0, 1, 3], [2, 0, 1], 3)
      >>> src, dst, edge, a = jnp.ones((3, 8)), jnp.ones((2, 8)), jnp.ones((3, 4)), jnp.ones(20)
      >>> cugraph.mha_gat_n2n_efeat_fwd(src, dst, edge, a, graph, cugraph.mha_params(2)).shape
      (2, 8)
    """
    return _run("mha_gat_n2n_efeat_fwd", locals())


@_source_call
def mha_gat_n2n_efeat_bwd(
    grad_output_embedding: jax.Array, src_node_embedding: jax.Array, dst_node_embedding: jax.Array | None,
    edge_embedding: jax.Array, attention_weights: jax.Array, softmax_scores: jax.Array | None,
    graph: BipartiteCSC, params: mha_params, *, grad_src_node_embedding: bool | jax.Array | None = True,
    grad_dst_node_embedding: bool | jax.Array | None = True,
    grad_edge_embedding: bool | jax.Array | None = True,
    grad_attention_weights: bool | jax.Array | None = True,
) -> MhaGatEfeatGrads:  # fmt: skip
    """The gradients of `mha_gat_n2n_efeat_fwd`.

    Args:
      grad_edge_embedding: asks for that gradient, or refuses it, like the others.
      grad_output_embedding, softmax_scores, the embeddings, attention_weights, graph, params and what asks
        for their gradients: as in `mha_gat_n2n_bwd` and the forward.

    Returns:
      MhaGatEfeatGrads, whose gradients have the shapes and dtypes that `mha_gat_n2n_bwd` gives them; or None.
      They may be differentiated in turn; errors are those of the forward.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import cugraph
      >>> graph = cugraph.make_bipartite_csc([0, 1, 3], [2, 0, 1], 3)
      >>> src, dst, edge, a = jnp.ones((3, 8)), jnp.ones((2, 8)), jnp.ones((3, 4)), jnp.ones(20)
      >>> grads = cugraph.mha_gat_n2n_efeat_bwd(
      ...     dst, src, dst, edge, a, None, graph, cugraph.mha_params(2), grad_src_node_embedding=False)
      >>> grads.grad_edge_embedding.shape, grads.grad_src_node_embedding is None
      ((3, 4), True)
    """
    return _run("mha_gat_n2n_efeat_bwd", locals())


def _with_the_arguments_of(model: F) -> Callable[[Callable[..., Any]], F]:
    """Makes a function the call of its name, with the signature and types of `model`, a call of GAT."""
    signature = inspect.signature(model)

    def decorate(function: Callable[..., Any]) -> Any:
        name = function.__name__

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{name}() {error}") from None
            given.apply_defaults()
            return _run(name, given.arguments)

        call.__annotations__, call.__wrapped__ = model.__annotations__, model
        return _source_call(call)

    return decorate


@_with_the_arguments_of(mha_gat_n2n_fwd)
def mha_gat_v2_n2n_fwd() -> Any:
    """Graph attention from node to node, `s = <a, act(h_src + h_dst)>`.

    Arguments, results, gradients and errors are those of `mha_gat_n2n_fwd`, but for `attention_weights`:
    `(dim_node,)`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import cugraph
      >>> graph = cugraph.make_bipartite_csc([0, 1, 3], [2, 0, 1], 3)
      >>> src, dst = jnp.ones((3, 8)), jnp.ones((2, 8))
      >>> cugraph.mha_gat_v2_n2n_fwd(src, dst, jnp.ones(8), graph, cugraph.mha_params(2)).shape
      (2, 8)
    """


@_with_the_arguments_of(mha_gat_n2n_bwd)
def mha_gat_v2_n2n_bwd() -> Any:
    """The gradients of `mha_gat_v2_n2n_fwd`.

    Arguments, results, gradients and errors are those of `mha_gat_n2n_bwd`, but for `attention_weights`:
    `(dim_node,)`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import cugraph
      >>> graph = cugraph.make_bipartite_csc([0, 1, 3], [2, 0, 1], 3)
      >>> src, dst = jnp.ones((3, 8)), jnp.ones((2, 8))
      >>> grads = cugraph.mha_gat_v2_n2n_bwd(dst, src, dst, jnp.ones(8), None, graph, cugraph.mha_params(2))
      >>> grads.grad_src_node_embedding[:, 0].tolist()
      [0.5, 0.5, 1.0]
    """


@_with_the_arguments_of(mha_gat_n2n_efeat_fwd)
def mha_gat_v2_n2n_efeat_fwd() -> Any:
    """`mha_gat_v2_n2n_fwd` with edge embeddings, `s = <a, act(h_src + h_dst + e)>`.

    Arguments, results, gradients and errors are those of `mha_gat_n2n_efeat_fwd`, but for `edge_embedding`:
    `(nnz, dim_node)`, and `attention_weights`: `(dim_node,)`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import cugraph
      >>> graph = cugraph.make_bipartite_csc([0, 1, 3], [2, 0, 1], 3)
      >>> src, dst, a = jnp.ones((3, 8)), jnp.ones((2, 8)), jnp.ones(8)
      >>> cugraph.mha_gat_v2_n2n_efeat_fwd(src, dst, src, a, graph, cugraph.mha_params(2)).shape
      (2, 8)
    """


@_with_the_arguments_of(mha_gat_n2n_efeat_bwd)
def mha_gat_v2_n2n_efeat_bwd() -> Any:
    """The gradients of `mha_gat_v2_n2n_efeat_fwd`.

    Arguments, results, gradients and errors are those of `mha_gat_n2n_efeat_bwd`, but for `edge_embedding`:
    `(nnz, dim_node)`, and `attention_weights`: `(dim_node,)`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import cugraph
      >>> graph = cugraph.make_bipartite_csc([0, 1, 3], [2, 0, 1], 3)
      >>> src, dst, a = jnp.ones((3, 8)), jnp.ones((2, 8)), jnp.ones(8)
      >>> grads = cugraph.mha_gat_v2_n2n_efeat_bwd(dst, src, dst, src, a, None, graph, cugraph.mha_params(2))
      >>> grads.grad_edge_embedding.shape
      (3, 8)
    """


# The source's names of the operator's arrays, in the order of the gradients.
_SIMPLE = {
    "key": "key_emb",
    "query": "query_emb",
    "value": "value_emb",
    "edge": "edge_emb",
    "score_bias": "score_bias",
}


class MhaSimpleGrads(NamedTuple):
    """Holds what `mha_simple_n2n_bwd` returns; None = refused, or no such argument."""

    grad_key_emb: jax.Array | None
    grad_query_emb: jax.Array | None
    grad_value_emb: jax.Array | None
    grad_edge_emb: jax.Array | None
    grad_score_bias: jax.Array | None


@_source_call
def mha_simple_n2n(
    key_emb: jax.Array,
    query_emb: jax.Array,
    value_emb: jax.Array,
    graph: BipartiteCSC,
    num_heads: int,
    concat_heads: bool = True,
    edge_emb: jax.Array | None = None,
    norm_by_dim: bool = True,
    score_bias: jax.Array | None = None,
) -> jax.Array:
    """Graph attention by dot products, `softmax(<q, k + e> / sqrt(dim / num_heads) + bias)` of `v + e`.

    Args:
      key_emb, value_emb: `(n_src_nodes, dim)`, floating, already projected.
      query_emb: `(n_dst_nodes, dim)`.
      graph: the edges.
      num_heads, concat_heads: as in `mha_params`.
      edge_emb: `(nnz, dim)`, added to keys and values.
      norm_by_dim: whether to divide the products by sqrt(dim / num_heads).
      score_bias: broadcasts to `(nnz, num_heads)`.

    Returns:
      output_embedding: `(n_dst_nodes, dim)`, or without `concat_heads` `(n_dst_nodes, dim / num_heads)`.

    Gradients:
      Every array, to any order.

    Raises:
      ValueError: shapes disagree. TypeError: an argument is of the wrong kind.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import cugraph
      >>> graph = cugraph.make_bipartite_csc([0, 1, 3], [2, 0, 1], 3)
      >>> nodes, queries = jnp.ones((3, 8)), jnp.ones((2, 8))
      >>> cugraph.mha_simple_n2n(nodes, queries, nodes, graph, num_heads=2, concat_heads=False).shape
      (2, 4)
    """
    given, options, _ = _checked_simple("cugraph.mha_simple_n2n", locals())
    return operators.graph_transformer_attention(graph, **given, **options)


@_source_call
def mha_simple_n2n_bwd(
    grad_output_embedding: jax.Array, key_emb: jax.Array, query_emb: jax.Array, value_emb: jax.Array,
    graph: BipartiteCSC, num_heads: int, concat_heads: bool = True, edge_emb: jax.Array | None = None,
    norm_by_dim: bool = True, score_bias: jax.Array | None = None, *,
    grad_key_emb: bool | jax.Array | None = True, grad_query_emb: bool | jax.Array | None = True,
    grad_value_emb: bool | jax.Array | None = True, grad_edge_emb: bool | jax.Array | None = True,
    grad_score_bias: bool | jax.Array | None = True,
) -> MhaSimpleGrads:  # fmt: skip
    """The gradients of `mha_simple_n2n`.

    Args:
      grad_output_embedding: cotangent of `output_embedding`, its shape and dtype.
      grad_key_emb, grad_query_emb, grad_value_emb, grad_edge_emb, grad_score_bias: each asks for its
        gradient, or refuses it, as in `mha_gat_n2n_bwd`.
      key_emb, query_emb, value_emb, graph, num_heads, concat_heads, edge_emb, norm_by_dim, score_bias: as in
        the forward.

    Returns:
      MhaSimpleGrads, each with its argument's shape and dtype; None = refused, or no such argument. They may
      be differentiated in turn; errors are those of the forward.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd.compat import cugraph
      >>> graph = cugraph.make_bipartite_csc([0, 1, 3], [2, 0, 1], 3)
      >>> nodes, queries = jnp.ones((3, 8)), jnp.ones((2, 8))
      >>> grads = cugraph.mha_simple_n2n_bwd(queries, nodes, queries, nodes, graph, 2, grad_key_emb=False)
      >>> grads.grad_value_emb[:, 0].tolist(), grads.grad_key_emb is None
      ([0.5, 0.5, 1.0], True)
    """
    arguments, call = locals(), "cugraph.mha_simple_n2n_bwd"
    given, options, (checked_options, operands) = _checked_simple(call, arguments)
    g = checks.floating(call, "grad_output_embedding", grad_output_embedding)
    check_cotangents(call, checked_options, operands, g, None, None, None, None)
    slots = {field: (f"grad_{name}", arguments[f"grad_{name}"]) for field, name in _SIMPLE.items()}
    operator = operators.graph_transformer_attention_bwd
    return MhaSimpleGrads(*_gradients(call, operator, g, graph, given, slots, options))


def _checked_simple(call: str, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], tuple]:
    """Returns the operator's arrays and options by name, and both checked; an error names `call`."""
    norm_by_dim = checks.flag(call, "norm_by_dim", arguments["norm_by_dim"])
    options = {name: arguments[name] for name in ("num_heads", "concat_heads")}
    options |= {"scale": None if norm_by_dim else 1.0}
    given = {field: arguments[name] for field, name in _SIMPLE.items()}
    checked = prepare_transformer(
        call, arguments["graph"], **given, num_kv_heads=None, dropout_rate=0.0, dropout_key=None,
        dropout_mask=None, dropout_offset=None, return_attention_weights=False, **options,
    )  # fmt: skip
    return given, options, checked
