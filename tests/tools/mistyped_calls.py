"""Calls that type checkers must refuse: each carries an ignore, and an ignore that nothing needs is an error.

It is never run. One mistake they cannot see: arrays can be iterated over, so `out, lse = f(q, k, v)` without
`return_residual=True` is well typed, and fails when it runs.
"""

import jax
import numpy as np
from flax import nnx

import jax_attn_bwd as jab
from jax_attn_bwd.layers.flax_nnx import GATConv


def dense_attention(q: jax.Array, flag: bool) -> None:
    jab.dot_product_attention(q, q)  # type: ignore[call-overload]
    jab.dot_product_attention(q, q, q, causal=True)  # type: ignore[call-overload]
    jab.dot_product_attention(q, q, q, scale="large")  # type: ignore[call-overload]
    jab.dot_product_attention(q, q, q, mask=[True])  # type: ignore[call-overload]
    jab.dot_product_attention(q, q, q, query_seq_lengths="3")  # type: ignore[arg-type]
    jab.dot_product_attention(q, q, q, return_residual=1)  # type: ignore[call-overload]
    jab.dot_product_attention(q, q, q, return_residual=True).sum()  # type: ignore[attr-defined]
    out, lse, more = jab.dot_product_attention(q, q, q, return_residual=True)  # type: ignore[misc]
    jab.dot_product_attention(q, q, q, return_residual=flag).sum()  # type: ignore[union-attr]
    jab.dot_product_attention([1.0], q, q)  # type: ignore[call-overload]
    jab.dot_product_attention_bwd(q, q, q, q)  # type: ignore[call-arg]
    grads = jab.dot_product_attention_bwd(q, q, q, q, out=q, lse=q)
    grads.query + 1  # type: ignore[operator]
    print(grads.dquery)  # type: ignore[attr-defined]


def layer(x: jax.Array, params: jab.MultiHeadAttentionParams[jax.Array]) -> None:
    jab.multi_head_attention({"query_kernel": x}, x)  # type: ignore[call-overload]
    jab.multi_head_attention(params, x, return_weights=True).sum()  # type: ignore[attr-defined]
    out, weights, more = jab.multi_head_attention(params, x, return_weights=True)  # type: ignore[misc]
    jab.multi_head_attention(params, x, save=None)  # type: ignore[call-overload]
    jab.multi_head_attention(params, x, save="everything")  # type: ignore[call-overload]
    jab.MultiHeadAttentionParams(query_weight=x)  # type: ignore[call-arg]
    print(params.out_kernel.shape)  # type: ignore[union-attr]


def graphs(graph: jab.BipartiteCSC, x: jax.Array, conv: GATConv) -> None:
    jab.graph_attention(graph, x, None, x)  # type: ignore[call-overload]
    looped, edge = graph.with_self_loops()  # type: ignore[misc]
    graph.with_self_loops(x, fill_value="median")  # type: ignore[call-overload]
    jab.graph_attention(graph, x, None, x, num_heads=2, activation="gelu")  # type: ignore[call-overload]
    jab.graph_attention((x, x), x, None, x, num_heads=2)  # type: ignore[call-overload]
    jab.graph_attention(graph, x, None, x, num_heads=2, scale=1.0)  # type: ignore[call-overload]
    jab.graph_transformer_attention(graph, x, x, x, num_heads=2, alpha=0.1)  # type: ignore[call-overload]
    jab.graph_attention_v2(graph, x, x, x, num_heads=2, return_residual=True).sum()  # type: ignore[attr-defined]
    jab.graph_attention_bwd(x, graph, x, None, x)  # type: ignore[call-arg]
    jab.graph_attention_v2_bwd(x, graph, x, None, x, num_heads=2, alhpa=0.1)  # type: ignore[call-arg]
    jab.graph_transformer_attention_bwd(x, graph, x, x, x, num_heads="2")  # type: ignore[arg-type]
    jab.edge_sum(graph, x, implementation="cuda")  # type: ignore[arg-type]
    jab.edge_max_bwd(x, graph, x, x, axis=0)  # type: ignore[call-arg]
    conv(x, graph, return_attention_weights=True).sum()  # type: ignore[attr-defined]
    GATConv(8, 4, dropout="half", rngs=nnx.Rngs(0))  # type: ignore[arg-type]
    GATConv(8, 4, share_weights=True, rngs=nnx.Rngs(0))  # type: ignore[call-arg]


def others(x: jax.Array) -> None:
    jab.scaled_masked_softmax(x, scale=None)  # type: ignore[arg-type]
    jab.scaled_masked_softmax(x, implementation="cuda")  # type: ignore[arg-type]
    jab.multi_scale_deformable_attention(x, 4, x, x)  # type: ignore[arg-type]
    jab.multi_scale_deformable_attention(x, [(2, 2)], x, x, normalize="sigmoid")  # type: ignore[arg-type]
    jab.multi_scale_deformable_attention(x, [(2, 2)], x, x, padding_mode="reflect")  # type: ignore[arg-type]
    jab.scaled_masked_softmax(x, axis="last")  # type: ignore[arg-type]
    jab.parallel.ring_attention(x, x, x)  # type: ignore[call-overload]
    jab.parallel.ring_attention(x, x, x, axis_name="s", is_casual=True)  # type: ignore[call-overload]
    jab.configured_attention_fn(is_casual=True)  # type: ignore[call-arg]
    np.asarray(jab.edge_softmax(x, x))  # type: ignore[arg-type]
