"""The portable path where queries lie on several devices.

A piece is a block of queries that attends to all keys: its rows of the output are those of the whole, and the
gradients of keys and values are sums over the pieces. Keys and values are gathered once before the loop over
the tiles of a piece, and their gradients summed once after it. `_core/split.py` runs the pieces; `spec.AXES`
tells which operands a piece has its own rows of. Under causality a piece is one early and one late stretch of
the queries, so that all have the same work (`plan.py`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from jax_attn_bwd._core import split
from jax_attn_bwd._core.dropout import Offset
from jax_attn_bwd._core.sharding import gathered, reshard_like
from jax_attn_bwd.ops.dot_product.plan import Plan
from jax_attn_bwd.ops.dot_product.spec import Operands, Result


def forward(plan: Plan, run: Callable[[Operands], Result], operands: Operands) -> Callable[[], Result]:
    """Returns the call that computes the result of `run` over all pieces."""
    operands, axes = _divided(plan, operands)
    spec = split.out_spec(operands.query, axes.query)
    by_row: Any = spec._replace(spec=spec.spec[:-1])
    specs: Any = spec, by_row, by_row, spec if plan.has_wide_out else None
    return _over_pieces(plan, run, (operands,), (axes,), Result(*specs))


def gradients(
    plan: Plan, run: Callable[..., dict[str, Any]], operands: Operands, names: frozenset[str], rows: Any
) -> Callable[[], dict[str, Any]]:
    """Returns the call that computes these gradients, of `run`, over all pieces, in the accumulator's dtype.

    `rows` are the result, dout and dlse, which `run` takes after the operands.
    """
    by_row = operands.arrays_with("t")
    specs = {name: split.out_spec(operands.array(name), by_row.get(name)) for name in names - {"mod_args"}}
    if "mod_args" in names:
        specs["mod_args"] = split.SUM
    operands, axes = _divided(plan, operands)
    return _over_pieces(plan, run, (operands, *rows), (axes, *(axes.query for _ in rows)), specs)


def tangent(
    plan: Plan, run: Callable[..., Any], operands: Operands, result: Result, tangents: Operands
) -> Callable[[], tuple[Any, Any]]:
    """Returns the call that computes the two sums of `run` over all pieces.

    `tangents` are divided as the operands are; those that are zero have no axes.
    """
    operands, axes = _divided(plan, operands)
    tangents = _with_gathered_keys(plan, tangents)
    spec = split.out_spec(operands.query, axes.query)
    specs = spec, spec._replace(spec=spec.spec[:-1])
    all_axes = axes, axes.query, tangents.axes(tangents.arrays_with("t"))
    return _over_pieces(plan, partial(run, plan), (operands, result, tangents), all_axes, specs)


def _over_pieces(
    plan: Plan, run: Callable[..., Any], arrays: Any, axes: Any, specs: Any
) -> Callable[[], Any]:
    """Returns the call that computes `run(operands, ...)` over all pieces."""
    assert plan.pieces is not None  # else there are no pieces
    of_piece = lambda operands, *others: run(_piece(plan, operands), *others)
    return split.over(plan.pieces, of_piece, arrays, axes, specs)


def _with_gathered_keys(plan: Plan, operands: Operands) -> Operands:
    """Gathers all keys on every device of an Auto mesh, where types do not tell where they lie."""
    if plan.pieces is None or plan.pieces.mesh_axes:
        return operands
    keys = operands.arrays_with("s")
    whole = {name: gathered(operands.array(name), axis, operands.query) for name, axis in keys.items()}
    return operands.with_arrays(whole)


def _divided(plan: Plan, operands: Operands) -> tuple[Operands, Any]:
    """Returns the operands, and which of their axes is that of the queries."""
    query, batch_rank = operands.query, operands.query.ndim - 3
    operands = _with_gathered_keys(plan, operands)
    axes: Any = operands.axes(operands.arrays_with("t"))

    # Numbers that functions and dropout read of batch entries and heads are each device's own.
    if operands.mask.batch_number is not None:
        numbers = {"batch_number": tuple(range(batch_rank)), "head_number": (-2,)}
        own = {name: reshard_like(operands.array(name), query, sharded) for name, sharded in numbers.items()}
        operands = operands.with_arrays(own)
    if operands.dropout_words is not None:
        offset = split.dropout_indices(operands.dropout_offset, query, batch_rank, head=-2, row=-3)
        operands = operands._replace(dropout_offset=offset)
        axes = axes._replace(dropout_offset=Offset(None, None, 0, None))
    return operands, axes


def _piece(plan: Plan, piece: Operands) -> Operands:
    """Returns the operands of a piece, which know where its queries lie if that matters."""
    mask = piece.mask
    reads_rows = mask.is_banded or mask.mask_mod is not None or plan.options.score_mod is not None
    if mask.query_seq_lengths is None and not (reads_rows and mask.query_positions is None):
        return piece
    assert plan.pieces is not None  # else there are no pieces
    origins = plan.pieces.origins(plan.pieces.index(), piece.query.shape[-3])
    return piece._replace(mask=mask.replace(query_origin=origins))
