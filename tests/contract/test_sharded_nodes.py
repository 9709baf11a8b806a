"""Nodes and edges of a graph on an Auto mesh of 8 virtual devices: work is cut, and no loop exchanges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.test_sharding import collectives
from helpers import QUICK, assert_close, thorough
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from parallel.exchanges import loops_and_collectives_in_them

from jax_attn_bwd import (
    BipartiteCSC,
    edge_max,
    edge_softmax,
    graph_attention,
    graph_attention_v2,
    graph_transformer_attention,
)
from jax_attn_bwd.ops.graph import plan

NODES, EDGES, H, D = 16, 512, 2, 4
CALLS = {  # name: (call, shapes of its arrays, least number of loops)
    "gat": (
        lambda g, src, dst, w: graph_attention(g, src, dst, w, num_heads=H),
        {"src": (NODES, H * D), "dst": (NODES, H * D), "w": (2 * H * D,)},
        2,
    ),
    "gatv2": (
        lambda g, src, dst, w, edge: graph_attention_v2(g, src, dst, w, num_heads=H, edge=edge),
        {"src": (NODES, H * D), "dst": (NODES, H * D), "w": (H * D,), "edge": (EDGES, H * D)},
        2,
    ),
    "transformer": (
        lambda g, q, k, v: graph_transformer_attention(g, q, k, v, num_heads=H),
        {"q": (NODES, H * D), "k": (NODES, H * D), "v": (NODES, H * D)},
        2,
    ),
    "edge_softmax": (lambda g, scores: edge_softmax(g, scores), {"scores": (EDGES, H)}, 0),
    "edge_max": (lambda g, edge: edge_max(g, edge), {"edge": (EDGES, H, D)}, 1),
}


@pytest.fixture
def small_chunks(monkeypatch):
    jax.clear_caches()  # what was traced with other chunks
    monkeypatch.setattr(plan, "whole_elements", lambda: 0)
    monkeypatch.setattr(plan, "chunk_elements", lambda: 64)
    yield
    jax.clear_caches()


@pytest.mark.parametrize("jitted", [True, pytest.param(False, marks=thorough)], ids=["jit", "eager"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[thorough] * (n != "gatv2")) for n in CALLS])
def test_nodes_and_edges(name, jitted, small_chunks):
    """One gather of each array that lies by node or by edge, and of the output's cotangent.

    Attention shares its edges: beside arrays it gathers numbers by node and head, and sums twice, and outputs
    lie as nodes do.
    """
    rng, (call, shapes, least) = np.random.default_rng(0), CALLS[name]
    graph = BipartiteCSC.from_coo(rng.integers(0, NODES, EDGES), rng.integers(0, NODES, EDGES), NODES, NODES)
    arrays = {n: jnp.asarray(rng.standard_normal(shape)) for n, shape in shapes.items()}

    def step(arrays, ct):
        out, pullback = jax.vjp(lambda arrays: call(graph, **arrays), arrays)
        return out, pullback(ct)[0]

    ct = jnp.asarray(rng.standard_normal(jax.eval_shape(lambda: call(graph, **arrays)).shape))
    expected = jax.jit(step, compiler_options=QUICK)(arrays, ct)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("x"))
    placed = {n: jax.device_put(x, rows) if x.ndim > 1 else x for n, x in arrays.items()}
    placed_ct = jax.device_put(ct, rows)
    if jitted:  # arrays alone tell of the mesh
        compiled = jax.jit(step, compiler_options=QUICK).lower(placed, placed_ct).compile()
        loops, inside = loops_and_collectives_in_them(compiled)
        counted = collectives(compiled)
        assert loops >= least
        assert inside == 0
        wide = 1 + sum(x.ndim > 1 for x in arrays.values())
        assert sum(counted.values()) <= wide + (0 if name.startswith("edge") else 15), counted
        got = compiled(placed, placed_ct)
        assert name.startswith("edge") or got[0].sharding.spec[0] == "x"
    else:
        with jax.set_mesh(mesh):
            got = step(placed, placed_ct)
    assert_close(got[0], expected[0], 1e-12, "out")
    for n in arrays:
        assert_close(got[1][n], expected[1][n], 1e-12, n)
