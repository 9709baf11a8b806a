"""Graph attention: GAT, GATv2, graph transformer, and the softmax over edges."""

from jax_attn_bwd.ops.graph.api import graph_attention, graph_attention_v2, graph_transformer_attention
from jax_attn_bwd.ops.graph.batching import BatchLayout, GraphBatch, batch_graphs
from jax_attn_bwd.ops.graph.edge_softmax import edge_softmax, edge_softmax_bwd
from jax_attn_bwd.ops.graph.gradients import (
    graph_attention_bwd,
    graph_attention_v2_bwd,
    graph_transformer_attention_bwd,
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
    "edge_softmax",
    "edge_softmax_bwd",
    "graph_attention",
    "graph_attention_bwd",
    "graph_attention_v2",
    "graph_attention_v2_bwd",
    "graph_transformer_attention",
    "graph_transformer_attention_bwd",
]
