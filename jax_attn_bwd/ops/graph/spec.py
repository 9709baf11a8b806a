"""Shapes, options and residuals of the graph attention operators.

Shape letters: E rows of edge data (`graph.capacity`), H heads, D width of a head. Public node arrays are
`[nodes, H * D]`, head h = columns h * D to (h + 1) * D; the loops see `[nodes, H, D]`. The transformer's keys
and values have K heads, each for H / K of the query's, and values the width Dv. The loops walk over R groups
of W edges each: arrays are `[W, R, ...]` by edge and `[R, ...]` by the node that owns the group.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Required, TypedDict, get_args

import jax

from jax_attn_bwd._core import dropout
from jax_attn_bwd._core.trees import exportable_tuple
from jax_attn_bwd._core.types import Activation, Array, DropoutKeywords, Implementation, Scale

ACTIVATIONS = get_args(Activation)
DIFFERENTIABLE = ("src", "dst", "value", "attention_weights", "edge", "score_bias")
RANKS = {"src": 2, "dst": 2, "value": 2, "edge": 2, "score_bias": 2, "dropout_mask": 2}  # without batch axes


@dataclass(frozen=True)
class Options:
    """Everything that changes the answer and is known at trace time."""

    kind: str  # "gat", "gatv2" or "transformer": what the score of an edge is
    num_heads: int
    concat_heads: bool = True
    activation: Activation = "leaky_relu"
    alpha: float = 0.2
    scale: float = 1.0  # of the transformer's products
    dropout_rate: float = 0.0
    return_weights: bool = False
    sharing: int = 1  # heads of the transformer's query that share one of key and value, H / K

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.num_heads // self.sharing


class Operands(NamedTuple):
    """Every array of a call; None = not given. For the transformer src is the key and dst the query.

    A call may have batch axes in front of these; kinds and loops get the arrays of one entry.
    """

    graph: Any  # a BipartiteCSC
    src: jax.Array  # [num_src, H * D], or [num_src, K * D]
    dst: jax.Array  # [num_dst, H * D]
    value: jax.Array | None = None  # [num_src, K * Dv], transformer
    attention_weights: jax.Array | None = None  # gat [2 * H * D (+ dim_edge)], gatv2 [H * D]
    edge: jax.Array | None = None  # [E, dim_edge]
    score_bias: jax.Array | None = None  # broadcasts to [E, H], rank 2
    dropout_mask: jax.Array | None = None  # [H, E], factors
    dropout_words: jax.Array | None = None  # uint32 [2]
    dropout_offset: dropout.Offset | None = None

    @property
    def leader(self) -> jax.Array:
        """The first array of nodes that has the batch axes; src where none has."""
        nodes = [x for x in (self.src, self.dst, self.value) if x is not None]
        return max(nodes, key=lambda x: x.ndim)

    @property
    def batch_axes(self) -> tuple[int, ...]:
        """The sizes of the batch axes."""
        return self.leader.shape[:-2]


class Result(NamedTuple):
    """The outputs of a forward, and its row values."""

    out: jax.Array  # [num_dst, H * Dv], per head, dtype of src
    mean: jax.Array | None  # [num_dst, Dv], the mean over heads, without concat_heads
    weights: jax.Array | None  # [E, H], with return_weights
    lse: jax.Array | None  # [num_dst, H], natural log, float32 or wider: m + log l, but for its rounding
    m: jax.Array | None  # [num_dst, H], the highest score; None: lse stands for it, and l is 1
    l: jax.Array | None  # [num_dst, H], sum of exp(score - m); 0 without edges
    wide_out: jax.Array | None = None  # as out, not rounded: an error of it is alike for a node's edges
    wide_weights: jax.Array | None = None  # as weights; None = those in out and weights are not rounded


@jax.tree_util.register_static
@dataclass(frozen=True)
class Wanted:
    """The differentiable operands whose gradients are asked for."""

    names: frozenset[str]


class Residuals(NamedTuple):
    """The inputs of the forward, with out, m and l (and the weights that it returned), for the backward."""

    operands: Operands
    result: Result
    wanted: Wanted


class Cotangents(NamedTuple):
    """The cotangents of what the operator returns; None = zero."""

    out: jax.Array | None = None  # [num_dst, H * Dv], or [num_dst, Dv] without concat_heads
    weights: jax.Array | None = None  # [E, H]
    lse: jax.Array | None = None  # [num_dst, H]


@exportable_tuple
class GraphAttentionGrads(NamedTuple):
    """Gradients of `graph_attention` and `graph_attention_v2`; None = not asked."""

    src: jax.Array | None = None
    dst: jax.Array | None = None
    attention_weights: jax.Array | None = None
    edge: jax.Array | None = None


@exportable_tuple
class GraphTransformerAttentionGrads(NamedTuple):
    """Gradients of `graph_transformer_attention`; None = not asked."""

    query: jax.Array | None = None
    key: jax.Array | None = None
    value: jax.Array | None = None
    edge: jax.Array | None = None
    score_bias: jax.Array | None = None


class EdgeKeywords(TypedDict, total=False):
    """Keywords of the softmax, sum, mean and maximum over edges, and of their derivatives."""

    implementation: Implementation | None


class _GraphKeywords(EdgeKeywords, DropoutKeywords, total=False):
    num_heads: Required[int]
    edge: Array | None
    concat_heads: bool
    dropout_mask: Array | None


class GraphAttentionKeywords(_GraphKeywords, total=False):
    """Keywords of `graph_attention` and `_v2` beside those that change what they return."""

    activation: Activation
    alpha: float


class GraphTransformerAttentionKeywords(_GraphKeywords, total=False):
    """Keywords of `graph_transformer_attention` beside those that change what it returns."""

    num_kv_heads: int | None
    score_bias: Array | None
    scale: Scale | None
