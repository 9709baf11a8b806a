"""Calls of graph layers: what they take, and what is refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import QUICK, assert_close, thorough
from layers.frameworks import FRAMEWORKS, values_and_gradients
from layers.frameworks import graph as graph_layer
from layers.graph_cases import EDGE, KINDS, N_DST, N_SRC, NNZ, C, H, build, inputs, parameters

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
    """PyTorch Geometric does so; frameworks that ask for no width have a layer for each side of a pair."""
    params, (x, graph, _) = parameters(rng, "GATConv", 6, {}), inputs(rng, 6, {})
    layer = build("flax_nnx", "GATConv", 6)
    pair = layer.call(params, (x, x[:N_DST]), graph)
    assert_close(pair, layer.call(params, x, graph), 1e-13)


@pytest.mark.parametrize(
    "framework", [pytest.param(f, marks=[thorough] * (f in ("equinox", "haiku"))) for f in FRAMEWORKS]
)
def test_self_loops_are_added_by_default(rng, framework):
    """Outputs, weights and gradients are those along `graph.with_self_loops()`; a capacity stays one.

    A traced graph keeps rows for its own loops, which are replaced: 0, behind the others.
    """
    kind = "GATv2Conv" if framework in ("flax_nnx", "haiku") else "GATConv"
    src, dst = rng.integers(0, N_SRC, (2, NNZ))
    src[3] = dst[3]
    x, edge = jnp.asarray(rng.standard_normal((N_SRC, 6))), jnp.asarray(rng.standard_normal((NNZ, EDGE)))
    params = parameters(rng, kind, 6, {"edge_dim": EDGE})
    graph = BipartiteCSC.from_coo(src, dst, N_SRC, N_SRC)

    def run(layer, graph, x, edge):
        call = lambda x, edge: layer.call(params, x, graph, edge, return_attention_weights=True)
        return jax.jit(lambda *inputs: values_and_gradients(call, *inputs), compiler_options=QUICK)(x, edge)

    layer = graph_layer(framework, kind, 6, C, H, edge_dim=EDGE, fill_value=0.5)
    looped, filled = graph.with_self_loops(edge, fill_value=0.5)
    without = build(framework, kind, 6, edge_dim=EDGE, add_self_loops=False)
    (out, weights), (dx, _) = run(without, looped, x, filled)
    (got, own), (got_dx, dedge) = run(layer, graph, x, edge)
    for one, other in ((got, out), (own, weights), (got_dx, dx)):
        assert_close(one, other, 1e-12)
    assert not dedge[src == dst].any()

    padded = BipartiteCSC.from_coo(src, dst, N_SRC, N_SRC, capacity=NNZ + 2)
    (got, own), _ = run(layer, padded, x, jnp.pad(edge, ((0, 2), (0, 0))))
    assert_close(got, out, 1e-12)
    assert own.shape == (NNZ + 2 + N_SRC, H)
    call = lambda graph: layer.call(params, x, graph, edge, return_attention_weights=True)
    got, own = jax.jit(call, compiler_options=QUICK)(graph)
    assert_close(got, out, 1e-12)
    assert own.shape == (NNZ + N_SRC, H)
    assert_close(own[: looped.num_edges], weights, 1e-12)
    assert not own[looped.num_edges :].any()


@pytest.mark.parametrize(
    "framework", [pytest.param(f, marks=[thorough] * (f != "equinox")) for f in FRAMEWORKS]
)
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[thorough] * (k != "TransformerConv")) for k in KINDS]
)
def test_batch_axes_for_one_graph(rng, framework, kind):
    """Each entry as alone, edges and loops included; the destinations are shared."""
    more = {"beta": True} if kind == "TransformerConv" else {"add_self_loops": True, "residual": True}
    options = {"edge_dim": EDGE, **more}
    params, (x, graph, _) = parameters(rng, kind, (6, 4), options), inputs(rng, (6, 4), options)
    layer = build(framework, kind, (6, 4), **options)
    sources = jnp.asarray(rng.standard_normal((2, 3, N_SRC, 6)))
    edges = jnp.asarray(rng.standard_normal((2, 3, NNZ, EDGE)))

    def both(sources, edges):
        call = lambda src, edge: layer.call(params, (src, x[1]), graph, edge, return_attention_weights=True)
        return call(sources, edges), call(sources[1, 2], edges[1, 2])

    for got, one in zip(*jax.jit(both, compiler_options=QUICK)(sources, edges), strict=True):
        assert_close(got[1, 2], one, 1e-12)


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
        (
            {"x": jnp.zeros((N_SRC + 1, 6))},
            ValueError,
            r"x must have shape \[..., num_src, channels\] .* 7, got",
        ),
        ({"x": jnp.zeros((N_SRC, 6), int)}, TypeError, "x must be a floating-point array"),
        ({"x": (jnp.zeros((N_SRC, 6)),)}, ValueError, r"x must be an array or a pair .* got 1 of them"),
        ({"x": (jnp.zeros((N_SRC, 6)), None)}, TypeError, r"x_dst must .*; PyTorch .* zeros \[5, channels\]"),
        ({"x": (jnp.zeros((N_SRC, 6)), jnp.zeros((N_SRC, 4)))}, ValueError, "x_dst must .* num_dst = 5"),
        ({"graph": None}, TypeError, "GATConv: graph must be a BipartiteCSC"),
        ({"edge_attr": None}, ValueError, "edge_attr must be given with edge_dim = 4, got None"),
        (
            {"framework": "flax_linen", "options": {"edge_dim": None}},
            ValueError,
            "edge_attr must be None with edge_dim = None, got an array",
        ),
        ({"edge_attr": jnp.zeros((NNZ, 5))}, ValueError, r"edge_attr must have shape \[..., nnz, edge_dim\]"),
        ({"in_channels": (6, 4, 4)}, ValueError, "in_channels must be an int or a pair"),
        ({"in_channels": 0}, ValueError, "in_channels must be a positive int"),
        ({"in_channels": (-1, 4)}, ValueError, r"in_channels must be .*, got \(-1, 4\); .* linen and Haiku"),
        ({"options": {"dropout": 1.5}}, ValueError, r"dropout must lie in \[0, 1\]"),
        ({"options": {"concat": 1}}, TypeError, "concat must be a Python bool"),
        ({"options": {"add_self_loops": 1}}, TypeError, "add_self_loops must be a Python bool"),
        ({"options": {"fill_value": "sum"}}, ValueError, r"fill_value must be one of \('mean', 'add'"),
        (
            {"options": {"fill_value": jnp.ones(4)}},
            TypeError,
            r"fill_value must be a number .*, got an array of shape \(4,\); add the loops before: .*=False",
        ),
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


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "given", [{"aggr": "mean"}, {"flow": "target_to_source"}], ids=lambda x: next(iter(x))
)
def test_arguments_of_pytorch_geometric_that_are_not_taken(framework, given):
    (name,) = given
    with pytest.raises(TypeError, match=rf"GATv2Conv.__init__\(\) .* {name!r}; leave it out: messages "):
        call_with(framework, "GATv2Conv", options=given)


@pytest.mark.parametrize("framework", ["flax_nnx", "equinox"])
@pytest.mark.parametrize("kind", KINDS)
def test_nodes_of_another_width_than_the_layer_was_built_for_are_an_error(framework, kind):
    wide, narrow = jnp.zeros((N_SRC, 7)), jnp.zeros((N_DST, 5))
    for in_channels, x, message in (
        ((6, 6), wide, r"x must have shape \[..., num_src, in_channels\] = \(7, 6\), got \(7, 7\)"),
        ((6, 5), (wide, narrow), r"x_src must have shape .* = \(7, 6\), got \(7, 7\)"),
        ((7, 4), (wide, narrow), r"x_dst must have shape \[..., num_dst, .* = \(5, 4\), got \(5, 5\)"),
        ((7, 4), wide, r"x must be a pair .* with in_channels = \(7, 4\), got one array"),
    ):
        with pytest.raises(ValueError, match=f"{kind}: {message}"):
            call_with(framework, kind, in_channels, x=x)


def test_one_array_for_more_destinations_than_sources_is_an_error():
    graph = BipartiteCSC.from_coo([0], [3], 2, 4)
    params = parameters(np.random.default_rng(0), "GATConv", 6, {})
    words = r"x must be a pair \(x_src, x_dst\), or num_dst = 4 be at most num_src = 2, got one array"
    with pytest.raises(ValueError, match=words):
        build("flax_nnx", "GATConv", 6).call(params, jnp.zeros((2, 6)), graph)
