"""The GPU kernels of graph attention, beyond the contract: segments, dtypes, vmap, meshes, refusals."""

import contextlib
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPERATORS, assert_trees_close, interpreted, thorough
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ops.graph import calls
from ops.graph.calls import FUNCTIONS, each_kind, every_kind, random_edges

from jax_attn_bwd import BipartiteCSC, check, explain, graph_attention, graph_transformer_attention
from jax_attn_bwd._core import pallas, targets
from jax_attn_bwd.ops.graph import plan, segments
from jax_attn_bwd.ops.graph.kernels import gpu_walk
from jax_attn_bwd.ops.graph.kernels.gpu_body import heads_of_block, segments_of, settled
from jax_attn_bwd.ops.graph.segments import LENGTH

NAME = "mosaic_gpu"
WIDTH = 128  # the channels of four heads


@pytest.fixture
def interpreting():
    with pallas.interpreting(NAME):
        yield


@dataclass(frozen=True)
class Telling(AbstractDevice):
    compute_capability: str


@contextlib.contextmanager
def aimed_at(kind, capability=None):
    """Programs are for that GPU, which is not there: they are traced, and not run."""
    told = () if capability is None else (capability,)
    device = (Telling if told else AbstractDevice)(kind, 100, "gpu", *told)
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Explicit,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def small_graph(src=None, dst=None, num_src=7, num_dst=5, *, width=1, capacity=None, carried=False):
    """In groups of up to `width` edges, 1 as on a CPU, more as on a GPU; `carried`: with its schedules."""
    if src is None:
        src, dst = random_edges()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "group_width", lambda edges, nodes: width)
        if carried:
            patch.setattr(targets, "platform", lambda: "gpu")
        return BipartiteCSC.from_coo(src, dst, num_src, num_dst, capacity=capacity)


def inputs(kind, edge=None, width=WIDTH):
    """float32 arguments whose scores are of the size that layers begin with."""
    arrays = calls.inputs(kind, 7, 5, edge=edge, dtype=np.float32, width=width)
    return {name: 0.1 * x if name == "attention_weights" else x for name, x in arrays.items()}


def values_and_gradients(kind, implementation, graph, arrays, wanted=None, **options):
    """Outputs and gradients by name, under random cotangents."""

    def call(inputs):
        given = {**arrays, **inputs, **options, "implementation": implementation}
        out, lse = FUNCTIONS[kind][0](graph, **given, num_heads=4, return_residual=True)
        return out, jnp.where(jnp.isfinite(lse), lse, 0)

    @jax.jit
    def run(inputs):
        outputs, pullback = jax.vjp(call, inputs)
        rng = np.random.default_rng(5)
        cts = tuple(jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in outputs)
        return dict(zip(("out", "lse"), outputs, strict=True)) | pullback(cts)[0]

    return jax.block_until_ready(run({name: arrays[name] for name in wanted or arrays}))


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("capacity", [None, 2000])
def test_segments_hold_every_edge_once(width, capacity, carried):
    """Those that a graph carries, and those that are cut in a call; as many as needed if none is padding."""
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 40, 1500), rng.integers(0, 30, 1500)
    src[:600], dst[700:], dst[:256] = 3, 7, 9
    dst[dst == 29] = 0
    graph = small_graph(src, dst, 40, 30, width=width, capacity=capacity, carried=carried)
    assert (graph.schedules is not None) == carried
    cut = jax.jit(segments_of, static_argnums=1)
    sides = (("by_destination", 30, dst, src), ("by_source", 40, src, dst))
    for side, nodes, near, far in sides:
        at, groups = jax.tree.map(np.asarray, (cut(graph, side), getattr(graph, side)))
        number, other = groups.number.reshape(-1), groups.other.reshape(-1)
        lengths = np.where(at.node < nodes, at.length, -1)
        assert (np.diff(lengths) <= 0).all()
        assert lengths[0] <= LENGTH
        owners = np.where(at.node < 0, at.owner[np.maximum(-1 - at.node, 0)], at.node)
        assert set(owners) >= set(range(nodes))  # the rows of nodes without edges are written, too
        seen, spills = [], []
        for node, begin, length, code in zip(owners, at.begin, at.length, at.node, strict=True):
            if node == nodes:
                continue
            numbers, spill = number[begin : begin + length], -1 - code
            assert (near[numbers] == node).all()
            assert (far[numbers] == other[begin : begin + length]).all()
            seen += [*numbers]
            assert (spill >= 0) == (np.bincount(near, minlength=nodes)[node] > LENGTH)
            if spill >= 0:
                assert at.owner[spill] == node
                spills.append(spill)
        assert sorted(seen) == list(range(1500))
        assert sorted(spills) == list(range(len(spills)))
        assert (np.diff(at.owner) >= 0).all()
        assert (at.owner[len(spills) :] == nodes).all()
        if carried and capacity is None:
            assert len(at.owner) == len(spills)
            assert (at.node < nodes).all()


@pytest.mark.parametrize("how", ["running", "exact", "bounded"])
def test_spills_are_put_together(how):
    """By running sums where `jit` cut the segments, else by levels: one, two, and three of them."""
    for counts in ([0, 3, 0, 0, 1, 0, 2], [2, 300, 0, 17], [0, 17_000]):
        nodes, parts = len(counts), np.where(np.array(counts) > 1, counts, 0)
        owner = np.repeat(np.arange(nodes), parts)
        x, room = np.random.default_rng(1).standard_normal((len(owner), 2)), 0 if how == "exact" else 5
        expected = np.full((nodes, 2), 7.0)
        for node in np.flatnonzero(parts):
            expected[node] = x[owner == node].sum(0)
        spills = len(owner) + room
        found: tuple = (None, [])
        if how != "running":
            found = segments.levels_of_hubs(parts, spills, (spills + 3) * LENGTH, how == "exact")
        owner = jnp.asarray(np.append(owner, np.full(room, nodes)), jnp.int32)
        at = segments.Segments(
            None, None, None, owner, *jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), found)
        )
        x = np.append(x, np.full((room, 2), np.nan), 0)
        got = jax.jit(settled)(jnp.full((nodes, 2), 7.0), at, x)
        np.testing.assert_allclose(got, expected, 1e-12, 1e-12)


@interpreted
@pytest.mark.parametrize(
    ("H", "D", "segments"),
    [(1, 8, 128), (8, 8, 16), (6, 64, 8), (4, 64, 4), (1, 256, 4), (8, 64, 2), (16, 64, 2), (4, 256, 2)],
)
def test_a_thread_holds_eight_neighbouring_numbers(H, D, segments):
    """Each of the 1024 numbers of a program is held once, in a load or two of 16 bytes."""
    height = heads_of_block(H, D)
    layout = gpu_walk.layout(segments, height, D).to_mgpu()
    assert gpu_walk.together(H, D) == segments
    assert layout.vector_length == 8
    assert set(layout.registers_shape((segments, height, D))) == {1}


@pytest.fixture
def short_segments(monkeypatch):
    """Segments of three edges at most: most nodes have several."""
    jax.clear_caches()
    monkeypatch.setattr(segments, "LENGTH", 3)
    yield
    jax.clear_caches()


@interpreted
@thorough
@every_kind
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.usefixtures("interpreting", "short_segments")
def test_nodes_of_several_segments_and_groups_of_several_edges(kind, carried):
    """Groups are as graphs have them on a GPU; the weights are not asked for."""
    graph = small_graph(width=2, capacity=None if carried else 30, carried=carried)
    assert (segments_of(graph, "by_source").node < 0).sum() > 4
    arrays = inputs(kind, graph.capacity)
    got, expected = (values_and_gradients(kind, name, graph, arrays) for name in (NAME, "xla"))
    assert_trees_close(got, expected, 2e-6)


@interpreted
@thorough
@each_kind()
@pytest.mark.usefixtures("interpreting")
def test_each_gradient_alone(kind):
    graph = small_graph()
    arrays = inputs(kind, graph.capacity)
    expected = values_and_gradients(kind, "xla", graph, arrays)
    for name in [name for name in arrays if name != "edge"]:
        got = values_and_gradients(kind, NAME, graph, arrays, wanted=(name,))
        assert_trees_close(got, {n: expected[n] for n in got}, 2e-6)


@interpreted
@thorough
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("graph_attention", "bfloat16"),
        ("graph_attention_v2", "float16"),
        ("graph_transformer_attention", "bfloat16"),
    ],
)
@pytest.mark.usefixtures("interpreting")
def test_low_precision_within_twice_the_plain_formula(name, dtype):
    (operator,) = (o for o in OPERATORS if o.name == name)
    with jax.enable_x64(False):
        for case in operator.tagged("kernel"):
            assert explain(operator.call, **case.arrays(dtype), **case.options)[NAME] == "ok"
            for row in check.measure(operator, NAME, case, dtype):
                assert row.ok, row


@interpreted
@thorough
@pytest.mark.usefixtures("interpreting")
def test_huge_scores_that_tie():
    """The two parts of lse reach the backward: log l is lost beside a maximum of 1e6."""
    graph, arrays = small_graph(), inputs("gat")
    arrays["attention_weights"] = jnp.zeros(2 * WIDTH, np.float32).at[WIDTH].set(1e6)
    arrays["dst"] = jnp.ones((5, WIDTH), np.float32)
    got, expected = (values_and_gradients("gat", name, graph, arrays) for name in (NAME, "xla"))
    assert np.abs(got["lse"]).max() > 9e5
    assert_trees_close(got, expected, 2e-6)


@interpreted
@thorough
@pytest.mark.parametrize("kind", ["gatv2", "gat"])
@pytest.mark.usefixtures("interpreting")
def test_vmap(kind):
    """Over all arrays, and over one alone with a stack of graphs."""
    one, two = small_graph(capacity=30), small_graph(*random_edges(seed=3), capacity=30)
    graphs = jax.tree.map(lambda *x: jnp.stack(x), one, two)
    arrays = inputs(kind, 30)
    stacks = {name: jnp.stack([x, 0.5 - x]) for name, x in arrays.items()}
    first = next(iter(arrays))
    for names, graph in (([*arrays], one), ([first], graphs)):
        axes = {name: 0 if name in names else None for name in arrays}
        given = {name: stacks[name] if name in names else x for name, x in arrays.items()}
        got, expected = (
            jax.vmap(
                lambda g, a, i=i: values_and_gradients(kind, i, g, a), (0 if graph is graphs else None, axes)
            )(graph, given)
            for i in (NAME, "xla")
        )
        assert_trees_close(got, expected, 4e-6)


@interpreted
@thorough
@pytest.mark.parametrize("kind", ["gat", "gatv2"])
@pytest.mark.parametrize("how", ["explicit", "shard_map"])
@pytest.mark.usefixtures("interpreting")
def test_sharded_heads(kind, how):
    """On an Explicit mesh each device runs its own heads; in `shard_map` the kernels just run."""
    graph, arrays = small_graph(), inputs(kind, width=2 * WIDTH)
    options = {"num_heads": 8 if how == "explicit" else 4}

    def step(arrays, implementation):
        def call(arrays):
            return FUNCTIONS[kind][0](graph, **arrays, **options, implementation=implementation)

        out, pullback = jax.vjp(call, arrays)
        return {"out": out} | pullback(jnp.sin(3 * out))[0]

    kind_of_axis = AxisType.Explicit if how == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2,), ("h",), axis_types=(kind_of_axis,))
    specs = {name: P() if name == "attention_weights" else P(None, "h") for name in arrays}
    if how == "explicit":
        expected = step(arrays, "xla")
        with jax.set_mesh(mesh):
            placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}
            got = jax.jit(step, static_argnums=1)(placed, NAME)
    else:
        arrays = {name: x if x.ndim == 2 else x[: x.size // 2] for name, x in arrays.items()}
        of = lambda name: jax.shard_map(
            lambda a: step(a, name), mesh=mesh, in_specs=(specs,), out_specs=specs | {"out": P(None, "h")}
        )
        got, expected = (jax.jit(of(name))(arrays) for name in (NAME, "xla"))
    assert_trees_close(got, expected, 4e-6)


def shapes(num_heads=4, width=WIDTH, dtype="float32"):
    graph = small_graph()
    src, dst, a = ((7, width), (5, width), (2 * width,))
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in (src, dst, a)]
    return lambda: explain(graph_attention, graph, *arrays, num_heads=num_heads).refused.get(NAME, "ok")


@interpreted
@pytest.mark.parametrize(
    ("kind", "capability"),
    [
        ("NVIDIA A100-SXM4-80GB", None),
        ("NVIDIA L40S", None),
        ("NVIDIA H100 80GB HBM3", "9.0"),
        ("NVIDIA B200", None),
        ("NVIDIA GeForce RTX 3090", "8.6"),
        ("some kind", "10.0"),
    ],
)
def test_gpus_from_ampere_on_are_accepted(kind, capability):
    reason = shapes()
    with aimed_at(kind, capability):
        assert reason() == "ok"


@pytest.mark.parametrize(
    ("kind", "capability"), [("Tesla T4", "7.5"), ("Tesla V100-SXM2-16GB", None), ("some kind", None)]
)
def test_older_gpus_are_refused(kind, capability):
    reason = shapes()
    with aimed_at(kind, capability):
        assert reason() == f"it needs an NVIDIA GPU of compute capability 8.0 or more, not {kind}"


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="this JAX can run them")
def test_older_versions_of_jax_are_refused():
    reason = shapes()
    with aimed_at("NVIDIA H200"):
        assert reason() == f"its kernels need JAX 0.12 or later, not {jax.__version__}"


@interpreted
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"width": 4 * 24}, r"width of a head must be one of \(8, 16, 32, 64, 128, 256\), got 24"),
        ({"dtype": "float64"}, r"features must be of one of \('float32', .*\), got src of float64"),
    ],
    ids=["width", "float64"],
)
@pytest.mark.usefixtures("interpreting")
def test_what_is_refused(given, words):
    assert re.search(words, shapes(**given)())


@interpreted
@pytest.mark.parametrize(
    ("key", "value", "heads", "words"),
    [
        (WIDTH // 2, WIDTH // 2, 2, "every head must have a key of its own, got 2 heads that share one"),
        (WIDTH, WIDTH // 2, 4, f"values must be as wide as keys, got {WIDTH // 2} and {WIDTH}"),
    ],
    ids=["shared", "value"],
)
@pytest.mark.usefixtures("interpreting")
def test_shared_heads_and_values_of_another_width_are_refused(key, value, heads, words):
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((5, WIDTH), (7, key), (7, value))]
    options = {"num_heads": 4, "num_kv_heads": heads}
    assert explain(graph_transformer_attention, small_graph(), *arrays, **options)[NAME] == words


@interpreted
@pytest.mark.usefixtures("interpreting")
def test_graphs_without_room_for_edges_are_refused():
    graph, x = small_graph([], [], 3, 2), jnp.ones((3, WIDTH), np.float32)
    with pytest.raises(NotImplementedError, match="cannot run this call: the graph has no room for edges"):
        graph_attention(graph, x, None, jnp.ones(2 * WIDTH), num_heads=4, implementation=NAME)
