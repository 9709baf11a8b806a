"""All sampling points at once, as a GPU takes them: each sum is one kernel, which gathers what it adds.

XLA:GPU takes gathers into the loop of a sum, so that no array of the points and the channels is written.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core.sharding import full_like_operands
from jax_attn_bwd.ops.deformable import products, sampling, scatter
from jax_attn_bwd.ops.deformable.runs import BLOCK
from jax_attn_bwd.ops.deformable.sampling import Place, Samples
from jax_attn_bwd.ops.deformable.spec import Level, Operands, Options


def places(options: Options, operands: Operands) -> tuple[Place, Samples]:
    """Where all points lie, and the points, [B, Q, M, K]."""
    samples = sampling.points(options, operands)
    level = Level(*(x.reshape(1, 1, 1, -1) for x in options.levels()))
    return sampling.place(options, level, samples.x, samples.y), samples


def read(value: jax.Array, pixel: jax.Array, dtype: Any) -> jax.Array:
    """The pixels of `value [B, S, M, D]` at `[B, Q, M, K]`, 0 outside: `[B, Q, M, K, D]`.

    The select is in the loop that gathers; what a gather fills in, XLA:GPU looks up in a kernel of its own.
    """
    rows = sampling.read(value, pixel, mode="clip").astype(dtype)
    return jnp.where((pixel < value.shape[1])[..., None], rows, 0)


def weighted_sum(value: jax.Array, pixels: Sequence[jax.Array], scales: Sequence[jax.Array]) -> jax.Array:
    """The sum over points and corners of `scale * value` at the corner's pixel: [B, Q, M, D]."""
    sums = []
    for first in range(0, max(1, scales[0].shape[3]), BLOCK):
        terms = [
            scale[..., first : first + BLOCK, None]
            * read(value, pixel[..., first : first + BLOCK], scale.dtype)
            for pixel, scale in zip(pixels, scales, strict=True)
        ]
        sums.append(sum(terms[1:], terms[0]).sum(3))
    return sum(sums[1:], sums[0])


def value_gradient(options: Options, operands: Operands, dout: jax.Array) -> jax.Array:
    """`dvalue [B, S, M, D]` from `dout [B, Q, M, D]`, added up in the order of the moment."""
    at, samples = places(options, operands)
    value = operands.value
    zeros = full_like_operands(value, value.shape, 0, dout.dtype, (operands, dout))
    return scatter.add(zeros, at, sampling.scales(at, samples.weight), dout[:, :, :, None])


def point_gradients(
    options: Options, wanted: Collection[str], operands: Operands, dout: jax.Array
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """dloc_x, dloc_y, da, [B, Q, M, K] each; None where not asked."""
    at, samples = places(options, operands)
    d = [(dout[:, :, :, None] * read(operands.value, pixel, dout.dtype)).sum(-1) for pixel in at.pixels]
    return products.gradients(wanted, at, samples.weight, d)
