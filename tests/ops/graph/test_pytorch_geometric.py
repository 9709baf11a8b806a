"""The layers of PyTorch Geometric give the same numbers and gradients."""

import importlib.util

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from ops.graph.calls import FUNCTIONS, D, H, every_kind, inputs, normal, random_edges, values_and_gradients

from jax_attn_bwd import BipartiteCSC

needs_pyg = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torch", "torch_geometric")),
    reason="torch and torch_geometric are not installed",
)


@needs_pyg
@pytest.mark.filterwarnings("ignore")
@every_kind
@pytest.mark.parametrize("concat", [True, False], ids=["concat", "mean"])
def test_pytorch_geometric(kind, concat):
    """Values and gradients of its layers with identity projections, without self-loops."""
    import torch
    from torch_geometric import nn

    layer_type = {"gat": nn.GATConv, "gatv2": nn.GATv2Conv, "transformer": nn.TransformerConv}[kind]
    src, dst = random_edges(nnz=30)
    width, nodes = H * D, 7
    arrays = inputs(kind, nodes, nodes, edge=30, dtype=np.float32)
    extra = {"root_weight": False} if kind == "transformer" else {"add_self_loops": False}
    layer = layer_type((width, width), D, heads=H, concat=concat, bias=False, edge_dim=width, **extra)
    eye, given = torch.eye(width), {n: torch.tensor(np.asarray(x)) for n, x in arrays.items()}
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if parameter.shape == eye.shape:
                parameter.copy_(eye)
            elif name.endswith("bias"):
                parameter.zero_()
        if kind == "gat":
            parts = given["attention_weights"].split(width)
            for name, part in zip(("att_src", "att_dst", "att_edge"), parts, strict=True):
                getattr(layer, name).copy_(part.reshape(1, H, D))
        elif kind == "gatv2":
            layer.att.copy_(given["attention_weights"].reshape(1, H, D))
    if kind == "transformer":  # one x serves as key and value there
        arrays["value"] = arrays["key"]
        names = ("key", "query", "edge")
    else:
        names = ("src", "dst", "edge")
    leaves = [given[n].requires_grad_() for n in names]
    index = torch.tensor(np.stack([src, dst]))
    out = layer((leaves[0], leaves[1]), index, edge_attr=leaves[2])
    ct = np.array(normal(*out.shape, seed=5, dtype=np.float32))
    expected = torch.autograd.grad(out, leaves, torch.tensor(ct))
    graph = BipartiteCSC.from_coo(src, dst, nodes, nodes)
    got = values_and_gradients(
        FUNCTIONS[kind][0], arrays, [jnp.asarray(ct)], graph=graph, concat_heads=concat
    )
    assert_close(got["output 0"], out.detach().numpy(), 1e-5)
    if kind == "transformer":
        got["key"] = got["key"] + got["value"]
    for name, gradient in zip(names, expected, strict=True):
        assert_close(got[name], gradient.numpy(), 1e-5, name)
