"""Where a CPU takes other loops than the portable ones, and the sums of `backward` channel by channel.

The portable loops take one sampling point of all queries and heads at a time. What lies between two
operations (5.6 MB for 5440 queries and 8 heads of 32) is then too long for a core's cache, and neither a
dot product nor a scatter-add of 32 numbers fills a core's units. `pairs` has the scatter-adds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import fusion, targets
from jax_attn_bwd._core.numerics import ceil_div
from jax_attn_bwd.ops.deformable import sampling
from jax_attn_bwd.ops.deformable.spec import Level, Operands, Options

_MANY_ROWS = 1 << 13  # rows of one query and head; from here on a second core helps
_MANY_QUERIES = 256  # from here on pairs of pixels are faster
_BLOCK_BYTES = 1 << 17  # bytes of pairs that a core's cache holds; XLA leaves them to one core
_CHANNELS = 8  # channels that share one read of an index; 4 and 16 are slower
_INDICES = 1 << 29  # numbers that int32 can index: padding makes up to three times as many


class Loops(NamedTuple):
    """The loops that differ from the portable ones."""

    on_all_cores: bool = False
    heads_first: bool = False  # in `forward` too, so that the points are transposed once
    by_channel: bool = False  # `products`
    paired_queries: int = 0  # in a block of `pairs.value_gradient`; 0 = portable


def loops(options: Options, operands: Operands) -> Loops:
    """The loops that are faster: measured with 5440 pixels, 8 heads of 32, B of 1 or 8, 100 to 5440 queries.

    `products` and `pairs` lay heads and batch entries one behind the other, so they are left out where these
    may be on different devices.
    """
    B, Q, M, _ = operands.attention_weights.shape
    _, S, _, D = operands.value.shape
    if targets.platform() != "cpu" or not all(isinstance(n, int) for n in (B, Q, M, S, D)):
        return Loops()
    many = B * Q * M >= _MANY_ROWS
    if _has_several_devices() or operands.value.size >= _INDICES:
        return Loops(on_all_cores=many)
    paired = options.method == "bilinear" and Q >= _MANY_QUERIES and B * M * D > 0
    pair_bytes = 2 * D * sampling.compute_dtype(operands).itemsize
    return Loops(
        on_all_cores=many,
        heads_first=many,
        by_channel=many and 4 * Q >= S,  # with fewer, transposing the pixels costs more
        paired_queries=min(Q, max(1, _BLOCK_BYTES // pair_bytes)) if paired else 0,
    )


def _has_several_devices() -> bool:
    return len(jax.devices("cpu")) > 1


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
