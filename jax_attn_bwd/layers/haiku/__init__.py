"""Layers for Haiku."""

from jax_attn_bwd.layers.deformable import encoder_reference_points
from jax_attn_bwd.layers.haiku.deformable import MultiScaleDeformableAttention
from jax_attn_bwd.layers.haiku.gated_delta_net import GatedDeltaNet
from jax_attn_bwd.layers.haiku.graph import GATConv, GATv2Conv, TransformerConv
from jax_attn_bwd.layers.haiku.multi_head import MultiHeadAttention
from jax_attn_bwd.layers.haiku.torch_weights import load_torch

__all__ = [
    "GATConv",
    "GATv2Conv",
    "GatedDeltaNet",
    "MultiHeadAttention",
    "MultiScaleDeformableAttention",
    "TransformerConv",
    "encoder_reference_points",
    "load_torch",
]
