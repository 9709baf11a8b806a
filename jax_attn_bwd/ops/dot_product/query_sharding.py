"""The portable path where queries or keys may lie on several devices: part of the queries by part.

A part is a block of queries that attends to all keys: its rows of the output are those of the whole, and the
gradients of keys and values are sums over the parts. Keys and values are gathered once before the loop over
the tiles of a part, and their gradients summed once after it. `_core/split.py` runs the parts.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import pallas, split
from jax_attn_bwd._core.sharding import auto_devices, explicit_spec, gathered, reshard_like, unsharded
from jax_attn_bwd._core.split import Pieces
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


def _cut(options: Options, operands: Operands) -> Pieces | None:
    """How the queries are cut; None = they need not be."""
    query = operands.query
    if explicit_spec(query)[-3] is None and (
        auto_devices(query) == 1 or Tiling.default_for(options, operands).is_materialized
    ):
        return None
    return split.of_rows(query, query.ndim - 3, math.prod(query.shape[:-3]))


def _with_whole_keys(operands: Operands) -> Operands:
    """`operands` with all keys on every device, as far as types tell."""
    whole: Any = {name: unsharded(getattr(operands, name), -3) for name in ("key", "value")}
    return operands._replace(**whole)


@partial(jax.jit, static_argnums=(0, 1))
def _forward(options: Options, cut: Pieces, operands: Operands) -> Result:
    arrays, axes = _divided(cut, operands)
    place = split.place(operands.query, axes["query"])
    by_row = place._replace(spec=place.spec[:-1])

    def of_part(index, arrays):
        found = _of_part((options, cut.in_step), _part(options, index, arrays))
        return {name: x for name, x in found._asdict().items() if x is not None}

    results = {"out": place, "lse": by_row, "lse_low": by_row}
    results |= {"out_low": place} if row_terms.keeps_low(options, operands) else {}
    return Result(**split.over(cut, of_part, arrays, axes, results))


@partial(jax.jit, static_argnums=(0, 1))
def _backward(options: Options, cut: Pieces, residuals: Residuals, dout: Any, dlse: Any) -> dict[str, Any]:
    """The gradients in the accumulator's dtype, by name."""
    operands, result, wanted = residuals
    arrays, axes = _divided(cut, operands)
    results = {
        name: split.place(getattr(operands, name), axes.get(name)) for name in wanted.names - {"mod_args"}
    }
    if "mod_args" in wanted.names:
        results["mod_args"] = split.SUM

    def of_part(index, arrays):
        saved, dout, dlse = (arrays.pop(name) for name in own)
        part = _part(options, index, arrays)
        tiling = Tiling.default_for(options, part, cut.in_step)
        return portable_backward.gradients(options, tiling, Residuals(part, saved, wanted), dout, dlse)

    own = {"result": result, "dout": dout, "dlse": dlse}
    axes |= dict.fromkeys(own, axes["query"])
    return split.over(cut, of_part, arrays | own, axes, results)


def _divided(cut: Pieces, operands: Operands) -> tuple[dict[str, Any], dict[str, Any]]:
    """The operands by name, and which of their axes is that of the queries."""
    arrays = operands._asdict()
    if not cut.mesh_axes:
        for name, axis in _KEYS.items():
            if (x := arrays[name]) is not None and x.shape[-axis] != 1:
                arrays[name] = gathered(x, x.ndim - axis)
    axes: dict[str, Any] = {
        name: x.ndim - axis
        for name, axis in _QUERIES.items()
        for x in [arrays[name]]
        if x is not None and x.shape[-axis] != 1
    }
    query, batch_rank = operands.query, operands.query.ndim - 3
    if operands.mod_batch is not None and operands.mod_heads is not None:  # each device has its own
        arrays["mod_batch"] = reshard_like(operands.mod_batch, query, tuple(range(batch_rank)))
        arrays["mod_heads"] = reshard_like(operands.mod_heads, query, (-2,))
    if operands.dropout_words is not None:
        offset = split.dropout_indices(operands.dropout_offset, query, batch_rank, head=-2, row=-3)
        arrays["dropout_offset"] = offset
        axes["dropout_offset"] = type(offset)(None, None, 0, None)
    return arrays, axes


def _part(options: Options, index: Any, arrays: dict[str, Any]) -> Operands:
    """The operands of part `index`, which know where its queries begin if that matters."""
    part = Operands(**arrays)
    is_banded = options.is_causal or options.window is not None
    reads_rows = is_banded or options.mask_mod is not None or options.score_mod is not None
    if part.query_seq_lengths is not None or (reads_rows and part.query_positions is None):
        part = part._replace(query_origin=jnp.int32(index) * part.query.shape[-3])
    return part
