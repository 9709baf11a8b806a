"""Ulysses attention: tokens are exchanged for heads, and each device attends to the whole sequence.

    [..., T, N, H] of n devices  --all-to-all-->  [..., n * T, N / n, H]

The exchange is linear and its own inverse, so its gradient is the exchange back, and a tangent takes the way
of its argument; between the two stands `dot_product_attention`, whose rules are written. What is small, ids
and positions, is gathered.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn_bwd._core import checks
from jax_attn_bwd._core.sharding import vary_over
from jax_attn_bwd.ops.dot_product import dot_product_attention
from jax_attn_bwd.parallel.arguments import Exchange, beginning_at, prepare, whole_rows


def attend(
    operator: str, query, key, value, bias, mask, *, sink, query_seq_lengths, key_value_seq_lengths,
    query_segment_ids, key_value_segment_ids, query_positions, dropout_key, return_residual, forward_mode,
    implementation, **arguments: Any,
) -> Any:  # fmt: skip
    """Computes what `ulysses_attention` returns."""
    # Everything but mask and bias is checked here, where each device holds its own tokens.
    exchange, options, operands = prepare(
        operator, query, key, value, None, None, sink=sink, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids, query_positions=query_positions, dropout_key=dropout_key,
        **arguments,
    )  # fmt: skip
    n, (T, N), (S, K) = exchange.size, operands.query.shape[-3:-1], operands.key.shape[-3:-1]
    if K % n:
        expected = f"be a multiple of the {n} devices along {exchange.axis_name!r}"
        remedy = "use ring_attention, whose heads stay together"
        raise ValueError(checks.message(operator, "key heads K", expected, K, remedy))
    # Mask and bias go to the heads of this device, with all rows and columns.
    planes: dict[str, Any] = {"bias": bias, "mask": mask}
    for name, x in planes.items():
        if x is not None:
            x = checks.floating(operator, name, x) if name == "bias" else checks.boolean_mask(operator, x)
            planes[name] = _plane(operator, name, exchange, x, T, S)

    ids: tuple[Any, Any] = query_segment_ids, key_value_segment_ids
    lengths: tuple[Any, Any] = query_seq_lengths, key_value_seq_lengths
    positions: tuple[Any, Any] = None, None
    # Positions tell the index of a token, and with it who lies beyond a length.
    if query_positions is not None or arguments["layout"] != "contiguous":
        own = operands.mask
        ids, lengths = (own.query_segment_ids, own.key_value_segment_ids), (None, None)
        positions = own.query_positions, own.key_value_positions
    # Dropout and functions count heads from the first of all devices.
    first_head = lax.axis_index(exchange.axis_name) * (N // n)
    offset: Any = operands.dropout_offset
    if offset is not None:
        first = first_head.astype(jnp.uint32)
        row, column = _whole(exchange, offset.row, T), _whole(exchange, offset.column, S)
        offset = (offset.batch, offset.head + first, row, column)
    functions = operands.mask.mask_mod, options.score_mod, operands.mod_args
    # Tokens are exchanged for heads, and each device attends to whole sequences.
    q, k, v = (_exchanged(exchange, x, -2, -3) for x in (operands.query, operands.key, operands.value))
    out, lse = dot_product_attention(
        q,
        k,
        v,
        is_causal=operands.mask.is_causal,
        local_window_size=operands.mask.window,
        query_seq_lengths=lengths[0],
        key_value_seq_lengths=lengths[1],
        query_segment_ids=_whole(exchange, ids[0], T),
        key_value_segment_ids=_whole(exchange, ids[1], S),
        query_positions=_whole(exchange, positions[0], T),
        key_value_positions=_whole(exchange, positions[1], S),
        sink=None if sink is None else _own_heads(exchange, jnp.asarray(operands.sink), -1),
        dropout_key=dropout_key,
        dropout_offset=offset,
        return_residual=True,
        forward_mode=forward_mode,
        implementation=implementation,
        **(planes | vars(options) | beginning_at(0, first_head, *functions)),
    )
    # Heads are exchanged for tokens again.
    out = _exchanged(exchange, out, -3, -2)
    return (out, _exchanged(exchange, lse, -2, -1)) if return_residual else out


def _exchanged(exchange: Exchange, x: jax.Array, split: int, joined: int) -> jax.Array:
    """Shares the axis `split` of `x` among the devices, and puts the parts of its axis `joined` together."""
    axes = x.ndim + split, x.ndim + joined
    return lax.all_to_all(vary_over(x, {exchange.axis_name}), exchange.axis_name, *axes, tiled=True)


def _own_heads(exchange: Exchange, x: jax.Array, axis: int) -> jax.Array:
    size = x.shape[axis] // exchange.size
    return lax.dynamic_slice_in_dim(x, lax.axis_index(exchange.axis_name) * size, size, x.ndim + axis)


def _whole(exchange: Exchange, x: Any, length: int) -> jax.Array | None:
    """Gathers ids or positions `[..., length]` of all devices."""
    if x is None:
        return None
    x = jnp.asarray(x)
    return whole_rows(exchange.axis_name, jnp.broadcast_to(x, (*x.shape[:-1], length)))


def _plane(operator: str, argument: str, exchange: Exchange, x: jax.Array, T: int, S: int) -> jax.Array:
    """Returns a mask or bias of this device's heads, with all rows and columns."""
    n = exchange.size
    heads, rows, columns = (1, 1, 1, *x.shape)[-3:]
    by_rows = rows == T != 1 and n > 1
    of_keys = rows == 1 and columns == S
    if rows not in (1, T, T * n) or not (columns in (1, S * n) or of_keys) or (by_rows and heads == 1):
        expected = f"have all {T * n} rows and {S * n} columns"
        remedy = "or the rows of this device's queries for each head; else use ring_attention"
        raise ValueError(checks.message(operator, argument, expected, x.shape, remedy))
    if of_keys:
        x = whole_rows(exchange.axis_name, x)
    if by_rows:
        return _exchanged(exchange, x, -3, -2)
    return x if heads == 1 else _own_heads(exchange, x, -3)
