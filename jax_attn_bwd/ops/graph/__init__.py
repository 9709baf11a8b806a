"""Graph attention: GAT, GATv2, graph transformer, and the softmax, sum, mean and maximum over edges."""

from jax_attn_bwd.ops.graph.api import (
    graph_attention,
    graph_attention_bwd,
    graph_attention_v2,
    graph_attention_v2_bwd,
    graph_transformer_attention,
    graph_transformer_attention_bwd,
)
from jax_attn_bwd.ops.graph.batching import BatchLayout, GraphBatch, batch_graphs
from jax_attn_bwd.ops.graph.edge_ops import (
    edge_max,
    edge_max_bwd,
    edge_mean,
    edge_mean_bwd,
    edge_softmax,
    edge_softmax_bwd,
    edge_sum,
    edge_sum_bwd,
)
from jax_attn_bwd.ops.graph.spec import GraphAttentionGrads, GraphTransformerAttentionGrads
from jax_attn_bwd.ops.graph.structure import BipartiteCSC

__all__ = [
    "BatchLayout",
    "BipartiteCSC",
    "GraphAttentionGrads",
    "GraphBatch",
    "GraphTransformerAttentionGrads",
    "batch_graphs",
    "edge_max",
    "edge_max_bwd",
    "edge_mean",
    "edge_mean_bwd",
    "edge_softmax",
    "edge_softmax_bwd",
    "edge_sum",
    "edge_sum_bwd",
    "graph_attention",
    "graph_attention_bwd",
    "graph_attention_v2",
    "graph_attention_v2_bwd",
    "graph_transformer_attention",
    "graph_transformer_attention_bwd",
]
