"""`mha_gat_v2_n2n` and `mha_gat_v2_n2n_efeat`: the arguments and results of `gat.py`, with GATv2's scores."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from jax_attn_bwd.compat.cugraph import gat
from jax_attn_bwd.compat.cugraph.call import run
from jax_attn_bwd.compat.cugraph.left_out import source_call

F = TypeVar("F", bound=Callable[..., Any])


def _with_the_arguments_of(model: F) -> Callable[[Callable[..., Any]], F]:
    """Makes a function the call of its name, with the signature and types of `model`, a call of `gat.py`."""
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


@_with_the_arguments_of(gat.mha_gat_n2n_fwd)
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


@_with_the_arguments_of(gat.mha_gat_n2n_bwd)
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


@_with_the_arguments_of(gat.mha_gat_n2n_efeat_fwd)
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


@_with_the_arguments_of(gat.mha_gat_n2n_efeat_bwd)
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
