"""Layers for Equinox."""

from jax_attn_bwd.layers.equinox.deformable import (
    MultiScaleDeformableAttention as MultiScaleDeformableAttention,
)
from jax_attn_bwd.layers.equinox.graph import GATConv as GATConv
from jax_attn_bwd.layers.equinox.graph import GATv2Conv as GATv2Conv
from jax_attn_bwd.layers.equinox.graph import TransformerConv as TransformerConv
from jax_attn_bwd.layers.equinox.multi_head import MultiHeadAttention as MultiHeadAttention
from jax_attn_bwd.layers.equinox.multi_head import MultiheadAttention as MultiheadAttention
from jax_attn_bwd.layers.equinox.published_weights import load_torch as load_torch
