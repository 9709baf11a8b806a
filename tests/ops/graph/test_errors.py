"""Every error of the graph operators."""

import re

import jax
import jax.numpy as jnp
import pytest

import jax_attn_bwd as jab
from jax_attn_bwd import BipartiteCSC

GRAPH = BipartiteCSC.from_coo([0, 2, 1], [1, 0, 1], 3, 2)
X, Y, A = jnp.ones((3, 4)), jnp.ones((2, 4)), jnp.ones(8)


def gat(graph=GRAPH, src=X, dst=Y, attention_weights=A, num_heads=2, **options):
    return jab.graph_attention(graph, src, dst, attention_weights, num_heads=num_heads, **options)


def transformer(query=Y, key=X, value=X, num_heads=2, **options):
    return jab.graph_transformer_attention(GRAPH, query, key, value, num_heads=num_heads, **options)


KEY = jax.random.key(0)


BAD = {
    "graph": (TypeError, lambda: gat(graph=(0, 1)), "graph must be a BipartiteCSC, got tuple; build"),
    "rank": (ValueError, lambda: gat(src=X[0]), "src must have shape [..., num_src, dim], got (4,)"),
    "nodes": (ValueError, lambda: gat(src=Y), "src must have shape [..., num_src, dim] = (3, 4), got (2, 4)"),
    "heads apart": (
        ValueError,
        lambda: gat(src=jnp.ones((3, 2, 2))),
        "src must have shape [..., num_src, dim] = (3, 3, 2), got (3, 2, 2); "
        "heads lie side by side, src.reshape(*src.shape[:-2], -1); a batch in front",
    ),
    "batches": (
        ValueError,
        lambda: gat(src=jnp.ones((6, 3, 4)), dst=jnp.ones((5, 2, 4))),
        "dst must have the batch axes of src, (6,), or none, got (5,)",
    ),
    "batch of edges": (
        ValueError,
        lambda: gat(src=jnp.ones((6, 3, 4)), edge=jnp.ones((1, 3, 2))),
        "edge must have the batch axes of the nodes, (6,), or none, got (1,)",
    ),
    "batch of edges alone": (
        ValueError,
        lambda: gat(edge=jnp.ones((6, 3, 2))),
        "edge must have two axes, as the nodes have no batch axes, got (6, 3, 2)",
    ),
    "batch of biases": (
        ValueError,
        lambda: transformer(query=jnp.ones((6, 2, 4)), score_bias=jnp.ones((6, 3, 3))),
        "score_bias must broadcast to [..., nnz, H] = (6, 3, 2), got (6, 3, 3)",
    ),
    "dout without a batch": (
        ValueError,
        lambda: jab.graph_attention_bwd(Y, GRAPH, jnp.ones((6, 3, 4)), Y, A, num_heads=2),
        "dout must have shape the shape of out = (6, 2, 4), got (2, 4)",
    ),
    "dst": (ValueError, lambda: gat(dst=X), "dst must have shape [..., num_dst, dim] = (2, 4), got (3, 4)"),
    "dtypes": (TypeError, lambda: gat(dst=Y.astype("bfloat16")), "src, dst must have one dtype"),
    "integers": (TypeError, lambda: gat(src=X.astype(int)), "src must be a floating-point array"),
    "heads": (
        ValueError,
        lambda: gat(num_heads=3),
        "num_heads must be positive and divide the width of src, 4, got 3",
    ),
    "heads kind": (TypeError, lambda: gat(num_heads=2.0), "num_heads must be an int, got float"),
    "attention vector": (
        ValueError,
        lambda: gat(attention_weights=jnp.ones(4)),
        "attention_weights must have shape [2 * dim] = (8,), got (4,)",
    ),
    "attention vector with edge": (
        ValueError,
        lambda: gat(edge=jnp.ones((3, 2))),
        "attention_weights must have shape [2 * dim + dim_edge] = (10,), got (8,)",
    ),
    "edge rows": (
        ValueError,
        lambda: gat(edge=jnp.ones((2, 2))),
        "edge must have shape [..., nnz, dim_edge] = (3, 2), got (2, 2)",
    ),
    "edge width": (
        ValueError,
        lambda: gat(edge=jnp.ones((3, 3))),
        "edge must have a width that num_heads = 2 divides, got (3, 3)",
    ),
    "edge of transformer": (
        ValueError,
        lambda: transformer(edge=jnp.ones((3, 2))),
        "edge must have shape [..., nnz, dim] = (3, 4), got (3, 2)",
    ),
    "value beside edge": (
        ValueError,
        lambda: transformer(value=jnp.ones((3, 6)), edge=jnp.ones((3, 4))),
        "value must have the width of key, 4, where edge is given, got (3, 6); edge features are added",
    ),
    "value width": (
        ValueError,
        lambda: transformer(value=jnp.ones((3, 3))),
        "value must have a width that its 2 heads divide, got (3, 3)",
    ),
    "key heads": (
        ValueError,
        lambda: transformer(num_kv_heads=1),
        "key must have shape [..., num_src, K * D] = (3, 2), got (3, 4)",
    ),
    "key of fewer heads": (
        ValueError,
        lambda: transformer(key=X[:, :2]),
        "key must have shape [..., num_src, dim] = (3, 4), got (3, 2); num_kv_heads is the number",
    ),
    "grouped heads": (
        ValueError,
        lambda: transformer(num_kv_heads=3),
        "num_kv_heads must be positive and divide num_heads, 2, got 3",
    ),
    "activation": (ValueError, lambda: gat(activation="gelu"), "activation must be one of ('linear'"),
    "alpha": (TypeError, lambda: gat(alpha=jnp.ones(())), "alpha must be a Python float"),
    "mask": (
        ValueError,
        lambda: gat(dropout_mask=jnp.ones((3, 2))),
        "dropout_mask must have shape [..., H, nnz] = (2, 3), got (3, 2)",
    ),
    "mask and rate": (
        ValueError,
        lambda: gat(dropout_mask=jnp.ones((2, 3)), dropout_rate=0.5, dropout_key=KEY),
        "dropout_mask must not be given together with dropout_rate or dropout_key, got both",
    ),
    "key": (ValueError, lambda: gat(dropout_rate=0.5), "dropout_key must be given when dropout_rate"),
    "key without rate": (
        TypeError,
        lambda: gat(dropout_key=0),
        "dropout_key must be one JAX random key, got int",
    ),
    "offset with mask": (
        ValueError,
        lambda: gat(dropout_mask=jnp.ones((2, 3)), dropout_offset=(0, -1, 0, 0)),
        "dropout_offset head must lie in",
    ),
    "rate": (ValueError, lambda: gat(dropout_rate=1.5), "dropout_rate must lie in [0, 1], got 1.5"),
    "bias": (
        ValueError,
        lambda: transformer(score_bias=jnp.ones((2, 2))),
        "score_bias must broadcast to [..., nnz, H] = (3, 2), got (2, 2)",
    ),
    "scale": (TypeError, lambda: transformer(scale=jnp.ones((), bool)), "scale must be a Python float"),
    "implementation": (ValueError, lambda: gat(implementation="cuda"), "implementation must be None or"),
    "kernel": (
        NotImplementedError,
        lambda: gat(implementation="mosaic_gpu"),
        "implementation='mosaic_gpu' cannot run this call",
    ),
    "scores": (
        ValueError,
        lambda: jab.edge_softmax(GRAPH, jnp.ones((2, 2))),
        "edge_softmax: scores must have shape [..., nnz, H] with nnz = 3, got (2, 2)",
    ),
    "dout": (
        ValueError,
        lambda: jab.graph_attention_bwd(X, GRAPH, X, Y, A, num_heads=2),
        "graph_attention_bwd: dout must have shape the shape of out = (2, 4), got (3, 4)",
    ),
    "lse": (
        TypeError,
        lambda: jab.graph_attention_bwd(
            Y, GRAPH, X, Y, A, num_heads=2, out=Y, lse=jnp.ones((2, 2), "bfloat16")
        ),
        "graph_attention_bwd: lse must have dtype",
    ),
    "wrt": (
        ValueError,
        lambda: jab.graph_attention_bwd(Y, GRAPH, X, Y, A, num_heads=2, wrt="edge"),
        "wrt must name arguments that were given, got 'edge', which is None",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    kind, call, message = BAD[name]
    with pytest.raises(kind, match=re.escape(message)):
        call()


def test_dst_none_needs_enough_sources():
    graph = BipartiteCSC.from_coo([0], [2], 1, 3)
    expected = "dst must be given, or num_dst = 3 be at most num_src = 1, got None"
    with pytest.raises(ValueError, match=re.escape(expected)):
        jab.graph_attention(graph, X[:1], None, A, num_heads=2)
    assert gat(graph=graph, src=X[:1], dst=X).shape == (3, 4)
