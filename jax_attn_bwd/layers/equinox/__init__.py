"""Layers for Equinox."""

from jax_attn_bwd.layers.deformable import encoder_reference_points
from jax_attn_bwd.layers.equinox.deformable import MultiScaleDeformableAttention
from jax_attn_bwd.layers.equinox.gated_delta_net import GatedDeltaNet
from jax_attn_bwd.layers.equinox.graph import GATConv, GATv2Conv, TransformerConv
from jax_attn_bwd.layers.equinox.multi_head import MultiHeadAttention, MultiheadAttention
from jax_attn_bwd.layers.equinox.torch_weights import load_torch
from jax_attn_bwd.layers.gated_delta_net import GatedDeltaNetCache
from jax_attn_bwd.layers.multi_head import KeyValueCache

__all__ = [
    "GATConv",
    "GATv2Conv",
    "GatedDeltaNet",
    "GatedDeltaNetCache",
    "KeyValueCache",
    "MultiHeadAttention",
    "MultiScaleDeformableAttention",
    "MultiheadAttention",
    "TransformerConv",
    "encoder_reference_points",
    "load_torch",
]
