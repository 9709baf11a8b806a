"""GPU kernel of the four products of a sample with the cotangent, equation (4) of `backward.py`.

A block of four warps takes a query and head: it holds dout, and for each sample loads the 2 x 2 pixels around
it, one a warp, and sums over the lanes. A patch begins on the level: where a corner is outside, so that the
patch is not the sample's own, its products change places afterwards.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_attn_bwd._core import mosaic_gpu, pallas
from jax_attn_bwd.ops.deformable.kernels import gpu_rows
from jax_attn_bwd.ops.deformable.sampling import Location, Place
from jax_attn_bwd.ops.deformable.spec import Level, Options

_AT_ONCE = 4  # samples whose pixels are loaded before the first is summed


def products(
    options: Options,
    interpret: bool,
    level: Level,
    at: Location,
    place: Place,
    value: jax.Array,
    rows: jax.Array,
) -> tuple[jax.Array, ...]:
    """<dout, value> at each pixel of `place [B, Q, M, K]`, 0 outside the level.

    `value` is `[B, S, M, D]`, `rows [B * Q * M, padded D]` those of dout.
    """
    (B, Q, M, K), S = at.row.shape, value.shape[1]
    first_row = jnp.clip(at.row, 0, jnp.maximum(level.height - 2, 0))
    first_column = jnp.clip(at.column, 0, jnp.maximum(level.width - 2, 0))
    starts = (first_row * level.width + first_column).reshape(B * Q * M, K)
    arrays = pallas.vary_alike((_levels(options, value), starts, rows))
    call = mosaic_gpu.launch(
        partial(_multiply, options, Q, M),
        "deformable_products",
        interpret=interpret,
        out_type=pallas.out_type((B * Q * M, K, 2, 2), jnp.float32, arrays),
        scratch=(),
        grid={"row": B * Q * M},
    )
    d = call(*arrays[0], *arrays[1:]).reshape(B, Q, M, K, 2, 2)
    above, below = _own(d[..., 0, :], d[..., 1, :], (at.row - first_row)[..., None])
    corners = [*_own(above[..., 0], above[..., 1], at.column - first_column)]
    corners += _own(below[..., 0], below[..., 1], at.column - first_column)
    return tuple(jnp.where(p < S, c, 0) for p, c in zip(place.pixels, corners, strict=False))


def _levels(options: Options, value: jax.Array) -> list[jax.Array]:
    """The levels that have points, `[B, H, W, M, padded D]`, at least 2 x 2."""
    B, _, M, D = value.shape
    found, start = [], 0
    for (H, W), P in zip(options.spatial_shapes, options.num_points, strict=True):
        x = value[:, start : start + H * W].reshape(B, H, W, M, D)
        start += H * W
        more = ((0, 0), (0, max(2 - H, 0)), (0, max(2 - W, 0)), (0, 0), (0, gpu_rows.padded(D) - D))
        if P:
            found.append(jnp.pad(x, more) if any(end for _, end in more) else x)
    return found


def _multiply(options: Options, Q: int, M: int, *refs: Any) -> None:
    *levels, starts, rows, out = refs
    r = lax.axis_index("row")
    b, m = lax.div(r, jnp.int32(Q * M)), lax.rem(r, jnp.int32(M))
    row = gpu_rows.load_row(rows.at[r])
    layout = gpu_rows.patch_layout(row.shape[2])

    def multiply(value, width, first, count):
        corners = [starts[r, first + i] for i in range(count)]
        places = [(pl.ds(lax.div(n, width), 2), pl.ds(lax.rem(n, width), 2)) for n in corners]
        patches = [gpu_rows.load(value.at[(b, *place, m)], layout) for place in places]
        for i, patch in enumerate(patches):
            gpu_rows.store(out.at[r, first + i], jnp.sum(patch * row, axis=2))

    first = 0
    for (_, width), P in zip(options.spatial_shapes, options.num_points, strict=True):
        if P == 0:
            continue
        some = partial(multiply, levels.pop(0), jnp.int32(width))
        whole, rest = divmod(P, _AT_ONCE)
        if whole:
            step = lambda i, _, some=some, first=first: some(first + i * _AT_ONCE, _AT_ONCE)
            lax.fori_loop(jnp.int32(0), jnp.int32(whole), step, None)
        if rest:
            some(first + whole * _AT_ONCE, rest)
        first += P


def _own(near: jax.Array, far: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A sample's own two pixels along an axis, of the two of its patch, which begins `offset` before it."""
    here, next_ = offset == 0, offset == 1
    return jnp.where(here, near, jnp.where(next_, far, 0)), jnp.where(here, far, jnp.where(next_, 0, near))
