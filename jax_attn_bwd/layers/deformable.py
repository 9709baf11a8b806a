"""What the four `MultiScaleDeformableAttention` share: all of Deformable-DETR's module but its parameters.

    location = reference + offset / (W_l, H_l)                  reference points (x, y)
    location = reference + offset / P_l * (width, height) / 2   reference boxes (x, y, width, height)
    out = output_proj(multi_scale_deformable_attention(value_proj(value), location, softmax(logits)))

with offset = sampling_offsets(query), in pixels of its level for reference points, and
logits = attention_weights(query).

The four linear layers have the names of the published PyTorch modules (MSDeformAttn of Deformable-DETR
and DINO, MSDeformableAttention of RT-DETR and RT-DETRv2, MultiScaleDeformableAttention of mmcv and Hugging
Face), and the same order of heads, levels, points and (x, y) inside. With `name` one of sampling_offsets,
attention_weights, value_proj and output_proj:

    framework         matrix                      vector
    PyTorch           name.weight  [out, in]      name.bias
    linen and NNX     name.kernel  [in, out]      name.bias
    Haiku             ~/name/w     [in, out]      ~/name/b
    Equinox           name.weight  [out, in]      name.bias

Shapes: ... batch, Q queries, S pixels of all levels, C width, M heads, L levels, P_l points of a head on
level l, K = sum of P_l.

References:
  Zhu et al., Deformable DETR, arXiv:2010.04159, 2021. Lv et al., RT-DETRv2, arXiv:2407.17140, 2024.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd.layers.arguments import as_array, positive
from jax_attn_bwd.ops.deformable import multi_scale_deformable_attention
from jax_attn_bwd.ops.deformable.arguments import level_shapes

_NAME = "MultiScaleDeformableAttention"


@dataclass(frozen=True)
class Options:
    """Options of the operator."""

    padding_mode: str = "zeros"
    method: str = "bilinear"
    deterministic: bool = True
    implementation: str | None = None


@dataclass(frozen=True)
class Config:
    """What a layer is built from."""

    width: int  # C
    num_heads: int  # M
    num_points: tuple[int, ...]  # P_l
    options: Options

    @property
    def samples(self) -> int:
        """Sampling points of a query, M * K."""
        return self.num_heads * sum(self.num_points)


class Linears(NamedTuple):
    """The four linear layers, each over the last axis."""

    sampling_offsets: Callable[[jax.Array], jax.Array]  # [..., C] -> [..., M * K * 2]
    attention_weights: Callable[[jax.Array], jax.Array]  # [..., C] -> [..., M * K]
    value_proj: Callable[[jax.Array], jax.Array]  # [..., C] -> [..., C]
    output_proj: Callable[[jax.Array], jax.Array]  # [..., C] -> [..., C]


def configure(
    num_heads: int,
    num_levels: int,
    num_points: int | Sequence[int],
    options: Options,
    **widths: int,
) -> Config:
    """The checked configuration of a layer.

    `num_points` is P, or (P_1, ..., P_L); `widths` is the width C, by the name it has in the framework.
    """
    ((argument, width),) = widths.items()
    num_heads = positive(_NAME, "num_heads", num_heads)
    num_levels = positive(_NAME, "num_levels", num_levels)
    width = positive(_NAME, argument, width)
    if width % num_heads:
        expected = f"be a multiple of the {num_heads} heads"
        raise ValueError(checks.message(_NAME, argument, expected, width))
    given: Any = num_points if np.ndim(num_points) else (num_points,) * num_levels
    if len(given) != num_levels:
        expected = f"be a positive int, or one for each of the {num_levels} levels"
        raise ValueError(checks.message(_NAME, "num_points", expected, repr(num_points)))
    points = tuple(positive(_NAME, "num_points", P) for P in given)
    return Config(width, num_heads, points, options)


def offsets_bias(config: Config) -> np.ndarray:
    """`[M * K * 2]`: point p of head m begins p + 1 pixels from the reference, in the direction of m."""
    angle = 2 * np.pi / config.num_heads * np.arange(config.num_heads)
    direction = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    direction /= np.abs(direction).max(axis=-1, keepdims=True)  # onto a square: 8 heads, 8 pixels
    steps = np.concatenate([np.arange(1, P + 1) for P in config.num_points])  # [K]
    return (direction[:, None] * steps[:, None]).ravel()


def offsets_dtype(dtype: Any) -> jnp.dtype | None:
    """In which a layer that computes in `dtype` computes offsets and logits: float32 or wider."""
    return None if dtype is None else accumulator_dtype(jnp.dtype(dtype))


def attend(
    config: Config,
    linears: Linears,
    query: jax.Array,
    reference_points: jax.Array,
    value: jax.Array,
    spatial_shapes: Any,
    mask: jax.Array | None,
) -> jax.Array:
    """The output `[..., Q, C]` of a layer."""
    locations = sampling_locations(config, linears, query, reference_points, spatial_shapes)
    *batch, Q, M, K, _ = locations.shape
    logits = linears.attention_weights(_precise(query))
    value = checks.floating(_NAME, "value", value)
    S = sum(H * W for H, W in _levels(config, spatial_shapes))
    checks.shape(_NAME, "value", value, "[..., S, C]", (*batch, S, config.width))
    mask = _mask(mask, (*batch, S))
    # Zeroed on entry as well: a NaN in the padding would reach the kernel's gradient as 0 * NaN.
    value = _keep(mask, linears.value_proj(_keep(mask, value)))
    B = math.prod(batch)
    out = multi_scale_deformable_attention(
        value.reshape(B, S, M, config.width // M), spatial_shapes,
        locations.reshape(B, Q, M, K, 2), logits.reshape(B, Q, M, K),
        num_points=config.num_points, normalize="softmax", **asdict(config.options),
    )  # fmt: skip
    return linears.output_proj(out.reshape(*batch, Q, config.width))


def sampling_locations(
    config: Config,
    linears: Linears,
    query: jax.Array,
    reference_points: jax.Array,
    spatial_shapes: Any,
) -> jax.Array:
    """`[..., Q, M, K, 2]`, (x, y), float32 or wider: where each head looks for each query."""
    levels = _levels(config, spatial_shapes)
    query = checks.floating(_NAME, "query", query)
    if query.ndim < 2 or query.shape[-1] != config.width:
        expected = f"have shape [..., Q, C] with C = {config.width}"
        raise ValueError(checks.message(_NAME, "query", expected, query.shape))
    points = _reference_points(config, reference_points, query.shape[:-1])
    offsets = linears.sampling_offsets(_precise(query))
    dtype = max((accumulator_dtype(x.dtype) for x in (offsets, points)), key=lambda d: d.itemsize)
    heads = (config.num_heads, sum(config.num_points), 2)
    offsets = offsets.astype(dtype).reshape(*query.shape[:-1], *heads)
    points = points.astype(dtype)[..., None, :, :]  # [..., Q, 1, K or 1, 2 or 4]
    if points.shape[-1] == 2:
        size = np.repeat(np.array(levels)[:, ::-1], config.num_points, axis=0)  # [K, 2], (W, H)
        offsets = offsets / _trailing(size, offsets)
    else:
        halves = 2 * np.repeat(config.num_points, config.num_points)[:, None]  # [K, 1]
        # A box without a size has no points, and its NaN is in no product: none reaches a gradient.
        box = points[..., 2:]
        known = jnp.abs(box) < jnp.inf
        offsets = offsets * jnp.where(known, box, 0) / _trailing(halves, offsets)
        offsets = jnp.where(known, offsets, jnp.nan)
    return points[..., :2] + offsets


def from_torch(state: Mapping[str, Any], prefix: str = "") -> dict[str, dict[str, jax.Array]]:
    """The parameters of one PyTorch module, in the tree of Flax: kernels are `[in, out]`.

    Args:
      state: a state dict of NumPy arrays or CPU tensors, with `<prefix>sampling_offsets.weight` and so on.
      prefix: what stands before the four names, with the dot: "transformer.encoder.layers.0.self_attn."
        or "transformer.decoder.layers.0.cross_attn." in Deformable-DETR and DINO,
        "decoder.decoder.layers.0.cross_attn." in RT-DETR.

    Returns:
      {"sampling_offsets": {"kernel", "bias"}, ...} of the four linear layers. The docstring of each
      framework's layer shows how to put it in.

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

    return {
        name: {"kernel": entry(f"{name}.weight").T, "bias": entry(f"{name}.bias")}
        for name in Linears._fields
    }


def _precise(query: jax.Array) -> jax.Array:
    """`query` in the dtype of offsets and logits.

    A bfloat16 location is off by W / 512 pixels, whatever the offset it was made from.
    """
    return query.astype(accumulator_dtype(query.dtype))


def _levels(config: Config, spatial_shapes: Any) -> tuple[tuple[int, int], ...]:
    """(H, W) of each level."""
    shapes = level_shapes(_NAME, "spatial_shapes", spatial_shapes)
    if len(shapes) != len(config.num_points):
        expected = f"hold one (H, W) for each of the {len(config.num_points)} levels"
        raise ValueError(checks.message(_NAME, "spatial_shapes", expected, shapes))
    return shapes


def _reference_points(config: Config, points: Any, queries: tuple) -> jax.Array:
    """`[..., Q, K or 1, 2 or 4]`, one for each sampling point of a head, or one for all."""
    points = checks.floating(_NAME, "reference_points", points)
    counts = config.num_points
    if points.ndim == len(queries) + 1:  # [..., Q, 2 or 4]
        points = points[..., None, :]
    *lead, levels, coordinates = points.shape if points.ndim > 1 else (0, 0)
    if tuple(lead) != queries or levels not in (1, len(counts)) or coordinates not in (2, 4):
        expected = (
            f"have shape [..., Q, L, 2 or 4] = {(*queries, len(counts), '2 or 4')}, "
            "1 for L or no such axis if all levels share them"
        )
        raise ValueError(checks.message(_NAME, "reference_points", expected, points.shape))
    if levels == 1:
        return points
    per_level = zip(jnp.split(points, levels, axis=-2), counts, strict=True)
    repeated = [jnp.broadcast_to(x, (*lead, P, coordinates)) for x, P in per_level]
    return jnp.concatenate(repeated, axis=-2)  # not jnp.repeat: its gradient is a scatter-add


def _mask(mask: Any, shape: tuple) -> jax.Array | None:
    """`mask [..., S]`, checked."""
    if mask is None:
        return None
    if not checks.is_array(mask) or mask.dtype != np.bool_:
        got = f"dtype {mask.dtype}" if checks.is_array(mask) else type(mask).__name__
        expected = "be a boolean array (True = keep, False = padding)"
        remedy = "of a padding mask pass the opposite"
        raise TypeError(checks.message(_NAME, "mask", expected, got, remedy))
    mask = jnp.asarray(mask)
    checks.shape(_NAME, "mask", mask, "[..., S]", shape)
    return mask


def _keep(mask: jax.Array | None, x: jax.Array) -> jax.Array:
    """`x [..., S, C]`, zero in the padding."""
    return x if mask is None else jnp.where(mask[..., None], x, 0)


def _trailing(table: np.ndarray, x: jax.Array) -> jax.Array:
    """`table` in the dtype of `x`, its axes the last ones of `x`."""
    return jnp.asarray(table.reshape((1,) * (x.ndim - table.ndim) + table.shape), x.dtype)
