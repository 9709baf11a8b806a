"""The sums of `backward` channel by channel, and loops that a CPU shares between its cores."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import fusion
from jax_attn_bwd._core.numerics import ceil_div
from jax_attn_bwd.ops.deformable.spec import Level

_CHANNELS = 8  # channels that share one read of an index; 4 and 16 are slower


def on_all_cores(level: Level) -> Level:
    """`level`, behind a sort that makes XLA run the loop around it on all cores.

    Without a sort, scatter or library call in it, a small loop becomes a function for one core, and JAX
    0.12 takes every such loop for a small one (XLA, `small_while_loop_hoisting_pass.cc`).
    """
    return level._replace(start=_sorted(jnp.asarray(level.start)))


def _sorted(index: jax.Array) -> jax.Array:
    """`index`, which is not negative, unchanged by way of a sort."""
    return lax.sort(jnp.stack([index, np.int32(-1)]))[1]


def by_channel(x: jax.Array) -> jax.Array:
    """`[B, n, M, D]` as `[D / c, c, B, M, n]` for some c; zeros fill up the channels."""
    B, n, M, D = x.shape
    parts = max(1, ceil_div(D, _CHANNELS))
    channels = ceil_div(D, parts)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, parts * channels - D)))
    return x.transpose(3, 0, 2, 1).reshape(parts, channels, B, M, n)


def products(
    value: jax.Array, dout: jax.Array, pixels: tuple[jax.Array, ...], zeros: jax.Array
) -> list[jax.Array]:
    """<dout, value> at each of the pixels [B, M, Q], 0 outside; value and dout are `by_channel`.

    The fastest cache holds the S numbers of a channel and head, and nothing is summed across lanes.
    """
    parts, channels, B, M, S = value.shape
    first = S * np.arange(B * M, dtype=np.int32).reshape(B, M, 1)
    places = fusion.barrier([first + jnp.minimum(pixel, S - 1) for pixel in pixels])

    def add_channels(sums, part):
        tables, i = part
        rows = lax.dynamic_index_in_dim(dout, _sorted(i), keepdims=False)
        for table, row in zip(tables, rows, strict=True):
            read = [table.at[place].get(mode="promise_in_bounds") for place in places]
            sums = [s + row * x.astype(row.dtype) for s, x in zip(sums, read, strict=True)]
        return sums, None

    xs = (value.reshape(parts, channels, -1), np.arange(parts, dtype=np.int32))
    sums, _ = lax.scan(add_channels, [zeros] * len(pixels), xs)
    return [jnp.where(pixel < S, s, 0) for pixel, s in zip(pixels, sums, strict=True)]
