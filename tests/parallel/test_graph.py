"""Graph attention over the parts of a graph against the whole graph on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.test_sharding import collectives
from helpers import QUICK, assert_close, thorough
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from parallel.exchanges import loops_and_collectives_in_them, sent_rows

import jax_attn_bwd as jab
from jax_attn_bwd import BipartiteCSC
from jax_attn_bwd.ops.graph import plan
from jax_attn_bwd.parallel import partition_graph, sharded_graph_attention

OPERATORS = {
    "gat": jab.graph_attention,
    "gatv2": jab.graph_attention_v2,
    "transformer": jab.graph_transformer_attention,
}
KINDS, MODES = tuple(OPERATORS), ("halo", "all_gather")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
H, D = 2, 3
OPTIONS = {"return_attention_weights": True, "return_residual": True}


@functools.cache
def square(edges=150):
    """29 nodes for 8 devices, the last without edges; room for more edges than there are."""
    rng = np.random.default_rng(4)
    src, dst = rng.integers(0, 28, edges), rng.integers(0, 28, edges)
    graph = BipartiteCSC.from_coo(src, dst, 29, 29, capacity=edges + 10)
    return graph, partition_graph(graph, 8)


@functools.cache
def bipartite():
    """40 sources, 13 destinations; the fourth of 8 devices has none."""
    rng = np.random.default_rng(5)
    graph = BipartiteCSC.from_coo(rng.integers(0, 39, 90), rng.integers(0, 13, 90), 40, 13)
    part = rng.integers(0, 7, 13)
    return graph, partition_graph(graph, 8, parts=np.where(part == 3, 7, part))


def arrays_of(kind, graph, *extra, seed=0, heads=H, size=D):
    rng, dim, room = np.random.default_rng(seed), heads * size, graph.capacity
    width = 2 * heads if kind == "gat" else dim
    found = {
        "src": rng.standard_normal((graph.num_src, dim)),
        "dst": rng.standard_normal((graph.num_dst, dim)),
        "value": rng.standard_normal((graph.num_src, dim)),
        "attention_weights": rng.standard_normal(2 * dim if kind == "gat" else dim),
        "edge": rng.standard_normal((room, width)),
        "score_bias": np.where(rng.random((room, heads)) < 0.1, -np.inf, rng.standard_normal((room, heads))),
        "dropout_mask": (rng.random((heads, room)) < 0.6) / 0.6,
    }
    if kind == "gat" and "edge" in extra:
        found["attention_weights"] = rng.standard_normal(2 * dim + width)
    names = ["src", "dst", *(["value"] if kind == "transformer" else ["attention_weights"]), *extra]
    return {name: found[name] for name in names}


def whole(kind, graph, arrays, **options):
    """The operator on one device."""
    arrays = {"dst": None} | arrays
    if kind == "transformer":
        key = arrays.pop("src")
        named = {"query": arrays.pop("dst"), "key": key, "value": arrays.pop("value", key)}
        arrays = {**named, **arrays}
        arrays["query"] = key if arrays["query"] is None else arrays["query"]
    return jax.tree.leaves(OPERATORS[kind](graph, num_heads=options.pop("num_heads", H), **arrays, **options))


def in_layout(cut, arrays):
    place = {
        "src": cut.src.place,
        "value": cut.src.place,
        "dst": cut.dst.place,
        "edge": cut.edges.place,
        "score_bias": lambda x: cut.edges.place(x) if x.ndim == 2 else x,
        "dropout_mask": lambda mask: cut.edges.place(mask.T).T,
    }
    return {name: place.get(name, lambda x: x)(x) for name, x in arrays.items()}


def parted(kind, cut, arrays, mesh, axis="graph", **options):
    """The sharded function, from and to the caller's order."""
    options = {"mesh": mesh, "axis": axis, "num_heads": H, "kind": kind, **options}
    outputs = sharded_graph_attention(cut, **in_layout(cut, arrays), **options)
    out, *rest = outputs if isinstance(outputs, tuple) else (outputs,)
    back = []
    if options.get("return_attention_weights"):
        back.append(cut.edges.collect(rest.pop(0)))
    return [cut.dst.collect(out), *back, *map(cut.dst.collect, rest)]


def mesh_of(axis_type=AUTO, shape=(8,), names=("graph",)):
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape))


def assert_alike(kind, graph, cut, arrays, mesh, mode="halo", axis="graph", **options):
    """Outputs, and gradients under random cotangents."""
    moved = dict(arrays)
    still = {"dropout_mask": moved.pop("dropout_mask")} if "dropout_mask" in moved else {}

    def finite(outputs):
        return [jnp.where(jnp.isfinite(x), x, 0) for x in outputs]

    def both(function):
        def step(moved, cts):
            outputs = function(still | moved)
            return outputs, jax.vjp(lambda moved: finite(function(still | moved)), moved)[1](cts)[0]

        return jax.jit(step, compiler_options=QUICK)

    single = functools.partial(whole, kind, graph, **options)
    rng = np.random.default_rng(9)
    cts = [rng.standard_normal(x.shape) for x in jax.eval_shape(lambda: single(arrays))]
    expected = both(single)(moved, cts)
    got = both(lambda arrays: parted(kind, cut, arrays, mesh, axis, mode=mode, **options))(moved, cts)
    for i, (x, y) in enumerate(zip(got[0], expected[0], strict=True)):
        assert_close(x, y, 1e-12, f"output {i}")
    for name in moved:
        assert_close(got[1][name], expected[1][name], 1e-12, name)


@pytest.mark.parametrize(
    ("kind", "mode", "axis_type"),
    [
        ("gat", "halo", AUTO),
        ("gatv2", "halo", AUTO),
        ("transformer", "all_gather", EXPLICIT),
        pytest.param("gat", "all_gather", EXPLICIT, marks=thorough),
        pytest.param("gatv2", "halo", EXPLICIT, marks=thorough),
        pytest.param("gatv2", "all_gather", AUTO, marks=thorough),
        pytest.param("transformer", "halo", AUTO, marks=thorough),
    ],
)
def test_values_and_gradients(kind, mode, axis_type):
    """Edge features, dropout by key, returned weights and lse; padded edges, nodes without edges."""
    graph, cut = square()
    dropout = {"dropout_rate": 0.4, "dropout_key": jax.random.key(3), "dropout_offset": (1, 2, 5, 0)}
    assert_alike(
        kind, graph, cut, arrays_of(kind, graph, "edge"), mesh_of(axis_type), mode=mode, **OPTIONS, **dropout
    )


@pytest.mark.parametrize(
    ("kind", "mode", "axis_type"),
    [
        ("transformer", "halo", EXPLICIT),
        pytest.param("gat", "halo", EXPLICIT, marks=thorough),
        pytest.param("gatv2", "all_gather", AUTO, marks=thorough),
    ],
)
def test_more_sources_than_destinations_and_an_empty_part(kind, mode, axis_type):
    """Given dropout factors, a bias of the scores, the mean over heads; keys shared by heads."""
    graph, cut = bipartite()
    assert 0 in np.asarray(cut.graph.num_edges)
    extra, options = ["dropout_mask"], {"concat_heads": False, "num_heads": 4}
    arrays = arrays_of(kind, graph, *extra, heads=4)
    if kind == "transformer":
        arrays = arrays_of(kind, graph, *extra, "score_bias", heads=4)
        arrays |= {"src": arrays["src"][:, : 2 * D], "value": arrays["value"][:, :10]}
        options["num_kv_heads"] = 2
    assert_alike(kind, graph, cut, arrays, mesh_of(axis_type), mode=mode, **options)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k == "transformer" else [thorough]) for k in KINDS]
)
def test_the_sources_alone(kind):
    """Destinations, and values, are the sources; a bias that is broadcast; dropout by the caller's edges."""
    graph, cut = square()
    arrays = arrays_of(kind, graph)
    if kind == "transformer":
        arrays["score_bias"] = np.array([0.3, -0.2])
    for name in ("dst", "value"):
        arrays.pop(name, None)
    dropout = {"dropout_rate": 0.4, "dropout_key": jax.random.key(3)}
    assert_alike(kind, graph, cut, arrays, mesh_of(), **dropout)


@thorough
@pytest.mark.parametrize(
    ("edges", "mode"), [(0, "all_gather"), (3, "halo"), (900, "halo"), (900, "all_gather")]
)
def test_few_edges_and_many(edges, mode):
    """900: between all pairs of parts alike, one all-to-all."""
    graph, _ = square(edges)
    cut = partition_graph(graph, 4)
    assert (cut.rounds is None) == (edges == 900)
    assert_alike("gat", graph, cut, arrays_of("gat", graph), mesh_of(AUTO, (4, 2), ("graph", "m")), mode=mode)


@thorough
def test_one_part_and_no_destination():
    mesh = jax.make_mesh((1,), ("graph",), devices=jax.devices()[:1])
    graph, _ = square()
    assert_alike("gatv2", graph, partition_graph(graph, 1), arrays_of("gatv2", graph), mesh)
    graph = BipartiteCSC.from_coo([], [], 5, 0)
    assert_alike("gatv2", graph, partition_graph(graph, 8), arrays_of("gatv2", graph), mesh_of())


@thorough
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_an_axis_of_two(axis_type):
    mesh = mesh_of(axis_type, (2, 4), ("a", "b"))
    ends = np.unravel_index(np.arange(16 * 16), (16, 16))
    full = BipartiteCSC.from_coo(*ends, 16, 16)
    dense = full, partition_graph(full, 8)
    for (graph, cut), mode in ((square(), "halo"), (dense, "halo"), (square(), "all_gather")):
        assert (cut.rounds is None) == (graph is full)
        arrays = arrays_of("gat", graph)
        assert_alike("gat", graph, cut, arrays, mesh, mode=mode, axis=("a", "b"))


def programs(kind, cut, graph, mesh, mode, heads_axis=None, **sizes):
    """The compiled forward, and backward, of arrays that lie in the layout already."""
    arrays = in_layout(cut, arrays_of(kind, graph, "edge", **sizes))
    sharded, shared = (NamedSharding(mesh, P(*axes)) for axes in (("graph", heads_axis), (heads_axis,)))
    put = {name: jax.device_put(x, sharded if x.ndim == 2 else shared) for name, x in arrays.items()}
    options = {"mesh": mesh, "axis": "graph", "num_heads": sizes.get("heads", H), "kind": kind, "mode": mode}

    def forward(cut, arrays):
        return sharded_graph_attention(cut, **arrays, **options)

    def both(cut, arrays, ct):
        out, pullback = jax.vjp(lambda arrays: forward(cut, arrays), arrays)
        return out, pullback(ct)[0]

    cut = cut.put(mesh, "graph")
    compiled = [
        jax.jit(f, compiler_options=QUICK).lower(cut, put, *rest).compile()
        for f, rest in ((forward, ()), (both, (put["dst"],)))
    ]
    for name, found in compiled[1].output_shardings[1].items():
        assert found.is_equivalent_to(put[name].sharding, put[name].ndim)
    return compiled


@pytest.mark.parametrize(
    ("kind", "axis_type", "edges"),
    [
        ("gat", EXPLICIT, 900),
        pytest.param("transformer", AUTO, 150, marks=thorough),
        pytest.param("gatv2", AUTO, 900, marks=thorough),
        pytest.param("gat", AUTO, 150, marks=thorough),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_one_exchange_each_way_and_none_in_a_loop(kind, axis_type, edges, mode, monkeypatch):
    monkeypatch.setattr(plan, "whole_elements", lambda: 0)
    monkeypatch.setattr(plan, "chunk_elements", lambda: 64)
    graph, _ = square(edges)
    cut = partition_graph(graph, 4)
    mesh = jax.make_mesh((4,), ("graph",), axis_types=(axis_type,), devices=jax.devices()[:4])
    forward, both = programs(kind, cut, graph, mesh, mode)
    there, back = {"all-gather": 1}, {"reduce-scatter": 1}
    if mode == "halo":
        there = {"all-to-all": 1} if cut.rounds is None else {"collective-permute": len(cut.rounds)}
        back = there
    assert collectives(forward) == there
    if mode == "halo" and cut.rounds is not None:
        assert sent_rows(forward) == cut.traffic().halo
    shared = {} if kind == "transformer" else {"all-reduce": 1}
    expected = there | back | shared
    if mode == "halo":
        expected = {name: 2 * count for name, count in there.items()} | shared
    assert collectives(both) == expected
    count, inside = loops_and_collectives_in_them(both)
    assert count > 0
    assert inside == 0


@thorough
@pytest.mark.parametrize("kind", ["gatv2", "transformer"])
def test_heads_over_another_axis(kind):
    """Heads of an Auto axis stay split: no exchange but that of the rows."""
    graph, _ = square(150)
    cut = partition_graph(graph, 4)
    mesh = mesh_of(AUTO, (4, 2), ("graph", "heads"))
    forward, both = programs(kind, cut, graph, mesh, "halo", heads_axis="heads")
    assert collectives(forward) == {"collective-permute": len(cut.rounds)}
    assert collectives(both).keys() <= {"collective-permute", "all-reduce"}


@thorough
@pytest.mark.parametrize("mode", MODES)
def test_second_order(mode):
    graph, cut = square(60)
    arrays = arrays_of("gat", graph)

    def of(function):
        def loss(arrays):
            return (jnp.sin(function(arrays)[0]) ** 2).sum()

        def twice(arrays):
            gradient = jax.grad(loss)(arrays)
            return sum((jnp.cos(x) * x).sum() for x in jax.tree.leaves(gradient))

        return jax.jit(jax.grad(twice), compiler_options=QUICK)(arrays)

    expected = of(lambda arrays: whole("gat", graph, arrays))
    got = of(lambda arrays: parted("gat", cut, arrays, mesh_of(), mode=mode))
    for name in arrays:
        assert_close(got[name], expected[name], 1e-11, name)


@thorough
def test_under_vmap():
    graph, cut = square()
    arrays = arrays_of("gatv2", graph)
    x = np.stack([arrays["src"], 2 * arrays["src"]])

    def loss(function, x):
        return jax.vmap(lambda x: function(arrays | {"src": x})[0])(x).sum()

    expected = jax.grad(lambda x: loss(lambda a: whole("gatv2", graph, a), x))(x)
    got = jax.jit(jax.grad(lambda x: loss(lambda a: parted("gatv2", cut, a, mesh_of()), x)))(x)
    assert_close(got, expected, 1e-12)


def test_poison_in_a_node_without_edges():
    """Node 28 has none: what stands there reaches nothing."""
    graph, cut = square()
    arrays = arrays_of("gat", graph)
    arrays["src"][28] = np.nan
    loss = lambda a: parted("gat", cut, a, mesh_of())[0].sum()
    step = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)
    for x in jax.tree.leaves(step({"src": arrays["src"], "attention_weights": arrays["attention_weights"]})):
        assert np.isfinite(x[:28] if x.ndim == 2 else x).all()


def test_minibatches_of_one_shape_a_device():
    """One sampled graph on each device: the gradients of what all share are reduced once."""
    rng, dim = np.random.default_rng(0), H * D
    graphs = [
        BipartiteCSC.from_coo(rng.integers(0, 12, m), rng.integers(0, 5, m), 12, 5, capacity=40)
        for m in rng.integers(20, 41, 8)
    ]
    nodes, weights = rng.standard_normal((8, 12, dim)), rng.standard_normal(2 * dim)
    mesh = mesh_of(AUTO, (8,), ("batch",))

    def loss_of_one(weights, graph, x):
        return jnp.sin(jab.graph_attention(graph, x, None, weights, num_heads=H)).sum()

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("batch"), P("batch")), out_specs=P())
    def loss(weights, stack, nodes):
        graph, x = jax.tree.map(lambda x: x[0], (stack, nodes))
        return jax.lax.pmean(loss_of_one(weights, graph, x), "batch")

    stack = jax.tree.map(lambda *x: jnp.stack(x), *graphs)
    sharded = jax.device_put((stack, nodes), NamedSharding(mesh, P("batch")))
    compiled = jax.jit(jax.grad(loss), compiler_options=QUICK).lower(weights, *sharded).compile()
    assert collectives(compiled) == {"all-reduce": 1}
    single = jax.grad(lambda w: jax.vmap(loss_of_one, (None, 0, 0))(w, stack, jnp.asarray(nodes)).mean())
    assert_close(compiled(weights, *sharded), jax.jit(single, compiler_options=QUICK)(weights), 1e-12)


def test_bad_arguments():
    graph, cut = square()
    _, narrow = bipartite()
    arrays = in_layout(cut, arrays_of("gat", graph, "edge"))
    src = arrays["src"]
    mesh = mesh_of()
    transformer = {"kind": "transformer", "attention_weights": None}
    for error, text, changed in (
        (ValueError, "kind must be one of", {"kind": "gcn"}),
        (ValueError, "mode must be one of", {"mode": "ring"}),
        (TypeError, "partitioned must be a PartitionedGraph, got BipartiteCSC", {"partitioned": graph}),
        (TypeError, "mesh must be a jax.sharding.Mesh, got list", {"mesh": jax.devices()}),
        (ValueError, r"axis must name axes of the mesh, \('graph',\), got 'model'", {"axis": "model"}),
        (
            ValueError,
            "partitioned must have as many parts as mesh axis 'graph' has devices, 4, got 8; .*graph, 4",
            {"mesh": jax.make_mesh((4,), ("graph",), devices=jax.devices()[:4])},
        ),
        (ValueError, r"src must have .* 32 rows along axis 0, got \(29, 6\); .*src.place", {"src": src[:29]}),
        (ValueError, "dst must have .*dst.place", {"dst": src[:29]}),
        (ValueError, "edge must have .*edges.place", {"edge": arrays["edge"][1:]}),
        (ValueError, "dst must be given where sources", {"partitioned": narrow, "dst": None}),
        (ValueError, "dropout_mask must have .* axis 1.*edges.place", {"dropout_mask": arrays["edge"]}),
        (TypeError, "attention_weights must be None for kind 'transformer'", {"kind": "transformer"}),
        (TypeError, "value must be None for kind 'gat'", {"value": src}),
        (ValueError, "value must have a width that its 2 heads divide", {**transformer, "value": src[:, 1:]}),
        (TypeError, "src, value must have one dtype", {**transformer, "value": src.astype(np.float32)}),
        (TypeError, "src must be a floating-point array, got dtype int64", {"src": np.ones(3, int)}),
        (TypeError, "src must be a floating-point array, got NoneType", {"src": None}),
        (TypeError, "dropout_key must be one JAX random key", {"dropout_key": 3}),
        (ValueError, "dropout_offset must be", {"dropout_offset": (1, 2)}),
    ):
        call = {"partitioned": cut, "mesh": mesh, "axis": "graph", "num_heads": H} | arrays | changed
        with pytest.raises(error, match=f"sharded_graph_attention: {text}"):
            sharded_graph_attention(**call)
