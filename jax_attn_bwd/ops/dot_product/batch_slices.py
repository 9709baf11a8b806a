"""A batch computed slice after slice: what one slice computes stays in the cache."""

from collections.abc import Callable
from typing import Any

from jax_attn_bwd._core import split
from jax_attn_bwd._core.dropout import Offset
from jax_attn_bwd._core.split import Pieces, Place
from jax_attn_bwd.ops.dot_product.spec import Operands


def over_slices(
    fn: Callable[[Operands, Any], tuple[Any, Any]], count: int, operands: Operands, rows: Any, sums: Any
) -> tuple[Any, Any]:
    """`fn(operands, rows) -> (results, shares)` of the whole batch.

    Args:
      fn: computes it of some of the batch.
      count: number of slices; divides the first batch axis.
      operands: those of the call.
      rows: further arrays with all batch axes, sliced likewise.
      sums: zeros that the shares of the slices are added to.

    Returns:
      `(results, sums)`: the slices' results, which have all batch axes, put together; and the sums.
    """
    axes = operands.axes(dict.fromkeys(operands.along_batch(), 0))
    if operands.dropout_words is not None:
        offset = split.dropout_indices(operands.dropout_offset, operands.query, operands.query.ndim - 3)
        operands = operands._replace(dropout_offset=offset)
        axes["dropout_offset"] = Offset(0, None, None, None)

    def run(_, arrays):
        rows = arrays.pop("rows")
        return dict(zip(("results", "sums"), fn(Operands(**arrays), rows), strict=True))

    found = split.over(
        Pieces(count, in_turn=True),
        run,
        {**operands._asdict(), "rows": rows},
        {**axes, "rows": 0},
        {"results": Place(0)},
        {"sums": sums},
    )
    return found["results"], found["sums"]
