"""The passes where a scatter adds in no order: groups of several edges, one of each node first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_trees_close, thorough
from ops.graph.calls import FUNCTIONS, QUICK, H, each_kind, inputs, normal, values_and_gradients

import jax_attn_bwd as jab
from jax_attn_bwd import BipartiteCSC
from jax_attn_bwd._core import targets
from jax_attn_bwd.ops.graph import levels, loops, plan

SOURCES, DESTINATIONS, EDGES, ROOM = 9, 170, 700, 740


def edges():
    """A destination and a source with many edges; the last nodes of each side have none."""
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, SOURCES - 1, EDGES), rng.integers(0, DESTINATIONS - 2, EDGES)
    src[:200], dst[100:400] = 3, 7
    return src, dst


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """`as_on_a_gpu()`: from here on programs and graphs are a GPU's; `limit`: with loops; `few`: edges."""

    def aim(limit=None, few=EDGES):
        monkeypatch.setattr(targets, "platform", lambda: "gpu")
        monkeypatch.setattr(plan, "_FEW_EDGES", few)
        if limit is not None:
            monkeypatch.setattr(plan, "whole_elements", lambda: limit)
            monkeypatch.setattr(plan, "chunk_elements", lambda: limit)
        jax.clear_caches()

    yield aim
    monkeypatch.undo()
    jax.clear_caches()


@pytest.mark.parametrize(
    ("rows", "nodes"),
    [(0, 4), (3, 2), (9, 5), (4, 90), *(pytest.param(*x, marks=thorough) for x in ((700, 90), (30, 900)))],
)
def test_sums_of_rows_that_lie_together(rows, nodes):
    """As NumPy adds them, where there are few rows beside the nodes, too; those past the end are dropped."""
    rng = np.random.default_rng(rows)
    node = np.sort(rng.integers(0, nodes + 2, rows) * (rng.random(rows) < 0.7)).astype(np.int32)
    x, added = rng.standard_normal((nodes, 2, 3)), rng.standard_normal((rows, 2, 3))
    expected = x.copy()
    np.add.at(expected, node[node < nodes], added[node < nodes])
    added[node >= nodes] = np.nan
    got = jax.jit(loops.add_in_fixed_order, compiler_options=QUICK)(x, node, added)
    assert_close(got, expected, 1e-13)


def test_every_row_of_a_node_is_summed_once():
    """Those of the second are all of three levels, the last of which has one row."""
    counts = [3, 21, 0, 2]
    node = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    got = jax.jit(loops.add_in_fixed_order, compiler_options=QUICK)(
        np.zeros((4, 1)), node, np.ones((len(node), 1))
    )
    assert got[:, 0].tolist() == counts


@pytest.mark.parametrize("counts", [[3, 300, 0, 17, 16], [1, 1], [0, 0, 2]])
@pytest.mark.parametrize("spare", [None, 40])
@pytest.mark.parametrize("limit", [16, 128])
def test_rows_are_summed_by_levels(counts, spare, limit):
    """Each once, so many at a time; as few levels as the counts need, or the shapes where these decide."""
    count, rows = np.array(counts), sum(counts) + (spare or 0)
    found, most = levels.levels_of(count, rows, spare is None, limit), max(counts) if spare is None else rows
    assert len(found) == 1 + (most > limit) + (most > limit**2)
    for start, steps in found:
        assert np.diff(start).max() <= len(steps) <= limit
    x = np.arange(1.0, rows + 1)[:, None]
    got = loops.by_levels(jnp.asarray(x), found, jnp.sum, 0)[:, 0]
    assert got.tolist() == [part.sum() for part in np.split(x, np.cumsum(counts))[:-1]]


@pytest.mark.parametrize("few", [0, pytest.param(ROOM, marks=thorough)])
@pytest.mark.parametrize("nnz", [EDGES, pytest.param(0, marks=thorough)])
def test_chunks_hold_every_edge_once(nnz, few, as_on_a_gpu):
    """With many edges the first chunk is a group of each node, without a `node`; also as `jit` builds it."""
    as_on_a_gpu(few=few)
    src, dst = (x[:nnz] for x in edges())
    for capacity in (None, ROOM, "traced"):
        if capacity == "traced":
            graph = BipartiteCSC.from_traced(jnp.asarray(src), jnp.asarray(dst), SOURCES, DESTINATIONS)
        else:
            graph = BipartiteCSC.from_coo(src, dst, SOURCES, DESTINATIONS, capacity=capacity)
        parts = loops.parts(graph.by_destination, graph.capacity, in_order=False)
        is_apart = nnz > few or (capacity == ROOM > few)
        assert [part.node is None for part in parts] == ([True, False][: len(parts)] if is_apart else [False])
        found = []
        for part in parts:
            node = np.arange(DESTINATIONS) if part.node is None else np.asarray(part.node)
            owner = np.broadcast_to(node, part.number.shape)[np.asarray(part.exists)]
            number = np.asarray(part.number)[np.asarray(part.exists)]
            np.testing.assert_array_equal(owner, dst[number])
            np.testing.assert_array_equal(np.asarray(part.other)[np.asarray(part.exists)], src[number])
            found.append(number)
        np.testing.assert_array_equal(np.sort(np.concatenate(found)), np.arange(nnz))


@pytest.mark.parametrize("aim", [{}, {"few": 0}, {"limit": 2000}], ids=["whole", "apart", "loops"])
@pytest.mark.parametrize("weights", [True, False])
@each_kind()
def test_the_same_as_on_a_cpu(kind, weights, aim, as_on_a_gpu):
    """With edge data, dropout, returned weights, a bias that hides edges, and NaN in nodes without edges."""
    arrays = inputs(kind, SOURCES, DESTINATIONS, edge=ROOM)
    if kind == "transformer":
        bias = np.random.default_rng(3).standard_normal((ROOM, H))
        bias[::5] = -np.inf
        arrays["score_bias"] = jnp.asarray(bias)
    options = {"dropout_rate": 0.3, "dropout_key": jax.random.key(1), "implementation": "xla"}
    options |= {"return_attention_weights": weights, "return_residual": True}

    def run(arrays):
        graph = BipartiteCSC.from_coo(*edges(), SOURCES, DESTINATIONS, capacity=ROOM)
        return graph, values_and_gradients(FUNCTIONS[kind][0], arrays, graph=graph, **options)

    _, expected = run(arrays)
    as_on_a_gpu(**aim)
    for name in ("src", "key", "value", "dst", "query"):
        if name in arrays:
            arrays[name] = arrays[name].at[-1].set(jnp.nan)
    graph, got = run(arrays)
    assert graph.by_destination.other.shape[1] > 1 < graph.by_source.other.shape[1]
    assert_trees_close(got, expected, 1e-12)


CALLS = {
    "gat": lambda graph, x, y, edge: jab.graph_attention(graph, x, y, jnp.ones(12), num_heads=2),
    "gatv2": lambda graph, x, y, edge: jab.graph_attention_v2(graph, x, y, jnp.ones(6), num_heads=2),
    "transformer": lambda graph, x, y, edge: jab.graph_transformer_attention(graph, y, x, x, num_heads=2),
    "edge_softmax": lambda graph, x, y, edge: jab.edge_softmax(graph, edge),
    "edge_mean": lambda graph, x, y, edge: jab.edge_mean(graph, edge),
    "edge_max": lambda graph, x, y, edge: jab.edge_max(graph, edge),
}


_DEFAULT = (("gat", None), ("transformer", 500), ("edge_max", None))


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        pytest.param(name, limit, marks=[thorough] * ((name, limit) not in _DEFAULT))
        for name in CALLS
        for limit in (None, 500)
    ],
)
def test_no_scatter_adds_in_any_order(name, limit, as_on_a_gpu):
    """The same bits in every run: a float is added to a row once, or not by a scatter."""
    as_on_a_gpu(limit)
    graph = BipartiteCSC.from_coo(*edges(), SOURCES, DESTINATIONS, capacity=ROOM)
    arrays = normal(SOURCES, 6), normal(DESTINATIONS, 6), normal(ROOM, 2)

    def step(*arrays):
        out, pullback = jax.vjp(lambda *arrays: CALLS[name](graph, *arrays), *arrays)
        return pullback(out)

    found = [e for e in equations(jax.make_jaxpr(step)(*arrays).jaxpr) if "scatter" in e.primitive.name]
    added = [e for e in found if "add" in e.primitive.name and jnp.issubdtype(e.outvars[0].aval.dtype, float)]
    assert not [e for e in added if not e.params["unique_indices"]]
