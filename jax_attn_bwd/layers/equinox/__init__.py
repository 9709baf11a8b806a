"""Layers for Equinox."""

from collections.abc import Mapping
from typing import Any, TypeVar

import equinox as eqx

from jax_attn_bwd.layers.deformable import encoder_reference_points
from jax_attn_bwd.layers.equinox.deformable import MultiScaleDeformableAttention
from jax_attn_bwd.layers.equinox.gated_delta_net import GatedDeltaNet
from jax_attn_bwd.layers.equinox.graph import GATConv, GATv2Conv, TransformerConv
from jax_attn_bwd.layers.equinox.multi_head import MultiHeadAttention, MultiheadAttention
from jax_attn_bwd.layers.gated_delta_net import GatedDeltaNetCache
from jax_attn_bwd.layers.multi_head import KeyValueCache
from jax_attn_bwd.layers.torch_weights import loaded, name_of_weight

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

_Layer = TypeVar("_Layer", bound=eqx.Module)
_WITH_WEIGHT = (eqx.nn.Linear, eqx.nn.Conv, eqx.nn.RMSNorm)


def load_torch(layer: _Layer, state: Mapping[str, Any], prefix: str = "") -> _Layer:
    """`layer` with the values of a PyTorch module.

    Args:
      layer: built with the options of the PyTorch module.
      state, prefix: see `jax_attn_bwd.layers.torch_weights`, which also tells what is loaded, and errors.

    Returns:
      A layer like `layer`, in its dtypes. For a layer inside a model `equinox.tree_at` puts it there.

    Example:
      >>> import jax, numpy as np
      >>> from jax_attn_bwd.layers.equinox import GATConv, load_torch
      >>> layer = GATConv(5, 3, heads=2, bias=False, key=jax.random.key(0))
      >>> vectors = {name: np.ones((1, 2, 3), "float32") for name in ("conv.att_src", "conv.att_dst")}
      >>> state = {"conv.lin.weight": np.ones((6, 5), "float32"), **vectors}
      >>> float(load_torch(layer, state, "conv.").lin.weight[0, 0])
      1.0
    """
    tree = {name: x for name, x in vars(layer).items() if eqx.is_array(x)}
    modules: dict[str, Any] = {name: x for name, x in vars(layer).items() if isinstance(x, _WITH_WEIGHT)}
    for name, module in modules.items():
        bias = {} if module.bias is None else {"bias": module.bias}
        tree[name] = {name_of_weight(module.weight): module.weight.T, **bias}
    made = loaded(tree, state, prefix)
    for name, module in modules.items():
        both = (made[name][name_of_weight(module.weight)].T, made[name].get("bias"))
        where = lambda module: (module.weight, module.bias)
        made[name] = eqx.tree_at(where, module, both, is_leaf=lambda x: x is None)
    return eqx.tree_at(lambda layer: [getattr(layer, name) for name in made], layer, list(made.values()))
