"""Backward of dense attention: derivation, then the way that the plan names.

The forward, for query row t, key s, with Z the dropout factors (0 or 1 / (1 - rate)):

    x_ts = scale <q_t, k_s>,   c_ts = soft_cap(x_ts) + bias_ts,   logits_ts = score(c_ts, a) (1)
    p_ts = exp(logits_ts - lse_t)   where visible, 0 elsewhere                           (2)
    lse_t = log(sum_s exp(logits_ts) + exp(sink))                                        (3)
    out_t = sum_s Z_ts p_ts v_s                                                          (4)

Given cotangents dout of (4) and dlse of (3), and undoing the forward from its end:

    dv_s      = sum_t Z_ts p_ts dout_t                                  from (4)         (5)
    dp_ts     = Z_ts <dout_t, v_s>                                      from (4)         (6)
    dlogits_ts = p_ts (dp_ts - sum_u p_tu dp_tu) + p_ts dlse_t          from (2), (3)

The sum over u needs no second pass, since sum_u p_tu Z_tu <dout_t, v_u> = <dout_t, out_t>:

    delta_t    = <dout_t, out_t> - dlse_t                                                (7)
    dlogits_ts = p_ts (dp_ts - delta_t)                                                  (8)
    dc_ts, da_ts = dlogits_ts d score / d (c_ts, a)                     from (1)        (8a)
    dbias = dc, and da, summed over broadcast axes
    dsink      = - sum_t exp(sink - lse_t) delta_t                      from (3)         (9)
    dx_ts      = dc_ts (1 - (soft_cap(x_ts) / cap)^2)                   from (1)        (10)
    dq_t = scale sum_s dx_ts k_s,   dk_s = scale sum_t dx_ts q_t        from (1)        (11)

score is the caller's `score_mod` of arrays a, `mod_args`; without it c is the logits and (8a) is void. Its
derivative is JAX's, of the function alone, tile by tile.

p is recomputed from lse tile by tile, so nothing of size T x S is kept. A tile is held transposed,
`[..., K, S, G, T]`: then (5) and (11) for dk are plain matrix products, and a tile of dq is formed as its
transpose, k^T dx^T, for the same reason (on a CPU a product that contracts the major axis of both
factors takes 2.3 times as long).

References:
  Dao, FlashAttention-2, 2023, arXiv:2307.08691, section 3.1, Algorithm 2: (5) to (8), (11).
"""

from functools import partial
from typing import Any

import jax
from jax import lax

from jax_attn_bwd._core import split, trees
from jax_attn_bwd._core.numerics import accumulator_dtype
from jax_attn_bwd._core.sharding import full_like_operands, match_type
from jax_attn_bwd.ops.dot_product import devices, layout, row_terms
from jax_attn_bwd.ops.dot_product.clean_operands import with_whole_keys
from jax_attn_bwd.ops.dot_product.forward import PASSES, in_slices
from jax_attn_bwd.ops.dot_product.plan import Materialized, Plan
from jax_attn_bwd.ops.dot_product.spec import DotProductAttentionGrads, Operands, Residuals, Result


@partial(jax.jit, static_argnums=0)
def backward(
    plan: Plan, residuals: Residuals, dout: jax.Array | None, dlse: jax.Array | None
) -> DotProductAttentionGrads:
    """Computes the gradients of the operands in `residuals.wanted`; a cotangent that is None is zero."""
    given, result, wanted = residuals
    operands, rows = with_whole_keys(given), (result, dout, dlse)
    schedule = plan.schedule
    run = partial(PASSES[type(schedule)].backward, plan, schedule, wanted)
    if wanted.names == {"sink"} and not (isinstance(schedule, Materialized) and wanted.alone):
        run = partial(_of_sink_alone, plan)

    # At once, in pieces of the queries, or in slices of the batch, which add up what the batch shares.
    if plan.pieces is not None:
        grads = devices.gradients(plan, run, operands, wanted.names, rows)()
    elif plan.batch_slices > 1:
        step, indices = in_slices(plan, run, operands, *rows)
        sums, found = lax.scan(
            step, _zeros_like(operands, wanted.names - operands.arrays_with_batch(), rows), indices
        )
        grads = split.joined(found) | sums
    else:
        grads = run(operands, *rows)

    # In the types of the operands.
    like = lambda name: trees.floats(getattr(given, name))
    return DotProductAttentionGrads(
        **{name: jax.tree.map(match_type, grad, like(name)) for name, grad in grads.items()}
    )


def _zeros_like(operands: Operands, names: frozenset[str], rows: Any) -> dict[str, Any]:
    """Returns zeros of the shapes of these operands, in the accumulator's dtype."""
    dtype = accumulator_dtype(operands.query.dtype)
    zero = lambda x: full_like_operands(x, x.shape, 0, dtype, (operands, rows))
    return {n: jax.tree.map(zero, trees.floats(getattr(operands, n))) for n in sorted(names)}


def _of_sink_alone(plan: Plan, operands: Operands, result: Result, dout: Any, dlse: Any) -> dict[str, Any]:
    """Computes the gradient of the sink, which needs the rows alone."""
    _, delta = row_terms.of_backward(plan.options, operands, result, dout, dlse)
    return {"sink": row_terms.gradient_of_sink(operands.sink, result, layout.merge_rows(delta))}
