"""Graph attention layers as Haiku modules."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal, overload

import haiku as hk
import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.types import Fill, Implementation
from jax_attn_bwd.layers.graph import Config, array_shapes, attend, linear_layers
from jax_attn_bwd.ops.graph import BipartiteCSC


@dataclass(eq=False, repr=False)
class _Conv(hk.Module):
    out_channels: int
    heads: int = 1
    concat: bool = True
    _: KW_ONLY
    dropout: float = 0.0
    edge_dim: int | None = None
    bias: bool = True
    w_init: hk.initializers.Initializer | None = None
    implementation: Implementation | None = None
    forward_mode: bool = False
    name: str | None = None

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        """Makes the layer of its fields, which the constructor has set."""
        if self.name is None and self.kind == "GATv2Conv":
            self.name = "gatv2_conv"  # Haiku would call it ga_tv2_conv
        super().__post_init__()
        self._config = Config.of(self.kind, vars(self))
        self._w_init = self.w_init or hk.initializers.VarianceScaling(1.0, "fan_avg", "uniform")

    # fmt: off
    @overload
    def __call__(
        self, x: jax.Array | tuple[jax.Array, jax.Array], graph: BipartiteCSC,
        edge_attr: jax.Array | None = None, *, return_attention_weights: Literal[False] = False,
        is_training: bool | None = None,
    ) -> jax.Array: ...
    @overload
    def __call__(
        self, x: jax.Array | tuple[jax.Array, jax.Array], graph: BipartiteCSC,
        edge_attr: jax.Array | None = None, *, return_attention_weights: Literal[True],
        is_training: bool | None = None,
    ) -> tuple[jax.Array, jax.Array]: ...
    @overload
    def __call__(
        self, x: jax.Array | tuple[jax.Array, jax.Array], graph: BipartiteCSC,
        edge_attr: jax.Array | None = None, *, return_attention_weights: bool,
        is_training: bool | None = None,
    ) -> jax.Array | tuple[jax.Array, jax.Array]: ...
    # fmt: on
    def __call__(
        self,
        x: jax.Array | tuple[jax.Array, jax.Array],
        graph: BipartiteCSC,
        edge_attr: jax.Array | None = None,
        *,
        is_training: bool | None = None,
        return_attention_weights: bool = False,
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Attends.

        Args:
          x: `[..., num_src, channels]`, any batch axes for one graph. The destinations are its first
            `num_dst` rows, as in a sampled neighbourhood. Where they are other nodes (items that users
            rate), hand over a pair (x_src, x_dst), which gets a linear layer for each side.
          graph: the edges, from sources to destinations.
          edge_attr: `[..., nnz, edge_dim]` (or `[nnz]` for one), in the caller's edge order; with `edge_dim`.
          is_training: whether to drop out, with `hk.next_rng_key()`; must be given to a layer with dropout.
          return_attention_weights: also return the weights.

        Returns:
          out: `[..., num_dst, heads * out_channels]`, or `[..., num_dst, out_channels]` without `concat`.
          weights: `[..., nnz, heads]`, with `return_attention_weights`, in the caller's edge order, then
            those of the loops of `add_self_loops`.

        Raises:
          ValueError: shapes disagree. TypeError: an argument is of the wrong kind.
        """
        # The parameters, made where there are none yet.
        config = self._config
        pair = isinstance(x, tuple | list)
        layers = {
            name: hk.Linear(linear.out_channels, with_bias=linear.bias, w_init=self._w_init, name=name)
            for name, linear in linear_layers(config, (None, None) if pair else None).items()
        }
        dtype = jnp.result_type(x[0] if pair else x)
        vectors = {
            name: hk.get_parameter(name, shape, dtype, jnp.zeros if name == "bias" else self._w_init)
            for name, shape in array_shapes(config).items()
        }
        # A key where a call drops edges.
        key = None
        if config.dropout:
            if is_training is None:
                expected = f"be given to a layer with dropout = {config.dropout}"
                raise ValueError(checks.message(config.kind, "is_training", expected, None))
            key = hk.next_rng_key() if is_training else None
        return attend(config, layers, vectors, x, graph, edge_attr, key, return_attention_weights)


@dataclass(eq=False, repr=False)
class GATConv(_Conv):
    """Graph attention (GAT), with the arguments of PyTorch Geometric's `GATConv`.

    Parameters: `lin` (or for a pair `lin_src` and `lin_dst`), `att_src`, `att_dst`, `bias`; `lin_edge` and
    `att_edge` with `edge_dim`; `res` with `residual`. `load_torch` takes those of PyTorch Geometric; for
    differences see `jax_attn_bwd.layers.graph`.

    Args:
      out_channels: width of a head.
      heads: number of heads.
      concat: False takes the mean over heads.
      negative_slope: slope of the leaky ReLU below 0.
      dropout: probability of dropping an edge's weight.
      edge_dim: width of edge features; None = no edge features.
      bias: whether to learn an additive bias.
      residual: whether to add a linear layer of the destinations.
      add_self_loops: whether to attend along `graph.with_self_loops()` instead, built at each call; see
        `jax_attn_bwd.layers.graph`. Set it False for nodes of two kinds: source i is not destination i.
      fill_value: `edge_attr` of these loops: a number, or "mean", "add", "min" or "max" of those into
        the node.
      w_init: initializer of the linear layers and the attention vectors; Xavier-uniform if None.
      implementation, forward_mode: options of `jax_attn_bwd.graph_attention`.
      name: name of the module.

    Example:
      >>> import haiku as hk
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC
      >>> from jax_attn_bwd.layers.haiku import GATConv
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=3)
      >>> model = hk.without_apply_rng(hk.transform(lambda x: GATConv(4, heads=2)(x, graph)))
      >>> x = jnp.ones((3, 5))
      >>> model.apply(model.init(jax.random.key(0), x), x).shape
      (3, 8)
    """

    _: KW_ONLY
    negative_slope: float = 0.2
    residual: bool = False
    add_self_loops: bool = True
    fill_value: float | Fill = "mean"

    kind: ClassVar[str] = "GATConv"


@dataclass(eq=False, repr=False)
class GATv2Conv(_Conv):
    """Dynamic graph attention (GATv2), with the arguments of PyTorch Geometric's `GATv2Conv`.

    Parameters: `lin_l`, `lin_r` (none with `share_weights`), `att`, `bias`; `lin_edge` with `edge_dim`;
    `res` with `residual`. `load_torch` takes those of PyTorch Geometric.

    Args:
      share_weights: whether destinations use the linear layer of sources, `lin_l`.
      out_channels, heads, concat, negative_slope, dropout, edge_dim, bias, residual, add_self_loops,
        fill_value, w_init, implementation, forward_mode, name: as in `GATConv`.
    """

    _: KW_ONLY
    negative_slope: float = 0.2
    share_weights: bool = False
    residual: bool = False
    add_self_loops: bool = True
    fill_value: float | Fill = "mean"

    kind: ClassVar[str] = "GATv2Conv"


@dataclass(eq=False, repr=False)
class TransformerConv(_Conv):
    """Graph transformer attention, with the arguments of PyTorch Geometric's `TransformerConv`.

    Parameters: `lin_key`, `lin_query`, `lin_value`, `lin_skip` (with `root_weight`), `lin_beta` (with
    `beta`), `lin_edge` (with `edge_dim`). `load_torch` takes those of PyTorch Geometric.

    Args:
      bias: whether the linear layers of nodes have one.
      beta: whether a learned gate mixes attention and skip connection, in place of their sum.
      root_weight: whether to add a linear layer of the destinations; without it `beta` is ignored.
      out_channels, heads, concat, dropout, edge_dim, w_init, implementation, forward_mode, name: as in
        `GATConv`.
    """

    _: KW_ONLY
    beta: bool = False
    root_weight: bool = True

    kind: ClassVar[str] = "TransformerConv"
