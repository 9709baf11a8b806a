"""Attention of other packages: PyTorch Geometric, anemoi, local-attention, x-transformers."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from anemoi.models.layers.conv import GraphTransformerConv
from flax import nnx
from local_attention import LocalAttention
from torch_geometric import nn as geometric
from x_transformers import Decoder
from x_transformers.attend import Intermediates

from jax_attn_bwd import BipartiteCSC
from jax_attn_bwd.layers import flax_nnx
from models.compare import Made, Model
from models.language import randomised

LOCAL = "local_attention.local_attention:LocalAttention.forward"
SRC, DST = torch.from_numpy(np.random.default_rng(0).integers(0, 9, (2, 40)))


def conv(kind: str) -> Made:
    layer = randomised(getattr(geometric, kind)(6, 5, heads=3, edge_dim=4))
    nodes = {"x": torch.randn(9, 6).double(), "edge_attr": torch.randn(40, 4).double()}
    return layer, nodes, {"edge_index": torch.stack([SRC, DST])}


def by_layer(ours, original, module, x, edge_index, edge_attr=None):
    kind = getattr(flax_nnx, type(module).__name__)
    layer = kind(6, 5, heads=3, edge_dim=4, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    flax_nnx.load_torch(layer, module.state_dict())
    graph = BipartiteCSC.from_edge_index(edge_index.numpy(), x.shape[0])
    return ours(x=x, edge_attr=edge_attr, layer=layer, graph=graph)


def anemoi() -> Made:
    inputs = {name: torch.randn(9, 3, 4).double() for name in ("query", "key", "value")}
    inputs |= {"edge_attr": torch.randn(40, 3, 4).double()}
    return GraphTransformerConv(4), inputs, {"edge_index": torch.stack([SRC, DST])}


def by_edges(ours, original, module, query, key, value, edge_attr, edge_index, size=None):
    graph = BipartiteCSC.from_edge_index(edge_index.numpy(), 9)
    q, k, v, edge = (x.flatten(1) for x in (query, key, value, edge_attr))
    return ours(q=q, k=k, v=v, edge=edge, graph=graph, heads=3).unflatten(1, (3, -1))


def local(**options: Any) -> Made:
    layer = LocalAttention(window_size=6, use_rotary_pos_emb=False, **options)
    return layer, {name: torch.randn(2, 4, 24, 8).double() for name in "qkv"}, {}


def heads_first(ours, original, module, q, k, v, **told):
    return ours(**{n: x.transpose(1, 2) for n, x in dict(q=q, k=k, v=v).items()}, window=6).transpose(1, 2)


def x_transformers() -> Made:
    options = dict(attn_kv_heads=2, alibi_pos_bias=True, attn_softclamp_logits=True, attn_dim_head=8)
    layer = Decoder(dim=32, depth=2, heads=4, attn_logit_softclamp_value=2.0, **options)
    return randomised(layer), {"x": torch.randn(2, 23, 32).double()}, {}


def attend(ours, original, module, q, k, v, **told):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ours(q=q, k=k, v=v, cap=module.logit_softclamp_value).transpose(1, 2), Intermediates()


MODELS: dict[str, Model] = {
    **{
        kind: Model(partial(conv, kind), f"torch_geometric.nn:{kind}.forward", by_layer, is_layer=True)
        for kind in ("GATConv", "GATv2Conv", "TransformerConv")
    },
    "anemoi's graph transformer": Model(
        anemoi, "anemoi.models.layers.conv:GraphTransformerConv.forward", by_edges
    ),
    "local-attention, exact, causal": Model(
        partial(local, causal=True, exact_windowsize=True),
        LOCAL, heads_first,
    ),
    "local-attention, exact": Model(
        partial(local, exact_windowsize=True), LOCAL, heads_first
    ),
    "local-attention, causal": Model(
        partial(local, causal=True), LOCAL, heads_first
    ),
    "x-transformers": Model(x_transformers, "x_transformers.attend:Attend.forward", attend),
}  # fmt: skip
