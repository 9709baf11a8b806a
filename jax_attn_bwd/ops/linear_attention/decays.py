"""The decays of a chunk, and the products of its tokens under them.

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

On a CPU many small products are slow. There all halvings are taken at once, each as a product of whole chunks
whose pairs that other halvings part are masked. And where every c is within 40 of h = c_C / 2, then h takes
the place of c_b for all pairs: one product, of factors that may be above 1 but do not overflow. `lax.cond`
decides which, when the program runs, where there is one CPU.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import fusion
from jax_attn_bwd._core.numerics import any_of_batch, to_rank
from jax_attn_bwd.ops.linear_attention.matrix import (
    Dot,
    dot_of,
    half_of,
    identity,
    joined,
    parted,
    placed,
    row_sums,
    strictly_lower,
    transposed,
)
from jax_attn_bwd.ops.linear_attention.plan import Plan

_NEVER = -1e5  # the logarithm of what underflows, with any that it is added to
_MILD = 40  # of c - h: its rounding is a few millionths, and no exponential overflows


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


# What tokens of a chunk are to one another: five forms, all with `products` and `sums` as the first tells.
EARLIER, LATER = "ij,jd", "ij,id"  # the tokens of pairs j < i that `sums` go over


class SharedDecays(NamedTuple):
    """Decays that all channels share: exp(c_i - c_j) for j <= i, else 0, [C, C]."""

    plane: jax.Array

    def products(self, dot: Dot, x: jax.Array, y: jax.Array) -> jax.Array:
        """Returns <x_i, y_j>_G for j <= i, else 0, [C, C]."""
        return dot("id,jd", x, y) * self.plane

    def sums(self, dot: Dot, over: str, plane: jax.Array, x: jax.Array) -> jax.Array:
        """Returns the sums of plane_ij exp(c_i - c_j) x_j over the `EARLIER` j <= i, [C, X].

        Or those of x_i over the `LATER` i >= j. The other forms leave i = j out.
        """
        return dot(over, plane * self.plane, x)

    def both(self, dot: Dot, plane: jax.Array, x: jax.Array) -> jax.Array:
        """Returns the sums over the earlier plus those over the later tokens, as one product."""
        plane = plane * self.plane
        return dot("ij,jd", plane + transposed(plane), x)


class Halved(NamedTuple):
    """Decays of channels of any strength: of each halving the factors of its halves, (2), small ones first.

    `halves`: (earlier, later), each [C / (2 size), size, X].
    """

    halves: tuple[tuple[jax.Array, jax.Array], ...]

    def products(self, dot: Dot, x: jax.Array, y: jax.Array) -> jax.Array:
        below = [
            dot("id,jd", half_of(x, 1, later) * later, half_of(y, 0, earlier) * earlier)
            for earlier, later in self.halves
        ]
        own = (x * y).sum(-1)[..., None, None]
        if below:
            own = jnp.broadcast_to(own, (*below[0].shape[:-3], *own.shape[-3:]))
        return joined(own, below)[..., 0, :, :]

    def sums(self, dot: Dot, over: str, plane: jax.Array, x: jax.Array) -> jax.Array:
        read, (_, below) = int(over == LATER), parted(plane, 1)
        found = [
            placed(dot(over, block, half_of(x, read, of[read]) * of[read]) * of[1 - read], 1 - read)
            for block, of in zip(below, self.halves, strict=True)
        ]
        return sum(found[1:], found[0]) if found else jnp.zeros_like(plane * x)


class AllHalved(NamedTuple):
    """As `Halved`, with the factors of each token in all halvings at once, [halvings, C, X]."""

    factors: jax.Array

    def products(self, dot: Dot, x: jax.Array, y: jax.Array) -> jax.Array:
        own, (x, y) = row_sums(x * y), (z[..., None, :, :] * self.factors for z in (x, y))
        return own * identity(x[..., 0, :, :]) + _added(_masked(_in_each(dot, "id,jd", x, y)))

    def sums(self, dot: Dot, over: str, plane: jax.Array, x: jax.Array) -> jax.Array:
        plane, x = _masked(plane[..., None, :, :]), x[..., None, :, :] * self.factors
        return _added(self.factors * _in_each(dot, over, plane, x))


class Mild(NamedTuple):
    """Decays of channels that are not strong: exp(c_i - h) and exp(h - c_j), [C, X]."""

    later: jax.Array
    earlier: jax.Array

    def products(self, dot: Dot, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(~transposed(strictly_lower(x)), dot("id,jd", x * self.later, y * self.earlier), 0.0)

    def sums(self, dot: Dot, over: str, plane: jax.Array, x: jax.Array) -> jax.Array:
        read, others = (self.earlier, self.later) if over == EARLIER else (self.later, self.earlier)
        return others * dot(over, jnp.where(strictly_lower(plane), plane, 0.0), x * read)


class Either(NamedTuple):
    """Decays of channels: at run time it is seen whether all are mild. If not, halves are made when read."""

    is_strong: jax.Array
    mild: Mild
    log_decay: jax.Array  # [C, X], at a restart what underflows

    def products(self, dot: Dot, x: jax.Array, y: jax.Array) -> jax.Array:
        return self._one(dot, lambda pairs: pairs.products(dot, x, y))

    def sums(self, dot: Dot, over: str, plane: jax.Array, x: jax.Array) -> jax.Array:
        return self._one(dot, lambda pairs: pairs.sums(dot, over, plane, x))

    def _one(self, dot: Dot, of: Callable[[Mild | AllHalved], jax.Array]) -> jax.Array:
        strong = lambda: of(_all_halved(self.log_decay, dot))
        return lax.cond(self.is_strong, strong, lambda: of(self.mild))


class Decays(NamedTuple):
    """The decays of a chunk.

    Attributes:
      restarts: bool, where c does not count: [C, X].
      from_start: exp(c), 0 behind the first restart: [C, X].
      to_end: exp(c_C - c), 0 before the last restart: [C, X].
      whole: exp(c_C), 0 with a restart: [1, X].
      pairs: what the tokens are to one another.
    """

    restarts: jax.Array
    from_start: jax.Array
    to_end: jax.Array
    whole: jax.Array
    pairs: SharedDecays | Halved | AllHalved | Either

    def scaled(self, factor: jax.Array, rows: jax.Array) -> Scaled:
        """Returns `factor`, of those of the decays, times rows."""
        return Scaled(rows, factor) if isinstance(self.pairs, SharedDecays) else Scaled(factor * rows, None)


def decays(plan: Plan, log_decay: jax.Array, restarts: jax.Array | None) -> Decays:
    """Returns the decays of chunks: `log_decay [..., C, X]`, `restarts [..., C, 1]`."""
    # where a part begins, and of which part each token is
    is_zero = jnp.exp(log_decay) == 0
    restarts = is_zero if restarts is None else is_zero | restarts
    if plan.pairs in ("all halvings at once", "one product if mild"):
        return _of_channels_on_cpu(plan, log_decay, restarts)
    g, axis = jnp.where(restarts, 0.0, log_decay), restarts.ndim - 2
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
        return Decays(restarts, *outer, SharedDecays(factor(between_pairs(g), is_read)))
    halves, size = [], 1
    while size < c.shape[-2]:
        (g1, n1), n0 = (half_of(x, 1, size=size) for x in (g, number)), half_of(number, 0, size=size)
        to_b, nb = half_of(behind, 0, size=size), n1[..., :1, :]
        since_b = jnp.concatenate([jnp.zeros_like(g1[..., :1, :]), g1[..., 1:, :]], -2)
        since_b, to_b = (lax.cumsum(x, x.ndim - 2, reverse=r) for x, r in ((since_b, False), (to_b, True)))
        halves.append((factor(to_b, n0 == nb), factor(since_b, n1 == nb)))
        size *= 2
    return Decays(restarts, *outer, Halved(tuple(halves)))


def _of_channels_on_cpu(plan: Plan, log_decay: jax.Array, restarts: jax.Array) -> Decays:
    """Returns the decays of channels, each the exponential of a sum that a product takes."""
    dot, token = dot_of(plan), np.arange(log_decay.shape[-2])
    g = jnp.where(restarts, _NEVER, log_decay)
    taken = _as_factor([token <= token[:, None], token > token[:, None]], g)
    sums = dot("ij,jd", taken, g, precision=lax.Precision.HIGHEST).reshape(*g.shape[:-2], 2, *g.shape[-2:])
    since_start, to_end = sums[..., 0, :, :], sums[..., 1, :, :]
    from_start = jnp.exp(since_start)
    outer = from_start, jnp.exp(to_end), from_start[..., -1:, :]
    if plan.pairs == "all halvings at once":
        return Decays(restarts, *outer, _all_halved(g, dot))
    from_middle = (since_start - to_end) / 2
    is_strong = any_of_batch(~(abs(lax.stop_gradient(from_middle)) <= _MILD).all())
    from_middle = jnp.where(is_strong, 0.0, from_middle)  # else inf, whose cotangent of 0 would make NaN
    mild = Mild(jnp.exp(from_middle), jnp.exp(-from_middle))
    return Decays(restarts, *outer, Either(is_strong, mild, g))


def _all_halved(g: jax.Array, dot: Dot) -> AllHalved:
    """Returns the factors of all halvings of chunks."""
    C = g.shape[-2]
    of, token, sums = np.arange(C)[:, None], np.arange(C), []
    for size in _sizes(C):
        b = of // (2 * size) * 2 * size + size
        sums.append(np.where(of < b, (of < token) & (token < b), (b <= token) & (token <= of)))
    found = dot("ij,jd", _as_factor(sums, g), g, precision=lax.Precision.HIGHEST)
    return AllHalved(jnp.exp(found.reshape(*g.shape[:-2], len(sums), *g.shape[-2:])))


def _as_factor(tokens: list[np.ndarray], g: jax.Array) -> jax.Array:
    """Returns the factor of g `[..., C, X]` that sums it over the tokens of n planes, `[..., n * C, C]`.

    It lies on the mesh as the decays do.
    """
    return to_rank(jnp.asarray(np.concatenate(tokens), g.dtype), g.ndim) + jnp.zeros_like(g[..., :1, :1])


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
    parts = np.stack([(n[:, None] % 2 == 1) & (n == n[:, None] - 1) for n in halves])
    return jnp.where(to_rank(jnp.asarray(parts), planes.ndim), planes, 0.0)


def _added(x: jax.Array) -> jax.Array:
    """Sums over halvings, `[..., halvings, C, X]`, one by one: a reduction would be slow on JAX 0.10."""
    first, *others = (x[..., n, :, :] for n in range(x.shape[-3]))
    return sum(others, first)


def between_pairs(x: jax.Array) -> jax.Array:
    """Returns the sums of x_t over j < t <= i, for each pair i, j: `[..., C, 1]` to `[..., C, C]`."""
    after = np.tril(np.ones((x.shape[-2],) * 2, x.dtype), -1)
    up_to = jnp.where(to_rank(jnp.asarray(after.T == 0), x.ndim), transposed(x), 0.0)
    return jnp.matmul(up_to, after, precision=lax.Precision.HIGHEST)


def across_token(plane: jax.Array) -> jax.Array:
    """Returns the sums of `plane` over pairs j < t <= i, for each t: the transpose of `between_pairs`."""
    after = np.tril(np.ones((plane.shape[-1],) * 2, plane.dtype), -1)
    found = jnp.matmul(plane, after.T, precision=lax.Precision.HIGHEST)
    up_to = to_rank(jnp.asarray(after.T == 0), plane.ndim)
    return transposed(jnp.where(up_to, found, 0.0).sum(-2, keepdims=True))
