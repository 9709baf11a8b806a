"""Layers for Flax linen."""

from jax_attn_bwd.layers.deformable import encoder_reference_points
from jax_attn_bwd.layers.flax_linen.deformable import MultiScaleDeformableAttention
from jax_attn_bwd.layers.flax_linen.gated_delta_net import GatedDeltaNet
from jax_attn_bwd.layers.flax_linen.graph import GATConv, GATv2Conv, TransformerConv
from jax_attn_bwd.layers.flax_linen.multi_head import MultiHeadAttention, MultiHeadDotProductAttention
from jax_attn_bwd.layers.flax_linen.torch_weights import load_torch

__all__ = [
    "GATConv",
    "GATv2Conv",
    "GatedDeltaNet",
    "MultiHeadAttention",
    "MultiHeadDotProductAttention",
    "MultiScaleDeformableAttention",
    "TransformerConv",
    "encoder_reference_points",
    "load_torch",
]
