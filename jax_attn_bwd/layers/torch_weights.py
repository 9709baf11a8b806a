"""Weights of PyTorch modules for the layers of this package, by the names and shapes in their state dicts.

`load_torch` of a framework puts them into a layer that is built with the options of the PyTorch module: a
`GATConv`, `GATv2Conv` or `TransformerConv` of PyTorch Geometric, a deformable attention of
Deformable-DETR, DINO, RT-DETR, mmcv or Hugging Face, a `GatedDeltaNet` of Qwen3-Next, or a
`KimiDeltaAttention` of Kimi Linear, as published or as in `transformers`. It takes

  * `state`: a state dict of NumPy arrays or CPU tensors, with `<prefix>lin.weight`, `<prefix>att_src` ...
  * `prefix`: what stands before these names, with the dot: "convs.0."

and keeps the dtypes of the layer. Names or shapes that are not those of the layer, or a prefix that does not
end with a dot, are a ValueError. A checkpoint does not tell whether a GAT layer adds self-loops: it does,
here as there, unless it is built with `add_self_loops=False`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks, keywords

# PyTorch Geometric keeps two that it does not use (`share_weights`, no `root_weight`), RT-DETRv2 a constant,
# which has another name in `transformers`.
_UNUSED = {"lin_r", "lin_skip", "num_points_scale", "n_points_scale"}
# The checkpoint of Kimi Linear has three convolutions in the place of one.
_CONVS = ("q_conv1d", "k_conv1d", "v_conv1d")


def from_torch(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The parameters of one PyTorch module, in the tree of linen and NNX.

    What puts them into a layer, checked and without what the layer does not use, is `load_torch` of its
    framework: `jax_attn_bwd.layers.equinox.load_torch` and so on.

    Args:
      state: a state dict of NumPy arrays or CPU tensors, with `<prefix>lin.weight`, `<prefix>att_src` ...
      prefix: what stands before these names, with the dot: "convs.0.".

    Returns:
      {"lin": {"kernel"}, "att_src": ..., "bias": ...} or the like: kernels `[in, out]`, vectors `[H, C]`.

    Raises:
      ValueError: no name starts with `prefix`, or it does not end with a dot.

    Example:
      >>> import numpy as np
      >>> from jax_attn_bwd.layers.graph import from_torch
      >>> state = {"conv.lin.weight": np.zeros((6, 5)), "conv.att_src": np.zeros((1, 2, 3))}
      >>> params = from_torch(state, "conv.")
      >>> params["lin"]["kernel"].shape, params["att_src"].shape
      ((5, 6), (2, 3))
    """
    if prefix and not prefix.endswith("."):
        remedy = f"{prefix!r} would also match the names of other layers that begin so"
        raise ValueError(checks.message("from_torch", "prefix", "end with a dot", repr(prefix), remedy))
    # Weights are [out, in] there and [in, out] here, of a convolution [out, in, taps] and [taps, in, out],
    # attention vectors [1, H, C] and [H, C].
    tree: dict[str, Any] = {}
    for name, value in state.items():
        if not name.startswith(prefix):
            continue
        x = as_array(value)
        owner, _, part = name[len(prefix) :].rpartition(".")
        if part == "weight":
            tree.setdefault(owner, {})[name_of_weight(x)] = x.T
        elif owner:
            tree.setdefault(owner, {})[part] = x
        else:
            tree[part] = x[0] if part.startswith("att") else x
    if not tree:
        expected = f"hold names that start with {prefix!r}"
        raise ValueError(checks.message("from_torch", "state", expected, list(state)[:8]))
    return tree


def name_of_weight(x: jax.Array) -> str:
    """Returns what linen and NNX call a weight: that of a norm is a scale."""
    return "scale" if x.ndim == 1 else "kernel"


def as_array(x: Any) -> jax.Array:
    """Returns `x`, a NumPy array or a tensor of PyTorch, which may require a gradient or be of bfloat16."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        # NumPy has no bfloat16; float32 holds all its numbers
        if str(x.dtype) == "torch.bfloat16":
            return jnp.asarray(x.float().numpy(), jnp.bfloat16)
    return jnp.asarray(np.asarray(x))


def loaded(params: Mapping[str, Any], state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Returns `params`, the tree of one layer as in linen, with the values of `state` in its own dtypes."""
    found = _as_named_here(from_torch(state, prefix))
    found = {name: x for name, x in found.items() if name in params or name not in _UNUSED}
    wanted, given = (_shapes(tree) for tree in (dict(params), found))
    differing = [name for name in wanted | given if wanted.get(name) != given.get(name)]
    if differing:
        needs, got = ({name: shapes.get(name) for name in differing} for shapes in (wanted, given))
        expected = f"hold the parameters of the layer (kernels [in, out]): {needs}"
        remedy = "build the layer with the options of the PyTorch module"
        if "in_proj_weight" in given:  # torch's multi-head layer, which no layer here reads
            remedy = keywords.remedy("in_proj_weight", ["params"])
        raise ValueError(checks.message("load_torch", "state", expected, got, remedy))
    return jax.tree.map(lambda x, y: y.astype(x.dtype), dict(params), found)


def _as_named_here(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns `tree` with the names that a layer of Kimi Linear has here, whichever it was published by."""
    gate = tree.pop("forget_gate", {})
    tree = gate | {name.removeprefix("forget_gate."): x for name, x in tree.items()}
    convs = [tree.get(name, {}) for name in _CONVS]
    if all(conv.keys() == {"kernel"} for conv in convs):
        tree = {name: x for name, x in tree.items() if name not in _CONVS}
        tree["conv1d"] = {"kernel": jnp.concatenate([conv["kernel"] for conv in convs], -1)}
    if "A_log" in tree:
        tree["A_log"] = tree["A_log"].reshape(-1)
    return tree


def _shapes(tree: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a tree by dotted name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x.shape for path, x in leaves}
