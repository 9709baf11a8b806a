"""Where other loops run than the portable ones.

Those take one sampling point of all queries and heads at a time. On a CPU, what lies between two operations
(5.6 MB for 5440 queries and 8 heads of 32) is then too long for a core's cache, and neither a dot product nor
a scatter-add of 32 numbers fills a core's units. On a GPU each point would be some launches, each of which
reads and writes the sums.
"""

from typing import NamedTuple

import jax

from jax_attn_bwd._core import targets
from jax_attn_bwd.ops.deformable import sampling
from jax_attn_bwd.ops.deformable.spec import Operands, Options

_MANY_ROWS = 1 << 13  # rows of one query and head; from here on a second core helps
_MANY_QUERIES = 256  # from here on pairs of pixels are faster
_BLOCK_BYTES = 1 << 17  # bytes of pairs that a core's cache holds; XLA leaves them to one core
_INDICES = 1 << 29  # numbers that int32 can index: padding makes up to three times as many


class Loops(NamedTuple):
    """The loops that differ from the portable ones."""

    on_all_cores: bool = False
    heads_first: bool = False  # in `forward` too, so that the points are transposed once
    by_channel: bool = False  # `products`
    paired_queries: int = 0  # in a block of `pairs.value_gradient`; 0 = portable
    all_points: bool = False  # at once: `all_points`
    in_order: bool = False  # the value's gradient is summed by `runs`


def chosen(options: Options, operands: Operands) -> Loops:
    """The loops that are faster: measured with 5440 pixels, 8 heads of 32, B of 1 or 8, 100 to 5440 queries.

    `products` and `pairs` lay heads and batch entries one behind the other, so they are left out where these
    may be on different devices.
    """
    if targets.platform() == "gpu":
        return Loops(all_points=True, in_order=options.deterministic_sums)
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
