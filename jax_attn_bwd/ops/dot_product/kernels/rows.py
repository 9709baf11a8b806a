"""What the backward kernels of dense attention read of each query, on any platform, as XLA prepares it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import float_leaves
from jax_attn_bwd.ops.dot_product import layout, row_terms, visibility
from jax_attn_bwd.ops.dot_product.spec import DotProductAttentionGrads, KernelOptions, Operands, Residuals


class RowValues(NamedTuple):
    """What the backward kernels read of each query; equation numbers are those of `backward.py`."""

    query: jax.Array  # [..., T, N, H], 0 in rows that see nothing
    dout: jax.Array  # [..., T, N, Hv], likewise
    lse: jax.Array  # [..., T, N], inf in rows that see nothing: their p is 0
    low: jax.Array  # [..., T, N]
    delta: jax.Array  # [..., T, N]
    dsink: jax.Array | None  # the gradient of the sink (9), if it is wanted


def row_values(options: KernelOptions, residuals: Residuals, dout: Any, dlse: Any) -> RowValues:
    """`RowValues` from what the forward left, and the cotangents."""
    operands, (out, lse, low, _) = residuals.operands, residuals.result
    query = operands.query
    dout = whole = jnp.zeros_like(out) if dout is None else dout
    empty = None
    if _rows_may_be_empty(options, operands):
        # A row that attends to nothing may hold anything in q and dout. If out = 0 it has no key elsewhere.
        empty = lse == -jnp.inf
        if operands.sink is not None:
            empty = _sees_nothing(options, operands, lse)
        whole = jnp.where((empty & (out == 0).all(-1))[..., None], 0, dout)
        dout, query = (jnp.where(empty[..., None], 0, x) for x in (dout, query))
    delta, dsink = row_terms.delta(options, operands, residuals.result, whole, dlse), None
    if "sink" in residuals.wanted.names:
        assert operands.sink is not None  # its gradient is asked for
        dsink = row_terms.gradient_of_sink(operands.sink, residuals.result, delta)
    low = jnp.zeros_like(lse) if low is None else low
    lse = lse if empty is None else jnp.where(empty, jnp.inf, lse)
    return RowValues(query, dout, lse, low, delta, dsink)


def out_specs(residuals: Residuals) -> Callable[..., DotProductAttentionGrads]:
    """From the specs of residuals like these, and of what else is given, to those of the gradients."""

    def of(specs: Residuals, *_: Any) -> DotProductAttentionGrads:
        found = {name: getattr(specs.operands, name) for name in residuals.wanted.names}
        if "mod_args" in found:
            numbers = float_leaves.floats(residuals.operands.mod_args)
            found["mod_args"] = float_leaves.over_floats(lambda _, spec: spec, numbers, found["mod_args"])
        return DotProductAttentionGrads(**found)

    return of


def empty_rows(options: KernelOptions, operands: Operands, lse: jax.Array) -> jax.Array | None:
    """Which queries see no key, `[..., T, N]`; None where none can be without one."""
    return _sees_nothing(options, operands, lse) if _rows_may_be_empty(options, operands) else None


def _sees_nothing(options: KernelOptions, operands: Operands, lse: jax.Array) -> jax.Array:
    """Which queries see no key, `[..., T, N]`; lse does not tell: with a large sink it is the sink anyway."""
    live, _ = visibility.live_and_seen_of(operands)
    if live is None:
        return jnp.zeros_like(lse, bool)
    groups = operands.query.shape[-2] // operands.key.shape[-2]
    return ~layout.merge_rows(jnp.broadcast_to(live, layout.split_rows(lse, groups).shape))


def _rows_may_be_empty(options: KernelOptions, operands: Operands) -> bool:
    """Whether a query may see no key: without need, q and dout are not copied."""
    mask = operands.mask
    if operands.bias is not None or options.score_mod is not None:  # which may give -inf
        return True
    if mask.has_positions or mask.has("elements", "query_segment_ids", "window"):
        return True
    if mask.has("query_seq_lengths", "key_value_seq_lengths"):
        return True
    return mask.mask_mod is not None and not visibility.every_query_sees(options, operands)
