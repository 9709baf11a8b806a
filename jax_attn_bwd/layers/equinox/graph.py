"""Graph attention layers as Equinox modules."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar, Literal, overload

import equinox as eqx
import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.types import Fill, Implementation
from jax_attn_bwd.layers.equinox.weights import XAVIER, linear
from jax_attn_bwd.layers.graph import Config, array_shapes, attend, linear_layers
from jax_attn_bwd.ops.graph import BipartiteCSC


class _Conv(eqx.Module):
    inference: bool
    config: Config = eqx.field(static=True)
    linears: tuple[str, ...] = eqx.field(static=True)

    kind: ClassVar[str]

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
        self, x: jax.Array | tuple[jax.Array, jax.Array], graph: BipartiteCSC,
        edge_attr: jax.Array | None = None, *, return_attention_weights: Literal[False] = False,
        key: jax.Array | None = None, inference: bool | None = None,
    ) -> jax.Array: ...
    @overload
    def __call__(
        self, x: jax.Array | tuple[jax.Array, jax.Array], graph: BipartiteCSC,
        edge_attr: jax.Array | None = None, *, return_attention_weights: Literal[True],
        key: jax.Array | None = None, inference: bool | None = None,
    ) -> tuple[jax.Array, jax.Array]: ...
    @overload
    def __call__(
        self, x: jax.Array | tuple[jax.Array, jax.Array], graph: BipartiteCSC,
        edge_attr: jax.Array | None = None, *, return_attention_weights: bool, key: jax.Array | None = None,
        inference: bool | None = None,
    ) -> jax.Array | tuple[jax.Array, jax.Array]: ...
    # fmt: on
    def __call__(
        self,
        x: jax.Array | tuple[jax.Array, jax.Array],
        graph: BipartiteCSC,
        edge_attr: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
        inference: bool | None = None,
        return_attention_weights: bool = False,
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Attends.

        Args:
          x: `[..., num_src, channels]`, any batch axes for one graph. The destinations are its first
            `num_dst` rows, as in a sampled neighbourhood. Where they are other nodes (items that users
            rate), hand over a pair (x_src, x_dst).
          graph: the edges, from sources to destinations.
          edge_attr: `[..., nnz, edge_dim]` (or `[nnz]` for one), in the caller's edge order; with `edge_dim`.
          key: a PRNG key for dropout; not needed without it.
          inference: True = no dropout; None takes the attribute, which `equinox.nn.inference_mode` sets.
          return_attention_weights: also return the weights.

        Returns:
          out: `[..., num_dst, heads * out_channels]`, or `[..., num_dst, out_channels]` without `concat`.
          weights: `[..., nnz, heads]`, with `return_attention_weights`, in the caller's edge order, then
            those of the loops of `add_self_loops`.

        Raises:
          ValueError: shapes disagree. TypeError: an argument is of the wrong kind.
        """
        # Parameters by name, and a key where a call drops edges.
        layers = {name: partial(_by_row, getattr(self, name)) for name in self.linears}
        vectors = {name: getattr(self, name) for name in array_shapes(self.config)}
        training = self.config.dropout and not (self.inference if inference is None else inference)
        if training and key is None:
            expected = "be given while there is dropout"
            remedy = "pass inference=True or use equinox.nn.inference_mode"
            raise ValueError(checks.message(self.config.kind, "key", expected, None, remedy))
        return attend(
            self.config,
            layers,
            vectors,
            x,
            graph,
            edge_attr,
            key if training else None,
            return_attention_weights,
        )


def _by_row(linear: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Applies a linear layer of one vector to `[..., in]`."""
    for _ in range(x.ndim - 1):
        linear = jax.vmap(linear)
    return linear(x)


class GATConv(_Conv):
    """Graph attention (GAT), with the arguments of PyTorch Geometric's `GATConv`.

    Parameters: `lin` (or for a pair of widths `lin_src` and `lin_dst`), `att_src`, `att_dst`, `bias`;
    `lin_edge` and `att_edge` with `edge_dim`; `res` with `residual`; None where there is none. `load_torch`
    takes those of PyTorch Geometric; for differences see `jax_attn_bwd.layers.graph`.

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
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        residual: bool = False,
        add_self_loops: bool = True,
        fill_value: float | Fill = "mean",
        inference: bool = False,
        implementation: Implementation | None = None,
        forward_mode: bool = False,
        dtype: Any = None,
        key: jax.Array,
    ):
        """Makes the layer.

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
          inference: True = no dropout.
          implementation, forward_mode: options of `jax_attn_bwd.graph_attention`.
          dtype: dtype of the parameters.
          key: a PRNG key for the parameters.
        """
        self._build(locals())


class GATv2Conv(_Conv):
    """Dynamic graph attention (GATv2), with the arguments of PyTorch Geometric's `GATv2Conv`.

    Parameters: `lin_l`, `lin_r` (none with `share_weights`), `att`, `bias`; `lin_edge` with `edge_dim`;
    `res` with `residual`; None where there is none. `load_torch` takes those of PyTorch Geometric.
    """

    lin_l: eqx.nn.Linear
    att: jax.Array
    lin_r: eqx.nn.Linear | None = None
    lin_edge: eqx.nn.Linear | None = None
    res: eqx.nn.Linear | None = None
    bias: jax.Array | None = None

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
        inference: bool = False,
        implementation: Implementation | None = None,
        forward_mode: bool = False,
        dtype: Any = None,
        key: jax.Array,
    ):
        """Makes the layer.

        Arguments as in `GATConv`, and

        Args:
          share_weights: whether destinations use the linear layer of sources, `lin_l`.
        """
        self._build(locals())


class TransformerConv(_Conv):
    """Graph transformer attention, with the arguments of PyTorch Geometric's `TransformerConv`.

    Parameters: `lin_key`, `lin_query`, `lin_value`, `lin_skip` (with `root_weight`), `lin_beta` (with
    `beta`), `lin_edge` (with `edge_dim`); None where there is none. `load_torch` takes those of PyTorch
    Geometric.
    """

    lin_key: eqx.nn.Linear
    lin_query: eqx.nn.Linear
    lin_value: eqx.nn.Linear
    lin_skip: eqx.nn.Linear | None = None
    lin_beta: eqx.nn.Linear | None = None
    lin_edge: eqx.nn.Linear | None = None

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
        inference: bool = False,
        implementation: Implementation | None = None,
        forward_mode: bool = False,
        dtype: Any = None,
        key: jax.Array,
    ):
        """Makes the layer.

        Arguments as in `GATConv`, where `bias` is that of the linear layers of nodes, and

        Args:
          beta: whether a learned gate mixes attention and skip connection, in place of their sum.
          root_weight: whether to add a linear layer of the destinations; without it `beta` is ignored.
        """
        self._build(locals())
