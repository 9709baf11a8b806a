"""`mha_gat_n2n` and `mha_gat_n2n_efeat`, and the calls of GATv2 with their arguments and results."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, overload

import jax

from jax_attn_bwd._core.types import F
from jax_attn_bwd.compat.cugraph.call import MhaGatEfeatGrads, MhaGatGrads, mha_params, run, source_call
from jax_attn_bwd.ops.graph import BipartiteCSC


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
@source_call
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
    return run("mha_gat_n2n_fwd", locals())


@source_call
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
    return run("mha_gat_n2n_bwd", locals())


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
@source_call
def mha_gat_n2n_efeat_fwd(
    src_node_embedding: jax.Array,
    dst_node_embedding: jax.Array | None,
    edge_embedding: jax.Array,
    attention_weights: jax.Array,
    graph: BipartiteCSC,
    params: mha_params,
    *,
    return_softmax_scores: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
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
    return run("mha_gat_n2n_efeat_fwd", locals())


@source_call
def mha_gat_n2n_efeat_bwd(
    grad_output_embedding: jax.Array,
    src_node_embedding: jax.Array,
    dst_node_embedding: jax.Array | None,
    edge_embedding: jax.Array,
    attention_weights: jax.Array,
    softmax_scores: jax.Array | None,
    graph: BipartiteCSC,
    params: mha_params,
    *,
    grad_src_node_embedding: bool | jax.Array | None = True,
    grad_dst_node_embedding: bool | jax.Array | None = True,
    grad_edge_embedding: bool | jax.Array | None = True,
    grad_attention_weights: bool | jax.Array | None = True,
) -> MhaGatEfeatGrads:
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
    return run("mha_gat_n2n_efeat_bwd", locals())


def _with_the_arguments_of(model: F) -> Callable[[Callable[..., Any]], F]:
    """Makes a function the call of its name, with the signature and types of `model`, a call of GAT."""
    signature = inspect.signature(model)

    def decorate(function: Callable[..., Any]) -> Any:
        name = function.__name__

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{name}() {error}") from None
            given.apply_defaults()
            return run(name, given.arguments)

        call.__annotations__, call.__wrapped__ = model.__annotations__, model
        return source_call(call)

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
