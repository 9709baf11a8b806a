"""What is measured of multi-scale deformable attention: forward and backward, float32, 8 heads of 32.

The encoder asks once for every pixel, around its own place; the decoder asks 300 times anywhere.
"""

import importlib.util
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn_bwd import multi_scale_deformable_attention
from jax_attn_bwd.bench.measure import Case, Contender, compiled_contender
from jax_attn_bwd.ops.deformable.reference import (
    multi_scale_deformable_attention as definition,
)

HEADS, CHANNELS, POINTS = 8, 32, 4
SQUARE = ((64, 64), (32, 32), (16, 16), (8, 8))
COCO = ((100, 134), (50, 67), (25, 34), (13, 17))
Levels = tuple[tuple[int, int], ...]


def cases(quick: bool) -> Iterator[Case]:
    """The cases, built one at a time; `quick` keeps them small."""
    levels = ((8, 6), (4, 3)) if quick else SQUARE
    yield _against_peers("encoder", levels, queries=None)
    yield _against_peers("decoder", levels, queries=30 if quick else 300)
    if not quick:
        arrays = _arrays(COCO, 2, None)
        inputs = sum(x.nbytes for x in arrays[:3])
        ours = compiled_contender(
            "jax_attn_bwd", _step(COCO, multi_scale_deformable_attention), *arrays
        )
        over = round((ours.temporary_bytes or 0) / inputs, 2)
        ours.notes["temporary memory / inputs"] = over
        yield Case("encoder, B2, 100x134 to 13x17", [ours])


def _arrays(levels: Levels, batch: int, queries: int | None) -> list[jax.Array]:
    """value, sampling_locations, attention_weights, dout; a query for each pixel if `queries` is None."""
    rng = np.random.default_rng(0)
    sizes = np.array(levels)[:, None, ::-1]  # [L, 1, (W, H)]
    if queries is None:
        centres = np.concatenate(
            [(np.argwhere(np.ones(x))[:, ::-1] + 0.5) / x[::-1] for x in levels]
        )
    else:
        centres = rng.random((queries, 2))
    points = (HEADS, len(levels), POINTS)
    offsets = 2 * rng.standard_normal((batch, len(centres), *points, 2)) / sizes  # of 2 pixels
    locations = centres[:, None, None, None] + offsets
    pixels = sum(h * w for h, w in levels)
    weights = rng.random((batch, len(centres), *points))
    arrays = (
        rng.standard_normal((batch, pixels, HEADS, CHANNELS)),
        locations,
        weights / weights.sum((-2, -1), keepdims=True),
        rng.standard_normal((batch, len(centres), HEADS * CHANNELS)),
    )
    return [jnp.asarray(x, jnp.float32) for x in arrays]


def _step(levels: Levels, function: Any) -> Any:
    """`(value, locations, weights, dout) -> (out, dvalue, dlocations, dweights)`."""

    def step(value, locations, weights, dout):
        out, pullback = jax.vjp(
            lambda *x: function(x[0], levels, *x[1:]), value, locations, weights
        )
        return (out, *pullback(dout))

    return step


def _gather_form(value, levels, locations, weights):
    """The definition, as one would write it: gathers of whole arrays, left to JAX to differentiate."""
    with jax.numpy_rank_promotion("allow"):
        return definition(value, locations, weights, spatial_shapes=levels)


def _against_peers(name: str, levels: Levels, queries: int | None) -> Case:
    arrays = _arrays(levels, 1, queries)
    contenders = [
        compiled_contender(
            "jax_attn_bwd", _step(levels, multi_scale_deformable_attention), *arrays
        ),
        compiled_contender("gather form, jax.grad", _step(levels, _gather_form), *arrays),
    ]
    if importlib.util.find_spec("torch"):
        contenders.append(_torch(levels, arrays))
    return Case(f"{name}, B1, Q={arrays[1].shape[1]}", contenders)


def _torch(levels: Levels, arrays: list[jax.Array]) -> Contender:
    """`grid_sample` for each level: the form that every DETR falls back to without its CUDA kernel."""
    import torch
    from torch.nn.functional import grid_sample

    *tensors, dout = (torch.tensor(np.asarray(x)) for x in arrays)
    inputs = [x.requires_grad_() for x in tensors]

    def attend(value, locations, weights):
        (B, _, M, D), Q = value.shape, locations.shape[1]
        grids = (2 * locations - 1).transpose(1, 2).flatten(0, 1)  # [B * M, Q, L, P, 2]
        sampled = []
        for level, part in enumerate(value.split([h * w for h, w in levels], 1)):
            image = part.permute(0, 2, 3, 1).reshape(B * M, D, *levels[level])
            sampled.append(grid_sample(image, grids[:, :, level], align_corners=False))
        scale = weights.transpose(1, 2).reshape(B * M, 1, Q, -1)
        out = (torch.stack(sampled, -2).flatten(-2) * scale).sum(-1)
        return out.view(B, M * D, Q).transpose(1, 2).contiguous()

    def run():
        out = attend(*inputs)
        return (out, *torch.autograd.grad(out, inputs, dout))

    def results():
        return [x.detach().numpy() for x in run()]

    return Contender(f"torch {torch.__version__.split('+')[0]} grid_sample", run, results)
