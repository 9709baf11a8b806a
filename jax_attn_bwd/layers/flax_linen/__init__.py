"""Layers for Flax linen."""

from collections.abc import Mapping
from typing import Any

from jax_attn_bwd.layers.deformable import encoder_reference_points
from jax_attn_bwd.layers.flax_linen.deformable import MultiScaleDeformableAttention
from jax_attn_bwd.layers.flax_linen.gated_delta_net import GatedDeltaNet
from jax_attn_bwd.layers.flax_linen.graph import GATConv, GATv2Conv, TransformerConv
from jax_attn_bwd.layers.flax_linen.multi_head import MultiHeadAttention, MultiHeadDotProductAttention
from jax_attn_bwd.layers.torch_weights import loaded

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


def load_torch(params: Mapping[str, Any], state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`params` of one layer with the values of a PyTorch module.

    Args:
      params: parameters of the layer, `variables["params"]` of its `init` or the part of a model's that has
        its name; `jax.eval_shape` of them will do.
      state, prefix: see `jax_attn_bwd.layers.torch_weights`, which also tells what is loaded, and errors.

    Returns:
      A tree like `params`, in its dtypes.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from jax_attn_bwd import BipartiteCSC
      >>> from jax_attn_bwd.layers.flax_linen import GATConv, load_torch
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=3)
      >>> layer, x = GATConv(3, heads=2, bias=False), jnp.ones((3, 5), "float32")
      >>> params = jax.eval_shape(lambda key: layer.init(key, x, graph), jax.random.key(0))["params"]
      >>> vectors = {name: np.ones((1, 2, 3), "float32") for name in ("conv.att_src", "conv.att_dst")}
      >>> state = {"conv.lin.weight": np.ones((6, 5), "float32"), **vectors}
      >>> params = load_torch(params, state, "conv.")
      >>> layer.apply({"params": params}, x, graph)[0].tolist()
      [5.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    """
    return loaded(params, state, prefix)
