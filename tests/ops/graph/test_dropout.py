"""Dropout of edges: a function of key, head and edge."""

from functools import partial

import jax
import numpy as np
from ops.graph.calls import QUICK, D, H, normal, random_edges

import jax_attn_bwd as jab
from jax_attn_bwd import BipartiteCSC


def test_dropout_depends_on_the_key_and_the_edge_alone():
    src, dst = random_edges(nnz=400)
    order = np.random.default_rng(1).permutation(400)
    x, a = normal(7, H * D), normal(2 * H * D, seed=1)

    options = {"num_heads": H, "dropout_rate": 0.3, "return_attention_weights": True}

    @partial(jax.jit, compiler_options=QUICK)
    def weights(graph, key, offset):
        key = jax.random.key(key)
        return jab.graph_attention(graph, x, x[:5], a, dropout_key=key, dropout_offset=offset, **options)[1]

    def dropped(graph, key=0, dropout_offset=None):
        return np.asarray(weights(graph, key, dropout_offset)[:400] == 0)

    graph = BipartiteCSC.from_coo(src, dst, 7, 5)
    mask = dropped(graph)
    np.testing.assert_array_equal(mask, dropped(BipartiteCSC.from_coo(src, dst, 7, 5, capacity=500)))
    shuffled = BipartiteCSC.from_coo(src[order], dst[order], 7, 5)
    np.testing.assert_array_equal(mask, dropped(shuffled))  # by number, whatever edge has it
    np.testing.assert_array_equal(mask[order], dropped(graph, dropout_offset=(0, 0, order, 0)))
    np.testing.assert_array_equal(mask[:, 1:], dropped(graph, dropout_offset=(0, 1, 0, 0))[:, :1])
    assert (mask != dropped(graph, key=1)).any()
    assert (mask[:, 0] != mask[:, 1]).any()


def test_dropout_keeps_the_share_and_the_mean():
    rng = np.random.default_rng(0)
    graph = BipartiteCSC.from_coo(rng.integers(0, 50, 6_000), rng.integers(0, 40, 6_000), 50, 40)
    x, a = normal(50, H * D), normal(2 * H * D, seed=1)
    options = {"num_heads": H, "return_attention_weights": True}
    dropout = {"dropout_rate": 0.3, "dropout_key": jax.random.key(3)}
    call = lambda graph, **more: jab.graph_attention(graph, x, x[:40], a, **options, **more)[1]
    both = jax.jit(lambda graph: (call(graph), call(graph, **dropout)), compiler_options=QUICK)
    kept, dropped = (np.asarray(weights) for weights in both(graph))
    survives = np.asarray(dropped != 0)
    assert abs(survives.mean() - 0.7) < 5 * (0.3 * 0.7 / survives.size) ** 0.5
    np.testing.assert_allclose(dropped[survives], kept[survives] / 0.7, rtol=1e-12)
