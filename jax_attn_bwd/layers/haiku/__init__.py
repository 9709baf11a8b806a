"""Layers for Haiku."""

from collections.abc import Mapping
from typing import Any

from jax_attn_bwd._core import checks
from jax_attn_bwd.layers.deformable import encoder_reference_points
from jax_attn_bwd.layers.haiku.deformable import MultiScaleDeformableAttention
from jax_attn_bwd.layers.haiku.gated_delta_net import GatedDeltaNet
from jax_attn_bwd.layers.haiku.graph import GATConv, GATv2Conv, TransformerConv
from jax_attn_bwd.layers.haiku.multi_head import MultiHeadAttention
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

_NAMES = {"w": "kernel", "b": "bias", "scale": "scale"}


def load_torch(
    params: Mapping[str, Mapping[str, Any]], module: str, state: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """`params` of a model with the values of a PyTorch module in one of its layers.

    Args:
      params: parameters of the whole model, as its `init` gives them; `jax.eval_shape` of them will do.
      module: the name of the layer in them, such as "gat_conv" or "encoder/~/gat_conv_1".
      state, prefix: see `jax_attn_bwd.layers.torch_weights`, which also tells what is loaded, and errors.

    Returns:
      A dict like `params`, in its dtypes, whose other layers are as they were.

    Raises:
      ValueError: no such module; and as told there.

    Example:
      >>> import haiku as hk
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from jax_attn_bwd import BipartiteCSC
      >>> from jax_attn_bwd.layers.haiku import GATConv, load_torch
      >>> graph = BipartiteCSC.from_coo(src=[0, 2, 1], dst=[1, 0, 1], num_src=3, num_dst=3)
      >>> model = hk.without_apply_rng(hk.transform(lambda x: GATConv(3, heads=2, bias=False)(x, graph)))
      >>> x = jnp.ones((3, 5), "float32")
      >>> vectors = {name: np.ones((1, 2, 3), "float32") for name in ("conv.att_src", "conv.att_dst")}
      >>> state = {"conv.lin.weight": np.ones((6, 5), "float32"), **vectors}
      >>> params = load_torch(model.init(jax.random.key(0), x), "gat_conv", state, "conv.")
      >>> model.apply(params, x)[0].tolist()
      [5.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    """
    own = {path: x for path, x in params.items() if path == module or path.startswith(f"{module}/")}
    if not own:
        raise ValueError(
            checks.message("load_torch", "module", "be in params", repr(module), str(list(params)))
        )
    tree: dict[str, Any] = dict(own.get(module, {}))
    linears = {path: path.rpartition("/")[2] for path in own if path != module}
    for path, name in linears.items():
        tree[name] = {_NAMES[part]: x for part, x in own[path].items()}
    tree = loaded(tree, state, prefix)
    made = {path: {part: tree[name][_NAMES[part]] for part in own[path]} for path, name in linears.items()}
    if module in own:
        made[module] = {name: tree[name] for name in own[module]}
    return {**params, **made}
