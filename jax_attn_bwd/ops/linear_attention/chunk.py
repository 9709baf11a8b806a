"""What the tokens of a chunk are to one another: their decays, their products, and a triangle's inverse.

With c the running sum of the logarithms of the decays within the chunk, [C, X], a token j still counts for a
token i >= j by the factor exp(c_i - c_j), for each channel d that has a decay of its own. So

    <x_i, y_j>_G = sum_d x_id y_jd exp(c_id - c_jd)                                     (1)

is a product of x and y, times a plane, if all channels share their decay. Otherwise the factors go to x and
to y, without overflow: the chunk is halved, and its halves, down to single tokens. Between the later and the
earlier half of a stretch whose later half begins with token b,

    exp(c_i - c_j) = exp(c_i - c_b) exp(c_b - c_j),   j < b <= i                        (2)

and neither is above 1. Each pair of tokens is parted by one halving. A decay of 0, or one that underflows,
and the beginning of a document part what is before from what follows: there c is not summed, parts are
counted, and tokens of different parts are nothing to one another.

Products of small halves are many and slow on a CPU. There all halvings are taken at once, each as a product
of whole chunks, which are short, whose pairs that other halvings part are masked.

The inverse of I + A with A strictly lower is made of those of the halves, as they are joined:

    [I + A1       ]^-1   [      M1          ]
    [  B    I + A2]    = [-M2 B M1       M2 ]                                           (3)

No power of A is formed, which could overflow though the inverse is small.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import fusion, targets
from jax_attn_bwd._core.numerics import to_rank
from jax_attn_bwd.ops.linear_attention.layout import Tokens
from jax_attn_bwd.ops.linear_attention.plan import Plan
from jax_attn_bwd.ops.linear_attention.spec import Options

Dot = Callable[[str, jax.Array, jax.Array], jax.Array]
_NEVER = -1e5  # the logarithm of what underflows, with any that it is added to
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


def dot_of(options: Options) -> Dot:
    """Returns the product of stacks of matrices, whose axes it is told as in `dot("ij,jk", x, y)`."""
    return partial(_product, precision=options.precision)


def _product(axes: str, x: jax.Array, y: jax.Array, precision: Any = lax.Precision.HIGHEST) -> jax.Array:
    """Multiplies stacks of matrices; XLA:GPU writes one anew that `jnp.swapaxes` turned.

    On one CPU a stack is one axis: JAX 0.12 ends the process at products of eight, as under two `vmap`s.
    """
    x_axes, y_axes = axes.split(",")
    rest, stack = "".join(a for a in x_axes + y_axes if axes.count(a) == 1), x.shape[:-2]
    is_merged = len(stack) > 1 and stack == y.shape[:-2] and targets.is_one_cpu()
    if is_merged:
        x, y = (z.reshape(math.prod(stack), *z.shape[-2:]) for z in (x, y))
    found = jnp.einsum(f"...{x_axes},...{y_axes}->...{rest}", x, y, precision=precision)
    return found.reshape(*stack, *found.shape[-2:]) if is_merged else found


def row_sums(x: jax.Array) -> jax.Array:
    """Returns the sums of rows, `[..., 1]`; on a CPU by a product, as JAX 0.10 is slow at reductions."""
    if targets.platform() != "cpu":
        return x.sum(-1, keepdims=True)
    return jnp.matmul(x, jnp.ones((x.shape[-1], 1), x.dtype), precision=lax.Precision.HIGHEST)


def unit(options: Options, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Returns (the rows of `x`, normalized if that is asked, and what they were multiplied by)."""
    if options.l2_norm_epsilon is None:
        return x, None
    factor = lax.rsqrt(row_sums(x * x) + options.l2_norm_epsilon)
    return x * factor, factor


def unit_gradient(normed: jax.Array, factor: jax.Array | None, d: jax.Array) -> jax.Array:
    """Returns the gradient of rows that `unit` normalized; it is also the map of their tangents."""
    if factor is None:
        return d
    return factor * (d - normed * row_sums(normed * d))


class Part(NamedTuple):
    """A group of chunks in the accumulator's dtype, `[m, ..., K, G, C, X]`."""

    query: jax.Array  # normalized
    key: jax.Array  # normalized
    value: jax.Array
    beta: Any  # None without a delta rule
    decays: "Decays"
    query_factor: jax.Array | None  # what normalizing multiplied by
    key_factor: jax.Array | None


def part(plan: Plan, tokens: Tokens, dtype: Any) -> Part:
    """Returns what a group of chunks is computed with."""
    wide = lambda x: x.astype(dtype)
    (query, query_factor), (key, key_factor) = (
        unit(plan.options, wide(x)) for x in (tokens.query, tokens.key)
    )
    return Part(
        query,
        key,
        wide(tokens.value),
        None if tokens.beta is None else wide(tokens.beta),
        decays(plan, wide(tokens.log_decay), tokens.restarts),
        query_factor,
        key_factor,
    )


class Scaled(NamedTuple):
    """Rows times factors; one that all channels share is kept apart, and multiplies the rows of a product."""

    rows: jax.Array  # [C, H]
    factor: jax.Array | None  # [C, 1]

    def times(self, dot: Dot, state: jax.Array) -> jax.Array:
        """Returns the product with `[H, Hv]`, `[C, Hv]`."""
        found = dot("ih,hv", self.rows, state)
        return found if self.factor is None else self.factor * found

    def transposed_times(self, dot: Dot, x: jax.Array) -> jax.Array:
        """Returns the product of the transposed rows with `[C, Hv]`, `[H, Hv]`."""
        return dot("ih,iv", self.rows, x if self.factor is None else self.factor * x)


class Decays(NamedTuple):
    """The decays of a chunk.

    Attributes:
      restarts: bool, where c does not count: [C, X].
      from_start: exp(c), 0 behind the first restart: [C, X].
      to_end: exp(c_C - c), 0 before the last restart: [C, X].
      whole: exp(c_C), 0 with a restart: [1, X].
      between: exp(c_i - c_j) for j <= i, else 0: [C, C]; None where channels have decays of their own.
      halves: there, of each halving the factors of the later and of the earlier half, (2).
      halvings: or all of those at once, [halvings, C, X].
    """

    restarts: jax.Array
    from_start: jax.Array
    to_end: jax.Array
    whole: jax.Array
    between: jax.Array | None
    halves: tuple[tuple[jax.Array, jax.Array], ...] = ()
    halvings: jax.Array | None = None

    def scaled(self, factor: jax.Array, rows: jax.Array) -> Scaled:
        """Returns `factor`, of those of the decays, times rows."""
        return Scaled(factor * rows, None) if self.between is None else Scaled(rows, factor)

    def products(self, dot: Dot, x: jax.Array, y: jax.Array) -> jax.Array:
        """Returns <x_i, y_j>_G for j <= i, else 0, [C, C]."""
        if self.between is not None:
            return dot("id,jd", x, y) * self.between
        if self.halvings is not None:
            own, (x, y) = row_sums(x * y), (z[..., None, :, :] * self.halvings for z in (x, y))
            return own * identity(x[..., 0, :, :]) + _added(_masked(_in_each(dot, "id,jd", x, y)))
        below = [
            dot("id,jd", _half(x, 1, later) * later, _half(y, 0, earlier) * earlier)
            for later, earlier in self.halves
        ]
        own = (x * y).sum(-1)[..., None, None]
        if below:
            own = jnp.broadcast_to(own, (*below[0].shape[:-3], *own.shape[-3:]))
        return _joined(own, below)[..., 0, :, :]

    def rows(self, dot: Dot, plane: jax.Array, y: jax.Array) -> jax.Array:
        """Returns sum_j plane_ij y_j exp(c_i - c_j) over j <= i, or j < i if channels differ, [C, X]."""
        if self.between is not None:
            return dot("ij,jd", plane * self.between, y)
        if self.halvings is not None:
            plane = _masked(plane[..., None, :, :])
            return _added(self.halvings * _in_each(dot, "ij,jd", plane, y[..., None, :, :] * self.halvings))
        _, below = _parted(plane, 1)
        found = [
            _placed(dot("ij,jd", block, _half(y, 0, earlier) * earlier) * later, 1)
            for block, (later, earlier) in zip(below, self.halves, strict=True)
        ]
        return sum(found[1:], found[0]) if found else _nothing(plane, y)

    def columns(self, dot: Dot, plane: jax.Array, x: jax.Array) -> jax.Array:
        """Returns sum_i plane_ij x_i exp(c_i - c_j) over i >= j, or i > j if channels differ, [C, X]."""
        if self.between is not None:
            return dot("ij,id", plane * self.between, x)
        if self.halvings is not None:
            plane = _masked(plane[..., None, :, :])
            return _added(self.halvings * _in_each(dot, "ij,id", plane, x[..., None, :, :] * self.halvings))
        _, below = _parted(plane, 1)
        found = [
            _placed(dot("ij,id", block, _half(x, 1, later) * later) * earlier, 0)
            for block, (later, earlier) in zip(below, self.halves, strict=True)
        ]
        return sum(found[1:], found[0]) if found else _nothing(plane, x)

    def both(self, dot: Dot, plane: jax.Array, x: jax.Array) -> jax.Array:
        """Returns `rows` plus `columns` of the same, one product where all channels share their decay."""
        if self.between is None:
            return self.rows(dot, plane, x) + self.columns(dot, plane, x)
        plane = plane * self.between
        return dot("ij,jd", plane + transposed(plane), x)


def decays(plan: Plan, log_decay: jax.Array, restarts: jax.Array | None) -> Decays:
    """Returns the decays of chunks: `log_decay [..., C, X]`, `restarts [..., C, 1]`."""
    # where a part begins, and of which part each token is
    is_zero = jnp.exp(log_decay) == 0
    restarts = is_zero if restarts is None else is_zero | restarts
    if plan.halvings_at_once:
        return _of_all_halvings(log_decay, restarts)
    g, axis = jnp.where(restarts, 0, log_decay), restarts.ndim - 2
    behind = jnp.concatenate([g[..., 1:, :], jnp.zeros_like(g[..., :1, :])], axis)
    # each difference of c is summed by itself: that of two sums would be off by the rounding of all of c
    c, left = lax.cumsum(g, axis), lax.cumsum(behind, axis, reverse=True)
    number = lax.cumsum(restarts.astype(jnp.int32), axis)
    # else XLA:CPU sums anew for each pair of tokens
    c, left, number = fusion.barrier((c, left, number))

    def factor(c, is_same):
        return jnp.exp(jnp.where(is_same, c, -jnp.inf))

    first, last = number == 0, number[..., -1:, :]
    outer = factor(c, first), factor(left, number == last), factor(c[..., -1:, :], last == 0)
    # between tokens: a plane for all channels, or factors for each
    if c.shape[-1] == 1:
        is_read = ~transposed(strictly_lower(c)) & (number == transposed(number))
        return Decays(restarts, *outer, factor(between_pairs(g), is_read))
    halves, size = [], 1
    while size < c.shape[-2]:
        (g1, n1), n0 = (_half(x, 1, size=size) for x in (g, number)), _half(number, 0, size=size)
        to_b, nb = _half(behind, 0, size=size), n1[..., :1, :]
        since_b = jnp.concatenate([jnp.zeros_like(g1[..., :1, :]), g1[..., 1:, :]], -2)
        since_b, to_b = (lax.cumsum(x, x.ndim - 2, reverse=r) for x, r in ((since_b, False), (to_b, True)))
        halves.append((factor(since_b, n1 == nb), factor(to_b, n0 == nb)))
        size *= 2
    return Decays(restarts, *outer, None, tuple(halves))


def _of_all_halvings(log_decay: jax.Array, restarts: jax.Array) -> Decays:
    """Returns the decays of channels of chunks, each the exponential of a sum that one product takes."""
    *batch, C, X = log_decay.shape
    of, token = np.arange(C)[:, None], np.arange(C)
    sums = [token <= of, token > of]
    for size in _sizes(C):
        b = of // (2 * size) * 2 * size + size
        sums.append(np.where(of < b, (of < token) & (token < b), (b <= token) & (token <= of)))

    # zeros that lie on the mesh as the decays do
    g = jnp.where(restarts, _NEVER, log_decay)
    taken = to_rank(jnp.asarray(np.concatenate(sums), g.dtype), g.ndim) + jnp.zeros_like(g[..., :1, :1])
    found = jnp.exp(_product("ij,jd", taken, g)).reshape(*batch, len(sums), C, X)
    from_start, to_end = found[..., 0, :, :], found[..., 1, :, :]
    return Decays(restarts, from_start, to_end, from_start[..., -1:, :], None, halvings=found[..., 2:, :, :])


def _sizes(C: int) -> list[int]:
    """Returns the sizes of the halves of a chunk, small ones first."""
    return [1 << n for n in range(C.bit_length() - 1)]


def _in_each(dot: Dot, axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the products of each halving; one axis with the heads: XLA:CPU takes seven at most."""
    *batch, G, n, _, _ = x.shape
    x, y = (z.reshape(*batch, G * n, *z.shape[-2:]) for z in (x, y))
    found = dot(axes, x, y)
    return found.reshape(*batch, G, n, *found.shape[-2:])


def _masked(planes: jax.Array) -> jax.Array:
    """Keeps in the plane of each halving, `[..., halvings or 1, C, C]`, the pairs that it parts."""
    token = np.arange(planes.shape[-1])
    halves = (token // size for size in _sizes(token.size))
    parted = np.stack([(n[:, None] % 2 == 1) & (n == n[:, None] - 1) for n in halves])
    return jnp.where(to_rank(jnp.asarray(parted), planes.ndim), planes, 0)


def _added(x: jax.Array) -> jax.Array:
    """Sums over halvings, `[..., halvings, C, X]`, one by one: a reduction would be slow on JAX 0.10."""
    first, *others = (x[..., n, :, :] for n in range(x.shape[-3]))
    return sum(others, first)


def between_pairs(x: jax.Array) -> jax.Array:
    """Returns the sums of x_t over j < t <= i, for each pair i, j: `[..., C, 1]` to `[..., C, C]`."""
    after = np.tril(np.ones((x.shape[-2],) * 2, x.dtype), -1)
    up_to = jnp.where(to_rank(jnp.asarray(after.T == 0), x.ndim), transposed(x), 0)
    return jnp.matmul(up_to, after, precision=lax.Precision.HIGHEST)


def across_token(plane: jax.Array) -> jax.Array:
    """Returns the sums of `plane` over pairs j < t <= i, for each t: the transpose of `between_pairs`."""
    after = np.tril(np.ones((plane.shape[-1],) * 2, plane.dtype), -1)
    found = jnp.matmul(plane, after.T, precision=lax.Precision.HIGHEST)
    up_to = to_rank(jnp.asarray(after.T == 0), plane.ndim)
    return transposed(jnp.where(up_to, found, 0).sum(-2, keepdims=True))


def _half(x: jax.Array, which: int, like: jax.Array | None = None, size: int = 0) -> jax.Array:
    """Returns the earlier (0) or later (1) halves of stretches, `[..., C / (2 size), size, X]`."""
    size = size if like is None else like.shape[-2]
    *batch, C, X = x.shape
    return x.reshape(*batch, C // (2 * size), 2, size, X)[..., which, :, :]


def _placed(x: jax.Array, which: int) -> jax.Array:
    """Returns `[..., C, X]` with `[..., C / (2 size), size, X]` where `_half` reads, else 0."""
    *batch, n, size, X = x.shape
    both = (x, jnp.zeros_like(x)) if which == 0 else (jnp.zeros_like(x), x)
    return jnp.stack(both, -3).reshape(*batch, 2 * n * size, X)


def _parted(plane: jax.Array, size: int) -> tuple[jax.Array, list[jax.Array]]:
    """Parts a plane: its diagonal blocks of `size`, and those between halves below them, small ones first."""
    diagonal, below = plane[..., None, :, :], []
    while (half := diagonal.shape[-1] // 2) >= size:
        below.append(diagonal[..., half:, :half])
        halves = jnp.stack([diagonal[..., :half, :half], diagonal[..., half:, half:]], -3)
        diagonal = halves.reshape(*halves.shape[:-4], -1, half, half)
    return diagonal, below[::-1]


def _joined(diagonal: jax.Array, below: list[jax.Array]) -> jax.Array:
    """Puts together what `_parted` parts."""
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


def _nothing(plane: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the sum over the other tokens of a chunk of one."""
    return jnp.zeros_like(plane * rows)


def inverse(plane: jax.Array) -> jax.Array:
    """Returns the inverse of I + `plane`, strictly lower `[..., C, C]`, by (3)."""
    dot, size = partial(_product, "ij,jk"), min(_BASE, plane.shape[-1])
    diagonal, below = _parted(plane, size)
    # the smallest blocks whole, side by side: what is not between two halves is masked
    found, number, half = identity(diagonal) + jnp.zeros_like(diagonal), np.arange(size), 1
    while half < size:
        row, column = number[:, None] // half, number[None] // half
        is_between = to_rank(jnp.asarray((row % 2 == 1) & (column == row - 1)), diagonal.ndim)
        between = jnp.where(is_between, diagonal, 0)
        found = found - (between if half == 1 else dot(found, dot(between, found)))
        half *= 2
    # then what is between two of them, four, ...
    for block in below:
        earlier, later = _pairs(found)
        found = _joined(found, [-dot(later, dot(block, earlier))])
    return found[..., 0, :, :]
