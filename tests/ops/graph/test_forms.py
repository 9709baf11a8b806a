"""The forms of one pass: all edges at once, in chunks, in groups; sums in runs, in one pass or in two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, thorough
from ops.graph.calls import FUNCTIONS, H, every_kind, inputs, random_edges, values_and_gradients

from jax_attn_bwd import BipartiteCSC
from jax_attn_bwd.ops.graph import groups, loops, plan

NNZ, ROOM = 300, 340


@pytest.fixture
def form(monkeypatch):
    """`form(limit of a chunk or None, edges of a group, edges of a run)` builds the graph for a form."""

    def build(limit, width, run, capacity):
        if limit is not None:
            monkeypatch.setattr(plan, "whole_elements", lambda: limit)
            monkeypatch.setattr(plan, "chunk_elements", lambda: limit)
        monkeypatch.setattr(plan, "group_width", lambda edges, nodes: width)
        monkeypatch.setattr(groups, "RUN", run)
        monkeypatch.setattr(loops, "RUN", run)
        jax.clear_caches()
        return BipartiteCSC.from_coo(*random_edges(nnz=NNZ), 7, 5, capacity=capacity)

    yield build
    monkeypatch.undo()
    jax.clear_caches()


FORMS = {  # limit, width, run
    "chunks": (200, 1, 256),
    "runs": (None, 1, 8),
    "chunks of runs": (200, 1, 8),
    "groups": (None, 4, 256),
    "chunks of groups": (200, 4, 256),
}


@pytest.mark.parametrize(
    ("kind", "name", "capacity"),
    [
        pytest.param(kind, name, (None, ROOM)[(i + j) % 2], marks=[thorough] * ((i, j) != (0, 1)))
        for i, name in enumerate(("chunks of runs", "chunks", "runs", "groups", "chunks of groups"))
        for j, kind in enumerate(("transformer", "gat", "gatv2"))
    ],
)
def test_every_form_gives_the_same(kind, name, capacity, form):
    """Values and gradients, with edge data, dropout by key, returned weights, and a bias that hides edges."""
    arrays = inputs(kind, 7, 5, edge=capacity or NNZ)
    if kind == "transformer":
        bias = np.random.default_rng(3).standard_normal((capacity or NNZ, H))
        bias[::5] = -np.inf
        arrays["score_bias"] = jnp.asarray(bias)
    options = {"dropout_rate": 0.3, "dropout_key": jax.random.key(1)}
    options |= {"return_attention_weights": True, "return_residual": True}
    function = FUNCTIONS[kind][0]
    whole = BipartiteCSC.from_coo(*random_edges(nnz=NNZ), 7, 5, capacity=capacity)
    assert plan.whole_elements() > NNZ * 6
    expected = values_and_gradients(function, arrays, graph=whole, **options)
    graph = form(*FORMS[name], capacity)
    assert (graph.run_owners is not None) == ("runs" in name)
    got = values_and_gradients(function, arrays, graph=graph, **options)
    assert_trees_close(got, expected, 1e-12)


@pytest.mark.parametrize("limit", [None, 200])
def test_the_limit_decides_whether_there_is_a_loop(limit, form):
    graph, arrays = form(limit, 1, 256, None), inputs("gatv2", 7, 5)
    step = jax.grad(lambda a: FUNCTIONS["gatv2"][0](graph, **a, num_heads=H).sum())
    loops = str(jax.make_jaxpr(step)(arrays)).count(" scan[")
    assert loops == (0 if limit is None else 3)  # scores, messages, and the pass by source


@pytest.mark.thorough
@every_kind
def test_second_order_of_chunks(kind, form):
    arrays = inputs(kind, 7, 5)

    def curvature(graph):
        def square(a):
            gradient = jax.grad(lambda a: jnp.sin(FUNCTIONS[kind][0](graph, **a, num_heads=H)).sum())(a)
            return sum((g**2).sum() for g in gradient.values())

        return jax.jit(jax.grad(square))(arrays)

    expected = curvature(BipartiteCSC.from_coo(*random_edges(nnz=NNZ), 7, 5))
    assert_trees_close(curvature(form(200, 1, 8, ROOM)), expected, 1e-12)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[thorough] * (k != "gatv2")) for k in FUNCTIONS])
@pytest.mark.parametrize(("dtype", "wider"), [("float32", "float64"), ("bfloat16", "float32")])
def test_weights_and_edges_may_be_wider_than_features(kind, dtype, wider, form):
    """In a loop, too, whose sums have one dtype from step to step; each gradient has that of its argument."""
    graph = form(200, 1, 256, None)
    arrays = {n: x.astype(dtype) for n, x in inputs(kind, 7, 5, edge=NNZ).items()}
    arrays |= {n: arrays[n].astype(wider) for n in ("attention_weights", "edge") if n in arrays}
    found = values_and_gradients(FUNCTIONS[kind][0], arrays, graph=graph)
    exact = values_and_gradients(
        FUNCTIONS[kind][0], {n: x.astype("float64") for n, x in arrays.items()}, graph=graph
    )
    assert {n: x.dtype for n, x in found.items() if n in arrays} == {n: x.dtype for n, x in arrays.items()}
    widened = {n: x.astype("float64") for n, x in found.items()}
    assert_trees_close(widened, exact, {"float32": 1e-5, "bfloat16": 5e-2}[dtype])
