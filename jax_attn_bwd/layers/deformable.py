"""`MultiScaleDeformableAttention` in every framework: its arguments, its parameters and its call.

    location = reference + offset / (W_l, H_l)                  reference points (x, y)
    location = reference + offset / P_l * (width, height) / 2   reference boxes (x, y, width, height)
    location = reference + offset / (W_l, H_l) * (width, height) / 2       with `use_4D_normalizer` (DINO)
    out = output_proj(multi_scale_deformable_attention(value_proj(value), location, softmax(logits)))

with offset = sampling_offsets(query), in pixels of its level for reference points, and
logits = attention_weights(query); without `projections` (D-FINE) value and out are taken as they are, and
`offset_scale` is the 1/2. With queries sharded over an axis of a mesh, a layer is told

    attention_fn=partial(parallel.sharded_multi_scale_deformable_attention, mesh=mesh, axis="queries")

The four linear layers have the names of the published PyTorch modules (MSDeformAttn of Deformable-DETR
and DINO, MSDeformableAttention of RT-DETR, RT-DETRv2 and D-FINE, which has the first two alone,
MultiScaleDeformableAttention of mmcv and Hugging Face), and the same order of heads, levels, points and
(x, y) inside. With `name` one of sampling_offsets, attention_weights, value_proj and output_proj:

    framework         matrix                      vector
    PyTorch           name.weight  [out, in]      name.bias
    linen and NNX     name.kernel  [in, out]      name.bias
    Haiku             ~/name/w     [in, out]      ~/name/b
    Equinox           name.weight  [out, in]      name.bias

Constructors take, beside what their framework's layers take:
  * `num_heads` (8): M, the number of heads;
  * the width C (256) of queries, values and output, a multiple of M, under the framework's name for it;
  * `num_levels` (4): L;
  * `num_points` (4): sampling points of a head on each level, P, or (P_1, ..., P_L);
  * `padding_mode`, `method`, `deterministic_sums`, `implementation`, `forward_mode`: options of
    `jax_attn_bwd.multi_scale_deformable_attention`, with its defaults;
  * `use_4D_normalizer` (False): offsets from boxes are in pixels of their level times the box, as in DINO, in
    place of boxes over the number of points;
  * `offset_scale` (0.5): what offsets from boxes are multiplied by, the 1/2 of the sources;
  * `projections` (True): False leaves out `value_proj` and `output_proj`, as D-FINE does: `value` is taken as
    it is, and the output is that of the heads, side by side;
  * `attention_fn`: what is called in the place of that operator, with its arguments: over a mesh, a `partial`
    of `jax_attn_bwd.parallel.sharded_multi_scale_deformable_attention`;
  * `deterministic` (None): the former name of `deterministic_sums`, deprecated.

Layers start as in the source: offsets that point away from the reference point, one direction for each head
and one pixel more for each point; equal weights; `value_proj` and `output_proj` Xavier-uniform. Offsets,
locations and weights are computed in float32 or wider in any case.

Shapes: ... batch, Q queries, S pixels of all levels, C width, M heads, L levels, P_l points of a head on
level l, K = sum of P_l.

References:
  Zhu et al., Deformable DETR, arXiv:2010.04159, 2021. Lv et al., RT-DETRv2, arXiv:2407.17140, 2024.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.keywords import ORDERS, known
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.types import Implementation, PaddingMode, SamplingMethod
from jax_attn_bwd.layers.torch_weights import as_array
from jax_attn_bwd.ops.deformable import multi_scale_deformable_attention
from jax_attn_bwd.ops.deformable.arguments import level_shapes

_NAME = "MultiScaleDeformableAttention"
_OPTIONS = ("num_points", "padding_mode", "method", "deterministic_sums", "implementation")  # of the operator


class Keywords(TypedDict, total=False):
    """Lists what a layer may be given by name, in every framework."""

    num_levels: int
    num_points: int | Sequence[int]
    padding_mode: PaddingMode
    method: SamplingMethod
    deterministic_sums: bool | None
    implementation: Implementation | None
    forward_mode: bool
    use_4D_normalizer: bool
    offset_scale: float
    projections: bool
    attention_fn: Callable[..., jax.Array]
    deterministic: bool | None


@dataclass(frozen=True)
class Config:
    """Holds what a layer is built from, and the defaults of `Keywords`."""

    width: int  # C
    num_heads: int  # M
    num_levels: int = 4
    num_points: Any = 4  # in a layer P_l of each level
    padding_mode: PaddingMode = "zeros"
    method: SamplingMethod = "bilinear"
    deterministic_sums: bool | None = None
    implementation: Implementation | None = None
    forward_mode: bool = False
    use_4D_normalizer: bool = False
    offset_scale: float = 0.5
    projections: bool = True
    attention_fn: Callable[..., jax.Array] = multi_scale_deformable_attention
    unbatched: bool = False  # whether calls take one picture, as in Equinox

    @property
    def samples(self) -> int:
        """Sampling points of a query, M * K."""
        return self.num_heads * sum(self.num_points)


class Linears(NamedTuple):
    """Holds the linear layers, over the last axis; without projections the last two return what they get."""

    sampling_offsets: Callable[[jax.Array], jax.Array]  # [..., C] -> [..., M * K * 2]
    attention_weights: Callable[[jax.Array], jax.Array]  # [..., C] -> [..., M * K]
    value_proj: Callable[[jax.Array], jax.Array]  # [..., C] -> [..., C]
    output_proj: Callable[[jax.Array], jax.Array]  # [..., C] -> [..., C]


def configure(
    width: str, C: Any, num_heads: Any, keywords: Mapping[str, Any], unbatched: bool = False
) -> Config:
    """Returns the configuration of a layer from its arguments, checked; `width` is the name that C has."""
    given = checks.complete(f"{_NAME}.__init__", Config, Keywords, keywords)
    # Heads and their width, and how many points a head has on each level.
    num_heads = checks.integer(_NAME, "num_heads", num_heads, least=1)
    num_levels = checks.integer(_NAME, "num_levels", given["num_levels"], least=1)
    C = checks.integer(_NAME, width, C, least=1)
    if C % num_heads:
        expected = f"be a multiple of the {num_heads} heads"
        raise ValueError(checks.message(_NAME, width, expected, C, ORDERS[f"{_NAME}.__init__"]))
    points: Any = given["num_points"]
    each = points if np.ndim(points) else (points,) * num_levels
    if len(each) != num_levels:
        expected = f"be a positive int, or one for each of the {num_levels} levels"
        raise ValueError(checks.message(_NAME, "num_points", expected, repr(points)))
    counts = tuple(checks.integer(_NAME, "num_points", P, least=1) for P in each)
    # Options of the operator, and in what the published modules differ.
    sums = checks.repeatable_sums(_NAME, given["deterministic_sums"], given.pop("deterministic", None))
    if not callable(given["attention_fn"]):
        expected = "be a function like multi_scale_deformable_attention"
        got = type(given["attention_fn"]).__name__
        raise TypeError(checks.message(_NAME, "attention_fn", expected, got))
    for name in ("forward_mode", "use_4D_normalizer", "projections"):
        given[name] = checks.flag(_NAME, name, given[name])
    given["offset_scale"] = checks.python_float(_NAME, "offset_scale", given["offset_scale"])
    given |= dict(num_levels=num_levels, num_points=counts, deterministic_sums=sums)
    return Config(C, num_heads, **given, unbatched=unbatched)


def offsets_init(config: Config) -> Callable[..., jax.Array]:
    """Returns the initializer of the bias of `sampling_offsets`; its last argument is a dtype."""
    bias = offsets_bias(config)
    return lambda *like: jnp.asarray(bias, like[-1])


def offsets_bias(config: Config) -> np.ndarray:
    """Returns `[M * K * 2]`: point p of head m begins p + 1 pixels from the reference, in direction m."""
    angle = 2 * np.pi / config.num_heads * np.arange(config.num_heads)
    direction = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    direction /= np.abs(direction).max(axis=-1, keepdims=True)  # onto a square: 8 heads, 8 pixels
    steps = np.concatenate([np.arange(1, P + 1) for P in config.num_points])  # [K]
    return (direction[:, None] * steps[:, None]).ravel()


def offsets_dtype(dtype: Any) -> jnp.dtype | None:
    """Returns the dtype of offsets and logits in a layer that computes in `dtype`: float32 or wider."""
    return None if dtype is None else accumulator_dtype(jnp.dtype(dtype))


def sampling_locations(
    config: Config, linears: Linears, query: jax.Array, reference_points: jax.Array, spatial_shapes: Any
) -> jax.Array:
    """Computes `[..., Q, M, K, 2]`, (x, y), float32 or wider: where each head looks for each query."""
    if config.unbatched and np.ndim(query) != 2:
        remedy = "for a batch use jax.vmap"
        raise ValueError(checks.message(_NAME, "query", "have shape [Q, C]", np.shape(query), remedy))
    levels = _levels(config, spatial_shapes)
    # Points [..., Q, K or 1, 2 or 4] and offsets [..., Q, M, K, 2] in the wider dtype of both.
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
    # Offsets are in pixels of their level, or in shares of the box.
    if points.shape[-1] == 2:
        size = np.repeat(np.array(levels)[:, ::-1], config.num_points, axis=0)  # [K, 2], (W, H)
        offsets = offsets / _trailing(size, offsets)
    else:
        units = np.array(config.num_points)[:, None]
        units = np.array(levels)[:, ::-1] if config.use_4D_normalizer else units
        scale = config.offset_scale / np.repeat(units, config.num_points, axis=0)  # [K, 1 or 2]
        # A box without a size has no points, and its NaN is in no product: none reaches a gradient.
        box = points[..., 2:]
        known = jnp.abs(box) < jnp.inf
        offsets = offsets * jnp.where(known, box, 0) * _trailing(scale, offsets)
        offsets = jnp.where(known, offsets, jnp.nan)
    return points[..., :2] + offsets


class Calls:
    """Gives its calls to a layer that holds its `config` and the linear layers by name."""

    @known
    def __call__(
        self: Any,
        query: jax.Array,
        reference_points: jax.Array,
        value: jax.Array,
        spatial_shapes: Any,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Attends; in Equinox without the batch axes `...`.

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
        # Locations and logits [..., Q, M * K] come from the query, values [..., S, C] from the feature maps.
        config, linears = self.config, _linears(self)
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
        B, options = math.prod(batch), {name: getattr(config, name) for name in _OPTIONS}
        if config.forward_mode:  # an `attention_fn` of the caller's need not take it
            options["forward_mode"] = True
        value = value.reshape(B, S, M, config.width // M)
        locations, logits = locations.reshape(B, Q, M, K, 2), logits.reshape(B, Q, M, K)
        out = config.attention_fn(value, spatial_shapes, locations, logits, normalize="softmax", **options)
        return linears.output_proj(out.reshape(*batch, Q, config.width))

    def sampling_locations(
        self: Any, query: jax.Array, reference_points: jax.Array, spatial_shapes: Any
    ) -> jax.Array:
        """`[..., Q, M, sum P, 2]`, (x, y) from 0 to 1: where each head looks for each query."""
        return sampling_locations(self.config, _linears(self), query, reference_points, spatial_shapes)


def _linears(layer: Any) -> Linears:
    """Returns the linear layers of `layer`, where it does not tell itself how they are applied."""
    if hasattr(layer, "_linears"):
        return layer._linears()
    outer = (layer.value_proj, layer.output_proj) if layer.config.projections else (as_it_is, as_it_is)
    return Linears(layer.sampling_offsets, layer.attention_weights, *outer)


def as_it_is(x: jax.Array) -> jax.Array:
    """Returns `x`: it stands in the place of a projection."""
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
    # The centre of each pixel of each level, [1, S, 1, 2], from 0 to 1.
    name = "encoder_reference_points"
    shapes = level_shapes(name, "spatial_shapes", spatial_shapes)
    centres = [(np.stack(np.meshgrid(np.arange(w), np.arange(h)), -1) + 0.5) / (w, h) for h, w in shapes]
    points = jnp.asarray(np.concatenate([x.reshape(-1, 2) for x in centres]), dtype)[None, :, None]
    if valid_ratios is None:
        return points
    # A padded picture has its own, by the share that is not padding: [..., S, L, 2].
    ratios = checks.floating(name, "valid_ratios", valid_ratios).astype(dtype)
    if ratios.shape[-2:] != (len(shapes), 2):
        expected = f"have shape [..., L, 2] = {('...', len(shapes), 2)}"
        raise ValueError(checks.message(name, "valid_ratios", expected, ratios.shape))
    points = points.reshape((1,) * (ratios.ndim - 2) + points.shape[1:])
    sizes = enumerate((*ratios.shape[:-2], h * w, 2) for h, w in shapes)
    own = [jnp.broadcast_to(ratios[..., level, None, :], size) for level, size in sizes]
    return points / jnp.concatenate(own, -2)[..., None, :] * ratios[..., None, :, :]


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


def _precise(query: jax.Array) -> jax.Array:
    """Returns `query` in the dtype of offsets and logits.

    A bfloat16 location is off by W / 512 pixels, whatever the offset it was made from.
    """
    return query.astype(accumulator_dtype(query.dtype))


def _levels(config: Config, spatial_shapes: Any) -> tuple[tuple[int, int], ...]:
    """Returns (H, W) of each level."""
    shapes = level_shapes(_NAME, "spatial_shapes", spatial_shapes)
    if len(shapes) != len(config.num_points):
        expected = f"hold one (H, W) for each of the {len(config.num_points)} levels"
        raise ValueError(checks.message(_NAME, "spatial_shapes", expected, shapes))
    return shapes


def _reference_points(config: Config, points: Any, queries: tuple) -> jax.Array:
    """Returns `[..., Q, K or 1, 2 or 4]`, one for each sampling point of a head, or one for all."""
    points = checks.floating(_NAME, "reference_points", points)
    counts, given = config.num_points, points.shape
    # Axes that all entries or all levels share may be 1, or missing.
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
    # Each level's point is that of all its sampling points.
    points = jnp.broadcast_to(points, (*queries, levels, coordinates))
    if levels == 1:
        return points
    per_level = zip(jnp.split(points, levels, axis=-2), counts, strict=True)
    repeated = [jnp.broadcast_to(x, (*queries, P, coordinates)) for x, P in per_level]
    return jnp.concatenate(repeated, axis=-2)  # not jnp.repeat: its gradient is a scatter-add


def _mask(mask: Any, shape: tuple) -> jax.Array | None:
    """Returns `mask [..., S]`, checked."""
    if mask is None:
        return None
    if not checks.is_array(mask) or mask.dtype != np.bool_:
        got = f"dtype {mask.dtype}" if checks.is_array(mask) else type(mask).__name__
        expected = "be a boolean array (True = keep, False = padding)"
        remedy = "of a padding mask pass the opposite"
        if checks.is_array(mask) and jnp.issubdtype(mask.dtype, jnp.integer):
            remedy = "a level_start_index is left out: it follows from spatial_shapes"
        raise TypeError(checks.message(_NAME, "mask", expected, got, remedy))
    checks.broadcasts(_NAME, "mask", jnp.asarray(mask), "[..., S]", shape)
    if mask.ndim == 0 or mask.shape[-1] != shape[-1]:
        expected = f"tell of each of the S = {shape[-1]} pixels"
        raise ValueError(checks.message(_NAME, "mask", expected, f"shape {mask.shape}"))
    return jnp.broadcast_to(jnp.asarray(mask), shape)


def _keep(mask: jax.Array | None, x: jax.Array) -> jax.Array:
    """Returns `x [..., S, C]`, zero in the padding."""
    return x if mask is None else jnp.where(mask[..., None], x, 0)


def _trailing(table: np.ndarray, x: jax.Array) -> jax.Array:
    """Returns `table` in the dtype of `x`, its axes the last ones of `x`."""
    return jnp.asarray(table.reshape((1,) * (x.ndim - table.ndim) + table.shape), x.dtype)
