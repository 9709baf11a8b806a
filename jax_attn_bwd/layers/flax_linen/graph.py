"""Graph attention layers as Flax linen modules."""

from dataclasses import field
from typing import Any, ClassVar, Literal, overload

import jax
import jax.numpy as jnp
from flax import linen as nn

from jax_attn_bwd._core.types import Fill, Implementation
from jax_attn_bwd.layers.graph import Config, array_shapes, attend, linear_layers
from jax_attn_bwd.ops.graph import BipartiteCSC


class _Conv(nn.Module):
    out_channels: int
    heads: int = 1
    concat: bool = True
    dropout: float = 0.0
    edge_dim: int | None = None
    bias: bool = True
    deterministic: bool | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: nn.initializers.Initializer = nn.initializers.xavier_uniform()
    implementation: Implementation | None = None
    forward_mode: bool = field(default=False, kw_only=True)  # the others keep their places

    kind: ClassVar[str]

    # fmt: off
    @overload
    def __call__(
        self, x: jax.Array | tuple[jax.Array, jax.Array], graph: BipartiteCSC,
        edge_attr: jax.Array | None = None, *, return_attention_weights: Literal[False] = False,
        deterministic: bool | None = None,
    ) -> jax.Array: ...
    @overload
    def __call__(
        self, x: jax.Array | tuple[jax.Array, jax.Array], graph: BipartiteCSC,
        edge_attr: jax.Array | None = None, *, return_attention_weights: Literal[True],
        deterministic: bool | None = None,
    ) -> tuple[jax.Array, jax.Array]: ...
    @overload
    def __call__(
        self, x: jax.Array | tuple[jax.Array, jax.Array], graph: BipartiteCSC,
        edge_attr: jax.Array | None = None, *, return_attention_weights: bool,
        deterministic: bool | None = None,
    ) -> jax.Array | tuple[jax.Array, jax.Array]: ...
    # fmt: on
    @nn.compact
    def __call__(
        self,
        x: jax.Array | tuple[jax.Array, jax.Array],
        graph: BipartiteCSC,
        edge_attr: jax.Array | None = None,
        *,
        deterministic: bool | None = None,
        return_attention_weights: bool = False,
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Attends.

        Args:
          x: `[..., num_src, channels]`, any batch axes for one graph. The destinations are its first
            `num_dst` rows, as in a sampled neighbourhood. Where they are other nodes (items that users
            rate), hand over a pair (x_src, x_dst), which gets a linear layer for each side.
          graph: the edges, from sources to destinations.
          edge_attr: `[..., nnz, edge_dim]` (or `[nnz]` for one), in the caller's edge order; with `edge_dim`.
          deterministic: True = no dropout; None takes the attribute. With dropout one of the two must be
            given, and an rng "dropout" where it is False.
          return_attention_weights: also return the weights.

        Returns:
          out: `[..., num_dst, heads * out_channels]`, or `[..., num_dst, out_channels]` without `concat`.
          weights: `[..., nnz, heads]`, with `return_attention_weights`, in the caller's edge order, then
            those of the loops of `add_self_loops`.

        Raises:
          ValueError: shapes disagree. TypeError: an argument is of the wrong kind.
        """
        # The parameters, made where there are none yet.
        config = Config.of(self.kind, vars(self))
        pair = (None, None) if isinstance(x, tuple | list) else None
        layers = {
            name: nn.Dense(
                linear.out_channels,
                use_bias=linear.bias,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                precision=self.precision,
                kernel_init=self.kernel_init,
                name=name,
            )
            for name, linear in linear_layers(config, pair).items()
        }
        vectors = {
            name: self.param(
                name, nn.initializers.zeros if name == "bias" else self.kernel_init, shape, self.param_dtype
            )
            for name, shape in array_shapes(config).items()
        }
        # A key where a call drops edges.
        key = None
        if config.dropout and not nn.merge_param("deterministic", self.deterministic, deterministic):
            key = self.make_rng("dropout")
        return attend(config, layers, vectors, x, graph, edge_attr, key, return_attention_weights)


class GATConv(_Conv):
    """Graph attention (GAT), with the arguments of PyTorch Geometric's `GATConv`.

    Parameters: `lin` (or for a pair `lin_src` and `lin_dst`), `att_src`, `att_dst`, `bias`; `lin_edge` and
    `att_edge` with `edge_dim`; `res` with `residual`. `load_torch` takes those of PyTorch Geometric; for
    differences see `jax_attn_bwd.layers.graph`.

    Attributes:
      out_channels: width of a head.
      heads: number of heads.
      concat: False takes the mean over heads.
      dropout: probability of dropping an edge's weight.
      edge_dim: width of edge features; None = no edge features.
      bias: whether to learn an additive bias.
      deterministic: True = no dropout; may be given at the call instead. (Sums repeat bit for bit anyway.)
      dtype: dtype of the computation; None infers it from inputs and parameters.
      param_dtype: dtype of the parameters.
      precision: precision of the linear layers.
      kernel_init: initializer of the linear layers and the attention vectors.
      implementation, forward_mode: options of `jax_attn_bwd.graph_attention`.
      negative_slope: slope of the leaky ReLU below 0.
      residual: whether to add a linear layer of the destinations.
      add_self_loops: whether to attend along `graph.with_self_loops()` instead, built at each call; see
        `jax_attn_bwd.layers.graph`. Set it False for nodes of two kinds: source i is not destination i.
      fill_value: `edge_attr` of these loops: a number, or "mean", "add", "min" or "max" of those into
        the node.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC
      >>> from jax_attn_bwd.layers.flax_linen import GATConv
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=3)
      >>> layer, x = GATConv(4, heads=2), jnp.ones((3, 5), "float32")
      >>> params = layer.init(jax.random.key(0), x, graph)
      >>> layer.apply(params, x, graph).shape
      (3, 8)
    """

    negative_slope: float = 0.2
    residual: bool = False
    add_self_loops: bool = True
    fill_value: float | Fill = "mean"

    kind: ClassVar[str] = "GATConv"


class GATv2Conv(_Conv):
    """Dynamic graph attention (GATv2), with the arguments of PyTorch Geometric's `GATv2Conv`.

    Parameters: `lin_l`, `lin_r` (none with `share_weights`), `att`, `bias`; `lin_edge` with `edge_dim`;
    `res` with `residual`. `load_torch` takes those of PyTorch Geometric.

    Attributes:
      out_channels, heads, concat, dropout, edge_dim, bias, deterministic, dtype, param_dtype, precision,
        kernel_init, implementation, forward_mode, negative_slope, residual, add_self_loops, fill_value: as in
        `GATConv`.
      share_weights: whether destinations use the linear layer of sources, `lin_l`.
    """

    negative_slope: float = 0.2
    share_weights: bool = False
    residual: bool = False
    add_self_loops: bool = True
    fill_value: float | Fill = "mean"

    kind: ClassVar[str] = "GATv2Conv"


class TransformerConv(_Conv):
    """Graph transformer attention, with the arguments of PyTorch Geometric's `TransformerConv`.

    Parameters: `lin_key`, `lin_query`, `lin_value`, `lin_skip` (with `root_weight`), `lin_beta` (with
    `beta`), `lin_edge` (with `edge_dim`). `load_torch` takes those of PyTorch Geometric.

    Attributes:
      out_channels, heads, concat, dropout, edge_dim, deterministic, dtype, param_dtype, precision,
        kernel_init, implementation, forward_mode: as in `GATConv`.
      bias: whether the linear layers of nodes have one.
      beta: whether a learned gate mixes attention and skip connection, in place of their sum.
      root_weight: whether to add a linear layer of the destinations; without it `beta` is ignored.
    """

    beta: bool = False
    root_weight: bool = True

    kind: ClassVar[str] = "TransformerConv"
