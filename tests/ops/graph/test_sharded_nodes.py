"""Nodes of a graph over 8 virtual devices: same numbers, work and sums shared evenly."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.test_sharding import collectives
from helpers import QUICK, assert_trees_close, thorough
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ops.graph.calls import FUNCTIONS
from parallel.exchanges import loops_and_collectives_in_them

from jax_attn_bwd import BipartiteCSC, graph_attention, graph_attention_v2, graph_attention_v2_bwd
from jax_attn_bwd.ops.graph import groups, loops, placement, plan

SOURCES, DESTINATIONS, EDGES, ROOM, H, D = 16, 8, 70, 90, 4, 4
NODES = {"src", "dst", "query", "key", "value"}


def graph_of(name):
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, SOURCES - 2, EDGES), rng.integers(0, DESTINATIONS, EDGES)
    dst[dst == 3] = 2  # no edge leads into 3
    if name == "hub":
        dst[:] = 5
    room = ROOM if name == "room" else None
    return BipartiteCSC.from_coo(src, dst, SOURCES, DESTINATIONS, capacity=room)


def arrays_of(kind, rich, room, batch=()):
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))
    rng, width = np.random.default_rng(1), H * D
    x, y = draw(*batch, SOURCES, width), draw(*batch, DESTINATIONS, width)
    found = {"src": x, "dst": y, "attention_weights": draw((1 if kind == "gatv2" else 2 + rich) * width)}
    if kind == "transformer":
        found = {"query": y, "key": x, "value": draw(*batch, SOURCES, width)}
        bias = draw(room, H)
        found |= {"score_bias": jnp.where(bias > 1, -jnp.inf, bias)} if rich else {}
    return found | ({"edge": draw(room, width)} if rich else {})


def program(kind, options, cts):
    """`(graph, arrays) -> outputs and gradients by name`."""

    def run(graph, arrays):
        out, pullback = jax.vjp(lambda a: FUNCTIONS[kind][0](graph, **a, num_heads=H, **options), arrays)
        leaves = jax.tree.leaves(out)
        given = [jnp.where(jnp.isfinite(x), ct, 0) for x, ct in zip(leaves, cts, strict=True)]
        placed = map(placed_like, given, leaves)
        grads = pullback(jax.tree.unflatten(jax.tree.structure(out), placed))[0]
        return {f"output {i}": x for i, x in enumerate(leaves)} | grads

    return jax.jit(run, compiler_options=QUICK)


def placed_like(x, other):
    sharding = jax.typeof(other).sharding
    explicit = not sharding.mesh.empty and AxisType.Explicit in sharding.mesh.axis_types
    return jax.sharding.reshard(x, sharding) if explicit else x


def on_mesh(shape, specs, arrays, axis_type=AxisType.Explicit):
    """(mesh, arrays); `specs` by name, else whole."""
    names = ("x", "y")[: len(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape))
    put = lambda name, x: jax.device_put(x, NamedSharding(mesh, specs.get(name, P(*(None,) * x.ndim))))
    return mesh, {name: put(name, x) for name, x in arrays.items()}


LAYOUTS = {  # name: (mesh, spec of sources, of destinations)
    "both": ((8,), P("x", None), P("x", None)),
    "sources": ((8,), P("x", None), P(None, None)),
    "destinations": ((8,), P(None, None), P("x", None)),
    "heads": ((4, 2), P("x", "y"), P("x", "y")),
    "batch": ((4, 2), P("y", "x", None), P("y", "x", None)),
    "two axes": ((4, 2), P(("x", "y"), None), P(("x", "y"), None)),
    "other axes": ((4, 2), P("y", None), P("x", None)),
}
CASES = [
    pytest.param(kind, layout, graph, marks=[thorough] * ((kind, layout) != ("gat", "both")))
    for i, layout in enumerate(LAYOUTS)
    for j, kind in enumerate(FUNCTIONS)
    for graph in (("room", "hub", "plain")[(i + j) % 3],)
]


@pytest.mark.parametrize(("kind", "layout", "graph"), CASES)
@pytest.mark.parametrize("rich", [False, pytest.param(True, marks=thorough)])
def test_values_and_gradients(kind, layout, graph, rich):
    """Outputs lie like the destinations, gradients like what they are of; each array is gathered once."""
    (shape, of_sources, of_destinations), graph = LAYOUTS[layout], graph_of(graph)
    arrays = arrays_of(kind, rich, graph.capacity, (2,) if layout == "batch" else ())
    options = {"dropout_rate": 0.3, "dropout_key": jax.random.key(0)} if rich else {}
    options |= {"return_attention_weights": rich, "return_residual": rich, "concat_heads": not rich}
    outs = jax.eval_shape(lambda: FUNCTIONS[kind][0](graph, **arrays, num_heads=H, **options))
    rng = np.random.default_rng(2)
    run = program(kind, options, [jnp.asarray(rng.standard_normal(x.shape)) for x in jax.tree.leaves(outs)])
    expected = run(graph, arrays)
    specs = dict.fromkeys(("src", "key", "value"), of_sources)
    specs |= dict.fromkeys(("dst", "query"), of_destinations)
    mesh, placed = on_mesh(shape, specs, arrays)
    with jax.set_mesh(mesh):
        compiled = run.lower(graph, placed).compile()
        got = compiled(graph, placed)
    assert_trees_close(got, expected, 1e-12)
    for name in arrays:
        assert got[name].sharding.spec == placed[name].sharding.spec, name
    rows = len(of_destinations) - 2
    assert got["output 0"].sharding.spec[: rows + 1] == of_destinations[: rows + 1]
    counted = collectives(compiled)
    if (
        len(shape) == 1 and not rich
    ):  # forward: tables, the highest score, out and l; backward: tables and rows
        gathered = counted.pop("all-gather")
        assert gathered <= {"gat": 7, "gatv2": 6, "transformer": 8}[kind], gathered
        assert sum(counted.values()) <= {"gat": 8, "gatv2": 6, "transformer": 6}[kind], counted


@pytest.fixture
def form(monkeypatch):
    """`form(edges of a group)`: small chunks, short runs."""

    def build(width):
        monkeypatch.setattr(plan, "whole_elements", lambda: 0)
        monkeypatch.setattr(plan, "chunk_elements", lambda: 64)
        monkeypatch.setattr(plan, "group_width", lambda edges, nodes: width)
        for module in (groups, loops, placement):
            monkeypatch.setattr(module, "RUN", 4)
        jax.clear_caches()

    yield build
    monkeypatch.undo()
    jax.clear_caches()


IN_LOOPS = [
    pytest.param(kind, width, axis_type, marks=[thorough] * ((kind, width) != ("gatv2", 1)))
    for kind in FUNCTIONS
    for width, axis_type in ((1, AxisType.Explicit), (4, AxisType.Explicit), (1, AxisType.Auto))
]


@pytest.mark.parametrize(("kind", "width", "axis_type"), IN_LOOPS)
def test_chunks_runs_and_groups(kind, width, axis_type, form):
    """No collective stands in a loop; outputs lie as the destinations, gradients as what they are of."""
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, SOURCES, 600), np.maximum(rng.integers(-9, DESTINATIONS, 600), 2)
    build, arrays = lambda: BipartiteCSC.from_coo(src, dst, SOURCES, DESTINATIONS), arrays_of(kind, False, 0)
    ct = [jnp.asarray(np.random.default_rng(2).standard_normal((DESTINATIONS, H * D)))]
    expected = program(kind, {}, ct)(build(), arrays)
    form(width)
    graph, run = build(), program(kind, {}, ct)
    assert (graph.run_owners is not None) == (width == 1)
    mesh, placed = on_mesh((8,), {name: P("x", None) for name in NODES}, arrays, axis_type)
    with jax.set_mesh(mesh):
        compiled = run.lower(graph, placed).compile()
        got = compiled(graph, placed)
    assert_trees_close(got, expected, 1e-12)
    assert all(got[name].sharding.spec[0] == "x" for name in ("output 0", *(NODES & got.keys())))
    loops, inside = loops_and_collectives_in_them(compiled)
    assert loops >= 2
    assert inside == 0


@thorough
@pytest.mark.parametrize("rich", [False, True])
@pytest.mark.parametrize("layout", ["sources", "heads", "two axes"])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_auto_axes_in_loops(kind, layout, rich, form):
    """The same values and gradients, edges and weights included, wherever the nodes lie."""
    (shape, of_sources, of_destinations), graph = LAYOUTS[layout], graph_of("room")
    arrays, rng = arrays_of(kind, rich, graph.capacity), np.random.default_rng(2)
    options = {"dropout_rate": 0.3, "dropout_key": jax.random.key(0)} if rich else {}
    options |= {"return_attention_weights": rich, "return_residual": rich, "concat_heads": not rich}
    outs = jax.eval_shape(lambda: FUNCTIONS[kind][0](graph, **arrays, num_heads=H, **options))
    cts = [jnp.asarray(rng.standard_normal(x.shape)) for x in jax.tree.leaves(outs)]
    expected = program(kind, options, cts)(graph, arrays)
    specs = dict.fromkeys(("src", "key", "value"), of_sources)
    specs |= dict.fromkeys(("dst", "query"), of_destinations)
    form(1)
    graph = graph_of("room")
    _, placed = on_mesh(shape, specs, arrays, AxisType.Auto)
    compiled = program(kind, options, cts).lower(graph, placed).compile()
    assert_trees_close(compiled(graph, placed), expected, 1e-12)
    assert loops_and_collectives_in_them(compiled)[1] == 0


AUTO_CASES = [
    pytest.param(kind, layout, rich, marks=[thorough] * ((kind, layout, rich) != ("gat", "both", False)))
    for kind in FUNCTIONS
    for layout in ("both", "destinations", "heads", "two axes")
    for rich in (False, True)
    if layout == "both" or not rich
]


@pytest.mark.parametrize(("kind", "layout", "rich"), AUTO_CASES)
def test_auto_axes(kind, layout, rich):
    """The partitioner cuts the edges as it cuts the nodes; each array is gathered once."""
    (shape, of_sources, of_destinations), graph = LAYOUTS[layout], graph_of("room")
    arrays, rng = arrays_of(kind, rich, graph.capacity), np.random.default_rng(2)
    options = {"dropout_rate": 0.3, "dropout_key": jax.random.key(0)} if rich else {}
    options |= {"return_attention_weights": rich, "return_residual": rich}
    outs = jax.eval_shape(lambda: FUNCTIONS[kind][0](graph, **arrays, num_heads=H, **options))
    cts = [jnp.asarray(rng.standard_normal(x.shape)) for x in jax.tree.leaves(outs)]
    expected = program(kind, options, cts)(graph, arrays)
    specs = dict.fromkeys(("src", "key", "value"), of_sources)
    specs |= dict.fromkeys(("dst", "query"), of_destinations)
    _, placed = on_mesh(shape, specs, arrays, AxisType.Auto)  # which the arrays alone tell
    compiled = program(kind, options, cts).lower(graph, placed).compile()
    got = compiled(graph, placed)
    assert_trees_close(got, expected, 1e-12)
    assert got["output 0"].sharding.spec[0] == of_destinations[0]
    counted = collectives(compiled)
    if not rich:
        assert counted.pop("all-gather") <= 4, counted
        assert sum(counted.values()) <= 4, counted


@thorough
def test_auto_axes_off_the_cpu(monkeypatch):
    """Edges that are summed in a fixed order are not cut: each array is gathered once, and nothing else."""
    graph, arrays = graph_of("hub"), arrays_of("gatv2", False, EDGES)
    ct = [jnp.asarray(np.random.default_rng(2).standard_normal((DESTINATIONS, H * D)))]
    expected = program("gatv2", {}, ct)(graph, arrays)
    jax.clear_caches()
    monkeypatch.setattr(plan, "adds_in_order", lambda: False)
    mesh, placed = on_mesh((8,), {name: P("x", None) for name in NODES}, arrays, AxisType.Auto)
    with jax.set_mesh(mesh):
        compiled = program("gatv2", {}, ct).lower(graph, placed).compile()
        assert_trees_close(compiled(graph, placed), expected, 1e-12)
    monkeypatch.undo()
    jax.clear_caches()
    assert set(collectives(compiled)) == {"all-gather"}


@thorough
@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("in_loops", [False, True])
def test_a_batch_over_auto_axes_exchanges_nothing(mapped, in_loops, form):
    if in_loops:
        form(1)
    graph, x = graph_of("plain"), jnp.asarray(np.random.default_rng(0).standard_normal((8, SOURCES, H * D)))
    call = lambda x: graph_attention_v2(graph, x, None, jnp.ones(H * D), num_heads=H)
    step = lambda x: jax.value_and_grad(lambda x: (jax.vmap(call) if mapped else call)(x).std())(x)[1]
    mesh, placed = on_mesh((8,), {"x": P("x")}, {"x": x}, AxisType.Auto)
    expected = jax.jit(step, compiler_options=QUICK)(x)
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda x: step(x), compiler_options=QUICK).lower(placed["x"]).compile()
        assert_trees_close({"x": compiled(placed["x"])}, {"x": expected}, 1e-12)
    assert set(collectives(compiled)) <= {"all-reduce"}  # of the loss


@pytest.mark.parametrize(
    ("name", "axis_type"),
    [
        pytest.param(n, t, marks=[thorough] * ((n, t) != ("hub", AxisType.Auto)))
        for n in ("plain", "hub")
        for t in (AxisType.Auto, AxisType.Explicit)
    ],
)
def test_work_is_shared(name, axis_type):
    """Each of 8 devices does at most 1.5 times an eighth of what a mesh of one does, also with one hub."""
    rng, nodes, edges = np.random.default_rng(0), 64, 16384
    dst = np.full(edges, 5) if name == "hub" else rng.integers(0, nodes, edges)
    graph = BipartiteCSC.from_coo(rng.integers(0, nodes, edges), dst, nodes, nodes)
    x, a = jnp.asarray(rng.standard_normal((nodes, H * D))), jnp.ones(H * D)
    step = lambda x: jax.value_and_grad(lambda x: graph_attention_v2(graph, x, None, a, num_heads=H).sum())(x)

    def flops(x):
        compiled = jax.jit(lambda x: step(x), compiler_options=QUICK).lower(x).compile()
        return compiled.cost_analysis()["flops"]

    found = []
    for devices in (1, 8):
        mesh, placed = on_mesh((devices,), {"x": P("x", None)}, {"x": x}, axis_type)
        with jax.set_mesh(mesh):
            found.append(flops(placed["x"]))
    assert found[1] < 1.5 / 8 * found[0]


@dataclass(frozen=True)
class Call:
    """A program of one array of nodes, differentiated in some way."""

    graph: BipartiteCSC

    def second(self, x):
        """A gradient of a gradient."""
        loss = lambda x: (graph_attention(self.graph, x, x, jnp.ones(2 * H * D), num_heads=H) ** 2).sum()
        return jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum())(x)

    def tangent(self, x):
        """A tangent, by the written rule."""
        call = functools.partial(
            graph_attention_v2, num_heads=H, forward_mode=True, return_attention_weights=True
        )
        return jax.jvp(lambda x: call(self.graph, x, None, jnp.ones(H * D)), (x,), (jnp.cos(x),))

    def plain(self, x):
        """The plain backward, of a forward's outputs and of weights."""
        a = jnp.ones(H * D)
        out, lse = graph_attention_v2(self.graph, x, x, a, num_heads=H, return_residual=True)
        given = {"out": out, "lse": lse, "wrt": ("src", "dst", "attention_weights")}
        grads = graph_attention_v2_bwd(out, self.graph, x, x, a, num_heads=H, **given)
        weights = jnp.broadcast_to(jnp.arange(float(H)), (self.graph.capacity, H))
        more = graph_attention_v2_bwd(None, self.graph, x, x, a, num_heads=H, dweights=weights)
        return grads, more

    def stacked(self, x):
        """A graph made inside, one for each entry of a batch."""
        edges = jnp.arange(3 * EDGES).reshape(3, EDGES) * 7 % SOURCES

        def call(edges, x):
            graph = BipartiteCSC.from_traced(edges, edges[::-1] // 2, SOURCES, SOURCES)
            return (graph_attention_v2(graph, x, x, jnp.ones(H * D), num_heads=H) ** 2).sum()

        return jax.grad(lambda x: jax.vmap(call, (0, None))(edges, x).sum())(x)


@thorough
@pytest.mark.parametrize("name", ["tangent", "second", "plain", "stacked"])
def test_other_derivatives(name):
    rng = np.random.default_rng(0)
    edges = rng.integers(0, SOURCES, (2, EDGES))
    call = getattr(Call(BipartiteCSC.from_coo(*edges, SOURCES, SOURCES)), name)
    x = jnp.asarray(rng.standard_normal((SOURCES, H * D)))
    expected = jax.jit(call, compiler_options=QUICK)(x)
    mesh, placed = on_mesh((8,), {"x": P("x", None)}, {"x": x})
    with jax.set_mesh(mesh):
        got = jax.jit(lambda x: call(x), compiler_options=QUICK)(placed["x"])
    got, expected = (dict(enumerate(jax.tree.leaves(found))) for found in (got, expected))
    assert_trees_close(got, expected, 1e-12)
    assert got[0].sharding.spec[0] == "x"


@thorough
@pytest.mark.parametrize("divides", [True, False])
def test_destinations_that_are_the_first_sources(divides):
    """Where devices cannot share them evenly, the output is on each."""
    nodes = 8 if divides else 5
    graph = BipartiteCSC.from_coo([0, 3, 15], [0, nodes - 1, 0], SOURCES, nodes)
    x, a = jnp.asarray(np.random.default_rng(0).standard_normal((SOURCES, 8))), jnp.ones(8)
    call = lambda x: graph_attention_v2(graph, x, None, a, num_heads=2)
    expected = jax.jit(call, compiler_options=QUICK)(x)
    mesh, placed = on_mesh((8,), {"x": P("x", None)}, {"x": x})
    with jax.set_mesh(mesh):
        got = jax.jit(lambda x: call(x), compiler_options=QUICK)(placed["x"])
    assert_trees_close({"out": got}, {"out": expected}, 1e-12)
    assert got.sharding.spec[0] == ("x" if divides else None)


@thorough
def test_auto_axes_that_are_explicit_for_a_call():
    graph = graph_of("plain")
    arrays = arrays_of("gatv2", False, EDGES)
    call = functools.partial(graph_attention_v2, graph, num_heads=H)
    expected = jax.jit(call, compiler_options=QUICK)(*arrays.values())
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        placed = {n: jax.device_put(x, P("x") if n in NODES else P()) for n, x in arrays.items()}
        there = jax.sharding.explicit_axes(
            lambda src, dst, a: call(src, dst, a), in_sharding=(P("x"), P("x"), P())
        )
        got = jax.jit(there, compiler_options=QUICK)(*placed.values())
    assert_trees_close({"out": got}, {"out": expected}, 1e-12)
    assert got.sharding.spec[0] == "x"
