"""The portable path where a call is cut: queries that lie on several devices, batches taken slice by slice.

A part is a block of queries that attends to all keys: its rows of the output are those of the whole, and the
gradients of keys and values are sums over the parts. Keys and values are gathered once before the loop over
the tiles of a part, and their gradients summed once after it. `_core/split.py` runs the parts; `spec.AXES`
tells which operands a part has its own rows of. Under causality a part is one early and one late stretch of
the queries, so that all have the same work (`plan.py`).

A slice is some of the batch, one after the other: what it computes stays in the cache.
"""

from collections.abc import Callable
from typing import Any

from jax_attn_bwd._core import split
from jax_attn_bwd._core.dropout import Offset
from jax_attn_bwd._core.sharding import gathered, reshard_like, unsharded
from jax_attn_bwd._core.split import Pieces, Place
from jax_attn_bwd.ops.dot_product import row_terms
from jax_attn_bwd.ops.dot_product.plan import Plan
from jax_attn_bwd.ops.dot_product.spec import Operands, Residuals, Result


def with_whole_keys(operands: Operands) -> Operands:
    """`operands` with all keys on every device, as far as types tell."""
    whole: Callable[[Any], Any] = lambda x: None if x is None else unsharded(x, -3)
    return operands._replace(key=whole(operands.key), value=whole(operands.value))


def forward(plan: Plan, operands: Operands, run: Callable[[Plan, Operands], Result]) -> Result:
    """The result of `run` over all parts."""
    assert plan.pieces is not None  # else there are no parts
    arrays, axes = _divided(plan, operands)
    place = split.place(operands.query, axes["query"])
    by_row = place._replace(spec=place.spec[:-1])

    def of_part(index, arrays):
        found = run(plan, _part(plan, index, arrays))
        return {name: x for name, x in found._asdict().items() if x is not None}

    results = {"out": place, "lse": by_row, "lse_low": by_row}
    results |= {"out_low": place} if row_terms.keeps_low(plan.options, operands) else {}
    return Result(**split.over(plan.pieces, of_part, arrays, axes, results))


def gradients(
    plan: Plan, run: Callable[..., dict[str, Any]], residuals: Residuals, dout: Any, dlse: Any
) -> dict[str, Any]:
    """The gradients that `run` gives over all parts, in the accumulator's dtype, by name."""
    assert plan.pieces is not None  # else there are no parts
    operands, result, wanted = residuals
    arrays, axes = _divided(plan, operands)
    rows = operands.along("t")
    places = {name: split.place(operands.array(name), rows.get(name)) for name in wanted.names - {"mod_args"}}
    if "mod_args" in wanted.names:
        places["mod_args"] = split.SUM
    own = {"result": result, "dout": dout, "dlse": dlse}

    def of_part(index, arrays):
        saved, dout, dlse = (arrays.pop(name) for name in own)
        return run(plan, Residuals(_part(plan, index, arrays), saved, wanted), dout, dlse)

    axes |= dict.fromkeys(own, axes["query"])
    return split.over(plan.pieces, of_part, arrays | own, axes, places)


def tangent(
    plan: Plan, run: Callable[..., Any], operands: Operands, result: Result, tangents: Operands
) -> tuple[Any, Any]:
    """The two sums that `run` gives, over all parts; `tangents` are divided as the operands are."""
    assert plan.pieces is not None  # else there are no parts
    arrays, axes = _divided(plan, with_whole_keys(operands))
    along = _with_gathered_keys(plan, with_whole_keys(tangents))
    place = split.place(operands.query, axes["query"])
    places = {"total": place, "mu": place._replace(spec=place.spec[:-1])}

    def of_part(index, arrays):
        result, along = arrays.pop("result"), Operands(**arrays.pop("along"))
        found = run(plan, _part(plan, index, arrays), result, along)
        return dict(zip(places, found, strict=True))

    arrays |= {"result": result, "along": along._asdict()}
    nothing = dict.fromkeys(along._fields)
    axes |= {"result": axes["query"], "along": nothing | along.axes(along.along("t"))}
    found = split.over(plan.pieces, of_part, arrays, axes, places)
    return found["total"], found["mu"]


def _with_gathered_keys(plan: Plan, operands: Operands) -> Operands:
    """`operands` with all keys on every device of an Auto mesh, where types do not tell where they lie."""
    if plan.pieces is None or plan.pieces.mesh_axes:
        return operands
    keys = operands.along("s")
    whole = {name: gathered(operands.array(name), axis, operands.query) for name, axis in keys.items()}
    return operands.with_arrays(whole)


def _divided(plan: Plan, operands: Operands) -> tuple[dict[str, Any], dict[str, Any]]:
    """The operands by name, and which of their axes is that of the queries."""
    query, batch_rank = operands.query, operands.query.ndim - 3
    operands = _with_gathered_keys(plan, operands)
    axes = operands.axes(operands.along("t"))
    if operands.mask.batch_number is not None:  # each device has its own
        numbers = {"batch_number": tuple(range(batch_rank)), "head_number": (-2,)}
        operands = operands.with_arrays(
            {name: reshard_like(operands.array(name), query, along) for name, along in numbers.items()}
        )
    if operands.dropout_words is not None:
        offset = split.dropout_indices(operands.dropout_offset, query, batch_rank, head=-2, row=-3)
        operands = operands._replace(dropout_offset=offset)
        axes["dropout_offset"] = type(offset)(None, None, 0, None)
    return operands._asdict(), axes


def _part(plan: Plan, index: Any, arrays: dict[str, Any]) -> Operands:
    """The operands of part `index`, which know where its queries lie if that matters."""
    part = Operands(**arrays)
    mask = part.mask
    reads_rows = mask.is_banded or mask.mask_mod is not None or plan.options.score_mod is not None
    if mask.query_seq_lengths is None and not (reads_rows and mask.query_positions is None):
        return part
    assert plan.pieces is not None  # else there are no parts
    origins = plan.pieces.origins(index, part.query.shape[-3])
    return part._replace(mask=mask.replace(query_origin=origins))


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
