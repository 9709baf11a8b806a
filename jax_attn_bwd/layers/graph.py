"""`GATConv`, `GATv2Conv` and `TransformerConv` in every framework: their arguments, parameters and calls.

    GATConv          graph_attention of lin(x), or of lin_src(x_src) and lin_dst(x_dst)
    GATv2Conv        graph_attention_v2 of lin_l(x_src), lin_r(x_dst)
    TransformerConv  graph_transformer_attention of lin_query(x_dst), lin_key(x_src), lin_value(x_src)

each with lin_edge(edge_attr), then `+ res(x_dst)` and `+ bias`; for TransformerConv `+ lin_skip(x_dst)`, or
with `beta` the two mixed by the gate sigmoid(lin_beta([out, skip, out - skip])).

Arguments and parameters have the names of PyTorch Geometric, whose kernels are transposed [T]:

    PyTorch Geometric                  linen and NNX        Haiku            Equinox
    <linear>.weight                    <linear>.kernel [T]  <linear>/w [T]   <linear>.weight
    <linear>.bias                      <linear>.bias        <linear>/b       <linear>.bias
    att_src, att_dst, att_edge, att    the same names, [H, C] where it has [1, H, C]
    bias                               the same name

with <linear> one of lin, for a pair lin_src and lin_dst (GATConv); lin_l, lin_r but with `share_weights`
(GATv2Conv); lin_key, lin_query, lin_value, lin_skip with `root_weight`, lin_beta with `beta`
(TransformerConv); lin_edge, att_edge with `edge_dim`; res with `residual`. H heads, C channels of a head.

Constructors take, beside what their framework's layers take:
  * `in_channels` (NNX and Equinox): the width of the nodes, or those (of sources, of destinations);
  * `out_channels`: the width of a head, C;
  * `heads` (1): the number of heads, H;
  * `concat` (True): False takes the mean over heads;
  * `dropout` (0.0): the probability of dropping an edge's weight;
  * `edge_dim` (None): the width of edge features; None = no edge features;
  * `bias` (True): whether to learn an additive bias; of TransformerConv, whether the linear layers of nodes
    have one;
  * `implementation` (None), `forward_mode` (False): options of `jax_attn_bwd.graph_attention`;
  * GATConv and GATv2Conv: `negative_slope` (0.2), the slope of the leaky ReLU below 0; `residual` (False),
    whether to add a linear layer of the destinations; `add_self_loops` (True, as there), whether to attend
    along `graph.with_self_loops()` instead: set it False for nodes of two kinds, where source i is not
    destination i; `fill_value` ("mean"), `edge_attr` of these loops: a number, or "mean", "add", "min"
    or "max" of those into the node;
  * GATv2Conv: `share_weights` (False), whether destinations use the linear layer of sources, `lin_l`;
  * TransformerConv: `beta` (False), whether a learned gate mixes attention and skip connection, in place of
    their sum; `root_weight` (True), whether to add a linear layer of the destinations; without it `beta` is
    ignored.

Calls take, beside how their framework tells of dropout:
  * `x`: `[..., num_src, channels]`, any batch axes for one graph. The destinations are its first `num_dst`
    rows, as in a sampled neighbourhood. Where they are other nodes (items that users rate), hand over a pair
    (x_src, x_dst), which in linen and Haiku gets a linear layer for each side;
  * `graph`: a `jax_attn_bwd.BipartiteCSC`, the edges from sources to destinations;
  * `edge_attr`: `[..., nnz, edge_dim]` (or `[nnz]` for one), in the caller's edge order; with `edge_dim`;
  * `return_attention_weights`: also return the weights.

They return out `[..., num_dst, heads * out_channels]`, or `[..., num_dst, out_channels]` without `concat`;
with `return_attention_weights` also weights `[..., nnz, heads]`, in the caller's edge order, then those of
the loops of `add_self_loops`; of a traced graph with loops of its own as many rows of 0 follow, for these are
replaced. Shapes that disagree are a ValueError, arguments of the wrong kind a TypeError.

With `add_self_loops`, which a checkpoint does not tell of, the graph is built anew at each call, or trace,
and of a traced graph at each run, by two sorts of its edges. Faster is to build `graph.with_self_loops()`
once, to hand that in, and to set `add_self_loops=False`.

Where the layers differ from PyTorch Geometric's:
  * they take a `BipartiteCSC` for an `edge_index`, and return attention weights `[nnz, H]` in the caller's
    edge order, added self-loops last, after dropout (its TransformerConv: before);
  * an array x holds the destinations also where there are more sources; there is no (x_src, None);
  * a layer with `edge_dim` must be given `edge_attr`, and one without must not;
  * nodes and edges may have batch axes in front, `[..., num_src, channels]`, for one graph (its "static
    graphs"); with dropout every entry has its own; an array of a pair that has none is shared;
  * kernels and attention vectors start Xavier-uniform in all three (its TransformerConv's uniform in
    +-1 / sqrt(fan-in)), and all biases 0 (those of its linear layers likewise).

References:
  Velickovic et al., Graph attention networks, arXiv:1710.10903, 2018. Brody et al., How attentive are graph
  attention networks?, arXiv:2105.14491, 2022. Shi et al., Masked label prediction, arXiv:2009.03509, 2021.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import accumulator_dtype, to_rank
from jax_attn_bwd._core.types import Fill, Implementation
from jax_attn_bwd.layers.torch_weights import from_torch as from_torch
from jax_attn_bwd.ops.graph import (
    BipartiteCSC,
    graph_attention,
    graph_attention_v2,
    graph_transformer_attention,
)
from jax_attn_bwd.ops.graph.arguments import check_graph, rows_of_destinations
from jax_attn_bwd.ops.graph.structure import FILLS, is_traced

Linears = Mapping[str, Callable[[jax.Array], jax.Array]]
Arrays = Mapping[str, jax.Array]
Nodes = jax.Array | tuple[jax.Array, jax.Array]
Result = jax.Array | tuple[jax.Array, jax.Array]


class Keywords(TypedDict, total=False):
    """Lists what every layer may be given by name, in every framework."""

    dropout: float
    edge_dim: int | None
    bias: bool
    implementation: Implementation | None
    forward_mode: bool


class GATConvKeywords(Keywords, total=False):
    """Lists what `GATConv` may be given by name."""

    negative_slope: float
    residual: bool
    add_self_loops: bool
    fill_value: float | Fill


class GATv2ConvKeywords(GATConvKeywords, total=False):
    """Lists what `GATv2Conv` may be given by name."""

    share_weights: bool


class TransformerConvKeywords(Keywords, total=False):
    """Lists what `TransformerConv` may be given by name."""

    beta: bool
    root_weight: bool


_KEYWORDS: dict[str, Any] = {
    "GATConv": GATConvKeywords,
    "GATv2Conv": GATv2ConvKeywords,
    "TransformerConv": TransformerConvKeywords,
}


@dataclass(frozen=True)
class Config:
    """Holds what a layer is built from."""

    kind: str  # the name of its class
    out_channels: int  # C
    heads: int  # H
    concat: bool
    dropout: float = 0.0
    edge_dim: int | None = None
    bias: bool = True
    implementation: Implementation | None = None
    negative_slope: float = 0.2  # GATConv, GATv2Conv
    residual: bool = False  # GATConv, GATv2Conv
    add_self_loops: bool = True  # GATConv, GATv2Conv
    fill_value: float | Fill = "mean"  # GATConv, GATv2Conv
    share_weights: bool = False  # GATv2Conv
    root_weight: bool = True  # TransformerConv
    beta: bool = False  # TransformerConv
    forward_mode: bool = False
    in_channels: int | tuple[int, int] | None = None  # None where it is read off the input

    def __post_init__(self) -> None:
        """Checks everything that the operator does not."""
        for name in ("out_channels", "heads") + (() if self.edge_dim is None else ("edge_dim",)):
            checks.integer(self.kind, name, getattr(self, name), least=1)
        flags = ("concat", "bias", "residual", "add_self_loops", "share_weights", "root_weight", "beta")
        for name in (*flags, "forward_mode"):
            checks.flag(self.kind, name, getattr(self, name))
        if isinstance(self.fill_value, str):
            checks.choice(self.kind, "fill_value", self.fill_value, FILLS)
        elif checks.is_array(self.fill_value):
            expected = f"be a number or one of {FILLS}"
            got = f"an array of shape {np.shape(self.fill_value)}"
            remedy = (
                "add the loops before: graph, edge_attr = graph.with_self_loops(edge_attr, "
                "fill_value=fill_value), with add_self_loops=False"
            )
            raise TypeError(checks.message(self.kind, "fill_value", expected, got, remedy))
        else:
            checks.python_float(self.kind, "fill_value", self.fill_value)
        checks.rate(self.kind, "dropout", self.dropout)

    @classmethod
    def of(cls, kind: str, arguments: Mapping[str, Any]) -> "Config":
        """Takes the arguments of a constructor by name, among them those of the framework alone.

        Where a layer is built before it sees nodes, the keywords of every framework are its `options`.
        """
        names = {field.name for field in fields(cls)} - {"kind"}
        given = dict(arguments)
        if "in_channels" in given:
            allowed = _KEYWORDS[kind]
            given |= checks.complete(f"{kind}.__init__", cls, allowed, given["options"])
            given["in_channels"] = channels(kind, given["in_channels"])
        return cls(kind, **{name: x for name, x in given.items() if name in names})

    @property
    def width(self) -> int:
        """Returns the width of projected nodes, H * C."""
        return self.heads * self.out_channels

    @property
    def out_width(self) -> int:
        """Returns the width of the output, H * C or C."""
        return self.width if self.concat else self.out_channels


class LinearSpec(NamedTuple):
    """Describes a linear layer that a layer is made of."""

    in_channels: Any  # an int; None where the framework reads it off the input
    out_channels: int
    bias: bool = False


def channels(kind: str, in_channels: Any) -> int | tuple[int, int]:
    """Returns `in_channels`, checked: one width, or those of sources and destinations."""
    widths = in_channels if isinstance(in_channels, tuple | list) else (in_channels,)
    if any(n is None or (isinstance(n, int) and n == -1) for n in widths):
        expected, remedy = "be the width of the nodes", "the layers of linen and Haiku read it off the input"
        raise ValueError(checks.message(kind, "in_channels", expected, in_channels, remedy))
    if not isinstance(in_channels, tuple | list):
        return checks.integer(kind, "in_channels", in_channels, least=1)
    if len(in_channels) != 2:
        expected = "be an int or a pair of them"
        raise ValueError(checks.message(kind, "in_channels", expected, repr(in_channels)))
    source, destination = (checks.integer(kind, "in_channels", n, least=1) for n in in_channels)
    return source, destination


def linear_layers(config: Config, in_channels: Any) -> dict[str, LinearSpec]:
    """Returns the linear layers by name; `in_channels` is a width, a pair of them, or has None for them."""
    # What projects the nodes.
    pair = isinstance(in_channels, tuple)
    source, destination = in_channels if pair else (in_channels, in_channels)
    width, bias = config.width, config.bias
    if config.kind == "GATConv" and pair:
        found = {"lin_src": LinearSpec(source, width), "lin_dst": LinearSpec(destination, width)}
    elif config.kind == "GATConv":
        found = {"lin": LinearSpec(source, width)}
    elif config.kind == "GATv2Conv":
        found = {"lin_l": LinearSpec(source, width, bias)}
        if not config.share_weights:
            found["lin_r"] = LinearSpec(destination, width, bias)
    else:
        sides = {"lin_key": source, "lin_query": destination, "lin_value": source}
        found = {name: LinearSpec(n, width, bias) for name, n in sides.items()}
        if config.root_weight:
            found["lin_skip"] = LinearSpec(destination, config.out_width, bias)
        if config.root_weight and config.beta:
            found["lin_beta"] = LinearSpec(3 * config.out_width, 1)
    # What projects the edges, and what skips the attention.
    if config.edge_dim is not None:
        found["lin_edge"] = LinearSpec(config.edge_dim, width)
    if config.residual:
        found["res"] = LinearSpec(destination, config.out_width)
    return found


def array_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters that are no linear layer, by name; `bias` starts at 0."""
    names = {"GATConv": ("att_src", "att_dst"), "GATv2Conv": ("att",)}.get(config.kind, ())
    if config.kind == "GATConv" and config.edge_dim is not None:
        names += ("att_edge",)
    shape: tuple[int, ...] = (config.heads, config.out_channels)
    found = dict.fromkeys(names, shape)
    if config.bias and config.kind != "TransformerConv":
        found["bias"] = (config.out_width,)
    return found


def attend(
    config: Config,
    linears: Linears,
    arrays: Arrays,
    x: Any,
    graph: BipartiteCSC,
    edge_attr: jax.Array | None,
    dropout_key: jax.Array | None,
    return_attention_weights: bool,
) -> Any:
    """Computes the output `[num_dst, H * C or C]` of a layer; `dropout_key` None means no dropout."""
    # Nodes, edges and the graph along which the layer attends.
    graph = check_graph(config.kind, graph)
    x_src, x_dst = _nodes(config, x, graph)
    edge_attr = _edges(config, edge_attr, graph)
    if config.kind != "TransformerConv" and config.add_self_loops:
        graph, edge_attr = _with_self_loops(config, graph, edge_attr)
    # The operator is called with projected nodes, and what skips it is added.
    checks.flag(config.kind, "return_attention_weights", return_attention_weights)
    options: dict[str, Any] = dict(num_heads=config.heads, concat_heads=config.concat)
    options |= dict(implementation=config.implementation, forward_mode=config.forward_mode)
    options |= dict(dropout_rate=0.0 if dropout_key is None else config.dropout, dropout_key=dropout_key)
    options["return_attention_weights"] = return_attention_weights
    if config.kind != "TransformerConv":
        options |= dict(activation="leaky_relu", alpha=config.negative_slope)
    same = not isinstance(x, tuple | list)  # one array holds both sides
    operands_of, operator = _KINDS[config.kind]
    operands = operands_of(config, linears, arrays, x_src, x_dst, edge_attr, same)
    result = operator(graph, **operands, **options)
    out, *weights = result if return_attention_weights else (result,)
    out = _finish(linears, arrays, out, x_dst)
    return (out, *weights) if weights else out


def _gat(config, linears, arrays, x_src, x_dst, edge_attr, same) -> dict[str, Any]:
    of_src = linears.get("lin_src", linears.get("lin"))
    dst = None if same and "lin" in linears else linears.get("lin_dst", of_src)(x_dst)
    vectors = [arrays["att_src"].ravel(), arrays["att_dst"].ravel()]
    edge = None
    if edge_attr is not None:
        # <lin_edge(e), a_edge> = e (W a_edge): nnz x H numbers, where lin_edge(e) is nnz x H * C.
        kernel = linears["lin_edge"](jnp.eye(config.edge_dim, dtype=edge_attr.dtype))
        a_edge = arrays["att_edge"]
        wide = (accumulator_dtype(x.dtype) for x in (kernel, a_edge, edge_attr))
        dtype = max(wide, key=lambda dtype: dtype.itemsize)
        kernel = kernel.astype(dtype).reshape(config.edge_dim, *a_edge.shape)
        edge = edge_attr.astype(dtype) @ (kernel * a_edge.astype(dtype)[None]).sum(-1)
        vectors.append(jnp.ones(config.heads, vectors[0].dtype))
    weights = jnp.concatenate(vectors)
    return dict(src=of_src(x_src), dst=dst, attention_weights=weights, edge=edge)


def _gatv2(config, linears, arrays, x_src, x_dst, edge_attr, same) -> dict[str, Any]:
    of_src = linears["lin_l"]
    dst = None if same and config.share_weights else linears.get("lin_r", of_src)(x_dst)
    edge = None if edge_attr is None else linears["lin_edge"](edge_attr)
    weights = arrays["att"].ravel()
    return dict(src=of_src(x_src), dst=dst, attention_weights=weights, edge=edge)


def _transformer(config, linears, arrays, x_src, x_dst, edge_attr, same) -> dict[str, Any]:
    sides = {"query": x_dst, "key": x_src, "value": x_src, "edge": edge_attr}
    return {name: None if x is None else linears[f"lin_{name}"](x) for name, x in sides.items()}


_KINDS: dict[str, tuple[Callable[..., dict[str, Any]], Callable[..., Any]]] = {
    "GATConv": (_gat, graph_attention),
    "GATv2Conv": (_gatv2, graph_attention_v2),
    "TransformerConv": (_transformer, graph_transformer_attention),
}


def _finish(linears: Linears, arrays: Arrays, out: jax.Array, x_dst: jax.Array) -> jax.Array:
    """Adds what skips the attention, and the bias."""
    if "lin_skip" in linears:
        skip = jnp.broadcast_to(linears["lin_skip"](x_dst), out.shape)
        if "lin_beta" in linears:
            gate = linears["lin_beta"](jnp.concatenate([out, skip, out - skip], -1))
            gate = jax.nn.sigmoid(gate)
            return gate * skip + (1 - gate) * out
        out = out + skip
    if "res" in linears:
        out = out + to_rank(linears["res"](x_dst), out.ndim)
    return out + to_rank(arrays["bias"].astype(out.dtype), out.ndim) if "bias" in arrays else out


def _nodes(config: Config, x: Any, graph: BipartiteCSC) -> tuple[jax.Array, jax.Array]:
    """Returns features of sources and destinations, of the widths that the layer was built for."""
    widths = config.in_channels
    source, destination = widths if isinstance(widths, tuple) else (widths, widths)
    # One array holds the destinations in its first rows.
    if not isinstance(x, tuple | list):
        shared = source if source == destination else None
        x = _rows(config, "x", x, "num_src", graph.num_src, shared)
        if source != destination:
            expected = f"be a pair (x_src, x_dst) with in_channels = {widths}"
            raise ValueError(checks.message(config.kind, "x", expected, "one array"))
        return x, rows_of_destinations(config.kind, "x", "be a pair (x_src, x_dst)", graph, x, "one array")
    # A pair holds both sides.
    if len(x) != 2:
        expected = "be an array or a pair (x_src, x_dst)"
        raise ValueError(checks.message(config.kind, "x", expected, f"{len(x)} of them"))
    if x[1] is None:
        expected = "be an array, not None as in PyTorch Geometric"
        remedy = "pass the features of the destinations, or one array x whose first num_dst rows they are"
        if config.kind == "GATConv":
            remedy += f"; PyTorch Geometric computes what zeros [{graph.num_dst}, channels] give"
        raise TypeError(checks.message(config.kind, "x_dst", expected, None, remedy))
    x_src = _rows(config, "x_src", x[0], "num_src", graph.num_src, source)
    return x_src, _rows(config, "x_dst", x[1], "num_dst", graph.num_dst, destination)


def _rows(config: Config, argument: str, x: Any, name: str, rows: int, width: int | None) -> jax.Array:
    x = checks.floating(config.kind, argument, x)
    if x.ndim < 2 or x.shape[-2] != rows:
        expected = f"have shape [..., {name}, channels] with {name} = {rows}"
        raise ValueError(checks.message(config.kind, argument, expected, x.shape))
    if width is not None:
        shape = (*x.shape[:-1], width)
        checks.shape(config.kind, argument, x, f"[..., {name}, in_channels]", shape)
    return x


def _edges(config: Config, edge_attr: Any, graph: BipartiteCSC) -> jax.Array | None:
    """Returns edge features `[..., nnz, edge_dim]`, 0 in the padding, that lin_edge would read."""
    if (edge_attr is None) != (config.edge_dim is None):
        expected = f"be {'None' if config.edge_dim is None else 'given'} with edge_dim = {config.edge_dim}"
        got = None if edge_attr is None else "an array"
        raise ValueError(checks.message(config.kind, "edge_attr", expected, got))
    if edge_attr is None:
        return None
    edge_attr = checks.floating(config.kind, "edge_attr", edge_attr)
    edge_attr = edge_attr[:, None] if edge_attr.ndim == 1 else edge_attr
    shape = (*edge_attr.shape[:-2], graph.capacity, config.edge_dim)
    checks.shape(config.kind, "edge_attr", edge_attr, "[..., nnz, edge_dim]", shape)
    return jnp.where(to_rank(graph.exists[:, None], edge_attr.ndim), edge_attr, 0)


def _with_self_loops(
    config: Config, graph: BipartiteCSC, edge_attr: jax.Array | None
) -> tuple[BipartiteCSC, jax.Array | None]:
    """Returns the graph with a loop for each node, and its edges' features; a capacity gets room for them."""
    padded = is_traced(graph) or graph.capacity > graph.num_edges
    capacity = graph.capacity + min(graph.num_src, graph.num_dst) if padded else None
    if edge_attr is None:
        return graph.with_self_loops(capacity=capacity), None
    rows = jnp.moveaxis(edge_attr, -2, 0)  # batch axes behind that of the edges
    graph, rows = graph.with_self_loops(rows, fill_value=config.fill_value, capacity=capacity)
    return graph, jnp.moveaxis(rows, 0, -2)


def on_graphs_tuple(layer: Callable[..., Any]) -> Callable[..., Any]:
    """A layer as a function of `jraph.GraphsTuple`, in the manner of `jraph.GAT`.

    Args:
      layer: called as `layer(nodes, structure, edges, **options)`: a layer of this package, or
        `functools.partial(layer.apply, variables)` for linen.

    Returns:
      A function `(graph, structure=None, **options) -> graph`: the given `GraphsTuple` with new nodes, or
      (that, weights) with `return_attention_weights=True`. `structure` is
      `BipartiteCSC.from_jraph(graph)`, built outside `jit`; made on the spot if it is None, which
      needs concrete senders and receivers.

    Example:
      >>> from collections import namedtuple
      >>> import jax.numpy as jnp
      >>> from jax_attn_bwd import graph_attention
      >>> from jax_attn_bwd.layers.graph import on_graphs_tuple
      >>> GraphsTuple = namedtuple("GraphsTuple", "nodes edges senders receivers n_node")
      >>> graph = GraphsTuple(jnp.ones((3, 4)), None, jnp.array([0, 2]), jnp.array([1, 1]), jnp.array([3]))
      >>> gat = on_graphs_tuple(lambda nodes, structure, edges: graph_attention(
      ...     structure, nodes, None, jnp.ones(8), num_heads=2))
      >>> gat(graph).nodes[:, 0].tolist()
      [0.0, 1.0, 0.0]
    """

    def apply(graph: Any, structure: BipartiteCSC | None = None, **options: Any) -> Any:
        structure = BipartiteCSC.from_jraph(graph) if structure is None else structure
        result = layer(graph.nodes, structure, graph.edges, **options)
        nodes, *weights = result if isinstance(result, tuple) else (result,)
        graph = graph._replace(nodes=nodes)
        return (graph, *weights) if weights else graph

    return apply
