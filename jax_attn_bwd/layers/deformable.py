"""What the four `MultiScaleDeformableAttention` share: all of Deformable-DETR's module but its parameters.

    location = reference + offset / (W_l, H_l)                  reference points (x, y)
    location = reference + offset / P_l * (width, height) / 2   reference boxes (x, y, width, height)
    location = reference + offset / (W_l, H_l) * (width, height) / 2       with `use_4D_normalizer` (DINO)
    out = output_proj(multi_scale_deformable_attention(value_proj(value), location, softmax(logits)))

with offset = sampling_offsets(query), in pixels of its level for reference points, and
logits = attention_weights(query); without `projections` (D-FINE) value and out are taken as they are, and
`offset_scale` is the 1/2. With queries sharded over an axis of a mesh, a layer is told

    attention_fn=partial(parallel.sharded_multi_scale_deformable_attention, mesh=mesh, axis="queries")

Parameters: see `jax_attn_bwd.layers.deformable_parameters`.

Shapes: ... batch, Q queries, S pixels of all levels, C width, M heads, L levels, P_l points of a head on
level l, K = sum of P_l.

References:
  Zhu et al., Deformable DETR, arXiv:2010.04159, 2021. Lv et al., RT-DETRv2, arXiv:2407.17140, 2024.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd.layers.deformable_parameters import Config as Config
from jax_attn_bwd.layers.deformable_parameters import Linears as Linears
from jax_attn_bwd.layers.deformable_parameters import configure as configure
from jax_attn_bwd.layers.deformable_parameters import from_torch as from_torch
from jax_attn_bwd.layers.deformable_parameters import offsets_bias as offsets_bias
from jax_attn_bwd.layers.deformable_parameters import offsets_dtype as offsets_dtype
from jax_attn_bwd.ops.deformable.arguments import level_shapes

_NAME = "MultiScaleDeformableAttention"


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
    # The operator has one batch axis, and takes the softmax of the logits itself.
    B, options = math.prod(batch), dict(vars(config.options))
    if not config.options.forward_mode:
        del options["forward_mode"]  # an `attention_fn` of the caller's need not take it
    out = options.pop("attention_fn")(
        value.reshape(B, S, M, config.width // M),
        spatial_shapes,
        locations.reshape(B, Q, M, K, 2),
        logits.reshape(B, Q, M, K),
        num_points=config.num_points,
        normalize="softmax",
        **options,
    )
    return linears.output_proj(out.reshape(*batch, Q, config.width))


def sampling_locations(
    config: Config, linears: Linears, query: jax.Array, reference_points: jax.Array, spatial_shapes: Any
) -> jax.Array:
    """`[..., Q, M, K, 2]`, (x, y), float32 or wider: where each head looks for each query."""
    levels, form = _levels(config, spatial_shapes), config.form
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
        units = np.array(levels)[:, ::-1] if form.use_4D_normalizer else np.array(config.num_points)[:, None]
        scale = form.offset_scale / np.repeat(units, config.num_points, axis=0)  # [K, 1 or 2]
        # A box without a size has no points, and its NaN is in no product: none reaches a gradient.
        box = points[..., 2:]
        known = jnp.abs(box) < jnp.inf
        offsets = offsets * jnp.where(known, box, 0) * _trailing(scale, offsets)
        offsets = jnp.where(known, offsets, jnp.nan)
    return points[..., :2] + offsets


class Calls:
    """What a layer for whole batches can be called with; it holds its config and the four linear layers."""

    def __call__(
        self: Any,
        query: jax.Array,
        reference_points: jax.Array,
        value: jax.Array,
        spatial_shapes: Any,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Attends.

        Args:
          query: `[..., Q, C]`, with its position embedding.
          reference_points: `[..., Q, L, 2]`, (x, y) from 0 to 1 across the padded picture, or boxes
            `[..., Q, L, 4]`, (x, y of the centre, width, height). `[..., Q, 1, 2 or 4]` or
            `[..., Q, 2 or 4]` where all levels share them; batch axes of size 1 broadcast. Keep them
            float32 also where `dtype` or the query is narrower. See `encoder_reference_points`.
          value: `[..., S, C]`, the levels one after the other, each row by row.
          spatial_shapes: ((H_1, W_1), ..., (H_L, W_L)), known at trace time.
          mask: broadcasts to `[..., S]`, bool, **True = keep**, False = padding, whose values are zeroed. The
            `input_padding_mask` of Deformable-DETR is its opposite, the `value_mask` of RT-DETR the same.

        Returns:
          `[..., Q, C]`.

        Raises:
          ValueError: shapes disagree. TypeError: an argument is of the wrong kind.
        """
        return attend(self.config, _linears(self), query, reference_points, value, spatial_shapes, mask)

    def sampling_locations(
        self: Any, query: jax.Array, reference_points: jax.Array, spatial_shapes: Any
    ) -> jax.Array:
        """`[..., Q, M, sum P, 2]`, (x, y) from 0 to 1: where each head looks for each query."""
        return sampling_locations(self.config, _linears(self), query, reference_points, spatial_shapes)


def _linears(layer: Any) -> Linears:
    own = layer.config.form.projections
    return Linears(
        layer.sampling_offsets,
        layer.attention_weights,
        layer.value_proj if own else as_it_is,
        layer.output_proj if own else as_it_is,
    )


def as_it_is(x: jax.Array) -> jax.Array:
    """`x`: it stands in the place of a projection."""
    return x


def encoder_reference_points(
    spatial_shapes: Any, valid_ratios: jax.Array | None = None, dtype: Any = jnp.float32
) -> jax.Array:
    """The reference points of an encoder: each pixel of each level looks around its own centre.

        point = (pixel + 1/2) / (valid ratio of its level * size of its level) * valid ratio of level l

    Args:
      spatial_shapes: ((H_1, W_1), ..., (H_L, W_L)), known at trace time.
      valid_ratios: `[..., L, 2]`, (x, y): the share of each padded picture that is not padding. Traced ones
        compile once for pictures of all sizes. None = all of it.
      dtype: dtype of the points.

    Returns:
      `[..., S, L, 2]`, (x, y), S = sum of H W; without valid ratios `[1, S, 1, 2]`, for all pictures and
      levels.

    Gradients:
      valid_ratios.

    Raises:
      ValueError: shapes disagree. TypeError: an argument is of the wrong kind.

    Example:
      >>> from jax_attn_bwd.layers.flax_nnx import encoder_reference_points
      >>> encoder_reference_points(((1, 2), (1, 1)))[0, :, 0].tolist()
      [[0.25, 0.5], [0.75, 0.5], [0.5, 0.5]]

    References:
      Zhu et al., Deformable DETR, 2021, arXiv:2010.04159, appendix A.4.
    """
    name = "encoder_reference_points"
    shapes = level_shapes(name, "spatial_shapes", spatial_shapes)
    centres = [(np.stack(np.meshgrid(np.arange(w), np.arange(h)), -1) + 0.5) / (w, h) for h, w in shapes]
    points = jnp.asarray(np.concatenate([x.reshape(-1, 2) for x in centres]), dtype)[None, :, None]
    if valid_ratios is None:
        return points
    ratios = checks.floating(name, "valid_ratios", valid_ratios).astype(dtype)
    if ratios.shape[-2:] != (len(shapes), 2):
        expected = f"have shape [..., L, 2] = {('...', len(shapes), 2)}"
        raise ValueError(checks.message(name, "valid_ratios", expected, ratios.shape))
    points = points.reshape((1,) * (ratios.ndim - 2) + points.shape[1:])
    own = jnp.concatenate(
        [
            jnp.broadcast_to(ratios[..., level, None, :], (*ratios.shape[:-2], h * w, 2))
            for level, (h, w) in enumerate(shapes)
        ],
        axis=-2,
    )
    return points / own[..., None, :] * ratios[..., None, :, :]


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
    counts, given = config.num_points, points.shape
    if points.ndim == len(queries) + 1:  # [..., Q, 2 or 4]
        points = points[..., None, :]
    *lead, levels, coordinates = points.shape if points.ndim > 1 else (0, 0)
    fits = len(lead) == len(queries) and lead[-1:] == [queries[-1]]
    fits = fits and all(n in (1, size) for n, size in zip(lead, queries, strict=True))
    if not fits or levels not in (1, len(counts)) or coordinates not in (2, 4):
        expected = (
            f"have shape [..., Q, L, 2 or 4] = {(*queries, len(counts), '2 or 4')}, "
            "1 for L or no such axis if all levels share them, 1 for a batch axis if its entries do"
        )
        raise ValueError(checks.message(_NAME, "reference_points", expected, given))
    points = jnp.broadcast_to(points, (*queries, levels, coordinates))
    lead = list(queries)
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
    checks.broadcasts(_NAME, "mask", jnp.asarray(mask), "[..., S]", shape)
    if mask.ndim == 0 or mask.shape[-1] != shape[-1]:
        expected = f"tell of each of the S = {shape[-1]} pixels"
        raise ValueError(checks.message(_NAME, "mask", expected, f"shape {mask.shape}"))
    return jnp.broadcast_to(jnp.asarray(mask), shape)


def _keep(mask: jax.Array | None, x: jax.Array) -> jax.Array:
    """`x [..., S, C]`, zero in the padding."""
    return x if mask is None else jnp.where(mask[..., None], x, 0)


def _trailing(table: np.ndarray, x: jax.Array) -> jax.Array:
    """`table` in the dtype of `x`, its axes the last ones of `x`."""
    return jnp.asarray(table.reshape((1,) * (x.ndim - table.ndim) + table.shape), x.dtype)
