"""Shared by the kernels of linear attention: calls they refuse, what XLA prepares, the shapes of results.

A kernel reads queries, keys and values as they are given, and of each token four numbers. What multiplies
rows is among them: the l2 norm and the scale, so that nothing is rounded before a product.

A restart, and a decay that underflows, is a decay of exp(`NEVER`) = 0: sums of it within a chunk are exact
enough for every pair of tokens that it does not part.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jax_attn_bwd._core.numerics import rounding_of, to_rank
from jax_attn_bwd.ops.linear_attention import layout
from jax_attn_bwd.ops.linear_attention.plan import Plan, has_decays_of_channels
from jax_attn_bwd.ops.linear_attention.spec import Operands, Options, Residuals, Result

NEVER = -200.0  # the logarithm of a decay that is 0
NUMBERS = 4  # of a token: c, beta, and what multiplies its query and its key


class Inputs(NamedTuple):
    """What kernels read. B: the batch axes, T: whole groups of chunks, H and Hv: padded by zeros."""

    query: Any  # [B, T, K, H]
    key: Any  # [B, T, K, H]
    value: Any  # [B, T, N, Hv]
    numbers: Any  # float32 [B, N, NUMBERS, T]: c, the sum of log decays from the start of the chunk, ...
    state: Any = None  # float32 [B, N, H, Hv]; None is 0
    # log decays of channels as two numbers, bfloat16 [2, B, T, N, H]; then c is the number within the chunk
    decays: Any = None


def unsupported(options: Options, operands: Operands, sizes: tuple[int, int]) -> str | None:
    """Returns why no kernel runs this call whose keys and values have at most `sizes` channels; else None."""
    value, H, Hv = operands.value, operands.key.shape[-1], operands.value.shape[-1]
    if not all(isinstance(n, int) for n in (*value.shape, H)):
        return "its shapes must be known, not symbolic"
    if value.dtype not in ("bfloat16", "float16"):
        return f"query, key and value must be bfloat16 or float16, not {value.dtype}"
    if 0 in (*value.shape, H):
        return "there is nothing to compute"
    widest_key, widest_value = sizes
    if widest_key < H or Hv > widest_value:
        return f"keys may have at most {widest_key} channels and values {widest_value}, got {H} and {Hv}"
    return None


def of_call(plan: Plan, operands: Operands, multiples: tuple[int, int]) -> Inputs:
    """Returns the inputs of a call, H and Hv padded to `multiples`; beyond the lengths nothing is read."""
    seen, T = layout.seen_tokens(operands), operands.value.shape[-3]
    padded = _padding(plan, T)
    clean = lambda x: x if seen is None else jnp.where(seen, x, 0)
    query, key = (padded_rows(plan, operands, x, multiples[0]) for x in (operands.query, operands.key))
    value = padded_rows(plan, operands, operands.value, multiples[1])
    B, _, N, _ = value.shape

    def of_tokens(x):  # [..., T, K | N, X] to [B, N, X, T]
        x = jnp.pad(x.reshape(B, T, *x.shape[-2:]), [(0, 0), (0, padded), (0, 0), (0, 0)])
        return jnp.repeat(x, N // x.shape[2], 2).transpose(0, 2, 3, 1)

    of_channels = has_decays_of_channels(operands)
    g = jnp.broadcast_to(
        jnp.float32(0) if of_channels else clean(log_decay(operands)), (*operands.value.shape[:-1], 1)
    )
    beta = jnp.ones_like(g) if operands.beta is None else clean(wide(operands.beta[..., None]))
    factors = _factors(plan.options, clean(operands.query), clean(operands.key))
    rows = jnp.concatenate([of_tokens(jnp.concatenate([g, beta], -1)), of_tokens(factors)], 2)
    # Sums over masked tokens: of those up to a token, which a product would round, and for all but c of the
    # token alone. So one kernel of a GPU makes all four.
    up_to, alone = np.tri(plan.chunk, dtype=bool), np.eye(plan.chunk, dtype=bool)
    masks = jnp.asarray(np.stack([up_to, alone, alone, alone])[:, None])
    rows = rows.reshape(B, N, NUMBERS, -1, 1, plan.chunk)
    numbers = jnp.where(to_rank(masks, 6), rows, 0).sum(-1).reshape(B, N, NUMBERS, -1)
    decays = None
    if of_channels:
        number = jnp.arange(numbers.shape[-1]) % plan.chunk
        c = jnp.broadcast_to(number.astype(jnp.float32), (B, N, 1, numbers.shape[-1]))
        numbers = jnp.concatenate([c, numbers[:, :, 1:]], 2)
        decays = _channel_decays(plan, operands, multiples[0])
    return Inputs(query, key, value, numbers, padded_state(operands.initial_state, query, value), decays)


def _channel_decays(plan: Plan, operands: Operands, multiple: int) -> jax.Array:
    """Returns the logarithms of the decays of channels as two numbers of bfloat16, which add up to them."""
    g = padded_rows(plan, operands, log_decay(operands), multiple)
    return jnp.stack([g.astype(jnp.bfloat16), rounding_of(g, jnp.bfloat16)])


def _padding(plan: Plan, T: int) -> int:
    return plan.groups_of(T) * plan.side_by_side * plan.chunk - T


def padded_rows(plan: Plan, operands: Operands, x: jax.Array, multiple: int) -> jax.Array:
    """Returns rows of tokens, `[..., T, N, X]`, as kernels read them: 0 beyond the lengths, padded."""
    seen, padded, rest = layout.seen_tokens(operands), _padding(plan, x.shape[-3]), -x.shape[-1] % multiple
    x = (x if seen is None else jnp.where(seen, x, 0)).reshape(-1, *x.shape[-3:])
    return jnp.pad(x, [(0, 0), (0, padded), (0, 0), (0, rest)]) if padded or rest else x


def padded_state(state: jax.Array | None, query: jax.Array, value: jax.Array) -> jax.Array | None:
    """Returns a state `[..., N, H, Hv]`, or its cotangent, as kernels read it: `[B, N, H, Hv]`, padded."""
    if state is None:
        return None
    state = state.reshape(-1, *state.shape[-3:])
    rest = [(0, x.shape[-1] - n) for x, n in zip((query, value), state.shape[-2:], strict=True)]
    return jnp.pad(state, [(0, 0), (0, 0), *rest])


def wide(x: jax.Array) -> jax.Array:
    """Returns `x` in the dtype that kernels add up in."""
    return x.astype(jnp.float32)


def log_decay(operands: Operands) -> jax.Array:
    """Returns the logarithms of the decays `[..., T, N | 1, 1]`, `NEVER` where nothing is left of a state."""
    g = wide(layout.decay_of_tokens(operands))
    is_never = jnp.exp(g) == 0
    if operands.restarts is not None:
        is_never = is_never | operands.restarts[..., None, None]
    return jnp.where(is_never, NEVER, g)


def _factors(options: Options, query: jax.Array, key: jax.Array) -> jax.Array:
    """Returns what multiplies queries, by the scale and the l2 norm, and keys, `[..., T, K, 2]`."""
    scales = np.array([options.scale, 1], np.float32)
    if options.l2_norm_epsilon is None:
        return jnp.broadcast_to(to_rank(jnp.asarray(scales), query.ndim), (*query.shape[:-1], 2))
    x, zero = wide(jnp.stack([query, key])), np.float32(0)
    # both sums in one reduction, so that a GPU reads the rows once
    add = lambda a, b: (a[0] + b[0], a[1] + b[1])
    sums = lax.reduce((x * x, layout.small_squares(x)), (zero, zero), add, (x.ndim - 1,))
    power, factor = layout.unit_factors(options.l2_norm_epsilon, *sums)
    return jnp.moveaxis(power * factor, 0, -1) * to_rank(jnp.asarray(scales), query.ndim)


def result(operands: Operands, out: jax.Array, final: jax.Array, states: jax.Array) -> Result:
    """Returns the result of a call of kernels' `[B, T, N, Hv]`, `[B, N, H, Hv]` and `[g, B, N, H, Hv]`."""
    (*batch, T, N, Hv), H, G = operands.value.shape, operands.key.shape[-1], operands.groups
    out = out[:, :T, :, :Hv].reshape(*batch, T, N, Hv)
    final, states = final[..., :H, :Hv], states[..., :H, :Hv]
    states = states.reshape(states.shape[0], *batch, N // G, G, H, Hv)
    return Result(out, final.reshape(*batch, N, H, Hv), states)


def result_specs(operands: Operands) -> Any:
    """Maps the PartitionSpecs of the operands to those of the result: batch and heads may be sharded."""
    out: Any = operands.value
    *batch, _, heads, _ = out
    final: Any = PartitionSpec(*batch, heads, None, None)
    states: Any = PartitionSpec(None, *batch, heads, None, None, None)
    return Result(out, final, states)


def gradient_specs(residuals: Residuals, *cotangents: Any) -> Any:
    """Maps the PartitionSpecs of residuals to those of what kernels give, all of it, by name."""
    operands: Any = residuals.operands
    *batch, _, heads, _ = operands.value
    numbers, state = PartitionSpec(*batch, None, heads), PartitionSpec(*batch, heads, None, None)
    rows = {name: getattr(operands, name) for name in ("query", "key", "value")}
    given = operands.log_decay
    decays = operands.value if given is not None and len(given) == len(operands.value) else numbers
    beta = None if operands.beta is None else numbers
    return rows | {"log_decay": decays, "beta": beta, "initial_state": state}


def log_decay_gradient(operands: Operands, dg: jax.Array) -> jax.Array:
    """Returns the gradient of `log_decay` in its own shape from float32 `[..., T, N]` or `[..., T, N, H]`."""
    given = operands.log_decay
    assert given is not None
    g = log_decay(operands)
    g = jnp.broadcast_to(g if dg.ndim == g.ndim else g[..., 0], dg.shape)
    dg = jnp.where(g == NEVER, 0, dg)
    return (dg.sum(range(dg.ndim - 1)) if given.ndim == 1 else dg.reshape(given.shape)).astype(given.dtype)
