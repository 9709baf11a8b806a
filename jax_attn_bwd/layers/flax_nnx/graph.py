"""Graph attention layers as Flax NNX modules."""

from functools import partial
from typing import Any, ClassVar, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from flax import nnx

from jax_attn_bwd.layers.graph import (
    ChecksNames,
    Config,
    GATConvKeywords,
    GATv2ConvKeywords,
    Nodes,
    Result,
    TransformerConvKeywords,
    array_shapes,
    attend,
    linear_layers,
)
from jax_attn_bwd.ops.graph import BipartiteCSC

_XAVIER = nnx.initializers.xavier_uniform()


class _Conv(ChecksNames, nnx.Module):
    def _build(self, arguments: dict[str, Any]) -> None:
        """Makes the layer of the arguments of its constructor."""
        config = Config.of(self.kind, arguments)
        rngs, kernel_init, param_dtype = (arguments[name] for name in ("rngs", "kernel_init", "param_dtype"))
        shared = ("dtype", "param_dtype", "precision", "kernel_init", "rngs")
        linear: Any = partial(nnx.Linear, **{name: arguments[name] for name in shared})
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
        self, x: Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        deterministic: bool | None = None, rngs: nnx.Rngs | None = None,
        return_attention_weights: Literal[False] = False) -> jax.Array: ...
    @overload
    def __call__(
        self, x: Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        deterministic: bool | None = None, rngs: nnx.Rngs | None = None,
        return_attention_weights: Literal[True]) -> tuple[jax.Array, jax.Array]: ...
    @overload
    def __call__(
        self, x: Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        deterministic: bool | None = None, rngs: nnx.Rngs | None = None,
        return_attention_weights: bool) -> jax.Array | tuple[jax.Array, jax.Array]: ...
    # fmt: on
    def __call__(
        self, x: Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        deterministic: bool | None = None, rngs: nnx.Rngs | None = None,
        return_attention_weights: bool = False,
    ) -> Result:  # fmt: skip
        """Attends; arguments and results, but `deterministic` and `rngs`, see in `jax_attn_bwd.layers.graph`.

        Args:
          deterministic: True = no dropout; None takes what `train()`, `eval()` or the constructor set.
          rngs: whose "dropout" is drawn from in place of the layer's own.
        """
        linears = {name: getattr(self, name) for name in self.linears}
        arrays = {name: getattr(self, name)[...] for name in array_shapes(self.config)}
        deterministic = self.dropout.deterministic if deterministic is None else deterministic
        key = None
        if self.config.dropout and not deterministic:
            key = self.dropout.rngs() if rngs is None else rngs.dropout()
        return attend(self.config, linears, arrays, x, graph, edge_attr, key, return_attention_weights)


class GATConv(_Conv):
    """Graph attention (GAT), with the arguments of PyTorch Geometric's `GATConv`.

    Args:
      in_channels, out_channels, heads, concat, options: see `jax_attn_bwd.layers.graph`, which also tells the
        parameters, what a call takes, and the differences from PyTorch Geometric.
      deterministic: True = no dropout; `train()` and `eval()` set it. (Sums repeat bit for bit anyway.)
      dtype: dtype of the computation; None infers it from inputs and parameters.
      param_dtype: dtype of the parameters.
      precision: precision of the linear layers.
      kernel_init: initializer of the linear layers and the attention vectors.
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
        deterministic: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: nnx.Initializer = _XAVIER,
        rngs: nnx.Rngs,
        **options: Unpack[GATConvKeywords],
    ):
        self._build(locals())


class GATv2Conv(_Conv):
    """Dynamic graph attention (GATv2), with the arguments of PyTorch Geometric's `GATv2Conv`.

    All as in `GATConv`, with `share_weights` among the options.
    """

    kind: ClassVar[str] = "GATv2Conv"

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, heads: int = 1, concat: bool = True, *,
        deterministic: bool = False, dtype: Any = None, param_dtype: Any = jnp.float32,
        precision: Any = None, kernel_init: nnx.Initializer = _XAVIER, rngs: nnx.Rngs,
        **options: Unpack[GATv2ConvKeywords],
    ):  # fmt: skip
        self._build(locals())


class TransformerConv(_Conv):
    """Graph transformer attention, with the arguments of PyTorch Geometric's `TransformerConv`.

    All as in `GATConv`, but the options, see `jax_attn_bwd.layers.graph`.
    """

    kind: ClassVar[str] = "TransformerConv"

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, heads: int = 1, concat: bool = True, *,
        deterministic: bool = False, dtype: Any = None, param_dtype: Any = jnp.float32,
        precision: Any = None, kernel_init: nnx.Initializer = _XAVIER, rngs: nnx.Rngs,
        **options: Unpack[TransformerConvKeywords],
    ):  # fmt: skip
        self._build(locals())
