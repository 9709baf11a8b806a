"""Deformable attention: cases, parameters, inputs, and the definition of the layer."""

import jax
import jax.numpy as jnp
import numpy as np
from layers.frameworks import deformable

from jax_attn_bwd import multi_scale_deformable_attention
from jax_attn_bwd.layers.deformable import from_torch

LEVELS = ((3, 5), (4, 1), (2, 3))  # not square: swapped axes show

M, C, L, Q, B, S = 2, 6, 3, 7, 2, 25

NAMES = ("sampling_offsets", "attention_weights", "value_proj", "output_proj")


def build(framework, width=C, **options):
    """`init(key) -> params` and `call(params, ...)` of a layer, `params` in the tree of Flax."""
    options = {"num_heads": M, "num_levels": L, "num_points": 2} | options
    return deformable(framework, LEVELS, width, **options)


def torch_state(rng, points=2, prefix=""):
    """Random parameters with PyTorch's names and shapes."""
    K = sum(points) if isinstance(points, tuple) else points * L
    rows = dict(zip(NAMES, (2 * M * K, M * K, C, C), strict=True))
    state = {f"{prefix}{name}.weight": rng.standard_normal((n, C)) for name, n in rows.items()}
    return state | {f"{prefix}{name}.bias": rng.standard_normal(n) for name, n in rows.items()}


def inputs(rng, points=(L, 2), masked=False):
    """(query, reference_points [B, Q, *points], value, mask)."""
    reference_points = rng.uniform(0.05, 0.95, (B, Q, *points))
    mask = jnp.asarray(rng.random((B, S)) < 0.7) if masked else None
    arrays = rng.standard_normal((B, Q, C)), reference_points, rng.standard_normal((B, S, C))
    return *map(jnp.asarray, arrays), mask


def definition(
    params, query, points, value, mask, num_points=2, use_4D_normalizer=False, offset_scale=0.5,
    projections=True, **options,
):  # fmt: skip
    """The module written out level by level around the operator."""
    counts = (num_points,) * L if isinstance(num_points, int) else num_points
    dense = lambda name, x: x @ params[name]["kernel"] + params[name]["bias"]
    offsets = dense("sampling_offsets", query).reshape(B, Q, M, sum(counts), 2)
    points = points if points.ndim == 4 else points[:, :, None]
    locations, first = [], 0
    for level, ((H, W), P) in enumerate(zip(LEVELS, counts, strict=True)):
        at = points[:, :, min(level, points.shape[2] - 1)][:, :, None, None]  # [B, Q, 1, 1, 2 or 4]
        shift = offsets[:, :, :, first : first + P]
        unit = pixel = 1 / jnp.array([W, H], float)
        if at.shape[-1] == 4:
            unit = at[..., 2:] * offset_scale * (pixel if use_4D_normalizer else 1 / P)
        locations.append(at[..., :2] + shift * unit)
        first += P
    value = dense("value_proj", value) if projections else value
    value = value if mask is None else value * mask[..., None]
    weights = jax.nn.softmax(dense("attention_weights", query).reshape(B, Q, M, sum(counts)))
    out = multi_scale_deformable_attention(
        value.reshape(B, S, M, C // M),
        LEVELS,
        jnp.concatenate(locations, 3),
        weights,
        num_points=counts,
        **options,
    )
    return dense("output_proj", out) if projections else out


CASES = {
    "points": {},
    "boxes_of_all_levels": {"points": (1, 4), "masked": True},
    "ragged": {"num_points": (2, 1, 2), "masked": True},
    "ragged_boxes": {"num_points": (1, 2, 2), "points": (L, 4), "padding_mode": "border"},
    "boxes_in_pixels": {"points": (L, 4), "use_4D_normalizer": True},
    "not_projected": {
        "num_points": (1, 2, 2),
        "points": (1, 4),
        "projections": False,
        "offset_scale": 0.3,
        "masked": True,
    },
    "discrete_points_of_all_levels": {"points": (2,), "method": "discrete"},
}


def arguments_of(case):
    """(options of the layer, parameters, inputs) of a case."""
    options, rng = dict(CASES[case]), np.random.default_rng(0)
    arrays = inputs(rng, options.pop("points", (L, 2)), options.pop("masked", False))
    params = from_torch(torch_state(rng, options.get("num_points", 2)))
    names = NAMES if options.get("projections", True) else NAMES[:2]
    return options, {name: params[name] for name in names}, arrays


def call_with(framework="flax_linen", options=None, **changed):
    """A call of a layer that is right but for what `changed` says."""
    rng = np.random.default_rng(0)
    query, points, value, mask = inputs(rng, masked=True)
    arguments = dict(query=query, points=points, value=value, shapes=LEVELS, mask=mask) | changed
    return build(framework, **(options or {})).call(from_torch(torch_state(rng)), *arguments.values())
