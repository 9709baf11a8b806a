"""Portable forward of multi-scale deformable attention: a loop over the K sampling points, or all at once.

    out = sum over k of weight_k * sum over corners c of share_c * value[pixel_c]

The largest intermediate that is written has the size of `out`, or of the points.
"""

from functools import partial

import jax
from jax import lax

from jax_attn_bwd._core import fusion
from jax_attn_bwd._core.sharding import full_like_operands, tie
from jax_attn_bwd.ops.deformable import all_points, cpu, loops, sampling
from jax_attn_bwd.ops.deformable.spec import Operands, Options


def forward(options: Options, operands: Operands) -> jax.Array:
    """`out [B, Q, M * D]`, in the dtype of the value."""
    return _sum_over_points(options, loops.chosen(options, operands), operands)


@partial(jax.jit, static_argnums=(0, 1))
def _sum_over_points(options, loops, operands):
    value, dtype, heads_first = operands.value, sampling.compute_dtype(operands), loops.heads_first
    (B, Q, M, _), D = operands.attention_weights.shape, value.shape[3]
    if loops.all_points:
        at, samples = all_points.places(options, operands)
        out = all_points.weighted_sum(value, at.pixels, sampling.scales(at, samples.weight))
        return tie(out.reshape(B, Q, M * D).astype(value.dtype), operands)

    def add_point(out, point):
        level, (x, y, weight) = point
        level = cpu.on_all_cores(level) if loops.on_all_cores else level
        at = sampling.place(options, level, x, y)
        # once for a point, not once for each of its D channels in the loop that XLA fuses
        pixels, scales = fusion.barrier((at.pixels, sampling.scales(at, weight)))
        for pixel, scale in zip(pixels, scales, strict=True):
            out += scale[..., None] * sampling.read(value, pixel, heads_first).astype(dtype)
        return out, None

    like, shape = operands.attention_weights, (B, Q, M, D)
    if heads_first:
        like, shape = like.transpose(0, 2, 1, 3), (B, M, Q, D)
    zeros = full_like_operands(like, shape, 0, dtype, operands)
    points = (options.levels(), sampling.samples(options, operands, heads_first))
    out, _ = lax.scan(jax.checkpoint(add_point, prevent_cse=False), zeros, points)
    out = out.transpose(0, 2, 1, 3) if heads_first else out
    return tie(out.reshape(B, Q, M * D).astype(value.dtype), operands)
