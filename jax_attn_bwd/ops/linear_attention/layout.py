"""Lays the tokens of a call out in groups of chunks, heads in front, and back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd.ops.linear_attention.plan import Plan
from jax_attn_bwd.ops.linear_attention.spec import Operands


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
    clean = lambda x: split(plan, x if seen is None else jnp.where(seen, x, 0))
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
    )


def of_group(plan: Plan, tokens: TokenRows, groups: Any) -> TokenRows:
    """Lays the tokens of one group out in chunks."""
    query, key, *others = tokens
    others = [None if x is None else chunks(plan, x, groups) for x in others]
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
    x = x if seen is None else jnp.where(seen, x, 0)
    if given.ndim == 1:
        return x.sum((*range(x.ndim - 2), -1))
    return x if given.ndim == x.ndim else x[..., 0]
