"""Weights of PyTorch modules for the layers of Flax NNX."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from jax_attn_bwd.layers.torch_weights import loaded


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
