"""Layers for Flax NNX."""

from jax_attn_bwd.layers.deformable import encoder_reference_points
from jax_attn_bwd.layers.flax_nnx.deformable import MultiScaleDeformableAttention
from jax_attn_bwd.layers.flax_nnx.gated_delta_net import GatedDeltaNet
from jax_attn_bwd.layers.flax_nnx.graph import GATConv, GATv2Conv, TransformerConv
from jax_attn_bwd.layers.flax_nnx.multi_head import MultiHeadAttention
from jax_attn_bwd.layers.flax_nnx.torch_weights import load_torch

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
