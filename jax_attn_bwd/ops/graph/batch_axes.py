"""Batch axes in front of the features of nodes and edges: forward and backward of each entry of the batch.

Rule and loops know one graph and the features of one entry. Here they are mapped over the entries, inside
the rule, so that the gradient of what entries share is summed once: over the batch, and over devices after.
"""

from collections.abc import Callable
from typing import Any

import jax

from jax_attn_bwd._core import dropout, pallas, split, targets
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
    rank = batch_rank(operands)
    if operands.dropout_words is None or not rank:
        return operands
    offset = split.dropout_indices(operands.dropout_offset, leader(operands), rank)
    return operands._replace(dropout_offset=offset)


def forward(run: Callable[..., Result], options: Options, operands: Operands) -> Result:
    """`run(options, operands)` of every entry."""
    return _over_entries(lambda operands: run(options, operands), operands)


def backward(
    run: Callable[..., dict[str, jax.Array]], options: Options, residuals: Residuals, cotangents: Cotangents
) -> dict[str, jax.Array]:
    """The gradients that `run` gives of every entry; of what entries share their sum."""
    operands, result, wanted = residuals
    if not batch_rank(operands):
        return run(options, residuals, cotangents)

    def of_entry(operands, result, cotangents):
        return run(options, Residuals(operands, result, wanted), cotangents)

    # what varies is summed over devices by no entry
    grads = _over_entries(of_entry, pallas.vary_alike(operands), result=result, cotangents=cotangents)
    return {name: _summed(x, getattr(operands, name)) for name, x in grads.items()}


def _over_entries(function: Callable[..., Any], operands: Operands, **of_entries: Any) -> Any:
    """`function(operands, **of_entries)` of every entry; each of `of_entries` has all batch axes."""
    rank, given = batch_rank(operands), operands._asdict()
    axes: dict[str, Any] = dict.fromkeys(of_entries, 0)
    axes |= {n: 0 for n, own in RANKS.items() if given[n] is not None and given[n].ndim - own == rank}
    if operands.dropout_words is not None:
        axes["dropout_offset"] = dropout.Offset(0, None, None, None)

    def of_entry(arrays):
        own = {name: arrays.pop(name) for name in of_entries}
        return function(Operands(**arrays), **own)

    return split.over_entries(of_entry, rank, given | of_entries, axes, one_after_another())


def one_after_another() -> bool:
    """Whether entries are computed in turn: where one CPU is all there is, which does so in half the time."""
    return targets.platform() == "cpu" and len(jax.devices("cpu")) == 1


def _summed(grad: jax.Array, primal: jax.Array) -> jax.Array:
    """The gradient of `primal`, where `grad` has one for each entry."""
    surplus = grad.ndim - primal.ndim
    if surplus:
        grad = grad.astype(accumulator_dtype(grad.dtype)).sum(tuple(range(surplus)))
    return match_type(grad, primal)
