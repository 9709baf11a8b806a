"""Layers for Haiku."""

from jax_attn_bwd.layers.haiku.deformable import (
    MultiScaleDeformableAttention as MultiScaleDeformableAttention,
)
from jax_attn_bwd.layers.haiku.graph import GATConv as GATConv
from jax_attn_bwd.layers.haiku.graph import GATv2Conv as GATv2Conv
from jax_attn_bwd.layers.haiku.graph import TransformerConv as TransformerConv
from jax_attn_bwd.layers.haiku.multi_head import MultiHeadAttention as MultiHeadAttention
from jax_attn_bwd.layers.haiku.published_weights import load_torch as load_torch
