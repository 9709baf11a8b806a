"""Layers for Flax linen."""

from jax_attn_bwd.layers.flax_linen.deformable import (
    MultiScaleDeformableAttention as MultiScaleDeformableAttention,
)
from jax_attn_bwd.layers.flax_linen.graph import GATConv as GATConv
from jax_attn_bwd.layers.flax_linen.graph import GATv2Conv as GATv2Conv
from jax_attn_bwd.layers.flax_linen.graph import TransformerConv as TransformerConv
from jax_attn_bwd.layers.flax_linen.multi_head import MultiHeadAttention as MultiHeadAttention
from jax_attn_bwd.layers.flax_linen.multi_head import (
    MultiHeadDotProductAttention as MultiHeadDotProductAttention,
)
from jax_attn_bwd.layers.flax_linen.published_weights import load_torch as load_torch
