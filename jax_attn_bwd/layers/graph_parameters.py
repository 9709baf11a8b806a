"""Which parameters a `GATConv`, `GATv2Conv` or `TransformerConv` has, in any framework.

Arguments and parameters have the names of PyTorch Geometric, whose kernels are transposed [T]:

    PyTorch Geometric                  linen and NNX        Haiku            Equinox
    <linear>.weight                    <linear>.kernel [T]  <linear>/w [T]   <linear>.weight
    <linear>.bias                      <linear>.bias        <linear>/b       <linear>.bias
    att_src, att_dst, att_edge, att    the same names, [H, C] where it has [1, H, C]
    bias                               the same name

with <linear> one of lin, lin_src, lin_dst (GATConv); lin_l, lin_r (GATv2Conv); lin_key, lin_query, lin_value,
lin_skip, lin_beta (TransformerConv); lin_edge, res. H heads, C channels of a head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.types import Fill, Implementation
from jax_attn_bwd.layers.arguments import positive
from jax_attn_bwd.ops.graph.self_loops import FILLS


@dataclass(frozen=True)
class Config:
    """What a layer is built from."""

    kind: str  # the name of its class
    out_channels: int  # C
    heads: int  # H
    concat: bool
    dropout: float
    edge_dim: int | None
    bias: bool
    implementation: Implementation | None
    negative_slope: float = 0.2  # GATConv, GATv2Conv
    residual: bool = False  # GATConv, GATv2Conv
    add_self_loops: bool = False  # GATConv, GATv2Conv, whose default is True
    fill_value: float | Fill = "mean"  # GATConv, GATv2Conv
    share_weights: bool = False  # GATv2Conv
    root_weight: bool = True  # TransformerConv
    beta: bool = False  # TransformerConv
    forward_mode: bool = False
    in_channels: int | tuple[int, int] | None = None  # None where it is read off the input

    def __post_init__(self) -> None:
        """Checks everything that the operator does not."""
        for name in ("out_channels", "heads") + (() if self.edge_dim is None else ("edge_dim",)):
            positive(self.kind, name, getattr(self, name))
        flags = ("concat", "bias", "residual", "add_self_loops", "share_weights", "root_weight", "beta")
        for name in (*flags, "forward_mode"):
            checks.flag(self.kind, name, getattr(self, name))
        if isinstance(self.fill_value, str):
            checks.choice(self.kind, "fill_value", self.fill_value, FILLS)
        else:
            checks.python_float(self.kind, "fill_value", self.fill_value)
        checks.rate(self.kind, "dropout", self.dropout)

    @classmethod
    def of(cls, kind: str, arguments: Mapping[str, Any]) -> "Config":
        """From the arguments of a constructor by name, among them those of the framework alone."""
        names = {field.name for field in fields(cls)} - {"kind"}
        given = {name: x for name, x in arguments.items() if name in names}
        if "in_channels" in given:
            given["in_channels"] = channels(kind, given["in_channels"])
        return cls(kind, **given)

    @property
    def width(self) -> int:
        """The width of projected nodes, H * C."""
        return self.heads * self.out_channels

    @property
    def out_width(self) -> int:
        """The width of the output, H * C or C."""
        return self.width if self.concat else self.out_channels


class Linear(NamedTuple):
    """A linear layer that a layer is made of."""

    in_channels: Any  # an int; None where the framework reads it off the input
    out_channels: int
    bias: bool = False


def channels(kind: str, in_channels: Any) -> int | tuple[int, int]:
    """`in_channels`, checked: one width, or those of sources and destinations."""
    if not isinstance(in_channels, tuple | list):
        return positive(kind, "in_channels", in_channels)
    if len(in_channels) != 2:
        expected = "be an int or a pair of them"
        raise ValueError(checks.message(kind, "in_channels", expected, repr(in_channels)))
    source, destination = (positive(kind, "in_channels", n) for n in in_channels)
    return source, destination


def linears(config: Config, in_channels: Any) -> dict[str, Linear]:
    """The linear layers by name; `in_channels` is a width, a pair of them, or has None for them."""
    pair = isinstance(in_channels, tuple)
    source, destination = in_channels if pair else (in_channels, in_channels)
    width, bias = config.width, config.bias
    if config.kind == "GATConv" and pair:
        found = {"lin_src": Linear(source, width), "lin_dst": Linear(destination, width)}
    elif config.kind == "GATConv":
        found = {"lin": Linear(source, width)}
    elif config.kind == "GATv2Conv":
        found = {"lin_l": Linear(source, width, bias)}
        if not config.share_weights:
            found["lin_r"] = Linear(destination, width, bias)
    else:
        sides = {"lin_key": source, "lin_query": destination, "lin_value": source}
        found = {name: Linear(n, width, bias) for name, n in sides.items()}
        if config.root_weight:
            found["lin_skip"] = Linear(destination, config.out_width, bias)
        if config.root_weight and config.beta:
            found["lin_beta"] = Linear(3 * config.out_width, 1)
    if config.edge_dim is not None:
        found["lin_edge"] = Linear(config.edge_dim, width)
    if config.residual:
        found["res"] = Linear(destination, config.out_width)
    return found


def arrays(config: Config) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that are no linear layer, by name; `bias` starts at 0."""
    names = {"GATConv": ("att_src", "att_dst"), "GATv2Conv": ("att",)}.get(config.kind, ())
    if config.kind == "GATConv" and config.edge_dim is not None:
        names += ("att_edge",)
    shape: tuple[int, ...] = (config.heads, config.out_channels)
    found = dict.fromkeys(names, shape)
    if config.bias and config.kind != "TransformerConv":
        found["bias"] = (config.out_width,)
    return found
