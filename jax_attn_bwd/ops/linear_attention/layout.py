"""Lays the tokens of a call out in groups of chunks, heads in front, and back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd.ops.linear_attention.plan import Plan
from jax_attn_bwd.ops.linear_attention.spec import Operands


class Tokens(NamedTuple):
    """What is told of each token, as it is given; zeros where there is none. `[g, m, ..., K, G, C, X]`."""

    query: jax.Array  # G = 1
    key: jax.Array  # G = 1
    value: jax.Array
    log_decay: jax.Array  # axes that all of a batch, or all heads, share are 1
    beta: Any = None  # without a delta rule
    restarts: jax.Array | None = None  # bool, K = G = X = 1


def split(plan: Plan, x: jax.Array, groups: Any) -> jax.Array:
    """Turns `[..., T, N, X]` into `[g, m, ..., K, G, C, X]`, filled up with zeros."""
    (*batch, T, N, X), rank = x.shape, x.ndim - 3
    g, m, C = plan.groups_of(T), plan.side_by_side, plan.chunk
    if not isinstance(T, int) or T % (m * C):
        x = jnp.pad(x, [(0, 0)] * rank + [(0, g * m * C - T), (0, 0), (0, 0)])
    # one axis after the other, which JAX 0.10 asks for on an Explicit mesh
    x = x.reshape(*batch, g, m, C, N, X).reshape(*batch, g, m, C, N // groups, groups, X)
    return x.transpose(rank, rank + 1, *range(rank), rank + 3, rank + 4, rank + 2, rank + 5)


def join(x: jax.Array, T: Any) -> jax.Array:
    """Turns `[g, m, ..., K, G, C, X]` into `[..., T, N, X]`, without what `split` filled up."""
    (g, m, *batch, K, G, C, X), rank = x.shape, x.ndim - 6
    x = x.transpose(*range(2, rank + 2), 0, 1, rank + 4, rank + 2, rank + 3, rank + 5)
    return x.reshape(*batch, g * m * C, K, G, X).reshape(*batch, g * m * C, K * G, X)[..., :T, :, :]


def tokens(plan: Plan, operands: Operands) -> Tokens:
    """Returns what is told of each token; what lies beyond the lengths is not read."""
    groups, seen = operands.groups, seen_tokens(operands)
    clean = lambda x: x if seen is None else jnp.where(seen, x, 0)
    restarts = operands.restarts
    if restarts is not None:
        restarts = restarts[..., None, None]
        restarts = split(plan, restarts if seen is None else seen & restarts, 1)
    log_decay = decay_of_tokens(operands)
    return Tokens(
        split(plan, clean(operands.query), 1),
        split(plan, clean(operands.key), 1),
        split(plan, clean(operands.value), groups),
        split(plan, clean(log_decay), groups if operands.log_decay is not None else 1),
        None if operands.beta is None else split(plan, clean(operands.beta[..., None]), groups),
        restarts,
    )


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
    """Returns the gradient `[g, m, ..., K, G, C, X]` of an operand of tokens in the shape of the operand."""
    given, T = getattr(operands, name), operands.value.shape[-3]
    x, seen = join(x, T), seen_tokens(operands)
    x = x if seen is None else jnp.where(seen, x, 0)
    if given.ndim == 1:
        return x.sum((*range(x.ndim - 2), -1))
    return x if given.ndim == x.ndim else x[..., 0]
