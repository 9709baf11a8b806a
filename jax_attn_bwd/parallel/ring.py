"""Ring attention: keys and values travel once around the devices, queries stay.

Device i holds the queries of block i. At step s it holds keys and values of block j = i - s, and computes
their attention, (out_s, lse_s), while they are already on their way to device i + 1:

    m'   = max(m, lse_s)                                                                        (1)
    l'   = l  exp(m - m') + exp(lse_s - m')                                                     (2)
    acc' = acc exp(m - m') + exp(lse_s - m') out_s                                              (3)
    at the end   out = acc / l,   lse = m + log l                                               (4)

the online softmax of `ops/dot_product/forward.py` with a block in the place of a tile; a sink starts a row at
m = sink, l = 1.

Backward. A gradient of dense attention is a sum over pairs of a query and a key, given lse and delta of the
**whole** row (equations (5) to (11) of `ops/dot_product/backward.py`). So with (out, lse) of (4), each pair
of blocks gives its part:

    dq_i = sum_j part(i, j)   stays with the queries, as does the gradient of a bias by rows    (5)
    dk_j, dv_j = sum_i part(i, j)   travel with keys and values                                 (6)
    dsink = - sum_t exp(sink - lse_t) delta_t   of the whole row at once                        (7)

The sums of (6) cannot leave before this step's part is in them. What travels while a step computes is thus
the sum of all steps **before**: it arrives from device i - 1 with the parts of this block's keys so far, and
this step's part is added then. One hop more brings the finished sums home.

A step whose keys no query sees is skipped, in both directions: positions and segments tell.

References:
  Liu et al., Ring attention with blockwise transformers, 2023, arXiv:2310.01889: (1) to (4).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import float_leaves
from jax_attn_bwd._core.numerics import accumulator_dtype, finite, to_rank
from jax_attn_bwd._core.sharding import full_like_operands
from jax_attn_bwd._core.slicing import put_at, take_at
from jax_attn_bwd.ops.dot_product import engine, masking, mod_functions
from jax_attn_bwd.ops.dot_product.spec import Operands, Options, Result
from jax_attn_bwd.parallel.arguments import Exchange

Moving = dict[str, jax.Array]  # what belongs to the keys, by operand


class State(NamedTuple):
    """Running state of every query row."""

    acc: jax.Array  # [..., T, N, Hv]
    m: jax.Array  # [..., T, N]
    l: jax.Array  # [..., T, N]


def sequence_axis(name: str) -> int:
    """The axis of the keys in an operand that belongs to them."""
    return -3 if name in ("key", "value") else -1


def of_keys(exchange: Exchange, operands: Operands) -> Moving:
    """The operands that belong to the keys; "column" are their places in the dropout mask."""
    names = ("key", "value", "key_value_segment_ids", "key_value_positions", *exchange.of_keys)
    found = {name: getattr(operands, name) for name in names}
    found["column"] = operands.dropout_offset and operands.dropout_offset.column
    return {name: x for name, x in found.items() if x is not None}


def with_keys(operands: Operands, moving: Moving) -> Operands:
    """`operands` with those that `of_keys` gave replaced; no sink, which belongs to whole rows."""
    given: dict[str, Any] = {"sink": None, **moving}
    if operands.dropout_offset is not None:
        given["dropout_offset"] = operands.dropout_offset._replace(column=given.pop("column"))
    return operands._replace(**given)


def example(exchange: Exchange, operands: Operands) -> Operands:
    """One step's block, from which an implementation is chosen."""
    return _block_of(exchange, operands, of_keys(exchange, operands), 0)


def forward(exchange: Exchange, implementation: str, options: Options, operands: Operands) -> Result:
    """(1) to (4), on operands that all vary over the same axes."""

    def fold(state, moving, offset):
        given = _block_of(exchange, operands, moving, offset)
        compute = lambda state: _merged(state, engine.forward(implementation, options, given))
        return _if_seen(options, given, compute, lambda state: state, state)

    def step(carry, offset):
        state, moving = carry
        coming = _shifted(exchange, moving, 1)  # on its way while this step computes
        return (fold(state, moving, offset), coming), None

    offsets = np.asarray(exchange.offsets, np.int32)
    state = _initial(operands)
    moving = _shifted(exchange, of_keys(exchange, operands), exchange.offsets[0])
    if len(offsets) > 1:
        (state, moving), _ = lax.scan(step, (state, moving), offsets[:-1])
    return _finished(fold(state, moving, offsets[-1]), options, operands)


def backward(
    exchange: Exchange,
    implementation: str,
    options: Options,
    operands: Operands,
    result: Result,
    wanted: frozenset[str],
    dout: jax.Array,
    dlse: Any,
) -> dict[str, jax.Array]:
    """(5) and (6): the gradients of those of query, key, value and bias that are `wanted`, in a wide type."""
    mine = of_keys(exchange, operands)
    dtype = accumulator_dtype(operands.query.dtype)
    zero = lambda x: full_like_operands(x, x.shape, 0, dtype, (operands, dout))
    zeros = {name: jax.tree.map(zero, float_leaves.floats(getattr(operands, name))) for name in wanted}
    stay = {name: x for name, x in zeros.items() if name not in mine}
    go = {name: x for name, x in zeros.items() if name in mine}

    def part(stay, moving, offset):
        """(what stays, with this step's part; this step's part of what goes on)."""
        given = _block_of(exchange, operands, moving, offset)

        def compute(stay):
            parts = engine.backward(implementation, options, given, result, wanted, dout, dlse)
            stay = {name: _added(exchange, name, x, getattr(parts, name), offset) for name, x in stay.items()}
            return stay, {name: getattr(parts, name) for name in go}

        nothing = lambda stay: (stay, {name: jnp.zeros_like(moving[name]) for name in go})
        return _if_seen(options, given, compute, nothing, stay)

    def plus(go, parts):
        return {name: x + parts[name].astype(x.dtype) for name, x in go.items()}

    def step(carry, offset):
        moving, stay, go = carry
        coming, go = _shifted(exchange, moving, 1), _shifted(exchange, go, 1)
        stay, parts = part(stay, moving, offset)
        return (coming, stay, plus(go, parts)), None  # not until then has `go` to be there

    # The first keys are attended to while the next are on their way; in the end gradients go home.
    first, *rest = exchange.offsets
    moving = _shifted(exchange, mine, first)
    coming = _shifted(exchange, moving, 1) if rest else moving
    stay, parts = part(stay, moving, np.int32(first))
    go = plus(go, parts)
    if rest:
        (_, stay, go), _ = lax.scan(step, (coming, stay, go), np.asarray(rest, np.int32))
    return stay | _shifted(exchange, go, -exchange.offsets[-1])


def _shifted(exchange: Exchange, moving: Moving, hops: int) -> Moving:
    """What each device holds, on the device `hops` further."""
    n = exchange.size
    if hops % n == 0:
        return moving
    return lax.ppermute(moving, exchange.axis_name, [(i, (i + hops) % n) for i in range(n)])


def _columns(exchange: Exchange, operand: str, x: jax.Array, S: int, offset: Any) -> dict | None:
    """Where the keys of device i - `offset` stand in a mask or bias of all columns; None = everywhere."""
    if operand in exchange.of_keys or x.shape[-1] == 1:
        return None
    n = exchange.size
    return {-1: (lax.rem(lax.axis_index(exchange.axis_name) - offset + n, np.int32(n)), S)}


def _block_of(exchange: Exchange, operands: Operands, moving: Moving, offset: Any) -> Operands:
    given, S = with_keys(operands, moving), moving["key"].shape[-3]

    def cut(name):
        x = getattr(given, name)
        columns = None if x is None else _columns(exchange, name, x, S, offset)
        return x if columns is None else take_at(x, columns)

    return given._replace(bias=cut("bias"), mask=cut("mask"))


def _added(exchange: Exchange, operand: str, total: Any, part: Any, offset: Any) -> Any:
    if operand == "mod_args":
        return jax.tree.map(jnp.add, total, part)
    part = part.astype(total.dtype)
    if total.shape == part.shape:
        return total + part
    columns = _columns(exchange, operand, total, part.shape[-1], offset)
    assert columns is not None  # the bias holds all columns
    return put_at(total, take_at(total, columns) + part, columns)


def _if_seen(options: Options, given: Operands, compute: Any, skip: Any, carry: Any) -> Any:
    """`compute(carry)`; `skip(carry)` where positions and segments tell that nothing is seen."""
    T, S = given.query.shape[-3], given.key.shape[-3]
    rows = masking.Tokens(T, given.query_positions, given.query_segment_ids)
    columns = masking.Tokens(S, given.key_value_positions, given.key_value_segment_ids)
    if 0 in (T, S) or all(x is None for x in (*rows[1:], *columns[1:])):
        return compute(carry)
    places = mod_functions.places(given, given.query.ndim - 3, given.query.shape[-2] // given.key.shape[-2])
    some, _ = masking.of_tiles(options, rows, columns, T, S, places)
    return lax.cond(some.any(), compute, skip, carry)


def _initial(operands: Operands) -> State:
    q, v = operands.query, operands.value
    dtype = accumulator_dtype(q.dtype)
    zero = full_like_operands(q[..., :1], (*q.shape[:-1], 1), 0, dtype, operands)
    acc, row = jnp.broadcast_to(zero, (*q.shape[:-1], v.shape[-1])), zero[..., 0]
    if operands.sink is None:
        return State(acc, row - jnp.inf, row)
    sink = row + to_rank(operands.sink.astype(dtype), row.ndim)
    m = lax.stop_gradient(sink)
    return State(acc, m, jnp.where(m == -jnp.inf, 0, jnp.exp(sink - finite(m))))


def _merged(state: State, result: Result) -> State:
    """(1) to (3)."""
    m = lax.stop_gradient(jnp.maximum(state.m, result.lse))
    shift = finite(m)
    low = 0 if result.lse_low is None else result.lse_low
    decay, share = jnp.exp(state.m - shift), jnp.exp((result.lse - shift) + low)
    acc = state.acc * decay[..., None] + share[..., None] * result.wide_out()
    return State(acc, m, state.l * decay + share)


def _finished(state: State, options: Options, operands: Operands) -> Result:
    """(4), with what rounding takes from lse."""
    empty = state.l == 0
    m, l = finite(state.m), jnp.where(empty, 1, state.l)
    log_l = jnp.log(l)
    lse = m + log_l
    low = lax.stop_gradient((m - lse) + log_l)
    out, out_low = engine.in_two(options, operands, state.acc / l[..., None])
    return Result(out, jnp.where(empty, -jnp.inf, lse), jnp.where(empty, 0, low), out_low)
