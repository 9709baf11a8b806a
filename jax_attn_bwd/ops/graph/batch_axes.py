"""Batch axes in front of the features of nodes and edges: which there are, and what follows them."""

import jax

from jax_attn_bwd._core import split, targets
from jax_attn_bwd._core.sharding import explicit_spec, reshard_like, resharded
from jax_attn_bwd.ops.graph.spec import Operands

RANKS = {"src": 2, "dst": 2, "value": 2, "edge": 2, "score_bias": 2, "dropout_mask": 2}  # of one entry


def leader(operands: Operands) -> jax.Array:
    """The first array of nodes that has the batch axes; src where none has."""
    nodes = [x for x in (operands.src, operands.dst, operands.value) if x is not None]
    return max(nodes, key=lambda x: x.ndim)


def batch_rank(operands: Operands) -> int:
    """The number of batch axes."""
    return leader(operands).ndim - 2


def batch_axes(operands: Operands) -> tuple[int, ...]:
    """The sizes of the batch axes."""
    return leader(operands).shape[:-2]


def placed(x: jax.Array, operands: Operands, axes: tuple[int | None, ...]) -> jax.Array:
    """`x` laid out on an Explicit mesh like the nodes: its batch axes like theirs, its others like `axes`."""
    batch = x.ndim - len(axes)
    return reshard_like(x, leader(operands), (*range(batch), *axes))


def with_destinations(x: jax.Array, operands: Operands, has_heads: bool) -> jax.Array:
    """`x` `[..., num_dst, n]` laid out on an Explicit mesh like the destinations; its n may be of heads."""
    spec = explicit_spec(leader(operands))
    rows, heads = explicit_spec(operands.dst)[-2], spec[-1] if has_heads else None
    return resharded(x, leader(operands), (*spec[: x.ndim - 2], rows, heads))


def numbered(operands: Operands) -> Operands:
    """`operands` whose dropout, if it is drawn from a key, has a stream for each entry of the batch."""
    rank = batch_rank(operands)
    if operands.dropout_words is None or not rank:
        return operands
    offset = split.dropout_indices(operands.dropout_offset, leader(operands), rank)
    return operands._replace(dropout_offset=offset)


def one_after_another() -> bool:
    """Whether entries are computed in turn: a lone CPU takes half the time for it."""
    return targets.platform() == "cpu" and len(jax.devices("cpu")) == 1
