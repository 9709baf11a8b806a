"""Graph attention layers as Flax linen modules."""

from dataclasses import field
from typing import Any, ClassVar, Literal, overload

import jax
import jax.numpy as jnp
from flax import linen as nn

from jax_attn_bwd._core.types import Fill, Implementation
from jax_attn_bwd.layers.graph import ChecksNames, Config, Nodes, Result, array_shapes, attend, linear_layers
from jax_attn_bwd.ops.graph import BipartiteCSC


class _Conv(ChecksNames, nn.Module):
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

    # fmt: off
    @overload
    def __call__(
        self, x: Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        deterministic: bool | None = None, return_attention_weights: Literal[False] = False
    ) -> jax.Array: ...
    @overload
    def __call__(
        self, x: Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        deterministic: bool | None = None, return_attention_weights: Literal[True]
    ) -> tuple[jax.Array, jax.Array]: ...
    @overload
    def __call__(
        self, x: Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        deterministic: bool | None = None, return_attention_weights: bool
    ) -> jax.Array | tuple[jax.Array, jax.Array]: ...
    # fmt: on
    @nn.compact
    def __call__(
        self, x: Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        deterministic: bool | None = None, return_attention_weights: bool = False,
    ) -> Result:  # fmt: skip
        """Attends; arguments and results, but `deterministic`, see in `jax_attn_bwd.layers.graph`.

        Args:
          deterministic: True = no dropout; None takes the attribute. With dropout one of the two must be
            given, and an rng "dropout" where it is False.
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

    For other attributes, parameters, calls and differences from there see `jax_attn_bwd.layers.graph`.

    Attributes:
      deterministic: True = no dropout; may be given at the call instead. (Sums repeat bit for bit anyway.)
      dtype: dtype of the computation; None infers it from inputs and parameters.
      param_dtype: dtype of the parameters.
      precision: precision of the linear layers.
      kernel_init: initializer of the linear layers and the attention vectors.

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

    All as in `GATConv`, with the attribute `share_weights`.
    """

    negative_slope: float = 0.2
    share_weights: bool = False
    residual: bool = False
    add_self_loops: bool = True
    fill_value: float | Fill = "mean"

    kind: ClassVar[str] = "GATv2Conv"


class TransformerConv(_Conv):
    """Graph transformer attention, with the arguments of PyTorch Geometric's `TransformerConv`.

    All as in `GATConv`, but that it has `beta` and `root_weight` in the place of what follows `forward_mode`.
    """

    beta: bool = False
    root_weight: bool = True

    kind: ClassVar[str] = "TransformerConv"
