"""What one strip computes: rows against keys, of which one side meets all that it sees.

How strips are cut, and why this form has few bytes on a GPU: `strips.py`. Equation numbers are those of
`backward.py`. Rows of all groups of heads are one axis, and so are batch and heads of one device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import fusion
from jax_attn_bwd._core.numerics import finite, to_rank
from jax_attn_bwd._core.products import product, rounded_product
from jax_attn_bwd.ops.dot_product import online_softmax as online
from jax_attn_bwd.ops.dot_product.block import Block, scaled_product
from jax_attn_bwd.ops.dot_product.plan import Strips
from jax_attn_bwd.ops.dot_product.spec import Options


def attended(
    options: Options, q: Any, k: Any, v: Any, sink: Any, seen: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes (out, lse, lse_rounding) of rows that see these keys, and a sink, alone."""
    # The greatest logit of each row and its sum, with the sink; lse is their log.
    block = _block(options, q, k, v, seen)
    logits = fusion.barrier(block.logits(scaled_product(block, q, k))[0])
    m, l = _greatest_and_sum(logits)
    if sink is not None:
        greatest = lax.stop_gradient(jnp.maximum(m, sink))
        shift = finite(greatest)
        m, l = greatest, l * jnp.exp(m - shift) + jnp.exp(sink - shift)
    m, l, lse, rounding = online.of_rows(m, l)

    # The output of the probabilities, whose logits are formed again where factors are narrow.
    m, l = map(fusion.barrier, (m, l))
    if q.dtype != l.dtype:
        # Other barriers than of the first product: else XLA takes both at once. Two kernels need not round
        # alike, which counts where one logit of 1e5 takes all, and factors are wide.
        logits = block.logits(scaled_product(block, fusion.barrier(q), fusion.barrier(k)))[0]
    p = fusion.barrier(jnp.exp(logits - m).astype(v.dtype))
    out = product("...ts,...sh->...th", p, v, **block.product) / l
    return out.astype(q.dtype), lse, rounding


def _greatest_and_sum(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (m, sum of exp(logits - m)) of each row, `[..., 1]`.

    One kernel of XLA:GPU reads a row once, if all that follows its maximum is one array, and if the maximum
    has no other reader: hence it is formed twice, and m and the sum are one array.
    """
    least = jnp.asarray(jnp.finfo(logits.dtype).min, logits.dtype)
    fixed = lax.stop_gradient(logits)
    greatest = lax.reduce(jnp.maximum(fixed, least), least, lax.max, (logits.ndim - 1,))
    l = jnp.exp(logits - greatest[..., None]).sum(-1, keepdims=True)
    m = -lax.reduce(-fixed, jnp.asarray(jnp.inf, logits.dtype), lax.min, (logits.ndim - 1,))
    is_first = to_rank(jnp.arange(2) == 0, logits.ndim)
    both = fusion.barrier(jnp.where(is_first, m[..., None], l))
    return lax.stop_gradient(both[..., :1]), both[..., 1:]


def shares(
    options: Options, wanted: frozenset[str],
    k: Any, v: Any, q: Any, dout: Any, lse: Any, rounding: Any, delta: Any, seen: Any,
) -> dict[str, jax.Array]:  # fmt: skip
    """Computes what a strip gives to each gradient that is wanted."""
    # The probabilities again, and what (8) and (10) multiply with.
    block = _block(options, q, k, v, seen)
    logits, (_, tanh) = block.logits(scaled_product(block, q, k))  # (1)
    p, share = jnp.exp((logits - lse) - rounding), {}  # (2)
    factor = p if tanh is None else p * (1 - tanh * tanh)  # of (10)
    p, factor = map(fusion.barrier, (p, factor))

    # Through the product with the values, and back to queries and keys.
    if "value" in wanted:
        share["value"] = rounded_product("...ts,...th->...sh", p, dout, options.precision)  # (5)
    if wanted == {"value"}:
        return share
    dp = block.through_values(dout)
    return share | block.gradients(wanted - {"value"}, factor, dout, dp, delta)


def _block(options: Options, q: Any, k: Any, v: Any, seen: Any) -> Block:
    """Makes a block of rows in one axis."""
    return Block(options, q, k, v, None, seen, rows="t", elements="ts")


def over_heads(slices: int, run: Callable[..., Any], *arrays: Any) -> Any:
    """Computes `run(*arrays)` in so many slices of the first axis, each after the one before.

    An array that has one entry there is for all of them.
    """
    if slices <= 1:
        return run(*arrays)
    found: list[Any] = []
    size = jax.tree.leaves(arrays)[0].shape[0] // slices
    part = lambda first, x: x if x.shape[0] == 1 else lax.slice_in_dim(x, first, first + size)
    for number in range(slices):
        own = jax.tree.map(partial(part, number * size), arrays)
        found.append(run(*after(own, found[-1:])))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)


def after(arrays: Any, last: Any) -> Any:
    """Returns `arrays`, of which nothing is computed before `last` is: else all strips run at once."""
    return fusion.barrier((arrays, last))[0]


def flat(x: jax.Array) -> jax.Array:
    """Puts the rows of all groups of `x [..., G, T, n]` in one axis."""
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def merged(schedule: Strips, x: jax.Array, batch_rank: int) -> jax.Array:
    """Puts batch and heads of `x [*batch, K, ...]` in one axis, where they are those of one device."""
    return x.reshape(-1, *x.shape[batch_rank + 1 :]) if schedule.head_slices else x
