"""What a `MultiScaleDeformableAttention` is built from, in any framework.

The four linear layers have the names of the published PyTorch modules (MSDeformAttn of Deformable-DETR
and DINO, MSDeformableAttention of RT-DETR, RT-DETRv2 and D-FINE, which has the first two alone,
MultiScaleDeformableAttention of mmcv and Hugging Face), and the same order of heads, levels, points and
(x, y) inside. With `name` one of sampling_offsets, attention_weights, value_proj and output_proj:

    framework         matrix                      vector
    PyTorch           name.weight  [out, in]      name.bias
    linen and NNX     name.kernel  [in, out]      name.bias
    Haiku             ~/name/w     [in, out]      ~/name/b
    Equinox           name.weight  [out, in]      name.bias

L levels, P_l points of a head on level l, K = sum of P_l, M heads, C width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.types import Implementation, PaddingMode, SamplingMethod
from jax_attn_bwd.layers.arguments import as_array, positive
from jax_attn_bwd.ops.deformable import multi_scale_deformable_attention

_NAME = "MultiScaleDeformableAttention"


@dataclass(frozen=True)
class Options:
    """Options of the operator."""

    padding_mode: PaddingMode = "zeros"
    method: SamplingMethod = "bilinear"
    deterministic_sums: bool = True
    implementation: Implementation | None = None
    forward_mode: bool = False
    attention_fn: Callable[..., jax.Array] = multi_scale_deformable_attention  # called in its place


@dataclass(frozen=True)
class Form:
    """In what the published modules differ."""

    use_4D_normalizer: bool = False
    offset_scale: float = 0.5
    projections: bool = True


@dataclass(frozen=True)
class Config:
    """What a layer is built from."""

    width: int  # C
    num_heads: int  # M
    num_points: tuple[int, ...]  # P_l
    options: Options
    form: Form

    @property
    def samples(self) -> int:
        """Sampling points of a query, M * K."""
        return self.num_heads * sum(self.num_points)


class Linears(NamedTuple):
    """The linear layers, each over the last axis; without projections the last two hand on what they get."""

    sampling_offsets: Callable[[jax.Array], jax.Array]  # [..., C] -> [..., M * K * 2]
    attention_weights: Callable[[jax.Array], jax.Array]  # [..., C] -> [..., M * K]
    value_proj: Callable[[jax.Array], jax.Array]  # [..., C] -> [..., C]
    output_proj: Callable[[jax.Array], jax.Array]  # [..., C] -> [..., C]


def configure(arguments: Mapping[str, Any], width: str) -> Config:
    """The checked configuration of a layer.

    Args:
      arguments: what the framework's constructor was given, by name.
      width: the name that the width C has there.
    """
    num_heads = positive(_NAME, "num_heads", arguments["num_heads"])
    num_levels = positive(_NAME, "num_levels", arguments["num_levels"])
    C = positive(_NAME, width, arguments[width])
    if C % num_heads:
        expected = f"be a multiple of the {num_heads} heads"
        raise ValueError(checks.message(_NAME, width, expected, C))
    points: Any = arguments["num_points"]
    given = points if np.ndim(points) else (points,) * num_levels
    if len(given) != num_levels:
        expected = f"be a positive int, or one for each of the {num_levels} levels"
        raise ValueError(checks.message(_NAME, "num_points", expected, repr(points)))
    counts = tuple(positive(_NAME, "num_points", P) for P in given)
    sums = checks.repeatable_sums(_NAME, arguments["deterministic_sums"], arguments["deterministic"])
    options = Options(**{x.name: arguments[x.name] for x in fields(Options)} | {"deterministic_sums": sums})
    checks.flag(_NAME, "forward_mode", options.forward_mode)
    if not callable(options.attention_fn):
        expected = "be a function like multi_scale_deformable_attention"
        raise TypeError(checks.message(_NAME, "attention_fn", expected, type(options.attention_fn).__name__))
    form = Form(
        checks.flag(_NAME, "use_4D_normalizer", arguments["use_4D_normalizer"]),
        checks.python_float(_NAME, "offset_scale", arguments["offset_scale"]),
        checks.flag(_NAME, "projections", arguments["projections"]),
    )
    return Config(C, num_heads, counts, options, form)


def offsets_bias(config: Config) -> np.ndarray:
    """`[M * K * 2]`: point p of head m begins p + 1 pixels from the reference, in the direction of m."""
    angle = 2 * np.pi / config.num_heads * np.arange(config.num_heads)
    direction = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    direction /= np.abs(direction).max(axis=-1, keepdims=True)  # onto a square: 8 heads, 8 pixels
    steps = np.concatenate([np.arange(1, P + 1) for P in config.num_points])  # [K]
    return (direction[:, None] * steps[:, None]).ravel()


def offsets_dtype(dtype: Any) -> jnp.dtype | None:
    """The dtype of offsets and logits in a layer that computes in `dtype`: float32 or wider."""
    return None if dtype is None else accumulator_dtype(jnp.dtype(dtype))


def from_torch(state: Mapping[str, Any], prefix: str = "") -> dict[str, dict[str, jax.Array]]:
    """The parameters of one PyTorch module, in the tree of Flax: kernels are `[in, out]`.

    Args:
      state: a state dict of NumPy arrays or CPU tensors, with `<prefix>sampling_offsets.weight` and so on.
      prefix: what stands before the four names, with the dot: "transformer.encoder.layers.0.self_attn."
        or "transformer.decoder.layers.0.cross_attn." in Deformable-DETR and DINO,
        "decoder.decoder.layers.0.cross_attn." in RT-DETR.

    Returns:
      {"sampling_offsets": {"kernel", "bias"}, ...} of the four linear layers, of the first two where `state`
      has no others (D-FINE). What puts them into a layer is
      `load_torch` of its framework: `jax_attn_bwd.layers.equinox.load_torch` and so on.

    Raises:
      ValueError: an entry is missing.

    Example:
      >>> import numpy as np
      >>> from jax_attn_bwd.layers.deformable import from_torch
      >>> names = ("sampling_offsets", "attention_weights", "value_proj", "output_proj")
      >>> state = {f"attn.{name}.weight": np.zeros((3, 2), np.float32) for name in names}
      >>> state |= {f"attn.{name}.bias": np.zeros(3, np.float32) for name in names}
      >>> from_torch(state, "attn.")["value_proj"]["kernel"].shape
      (2, 3)
    """

    def entry(name: str) -> jax.Array:
        key = prefix + name
        if key not in state:
            near = [other for other in state if other.startswith(prefix)][:8] or "no such prefix"
            raise ValueError(checks.message("from_torch", "state", f"hold {key!r}", near))
        return as_array(state[key])

    projected = any(f"{prefix}{name}.weight" in state for name in Linears._fields[2:])
    names = Linears._fields if projected else Linears._fields[:2]
    return {name: {"kernel": entry(f"{name}.weight").T, "bias": entry(f"{name}.bias")} for name in names}
