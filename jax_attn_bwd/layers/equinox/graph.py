"""Graph attention layers as Equinox modules."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar, Literal, Unpack, overload

import equinox as eqx
import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd.layers.equinox.linear import XAVIER, linear
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


class _Conv(ChecksNames, eqx.Module):
    inference: bool
    config: Config = eqx.field(static=True)
    linears: tuple[str, ...] = eqx.field(static=True)

    def _build(self, arguments: dict[str, Any]) -> None:
        """Makes the layer of the arguments of its constructor."""
        for field in fields(self):
            # Equinox flattens what the instance holds: a default of the class it takes for missing.
            if field.default is None:
                setattr(self, field.name, None)
        config, dtype = Config.of(self.kind, arguments), arguments["dtype"]
        specs = linear_layers(config, config.in_channels)
        shapes = array_shapes(config)
        keys = iter(jax.random.split(arguments["key"], len(specs) + len(shapes)))
        for name, (width, out, bias) in specs.items():
            made = linear(width, out, bias=0.0 if bias else None, dtype=dtype, key=next(keys))
            setattr(self, name, made)
        for name, shape in shapes.items():
            init = jax.nn.initializers.zeros if name == "bias" else XAVIER
            kind = jnp.result_type(float) if dtype is None else dtype
            setattr(self, name, init(next(keys), shape, kind))
        self.config, self.linears, self.inference = config, tuple(specs), arguments["inference"]

    # fmt: off
    @overload
    def __call__(
        self, x: Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        key: jax.Array | None = None, inference: bool | None = None,
        return_attention_weights: Literal[False] = False) -> jax.Array: ...
    @overload
    def __call__(
        self, x: Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        key: jax.Array | None = None, inference: bool | None = None,
        return_attention_weights: Literal[True]) -> tuple[jax.Array, jax.Array]: ...
    @overload
    def __call__(
        self, x: Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        key: jax.Array | None = None, inference: bool | None = None,
        return_attention_weights: bool) -> jax.Array | tuple[jax.Array, jax.Array]: ...
    # fmt: on
    def __call__(
        self, x: Nodes, graph: BipartiteCSC, edge_attr: jax.Array | None = None, *,
        key: jax.Array | None = None, inference: bool | None = None,
        return_attention_weights: bool = False,
    ) -> Result:  # fmt: skip
        """Attends; arguments and results, but `key` and `inference`, see in `jax_attn_bwd.layers.graph`.

        Args:
          key: a PRNG key for dropout; not needed without it.
          inference: True = no dropout; None takes the attribute, which `equinox.nn.inference_mode` sets.
        """
        # Parameters by name, and a key where a call drops edges.
        linears = {name: partial(_by_row, getattr(self, name)) for name in self.linears}
        arrays = {name: getattr(self, name) for name in array_shapes(self.config)}
        training = self.config.dropout and not (self.inference if inference is None else inference)
        if training and key is None:
            expected = "be given while there is dropout"
            remedy = "pass inference=True or use equinox.nn.inference_mode"
            raise ValueError(checks.message(self.config.kind, "key", expected, None, remedy))
        key = key if training else None
        return attend(self.config, linears, arrays, x, graph, edge_attr, key, return_attention_weights)


def _by_row(linear: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Applies a linear layer of one vector to `[..., in]`."""
    for _ in range(x.ndim - 1):
        linear = jax.vmap(linear)
    return linear(x)


class GATConv(_Conv):
    """Graph attention (GAT), with the arguments of PyTorch Geometric's `GATConv`.

    Parameters are those that `jax_attn_bwd.layers.graph` lists; None where there is none.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_attn_bwd import BipartiteCSC
      >>> from jax_attn_bwd.layers.equinox import GATConv
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=3)
      >>> layer = GATConv(5, 4, heads=2, key=jax.random.key(0))
      >>> layer(jnp.ones((3, 5)), graph).shape
      (3, 8)
    """

    lin: eqx.nn.Linear | None = None
    lin_src: eqx.nn.Linear | None = None
    lin_dst: eqx.nn.Linear | None = None
    lin_edge: eqx.nn.Linear | None = None
    res: eqx.nn.Linear | None = None
    att_src: jax.Array | None = None
    att_dst: jax.Array | None = None
    att_edge: jax.Array | None = None
    bias: jax.Array | None = None

    kind: ClassVar[str] = "GATConv"

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        *,
        inference: bool = False,
        dtype: Any = None,
        key: jax.Array,
        **options: Unpack[GATConvKeywords],
    ):
        """Makes the layer.

        Args:
          in_channels, out_channels, heads, concat, options: see `jax_attn_bwd.layers.graph`.
          inference: True = no dropout.
          dtype: dtype of the parameters.
          key: a PRNG key for the parameters.
        """
        self._build(locals())


class GATv2Conv(_Conv):
    """Dynamic graph attention (GATv2), with the arguments of PyTorch Geometric's `GATv2Conv`.

    Parameters are those that `jax_attn_bwd.layers.graph` lists; None where there is none.
    """

    lin_l: eqx.nn.Linear
    att: jax.Array
    lin_r: eqx.nn.Linear | None = None
    lin_edge: eqx.nn.Linear | None = None
    res: eqx.nn.Linear | None = None
    bias: jax.Array | None = None

    kind: ClassVar[str] = "GATv2Conv"

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, heads: int = 1, concat: bool = True, *,
        inference: bool = False, dtype: Any = None, key: jax.Array, **options: Unpack[GATv2ConvKeywords],
    ):  # fmt: skip
        """Makes the layer, of the arguments of `GATConv` and `share_weights`."""
        self._build(locals())


class TransformerConv(_Conv):
    """Graph transformer attention, with the arguments of PyTorch Geometric's `TransformerConv`.

    Parameters are those that `jax_attn_bwd.layers.graph` lists; None where there is none.
    """

    lin_key: eqx.nn.Linear
    lin_query: eqx.nn.Linear
    lin_value: eqx.nn.Linear
    lin_skip: eqx.nn.Linear | None = None
    lin_beta: eqx.nn.Linear | None = None
    lin_edge: eqx.nn.Linear | None = None

    kind: ClassVar[str] = "TransformerConv"

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, heads: int = 1, concat: bool = True, *,
        inference: bool = False, dtype: Any = None, key: jax.Array,
        **options: Unpack[TransformerConvKeywords],
    ):  # fmt: skip
        """Makes the layer, of the arguments of `GATConv`, but the options."""
        self._build(locals())
