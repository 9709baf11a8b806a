"""What the backward computes for each destination before it walks over the edges: its rows, and delta (5)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core.numerics import finite
from jax_attn_bwd._core.sharding import full_like_operands, reshard_like, unsharded
from jax_attn_bwd.ops.graph import edge_loops
from jax_attn_bwd.ops.graph.edge_loops import sum_of_group, take
from jax_attn_bwd.ops.graph.spec import Cotangents, Options


class Saved(NamedTuple):
    """Rows of the destinations that the pass over the sources reads, and dw by edge."""

    dout: jax.Array  # [num_dst, H, D]
    delta: jax.Array  # [num_dst, H]
    m: jax.Array  # [num_dst, H], finite
    l: jax.Array  # [num_dst, H], 1 instead of 0
    dweights: jax.Array | None  # [E, H]


def saved(options: Options, residuals: Any, cotangents: Cotangents) -> Saved:
    """The destinations' rows, with delta (5)."""
    operands = residuals.operands
    out, _, weights, lse, m, l = residuals.result
    if m is None:
        m, l = finite(lse), jnp.where(lse == -jnp.inf, 0, jnp.ones_like(lse))
    dtype, H, empty = m.dtype, options.num_heads, l == 0
    heads = lambda x: x.reshape(x.shape[0], H, x.shape[1] // H)
    out, dout = heads(out), cotangents.out
    if dout is None:
        dout = jnp.zeros_like(out)
    elif options.concat_heads:
        dout = heads(dout)
    else:
        dout = jnp.broadcast_to((dout.astype(dtype) / H)[:, None], out.shape)
        dout = reshard_like(dout, out, (0, 1, 2))
    delta = (dout.astype(dtype) * out.astype(dtype)).sum(-1)
    if cotangents.weights is not None:
        like = unsharded(delta, 0)
        of_weights = sum_by_destination(operands.graph, weights, cotangents.weights, like)
        delta = delta + reshard_like(of_weights, delta, (0, 1))
    if cotangents.lse is not None:
        delta = delta - jnp.where(empty, 0, cotangents.lse)
    dweights = None if cotangents.weights is None else cotangents.weights.astype(dtype)
    return Saved(dout, delta, m, jnp.where(empty, 1, l), dweights)


def sum_by_destination(graph: Any, x: jax.Array, y: jax.Array | None, like: jax.Array) -> jax.Array:
    """The sum of x y over the edges into each destination, `[num_dst, H]`, dtype of `like`; None: y = 1."""
    edges = edge_loops.whole(graph.by_destination, graph.capacity)
    terms = take(x, edges.number).astype(like.dtype)
    if y is not None:  # where x is 0 the edge may be hidden, and y there anything
        terms = terms * jnp.where(terms == 0, 0, take(y, edges.number).astype(like.dtype))
    zeros = full_like_operands(like, like.shape, 0, like.dtype, (x, y, graph))
    return edge_loops.add(zeros, edges, sum_of_group(terms, edges))
