"""Graph attention layers as Flax NNX modules."""

from functools import partial
from typing import Any, ClassVar, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx

from jax_attn_bwd._core.types import Fill, Implementation
from jax_attn_bwd.layers.graph import Config, array_shapes, attend, linear_layers
from jax_attn_bwd.ops.graph import BipartiteCSC

_XAVIER = nnx.initializers.xavier_uniform()


class _Conv(nnx.Module):
    kind: ClassVar[str]

    def _build(self, arguments: dict[str, Any]) -> None:
        """Makes the layer of the arguments of its constructor."""
        config = Config.of(self.kind, arguments)
        names = ("dtype", "param_dtype", "precision", "kernel_init", "rngs")
        dtype, param_dtype, precision, kernel_init, rngs = (arguments[name] for name in names)
        linear = partial(
            nnx.Linear,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            rngs=rngs,
        )
        specs = linear_layers(config, config.in_channels)
        for name, (width, out, bias) in specs.items():
            setattr(self, name, linear(width, out, use_bias=bias))
        for name, shape in array_shapes(config).items():
            init = nnx.initializers.zeros if name == "bias" else kernel_init
            setattr(self, name, nnx.Param(init(rngs.params(), shape, param_dtype)))
        self.config = config
        self.linears = tuple(specs)
        # A layer without dropout holds no random state.
        streams = rngs if config.dropout else None
        self.dropout = nnx.Dropout(config.dropout, deterministic=arguments["deterministic"], rngs=streams)

    # fmt: off
    @overload
    def __call__(
        self, x: jax.Array | tuple[jax.Array, jax.Array], graph: BipartiteCSC,
        edge_attr: jax.Array | None = None, *, return_attention_weights: Literal[False] = False,
        deterministic: bool | None = None, rngs: nnx.Rngs | None = None,
    ) -> jax.Array: ...
    @overload
    def __call__(
        self, x: jax.Array | tuple[jax.Array, jax.Array], graph: BipartiteCSC,
        edge_attr: jax.Array | None = None, *, return_attention_weights: Literal[True],
        deterministic: bool | None = None, rngs: nnx.Rngs | None = None,
    ) -> tuple[jax.Array, jax.Array]: ...
    @overload
    def __call__(
        self, x: jax.Array | tuple[jax.Array, jax.Array], graph: BipartiteCSC,
        edge_attr: jax.Array | None = None, *, return_attention_weights: bool,
        deterministic: bool | None = None, rngs: nnx.Rngs | None = None,
    ) -> jax.Array | tuple[jax.Array, jax.Array]: ...
    # fmt: on
    def __call__(
        self,
        x: jax.Array | tuple[jax.Array, jax.Array],
        graph: BipartiteCSC,
        edge_attr: jax.Array | None = None,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | None = None,
        return_attention_weights: bool = False,
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Attends.

        Args:
          x: `[..., num_src, channels]`, any batch axes for one graph. The destinations are its first
            `num_dst` rows, as in a sampled neighbourhood. Where they are other nodes (items that users
            rate), hand over a pair (x_src, x_dst).
          graph: the edges, from sources to destinations.
          edge_attr: `[..., nnz, edge_dim]` (or `[nnz]` for one), in the caller's edge order; with `edge_dim`.
          deterministic: True = no dropout; None takes what `train()`, `eval()` or the constructor set.
          rngs: whose "dropout" is drawn from in place of the layer's own.
          return_attention_weights: also return the weights.

        Returns:
          out: `[..., num_dst, heads * out_channels]`, or `[..., num_dst, out_channels]` without `concat`.
          weights: `[..., nnz, heads]`, with `return_attention_weights`, in the caller's edge order, then
            those of the loops of `add_self_loops`.

        Raises:
          ValueError: shapes disagree. TypeError: an argument is of the wrong kind.
        """
        layers = {name: getattr(self, name) for name in self.linears}
        vectors = {name: getattr(self, name)[...] for name in array_shapes(self.config)}
        deterministic = self.dropout.deterministic if deterministic is None else deterministic
        key = None
        if self.config.dropout and not deterministic:
            key = self.dropout.rngs() if rngs is None else rngs.dropout()
        return attend(self.config, layers, vectors, x, graph, edge_attr, key, return_attention_weights)


class GATConv(_Conv):
    """Graph attention (GAT), with the arguments of PyTorch Geometric's `GATConv`.

    Parameters: `lin` (or for a pair of widths `lin_src` and `lin_dst`), `att_src`, `att_dst`, `bias`;
    `lin_edge` and `att_edge` with `edge_dim`; `res` with `residual`. `load_torch` takes those of PyTorch
    Geometric; for differences see `jax_attn_bwd.layers.graph`.

    Args:
      in_channels: width of the nodes, or (of sources, of destinations).
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
      deterministic: True = no dropout; `train()` and `eval()` set it. (Sums repeat bit for bit anyway.)
      dtype: dtype of the computation; None infers it from inputs and parameters.
      param_dtype: dtype of the parameters.
      precision: precision of the linear layers.
      kernel_init: initializer of the linear layers and the attention vectors.
      implementation, forward_mode: options of `jax_attn_bwd.graph_attention`.
      rngs: rng key.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_attn_bwd import BipartiteCSC
      >>> from jax_attn_bwd.layers.flax_nnx import GATConv
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=3)
      >>> layer = GATConv(5, 4, heads=2, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((3, 5), "float32"), graph).shape
      (3, 8)
      >>> ratings = BipartiteCSC.from_coo(src=[0, 2], dst=[1, 0], num_src=3, num_dst=2)
      >>> layer = GATConv((5, 6), 4, heads=2, add_self_loops=False, rngs=nnx.Rngs(0))
      >>> layer((jnp.ones((3, 5), "float32"), jnp.ones((2, 6), "float32")), ratings).shape  # users, items
      (2, 8)
    """

    kind: ClassVar[str] = "GATConv"

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        *,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        residual: bool = False,
        add_self_loops: bool = True,
        fill_value: float | Fill = "mean",
        deterministic: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: nnx.Initializer = _XAVIER,
        implementation: Implementation | None = None,
        forward_mode: bool = False,
        rngs: nnx.Rngs,
    ):
        self._build(locals())


class GATv2Conv(_Conv):
    """Dynamic graph attention (GATv2), with the arguments of PyTorch Geometric's `GATv2Conv`.

    Parameters: `lin_l`, `lin_r` (none with `share_weights`), `att`, `bias`; `lin_edge` with `edge_dim`;
    `res` with `residual`. `load_torch` takes those of PyTorch Geometric.

    Args:
      share_weights: whether destinations use the linear layer of sources, `lin_l`.
      in_channels, out_channels, heads, concat, negative_slope, dropout, edge_dim, bias, residual,
        add_self_loops, fill_value, deterministic, dtype, param_dtype, precision, kernel_init,
        implementation, forward_mode, rngs: as in `GATConv`.
    """

    kind: ClassVar[str] = "GATv2Conv"

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        *,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        share_weights: bool = False,
        residual: bool = False,
        add_self_loops: bool = True,
        fill_value: float | Fill = "mean",
        deterministic: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: nnx.Initializer = _XAVIER,
        implementation: Implementation | None = None,
        forward_mode: bool = False,
        rngs: nnx.Rngs,
    ):
        self._build(locals())


class TransformerConv(_Conv):
    """Graph transformer attention, with the arguments of PyTorch Geometric's `TransformerConv`.

    Parameters: `lin_key`, `lin_query`, `lin_value`, `lin_skip` (with `root_weight`), `lin_beta` (with
    `beta`), `lin_edge` (with `edge_dim`). `load_torch` takes those of PyTorch Geometric.

    Args:
      bias: whether the linear layers of nodes have one.
      beta: whether a learned gate mixes attention and skip connection, in place of their sum.
      root_weight: whether to add a linear layer of the destinations; without it `beta` is ignored.
      in_channels, out_channels, heads, concat, dropout, edge_dim, deterministic, dtype, param_dtype,
        precision, kernel_init, implementation, forward_mode, rngs: as in `GATConv`.
    """

    kind: ClassVar[str] = "TransformerConv"

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        *,
        beta: bool = False,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        root_weight: bool = True,
        deterministic: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: nnx.Initializer = _XAVIER,
        implementation: Implementation | None = None,
        forward_mode: bool = False,
        rngs: nnx.Rngs,
    ):
        self._build(locals())
