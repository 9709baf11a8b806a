"""Ring attention: keys and values travel once around the devices, queries stay.

Device i holds the queries of block i. At step s it holds keys and values of block j = i - s, and computes
their attention, (out_s, lse_s), while they are already on their way to device i + 1:

    m'   = max(m, lse_s)                                                                        (1)
    l'   = l  exp(m - m') + exp(lse_s - m')                                                     (2)
    acc' = acc exp(m - m') + exp(lse_s - m') out_s                                              (3)
    at the end   out = acc / l,   lse = m + log l                                               (4)

the online softmax of `ops/dot_product/online_softmax.py` with a block in the place of a tile; a sink starts a
row at m = sink, l = 1.

Backward. A gradient of dense attention is a sum over pairs of a query and a key, given lse and delta of the
**whole** row (equations (5) to (11) of `ops/dot_product/backward.py`). So with (out, lse) of (4), each pair
of blocks gives its part:

    dq_i = sum_j part(i, j)   stays with the queries, as does the gradient of a bias by rows    (5)
    dk_j, dv_j = sum_i part(i, j)   travel with keys and values                                 (6)
    dsink = - sum_t exp(sink - lse_t) delta_t   of the whole row at once                        (7)

The sums of (6) cannot leave before this step's part is in them. What travels while a step computes is thus
the sum of all steps **before**: it arrives from device i - 1 with the parts of this block's keys so far, and
this step's part is added then. One hop more brings the finished sums home.

Tangents. With the lse of (4) the sums of a tangent, too, are sums over blocks of keys: for (12) to (17) of
`ops/dot_product/tangent.py` and (out, lse) of (4),

    a_i  = sum_j sum_s Z_ts p_ts (dlogits_ts v_s + dv_s),   b_i = sum_j sum_s p_ts dlogits_ts   (8)
    at the end   mu = b + p_t0 dsink,   dout = a - mu out,   dlse = mu                          (9)

where s runs over the keys of block j. So a second turn around the ring, in which the tangents of keys and
values travel beside them, gives dout and dlse; a tangent that is zero does not travel.

A step whose keys no query sees is skipped, in all of them: positions, segments and functions tell while it
runs. Steps beyond a window are not made at all.

References:
  Liu et al., Ring attention with blockwise transformers, 2023, arXiv:2310.01889: (1) to (4).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn_bwd._core import trees
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.sharding import full_like_operands
from jax_attn_bwd.ops.dot_product import blockwise, mod_functions, visibility
from jax_attn_bwd.ops.dot_product import online_softmax as online
from jax_attn_bwd.ops.dot_product.layout import put_part, take_part
from jax_attn_bwd.ops.dot_product.spec import AXES, Operands, Residuals, Result
from jax_attn_bwd.parallel.arguments import Exchange

Moving = dict[str, jax.Array]  # what belongs to the keys, by operand


def sequence_axis(name: str) -> int:
    """Returns the axis of keys in what belongs to them, counted from the end."""
    letters = AXES.get(name, "s")  # the columns of dropout have one axis
    return letters.index("s") - len(letters)


def of_keys(exchange: Exchange, operands: Operands) -> Moving:
    """Returns the operands that belong to the keys; "column" are their places in the dropout mask."""
    names = [name for name, letters in AXES.items() if letters[:1] == "s"]  # whatever their sizes
    found = {name: operands.array(name) for name in (*names, *exchange.of_keys)}
    found["column"] = operands.dropout_offset and operands.dropout_offset.column
    return {name: x for name, x in found.items() if x is not None}


def with_keys(operands: Operands, moving: Moving) -> Operands:
    """Puts what `of_keys` gave back into `operands`; no sink, which belongs to whole rows."""
    arrays: dict[str, Any] = {"sink": None, **moving}
    column, offset = arrays.pop("column", None), operands.dropout_offset
    operands = operands.with_arrays(arrays)
    return operands if offset is None else operands._replace(dropout_offset=offset._replace(column=column))


def example(exchange: Exchange, operands: Operands) -> Operands:
    """Returns one step's block, from which an implementation is chosen."""
    return _block_of(exchange, operands, of_keys(exchange, operands), 0)


def forward(exchange: Exchange, plan: blockwise.Plan, operands: Operands) -> Result:
    """Computes (1) to (4), on operands that all vary over the same axes."""

    def fold(state, moving, offset):
        given = _block_of(exchange, operands, moving, offset)

        def compute(state):  # (1) to (3)
            result = blockwise.forward(plan, given)
            return online.merged(state, result.widest_out(), result.lse, result.lse_rounding)

        return _if_seen(given, compute, lambda state: state, state)

    state = online.initial(operands.query, operands.value.shape[-1], operands.sink, operands)
    out, lse, rounding = online.finished(_around(exchange, fold, state, of_keys(exchange, operands)))  # (4)
    return Result(out.astype(operands.query.dtype), lse, rounding, out if plan.has_wide_out else None)


def tangent(
    exchange: Exchange, plan: blockwise.Plan, operands: Operands, result: Result, tangents: Operands
) -> tuple[jax.Array, jax.Array]:
    """Computes (8), with the sink in mu, of the tangents that are not None; all vary over the same axes."""

    def fold(sums, moving, offset):
        keys, moving_tangents = moving
        given = _block_of(exchange, operands, keys, offset)
        block = _block_of(exchange, tangents, moving_tangents, offset, keys["key"].shape[-3])
        add = lambda sums: jax.tree.map(jnp.add, sums, blockwise.tangent_sums(plan, given, result, block))
        return _if_seen(given, add, lambda sums: sums, sums)

    mu = full_like_operands(result.lse, result.lse.shape, 0, result.lse.dtype, (operands, tangents, result))
    total = jnp.broadcast_to(mu[..., None], result.out.shape)
    if tangents.sink is not None:
        assert operands.sink is not None  # it has a tangent
        mu = mu + blockwise.tangent_of_sink(operands.sink, result, tangents.sink)
    return _around(exchange, fold, (total, mu), (of_keys(exchange, operands), of_keys(exchange, tangents)))


def _around(exchange: Exchange, fold: Any, state: Any, mine: Any) -> Any:
    """Folds `fold(state, what has come, offset)` over every step; `mine` sets out from here."""

    def step(carry, offset):
        state, moving = carry
        coming = _shifted(exchange, moving, 1)  # on its way while this step computes
        return (fold(state, moving, offset), coming), None

    offsets = np.asarray(exchange.offsets, np.int32)
    moving = _shifted(exchange, mine, exchange.offsets[0])
    if len(offsets) > 1:
        (state, moving), _ = lax.scan(step, (state, moving), offsets[:-1])
    return fold(state, moving, offsets[-1])


def backward(
    exchange: Exchange, plan: blockwise.Plan, residuals: Residuals, dout: jax.Array, dlse: Any
) -> dict[str, jax.Array]:
    """Computes (5) and (6): the gradients wanted of query, key, value and bias, in a wide type."""
    # sums in a wide type: those of the queries stay, those of the keys go around with them
    operands, result, wanted = residuals
    mine = of_keys(exchange, operands)
    dtype = accumulator_dtype(operands.query.dtype)
    zero = lambda x: full_like_operands(x, x.shape, 0, dtype, (operands, dout))
    floats = {name: trees.floats(getattr(operands, name)) for name in sorted(wanted.names)}
    zeros = {name: jax.tree.map(zero, x) for name, x in floats.items()}
    stay = {name: x for name, x in zeros.items() if name not in mine}
    go = {name: x for name, x in zeros.items() if name in mine}

    def part(stay, moving, offset):
        """Returns (what stays, with this step's part; this step's part of what goes on)."""
        given = _block_of(exchange, operands, moving, offset)

        def compute(stay):
            parts = blockwise.backward(plan, given, result, wanted.names, dout, dlse)
            stay = {name: _added(exchange, name, x, getattr(parts, name), offset) for name, x in stay.items()}
            return stay, {name: getattr(parts, name) for name in go}

        nothing = lambda stay: (stay, {name: jnp.zeros_like(moving[name]) for name in go})
        return _if_seen(given, compute, nothing, stay)

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


def _shifted(exchange: Exchange, moving: Any, hops: int) -> Any:
    """Sends what each device holds to the device `hops` further."""
    n = exchange.size
    if hops % n == 0:
        return moving
    return lax.ppermute(moving, exchange.axis_name, [(i, (i + hops) % n) for i in range(n)])


def _columns(exchange: Exchange, operand: str, x: jax.Array, S: int, offset: Any) -> dict | None:
    """Tells where the keys of device i - `offset` stand in a plane of all columns; None = everywhere."""
    if operand in exchange.of_keys or x.shape[-1] == 1:
        return None
    n = exchange.size
    device = lax.rem(lax.axis_index(exchange.axis_name) - offset + n, np.int32(n))
    return {-1: (device * S, S)}


def _block_of(
    exchange: Exchange, operands: Operands, moving: Moving, offset: Any, S: int | None = None
) -> Operands:
    """Joins `operands` (or tangents, with S keys) and the keys of device i - `offset`."""
    given, S = with_keys(operands, moving), moving["key"].shape[-3] if S is None else S

    def cut(name):
        x = given.array(name)
        columns = None if x is None else _columns(exchange, name, x, S, offset)
        return x if columns is None else take_part(x, columns)

    return given.with_arrays({"bias": cut("bias"), "elements": cut("elements")})


def _added(exchange: Exchange, operand: str, total: Any, part: Any, offset: Any) -> Any:
    if operand == "mod_args":
        return jax.tree.map(jnp.add, total, part)
    part = part.astype(total.dtype)
    if total.shape == part.shape:
        return total + part
    columns = _columns(exchange, operand, total, part.shape[-1], offset)
    assert columns is not None  # the bias holds all columns
    return put_part(total, take_part(total, columns) + part, columns)


def _if_seen(given: Operands, compute: Any, skip: Any, carry: Any) -> Any:
    """Runs `compute(carry)`, or `skip(carry)` where positions and segments tell that nothing is seen."""
    mask, (batch, T, S, _, G) = given.mask, given.sizes
    rows = visibility.Tokens(T, mask.query_positions, mask.query_segment_ids)
    columns = visibility.Tokens(S, mask.key_value_positions, mask.key_value_segment_ids)
    if 0 in (T, S) or all(x is None for x in (*rows[1:], *columns[1:])):
        return compute(carry)
    places = mod_functions.places(mask, len(batch), G)
    some, _ = visibility.of_tiles(mask.rules, rows, columns, T, S, places)
    return lax.cond(some.any(), compute, skip, carry)
