"""Graph attention layers as Haiku modules."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal, overload

import haiku as hk
import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.types import Fill, Implementation
from jax_attn_bwd.layers.graph import ChecksNames, Config, Nodes, Result, array_shapes, attend, linear_layers
from jax_attn_bwd.ops.graph import BipartiteCSC


@dataclass(eq=False, repr=False)
class _Conv(ChecksNames, hk.Module):
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
        self, x: Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        is_training: bool | None = None, return_attention_weights: Literal[False] = False
    ) -> jax.Array: ...
    @overload
    def __call__(
        self, x: Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        is_training: bool | None = None, return_attention_weights: Literal[True]
    ) -> tuple[jax.Array, jax.Array]: ...
    @overload
    def __call__(
        self, x: Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        is_training: bool | None = None, return_attention_weights: bool
    ) -> jax.Array | tuple[jax.Array, jax.Array]: ...
    # fmt: on
    def __call__(
        self, x: Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        is_training: bool | None = None, return_attention_weights: bool = False,
    ) -> Result:  # fmt: skip
        """Attends; arguments and results, but `is_training`, see in `jax_attn_bwd.layers.graph`.

        Args:
          is_training: whether to drop out, with `hk.next_rng_key()`; must be given to a layer with dropout.
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

    For other arguments, parameters, calls and differences from there see `jax_attn_bwd.layers.graph`.

    Args:
      w_init: initializer of the linear layers and the attention vectors; Xavier-uniform if None.
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

    All as in `GATConv`, with the argument `share_weights`.
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

    All as in `GATConv`, but that it takes `beta` and `root_weight`, and not what only the other two take.
    """

    _: KW_ONLY
    beta: bool = False
    root_weight: bool = True

    kind: ClassVar[str] = "TransformerConv"
