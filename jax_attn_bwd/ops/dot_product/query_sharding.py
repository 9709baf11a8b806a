"""The portable path where queries or keys may lie on several devices: part of the queries by part.

A part is a block of queries that attends to all keys: its rows of the output are those of the whole, and the
gradients of keys and values are sums over the parts. Keys and values are gathered once before the loop over
the tiles of a part, and their gradients summed once after it. `_core/row_sharding.py` tells how parts lie on
devices.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import dropout, pallas, row_sharding
from jax_attn_bwd._core.row_sharding import Cut
from jax_attn_bwd._core.sharding import explicit_spec, reshard_like, unsharded
from jax_attn_bwd.ops.dot_product import backward as portable_backward
from jax_attn_bwd.ops.dot_product import forward as portable_forward
from jax_attn_bwd.ops.dot_product import row_terms
from jax_attn_bwd.ops.dot_product.spec import DotProductAttentionGrads, Operands, Options, Residuals, Result
from jax_attn_bwd.ops.dot_product.tiling import Tiling

# The axes of queries and of keys, counted from the end; those of size 1 broadcast.
_QUERIES = {"query": 3, "bias": 2, "mask": 2, "query_segment_ids": 1, "query_positions": 1}
_KEYS = {"key": 3, "value": 3, "bias": 1, "mask": 1, "key_value_segment_ids": 1, "key_value_positions": 1}


def _tiled(static: tuple[Options, int], operands: Operands) -> Result:
    options, count = static
    return portable_forward.tiled(options, Tiling.default_for(options, operands, count), operands)


# Opaque as a kernel's: a checkpoint policy that saves products would save those of every tile, T x S numbers.
_of_all = pallas.with_portable_jvp(portable_forward.forward, portable_forward.forward)
_of_part = pallas.with_portable_jvp(_tiled, _tiled)


def forward(options: Options, operands: Operands) -> Result:
    """As `forward.forward`, wherever the sequences lie."""
    cut, operands = _cut(options, operands), _with_whole_keys(operands)
    return _of_all(options, operands) if cut is None else _forward(options, cut, operands)


def backward(options: Options, residuals: Residuals, dout: Any, dlse: Any) -> DotProductAttentionGrads:
    """As `backward.backward`, wherever the sequences lie."""
    given = residuals.operands
    cut, residuals = _cut(options, given), residuals._replace(operands=_with_whole_keys(given))
    if cut is None:
        found = portable_backward.backward(options, residuals, dout, dlse)._asdict()
        grads = {name: found[name] for name in residuals.wanted.names}
    else:
        grads = _backward(options, cut, residuals, dout, dlse)
    return portable_backward.matched(grads, given)


def _cut(options: Options, operands: Operands) -> Cut | None:
    """How the queries are cut; None = they need not be."""
    query = operands.query
    if explicit_spec(query)[-3] is None and (
        row_sharding.auto_devices(query) == 1 or Tiling.default_for(options, operands).is_materialized
    ):
        return None
    return row_sharding.cut(query, query.ndim - 3, math.prod(query.shape[:-3]))


def _with_whole_keys(operands: Operands) -> Operands:
    """`operands` with all keys on every device, as far as types tell."""
    whole: Any = {name: unsharded(getattr(operands, name), -3) for name in ("key", "value")}
    return operands._replace(**whole)


@partial(jax.jit, static_argnums=(0, 1))
def _forward(options: Options, cut: Cut, operands: Operands) -> Result:
    rows, axes, shared = _divided(cut, operands)
    place = row_sharding.place(operands.query, axes["query"])
    by_row = place._replace(spec=place.spec[:-1])

    def of_part(index, rows, shared):
        found = _of_part((options, cut.in_step), _part(options, operands, index, rows, shared))
        return {name: x for name, x in found._asdict().items() if x is not None}

    results = {"out": place, "lse": by_row, "lse_low": by_row}
    results |= {"out_low": place} if row_terms.keeps_low(options, operands) else {}
    return Result(**row_sharding.over(cut, of_part, rows, shared, axes, results))


@partial(jax.jit, static_argnums=(0, 1))
def _backward(options: Options, cut: Cut, residuals: Residuals, dout: Any, dlse: Any) -> dict[str, Any]:
    """The gradients in the accumulator's dtype, by name."""
    operands, result, wanted = residuals
    rows, axes, shared = _divided(cut, operands)
    results = {
        name: row_sharding.place(getattr(operands, name), axes.get(name))
        for name in wanted.names - {"mod_args"}
    }
    if "mod_args" in wanted.names:
        results["mod_args"] = row_sharding.EVERYWHERE
    own = {"dout": dout, "dlse": dlse, **result._asdict()}
    own = {name: x for name, x in own.items() if x is not None}

    def of_part(index, rows, shared):
        part = _part(options, operands, index, rows, shared)
        saved = Result(*(rows.get(name) for name in Result._fields))
        tiling = Tiling.default_for(options, part, cut.in_step)
        cotangents = rows.get("dout"), rows.get("dlse")
        return portable_backward.gradients(options, tiling, Residuals(part, saved, wanted), *cotangents)

    axes |= dict.fromkeys(own, axes["query"])
    return row_sharding.over(cut, of_part, rows | own, shared, axes, results)


def _divided(cut: Cut, operands: Operands) -> tuple[dict[str, jax.Array], dict[str, int], Operands]:
    """(the operands that have the queries' axis, by name; which one it is; the others)."""
    if not cut.axes:
        keys = {name: getattr(operands, name) for name in _KEYS}
        of_keys = {name: x for name, x in keys.items() if x is not None and x.shape[-_KEYS[name]] != 1}
        whole: Any = {name: row_sharding.gathered(x, x.ndim - _KEYS[name]) for name, x in of_keys.items()}
        operands = operands._replace(**whole)
    given = {name: x for name in _QUERIES for x in [getattr(operands, name)] if x is not None}
    rows = {name: x for name, x in given.items() if x.shape[-_QUERIES[name]] != 1}
    axes = {name: x.ndim - _QUERIES[name] for name, x in rows.items()}
    taken: Any = dict.fromkeys(rows)
    shared = operands._replace(**taken)
    if operands.mod_batch is not None and operands.mod_heads is not None:  # each device has its own
        leading = tuple(range(operands.query.ndim - 3))
        shared = shared._replace(
            mod_batch=reshard_like(operands.mod_batch, operands.query, leading),
            mod_heads=reshard_like(operands.mod_heads, operands.query, (-2,)),
        )
    if operands.dropout_words is not None:
        offset = _places(operands)
        rows["dropout_rows"], axes["dropout_rows"] = offset.row, 0
        shared = shared._replace(dropout_offset=offset)
    return rows, axes, shared


def _places(operands: Operands) -> dropout.Offset:
    """The dropout's offset as index arrays, which shards of batch, heads and queries take along."""
    *batch, T, N, _ = operands.query.shape
    zero = jnp.uint32(0)
    offset = operands.dropout_offset or dropout.Offset(zero, zero, zero, zero)

    def index(n, start):
        return start if start.ndim else start + jnp.arange(n, dtype=jnp.uint32)

    entries = index(math.prod(batch), offset.batch).reshape(batch)
    return dropout.Offset(
        reshard_like(entries, operands.query, tuple(range(len(batch)))),
        reshard_like(index(N, offset.head), operands.query, (-2,)),
        index(T, offset.row),
        offset.column,
    )


def _part(options: Options, operands: Operands, index: Any, rows: dict[str, Any], shared: Any) -> Operands:
    """The operands of part `index`, which know where its queries begin if that matters."""
    part = shared._replace(**{name: rows[name] for name in _QUERIES if name in rows})
    is_banded = options.is_causal or options.window is not None
    reads_rows = is_banded or options.mask_mod is not None or options.score_mod is not None
    if operands.query_seq_lengths is not None or (reads_rows and operands.query_positions is None):
        part = part._replace(query_origin=jnp.int32(index) * part.query.shape[-3])
    if "dropout_rows" in rows:
        part = part._replace(dropout_offset=part.dropout_offset._replace(row=rows["dropout_rows"]))
    return part
