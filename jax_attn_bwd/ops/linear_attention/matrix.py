"""Stacks of small matrices: their products, their halves, and the stage `solve`, the inverse of a triangle.

The inverse of I + A with A strictly lower is made of those of the halves, as they are joined:

    [I + A1       ]^-1   [      M1          ]
    [  B    I + A2]    = [-M2 B M1       M2 ]                                           (3)

No power of A is formed, which could overflow though the inverse is small.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd._core.sharding import explicit_spec
from jax_attn_bwd.ops.linear_attention.plan import Plan

Dot = Callable[..., jax.Array]
_BASE = 16  # rows of a triangle up to which halves are parted by masks: smaller products are slower


def transposed(x: jax.Array) -> jax.Array:
    """Swaps the last two axes."""
    return jnp.swapaxes(x, -1, -2)


def strictly_lower(rows: jax.Array) -> jax.Array:
    """Tells of each pair of rows if the second comes before the first, `[1, ..., C, C]`."""
    C = rows.shape[-2]
    return to_rank(jnp.asarray(np.tril(np.ones((C, C), bool), -1)), rows.ndim)


def identity(rows: jax.Array) -> jax.Array:
    """Returns the identity of as many rows, `[1, ..., C, C]`."""
    return to_rank(jnp.eye(rows.shape[-2], dtype=rows.dtype), rows.ndim)


def dot_of(plan: Plan) -> Dot:
    """Returns the product of stacks of matrices, whose axes it is told as in `dot("ij,jk", x, y)`."""
    return partial(product, is_merged=plan.merged_stacks, precision=plan.options.precision)


def product(
    axes: str, x: jax.Array, y: jax.Array, is_merged: bool = False, precision: Any = lax.Precision.HIGHEST
) -> jax.Array:
    """Multiplies stacks of matrices, maybe merged to one axis; XLA:GPU writes one anew that was turned.

    An Explicit mesh, if of one device, does not let an axis go that it names.
    """
    x_axes, y_axes = axes.split(",")
    rest, stack = "".join(a for a in x_axes + y_axes if axes.count(a) == 1), x.shape[:-2]
    is_merged = is_merged and len(stack) > 1 and stack == y.shape[:-2]
    is_merged = is_merged and not any(explicit_spec(x)[:-2] + explicit_spec(y)[:-2])
    if is_merged:
        x, y = (z.reshape(math.prod(stack), *z.shape[-2:]) for z in (x, y))
    found = jnp.einsum(f"...{x_axes},...{y_axes}->...{rest}", x, y, precision=precision)
    return found.reshape(*stack, *found.shape[-2:]) if is_merged else found


def row_sums(x: jax.Array) -> jax.Array:
    """Returns the sums of rows, `[..., 1]`."""
    return x.sum(-1, keepdims=True)


def half_of(x: jax.Array, which: int, like: jax.Array | None = None, size: int = 0) -> jax.Array:
    """Returns the earlier (0) or later (1) halves of stretches, `[..., C / (2 size), size, X]`."""
    size = size if like is None else like.shape[-2]
    *batch, C, X = x.shape
    return x.reshape(*batch, C // (2 * size), 2, size, X)[..., which, :, :]


def placed(x: jax.Array, which: int) -> jax.Array:
    """Returns `[..., C, X]` with `[..., C / (2 size), size, X]` where `half_of` reads, else 0."""
    *batch, n, size, X = x.shape
    both = (x, jnp.zeros_like(x)) if which == 0 else (jnp.zeros_like(x), x)
    return jnp.stack(both, -3).reshape(*batch, 2 * n * size, X)


def parted(plane: jax.Array, size: int) -> tuple[jax.Array, list[jax.Array]]:
    """Parts a plane: its diagonal blocks of `size`, and those between halves below them, small ones first."""
    diagonal, below = plane[..., None, :, :], []
    while (half := diagonal.shape[-1] // 2) >= size:
        below.append(diagonal[..., half:, :half])
        halves = jnp.stack([diagonal[..., :half, :half], diagonal[..., half:, half:]], -3)
        diagonal = halves.reshape(*halves.shape[:-4], -1, half, half)
    return diagonal, below[::-1]


def joined(diagonal: jax.Array, below: list[jax.Array]) -> jax.Array:
    """Puts together what `parted` parts."""
    for block in below:
        earlier, later = _pairs(diagonal)
        top = jnp.concatenate([earlier, jnp.zeros_like(block)], -1)
        diagonal = jnp.concatenate([top, jnp.concatenate([block, later], -1)], -2)
    return diagonal


def _pairs(diagonal: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the earlier and the later ones of pairs of diagonal blocks."""
    *batch, blocks, n, _ = diagonal.shape
    halves = diagonal.reshape(*batch, blocks // 2, 2, n, n)
    return halves[..., 0, :, :], halves[..., 1, :, :]


def solve(dot: Dot, plane: jax.Array) -> jax.Array:
    """Returns M = (I + A)^-1 `[..., C, C]` of A, a strictly lower `plane` `[..., C, C]`, by (3)."""
    dot, size = partial(dot, "ij,jk", precision=lax.Precision.HIGHEST), min(_BASE, plane.shape[-1])
    diagonal, below = parted(plane, size)
    # the smallest blocks whole, side by side: what is not between two halves is masked
    found, number, half = identity(diagonal) + jnp.zeros_like(diagonal), np.arange(size), 1
    while half < size:
        row, column = number[:, None] // half, number[None] // half
        is_between = to_rank(jnp.asarray((row % 2 == 1) & (column == row - 1)), diagonal.ndim)
        between = jnp.where(is_between, diagonal, 0.0)
        found = found - (between if half == 1 else dot(found, dot(between, found)))
        half *= 2
    # then what is between two of them, four, ...
    for block in below:
        earlier, later = _pairs(found)
        found = joined(found, [-dot(later, dot(block, earlier))])
    return found[..., 0, :, :]
