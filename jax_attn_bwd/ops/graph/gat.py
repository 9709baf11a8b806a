"""Graph attention (GAT): the public functions."""

from collections.abc import Sequence
from typing import Any

import jax

from jax_attn_bwd.ops.graph import rule
from jax_attn_bwd.ops.graph.arguments import prepare_gat
from jax_attn_bwd.ops.graph.spec import GraphAttentionGrads
from jax_attn_bwd.ops.graph.structure import BipartiteCSC

_NAME = "graph_attention"


def graph_attention(
    graph: BipartiteCSC,
    src: jax.Array,
    dst: jax.Array | None,
    attention_weights: jax.Array,
    *,
    num_heads: int,
    edge: jax.Array | None = None,
    concat_heads: bool = True,
    activation: str = "leaky_relu",
    alpha: float = 0.2,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_mask: jax.Array | None = None,
    dropout_offset: Sequence[Any] | None = None,
    return_attention_weights: bool = False,
    return_residual: bool = False,
    implementation: str | None = None,
) -> Any:
    """Attends every destination to the sources of its edges, with additive scores (GAT).

        z   = <h_src, a_src> + <h_dst, a_dst> (+ <e, a_edge>)     for every edge and head
        p   = softmax over the edges into a destination of activation(z)
        out = sum of dropout(p) h_src over them

    Shapes: nnz edges (`graph.capacity`), H heads, dim = H * D features of a node, head h the columns from
    h * D to (h + 1) * D. Only the source carries the message; no self-loop is ever added.

    Args:
      graph: the edges; see `BipartiteCSC`.
      src: `[num_src, dim]`, floating, already projected.
      dst: `[num_dst, dim]`, dtype of `src`; None means `src[:num_dst]`.
      attention_weights: `[2 * dim]`, `[source | destination]`, each head by head; with `edge`
        `[2 * dim + dim_edge]`, the share of the edges last.
      num_heads: H; divides dim.
      edge: `[nnz, dim_edge]`, floating, heads side by side as in `src`; they enter the score alone.
      concat_heads: False takes the mean over heads instead of setting them side by side.
      activation: one of linear, relu, sigmoid, tanh, elu, scalar, leaky_relu.
      alpha: slope of leaky_relu below 0, factor of scalar; a Python float.
      dropout_rate: probability in [0, 1] of dropping an edge's weight; 1 gives zeros.
      dropout_key: one JAX random key of any type; required if `dropout_rate > 0`. The mask is a function
        of (key, head, number of the edge in the caller's order) alone.
      dropout_mask: `[H, nnz]`, floating: factors instead of a key (0, or 1 / (1 - rate)); no gradient.
      dropout_offset: (batch, head, edge, 0) of this call in a global one, ints or traced; the third may
        be an index array `[nnz]`.
      return_attention_weights: also return the weights.
      return_residual: also return lse.
      implementation: None picks the best one for the platform and shapes; a name runs that one or raises.

    Returns:
      out: `[num_dst, dim]`, or `[num_dst, D]` without `concat_heads`; dtype of `src`, accumulated in
        float32 (float64 for float64). 0 for a destination without edges.
      weights: `[nnz, H]`, with `return_attention_weights`: after dropout, in the caller's edge order.
      lse: `[num_dst, H]`, with `return_residual`: natural log of the sum of exp(score), float32 (float64
        for float64); -inf for a destination without edges.

    Gradients:
      src, dst, attention_weights, edge: exact, in the dtype and shape of the argument; only what is
      differentiated is computed. All outputs are differentiable, to second order and beyond.
      Saves its inputs, the heads' outputs, and lse with its rounding (and the weights, if they are
      returned); out and lse carry the checkpoint names "attention_out" and "attention_lse". No array of
      edges x dim is formed, but for the gradient of edge features of that width. NaN in a node that no
      edge refers to reaches no output and no gradient. The same bits in every run.

    Raises:
      ValueError: shapes disagree, or an option is out of range.
      TypeError: an argument is of the wrong kind (a graph that is no `BipartiteCSC`, mixed dtypes).
      NotImplementedError: the named implementation cannot run this call.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC, graph_attention
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> x, a = jnp.ones((3, 8)), jnp.ones(16)
      >>> graph_attention(graph, x, None, a, num_heads=2).shape
      (2, 8)

    References:
      Velickovic et al., Graph attention networks, 2018, arXiv:1710.10903, section 2.1.
    """
    options, operands = prepare_gat(
        _NAME, "gat", graph, src, dst, attention_weights, num_heads=num_heads, edge=edge,
        concat_heads=concat_heads, activation=activation, alpha=alpha, dropout_rate=dropout_rate,
        dropout_key=dropout_key, dropout_mask=dropout_mask, dropout_offset=dropout_offset,
        return_attention_weights=return_attention_weights,
    )  # fmt: skip
    return rule.attend(_NAME, options, operands, return_residual, implementation)


def graph_attention_bwd(
    dout: jax.Array | None,
    graph: BipartiteCSC,
    src: jax.Array,
    dst: jax.Array | None,
    attention_weights: jax.Array,
    *,
    out: jax.Array | None = None,
    lse: jax.Array | None = None,
    dweights: jax.Array | None = None,
    dlse: jax.Array | None = None,
    wrt: Sequence[str] | None = None,
    num_heads: int,
    edge: jax.Array | None = None,
    concat_heads: bool = True,
    activation: str = "leaky_relu",
    alpha: float = 0.2,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_mask: jax.Array | None = None,
    dropout_offset: Sequence[Any] | None = None,
    implementation: str | None = None,
) -> GraphAttentionGrads:
    """The backward of `graph_attention` as a plain function.

    Args:
      dout: cotangent of `out`, its shape and dtype; None = 0.
      out, lse: of the forward call, `out` per head, `[num_dst, dim]`, also without `concat_heads`. If
        either is None, or `dweights` is given, the forward runs again. Scores of
        1e4 and more that tie lose digits in `lse`: only the gradient of the attention itself keeps them.
      dweights, dlse: cotangents of the weights and of `lse`; None = 0.
      wrt: which of "src", "dst", "attention_weights", "edge" to compute;
        default: all that are given but "edge".
      graph, src, dst, attention_weights, edge and options: as in the forward call.

    Returns:
      GraphAttentionGrads(src, dst, attention_weights, edge), each with its argument's
      shape and dtype; None where not asked. With `dst=None` the
      gradient of `src` holds both its shares, and "dst" has none.

    Gradients:
      A composition of differentiable operations: it may itself be differentiated, in either mode.

    Raises:
      As `graph_attention`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_attn_bwd as jab
      >>> graph = jab.BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=2)
      >>> x, a, dout = jnp.ones((3, 8)), jnp.ones(16), jnp.ones((2, 8))
      >>> grads = jab.graph_attention_bwd(dout, graph, x, None, a, num_heads=2)
      >>> grads.src.shape, grads.attention_weights.shape, grads.dst is None
      ((3, 8), (16,), True)
    """
    name = f"{_NAME}_bwd"
    options, operands = prepare_gat(
        name, "gat", graph, src, dst, attention_weights, num_heads=num_heads, edge=edge,
        concat_heads=concat_heads, activation=activation, alpha=alpha, dropout_rate=dropout_rate,
        dropout_key=dropout_key, dropout_mask=dropout_mask, dropout_offset=dropout_offset,
        return_attention_weights=False,
    )  # fmt: skip
    given = {"src": src, "dst": dst, "attention_weights": attention_weights, "edge": edge}
    return rule.additive_gradients(
        name, options, operands, given, dout, out, lse, dweights, dlse, wrt, implementation
    )
