"""Weights of the layers of Equinox: initial ones, and those of PyTorch modules."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from jax_attn_bwd.layers.weights import loaded

Layer = TypeVar("Layer", bound=eqx.Module)
XAVIER = jax.nn.initializers.xavier_uniform()


def linear(
    width: int,
    out: int,
    *,
    key: jax.Array,
    dtype: Any,
    init: Callable[..., jax.Array] = XAVIER,
    bias: Any = 0.0,
) -> eqx.nn.Linear:
    """Returns a linear layer with weights from `init` and a constant `bias`, None = none."""
    layer = eqx.nn.Linear(width, out, use_bias=bias is not None, dtype=dtype, key=key)
    dtype = layer.weight.dtype
    layer = eqx.tree_at(lambda layer: layer.weight, layer, init(key, (out, width), dtype))
    return layer if bias is None else eqx.tree_at(lambda layer: layer.bias, layer, jnp.full(out, bias, dtype))


def load_torch(layer: Layer, state: Mapping[str, Any], prefix: str = "") -> Layer:
    """`layer` with the values of a PyTorch module.

    Of a `GATConv`, `GATv2Conv` or `TransformerConv` of PyTorch Geometric, or of a deformable attention of
    Deformable-DETR, DINO, RT-DETR, mmcv or Hugging Face. A checkpoint does not tell whether a
    GAT layer adds self-loops: it does, here as there, unless it is built with `add_self_loops=False`.

    Args:
      layer: built with the options of the PyTorch module.
      state: a state dict of NumPy arrays or CPU tensors, with `<prefix>lin.weight`, `<prefix>att_src` ...
      prefix: what stands before these names, with the dot: "convs.0.".

    Returns:
      A layer like `layer`, in its dtypes. For a layer inside a model `equinox.tree_at` puts it there.

    Raises:
      ValueError: names or shapes in `state` are not those of the layer, or `prefix` does not end with a dot.

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
    linears = {name: x for name, x in vars(layer).items() if isinstance(x, eqx.nn.Linear)}
    for name, linear in linears.items():
        bias = {} if linear.bias is None else {"bias": linear.bias}
        tree[name] = {"kernel": linear.weight.T, **bias}
    made = loaded(tree, state, prefix)
    for name, linear in linears.items():
        both = (made[name]["kernel"].T, made[name].get("bias"))
        where = lambda linear: (linear.weight, linear.bias)
        made[name] = eqx.tree_at(where, linear, both, is_leaf=lambda x: x is None)
    return eqx.tree_at(lambda layer: [getattr(layer, name) for name in made], layer, list(made.values()))
