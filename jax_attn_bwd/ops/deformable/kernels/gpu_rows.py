"""What the GPU kernels of deformable attention share: how rows of channels lie in registers.

A patch is 2 x 2 pixels of `channels` channels: one warp for each pixel, one lane for channels / 32
neighbouring channels. A row is what each of the four warps holds a copy of.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core import mosaic_gpu

LANES = 32
MOST_CHANNELS = 256


def padded(channels: int) -> int:
    """Channels as the kernels have them: 32 lanes of 1, 2, 4 or 8."""
    return max(LANES, 1 << (channels - 1).bit_length())


def pad(x: jax.Array) -> jax.Array:
    """`x` with zeros behind its channels, the last axis."""
    more = padded(x.shape[-1]) - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)]) if more else x


def patch_layout(channels: int) -> Any:
    """The layout of a patch `[2, 2, channels]`; `.reduce((0, 1))` is for a row, `.reduce(2)` for pixels."""
    tiling = plgpu.Tiling(((2, 2, channels), (channels // LANES,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4, -3), lane_dims=(-2,), vector_dim=-1)


def load(ref: Any, layout: Any) -> jax.Array:
    """Loads float32 from any part of global memory."""
    return mosaic_gpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def store(ref: Any, x: jax.Array) -> None:
    """Stores to any part of global memory."""
    getattr(plgpu, "store")(ref, x, optimized=False)  # noqa: B009 (absent before JAX 0.12)


def load_row(ref: Any) -> jax.Array:
    """A row, for each pixel of a patch: `[2, 2, channels]`."""
    (channels,) = ref.shape
    row = load(ref, patch_layout(channels).reduce((0, 1)))
    return lax.broadcast_in_dim(row, (2, 2, channels), (2,))
