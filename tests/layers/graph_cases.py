"""Graph layers: cases, parameters, inputs, and the definition of each layer."""

import jax
import jax.numpy as jnp
from layers.frameworks import graph

from jax_attn_bwd import BipartiteCSC
from jax_attn_bwd.layers.graph import Config, array_shapes, linear_layers
from jax_attn_bwd.ops.graph import reference

N_SRC, N_DST, NNZ, H, C, EDGE = 7, 5, 17, 2, 3, 4

KINDS = ("GATConv", "GATv2Conv", "TransformerConv")

CASES = {  # kind, in_channels, options; an int stands for one array whose first rows are the destinations
    "gat": ("GATConv", 6, {}),
    "gat_pair": ("GATConv", (6, 4), dict(edge_dim=EDGE, residual=True, concat=False, negative_slope=0.1)),
    "gatv2_shared": ("GATv2Conv", 6, dict(share_weights=True, bias=False, residual=True)),
    "gatv2_pair": ("GATv2Conv", (6, 4), dict(edge_dim=EDGE, concat=False, negative_slope=0.3)),
    "transformer": ("TransformerConv", 6, dict(concat=False, root_weight=False, beta=True)),
    "transformer_pair": ("TransformerConv", (6, 4), dict(edge_dim=EDGE, beta=True)),
    "transformer_plain": ("TransformerConv", 6, dict(bias=False)),
}


def build(framework, kind, in_channels, **options):
    """`init(key, *inputs) -> params` and `call(params, *inputs)` of a layer, `params` in the tree of Flax."""
    own = {} if kind == "TransformerConv" else {"add_self_loops": False}
    return graph(framework, kind, in_channels, C, H, **(own | options))


def layout(kind, in_channels, options):
    """(linear layers, shapes of the other parameters) by name."""
    defaults = dict(concat=True, dropout=0.0, edge_dim=None, bias=True, implementation=None)
    config = Config(kind, C, H, **(defaults | options))
    return linear_layers(config, in_channels), array_shapes(config)


def parameters(rng, kind, in_channels, options):
    found, shapes = layout(kind, in_channels, options)
    tree = {}
    for name, (width, out, bias) in found.items():
        tree[name] = {"kernel": jnp.asarray(rng.standard_normal((width, out)))}
        tree[name] |= {"bias": jnp.asarray(rng.standard_normal(out))} if bias else {}
    return tree | {name: jnp.asarray(rng.standard_normal(s)) for name, s in shapes.items()}


def edge_list(rng):
    """(src, dst): the last destination has no edge, and one edge is there twice."""
    src, dst = rng.integers(0, N_SRC, NNZ), rng.integers(0, N_DST - 1, NNZ)
    src[1], dst[1] = src[0], dst[0]
    return src, dst


def inputs(rng, in_channels, options):
    """(x, graph, edge_attr)."""
    graph = BipartiteCSC.from_coo(*edge_list(rng), N_SRC, N_DST)
    edge = jnp.asarray(rng.standard_normal((NNZ, EDGE))) if "edge_dim" in options else None
    if isinstance(in_channels, int):
        return jnp.asarray(rng.standard_normal((N_SRC, in_channels))), graph, edge
    x = zip((N_SRC, N_DST), in_channels, strict=True)
    return tuple(jnp.asarray(rng.standard_normal(shape)) for shape in x), graph, edge


def definition(kind, params, x, graph, edge, options):
    """(out, weights) of a layer in plain formulas around the operators' definitions."""

    def dense(name, x):
        out = x @ params[name]["kernel"]
        return out + params[name]["bias"] if "bias" in params[name] else out

    x_src, x_dst = x if isinstance(x, tuple) else (x, x[:N_DST])
    edge = None if edge is None else dense("lin_edge", edge)
    more = dict(num_heads=H, concat_heads=options.get("concat", True), edge=edge)
    slope = options.get("negative_slope", 0.2)
    if kind == "GATConv":
        one, two = ("lin_src", "lin_dst") if "lin_src" in params else ("lin", "lin")
        a = [params[n].ravel() for n in ("att_src", "att_dst", "att_edge") if n in params]
        out, weights, _ = reference.graph_attention(
            graph, dense(one, x_src), dense(two, x_dst), jnp.concatenate(a), alpha=slope, **more
        )
    elif kind == "GATv2Conv":
        dst = dense("lin_r" if "lin_r" in params else "lin_l", x_dst)
        a = params["att"].ravel()
        out, weights, _ = reference.graph_attention_v2(
            graph, dense("lin_l", x_src), dst, a, alpha=slope, **more
        )
    else:
        q, k, v = dense("lin_query", x_dst), dense("lin_key", x_src), dense("lin_value", x_src)
        out, weights, _ = reference.graph_transformer_attention(graph, q, k, v, **more)
        skip = dense("lin_skip", x_dst) if "lin_skip" in params else 0
        if "lin_beta" in params:
            beta = jax.nn.sigmoid(dense("lin_beta", jnp.concatenate([out, skip, out - skip], 1)))
            return beta * skip + (1 - beta) * out, weights
        out = out + skip
    out = out + dense("res", x_dst) if "res" in params else out
    return (out + params["bias"] if "bias" in params else out), weights
