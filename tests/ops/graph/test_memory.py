"""What is saved, what is never formed, and in which order sums are taken."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, saved_arrays, thorough
from ops.graph.calls import (
    FUNCTIONS,
    D,
    H,
    each_kind,
    every_kind,
    inputs,
    normal,
    random_edges,
    values_and_gradients,
)

from jax_attn_bwd import BipartiteCSC
from jax_attn_bwd._core import targets
from jax_attn_bwd.ops.graph import plan


@every_kind
def test_only_inputs_out_and_lse_are_saved(kind):
    src, dst = random_edges()
    graph, arrays = BipartiteCSC.from_coo(src, dst, 7, 5), inputs(kind, 7, 5)
    _, pullback = jax.vjp(lambda a: FUNCTIONS[kind][0](graph, **a, num_heads=H), arrays)
    saved = sorted(x.size for x in saved_arrays(pullback) if jnp.issubdtype(x.dtype, jnp.floating))
    rows = [5 * H, 5 * H, 5 * H * D]  # lse, its rounding, out
    assert saved == sorted([x.size for x in arrays.values()] + rows)


def largest(jaxpr):
    """Elements of the largest array of a program, in its loops too."""
    size = 0
    for equation in jaxpr.eqns:
        size = max([size, *(int(np.prod(v.aval.shape)) for v in equation.outvars)])
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            size = max(size, largest(inner)) if hasattr(inner, "eqns") else size
    return size


@pytest.mark.parametrize("features", [3, 4])
@every_kind
def test_messages_alone_take_a_loop_at_twice_the_size(kind, features, monkeypatch):
    """GAT from four features a head."""
    for limit in ("whole_elements", "chunk_elements"):
        monkeypatch.setattr(plan, limit, lambda: 100)
    width = H * features

    def has_loop(nnz):
        graph, arrays = BipartiteCSC.from_coo(*random_edges(nnz=nnz), 7, 5), inputs(kind, 7, 5, width=width)
        return "scan[" in str(jax.make_jaxpr(lambda a: FUNCTIONS[kind][0](graph, **a, num_heads=H))(arrays))

    is_sooner = kind != "gat" or features < 4
    assert [has_loop(elements // width) for elements in (96, 192, 216)] == [False, is_sooner, True]


@every_kind
def test_no_array_of_edges_times_features(kind):
    E, width = 200_000, 32
    rng = np.random.default_rng(0)
    graph = BipartiteCSC.from_coo(rng.integers(0, 90, E), rng.integers(0, 80, E), 90, 80)
    arrays = inputs(kind, 90, 80, dtype=np.float32, width=width)

    def step(arrays, ct):
        out, pullback = jax.vjp(lambda a: FUNCTIONS[kind][0](graph, **a, num_heads=H), arrays)
        return out, pullback(ct)

    jaxpr = jax.make_jaxpr(step)(arrays, normal(80, width, dtype=np.float32)).jaxpr
    assert E * H <= largest(jaxpr) <= E * width / 4


@thorough
@each_kind("gat")
def test_sums_have_one_writer_off_the_cpu(kind, monkeypatch):
    """Where a scatter adds in any order, a graph that was grouped on a CPU adds no two rows to one place."""
    src, dst = random_edges(nnz=300)
    graph, arrays = BipartiteCSC.from_coo(src, dst, 7, 5), inputs(kind, 7, 5, edge=300)
    function = FUNCTIONS[kind][0]
    expected = values_and_gradients(function, arrays, graph=graph)
    monkeypatch.setattr(targets, "platform", lambda: "gpu")
    monkeypatch.setattr(plan, "chunk_elements", lambda: 200)
    jax.clear_caches()
    try:
        assert_trees_close(values_and_gradients(function, arrays, graph=graph), expected, 1e-12)
        gradient = jax.grad(lambda a: function(graph, **a, num_heads=H).sum())
        text = str(jax.make_jaxpr(gradient)(arrays))
    finally:
        monkeypatch.undo()
        jax.clear_caches()
    assert "scatter" in text  # the last row of each node, an integer
    assert "False" not in re.findall(r"scatter-add\[.*?unique_indices=(\w+)", text, re.DOTALL)


@pytest.mark.parametrize("kind", ["gatv2", "transformer"])
def test_small_graphs_read_each_row_once_in_a_step(kind):
    """The backward takes the edges as the forward did, and adds the rows of dout to what is read."""
    nodes, nnz, width = 19, 101, 6
    graph = BipartiteCSC.from_coo(*random_edges(nnz=nnz, num_src=nodes, num_dst=nodes), nodes, nodes)
    arrays = inputs(kind, nodes, nodes, width=width, dtype=np.float32)

    def step(arrays, ct):
        out, pullback = jax.vjp(lambda a: FUNCTIONS[kind][0](graph, **a, num_heads=H), arrays)
        return out, pullback(ct)

    text = jax.jit(step).lower(arrays, normal(nodes, width, dtype=np.float32)).compile().as_text()
    read = re.findall(rf"f32\[{nnz},[1,]*({H},{width // H}|{width})\]\S* gather\(", text)
    assert len(read) == len(arrays) - (kind == "gatv2") + 1


def test_gradients_of_small_graphs_sum_no_messages():
    """No one reads out, so that a forward that `jax.checkpoint` computes anew leaves it out."""
    nodes, width = 19, 6
    graph = BipartiteCSC.from_coo(*random_edges(nnz=101, num_src=nodes, num_dst=nodes), nodes, nodes)
    arrays, ct = (
        inputs("gat", nodes, nodes, width=width, dtype=np.float32),
        normal(nodes, width, dtype=np.float32),
    )
    gradient = jax.grad(lambda a: (FUNCTIONS["gat"][0](graph, **a, num_heads=H) * ct).sum())
    text = jax.jit(gradient).lower(arrays).compile().as_text()
    summed = re.findall(rf"f32\[{nodes},{H},{width // H}\]\S* scatter\(", text)
    assert len(summed) == 1  # the gradient of the sources
