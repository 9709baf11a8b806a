"""A node of ten thousand edges."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import assert_trees_close
from ops.graph.calls import FUNCTIONS, D, H, each_kind, inputs, values_and_gradients

from jax_attn_bwd import BipartiteCSC
from jax_attn_bwd.ops.graph import plan


@each_kind("gat")
def test_a_hub_of_ten_thousand_edges(kind, monkeypatch):
    """Float32 over many chunks, against the same in float64 by segment sums."""
    monkeypatch.setattr(plan, "chunk_elements", lambda: 1 << 11)  # else the forward has one
    rng = np.random.default_rng(0)
    dst = np.concatenate([np.full(10_000, 2), rng.integers(0, 5, 500)])
    src = rng.integers(0, 300, len(dst))
    src[:4_000] = 11
    graph = BipartiteCSC.from_coo(src, dst, 300, 5)
    arrays = inputs(kind, 300, 5)

    def segments(
        src=None, dst=None, query=None, key=None, value=None, attention_weights=None, num_heads=H, **_
    ):
        ends = np.asarray(graph_src), np.asarray(graph_dst)
        heads = lambda x: x.reshape(x.shape[0], H, D)
        x, y = (key, query) if src is None else (src, dst)
        x, y = heads(x)[ends[0]], heads(y)[ends[1]]
        if kind == "transformer":
            s, x = (x * y).sum(-1) * D**-0.5, heads(value)[ends[0]]
        elif kind == "gat":
            a, b = attention_weights.reshape(2, 1, H, D)
            s = jax.nn.leaky_relu((x * a).sum(-1) + (y * b).sum(-1), 0.2)
        else:
            s = (jax.nn.leaky_relu(x + y, 0.2) * attention_weights.reshape(1, H, D)).sum(-1)
        p = jnp.exp(s - jax.ops.segment_max(s, ends[1], 5)[ends[1]])
        p = p / jax.ops.segment_sum(p, ends[1], 5)[ends[1]]
        return jax.ops.segment_sum(p[..., None] * x, ends[1], 5).reshape(5, H * D)

    graph_src, graph_dst = src, dst
    expected = values_and_gradients(segments, arrays)
    narrow = {name: x.astype(np.float32) for name, x in arrays.items()}
    got = values_and_gradients(FUNCTIONS[kind][0], narrow, graph=graph)
    assert_trees_close(got, expected, 3e-5)
    assert_trees_close(values_and_gradients(FUNCTIONS[kind][0], arrays, graph=graph), expected, 1e-11)
