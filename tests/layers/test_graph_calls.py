"""Calls of graph layers: what they take, and what is refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from layers.frameworks import FRAMEWORKS
from layers.graph_cases import EDGE, KINDS, N_DST, N_SRC, NNZ, H, build, inputs, parameters

from jax_attn_bwd import BipartiteCSC
from jax_attn_bwd.layers.graph import on_graphs_tuple


def test_edge_features_of_one_number_may_lack_an_axis(rng):
    options = dict(edge_dim=1)
    params, (x, graph, _) = parameters(rng, "GATConv", 6, options), inputs(rng, 6, {})
    edge = jnp.asarray(rng.standard_normal(NNZ))
    layer = build("haiku", "GATConv", 6, **options)
    np.testing.assert_array_equal(
        layer.call(params, x, graph, edge), layer.call(params, x, graph, edge[:, None])
    )


def test_pair_of_one_width_shares_the_layer_where_in_channels_is_an_int(rng):
    """As in PyTorch Geometric; the frameworks that ask for no width have a layer for each side of a pair."""
    params, (x, graph, _) = parameters(rng, "GATConv", 6, {}), inputs(rng, 6, {})
    layer = build("flax_nnx", "GATConv", 6)
    pair = layer.call(params, (x, x[:N_DST]), graph)
    assert_close(pair, layer.call(params, x, graph), 1e-13)


def test_graphs_tuple(rng):
    """A padded batch of two graphs; nodes of the one do not see the other, and edges stay as they are."""
    jraph = pytest.importorskip("jraph")
    singles = []
    for nodes, edges in ((4, 6), (3, 5)):
        singles.append(
            jraph.GraphsTuple(
                nodes=jnp.asarray(rng.standard_normal((nodes, 6))),
                edges=jnp.asarray(rng.standard_normal((edges, EDGE))),
                senders=jnp.asarray(rng.integers(0, nodes, edges)),
                receivers=jnp.asarray(rng.integers(0, nodes, edges)),
                n_node=jnp.array([nodes]),
                n_edge=jnp.array([edges]),
                globals=None,
            )
        )
    batch = jraph.pad_with_graphs(jraph.batch(singles), n_node=10, n_edge=16, n_graph=4)
    options = dict(edge_dim=EDGE, residual=True)
    params = parameters(rng, "GATConv", 6, options)
    layer = build("flax_linen", "GATConv", 6, **options)
    apply = on_graphs_tuple(lambda *arguments, **more: layer.call(params, *arguments, **more))

    out = jax.jit(apply)(batch, BipartiteCSC.from_jraph(batch))
    assert isinstance(out, jraph.GraphsTuple)
    assert out.edges.shape == (16, EDGE)
    for got, single in zip(jraph.unbatch(jraph.unpad_with_graphs(out)), singles, strict=True):
        assert_close(got.nodes, apply(single).nodes, 1e-12)
        np.testing.assert_array_equal(got.edges, single.edges)
    graph, weights = apply(batch, return_attention_weights=True)
    assert_close(graph.nodes, out.nodes, 1e-12)
    assert weights.shape == (16, H)
    with pytest.raises(TypeError, match="build the graph outside jit"):
        jax.jit(apply)(batch)


def call_with(framework="flax_nnx", kind="GATConv", in_channels=(6, 4), **changed):
    """A call of a layer that is right but for what `changed` says."""
    rng = np.random.default_rng(0)
    options = {"edge_dim": EDGE} | changed.pop("options", {})
    x, graph, edge = inputs(rng, (6, 4), {"edge_dim": EDGE})
    arguments = {"x": x, "graph": graph, "edge_attr": edge} | changed
    layer = build(framework, kind, in_channels, **options)
    params = parameters(rng, kind, (6, 4), {"edge_dim": EDGE})
    return layer.call(params, *arguments.values())


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": jnp.zeros((N_SRC + 1, 6))}, ValueError, r"x must have shape \[num_src, channels\] .* 7, got"),
        ({"x": jnp.zeros((N_SRC, 6), int)}, TypeError, "x must be a floating-point array"),
        ({"x": (jnp.zeros((N_SRC, 6)),)}, ValueError, r"x must be an array or a pair .* got 1 of them"),
        ({"x": (jnp.zeros((N_SRC, 6)), None)}, TypeError, "x_dst must .* not None as in PyTorch Geometric"),
        ({"x": (jnp.zeros((N_SRC, 6)), jnp.zeros((N_SRC, 4)))}, ValueError, "x_dst must .* num_dst = 5"),
        ({"graph": None}, TypeError, "GATConv: graph must be a BipartiteCSC"),
        ({"edge_attr": None}, ValueError, "edge_attr must be given with edge_dim = 4, got None"),
        (
            {"framework": "flax_linen", "options": {"edge_dim": None}},
            ValueError,
            "edge_attr must be None with edge_dim = None, got an array",
        ),
        ({"edge_attr": jnp.zeros((NNZ, 5))}, ValueError, r"edge_attr must have shape \[nnz, edge_dim\]"),
        ({"in_channels": (6, 4, 4)}, ValueError, "in_channels must be an int or a pair"),
        ({"in_channels": 0}, ValueError, "in_channels must be a positive int"),
        ({"options": {"dropout": 1.5}}, ValueError, r"dropout must lie in \[0, 1\]"),
        ({"options": {"concat": 1}}, TypeError, "concat must be a Python bool"),
        ({"options": {"edge_dim": 0}}, ValueError, "edge_dim must be a positive int"),
        ({"options": {"implementation": "mine"}}, ValueError, "mine"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_errors(changed, error, message):
    with pytest.raises(error, match=message):
        call_with(**changed)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_names_itself_in_errors(framework, kind):
    with pytest.raises(TypeError, match=f"{kind}: graph must be a BipartiteCSC"):
        call_with(framework, kind, graph="graph")


@pytest.mark.parametrize("framework", ["flax_nnx", "equinox"])
@pytest.mark.parametrize("kind", KINDS)
def test_nodes_of_another_width_than_the_layer_was_built_for_are_an_error(framework, kind):
    wide, narrow = jnp.zeros((N_SRC, 7)), jnp.zeros((N_DST, 5))
    for in_channels, x, message in (
        ((6, 6), wide, r"x must have shape \[num_src, in_channels\] = \(7, 6\), got \(7, 7\)"),
        ((6, 5), (wide, narrow), r"x_src must have shape .* = \(7, 6\), got \(7, 7\)"),
        ((7, 4), (wide, narrow), r"x_dst must have shape \[num_dst, .* = \(5, 4\), got \(5, 5\)"),
        ((7, 4), wide, r"x must be a pair .* with in_channels = \(7, 4\), got one array"),
    ):
        with pytest.raises(ValueError, match=f"{kind}: {message}"):
            call_with(framework, kind, in_channels, x=x)


def test_one_array_for_more_destinations_than_sources_is_an_error():
    graph = BipartiteCSC.from_coo([0], [3], 2, 4)
    params = parameters(np.random.default_rng(0), "GATConv", 6, {})
    with pytest.raises(ValueError, match=r"x must be a pair \(x_src, x_dst\) where num_src = 2 < num_dst"):
        build("flax_nnx", "GATConv", 6).call(params, jnp.zeros((2, 6)), graph)
