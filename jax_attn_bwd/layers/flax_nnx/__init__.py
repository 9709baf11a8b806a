"""Layers for Flax NNX."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from jax_attn_bwd.layers.deformable import encoder_reference_points
from jax_attn_bwd.layers.flax_nnx.deformable import MultiScaleDeformableAttention
from jax_attn_bwd.layers.flax_nnx.gated_delta_net import GatedDeltaNet
from jax_attn_bwd.layers.flax_nnx.graph import GATConv, GATv2Conv, TransformerConv
from jax_attn_bwd.layers.flax_nnx.multi_head import MultiHeadAttention
from jax_attn_bwd.layers.torch_weights import loaded

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


def load_torch(layer: nnx.Module, state: Mapping[str, Any], prefix: str = "") -> None:
    """Sets the parameters of `layer` to the values of a PyTorch module, in their dtypes.

    Args:
      layer: built with the options of the PyTorch module.
      state, prefix: see `jax_attn_bwd.layers.torch_weights`, which also tells what is loaded, and errors.

    Example:
      >>> import numpy as np
      >>> from flax import nnx
      >>> from jax_attn_bwd.layers.flax_nnx import GATConv, load_torch
      >>> layer = GATConv(5, 3, heads=2, bias=False, rngs=nnx.Rngs(0))
      >>> vectors = {name: np.ones((1, 2, 3), "float32") for name in ("conv.att_src", "conv.att_dst")}
      >>> load_torch(layer, {"conv.lin.weight": np.ones((6, 5), "float32"), **vectors}, "conv.")
      >>> float(layer.lin.kernel[0, 0])
      1.0
    """
    params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    nnx.update(layer, loaded(params, state, prefix))
