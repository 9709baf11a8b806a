"""Graph attention: GAT, GATv2, graph transformer, and the softmax over edges."""

from jax_attn_bwd.ops.graph.api import graph_attention as graph_attention
from jax_attn_bwd.ops.graph.api import graph_attention_v2 as graph_attention_v2
from jax_attn_bwd.ops.graph.api import graph_transformer_attention as graph_transformer_attention
from jax_attn_bwd.ops.graph.edge_softmax import edge_softmax as edge_softmax
from jax_attn_bwd.ops.graph.edge_softmax import edge_softmax_bwd as edge_softmax_bwd
from jax_attn_bwd.ops.graph.gradients import graph_attention_bwd as graph_attention_bwd
from jax_attn_bwd.ops.graph.gradients import graph_attention_v2_bwd as graph_attention_v2_bwd
from jax_attn_bwd.ops.graph.gradients import (
    graph_transformer_attention_bwd as graph_transformer_attention_bwd,
)
from jax_attn_bwd.ops.graph.spec import GraphAttentionGrads as GraphAttentionGrads
from jax_attn_bwd.ops.graph.spec import GraphTransformerAttentionGrads as GraphTransformerAttentionGrads
from jax_attn_bwd.ops.graph.structure import BipartiteCSC as BipartiteCSC
