"""Batch axes in front of the features of nodes and edges: forward and backward of each entry of the batch.

Rule and loops know one graph and the features of one entry. Here they are mapped over the entries, inside
the rule, so that the gradient of what entries share is summed once: over the batch, and over devices after.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import dropout, pallas, targets
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.sharding import match_type, reshard_like
from jax_attn_bwd.ops.graph.spec import Cotangents, Operands, Options, Residuals, Result

RANKS = {"src": 2, "dst": 2, "value": 2, "edge": 2, "score_bias": 2, "dropout_mask": 2}  # of one entry


def leader(operands: Operands) -> jax.Array:
    """The first array of nodes that has the batch axes; src where none has."""
    nodes = [x for x in (operands.src, operands.dst, operands.value) if x is not None]
    return max(nodes, key=lambda x: x.ndim)


def batch_rank(operands: Operands) -> int:
    """The number of batch axes."""
    return leader(operands).ndim - 2


def batch_axes(operands: Operands) -> tuple[int, ...]:
    """Their sizes."""
    return leader(operands).shape[:-2]


def placed(x: jax.Array, operands: Operands, axes: tuple[int | None, ...]) -> jax.Array:
    """`x` on an Explicit mesh as the nodes lie: batch axes like theirs, the others like `axes` of them."""
    batch = x.ndim - len(axes)
    return reshard_like(x, leader(operands), (*range(batch), *axes))


def numbered(operands: Operands) -> Operands:
    """`operands` whose dropout, if it is drawn from a key, has a stream for each entry of the batch."""
    batch = batch_axes(operands)
    if operands.dropout_words is None or not batch:
        return operands
    zero = jnp.uint32(0)
    at = operands.dropout_offset or dropout.Offset(zero, zero, zero, zero)
    number = jnp.zeros(batch, jnp.uint32)
    for axis, n in enumerate(batch):
        number = number * jnp.asarray(n).astype(jnp.uint32) + lax.broadcasted_iota(jnp.uint32, batch, axis)
    number = reshard_like(number, leader(operands), range(len(batch)))
    return operands._replace(dropout_offset=at._replace(batch=at.batch + number))


def forward(run: Callable[..., Result], options: Options, operands: Operands) -> Result:
    """`run(options, operands)` of every entry."""
    return _mapped(lambda operands: run(options, operands), operands)


def backward(
    run: Callable[..., dict[str, jax.Array]], options: Options, residuals: Residuals, cotangents: Cotangents
) -> dict[str, jax.Array]:
    """The gradients that `run` gives of every entry; of what entries share their sum."""
    operands, result, wanted = residuals
    if not batch_rank(operands):
        return run(options, residuals, cotangents)

    def one(operands, result, cotangents):
        return run(options, Residuals(operands, result, wanted), cotangents)

    # what varies is summed over devices by no entry
    grads = _mapped(one, pallas.vary_alike(operands), result, cotangents)
    return {name: _summed(x, getattr(operands, name)) for name, x in grads.items()}


def _mapped(function: Callable[..., Any], operands: Operands, *of_entries: Any) -> Any:
    """`function(operands, *of_entries)` of every entry; each of `of_entries` has all batch axes."""
    rank, at = batch_rank(operands), operands.dropout_offset
    if not rank:
        return function(operands, *of_entries)
    given = {name: (getattr(operands, name), own) for name, own in RANKS.items()}
    moving = {name: x for name, (x, own) in given.items() if x is not None and x.ndim - own == rank}
    number = None if at is None or operands.dropout_words is None else at.batch

    def one(entry):
        moving, number, of_entries = entry
        own = operands._replace(**moving)
        if at is not None and number is not None:
            own = own._replace(dropout_offset=at._replace(batch=number))
        return _mapped(function, own, *of_entries)

    over = partial(lax.map, one) if one_after_another() else jax.vmap(one)
    return over((moving, number, of_entries))


def one_after_another() -> bool:
    """Whether entries are computed in turn: where one CPU is all there is, which does so in half the time."""
    return targets.platform() == "cpu" and len(jax.devices("cpu")) == 1


def _summed(grad: jax.Array, primal: jax.Array) -> jax.Array:
    """The gradient of `primal`, where `grad` has one for each entry."""
    surplus = grad.ndim - primal.ndim
    if surplus:
        grad = grad.astype(accumulator_dtype(grad.dtype)).sum(tuple(range(surplus)))
    return match_type(grad, primal)
