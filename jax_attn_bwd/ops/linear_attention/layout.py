"""Lays the tokens of a call out in groups of chunks, heads in front, and back.

`part` is what the rules know of a group before they read a state: rows, normalized, and decays.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd.ops.linear_attention.decays import Decays, decays
from jax_attn_bwd.ops.linear_attention.matrix import row_sums
from jax_attn_bwd.ops.linear_attention.plan import Plan
from jax_attn_bwd.ops.linear_attention.spec import Operands, Options


class TokenRows(NamedTuple):
    """What is told of each token, as it is given; zeros where there is none.

    `[g, ..., m C, N, X]` of a call, and of one group `[..., m C, N, X]` or `[m, ..., K, G, C, X]`.
    """

    query: jax.Array  # N = K, G = 1
    key: jax.Array  # N = K, G = 1
    value: jax.Array
    log_decay: jax.Array  # axes that all of a batch, or all heads, share are 1
    beta: Any = None  # without a delta rule
    restarts: jax.Array | None = None  # bool, N = K = G = X = 1
    erase_key: Any = None  # of key heads, G = 1, or of value heads; where nothing is erased, None
    erase_query: Any = None


def split(plan: Plan, x: jax.Array) -> jax.Array:
    """Turns `[..., T, N, X]` into `[g, ..., m C, N, X]`, filled up with zeros."""
    (*batch, T, N, X), rank = x.shape, x.ndim - 3
    g, tokens = plan.groups_of(T), plan.side_by_side * plan.chunk
    if not isinstance(T, int) or T % tokens:
        x = jnp.pad(x, [(0, 0)] * rank + [(0, g * tokens - T), (0, 0), (0, 0)])
    return jnp.moveaxis(x.reshape(*batch, g, tokens, N, X), rank, 0)


def join(x: jax.Array, T: Any) -> jax.Array:
    """Turns `[g, ..., m C, N, X]` into `[..., T, N, X]`, without what `split` filled up."""
    (g, *batch, tokens, N, X), rank = x.shape, x.ndim - 4
    return jnp.moveaxis(x, 0, rank).reshape(*batch, g * tokens, N, X)[..., :T, :, :]


def chunks(plan: Plan, x: jax.Array, groups: Any) -> jax.Array:
    """Turns `[..., m C, N, X]` of a group into `[m, ..., K, G, C, X]`: there, a cache still holds it."""
    (*batch, _, N, X), rank, m, C = x.shape, x.ndim - 3, plan.side_by_side, plan.chunk
    groups = 1 if N == 1 else groups  # all heads share it
    # one axis after the other, which JAX 0.10 asks for on an Explicit mesh
    x = x.reshape(*batch, m, C, N, X).reshape(*batch, m, C, N // groups, groups, X)
    return x.transpose(rank, *range(rank), rank + 2, rank + 3, rank + 1, rank + 4)


def rows(x: jax.Array) -> jax.Array:
    """Turns `[m, ..., K, G, C, X]` into `[..., m C, N, X]`."""
    (m, *batch, K, G, C, X), rank = x.shape, x.ndim - 5
    x = x.transpose(*range(1, rank + 1), 0, rank + 3, rank + 1, rank + 2, rank + 4)
    return x.reshape(*batch, m * C, K, G, X).reshape(*batch, m * C, K * G, X)


def tokens(plan: Plan, operands: Operands) -> TokenRows:
    """Returns what is told of each token; what lies beyond the lengths is not read."""
    seen, restarts, beta = seen_tokens(operands), operands.restarts, operands.beta
    clean = lambda x: split(plan, x if seen is None else jnp.where(seen, x, 0.0))
    if restarts is not None:
        restarts = restarts[..., None, None]
        restarts = split(plan, restarts if seen is None else seen & restarts)
    return TokenRows(
        clean(operands.query),
        clean(operands.key),
        clean(operands.value),
        clean(decay_of_tokens(operands)),
        None if beta is None else clean(beta[..., None]),
        restarts,
        *(None if x is None else clean(x) for x in (operands.erase_key, operands.erase_query)),
    )


def of_group(plan: Plan, tokens: TokenRows, groups: Any) -> TokenRows:
    """Lays the tokens of one group out in chunks."""
    query, key, *others = tokens
    K = key.shape[-2]
    of = lambda x: chunks(plan, x, 1 if x.shape[-2] == K else groups)
    others = [None if x is None else of(x) for x in others]
    return TokenRows(chunks(plan, query, 1), chunks(plan, key, 1), *others)


def seen_tokens(operands: Operands) -> jax.Array | None:
    """Tells which tokens lie within the lengths, `[..., T, 1, 1]`; None where all do."""
    if operands.seq_lengths is None:
        return None
    number = jnp.arange(operands.value.shape[-3], dtype=jnp.int32)
    number = number.reshape((1,) * operands.seq_lengths.ndim + (-1,))
    return (number < operands.seq_lengths[..., None])[..., None, None]


def decay_of_tokens(operands: Operands) -> jax.Array:
    """Returns the logarithms of the decays as `[..., T, N, X]`, 0 where none are given."""
    x, (*batch, T, N, _) = operands.log_decay, operands.value.shape
    ones = (1,) * len(batch)
    if x is None:
        return jnp.zeros((*ones, T, 1, 1), operands.value.dtype)
    if x.ndim == 1:
        return jnp.broadcast_to(x.reshape(*ones, 1, N, 1), (*ones, T, N, 1))
    return x if x.ndim == len(batch) + 3 else x[..., None]


def like_operand(operands: Operands, name: str, x: jax.Array) -> jax.Array:
    """Returns the gradient `[g, ..., m C, N, X]` of an operand of tokens in the shape of the operand."""
    given, T = getattr(operands, name), operands.value.shape[-3]
    x, seen = join(x, T), seen_tokens(operands)
    x = x if seen is None else jnp.where(seen, x, 0.0)
    if given.ndim == 1:
        return x.sum((*range(x.ndim - 2), -1))
    return x if given.ndim == x.ndim else x[..., 0]


def unit(options: Options, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Returns (the rows of `x`, normalized if that is asked, and what they were multiplied by)."""
    if options.l2_norm_epsilon is None:
        return x, None
    scale, factor = unit_factors(options.l2_norm_epsilon, row_sums(x * x), row_sums(small_squares(x)))
    return scale * x * factor, scale * factor


def small_squares(x: jax.Array) -> jax.Array:
    """Returns the squares of `x` times a power of two, which no rounding takes part in: so none overflows."""
    return (x * _small(x.dtype)) ** 2


def unit_factors(epsilon: float, squares: jax.Array, small_squares: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (a power of two, 1 but for rows whose squares might overflow; what normalizes such a row).

    From the sums of the squares of each row, and of the `small_squares`.
    """
    small = _small(squares.dtype)
    is_large = small_squares > small  # about 1e29 of the squares in float32
    scale = jnp.where(is_large, jnp.asarray(small, squares.dtype), 1)
    squares = jnp.where(is_large, small_squares, squares)
    return scale, lax.rsqrt(squares + epsilon * scale**2)


def _small(dtype: Any) -> float:
    return 2.0 ** (-3 * jnp.finfo(dtype).maxexp // 4)


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
    decays: Decays
    query_factor: jax.Array | None  # what normalizing multiplied by
    key_factor: jax.Array | None
    erase_key: Any = None  # a
    erase_query: Any = None  # b


def part(plan: Plan, tokens: TokenRows, dtype: Any) -> Part:
    """Returns what a group of chunks is computed with."""
    wide = lambda x: x.astype(dtype)
    query, query_factor = unit(plan.options, wide(tokens.query))
    key, key_factor = unit(plan.options, wide(tokens.key))
    return Part(
        query,
        key,
        wide(tokens.value),
        None if tokens.beta is None else wide(tokens.beta),
        decays(plan, wide(tokens.log_decay), tokens.restarts),
        query_factor,
        key_factor,
        *(None if x is None else wide(x) for x in (tokens.erase_key, tokens.erase_query)),
    )
