"""Layers for Flax NNX."""

from jax_attn_bwd.layers.flax_nnx.deformable import (
    MultiScaleDeformableAttention as MultiScaleDeformableAttention,
)
from jax_attn_bwd.layers.flax_nnx.graph import GATConv as GATConv
from jax_attn_bwd.layers.flax_nnx.graph import GATv2Conv as GATv2Conv
from jax_attn_bwd.layers.flax_nnx.graph import TransformerConv as TransformerConv
from jax_attn_bwd.layers.flax_nnx.multi_head import MultiHeadAttention as MultiHeadAttention
from jax_attn_bwd.layers.flax_nnx.published_weights import load_torch as load_torch
