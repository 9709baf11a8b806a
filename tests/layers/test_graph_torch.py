"""Graph layers beside PyTorch Geometric's, with their parameters."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layers.frameworks import assert_all_close
from layers.graph_cases import CASES, EDGE, N_DST, N_SRC, NNZ, C, H, build, edge_list, inputs, parameters

from jax_attn_bwd import BipartiteCSC
from jax_attn_bwd.layers.graph import from_torch


def geometric(kind, in_channels, options, **own):
    """A layer of PyTorch Geometric in float64."""
    pytest.importorskip("torch", reason="compares with PyTorch Geometric")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own imports warn
        nn = pytest.importorskip("torch_geometric.nn", reason="compares with PyTorch Geometric")
    return getattr(nn, kind)(in_channels, C, H, **options, **own).double()


@pytest.mark.parametrize(
    ("name", "framework"), list(zip(CASES, ("flax_linen", "flax_nnx", "haiku", "equinox") * 2, strict=False))
)
def test_as_pytorch_geometric_with_its_parameters(rng, name, framework):
    kind, in_channels, options = CASES[name]
    own = {} if kind == "TransformerConv" else {"add_self_loops": False}
    module = geometric(kind, in_channels, options, **own)
    import torch

    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    params = from_torch({f"net.0.{n}": p for n, p in module.state_dict().items()}, "net.0.")
    unused = {"gatv2_shared": "lin_r", "transformer": "lin_skip"}.get(name)
    params = {n: x for n, x in params.items() if n != unused}
    shaped = parameters(np.random.default_rng(0), kind, in_channels, options)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shaped)

    arguments = inputs(np.random.default_rng(0), in_channels, options)
    edges = edge_list(np.random.default_rng(0))  # what `inputs` began with
    x, graph, edge = arguments
    tensors = [torch.tensor(np.asarray(a), requires_grad=True) for a in jax.tree.leaves((x, edge))]
    nodes = tensors if edge is None else tensors[:-1]
    given = (nodes[0], nodes[0][:N_DST]) if len(nodes) == 1 else tuple(nodes)
    out, (_, weights) = module(
        given,
        torch.tensor(np.stack(edges)),
        None if edge is None else tensors[-1],
        return_attention_weights=True,
    )
    douts = [rng.standard_normal(y.shape) for y in (out, weights)]
    torch.autograd.backward([out, weights], [torch.tensor(g) for g in douts])
    slopes = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}

    layer = build(framework, kind, in_channels, **options)
    got, pullback = jax.vjp(
        lambda *a: layer.call(a[0], a[1], graph, a[2], return_attention_weights=True), params, x, edge
    )
    assert_all_close(got, (out.detach().numpy(), weights.detach().numpy()), 1e-12)
    dparams, *grads = pullback(tuple(jnp.asarray(g) for g in douts))
    assert_all_close(grads, [t.grad.numpy() for t in tensors], 1e-10)
    assert_all_close(dparams, from_torch(slopes), 1e-10)


@pytest.mark.parametrize(
    ("framework", "kind", "fill_value"),
    [
        ("flax_linen", "GATConv", "mean"),
        ("flax_nnx", "GATv2Conv", "max"),
        ("haiku", "GATv2Conv", 0.5),
        ("equinox", "GATConv", "add"),
    ],
)
def test_by_default_both_add_self_loops(framework, kind, fill_value):
    """In place of those that are there, with edge features; weights in the same order."""
    options = {"edge_dim": EDGE, "fill_value": fill_value}
    module = geometric(kind, 6, options)
    import torch

    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, N_SRC, (2, NNZ))
    src[3] = dst[3]
    graph = BipartiteCSC.from_coo(src, dst, N_SRC, N_SRC)
    x, edge = rng.standard_normal((N_SRC, 6)), rng.standard_normal((NNZ, EDGE))
    expected, (_, weights) = module(
        torch.tensor(x), torch.tensor(np.stack([src, dst])), torch.tensor(edge), return_attention_weights=True
    )
    layer = build(framework, kind, 6, **options, add_self_loops=True)
    params = from_torch(module.state_dict())

    got = layer.call(params, jnp.asarray(x), graph, jnp.asarray(edge), return_attention_weights=True)
    assert_all_close(got, (expected.detach().numpy(), weights.detach().numpy()), 1e-12)


def test_from_torch_names_what_is_missing():
    with pytest.raises(ValueError, match=r"start with 'conv2.', got \['conv1.att_src'\]"):
        from_torch({"conv1.att_src": np.zeros((1, H, C))}, "conv2.")
    with pytest.raises(ValueError, match=r"prefix must end with a dot, got 'conv1'; 'conv1' would also"):
        from_torch({"conv1.att_src": np.zeros((1, H, C))}, "conv1")
