"""Attention-family operators for JAX with hand-written backward rules."""

from jax_attn_bwd import compat as compat
from jax_attn_bwd import layers as layers
from jax_attn_bwd import mods as mods
from jax_attn_bwd import parallel as parallel
from jax_attn_bwd._core.backend import explain as explain
from jax_attn_bwd.layers.attention_fn import attention_fn as attention_fn
from jax_attn_bwd.ops.deformable import (
    MultiScaleDeformableAttentionGrads as MultiScaleDeformableAttentionGrads,
)
from jax_attn_bwd.ops.deformable import multi_scale_deformable_attention as multi_scale_deformable_attention
from jax_attn_bwd.ops.deformable import (
    multi_scale_deformable_attention_bwd as multi_scale_deformable_attention_bwd,
)
from jax_attn_bwd.ops.dot_product import DotProductAttentionGrads as DotProductAttentionGrads
from jax_attn_bwd.ops.dot_product import dot_product_attention as dot_product_attention
from jax_attn_bwd.ops.dot_product import dot_product_attention_bwd as dot_product_attention_bwd
from jax_attn_bwd.ops.graph import BipartiteCSC as BipartiteCSC
from jax_attn_bwd.ops.graph import GraphAttentionGrads as GraphAttentionGrads
from jax_attn_bwd.ops.graph import GraphTransformerAttentionGrads as GraphTransformerAttentionGrads
from jax_attn_bwd.ops.graph import edge_softmax as edge_softmax
from jax_attn_bwd.ops.graph import edge_softmax_bwd as edge_softmax_bwd
from jax_attn_bwd.ops.graph import graph_attention as graph_attention
from jax_attn_bwd.ops.graph import graph_attention_bwd as graph_attention_bwd
from jax_attn_bwd.ops.graph import graph_attention_v2 as graph_attention_v2
from jax_attn_bwd.ops.graph import graph_attention_v2_bwd as graph_attention_v2_bwd
from jax_attn_bwd.ops.graph import graph_transformer_attention as graph_transformer_attention
from jax_attn_bwd.ops.graph import graph_transformer_attention_bwd as graph_transformer_attention_bwd
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionGrads as MultiHeadAttentionGrads
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams as MultiHeadAttentionParams
from jax_attn_bwd.ops.multi_head import multi_head_attention as multi_head_attention
from jax_attn_bwd.ops.multi_head import multi_head_attention_bwd as multi_head_attention_bwd
from jax_attn_bwd.ops.softmax import scaled_masked_softmax as scaled_masked_softmax
from jax_attn_bwd.ops.softmax import scaled_masked_softmax_bwd as scaled_masked_softmax_bwd

__all__ = [
    "BipartiteCSC",
    "DotProductAttentionGrads",
    "GraphAttentionGrads",
    "GraphTransformerAttentionGrads",
    "MultiHeadAttentionGrads",
    "MultiHeadAttentionParams",
    "MultiScaleDeformableAttentionGrads",
    "attention_fn",
    "compat",
    "dot_product_attention",
    "dot_product_attention_bwd",
    "edge_softmax",
    "edge_softmax_bwd",
    "explain",
    "graph_attention",
    "graph_attention_bwd",
    "graph_attention_v2",
    "graph_attention_v2_bwd",
    "graph_transformer_attention",
    "graph_transformer_attention_bwd",
    "layers",
    "mods",
    "multi_head_attention",
    "multi_head_attention_bwd",
    "multi_scale_deformable_attention",
    "multi_scale_deformable_attention_bwd",
    "parallel",
    "scaled_masked_softmax",
    "scaled_masked_softmax_bwd",
]

__version__ = "0.1.0"
