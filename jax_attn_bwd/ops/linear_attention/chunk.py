"""What the rules know of a chunk before they read a state: its rows, normalized, and its decays."""

from typing import Any, NamedTuple

import jax
from jax import lax

from jax_attn_bwd.ops.linear_attention.decays import Decays, decays
from jax_attn_bwd.ops.linear_attention.layout import TokenRows
from jax_attn_bwd.ops.linear_attention.matrix import row_sums
from jax_attn_bwd.ops.linear_attention.plan import Plan
from jax_attn_bwd.ops.linear_attention.spec import Options


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
    decays: Decays
    query_factor: jax.Array | None  # what normalizing multiplied by
    key_factor: jax.Array | None


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
    )
