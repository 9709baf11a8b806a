"""The decays of a chunk, and the products of its tokens under them.

With c the running sum of the logarithms of the decays within the chunk, [C, X], a token j still counts for a
token i >= j by the factor exp(c_i - c_j), for each channel d that has a decay of its own. So

    <x_i, y_j>_G = sum_d x_id y_jd exp(c_id - c_jd)                                     (1)

is a product of x and y, times a plane, if all channels share their decay. Otherwise the factors go to x and
to y, without overflow: the chunk is halved, and its halves, down to single tokens. Between the later and the
earlier half of a stretch whose later half begins with token b,

    exp(c_i - c_j) = exp(c_i - c_b) exp(c_b - c_j),   j < b <= i                        (2)

and neither is above 1 where states decay. Each pair of tokens is parted by one halving. A decay of 0, or one
that underflows, and the beginning of a document part what is before from what follows: there c is not summed,
parts are counted, and tokens of different parts are nothing to one another.

The decay of a token t moves the pairs j < t <= i. In the halving that parts such a pair, t lies behind j in
the earlier half, or in the later one up to i. So what moves with it is a sum over tokens of its own half, and
nothing is taken away: in a difference of running sums, pairs that t does not part would hide it.

On a CPU many small products are slow. There all halvings are taken at once, each as a product of whole chunks
whose pairs that other halvings part are masked. What is computed of a token never depends on what follows.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import fusion
from jax_attn_bwd._core.numerics import to_rank
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


class Scaled(NamedTuple):
    """Rows times factors; one that all channels share is kept apart, and multiplies the rows of a product."""

    rows: jax.Array  # [C, H]
    factor: jax.Array | None  # [C, 1]

    def dense(self) -> jax.Array:
        """Returns the rows with their factor."""
        return self.rows if self.factor is None else self.factor * self.rows

    def times(self, dot: Dot, state: jax.Array) -> jax.Array:
        """Returns the product with `[H, Hv]`, `[C, Hv]`."""
        found = dot("ih,hv", self.rows, state)
        return found if self.factor is None else self.factor * found

    def transposed_times(self, dot: Dot, x: jax.Array) -> jax.Array:
        """Returns the product of the transposed rows with `[C, Hv]`, `[H, Hv]`."""
        return dot("ih,iv", self.rows, x if self.factor is None else self.factor * x)


# What tokens of a chunk are to one another: three forms, all with the methods of the first but its last.
EARLIER, LATER = "ij,jd", "ij,id"  # the tokens of pairs j < i that `shares` go over


class SharedDecays(NamedTuple):
    """Decays that all channels share: exp(c_i - c_j) for j <= i, else 0, [C, C]."""

    plane: jax.Array

    def products(self, dot: Dot, x: jax.Array, y: jax.Array) -> jax.Array:
        """Returns <x_i, y_j>_G for j <= i, else 0, [C, C]."""
        return dot("id,jd", x, y) * self.plane

    def moved(self, dot: Dot, x: jax.Array, y: jax.Array, along: jax.Array) -> jax.Array:
        """Returns the tangent of `products` as the logarithms move by `along`, [C, C]."""
        return self.products(dot, x, y) * between_pairs(along)

    def shares(self, dot: Dot, over: str, plane: jax.Array, x: jax.Array) -> jax.Array:
        """Returns the sums of plane_ij exp(c_i - c_j) x_j over the `EARLIER` j <= i, [C, X].

        Or those of x_i over the `LATER` i >= j. The other forms leave i = j out, and keep halvings apart.
        """
        return dot(over, plane * self.plane, x)

    def added(self, over: str, shares: jax.Array) -> jax.Array:
        """Returns the sums that `shares` has parts of, [C, X]."""
        return shares

    def both(self, dot: Dot, plane: jax.Array, x: jax.Array) -> jax.Array:
        """Returns the sums over the earlier plus those over the later tokens, as one product."""
        plane = plane * self.plane
        return dot("ij,jd", plane + transposed(plane), x)


class Halved(NamedTuple):
    """Decays of channels: of each halving the factors of its halves, (2), small ones first.

    `halves`: (earlier, later), each [C / (2 size), size, X].
    """

    halves: tuple[tuple[jax.Array, jax.Array], ...]

    def products(self, dot: Dot, x: jax.Array, y: jax.Array) -> jax.Array:
        below = [
            dot("id,jd", half_of(x, 1, later) * later, half_of(y, 0, earlier) * earlier)
            for earlier, later in self.halves
        ]
        return self._joined((x * y).sum(-1), below)

    def moved(self, dot: Dot, x: jax.Array, y: jax.Array, along: jax.Array) -> jax.Array:
        below = []
        for earlier, later in self.halves:
            to_b, since_b = _around_middle(along, earlier.shape[-2])
            late, early = half_of(x, 1, later) * later, half_of(y, 0, earlier) * earlier
            below.append(_moved(dot, late, since_b, early, to_b))
        return self._joined(jnp.zeros_like((x * y)[..., 0]), below)

    @staticmethod
    def _joined(own: jax.Array, below: list[jax.Array]) -> jax.Array:
        own = own[..., None, None]
        if below:
            own = jnp.broadcast_to(own, (*below[0].shape[:-3], *own.shape[-3:]))
        return joined(own, below)[..., 0, :, :]

    def shares(self, dot: Dot, over: str, plane: jax.Array, x: jax.Array) -> list[jax.Array]:
        read, (_, below) = int(over == LATER), parted(plane, 1)
        return [
            dot(over, block, half_of(x, read, of[read]) * of[read]) * of[1 - read]
            for block, of in zip(below, self.halves, strict=True)
        ]

    def added(self, over: str, shares: list[jax.Array]) -> Any:
        return sum(placed(x, int(over == EARLIER)) for x in shares)  # 0 of one token

    def of_decays(self, dot: Dot, terms: list[tuple[str, jax.Array, list[jax.Array]]]) -> Any:
        """Returns what `terms` are as the logarithms move, [C, X]: of each `over`, x, and the shares of x."""
        of = lambda over, x, share: share * half_of(x, int(over == EARLIER), share)
        found: Any = 0
        for n in range(len(self.halves)):
            for over, is_late in ((EARLIER, True), (LATER, False)):
                moved = sum(of(o, x, shares[n]) for o, x, shares in terms if o == over)
                moved = lax.cumsum(moved if is_late else beside(moved, -1), moved.ndim - 2, reverse=is_late)
                found = placed(moved, int(is_late)) + found
        return found


class AllHalved(NamedTuple):
    """As `Halved`, with the factors of each token in all halvings at once, [halvings, C, X]."""

    factors: jax.Array

    def products(self, dot: Dot, x: jax.Array, y: jax.Array) -> jax.Array:
        own, (x, y) = row_sums(x * y), (z[..., None, :, :] * self.factors for z in (x, y))
        return own * identity(x[..., 0, :, :]) + _added(_masked(_in_each(dot, "id,jd", x, y)))

    def moved(self, dot: Dot, x: jax.Array, y: jax.Array, along: jax.Array) -> jax.Array:
        of_halves = _of_halves(along, dot)
        x, y = (z[..., None, :, :] * self.factors for z in (x, y))
        return _added(_masked(_moved(partial(_in_each, dot), x, of_halves, y, of_halves)))

    def shares(self, dot: Dot, over: str, plane: jax.Array, x: jax.Array) -> jax.Array:
        plane, x = _masked(plane[..., None, :, :]), x[..., None, :, :] * self.factors
        return self.factors * _in_each(dot, over, plane, x)

    def added(self, over: str, shares: jax.Array) -> jax.Array:
        return _added(shares)

    def of_decays(self, dot: Dot, terms: list[tuple[str, jax.Array, jax.Array]]) -> jax.Array:
        first, *others = (x[..., None, :, :] * shares for _, x, shares in terms)
        moved = sum(others, first)
        moved = moved.reshape(*moved.shape[:-3], -1, moved.shape[-1])
        sums = _as_factor(_halvings(self.factors.shape[-2]), moved)
        return dot("ij,id", sums, moved, precision=lax.Precision.HIGHEST)


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
    pairs: SharedDecays | Halved | AllHalved

    def scaled(self, factor: jax.Array, rows: jax.Array) -> Scaled:
        """Returns `factor`, of those of the decays, times rows."""
        return Scaled(rows, factor) if isinstance(self.pairs, SharedDecays) else Scaled(factor * rows, None)


def decays(plan: Plan, log_decay: jax.Array, restarts: jax.Array | None) -> Decays:
    """Returns the decays of chunks: `log_decay [..., C, X]`, `restarts [..., C, 1]`."""
    # where a part begins, and of which part each token is
    is_zero = jnp.exp(log_decay) == 0
    restarts = is_zero if restarts is None else is_zero | restarts
    if plan.pairs == "all halvings at once":
        return _of_channels_on_cpu(plan, log_decay, restarts)
    g, axis = jnp.where(restarts, 0.0, log_decay), restarts.ndim - 2
    behind = beside(g, 1)
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
        to_b, since_b = _around_middle(g, size)
        n0, n1 = (half_of(number, which, size=size) for which in (0, 1))
        nb = n1[..., :1, :]
        halves.append((factor(to_b, n0 == nb), factor(since_b, n1 == nb)))
        size *= 2
    return Decays(restarts, *outer, Halved(tuple(halves)))


def _of_channels_on_cpu(plan: Plan, log_decay: jax.Array, restarts: jax.Array) -> Decays:
    """Returns the decays of channels, each the exponential of a sum that a product takes."""
    dot, token = dot_of(plan), np.arange(log_decay.shape[-2])
    g = jnp.where(restarts, _NEVER, log_decay)
    taken = _as_factor([token <= token[:, None], token > token[:, None]], g)
    sums = dot("ij,jd", taken, g, precision=lax.Precision.HIGHEST).reshape(*g.shape[:-2], 2, *g.shape[-2:])
    from_start, to_end = jnp.exp(sums[..., 0, :, :]), jnp.exp(sums[..., 1, :, :])
    return Decays(
        restarts, from_start, to_end, from_start[..., -1:, :], AllHalved(jnp.exp(_of_halves(g, dot)))
    )


def beside(x: jax.Array, by: int) -> jax.Array:
    """Returns `[..., C, X]` of the token behind (1) or before (-1) each, 0 where there is none."""
    zero, axis = jnp.zeros_like(x[..., :1, :]), x.ndim - 2
    return jnp.concatenate([x[..., 1:, :], zero] if by > 0 else [zero, x[..., :-1, :]], axis)


def _around_middle(g: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns c_b - c_j of the earlier halves and c_i - c_b of the later, each summed by itself."""
    to_b, later = half_of(beside(g, 1), 0, size=size), half_of(g, 1, size=size)
    since_b = jnp.concatenate([jnp.zeros_like(later[..., :1, :]), later[..., 1:, :]], -2)
    return lax.cumsum(to_b, to_b.ndim - 2, reverse=True), lax.cumsum(since_b, since_b.ndim - 2)


def _of_halves(g: jax.Array, dot: Dot) -> jax.Array:
    """Returns the sums of `g` between each token and the middle, in all halvings, `[..., halvings, C, X]`."""
    C = g.shape[-2]
    found = dot("ij,jd", _as_factor(_halvings(C), g), g, precision=lax.Precision.HIGHEST)
    return found.reshape(*g.shape[:-2], -1, C, g.shape[-1])


def _halvings(C: int) -> list[np.ndarray]:
    """Tells of each halving which tokens lie between each and the middle: for later ones from there on."""
    of, token, found = np.arange(C)[:, None], np.arange(C), []
    for size in _sizes(C):
        b = of // (2 * size) * 2 * size + size
        found.append(np.where(of < b, (of < token) & (token < b), (b <= token) & (token <= of)))
    return found


def _moved(dot: Dot, x: jax.Array, dx: jax.Array, y: jax.Array, dy: jax.Array) -> jax.Array:
    """Returns sum_d x_id y_jd (dx_id + dy_jd), as one product."""
    return dot("id,jd", jnp.concatenate([dx * x, x], -1), jnp.concatenate([y, dy * y], -1))


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
