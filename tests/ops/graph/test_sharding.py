"""Heads of graph attention over a mesh, beside what the shard cases of `cases.py` hold.

The flat `attention_weights` of GAT are two rows of heads, so they stay whole.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.test_sharding import collectives
from helpers import assert_trees_close, thorough
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_attn_bwd import (
    BipartiteCSC,
    edge_softmax,
    graph_attention,
    graph_attention_bwd,
    graph_attention_v2,
    graph_attention_v2_bwd,
    graph_transformer_attention,
    graph_transformer_attention_bwd,
)
from jax_attn_bwd._core.sharding import match_type

H, D = 8, 4
SPECS = {"src": P(None, "h"), "dst": P(None, "h"), "attention_weights": P()}


def setup():
    rng = np.random.default_rng(0)
    graph = BipartiteCSC.from_coo(rng.integers(0, 7, 23), rng.integers(0, 5, 23), 7, 5)
    shapes = {"src": (7, H * D), "dst": (5, H * D), "attention_weights": (2 * H * D,)}
    arrays = {name: jnp.asarray(rng.standard_normal(shape)) for name, shape in shapes.items()}
    return graph, arrays, jnp.asarray(rng.standard_normal((5, H * D)))


def step(graph, arrays, dout):
    heads = arrays["src"].shape[1] // D
    out, pullback = jax.vjp(lambda a: graph_attention(graph, **a, num_heads=heads), arrays)
    return {"out": out} | pullback(dout)[0]


@pytest.mark.parametrize(
    "axis_type", [pytest.param(AxisType.Auto, marks=thorough), AxisType.Explicit], ids=["auto", "explicit"]
)
def test_jit_with_sharded_heads(axis_type):
    """One collective: the gradient of the whole attention vector is gathered from the heads."""
    graph, arrays, dout = setup()
    expected = step(graph, arrays, dout)
    mesh = jax.make_mesh((4,), ("h",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        placed = {name: put(x, SPECS[name]) for name, x in arrays.items()}
        args = (put(graph, P()), placed, put(dout, P(None, "h")))
        compiled = jax.jit(step).lower(*args).compile()
        got = compiled(*args)
    assert_trees_close(got, expected, 1e-12)
    assert not got["out"].sharding.is_fully_replicated
    counted = collectives(compiled)
    assert sum(counted.values()) <= 1, counted


def test_shard_map_without_collectives():
    """Each device is given its own heads of the two rows of the attention vector."""
    graph, arrays, dout = setup()
    expected = step(graph, arrays, dout)
    rows = arrays | {"attention_weights": arrays["attention_weights"].reshape(2, H * D)}
    specs = dict.fromkeys(rows, P(None, "h"))

    def local(graph, rows, dout):
        flat = rows | {"attention_weights": rows["attention_weights"].reshape(-1)}
        found = step(graph, flat, dout)
        return found | {"attention_weights": found["attention_weights"].reshape(2, -1)}

    mesh = jax.make_mesh((4,), ("h",), axis_types=(AxisType.Auto,))
    sharded = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            check_vma=True,
            in_specs=(P(), specs, P(None, "h")),
            out_specs={"out": P(None, "h")} | specs,
        )
    )
    got = sharded(graph, rows, dout)
    got["attention_weights"] = got["attention_weights"].reshape(-1)
    assert_trees_close(got, expected, 1e-12)
    assert not collectives(sharded.lower(graph, rows, dout).compile())


EXPLICIT = {  # name: (call, its backward, names of the nodes' arrays, options)
    "gat": (graph_attention, graph_attention_bwd, ("src", "dst"), 2),
    "gatv2": (graph_attention_v2, graph_attention_v2_bwd, ("src", "dst"), 1),
    "transformer": (
        graph_transformer_attention,
        graph_transformer_attention_bwd,
        ("query", "key", "value"),
        0,
    ),
}


@pytest.mark.parametrize(
    ("kind", "concat"),
    [
        pytest.param(kind, concat, marks=[] if (kind, concat) == ("gatv2", False) else thorough)
        for kind in EXPLICIT
        for concat in (True, False)
    ],
)
def test_explicit_mesh_with_whole_parameters_and_edges(kind, concat):
    """Nodes have sharded heads; vectors, edges, biases and the cotangent of a `_bwd` come whole."""
    call, backward, nodes, rows = EXPLICIT[kind]
    rng = np.random.default_rng(1)
    graph = BipartiteCSC.from_coo(rng.integers(0, 7, 23), rng.integers(0, 5, 23), 7, 5)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))
    inputs = {n: draw(5 if n in ("dst", "query") else 7, H * D) for n in nodes}
    inputs["edge"] = draw(23, H * D)
    if rows:
        inputs["attention_weights"] = draw((rows + (kind == "gat")) * H * D)
    else:
        inputs["score_bias"] = draw(23, H)
    options = {"num_heads": H, "concat_heads": concat}
    dout = draw(5, H * D if concat else D)

    def step(inputs, dout):
        out, pullback = jax.vjp(lambda i: call(graph, **i, **options), inputs)
        names = tuple(inputs)
        plain = backward(dout, graph, **inputs, wrt=names, **options)
        plain = {f"plain {n}": getattr(plain, n) for n in names}
        return {"out": out} | pullback(match_type(dout, out))[0] | plain

    expected = jax.jit(step)(inputs, dout)
    mesh = jax.make_mesh((4,), ("h",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        placed = {n: put(x, P(None, "h") if n in nodes else P()) for n, x in inputs.items()}
        got = jax.jit(lambda *args: step(*args))(placed, put(dout, P()))
    assert_trees_close(got, expected, 1e-12)
    assert not got[nodes[0]].sharding.is_fully_replicated


def test_shards_of_a_graph_share_the_scores():
    """Each device has a graph of its own; the gradient of the scores they share is the sum."""
    graphs = [BipartiteCSC.from_coo([0, 1, 2], [0, 0, k % 2], 3, 2, capacity=3) for k in range(4)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *graphs)
    scores = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2)))
    mesh = jax.make_mesh((4,), ("g",), axis_types=(AxisType.Auto,))

    def local(graphs, scores):
        own = jax.tree.map(lambda x: x[0], graphs)
        return jax.lax.psum((edge_softmax(own, scores) ** 2).sum(), "g")

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(P("g"), P()), out_specs=P())
    got = jax.jit(jax.grad(sharded, 1))(stacked, scores)
    expected = jax.grad(lambda s: sum((edge_softmax(g, s) ** 2).sum() for g in graphs))(scores)
    assert_trees_close({"scores": got}, {"scores": expected}, 1e-12)


@thorough
def test_a_batch_of_graphs_on_an_explicit_mesh():
    """Under vmap, with dropout: exact, and one all-reduce of the parameters."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))
    graphs = [
        BipartiteCSC.from_coo(rng.integers(0, 7, 20), rng.integers(0, 5, 20), 7, 5, capacity=20)
        for _ in range(8)
    ]
    graphs = jax.tree.map(lambda *x: jnp.stack(x), *graphs)
    arrays, a, dout = (draw(8, 7, H * D), draw(8, 5, H * D)), draw(H * D), draw(8, 5, H * D)
    options = {"num_heads": H, "dropout_rate": 0.3, "dropout_key": jax.random.key(0)}

    def step(graphs, arrays, a, dout):
        def call(arrays, a):
            return jax.vmap(lambda g, src, dst: graph_attention_v2(g, src, dst, a, **options))(
                graphs, *arrays
            )

        out, pullback = jax.vjp(call, arrays, a)
        (dsrc, ddst), da = pullback(dout)
        return {"out": out, "src": dsrc, "dst": ddst, "a": da}

    expected = jax.jit(step)(graphs, arrays, a, dout)
    mesh = jax.make_mesh((8,), ("g",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        put = lambda tree: jax.tree.map(lambda x: jax.device_put(x, P("g")), tree)
        args = put(graphs), put(arrays), a, put(dout)
        compiled = jax.jit(lambda *args: step(*args)).lower(*args).compile()
        assert_trees_close(compiled(*args), expected, 1e-12)
    assert sum(collectives(compiled).values()) <= 1


def test_shardings_that_are_refused():
    graph = BipartiteCSC.from_coo([0, 1, 2], [0, 0, 1], 4, 4)
    mesh = jax.make_mesh((4,), ("h",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        put = lambda spec, *shape: jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec))
        heads, vector = put(P(None, "h"), 4, 8), jnp.ones(16)
        with pytest.raises(ValueError, match=r"dst must be sharded like src, .*, but for its nodes"):
            graph_attention(graph, put(P("h"), 4, 8), heads, vector, num_heads=4)
        with pytest.raises(ValueError, match="src must have its nodes along another mesh axis than batch"):
            graph_attention(graph, put(P("h"), 4, 8), put(P("h"), 4, 4, 8), vector, num_heads=4)
        with pytest.raises(ValueError, match="dst must be sharded like src"):
            graph_attention(graph, heads, put(P(), 4, 8), vector, num_heads=4)
        with pytest.raises(ValueError, match="attention_weights must not be sharded"):
            graph_attention(graph, heads, heads, put(P("h"), 16), num_heads=4)
        with pytest.raises(ValueError, match="num_heads must be a multiple of the size 4 of mesh axis"):
            graph_attention(graph, heads, heads, vector, num_heads=2)
        with pytest.raises(ValueError, match="scores must not be sharded along its edges"):
            edge_softmax(BipartiteCSC.from_coo([0] * 4, [0] * 4, 1, 1), put(P("h"), 4, 8))
